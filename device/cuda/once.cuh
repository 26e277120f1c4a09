// Loads of what is read once: their lines leave the caches first.
#pragma once
#include "storage.cuh"

#ifdef __CUDACC__
template <class T> VT_FN T load_once(const T* p) { return __ldcs(p); }
#else
template <class T> T load_once(const T* p) { return *p; }
#endif
