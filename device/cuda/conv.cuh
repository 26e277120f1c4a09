// The short causal convolution, y = act(bias + sum_j w_j x_(t - K + 1 + j)), one chain of fma, j ascending; what its
// kernels share.
#pragma once
#include "elements.cuh"

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

// The results of V sums: `kind` is what they are stored as.
template <int HOW, int V> VT_FN void activate(float (&y)[V], const float (&total)[V], int flags, int kind) {
#pragma unroll
    for (int v = 0; v < V; ++v) y[v] = HOW == EITHER && (flags & SUM) ? through(total[v], kind) : total[v];
    if (!(flags & ACTIVATED)) return;
#pragma unroll
    for (int v = 0; v < V; ++v) y[v] = vt_silu(y[v]);
}

// This block's number divided by another: `split` has that and, above 32 bits, (2^32 - 1) divided by it, for the
// quotient.
struct Part {
    unsigned whole, rest;
};
VT_FN Part part_of(i64 split) {
    const unsigned by = (unsigned)split;
    if (by <= 1) return {blockIdx.x, 0};
    unsigned whole = (unsigned)((unsigned long long)blockIdx.x * (unsigned)(split >> 32) >> 32);
    // That is right, or one too few.
    if (blockIdx.x - whole * by >= by) ++whole;
    return {whole, blockIdx.x - whole * by};
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
