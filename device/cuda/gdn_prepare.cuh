// What a chunk needs before the states are known, in one go: running sums of g, A = beta K K^T with its decays, X =
// (I + A)^-1, and the factors w = X (beta exp(gc) k) and u = X (beta v). A block a chunk and value head, four warps.
//
// A and X are float32 in two bfloat16 halves each, of which three products are taken: 2^-16 of what is summed up. The
// inverse: blocks of 16 on the diagonal by substitution, a warp each; then -X_b A X_a for the block of 16 below two of
// them, and for that of 32.
#pragma once
#include "gdn_tiles.cuh"

#define HALF (SIZE * SIZE * 2)  // bytes of a chunk's square matrix

struct Square {
    unsigned char *high, *low;

    VT_MEMBER void put(int row, int n, float x, float y) const {
        unsigned h, l;
        split(h, l, x, y);
        put_pair<8>(high, row, n, h);
        put_pair<8>(low, row, n, l);
    }
    VT_MEMBER void put_one(int row, int column, float x, bool of_low) const {
        int at = swizzled<8>(row, column >> 3) + (column & 7) * 2;
        float top = through(x, BF16);
        unsigned bits = narrow_bf16(of_low ? x - top : x, 0.0f);
        *(unsigned short*)((of_low ? low : high) + at) = (unsigned short)bits;
    }
};

// c += a (b + b_low), a a block of 16 of `matrix`.
VT_FN void multiply_split(float (&c)[4], const Square& matrix, int row, int column, const unsigned (&b)[4]) {
    unsigned high[4], low[4];
    fetch_matrices(high, tall<8>(matrix.high, row, column / 8));
    fetch_matrices(low, tall<8>(matrix.low, row, column / 8));
    multiply<BF16>(c, high, b[0], b[1]);
    multiply<BF16>(c, high, b[2], b[3]);
    multiply<BF16>(c, low, b[0], b[1]);
}

