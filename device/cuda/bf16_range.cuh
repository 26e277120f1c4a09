// The largest and the least of bfloat16, two numbers in a word: NaN are passed over.
#pragma once
#include "storage.cuh"

#define NO_RANGE 0xff80ff80u  // -inf, -inf

// The larger of two bfloat16, in either half of a word.
VT_FN unsigned larger_signed_pair(unsigned a, unsigned b) {
#ifdef __CUDACC__
    unsigned c;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
#else
    auto one = [](unsigned a, unsigned b) {
        float x = widen_bf16(a), y = widen_bf16(b);
        return x != x ? b : y != y || x > y ? a : b;
    };
    return one(a & 0xffffu, b & 0xffffu) | one(a >> 16, b >> 16) << 16;
#endif
}

// The largest element in the low half, the least one's opposite in the high half.
VT_FN unsigned range_of(const uint4& w) {
    unsigned high = larger_signed_pair(larger_signed_pair(w.x, w.y), larger_signed_pair(w.z, w.w));
    unsigned low = larger_signed_pair(larger_signed_pair(w.x ^ 0x80008000u, w.y ^ 0x80008000u),
                                      larger_signed_pair(w.z ^ 0x80008000u, w.w ^ 0x80008000u));
    return larger_signed_pair((high & 0xffffu) | low << 16, high >> 16 | (low & 0xffff0000u));
}

VT_FN unsigned range_of_lanes(unsigned range, int lanes) {
    for (int m = lanes >> 1; m >= 1; m >>= 1)
        range = larger_signed_pair(range, __shfl_xor_sync(0xffffffffu, range, m));
    return range;
}
