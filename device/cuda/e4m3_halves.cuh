// Codes of e4m3 as what they mean, by way of float16, which holds every one of them.
#pragma once
#include "fp4.cuh"

// Two codes as two float16.
VT_FN unsigned e4m3_halves(unsigned codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)codes));
    return halves;
#else
    return narrow_f16(e4m3_value(codes & 0xffu), e4m3_value(codes >> 8 & 0xffu));
#endif
}

// Four codes.
VT_FN void e4m3_values(float* v, unsigned word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const unsigned halves = e4m3_halves(word >> 16 * j);
        v[2 * j] = widen_f16(halves & 0xffffu);
        v[2 * j + 1] = widen_f16(halves >> 16);
    }
#else
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = e4m3_value(word >> 8 * j & 0xffu);
#endif
}
