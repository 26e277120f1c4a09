// One lane of a warp whose lanes all come here, such that the compiler knows that it is one: what only that lane asks of the
// copy engine needs no loop over lanes.
#pragma once
#include "storage.cuh"

#ifdef __CUDACC__
VT_FN bool one_of_warp() {
    unsigned is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is));
    return is != 0;
}
#else
static inline bool one_of_warp() { return (threadIdx.x & 31) == 0; }
#endif
