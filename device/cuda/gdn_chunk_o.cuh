// The outputs of a chunk: out = scale (exp(gc) q h^T + P v_new), P = (q k^T) exp(gc_i - gc_j) for j <= i. A block a
// chunk and value head, 16 tokens a warp; the scores' sums, rounded, are the left operand of P v_new.
#pragma once
#include "gdn_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    gdn_chunk_o_bf16(i64 heads, i64 k_heads, const void* q, const void* k, const void* v_new,
                     const void* h, const float* gc, const int* starts, const int* before, i64 sequences, float scale,
                     void* out) {
    VT_SHARED(shared);
    unsigned char *queries = shared, *keys = queries + TILE, *states = keys + TILE, *values = keys;  // one after the other
    float* sums = (float*)(states + 2 * TILE);
    const Chunks chunks = {starts, before, (int)sequences, SIZE};
    int number = (int)(blockIdx.x / heads), head = (int)(blockIdx.x % heads), k_head = head / (int)(heads / k_heads);
    const Piece piece = chunks.at(number);
    if (piece.length <= 0) return;
    int lane = lane_of(), warp = warp_of(), row = lane >> 2, column = (lane & 3) * 2;
    i64 first = (i64)piece.first * heads + head, k_first = (i64)piece.first * k_heads + k_head;
    send_rows<ROW>(queries, (const char*)q + k_first * WIDTH * 2, k_heads * WIDTH, piece.length);
    send_rows<ROW>(keys, (const char*)k + k_first * WIDTH * 2, k_heads * WIDTH, piece.length);
    copies_close();
    const char* own = (const char*)h + ((i64)number * heads + head) * WIDTH * WIDTH * 2;
    send_rows<ROW, WIDTH>(states, own, WIDTH, WIDTH);
    copies_close();
    int token = threadIdx.x;
    if (token < SIZE) sums[token] = token < piece.length ? gc[first + token * heads] : 0.0f;
    copies_wait<1>();
    __syncthreads();

    float scores[8][4] = {};
#pragma unroll
    for (int d = 0; d < 8; ++d) {
        unsigned a[4];
        fetch_matrices(a, tall<ROW>(queries, 16 * warp, 2 * d));
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (n > warp) continue;
            unsigned b[4];
            fetch_matrices(b, flat<ROW>(keys, 16 * n, 2 * d));
            multiply<BF16>(scores[2 * n], a, b[0], b[1]);
            multiply<BF16>(scores[2 * n + 1], a, b[2], b[3]);
        }
    }
    int i0 = 16 * warp + row;
    float s[2] = {sums[i0], sums[i0 + 8]};
    unsigned p[8][2];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int i = i0 + 8 * half, j = 8 * n + column + e;
                x[e] = j <= i ? scores[n][2 * half + e] * faded(s[half] - sums[j]) : 0.0f;
            }
            p[n][half] = pair<BF16>(x[0], x[1]);
        }
    __syncthreads();
    send_rows<ROW>(values, (const char*)v_new + first * WIDTH * 2, heads * WIDTH, piece.length);
    copies_close();
    copies_wait<1>();
    __syncthreads();

    float sum[16][4] = {};
#pragma unroll
    for (int d = 0; d < 8; ++d) {
        unsigned a[4];
        fetch_matrices(a, tall<ROW>(queries, 16 * warp, 2 * d));
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            unsigned b[4];
            fetch_matrices(b, flat<ROW>(states, 16 * n, 2 * d));
            multiply<BF16>(sum[2 * n], a, b[0], b[1]);
            multiply<BF16>(sum[2 * n + 1], a, b[2], b[3]);
        }
    }
    float decay[2] = {faded(s[0]), faded(s[1])};
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][i] *= decay[i >> 1];
    copies_wait<0>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (j > warp) continue;
        const unsigned a[4] = {p[2 * j][0], p[2 * j][1], p[2 * j + 1][0], p[2 * j + 1][1]};
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            unsigned b[4];
            fetch_transposed(b, tall<ROW>(values, 16 * j, 2 * n));
            multiply<BF16>(sum[2 * n], a, b[0], b[1]);
            multiply<BF16>(sum[2 * n + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            put_pair<ROW>(queries, i0 + 8 * half, n,
                          pair<BF16>(sum[n][2 * half] * scale, sum[n][2 * half + 1] * scale));
    warp_meets();
    write_rows<ROW, ROW, 16>((char*)out + first * WIDTH * 2, heads * WIDTH, queries, 16 * warp, piece.length, 0);
}
