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
    const int parts = (int)((length + PART - 1) / PART) * 4;
    const int sound = lane < parts ? loud[(chunk * tops + top) * parts + lane] : 0;
    const bool whole = __any_sync(WARP_LANES, sound);
    const int end = whole || begin + OUT_ROWS > piece.length ? piece.length : begin + OUT_ROWS;
    const int blocks = (end + PART - 1) / PART;
    const i64 x_step = heads * width, B_step = groups * length, x_at = (first * heads + head) * width + top * PART;
    const i64 B_at = (first * groups + group) * length;
    const auto stage = [&](int k) { return ring + (k & 1) * PAIR; };
    const auto send = [&](int k) {
        if (k < blocks) {
            const i64 t = (i64)k * PART;
            send_some<VECTORS, PART>(stage(k), (const char*)B + (B_at + t * B_step) * 2, B_step, piece.length - k * PART, vectors);
            send_some<PART_ROW, PART>(stage(k) + B_TILE, (const char*)x + (x_at + t * x_step) * 2, x_step,
                                      piece.length - k * PART, PART_ROW);
        }
        copies_close();
    };
    send_some<VECTORS, OUT_ROWS>(C_tile, (const char*)C + (B_at + begin * B_step) * 2, B_step, own_rows, vectors);
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

    float y[2][8][4] = {};
#pragma unroll
    for (int k = 0; k < VECTORS / 2; ++k) {
        unsigned left[2][4];
        fetch_matrices(left[0], tall<VECTORS>(C_tile, 32 * warp, 2 * k));
        fetch_matrices(left[1], tall<VECTORS>(C_tile, 32 * warp + 16, 2 * k));
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            unsigned right[4];
            fetch_matrices(right, flat<VECTORS>(state, 16 * b, 2 * k));
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                multiply<KIND>(y[m][2 * b], left[m], right[0], right[1]);
                multiply<KIND>(y[m][2 * b + 1], left[m], right[2], right[3]);
            }
        }
    }
    float own[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) own[m][half] = a[r0 + 16 * m + 8 * half + row];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const float fade[2] = {fast_exp2(own[m][0]), fast_exp2(own[m][1])};
#pragma unroll
        for (int b = 0; b < 8; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) y[m][b][i] *= fade[i >> 1];
    }
    __syncthreads();
    send(1);

    for (int k = 0; k < blocks; ++k) {
        copies_wait<1>();
        __syncthreads();
        const unsigned char *B_tile = stage(k), *x_tile = B_tile + B_TILE;
        const int j0 = k * PART;
        // 16 columns at a time, as far as the warp's last token reaches.
        const int reach = whole ? 4 : (r0 + 32 - j0) / 16;
        if (reach > 0) {
            float scores[2][8][4] = {};
#pragma unroll 2  // all of them spill on sm_120
            for (int v = 0; v < VECTORS / 2; ++v) {
                unsigned left[2][4];
                fetch_matrices(left[0], tall<VECTORS>(C_tile, 32 * warp, 2 * v));
                fetch_matrices(left[1], tall<VECTORS>(C_tile, 32 * warp + 16, 2 * v));
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    if (b >= reach) continue;
                    unsigned right[4];
                    fetch_matrices(right, flat<VECTORS>(B_tile, 16 * b, 2 * v));
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        multiply<KIND>(scores[m][2 * b], left[m], right[0], right[1]);
                        multiply<KIND>(scores[m][2 * b + 1], left[m], right[2], right[3]);
                    }
                }
            }
            const bool mask = j0 + PART > r0;
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                if (b >= reach) continue;
                unsigned p[2][4];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int j = j0 + 16 * b + 8 * n + column;
                    const float late[2] = {a[j], a[j + 1]}, step[2] = {d[j], d[j + 1]};
#pragma unroll
                    for (int m = 0; m < 2; ++m)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            float w[2];
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                float fade = fade_of(own[m][half], late[e]);
                                if (mask && j + e > r0 + 16 * m + 8 * half + row) fade = 0.0f;
                                w[e] = scores[m][2 * b + n][2 * half + e] * fade * step[e];
                            }
                            p[m][2 * n + half] = pair<KIND>(w[0], w[1]);
                        }
                }
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    unsigned right[4];
                    fetch_transposed(right, tall<PART_ROW>(x_tile, 16 * b, 2 * c));
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        multiply<KIND>(y[m][2 * c], p[m], right[0], right[1]);
                        multiply<KIND>(y[m][2 * c + 1], p[m], right[2], right[3]);
                    }
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
                    halves_of<KIND>(g0, g1, ((const unsigned*)z)[(x_at + (begin + t) * x_step + 8 * b + column) / 2]);
                    low *= fast_act<true>(g0);
                    high *= fast_act<true>(g1);
                }
                put_pair<VECTORS>(C_tile, t, b, pair<KIND>(low, high));
            }
        }
    warp_meets();
    write_rows<VECTORS, PART_ROW, 32>((char*)out + (x_at + begin * x_step) * 2, x_step, C_tile, 32 * warp, own_rows, 0);
}

#define OUTPUTS(NAME, KIND, VECTORS)                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(OUTPUT_PARAMETERS) { outputs<KIND, VECTORS>(OUTPUT_NAMES); }
OUTPUTS(ssd_outputs_bf16_64, BF16, 8)
OUTPUTS(ssd_outputs_bf16_128, BF16, 16)
OUTPUTS(ssd_outputs_f16_64, F16, 8)
OUTPUTS(ssd_outputs_f16_128, F16, 16)
