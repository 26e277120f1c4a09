// The states between chunks. A block a sequence, head and 64 rows of S, 16 for each of its warps, whose S stays in
// registers as the sums of a product from the first chunk to the last: rounded, it is at once the left operand of
// v_new^T = u^T - h w^T, whose sums, rounded, are what is stored and the left operand of S += v_new^T kg, S decayed
// channel by channel before. The next chunks' w, kg and u are on their way meanwhile, into a ring of stages.
#pragma once
#include "gdn_tiles.cuh"

#define TOP 64                       // rows of S a block
#define OWN (TOP / 8)                // vectors of them in a row of u
#define STAGE (2 * TILE + TILE / 2)  // w, kg, and these columns of u

struct Steps {
    const unsigned char *kg, *w, *u;
    const float* sums;  // of the sequence's tokens, or of its chunks' last ones
    unsigned char* ring;
    float* keeps;  // [2][WIDTH]: 2^gc_last, of this chunk and of the next
    i64 step;
    int chunks, length, stages;
    bool last_ones;

    VT_MEMBER int rows(int c) const { return length - c * SIZE < SIZE ? length - c * SIZE : SIZE; }
    VT_MEMBER unsigned char* stage(int c) const { return ring + c % stages * STAGE; }

    VT_MEMBER void send(int c) const {
        if (c < chunks) {
            i64 from = (i64)c * SIZE * step * 2;
            send_rows<ROW>(stage(c), w + from, step, rows(c));
            send_rows<ROW>(stage(c) + TILE, kg + from, step, rows(c));
            send_rows<OWN>(stage(c) + 2 * TILE, u + from, step, rows(c));
        }
        copies_close();
    }

    VT_MEMBER float ask(int c) const {
        if (c >= chunks) return 0.0f;
        return sums[(last_ones ? (i64)c : (i64)c * SIZE + rows(c) - 1) * step + threadIdx.x];
    }
    VT_MEMBER void put(int c, float sum) const { keeps[(c & 1) * WIDTH + threadIdx.x] = fast_exp2(sum); }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    kda_delta_h_bf16(i64 heads, const void* kg, const void* w, const void* u, const float* sums, i64 last_ones,
                     float* state, const int* starts, const int* before, i64 sequences, i64 stages, void* h,
                     void* v_new) {
    VT_SHARED(shared);
    const Chunks chunks = {starts, before, (int)sequences, SIZE};
    int tile = blockIdx.x % (WIDTH / TOP), at = blockIdx.x / (WIDTH / TOP), head = at % (int)heads, n = at / (int)heads;
    int lane = lane_of(), warp = warp_of(), own = warp * 2;  // the first vector of the warp's columns of u
    int v0 = tile * TOP, row = lane >> 2, column = (lane & 3) * 2;
    i64 first = (i64)chunks.begin(n), offset = (first * heads + head) * WIDTH;
    const Steps steps = {(const unsigned char*)kg + offset * 2, (const unsigned char*)w + offset * 2,
                         (const unsigned char*)u + (offset + v0) * 2,
                         sums + ((last_ones ? (i64)chunks.place(n) : first) * heads + head) * WIDTH, shared,
                         (float*)(shared + stages * STAGE + TOP * ROW * 16), heads * WIDTH, chunks.count(n),
                         chunks.length(n), (int)stages, last_ones != 0};
    if (steps.chunks == 0) return;
    unsigned char* staged = shared + stages * STAGE + warp * 16 * ROW * 16;  // the warp's rows of h
    float next = steps.ask(0);
    for (int c = 0; c < stages - 1; ++c) steps.send(c);

    float S[16][4];
    float* kept = state + (((i64)n * heads + head) * WIDTH + v0 + 16 * warp + row) * WIDTH + column;
#pragma unroll
    for (int d = 0; d < 16; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) S[d][i] = kept[(i >> 1) * 8 * WIDTH + d * 8 + (i & 1)];
    steps.put(0, next);

    for (int c = 0; c < steps.chunks; ++c) {
        if (stages > 2) copies_wait<1>();
        else copies_wait<0>();
        __syncthreads();
        steps.send(c + (int)stages - 1);
        next = steps.ask(c + 1);
        const unsigned char *w_tile = steps.stage(c), *k_tile = w_tile + TILE;
        unsigned char* u_tile = steps.stage(c) + 2 * TILE;

        unsigned left[8][4];  // S, then what is written, as the left operand
#pragma unroll
        for (int d = 0; d < 8; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float(&x)[4] = S[2 * d + (i >> 1)];
                left[d][i] = pair<BF16>(x[2 * (i & 1)], x[2 * (i & 1) + 1]);
                put_pair<ROW>(staged, row + 8 * (i & 1), 2 * d + (i >> 1), left[d][i]);
            }
        float sum[8][4] = {};
#pragma unroll
        for (int d = 0; d < 8; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned b[4];
                fetch_matrices(b, flat<ROW>(w_tile, 16 * i, 2 * d));
                multiply<BF16>(sum[2 * i], left[d], b[0], b[1]);
                multiply<BF16>(sum[2 * i + 1], left[d], b[2], b[3]);
            }
        warp_meets();
        i64 place = ((i64)(chunks.place(n) + c) * heads + head) * WIDTH + v0 + 16 * warp;
        write_rows<ROW, ROW, 16>((char*)h + place * WIDTH * 2, WIDTH, staged, 0, 16, 0);

        unsigned from[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int there = swizzled<OWN>(16 * i + (lane >> 4) * 8 + (lane & 7), own + (lane >> 3 & 1));
            fetch_transposed(from[i], u_tile + there);
        }
        warp_meets();
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // tokens 16 i + 8 (j / 2) + column, rows g and g + 8 of S for j even and odd
                const float(&x)[4] = sum[2 * i + (j >> 1)];
                float low = widen_bf16(from[i][j] & 0xffffu) - x[2 * (j & 1)];
                float high = widen_bf16(from[i][j] >> 16) - x[2 * (j & 1) + 1];
                left[i][j] = pair<BF16>(low, high);
                put_pair<OWN>(u_tile, 16 * i + 8 * (j >> 1) + row, own + (j & 1), transposed(left[i][j]));
            }
        const float* keep = steps.keeps + (c & 1) * WIDTH + column;
#pragma unroll
        for (int d = 0; d < 16; ++d)
#pragma unroll
            for (int i = 0; i < 4; ++i) S[d][i] *= keep[8 * d + (i & 1)];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int d = 0; d < 8; ++d) {
                unsigned b[4];
                fetch_transposed(b, tall<ROW>(k_tile, 16 * i, 2 * d));
                multiply<BF16>(S[2 * d], left[i], b[0], b[1]);
                multiply<BF16>(S[2 * d + 1], left[i], b[2], b[3]);
            }
        warp_meets();
        char* to = (char*)v_new + (offset + v0 + (i64)c * SIZE * heads * WIDTH) * 2;
        write_rows<OWN, 2, SIZE>(to, heads * WIDTH, u_tile, 0, steps.rows(c), own);
        steps.put(c + 1, next);
    }
#pragma unroll
    for (int d = 0; d < 16; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) kept[(i >> 1) * 8 * WIDTH + d * 8 + (i & 1)] = S[d][i];
}
