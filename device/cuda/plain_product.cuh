// Products with weights that were unpacked before, for shapes, formats and orders that w4a16.cuh does not take: a warp has
// 16 columns and eight rows, and reads element by element.
#pragma once
#include "mma.cuh"

// What a sum is rounded through on its way: AT_ONCE at the end alone; each part of K before the parts are added; or every
// run of 32 k as well.
enum { AT_ONCE, BY_PARTS, BY_RUNS };

// Weights [depth, columns] of KIND, a warp 16 columns and 8 rows. K lies in runs of `run`, dealt out to `parts` in turn.
template <int KIND> VT_FN void plain(
    i64 rows, i64 columns, i64 depth, const void* a, const void* weights, void* out, i64 run, i64 parts,
    i64 rounding) {
    const unsigned short *left = (const unsigned short*)weights, *right = (const unsigned short*)a;
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    i64 down = (rows + 7) / 8, tile = blockIdx.x * (i64)(blockDim.x / 32) + (threadIdx.x >> 5);
    i64 top = tile % down * 8, first = tile / down * 16;
    auto weight = [&](i64 k, i64 n) { return k < depth && n < columns ? (unsigned)left[k * columns + n] : 0u; };
    auto row = [&](i64 k) { return k < depth && top + g < rows ? (unsigned)right[(top + g) * depth + k] : 0u; };
    float total[4] = {};
    for (i64 part = 0; part < parts; ++part) {
        float sum[4] = {}, kept[4] = {};
        for (i64 begin = part * run; begin < depth; begin += parts * run) {
            for (i64 k = begin + 2 * t; k - 2 * t < begin + run && k - 2 * t < depth; k += 16) {
                unsigned x[4], y[2];
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    i64 n = first + g + 8 * (r & 1), from = k + 8 * (r >> 1);
                    x[r] = weight(from, n) | weight(from + 1, n) << 16;
                }
#pragma unroll
                for (int r = 0; r < 2; ++r) y[r] = row(k + 8 * r) | row(k + 8 * r + 1) << 16;
                multiply<KIND>(sum, x, y[0], y[1]);
            }
            if (rounding != BY_RUNS) continue;
#pragma unroll
            for (int r = 0; r < 4; ++r) kept[r] = through(kept[r] + through(sum[r], KIND), KIND), sum[r] = 0.0f;
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            float x = rounding == AT_ONCE ? sum[r] : rounding == BY_PARTS ? through(sum[r], KIND) : kept[r];
            total[r] = part ? total[r] + x : x;
        }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        i64 m = top + 2 * t + (r & 1), n = first + g + 8 * (r >> 1);
        float one[1] = {total[r]};
        if (m < rows && n < columns) store(out, m * columns + n, one, KIND);
    }
}

#define PLAIN_KERNELS(NAME)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128)                                                            \
        NAME##_bf16(i64 rows, i64 columns, i64 depth, const void* a, const void* weights,                        \
                    void* out, i64 run, i64 parts, i64 rounding) {                                               \
        plain<BF16>(rows, columns, depth, a, weights, out, run, parts, rounding);                                \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(128)                                                            \
        NAME##_f16(i64 rows, i64 columns, i64 depth, const void* a, const void* weights,                         \
                   void* out, i64 run, i64 parts, i64 rounding) {                                                \
        plain<F16>(rows, columns, depth, a, weights, out, run, parts, rounding);                                 \
    }
