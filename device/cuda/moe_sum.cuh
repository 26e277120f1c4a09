// The sum of what a token's experts gave.
#pragma once
#include "early.cuh"
#include "fp8_scales.cuh"

#define SUMMED 8

// out[t] = x[t, 0] + x[t, 1] + ..., from +0: eight choices of a token under way together. All sums are one row of
// `count` groups of V neighbours, per_row of them a token's.
template <int V>
VT_FN void moe_sum(i64 count, i64 per_row, const void* x, i64 choices, i64 kind, void* out, i64 magic, i64 shift) {
    others_may_start();
    const unsigned number = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned row = whole_quotient(number, (unsigned)magic, (int)shift);
    const i64 from = ((i64)row * (choices - 1) * per_row + number) * V, step = per_row * V;
    after_others();
    if (number >= count) return;
    float total[V] = {};
    for (i64 first = 0; first < choices; first += SUMMED) {
        Raw<V> raw[SUMMED];
#pragma unroll
        for (int r = 0; r < SUMMED; ++r)
            if (first + r < choices) raw[r] = fetch<V>(x, from + (first + r) * step, (int)kind);
#pragma unroll
        for (int r = 0; r < SUMMED; ++r) {
            if (first + r >= choices) continue;
            float y[V];
            widen(y, raw[r], (int)kind);
#pragma unroll
            for (int j = 0; j < V; ++j) total[j] += y[j];
        }
    }
    store(out, (i64)number * V, total, (int)kind);
}

#define SUM(NAME, V, ASSUMED)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        NAME(i64 count, i64 per_row, const void* x, i64 choices, i64 kind, void* out, i64 magic, i64 shift) {    \
        VT_ASSUME(ASSUMED);                                                                                      \
        moe_sum<V>(count, per_row, x, choices, kind, out, magic, shift);                                         \
    }

SUM(moe_sum_v1_early, 1, true)
SUM(moe_sum_v8_early, 8, (int)kind != F32)
SUM(moe_sum_bf16_8_v8_early, 8, (int)kind == BF16 && choices == SUMMED)
SUM(moe_sum_f32_v8_early, 8, (int)kind == F32)
