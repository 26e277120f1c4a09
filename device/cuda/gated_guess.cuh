// Gated products of bfloat16 by guess and check: what the hardware's fast functions leave open is computed at the end, from
// memory once more, by MIRROR's functions, and stored over the guess.
#pragma once
#include "bf16_products.cuh"
#include "e2m1_steps.cuh"
#include "early.cuh"
#include "rows.cuh"
#include "silu_guess.cuh"

// The error of gelu's guess, relative and in units of 2^-24, which are at most an ulp, with MIRROR's argument a and
// e = exp(-2 a): where a < 0, -2 a for the rounding of e's exponent; ex2 4, the sum 1, rcp 2, two products 2; MIRROR's
// own 2 and two products 2, and where its tanh is near -1, of which 2^-24 is an ulp, e / 2. As -2 a < 1.1 + e / 8, that is
// under 15 + 0.625 e. What is small because e is large is open, and so is every infinite e.
#define GELU_NEAR 18.0f
#define GELU_NEAR_SLOPE 0.7f

// Whether a float32 as near to the middle of two bfloat16 as the error of its guess is among those seen.
struct Rooms {
    float least;

    VT_MEMBER Rooms() : least(VT_INF) {}
    // How much further than its error a value is away from the middle of two bfloat16, in ulps.
    VT_MEMBER static float room(float x, float e) {
        const float low = vt_float((int)chosen_bytes((unsigned)vt_bits(x), 0x4b000000u, 0x7610u));  // 2^23 and 16 bits
        return vt_abs(low - (8388608.0f + 32768.0f)) - vt_fma(e, GELU_NEAR_SLOPE, GELU_NEAR);
    }
    VT_MEMBER void see(float x, float e) { least = fminf(least, room(x, e)); }
    VT_MEMBER bool any() const { return !(least > 0.0f); }
};

struct SiluGuess {
    static constexpr bool GELU = false;
    VT_MEMBER static float exact(float g, float u, int act_kind) { return exact_product<true>(g, u, act_kind); }
};
struct GeluGuess {
    static constexpr bool GELU = true;
    VT_MEMBER static float exact(float g, float u, int act_kind) { return exact_gelu_product(g, u, act_kind); }
};

// Eight products; the bits of those that are open.
template <class F, bool ROUNDED> VT_FN unsigned guess_products(uint4& made, const Raw<8>& gate, const Raw<8>& up) {
    float g[8], u[8], y[8], e[8];
    widen(g, gate, BF16);
    widen(u, up, BF16);
    unsigned left = 0;
    if constexpr (F::GELU) {
        Rooms rooms;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            e[j] = fast_exp2(gelu_argument(g[j]) * -2.885390f);
            y[j] = g[j] * fast_reciprocal(1.0f + e[j]);
            if (!ROUNDED) y[j] = y[j] * u[j];
            rooms.see(y[j], e[j]);
        }
        if (rooms.any()) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (!(Rooms::room(y[j], e[j]) > 0.0f)) left |= 1u << j;
        }
    } else {
        Middles middles(least_of_bf16(gate));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            y[j] = fast_act<true>(g[j]);
            if (!ROUNDED) y[j] = y[j] * u[j];
            if (j & 1) middles.see(y[j - 1], y[j]);
        }
        if (middles.any()) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (middles.near(y[j])) left |= 1u << j;
        }
    }
    made = narrow(y, BF16).a;
    if (ROUNDED) {
        made = {product_pair(made.x, up.a.x), product_pair(made.y, up.a.y), product_pair(made.z, up.a.z),
                product_pair(made.w, up.a.w)};
    }
    return left;
}

template <class F, int DEPTH, bool ROUNDED>
VT_FN void guess_gated(i64 rows, i64 width, i64 chunks, const void* gate, const void* up, i64 stride, void* out) {
    Place at[DEPTH];
    Raw<8> a[DEPTH], b[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) at[d] = place<8>(rows, width, chunks, DEPTH, d);
    after_others();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (!at[d].inside) continue;
        a[d] = fetch<8>(gate, at[d].row * stride + at[d].column, BF16);
        b[d] = fetch<8>(up, at[d].row * stride + at[d].column, BF16);
    }
    others_may_start();
    unsigned left = 0;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (!at[d].inside) continue;
        uint4 made;
        left |= guess_products<F, ROUNDED>(made, a[d], b[d]) << 8 * d;
        *(uint4*)((unsigned short*)out + at[d].row * width + at[d].column) = made;
    }
#pragma unroll 1
    for (; left; left &= left - 1) {
        const int n = lowest_bit(left), d = n >> 3;
        const i64 column = at[0].column + d * (int)(blockDim.x * 8) + (n & 7), from = at[0].row * stride + column;
        const float g = widen_bf16(((const unsigned short*)gate)[from]), u = widen_bf16(((const unsigned short*)up)[from]);
        const float y[1] = {F::exact(g, u, ROUNDED ? BF16 : F32)};
        store(out, at[0].row * width + column, y, BF16);
    }
}
