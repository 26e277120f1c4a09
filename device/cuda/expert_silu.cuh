// Kernels of SiLU products as e4m3 between DeepGEMM's grouped products.
//
// The ladder:
// 1. silu_columns: any dtype, alpha and beta; a vector a thread, MIRROR's functions where fast ones do not decide.
// 2. silu_columns_bf16: the codes of expert_codes.cuh; the groups of a lane lie below each other, as their scales do.
// 3. silu_masked_*: as many blocks as the GPU holds share the rows that are real; a lane's groups are side by side.
#pragma once
#include "early.cuh"
#include "expert_codes.cuh"

// A gated product that is rounded to x's dtype after each step.
struct Act {
    int kind;
    bool clamps;
    float limit, alpha, beta;

    VT_MEMBER void values(float (&y)[8], const Raw<8>& gate, const Raw<8>& up) const {
        float g[8], u[8];
        widen(g, gate, kind);
        widen(u, up, kind);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (clamps) {
                g[j] = through(vt_minimum(g[j], limit), kind);
                u[j] = through(vt_minimum(vt_maximum(u[j], -limit), limit), kind);
            }
            u[j] = through(u[j] + beta, kind);
        }
        if (alpha == 1.0f) gate_products<true>(y, g, u, kind, kind);
        else
#pragma unroll
            for (int j = 0; j < 8; ++j) y[j] = through(g[j] * vt_sigmoid(g[j] * alpha), kind) * u[j];
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = through(y[j], kind);
    }
};

// x [rows, 2 width] in vectors, per_row = width / 8 of them to a half; a group is 16 of them.
extern "C" __global__ void __launch_bounds__(256) silu_columns(
    i64 rows, i64 per_row, const void* x, i64 kind, unsigned char* out, i64 whole, float* scales, i64 row_step,
    i64 group_step, i64 ue8m0, i64 clamps, float limit, float alpha, float beta, i64 magic, i64 shift) {
    const unsigned number = blockIdx.x * blockDim.x + threadIdx.x, across = (unsigned)per_row;
    const unsigned row = whole_quotient(number, (unsigned)magic, (int)shift), group = (number - row * across) >> 4;
    const bool inside = number < (unsigned)rows * across;
    const i64 at = ((i64)number + (i64)row * per_row) * 8;
    float y[8] = {}, q[8];
    if (inside) {
        const Act act = {(int)kind, clamps != 0, limit, alpha, beta};
        act.values(y, fetch<8>(x, at, (int)kind), fetch<8>(x, at + per_row * 8, (int)kind));
    }
    unsigned top = largest_of_lanes(largest_of(y, false), GROUP_LANES);
    if (!inside) return;
    Divisor by(scale_of(top, ue8m0 != 0), top, false);
    by.divide(q, y);
    put_codes(out, (i64)number * 8, q, whole != 0);
    if ((threadIdx.x & (GROUP_LANES - 1)) == 0) scales[row * row_step + group * group_step] = by.scale;
}

// Of bfloat16, alpha 1 and beta +0, `limit` by its bits. `magic` divides by per_row here too.
template <int D>
VT_FN void silu_rows(i64 rows, i64 per_row, const void* x, unsigned char* out, i64 whole, float* scales, i64 row_step,
                     i64 group_step, i64 ue8m0, i64 clamps, i64 limit, i64 magic, i64 shift) {
    others_may_start();
    const unsigned across = (unsigned)per_row, count = (unsigned)((rows + D - 1) / D) * across;
    const unsigned number = blockIdx.x * blockDim.x + threadIdx.x, place = number < count ? number : count - 1;
    const unsigned band = whole_quotient(place, (unsigned)magic, (int)shift), column = place - band * across;
    const i64 row = (i64)band * D, left = number < count ? rows - row : 0;
    Vectors at;
    at.gate = row * per_row * 16 + column * 8;
    at.up = at.gate + per_row * 8;
    at.codes = row * per_row * 8 + column * 8;
    at.scale = row * row_step + (column >> 4) * group_step;
    at.gate_step = per_row * 16;
    at.codes_step = per_row * 8;
    at.scale_step = row_step;
    after_others();
    rounded_group_codes<D>((const unsigned short*)x, at, left < D ? (int)left : D,
                           Clamps(clamps != 0, vt_float((int)limit)), out, whole != 0, scales, ue8m0 != 0);
}

