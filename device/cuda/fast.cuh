// act(g) * u, SiLU or sigmoid, to the bytes of MIRROR's polynomials without always evaluating them.
//
// The polynomials cost more time than a memory-bound kernel's bytes. The hardware's fast functions are within NEAR
// float32 ulps of them, so a bfloat16 made of either is the same, unless the value lies that close to the middle of
// two bfloat16; there, about once in 800, and for |g| >= 16, the polynomial decides.
#pragma once
#include "storage.cuh"

// Subnormal numbers are zero to them; none arise where their results are used.
#ifdef __CUDACC__
VT_FN float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
VT_FN float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

// out[j] = exact(g[j], u[j]) for the bits j of `some`: the lanes' next ones together, whichever these are, so that the
// polynomial stands in the code once.
template <int V, class E>
VT_FN void decide(float (&out)[V], unsigned some, const float (&g)[V], const float (&u)[V], E&& exact) {
    for (; some; some &= some - 1) {
        unsigned first = some & (0u - some);
        float gate = g[0], up = u[0];
#pragma unroll
        for (int j = 1; j < V; ++j)
            if (first >> j & 1u) gate = g[j], up = u[j];
        float y = exact(gate, up);
#pragma unroll
        for (int j = 0; j < V; ++j)
            if (first >> j & 1u) out[j] = y;
    }
}

template <bool SILU> VT_FN float fast_act(float g) {
    float weight = fast_reciprocal(1.0f + fast_exp2(g * -1.442695f));
    return SILU ? g * weight : weight;
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
    unsigned nearest = 0xffffu, left = 0;
    float largest = 0.0f, decided[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
        float act = fast_act<SILU>(g[j]);
        out[j] = (rounded ? through(act, BF16) : act) * u[j];
        decided[j] = rounded ? act : out[j];
        unsigned off = off_middle(decided[j]);
        nearest = off < nearest ? off : nearest;
        largest = fmaxf(largest, vt_abs(g[j]));
    }
    if (nearest > 2 * NEAR && largest < FAST_LIMIT) return;
#pragma unroll
    for (int j = 0; j < V; ++j)
        if (off_middle(decided[j]) <= 2 * NEAR || !(vt_abs(g[j]) < FAST_LIMIT)) left |= 1u << j;
    decide(out, left, g, u, [&](float gate, float up) { return exact_product<SILU>(gate, up, act_kind); });
}

VT_FN float gelu_argument(float g) { return 0.7978845608028654f * (g + ((0.044715f * g) * g) * g); }

VT_FN float exact_gelu_product(float g, float u, int act_kind) {
    return through((0.5f * g) * (1.0f + vt_tanh(gelu_argument(g))), act_kind) * u;
}

// GELU (tanh form) * u, as gate_products. With the same argument a = gelu_argument(g) as MIRROR, its (1 + tanh a) / 2 is
// here s = 1 / (1 + e), e = exp(-2a). In units of 2^-24 relative to the result: e and s make 22 where -a < 3.5 and 1.4
// more for each doubling of -a, 3 for the products, and MIRROR's tanh and its sum with 1, off by 1.5 absolute, are
// 0.75 / s = 0.75 (1 + e) off in s. The margin 52 + 2 e is twice that, for every a: it leaves to the polynomial what is
// small because e is large, and every infinity. The added 2^-147 covers the roundings of subnormal products.
template <int V>
VT_FN void gelu_products(float (&out)[V], const float (&g)[V], const float (&u)[V], int act_kind, int kind) {
    if (kind != BF16 || act_kind == F16) {
#pragma unroll
        for (int j = 0; j < V; ++j) out[j] = exact_gelu_product(g[j], u[j], act_kind);
        return;
    }
    bool rounded = act_kind == BF16;
    unsigned left = 0;
#pragma unroll
    for (int j = 0; j < V; ++j) {
        float e = fast_exp2(gelu_argument(g[j]) * -2.885390f);
        float act = g[j] * fast_reciprocal(1.0f + e);
        out[j] = (rounded ? through(act, BF16) : act) * u[j];
        float decided = rounded ? act : out[j];
        float margin = vt_fma(vt_abs(decided), vt_fma(e, 0x1p-23f, 52 * 0x1p-24f), 0x1p-147f);
        unsigned ends = narrow_bf16(decided - margin, decided + margin);
        if ((ends ^ ends >> 16) & 0xffffu) left |= 1u << j;
    }
    decide(out, left, g, u, [&](float gate, float up) { return exact_gelu_product(gate, up, act_kind); });
}
