// Mamba-2's outputs in chunks on tensor cores: y = exp(a_i) (C S^T) + P x + D x, P = ((C B^T) exp(a_i - a_j)) dt_j for
// j <= i, gated by silu(z). A block 128 tokens of a chunk, a head and 64 of its channels; a warp 32 tokens. B and x come in
// tiles of 64 tokens, two stages of them; C B^T is made anew for each head, whose sums, decayed and rounded, are the left
// operand of P x: to read it would take longer.
//
// Tokens above the diagonal are left out, unless the walk found something that is not finite: 0 times that is NaN.
#pragma once
#include "ssd_walk.cuh"

#define OUT_ROWS 128  // device/ssd_scan.py

#define OUTPUT_PARAMETERS                                                                                        \
    i64 heads, i64 width, i64 groups, i64 length, const void *x, const void *B, const void *C, const float *sums, \
        const float *dts, const void *before, const int *loud, const int *starts, i64 sequences, i64 size,       \
        i64 tokens, const float *D, i64 skip_step, const void *z, void *out
#define OUTPUT_NAMES                                                                                             \
    heads, width, groups, length, x, B, C, sums, dts, before, loud, starts, sequences, size, tokens, D, skip_step, z, out

// The sums' columns 16 b ... 16 b + 15 of 32 rows += (first, second) right, two neighbouring `b` of `multiply`.
template <int KIND, int N>
VT_FN void multiply_pair(float (&sums)[2][N][4], int b, const unsigned (&first)[4], const unsigned (&second)[4],
                         const unsigned (&right)[4]) {
    multiply<KIND>(sums[0][2 * b], first, right[0], right[1]);
    multiply<KIND>(sums[0][2 * b + 1], first, right[2], right[3]);
    multiply<KIND>(sums[1][2 * b], second, right[0], right[1]);
    multiply<KIND>(sums[1][2 * b + 1], second, right[2], right[3]);
}

