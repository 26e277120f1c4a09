// strided_tree(256): partial t = x[t] + x[t + 256] + ..., then p[t] += p[t + s] for s = 128 ... 1. Whoever holds the
// partials, each pair is added once and a float32 sum of two does not depend on their order, so all forms below give
// the same bits, to every thread. A partial that nothing was added to is +0, which changes no sum of +0-started ones.
#pragma once
#include "storage.cuh"

#define VT_ALL_LANES 0xffffffffu

VT_FN float other_lane(float x, int distance) { return __shfl_xor_sync(VT_ALL_LANES, x, distance); }

// `lanes` neighbouring lanes (32, 16 or 8) hold the partials 8 * lane ... 8 * lane + 7; with fewer lanes the missing
// ones are +0. While eight sums a lane are left, a lane and its partner split them: 12 exchanges instead of 40.
VT_FN float tree_of_neighbours(float (&p)[8], int lanes) {
    int lane = threadIdx.x & 31, half = lanes >> 1;
    bool upper = lane & half;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float sent = upper ? p[j] : p[j + 4];
        p[j] = (upper ? p[j + 4] : p[j]) + other_lane(sent, half);
    }
    upper = lane & (half >> 1);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        float sent = upper ? p[j] : p[j + 2];
        p[j] = (upper ? p[j + 2] : p[j]) + other_lane(sent, half >> 1);
    }
    upper = lane & (half >> 2);
    float sent = upper ? p[0] : p[1];
    float total = (upper ? p[1] : p[0]) + other_lane(sent, half >> 2);
    for (int m = half >> 3; m >= 1; m >>= 1) total += other_lane(total, m);
    total += other_lane(total, half);
    total += other_lane(total, half >> 1);
    return total + other_lane(total, half >> 2);
}

// A warp holds the partials lane + 32 * k.
VT_FN float tree_of_strided(float (&p)[8]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) p[k] += p[k + 4];
    p[0] += p[2];
    p[1] += p[3];
    float total = p[0] + p[1];
#pragma unroll
    for (int m = 16; m >= 1; m >>= 1) total += other_lane(total, m);
    return total;
}

// 256 partials in shared memory, complete for all warps of the block: every warp adds them up for itself.
VT_FN float tree_of_shared(const float* partials) {
    float p[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) p[k] = partials[(threadIdx.x & 31) + 32 * k];
    return tree_of_strided(p);
}

// 1 / sqrt(total / count + eps), or of the total itself for count = 0; every step rounds.
VT_FN float inverse_root(float total, float count, float eps) {
    return 1.0f / sqrtf((count > 0.0f ? total / count : total) + eps);
}
