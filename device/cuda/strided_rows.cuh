// Rows of 16-bit activations in the order in which products with codes along K take them.
#pragma once
#include "packed_words.cuh"

// Of 128 k, the eight from 32 t + 8 s on, t = 0 ... 3, are the pairs (i, i + 4) of lanes t, in instructions i / 2 of step s.
// A thread has one step of 128 k of a row.
VT_FN void strided_rows(i64 count, const uint4* x, uint4* out) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    const uint4* from = x + at / 4 * 16 + at % 4;
    uint4 low[4];
    unsigned pairs[4][4];
#pragma unroll
    for (int t = 0; t < 4; ++t) low[t] = from[4 * t];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        pairs[0][t] = pick<0x5410>(low[t].x, low[t].z), pairs[1][t] = pick<0x7632>(low[t].x, low[t].z);
        pairs[2][t] = pick<0x5410>(low[t].y, low[t].w), pairs[3][t] = pick<0x7632>(low[t].y, low[t].w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out[at * 4 + i] = uint4{pairs[i][0], pairs[i][1], pairs[i][2], pairs[i][3]};
}
