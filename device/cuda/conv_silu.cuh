// SiLU of sums that are stored as bfloat16: fast functions, and MIRROR's polynomial where these might decide otherwise.
//
// Two neighbours share a reciprocal, 1 / a = b / (a b), for the unit of such functions takes as long as all the rest.
// In units of 2^-24 relative to the result, where a product of two 1 + e^-x is below 2^23, so that x > -16: the
// exponent's rounding makes 11.1, that of log2(e) 3.6, ex2 4, the sum with 1 1, the product of two sums 1, rcp 2, the
// last two products 2, MIRROR's own 2: 26.7 in all, of which an ulp is at least one. (Over all float32 an H200 shows 17
// ulps.) A large positive x is its own SiLU to either; what is not a number makes the product none, and no
// bound holds for its neighbour.
#pragma once
#include "fast.cuh"

#define SILU_NEAR 27
#define SILU_ROOM_BITS 0x4b000000u  // 2^23; what is not a number has larger ones

// A result lies near the middle of two bfloat16 where its lower half is within SILU_NEAR of 0x8000. Halves are looked at
// by pairs, as far as they are above the end of that.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
VT_FN void nearer(unsigned& nearest, float a, float b) {
    unsigned halves = __byte_perm((unsigned)vt_bits(a), (unsigned)vt_bits(b), 0x5410);
    asm("{\n.reg .b32 off;\nadd.u16x2 off, %1, %2;\nmin.u16x2 %0, %0, off;\n}"
        : "+r"(nearest) : "r"(halves), "r"(0x10001u * (0x8000 + SILU_NEAR)));
}
#else
VT_FN void nearer(unsigned& nearest, float a, float b) {
    const unsigned first = (unsigned)(vt_bits(a) + 0x8000 + SILU_NEAR) & 0xffffu;
    const unsigned second = (unsigned)(vt_bits(b) + 0x8000 + SILU_NEAR) & 0xffffu;
    const unsigned low = nearest & 0xffffu, high = nearest >> 16;
    nearest = (first < low ? first : low) | (second < high ? second : high) << 16;
}
#endif
// Whether a half is at most 2 * SILU_NEAR: then, and only then, a half borrows that had no upper bit to lose.
VT_FN bool near_middle(unsigned nearest) {
    return ((nearest - 0x10001u * (2 * SILU_NEAR + 1)) & ~nearest & 0x80008000u) != 0;
}

// What of several sums decides whether fast functions were enough: the halves nearest to a middle, the largest product.
struct Doubt {
    unsigned nearest = 0xffffffffu, largest = 0;

    VT_MEMBER bool beyond() const { return largest >= SILU_ROOM_BITS; }
    VT_MEMBER bool any() const { return beyond() || near_middle(nearest); }
};

// y = SiLU(x) by fast functions.
template <int V> VT_FN void quick_silu(float (&y)[V], const float (&x)[V], Doubt& doubt) {
    static_assert(V % 2 == 0, "in pairs");
#pragma unroll
    for (int v = 0; v < V; v += 2) {
        const float first = 1.0f + fast_exp2(x[v] * -1.442695f), e = fast_exp2(x[v + 1] * -1.442695f);
        const float both = vt_fma(first, e, first), inverse = fast_reciprocal(both);
        y[v] = x[v] * vt_fma(inverse, e, inverse);
        y[v + 1] = x[v + 1] * (inverse * first);
        const unsigned bits = (unsigned)vt_bits(both);
        doubt.largest = bits > doubt.largest ? bits : doubt.largest;
        nearer(doubt.nearest, y[v], y[v + 1]);
    }
}

// MIRROR's SiLU step by step, but its reciprocal without the branch to what numbers far from 1 would need.
VT_FN float exact_silu(float x) {
    const float near = vt_clip(x, -120.0f, 120.0f);
    const bool negative = near < 0.0f;
    const vt_scaled g = vt_exp_parts(negative ? near : -near, 0.0f);
    const float e = vt_scale(g.hi, g.t), d = 1.0f + e, d_lo = (e - (d - 1.0f)) + vt_scale(g.lo, g.t);
    const float guess = fast_reciprocal(d), inverse = vt_fma(guess, -vt_fma(d, guess, -1.0f), guess);
    const float top = negative ? g.hi : 1.0f, top_lo = negative ? g.lo : 0.0f, q = top * inverse;
    const float rest = vt_fma(-q, d_lo, vt_fma(-q, d, top)) + top_lo;
    return vt_gated(x, {q, rest * inverse, negative ? g.t : VT_MAGIC}, 120.0f);
}

// Whether y may have to be: x has the sum, `beside` that of its pair, each good for the bound where it is > -16.
VT_FN bool undecided(float y, float x, float beside) {
    const unsigned off = (unsigned)(vt_bits(y) + 0x8000 + SILU_NEAR) & 0xffffu;
    return off <= 2 * SILU_NEAR || !(x > -16.0f) || !(beside > -16.0f);
}

template <int V> VT_FN void brain_silu(float (&x)[V]) {
    float y[V];
    Doubt doubt;
    quick_silu(y, x, doubt);
    if (doubt.any()) {
        unsigned left = 0;
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (undecided(y[v], x[v], x[v ^ 1])) left |= 1u << v;
        decide(y, left, x, x, [](float sum, float) { return exact_silu(sum); });
    }
#pragma unroll
    for (int v = 0; v < V; ++v) x[v] = y[v];
}
