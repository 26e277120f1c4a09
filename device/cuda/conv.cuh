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

// SiLU of eight sums that are stored as bfloat16: fast functions, and the polynomial where these might decide
// otherwise (fast.cuh). A large positive x is its own SiLU to either, so only x <= -16 is beyond the fast ones. Of two
// bfloat16 the middle is where the lower half of the bits, moved up to be compared, is near its own.
VT_FN void brain_silu(float (&y)[8], const float (&x)[8]) {
    unsigned nearest = 0xffffffffu, lowest = 0, left = 0;
#pragma unroll
    for (int v = 0; v < 8; ++v) {
        y[v] = fast_act<true>(x[v]);
        const unsigned off = ((unsigned)vt_bits(y[v]) + 0x8000 + NEAR) << 16, bits = (unsigned)vt_bits(x[v]);
        nearest = off < nearest ? off : nearest;
        lowest = bits > lowest ? bits : lowest;  // of negative numbers the more negative has the larger bits
    }
    if (nearest > (2 * NEAR) << 16 && lowest < 0xc1800000u) return;
#pragma unroll
    for (int v = 0; v < 8; ++v)
        if (off_middle(y[v]) <= 2 * NEAR || !(x[v] > -FAST_LIMIT)) left |= 1u << v;
    decide(y, left, x, x, [](float gate, float) { return vt_silu(gate); });
}

// The results of V sums: `kind` is what they are stored as.
template <int V, int HOW, bool BRAIN> VT_FN void activate(float (&y)[V], float (&total)[V], int flags, int kind) {
    if (HOW == EITHER && (flags & SUM)) {
#pragma unroll
        for (int v = 0; v < V; ++v) total[v] = through(total[v], kind);
    }
    if (!(flags & ACTIVATED)) {
#pragma unroll
        for (int v = 0; v < V; ++v) y[v] = total[v];
        return;
    }
    if constexpr (BRAIN && V == 8) {
        brain_silu(y, total);
    } else {
#pragma unroll
        for (int v = 0; v < V; ++v) y[v] = vt_silu(total[v]);
    }
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
