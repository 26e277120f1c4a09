// act(g) * u, SiLU or sigmoid, to the bytes of MIRROR's polynomials without always evaluating them.
//
// The polynomials cost more time than a memory-bound kernel's bytes. The hardware's fast functions are within NEAR
// float32 ulps of them, so a bfloat16 made of either is the same, unless the value lies that close to the middle of
// two bfloat16; there, about once in 800, and for |g| >= 16, the polynomial decides.
#pragma once
#include "storage.cuh"

#ifdef __CUDACC__
VT_FN float fast_exp2(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
VT_FN float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
VT_FN float fast_exp2(float x) { return std::exp2(x); }
VT_FN float fast_reciprocal(float x) { return 1.0f / x; }
#endif

// Relative error for |g| < 16, in units of 2^-24, the smallest that an ulp can be: the exponent's rounding 11.1
// (|g| log2(e) < 32), that of log2(e) 3.5, ex2 4, the sum 1, rcp 2, two products 2, MIRROR's own 3: 26.6 in all.
#define NEAR 40
#define FAST_LIMIT 16.0f

// At most 2 * NEAR where a float32 within NEAR ulps of y may round to another bfloat16 than y does.
VT_FN unsigned off_middle(float y) { return (unsigned)(vt_bits(y) + 0x8000 + NEAR) & 0xffffu; }

template <bool SILU> VT_FN float exact_product(float g, float u, int act_kind) {
    return through(SILU ? vt_silu(g) : vt_sigmoid(g), act_kind) * u;
}

// out = round(act(g)) * u: the act is rounded to `act_kind` (F32: not at all); the caller stores out as `kind`.
template <bool SILU, int V>
VT_FN void gate_products(float (&out)[V], const float (&g)[V], const float (&u)[V], int act_kind, int kind) {
    if (kind != BF16 || act_kind == F16) {
#pragma unroll
        for (int j = 0; j < V; ++j) out[j] = exact_product<SILU>(g[j], u[j], act_kind);
        return;
    }
    bool rounded = act_kind == BF16;
    unsigned nearest = 0xffffu;
    float largest = 0.0f, decided[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
        float weight = fast_reciprocal(1.0f + fast_exp2(g[j] * -1.442695f));
        float act = SILU ? g[j] * weight : weight;
        out[j] = (rounded ? through(act, BF16) : act) * u[j];
        decided[j] = rounded ? act : out[j];
        unsigned off = off_middle(decided[j]);
        nearest = off < nearest ? off : nearest;
        largest = fmaxf(largest, vt_abs(g[j]));
    }
    if (nearest > 2 * NEAR && largest < FAST_LIMIT) return;
#pragma unroll
    for (int j = 0; j < V; ++j)
        if (off_middle(decided[j]) <= 2 * NEAR || !(vt_abs(g[j]) < FAST_LIMIT))
            out[j] = exact_product<SILU>(g[j], u[j], act_kind);
}