#define SILU_ROWS(NAME, D, BLOCKS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) NAME(                                                    \
        i64 rows, i64 per_row, const void* x, unsigned char* out, i64 whole, float* scales, i64 row_step,              \
        i64 group_step, i64 ue8m0, i64 clamps, i64 limit, i64 magic, i64 shift) {                                      \
        silu_rows<D>(rows, per_row, x, out, whole, scales, row_step, group_step, ue8m0, clamps, limit, magic, shift);  \
    }
SILU_ROWS(silu_columns_bf16_1_early, 1, 1)
SILU_ROWS(silu_columns_bf16_2_early, 2, 1)
SILU_ROWS(silu_columns_bf16_4_early, 4, 3)

// A group of any dtype in 16 lanes.
VT_FN void exact_group_codes(const void* x, int kind, const Vectors& at, bool inside, unsigned char* codes, bool whole,
                             float* scales, bool ue8m0) {
    float g[8], u[8], y[8], q[8];
    load(g, x, at.gate, kind);
    load(u, x, at.up, kind);
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = vt_silu(g[j]) * u[j];
    unsigned top = largest_of_lanes(largest_of(y, false), GROUP_LANES);
    if (!inside) return;
    Divisor by(scale_of(top, ue8m0), top, false);
    by.divide(q, y);
    put_codes(codes, at.codes, q, whole);
    if ((threadIdx.x & (GROUP_LANES - 1)) == 0) scales[at.scale] = by.scale;
}

// The real rows of `experts` x tokens: 16 lanes have D of a row's `groups`; `magic` divides by groups / D.
#define MASKED_PARAMETERS                                                                                              \
    i64 experts, i64 tokens, i64 groups, i64 blocks, const void *x, i64 kind, const int *counts, unsigned char *codes, \
        i64 whole, float *scales, i64 expert_step, i64 token_step, i64 group_step, i64 ue8m0, i64 magic, i64 shift
template <int D, int T> VT_FN void silu_masked(MASKED_PARAMETERS) {
    VT_SHARED(memory);
    __shared__ int sums[T / 32];
    int* starts = (int*)memory;
    others_may_start();
    after_others();
    starts_of<T>((int)experts, starts, sums, [&](int e) {
        int count = counts[e];
        return count < 0 ? 0 : count > tokens ? (int)tokens : count;
    });
    const unsigned across = (unsigned)groups / D, total = (unsigned)starts[experts] * across;
    const int lane = threadIdx.x & (GROUP_LANES - 1);
    const i64 width = groups * 128;
    int widest = 1;
    while (widest * GROUP_LANES < (int)experts) widest *= GROUP_LANES;
    for (unsigned first = blockIdx.x * (T / GROUP_LANES); first < total; first += (unsigned)blocks * (T / GROUP_LANES)) {
        const unsigned unit = first + threadIdx.x / GROUP_LANES, place = unit < total ? unit : total - 1;
        const int row = (int)whole_quotient(place, (unsigned)magic, (int)shift);
        int expert = 0;  // the last one that starts at or before the row: 16 are asked at once
        for (int step = widest; step >= 1; step /= GROUP_LANES) {
            const int asked = expert + lane * step;
            expert += (ones(group_votes(asked < (int)experts && starts[asked] <= row)) - 1) * step;
        }
        const i64 token = row - starts[expert], line = expert * tokens + token;
        const i64 group = (place - (unsigned)row * across) * D;
        Vectors at;
        at.gate = line * 2 * width + group * 128 + lane * 8;
        at.up = at.gate + width;
        at.codes = line * width + group * 128 + lane * 8;
        at.scale = expert * expert_step + token * token_step + group * group_step;
        at.gate_step = at.codes_step = 128;
        at.scale_step = group_step;
        if ((int)kind != BF16) exact_group_codes(x, (int)kind, at, unit < total, codes, whole != 0, scales, ue8m0 != 0);
        else kept_group_codes<D>((const unsigned short*)x, at, unit < total, codes, whole != 0, scales, ue8m0 != 0);
    }
}

#define SILU_MASKED(NAME, D, T, ASSUMED)                                                                               \
    extern "C" __global__ void __launch_bounds__(T, 1) silu_masked_##NAME(MASKED_PARAMETERS) {                         \
        VT_ASSUME(ASSUMED);                                                                                            \
        silu_masked<D, T>(experts, tokens, groups, blocks, x, kind, counts, codes, whole, scales, expert_step,         \
                          token_step, group_step, ue8m0, magic, shift);                                                \
    }
SILU_MASKED(bf16_1_early, 1, 128, (int)kind == BF16)
SILU_MASKED(bf16_2_early, 2, 128, (int)kind == BF16)
SILU_MASKED(any_early, 1, 128, (int)kind != BF16)