template <int KIND, int VECTORS> VT_FN void outputs(OUTPUT_PARAMETERS) {
    constexpr int B_TILE = PART * VECTORS * 16, PAIR = B_TILE + PART_TILE;
    VT_SHARED(shared);
    unsigned char *C_tile = shared, *ring = C_tile + OUT_ROWS * VECTORS * 16, *state = ring + PAIR;
    float *a = (float*)(ring + 2 * PAIR), *d = a + (size + OUT_ROWS - 1) / OUT_ROWS * OUT_ROWS;
    const Chunks chunks = {starts, nullptr, (int)sequences, (int)size};
    const int tiles = (int)((size + OUT_ROWS - 1) / OUT_ROWS), tops = (int)(width / PART);
    const int head = (int)(blockIdx.x % heads), rest = (int)(blockIdx.x / heads), top = rest % tops;
    const int tile = tiles - 1 - rest / tops % tiles, number = rest / tops / tiles, group = head / (int)(heads / groups);
    const Piece piece = chunks.at(number);
    const int begin = tile * OUT_ROWS, own_rows = piece.length - begin;
    if (own_rows <= 0) return;
    const int lane = lane_of(), warp = warp_of(), row = lane >> 2, column = (lane & 3) * 2, vectors = (int)length / 8;
    const int r0 = begin + 32 * warp;
    const i64 chunk = (i64)number * heads + head, first = piece.first;
    const int parts = (int)((length + PART - 1) / PART) * WALK_WARPS;
    const int sound = lane < parts ? loud[(chunk * tops + top) * parts + lane] : 0;
    const bool whole = __any_sync(WARP_LANES, sound);
    const int end = whole || begin + OUT_ROWS > piece.length ? piece.length : begin + OUT_ROWS;
    const int blocks = (end + PART - 1) / PART;
    const int x_step = (int)(heads * width), B_step = (int)(groups * length);
    const i64 x_at = (first * heads + head) * width + top * PART, B_at = (first * groups + group) * length;
    const char *x_first = (const char*)x + x_at * 2, *B_first = (const char*)B + B_at * 2;
    const auto stage = [&](int k) { return ring + (k & 1) * PAIR; };
    const auto send = [&](int k) {
        if (k < blocks) {
            const int rows = piece.length - k * PART;
            send_some<VECTORS, PART>(stage(k), B_first + (i64)k * PART * 2 * B_step, B_step, rows, vectors);
            send_some<PART_ROW, PART>(stage(k) + B_TILE, x_first + (i64)k * PART * 2 * x_step, x_step, rows, PART_ROW);
        }
        copies_close();
    };
    send_some<VECTORS, OUT_ROWS>(C_tile, (const char*)C + (B_at + (i64)begin * B_step) * 2, B_step, own_rows, vectors);
    send_some<VECTORS, PART>(state, (const char*)before + (chunk * width + top * PART) * length * 2, length, PART, vectors);
    copies_close();
    send(0);
    const int known = (end + OUT_ROWS - 1) / OUT_ROWS * OUT_ROWS;
    for (int j = threadIdx.x; j < known; j += THREADS) {
        const bool there = j < piece.length;
        a[j] = there ? sums[head * tokens + first + j] : 0.0f;
        d[j] = there ? dts[head * tokens + first + j] : 0.0f;
    }
    copies_wait<1>();
    __syncthreads();

    unsigned left[2][VECTORS / 2][4];  // the warp's rows of C, for all products
    float y[2][8][4] = {};
#pragma unroll
    for (int v = 0; v < VECTORS / 2; ++v) {
        fetch_matrices(left[0][v], tall<VECTORS>(C_tile, 32 * warp, 2 * v));
        fetch_matrices(left[1][v], tall<VECTORS>(C_tile, 32 * warp + 16, 2 * v));
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            unsigned right[4];
            fetch_matrices(right, flat<VECTORS>(state, 16 * b, 2 * v));
            multiply_pair<KIND>(y, b, left[0][v], left[1][v], right);
        }
    }
    float own[4];  // sums of rows 8 i + row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        own[i] = a[r0 + 8 * i + row];
        const float fade = fast_exp2(own[i]);
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int e = 0; e < 2; ++e) y[i >> 1][b][2 * (i & 1) + e] *= fade;
    }
    __syncthreads();
    send(1);

    for (int k = 0; k < blocks; ++k) {
        copies_wait<1>();
        __syncthreads();
        const unsigned char *B_tile = stage(k), *x_tile = B_tile + B_TILE;
        const int j0 = k * PART;
#pragma unroll 1
        for (int h = 0; h < PART; h += 32) {  // 32 columns at a time, as far as the warp's tokens reach
            if (!whole && j0 + h > r0) break;
            float scores[2][4][4] = {};
#pragma unroll
            for (int v = 0; v < VECTORS / 2; ++v)
#pragma unroll
                for (int b = 0; b < 2; ++b) {
                    unsigned right[4];
                    fetch_matrices(right, flat<VECTORS>(B_tile, h + 16 * b, 2 * v));
                    multiply_pair<KIND>(scores, b, left[0][v], left[1][v], right);
                }
            const bool mask = j0 + h + 32 > r0;
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const int j = j0 + h + 16 * b + column;
                float fade[4][4];  // of rows 8 i + row: two columns, and two eight further on
#pragma unroll
                for (int n = 0; n < 4; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) fade[i][n] = fade_of(own[i], a[j + 8 * (n >> 1) + (n & 1)]);
                if (mask) {
#pragma unroll
                    for (int n = 0; n < 4; ++n)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (j + 8 * (n >> 1) + (n & 1) > r0 + 8 * i + row) fade[i][n] = 0.0f;
                }
                unsigned p[2][4];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float step[2] = {d[j + 8 * n], d[j + 8 * n + 1]};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float *sum = scores[i >> 1][2 * b + n] + 2 * (i & 1), *f = fade[i] + 2 * n;
                        p[i >> 1][2 * n + (i & 1)] = pair<KIND>(sum[0] * f[0] * step[0], sum[1] * f[1] * step[1]);
                    }
                }
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    unsigned right[4];
                    fetch_transposed(right, tall<PART_ROW>(x_tile, h + 16 * b, 2 * c));
                    multiply_pair<KIND>(y, c, p[0], p[1], right);
                }
            }
        }
        if (D != nullptr && k == r0 / PART) {
            const float* skip = D + head * (skip_step ? skip_step : 1) + (skip_step ? top * PART : 0);
#pragma unroll
            for (int b = 0; b < 8; ++b) {
                const float low = skip[skip_step ? 8 * b + column : 0], high = skip[skip_step ? 8 * b + column + 1 : 0];
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int t = r0 - j0 + 16 * m + 8 * half + row;
                        float x0, x1;
                        halves_of<KIND>(x0, x1, *(const unsigned*)(x_tile + swizzled<PART_ROW>(t, b) + (lane & 3) * 4));
                        y[m][b][2 * half] = vt_fma(low, x0, y[m][b][2 * half]);
                        y[m][b][2 * half + 1] = vt_fma(high, x1, y[m][b][2 * half + 1]);
                    }
            }
        }
        __syncthreads();
        send(k + 2);
    }
    copies_wait<0>();
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int t = 32 * warp + 16 * m + 8 * half + row;
#pragma unroll
            for (int b = 0; b < 8; ++b) {
                float low = y[m][b][2 * half], high = y[m][b][2 * half + 1];
                if (z != nullptr && t < own_rows) {
                    float g0, g1;
                    halves_of<KIND>(g0, g1, ((const unsigned*)z)[(x_at + (i64)(begin + t) * x_step + 8 * b + column) / 2]);
                    low *= fast_act<true>(g0);
                    high *= fast_act<true>(g1);
                }
                put_pair<VECTORS>(C_tile, t, b, pair<KIND>(low, high));
            }
        }
    warp_meets();
    write_rows<VECTORS, PART_ROW, 32>((char*)out + (x_at + (i64)begin * x_step) * 2, x_step, C_tile, 32 * warp, own_rows, 0);
}

#define OUTPUTS(NAME, KIND, VECTORS)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(OUTPUT_PARAMETERS) { outputs<KIND, VECTORS>(OUTPUT_NAMES); }
OUTPUTS(ssd_outputs_bf16_64, BF16, 8)
OUTPUTS(ssd_outputs_bf16_128, BF16, 16)
OUTPUTS(ssd_outputs_f16_64, F16, 8)
OUTPUTS(ssd_outputs_f16_128, F16, 16)
