// The same products in MIRROR's order, on any GPU: chain l of 32 runs over k = 16 l ... 16 l + 15, then the sixteen 512
// further on, and so on, each product by fma; the chains are added up from l = 0. Where scales stand for stretches of k,
// each stretch is such a sum. Sixteen int8 products stay exact in float32 and are added up as integers.
#pragma once
#include "fp8_tiles.cuh"

#define SIDE 64    // elements of a tile each way, for 16 x 16 threads with 4 x 4 elements each
#define PIECE 16
#define CHAINS 32

VT_FN float value_of(unsigned code, float) {
    unsigned exponent = code >> 3 & 15u, digits = code & 7u;
    float size = exponent ? vt_float((int)((exponent + 120u) << 23 | digits << 20)) : (float)digits * 0.001953125f;
    if ((code & 0x7fu) == 0x7fu) size = VT_NAN;
    return code & 0x80u ? -size : size;
}
VT_FN float value_of(unsigned code, int) { return (float)(signed char)code; }

// Four neighbouring codes of a row from k on, as values; zeros beyond `limit`.
template <class CODE> VT_FN void fetch_four(float (&x)[4], const u8* row, i64 k, i64 limit, bool words) {
    unsigned codes = 0;
    if (words) {
        if (k < limit) codes = *(const unsigned*)(row + k);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (k + i < limit) codes |= (unsigned)row[k + i] << 8 * i;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = k + i < limit ? value_of(codes >> 8 * i & 0xffu, CODE()) : 0.0f;
}

// CODE: float for e4m3, int for int8. JOB as for `multiply_loaded`, and: words (rows may be read four codes at a time), width (of a stretch of k),
// join_one(total, dot, tile, token, column, stretch).
template <class CODE, class SUM, class JOB> VT_FN void multiply_exactly(const JOB& job) {
    VT_SHARED(memory);
    float(*left)[SIDE + 4] = (float(*)[SIDE + 4])memory;
    float(*right)[SIDE + 4] = left + PIECE;
    SUM* results = (SUM*)memory;
    int thread = (int)threadIdx.x, x = thread & 15, y = thread >> 4, line = thread >> 2, four = 4 * (thread & 3);
    for (i64 number = blockIdx.x; number < job.template tiles<SIDE, SIDE>(); number += job.grid) {
        Tile tile = job.template tile<SIDE, SIDE>(number);
        SUM total[4][4] = {};
        const u8* row_a = tile.a + (line < tile.tokens ? line : 0) * job.a_stride;
        const u8* row_b = tile.b + (line < tile.columns ? line : 0) * job.b_stride;
        for (i64 start = 0; start < job.depth && tile.expert >= 0; start += job.width) {
            i64 limit = start + job.width < job.depth ? start + job.width : job.depth;
            SUM dot[4][4] = {};
            for (int chain = 0; chain < CHAINS && start + chain * PIECE < limit; ++chain) {
                float sum[4][4] = {};
                for (i64 k = start + chain * PIECE; k < limit; k += CHAINS * PIECE) {
                    float a[4], b[4];
                    fetch_four<CODE>(a, row_a, k + four, limit, job.words);
                    fetch_four<CODE>(b, row_b, k + four, limit, job.words);
                    __syncthreads();
#pragma unroll
                    for (int i = 0; i < 4; ++i) left[four + i][line] = a[i], right[four + i][line] = b[i];
                    __syncthreads();
#pragma unroll
                    for (int step = 0; step < PIECE; ++step)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
#pragma unroll
                            for (int j = 0; j < 4; ++j)
                                sum[i][j] = vt_fma(left[step][y + 16 * i], right[step][x + 16 * j], sum[i][j]);
                    if constexpr (JOB::EXACT)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
#pragma unroll
                            for (int j = 0; j < 4; ++j) dot[i][j] += (SUM)sum[i][j], sum[i][j] = 0.0f;
                }
                if constexpr (!JOB::EXACT)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int j = 0; j < 4; ++j) dot[i][j] += sum[i][j];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (y + 16 * i < tile.tokens && x + 16 * j < tile.columns)
                        total[i][j] = job.join_one(total[i][j], dot[i][j], tile, y + 16 * i, x + 16 * j, start);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) results[(y + 16 * i) * (SIDE + 4) + x + 16 * j] = total[i][j];
        __syncthreads();
        job.write(tile, (const SUM*)results, SIDE + 4, SIDE, thread, 256);
        __syncthreads();
    }
}
