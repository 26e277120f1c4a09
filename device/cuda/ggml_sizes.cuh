// The largest of activations' sizes, and the divisions that follow from it, exact in few steps: sizes of the middle were
// tried with every mantissa.
#pragma once
#include "fast.cuh"

// The larger of either half.
VT_FN unsigned larger_halves(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    unsigned c;
    asm("max.u16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
#else
    const unsigned low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu, high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
    return low | high << 16;
#endif
}

VT_FN unsigned larger_of(unsigned a, unsigned b) { return a > b ? a : b; }

// From 2^-90 to 2^90.
VT_FN bool of_the_middle(unsigned size) { return size - 0x12800000u < 0x5a000000u; }
VT_FN float near_reciprocal(float x) {
    const float near = fast_reciprocal(x);
    return vt_fma(near, -vt_fma(x, near, -1.0f), near);
}
VT_FN float over_127(float size) {
    const float back = vt_float(0x3c010204), near = size * back;
    return vt_fma(-vt_fma(near, 127.0f, -size), back, near);
}
VT_FN float of_127(float size) {
    const float back = near_reciprocal(size), near = 127.0f * back;
    return vt_fma(vt_fma(-near, size, 127.0f), back, near);
}
