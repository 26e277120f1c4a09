// RMSNorm times the act of a gate into FP8 codes under a given scale, rows of 16 to 256 bfloat16.
//
// The ladder:
// 1. A row a team of lanes.
// 2. Neighbouring rows a team, sent for together, whose roots its lanes find one each (teams.cuh); what the hardware's
//    fast functions leave open is computed at the end, from memory once more, and its code stored over the other.
#pragma once
#include "silu_codes.cuh"
#include "teams.cuh"

#define GATED_DEPTH 4  // rows a team where there are many, device/norm_quant.py

struct Gated {
    const void *x, *weight, *gate;
    i64 rows, width, gate_stride;
    unsigned char* out;
};

// Squares of bfloat16 are exact in float32 unless they are tiny, and then they change no sum that is not: a fused sum is the
// same from a first square on that is not tiny.
VT_FN void add_squares_of_bf16(float& partial, const float (&v)[8]) {
    if (v[0] * v[0] > 0x1p-100f) {
#pragma unroll
        for (int j = 0; j < 8; ++j) partial = vt_fma(v[j], v[j], partial);
    } else {
        add_squares(partial, v);
    }
}

// y = ((x * inv) * w) * act(gate), rounded to bfloat16 before it is quantised.
template <int D, bool SILU> VT_FN void gated_teams(const Gated& of, float eps, const float* scale, int shift) {
    const Team team(shift);
    const int width = (int)of.width, at = team.place * 8;
    const i64 first = (i64)team_number(blockIdx.x, shift) * D;
    const int here = at < width ? (of.rows - first < D ? (int)(of.rows - first) : D) : 0;
    const unsigned short* const x = (const unsigned short*)of.x + first * width + at;
    const unsigned short* const gate = (const unsigned short*)of.gate + first * of.gate_stride + at;
    unsigned char* const out = of.out + first * width + at;
    Raw<8> a[D], c[D], b = {};
    float v[8], w[8], z[8], y[8], inverse[D], partial[D] = {}, least = VT_INF;
#pragma unroll
    for (int d = 0; d < D; ++d) {
        a[d] = {}, c[d] = {};
        if (d < here) a[d].a = *(const uint4*)(x + d * width), c[d].a = *(const uint4*)(gate + d * of.gate_stride);
    }
    if (here > 0) b = fetch<8>(of.weight, at, BF16);
#pragma unroll
    for (int d = 0; d < D; ++d) {
        widen(v, a[d], BF16);
        add_squares_of_bf16(partial[d], v);
        least = fminf(least, least_of_bf16(c[d]));
    }
    const float roots = team.roots(partial, (float)width, eps), factor = 1.0f / scale[0];
#pragma unroll
    for (int d = 0; d < D; ++d) inverse[d] = team.root_of(roots, d);
    widen(w, b, BF16);
    Middles middles(least);
    unsigned left = 0;
#pragma unroll
    for (int d = 0; d < D; ++d) {
        if (d >= here) break;
        widen(v, a[d], BF16);
        widen(z, c[d], BF16);
        middles.nearest = 0xffffffffu;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            y[j] = fast_act<SILU>(z[j]) * (v[j] * inverse[d] * w[j]);
            if (j & 1) middles.see(y[j - 1], y[j]);
        }
        if (middles.any()) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (middles.near(y[j])) left |= 1u << (8 * d + j);
        }
        const Raw<8> rounded = narrow(y, BF16);
        widen(y, rounded, BF16);
        products(y, y, factor);
        store_e4m3(out, d * width, y, 0x7fu);
    }
#pragma unroll 1
    for (; left; left &= left - 1) {
        const int n = lowest_bit(left), d = n >> 3, j = n & 7;
        float root = inverse[0];
#pragma unroll
        for (int e = 1; e < D; ++e)
            if (d == e) root = inverse[e];
        const float norm = widen_bf16(x[d * width + j]) * root * widen_bf16(((const unsigned short*)of.weight)[at + j]);
        const float exact = exact_product<SILU>(widen_bf16(gate[d * of.gate_stride + j]), norm, F32);
        out[d * width + j] = one_code(through(exact, BF16) * factor, 0x7fu);
    }
}

#define GATED_TEAMS(NAME, D)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128, 1) NAME(                                                    \
        i64 rows, i64 width, const void* x, const void* weight, const void* gate, i64 gate_stride, float eps,     \
        i64 sigmoid, const float* scale, unsigned char* out, i64 shift) {                                \
        const Gated of{x, weight, gate, rows, width, gate_stride, out};                            \
        if (sigmoid) gated_teams<D, false>(of, eps, scale, (int)shift);                                           \
        else gated_teams<D, true>(of, eps, scale, (int)shift);                                                    \
    }
