// block_butterfly(256, vector=8, across=tree), the order of every statistic over a row. Partial t of 256 is
// x[8t] + ... + x[8t + 7], then the eight elements 2048 further on, and so on; in each warp of partials p[l] += p[l ^ m]
// for m = 16 ... 1; then over the eight warps the same for m = 4, 2, 1.
//
// A float32 sum of two does not depend on their order, so all forms below give the same bits, to every thread. Partials
// that nothing was added to are +0, which changes no sum of +0-started ones: narrow rows may leave them out.
#pragma once
#include "storage.cuh"

#define VT_ALL_LANES 0xffffffffu
#define TREE_SPAN 2048  // elements that the 256 partials take at a time

VT_FN float other_lane(float x, int distance) { return __shfl_xor_sync(VT_ALL_LANES, x, distance); }

// A lane's eight neighbours, added to its partial one by one.
VT_FN void add_terms(float& partial, const float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) partial += x[j];
}
VT_FN void add_squares(float& partial, const float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) partial += x[j] * x[j];
}

// `lanes` (1, 2, 4 ... 32) neighbouring lanes hold the partials of a row of up to 8 * lanes elements.
VT_FN float tree_of_lanes(float partial, int lanes) {
    for (int m = lanes >> 1; m >= 1; m >>= 1) partial += other_lane(partial, m);
    return partial;
}

VT_FN float tree_of_eight(const float (&s)[8]) {
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

// Thread t of a block of whole warps, at most 256 threads, holds partial t. `warps`: 8 floats of shared memory that no
// other sum of this kernel uses. Every thread of the block must come here.
VT_FN float tree_of_block(float partial, float* warps) {
    partial = tree_of_lanes(partial, 32);
    int count = blockDim.x >> 5;
    if (count == 1) return partial;
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = partial;
    __syncthreads();
    float s[8];
#pragma unroll
    for (int w = 0; w < 8; ++w) s[w] = w < count ? warps[w] : 0.0f;
    return tree_of_eight(s);
}

// One warp holds all 256: lane l partial l + 32 * w in p[w].
VT_FN float tree_of_warp(const float (&p)[8]) {
    float s[8];
#pragma unroll
    for (int w = 0; w < 8; ++w) s[w] = tree_of_lanes(p[w], 32);
    return tree_of_eight(s);
}

// total / count; by a power of two, what most heads' widths are, a product gives the same and takes a tenth of the time.
VT_FN float mean_of(float total, float count) {
    int bits = vt_bits(count);
    return (bits & 0x7fffff) == 0 ? total * vt_float(0x7f000000 - bits) : total / count;
}

// 1 / sqrt(total / count + eps), or of the total itself for count = 0; every step rounds.
VT_FN float inverse_root(float total, float count, float eps) {
    return 1.0f / sqrtf((count > 0.0f ? mean_of(total, count) : total) + eps);
}
