// What a kernel makes of its parameters alone, found before it waits for others (early.cuh): a compiler would put it off
// until it is used.
#pragma once
#include "early.cuh"

#ifdef __CUDACC__
template <class T> VT_FN void found(T*& pointer) { asm volatile("" : "+l"(pointer)); }
VT_FN void found(unsigned& number) { asm volatile("" : "+r"(number)); }
#else
template <class T> VT_FN void found(T*&) {}
VT_FN void found(unsigned&) {}
#endif
