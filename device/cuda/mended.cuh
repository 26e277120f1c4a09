// What threads that hold D vectors of eight bfloat16 have in common: values that were guessed are put right among the
// registers, and lanes find what D groups of numbers have, for each other.
#pragma once
#include "fp8_scales.cuh"
#include "silu_guess.cuh"

// For each bit n of `left`: element n & 7 of vector n >> 3 is exact(n), rounded. One loop for all, so that what takes long
// stands in the code once.
template <int D, class E> VT_FN void mend(uint4 (&made)[D], unsigned left, E&& exact) {
#pragma unroll 1
    for (; left; left &= left - 1) {
        int n = lowest_bit(left);
        unsigned bits = narrow_bf16(exact(n), 0.0f) & 0xffffu;
        unsigned kept = n & 1 ? 0x0000ffffu : 0xffff0000u, placed = n & 1 ? bits << 16 : bits;
#pragma unroll
        for (int d = 0; d < D; ++d) {
            if (n >> 1 == 4 * d) made[d].x = (made[d].x & kept) | placed;
            if (n >> 1 == 4 * d + 1) made[d].y = (made[d].y & kept) | placed;
            if (n >> 1 == 4 * d + 2) made[d].z = (made[d].z & kept) | placed;
            if (n >> 1 == 4 * d + 3) made[d].w = (made[d].w & kept) | placed;
        }
    }
}

// The largest of D groups' numbers, which `lanes` >= D neighbours hold parts of: to each lane that of group `own`.
template <int D> VT_FN float own_largest(float (&top)[D], int own, int lanes) {
    int m = 1;
#pragma unroll
    for (int held = D; held > 1; held >>= 1, m <<= 1)
#pragma unroll
        for (int d = 0; d < held / 2; ++d) {
            const bool second = own & m;
            float mine = second ? top[2 * d + 1] : top[2 * d], sent = second ? top[2 * d] : top[2 * d + 1];
            top[d] = fmaxf(mine, __shfl_xor_sync(FULL_WARP, sent, m));
        }
    for (; m < lanes; m <<= 1) top[0] = fmaxf(top[0], __shfl_xor_sync(FULL_WARP, top[0], m));
    return top[0];
}
