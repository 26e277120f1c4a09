// SiLU-and-mul into FP8 codes, under a scale that is given or one for each group of neighbours.
//
// Where all that is seen of a value is its code, the hardware's fast functions decide it, and what lies close to the
// middle of two codes (static scales: of two bfloat16, which a value is rounded to first) is computed again as MIRROR
// does, from x once more, and its code stored over the other.
//
// The ladder:
// 1. silu_group_any, silu_static_v1: any width, dtype and address. *_v8: vectors of any dtype.
// 2. silu_group_few, silu_group_alone: four elements a lane or one, by MIRROR's functions alone.
// 3. *_bf16: vectors of bfloat16, several a thread where there are many. All rows are one row of vectors: where each lies
//    in x takes a product, and of 64 bits only the address.
#pragma once
#include "gated_guess.cuh"
#include "silu_groups.cuh"

#define DEPTH 2  // vectors a thread of the static kernels, device/norm_quant.py

template <int V>
VT_FN void silu_static(i64 rows, i64 width, i64 chunks, const void* x, int kind, const float* scale,
                       unsigned char* out, unsigned nan, bool rounded) {
    Place at[DEPTH];
    Raw<V> a[DEPTH], b[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        at[d] = place<V>(rows, width, chunks, DEPTH, d);
        if (!at[d].inside) continue;
        a[d] = fetch<V>(x, at[d].row * 2 * width + at[d].column, kind);
        b[d] = fetch<V>(x, at[d].row * 2 * width + width + at[d].column, kind);
    }
    float inverse = 1.0f / scale[0];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (!at[d].inside) continue;
        float y[V], q[V];
        silu_products(y, a[d], b[d], kind, rounded);
        products(q, y, inverse);
        store_e4m3(out, at[d].row * width + at[d].column, q, nan);
    }
}

#define SILU_STATIC(NAME, V)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                       \
        i64 rows, i64 width, i64 chunks, const void* x, i64 kind, const float* scale, unsigned char* out,         \
        i64 nan, i64 rounded) {                                                                                   \
        silu_static<V>(rows, width, chunks, x, (int)kind, scale, out, (unsigned)nan, rounded != 0);               \
    }
SILU_STATIC(silu_static_v8, 8)
SILU_STATIC(silu_static_v1, 1)

template <int D, bool ROUNDED>
VT_FN void silu_vectors(i64 rows, i64 per_row, const void* x, const float* scale, unsigned char* out, unsigned nan,
                        i64 magic, i64 magic_shift) {
    const Halves<D> raw(x, BF16, rows, (unsigned)per_row, (unsigned)magic, (int)magic_shift);
    const float inverse = 1.0f / scale[0];
    others_may_start();
    unsigned left = 0;
#pragma unroll
    for (int d = 0; d < D; ++d) {
        if (!raw.inside(d)) continue;
        float y[8], q[8];
        uint4 made;
        left |= guess_products<SiluGuess, ROUNDED>(made, raw.gate[d], raw.up[d]) << 8 * d;
        widen(y, {made, made}, BF16);
        products(q, y, inverse);
        store_e4m3(out, (i64)raw.number(d) * 8, q, nan);
    }
#pragma unroll 1
    for (; left; left &= left - 1) {
        int n = lowest_bit(left), d = n >> 3;
        float y = through(raw.exact(d, n & 7, ROUNDED), BF16);
        out[(i64)(raw.first + d * raw.step) * 8 + (n & 7)] = one_code(y * inverse, nan);
    }
}

#define SILU_VECTORS(NAME, ROUNDED)                                                                               \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                       \
        i64 rows, i64 per_row, const void* x, const float* scale, unsigned char* out, i64 nan, i64 magic,         \
        i64 magic_shift) {                                                                                        \
        silu_vectors<DEPTH, ROUNDED>(rows, per_row, x, scale, out, (unsigned)nan, magic, magic_shift);            \
    }
SILU_VECTORS(silu_static_bf16_early, false)
SILU_VECTORS(silu_static_rounded_bf16_early, true)
