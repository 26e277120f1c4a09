// The short causal convolution, y = act(bias + sum_j w_j x_(t - K + 1 + j)), one chain of fma, j ascending; what its
// kernels share.
#pragma once
#include "elements.cuh"
#include "fast.cuh"

// Products rounded to x's dtype; the sum rounded to it; SiLU.
enum { PRODUCTS = 1, SUM = 2, ACTIVATED = 4 };  // device/causal_conv.py
// Which of the first two a kernel knows: neither, products alone, or what the flags say.
enum { PLAIN, ROUNDED, EITHER };

template <int HOW> VT_FN void add_tap(float& total, float w, float tap, int flags, int kind) {
    if (HOW == ROUNDED || (HOW == EITHER && (flags & PRODUCTS))) total += through(w * tap, kind);
    else total = vt_fma(w, tap, total);
}

// The products of two pairs of bfloat16, each rounded once to bfloat16: a * b + -0. (Below 2^-126 float32 would round
// them first, as MIRROR does.)
#ifdef __CUDACC__
VT_FN unsigned brain_products(unsigned a, unsigned b) {
    unsigned products;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(products) : "r"(a), "r"(b), "r"(0x80008000u));
    return products;
}
#else
VT_FN unsigned brain_products(unsigned a, unsigned b) {
    return narrow_bf16(widen_bf16(a & 0xffffu) * widen_bf16(b & 0xffffu), widen_bf16(a >> 16) * widen_bf16(b >> 16));
}
#endif

// SiLU of V sums that are stored as bfloat16: fast functions, and the polynomial where these might decide otherwise.
//
// In units of 2^-24 relative to the result, for x > -SILU_LOW: the exponent's rounding makes 5.6 (x log2(e) < 16), that
// of log2(e) 1.8, ex2 4, the sum with 1 1, rcp 2, the last product 1, MIRROR's own 2: 17.4 in all, of which an ulp is at
// least one. (Over all float32 an H200 shows 9 ulps.) A large positive x is its own SiLU to either.
#define SILU_NEAR 18
#define SILU_LOW 8.0f
#define SILU_LOW_BITS 0xc1000000u  // of negative numbers the more negative has the larger bits, and NaN have larger ones

// A result lies near the middle of two bfloat16 where its lower half is within SILU_NEAR of 0x8000. Halves are looked at
// by pairs.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
VT_FN void nearer(unsigned& nearest, float a, float b) {
    unsigned halves = __byte_perm((unsigned)vt_bits(a), (unsigned)vt_bits(b), 0x5410);
    asm("{\n.reg .b32 off;\nadd.u16x2 off, %1, %2;\nmin.u16x2 %0, %0, off;\n}"
        : "+r"(nearest) : "r"(halves), "r"(0x10001u * (0x8000 + SILU_NEAR)));
}
VT_FN bool near_middle(unsigned nearest) { return (nearest & 0xffffu) <= 2 * SILU_NEAR || nearest >> 16 <= 2 * SILU_NEAR; }
#else
VT_FN void nearer(unsigned& nearest, float a, float b) {
    const unsigned first = (unsigned)(vt_bits(a) + 0x8000 + SILU_NEAR) << 16;
    const unsigned second = (unsigned)(vt_bits(b) + 0x8000 + SILU_NEAR) << 16;
    nearest = first < nearest ? first : nearest;
    nearest = second < nearest ? second : nearest;
}
VT_FN bool near_middle(unsigned nearest) { return nearest >> 16 <= 2 * SILU_NEAR; }
#endif

// y = SiLU(x) by fast functions; the answer: whether some of it may have to be looked at again.
template <int V> VT_FN bool quick_silu(float (&y)[V], const float (&x)[V]) {
    unsigned nearest = 0xffffffffu, largest = 0;
#pragma unroll
    for (int v = 0; v < V; v += 2) {
        const unsigned bits = (unsigned)vt_bits(x[v]), more = (unsigned)vt_bits(x[v + 1]);
        y[v] = fast_act<true>(x[v]);
        y[v + 1] = fast_act<true>(x[v + 1]);
        largest = bits > largest ? bits : largest;
        largest = more > largest ? more : largest;
        nearer(nearest, y[v], y[v + 1]);
    }
    return near_middle(nearest) || largest >= SILU_LOW_BITS;
}
VT_FN bool undecided(float y, float x) {
    const unsigned off = (unsigned)(vt_bits(y) + 0x8000 + SILU_NEAR) & 0xffffu;
    return off <= 2 * SILU_NEAR || !(x > -SILU_LOW);
}

template <int V> VT_FN void brain_silu(float (&x)[V]) {
    float y[V];
    if (quick_silu(y, x)) {
        unsigned left = 0;
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (undecided(y[v], x[v])) left |= 1u << v;
        decide(y, left, x, x, [](float sum, float) { return vt_silu(sum); });
    }
#pragma unroll
    for (int v = 0; v < V; ++v) x[v] = y[v];
}

// The results of V sums: `kind` is what they are stored as.
template <int HOW, int V> VT_FN void activate(float (&y)[V], const float (&total)[V], int flags, int kind) {
#pragma unroll
    for (int v = 0; v < V; ++v) y[v] = HOW == EITHER && (flags & SUM) ? through(total[v], kind) : total[v];
    if (!(flags & ACTIVATED)) return;
#pragma unroll
    for (int v = 0; v < V; ++v) y[v] = vt_silu(y[v]);
}

// Slots of [C, taps]; a negative slot is null, and so is one that does not exist, which a capture cannot refuse.
struct Taps {
    void* state;
    const int* slots;
    i64 count, width, taps;
    int kind;

    VT_MEMBER i64 slot(i64 n) const {
        i64 found = slots == nullptr ? n : slots[n];
        return found < count ? found : -1;
    }
    VT_MEMBER i64 at(i64 slot, i64 channel) const { return (slot * width + channel) * taps; }
};