// X[r0.., c0 + 8 n..] = -X[r0.., r0..] A[r0.., c0..] X[c0.., c0 + 8 n..] for M blocks of 16: eight columns a warp.
template <int M> VT_FN void below(const Square& A, const Square& X, int r0, int c0, int n) {
    int lane = lane_of();
    float part[M][4] = {}, x[M][4] = {};
#pragma unroll
    for (int k = 0; k < M; ++k) {
        if (k < n / 2) continue;  // zeros above the diagonal
        unsigned b[4];
        fetch_transposed(b, (lane & 16 ? X.low : X.high) + swizzled<8>(c0 + 16 * k + (lane & 15), c0 / 8 + n));
#pragma unroll
        for (int m = 0; m < M; ++m) multiply_split(part[m], A, r0 + 16 * m, c0 + 16 * k, b);
    }
#pragma unroll
    for (int k = 0; k < M; ++k) {
        unsigned b[4];
        split(b[0], b[2], part[k][0], part[k][1]);
        split(b[1], b[3], part[k][2], part[k][3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = transposed(b[i]);
#pragma unroll
        for (int m = k; m < M; ++m) multiply_split(x[m], X, r0 + 16 * m, r0 + 16 * k, b);
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            X.put(r0 + 16 * m + 8 * half + (lane >> 2), c0 / 8 + n, -x[m][2 * half], -x[m][2 * half + 1]);
}

// A block of 16 on the diagonal: `turned` is its A, column by column. A lane a column of X, each twice.
VT_FN void invert_block(const float* turned, const Square& X, int first) {
    int lane = lane_of(), column = lane & 15;
    float total[16] = {};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        float x = (j == column ? 1.0f : 0.0f) - total[j];
        X.put_one(first + j, first + column, x, lane >= 16);
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (i > j) total[i] = vt_fma(turned[j * 16 + i], x, total[i]);
    }
}

// Rows of a tile times a factor or two each, rounded.
VT_FN void scale_rows(unsigned char* tile, const float* first, const float* second) {
    int top = threadIdx.x / ROW;
    unsigned char* at = tile + swizzled<ROW>(top, threadIdx.x % ROW);
#pragma unroll
    for (int row = top; row < SIZE; row += THREADS / ROW, at += THREADS * 16) {
        float x[8];
        load(x, at, 0, BF16);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[j] *= first[row];
            if (second != nullptr) x[j] *= second[row];
        }
        store(at, 0, x, BF16);
    }
}

// out = X tile, 32 columns a warp, by way of the tile's own.
VT_FN void times_rows(void* out, i64 step, int rows, const Square& X, unsigned char* tile) {
    int lane = lane_of(), first = warp_of() * 4;
    float sum[4][4][4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        unsigned b[2][4];
        fetch_transposed(b[0], tall<ROW>(tile, 16 * k, first));
        fetch_transposed(b[1], tall<ROW>(tile, 16 * k, first + 2));
#pragma unroll
        for (int m = k; m < 4; ++m) {
            unsigned a[4];
            fetch_matrices(a, tall<8>(X.high, 16 * m, 2 * k));
#pragma unroll
            for (int n = 0; n < 4; ++n) multiply<BF16>(sum[m][n], a, b[n / 2][2 * (n & 1)], b[n / 2][2 * (n & 1) + 1]);
        }
    }
    warp_meets();
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                put_pair<ROW>(tile, 16 * m + 8 * half + (lane >> 2), first + n,
                              pair<BF16>(sum[m][n][2 * half], sum[m][n][2 * half + 1]));
    warp_meets();
    write_rows<ROW, 4, SIZE>(out, step, tile, 0, rows, first);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    gdn_prepare(i64 heads, i64 k_heads, const void* k, const void* v, const float* g,
                const float* beta, const int* starts, i64 sequences, float* gc, void* w, void* u) {
    VT_SHARED(shared);
    unsigned char *keys = shared, *values = keys + TILE, *inverse = values + TILE;
    const Square A = {values, values + HALF}, X = {inverse, inverse + HALF};  // v comes when A has gone
    float *diagonal = (float*)(inverse + 2 * HALF), *sums = diagonal + 4 * 256;
    float *strength = sums + SIZE, *decay = strength + SIZE;
    const Chunks chunks = {starts, nullptr, (int)sequences, SIZE};
    const Piece piece = chunks.at((int)(blockIdx.x / heads));
    if (piece.length <= 0) return;
    int head = (int)(blockIdx.x % heads), k_head = head / (int)(heads / k_heads);
    int thread = threadIdx.x, lane = lane_of(), warp = warp_of(), row = lane >> 2, column = (lane & 3) * 2;
    i64 first = (i64)piece.first * heads + head, k_first = (i64)piece.first * k_heads + k_head;
    send_rows<ROW>(keys, (const char*)k + k_first * WIDTH * 2, k_heads * WIDTH, piece.length);
    copies_close();
    if (thread < SIZE) {
        bool there = thread < piece.length;
        sums[thread] = there ? g[first + thread * heads] : 0.0f;
        strength[thread] = there ? beta[first + thread * heads] : 0.0f;
    }
    __syncthreads();
    if (thread == 0) {
        float total = 0.0f;
#pragma unroll 16
        for (int i = 0; i < SIZE; ++i) sums[i] = total += sums[i];
    }
    copies_wait<0>();
    __syncthreads();
    if (thread < piece.length) gc[first + thread * heads] = sums[thread];
    if (thread < SIZE) decay[thread] = faded(sums[thread]);

    float sum[8][4] = {};
#pragma unroll
    for (int d = 0; d < WIDTH / 16; ++d) {
        unsigned a[4];
        fetch_matrices(a, tall<ROW>(keys, 16 * warp, 2 * d));
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (n > warp) continue;
            unsigned b[4];
            fetch_matrices(b, flat<ROW>(keys, 16 * n, 2 * d));
            multiply<BF16>(sum[2 * n], a, b[0], b[1]);
            multiply<BF16>(sum[2 * n + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        if (n / 2 > warp) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int i = 16 * warp + 8 * half + row, j = 8 * n + column;
            float x[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                x[e] = i > j + e ? sum[n][2 * half + e] * strength[i] * faded(sums[i] - sums[j + e]) : 0.0f;
                if (n / 2 == warp) diagonal[warp * 256 + (j + e - 16 * warp) * 16 + i - 16 * warp] = x[e];
            }
            A.put(i, n, x[0], x[1]);
        }
    }
    __syncthreads();
    invert_block(diagonal + warp * 256, X, 16 * warp);
    scale_rows(keys, strength, decay);
    __syncthreads();
    below<1>(A, X, 16 + 32 * (warp >> 1), 32 * (warp >> 1), warp & 1);
    __syncthreads();
    below<2>(A, X, 32, 0, warp);
    __syncthreads();
    send_rows<ROW>(values, (const char*)v + first * WIDTH * 2, heads * WIDTH, piece.length);
    copies_close();
    times_rows((char*)w + first * WIDTH * 2, heads * WIDTH, piece.length, X, keys);
    copies_wait<0>();
    __syncthreads();
    scale_rows(values, strength, nullptr);
    __syncthreads();
    times_rows((char*)u + first * WIDTH * 2, heads * WIDTH, piece.length, X, values);
}
