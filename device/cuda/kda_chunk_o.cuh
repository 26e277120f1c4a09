// The outputs of a chunk: out = qg h^T + P v_new, of queries that are scaled, decayed and rounded already, and of
// rounded weights. A block a chunk and head, 16 tokens a warp.
#pragma once
#include "gdn_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    kda_chunk_o_bf16(i64 heads, const void* qg, const void* P, const void* v_new, const void* h, const int* starts,
                     const int* before, i64 sequences, void* out) {
    VT_SHARED(shared);
    unsigned char *queries = shared, *states = queries + TILE, *values = states + 2 * TILE, *weights = values + TILE;
    const Chunks chunks = {starts, before, (int)sequences, SIZE};
    int number = (int)(blockIdx.x / heads), head = (int)(blockIdx.x % heads);
    const Piece piece = chunks.at(number);
    if (piece.length <= 0) return;
    int lane = lane_of(), warp = warp_of(), row = 16 * warp + (lane >> 2);
    i64 first = (i64)piece.first * heads + head;
    send_rows<ROW>(queries, (const char*)qg + first * WIDTH * 2, heads * WIDTH, piece.length);
    send_rows<ROW, WIDTH>(states, (const char*)h + ((i64)number * heads + head) * WIDTH * WIDTH * 2, WIDTH, WIDTH);
    copies_close();
    send_rows<ROW>(values, (const char*)v_new + first * WIDTH * 2, heads * WIDTH, piece.length);
    send_rows<SIZE / 8>(weights, (const char*)P + first * SIZE * 2, heads * SIZE, piece.length);
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
    copies_wait<0>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (j > warp) continue;
        unsigned a[4];
        fetch_matrices(a, tall<SIZE / 8>(weights, 16 * warp, 2 * j));
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
            put_pair<ROW>(queries, row + 8 * half, n, pair<BF16>(sum[n][2 * half], sum[n][2 * half + 1]));
    warp_meets();
    write_rows<ROW, ROW, 16>((char*)out + first * WIDTH * 2, heads * WIDTH, queries, 16 * warp, piece.length, 0);
}

// A vector of qg = round(round(q scale) 2^gc), or of P = round(Aqk) without what is above the diagonal, a thread.
extern "C" __global__ void __launch_bounds__(THREADS)
    kda_chunk_weights(i64 rows, i64 heads, const void* q, const float* gc, const float* Aqk, const int* starts,
                      i64 sequences, float scale, void* qg, void* P) {
    constexpr int EACH = (WIDTH + SIZE) / 8;
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x, row = at / EACH;
    int v = (int)(at % EACH) * 8;
    if (row >= rows) return;
    float x[8];
    if (v < WIDTH) {
        float sums[8];
        load(x, q, row * WIDTH + v, BF16);
        load(sums, gc, row * WIDTH + v, F32);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = through(x[j] * scale, BF16) * exp2_of(sums[j]);
        store(qg, row * WIDTH + v, x, BF16);
        return;
    }
    v -= WIDTH;
    const Chunks chunks = {starts, nullptr, (int)sequences, SIZE};
    int t = (int)(row / heads), i = t - chunks.of_token(t).first;
    load(x, Aqk, row * SIZE + v, F32);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = v + j <= i ? x[j] : 0.0f;
    store(P, row * SIZE + v, x, BF16);
}
