// The short causal convolution, y = act(bias + sum_j w_j x_(t - K + 1 + j)), one chain of fma, j ascending; what its
// kernels share.
#pragma once
#include "fast.cuh"

// Products rounded to x's dtype; the sum rounded to it; SiLU.
enum { PRODUCTS = 1, SUM = 2, ACTIVATED = 4 };  // device/causal_conv.py
// Which of the first two a kernel knows: neither, products alone, or what the flags say.
enum { PLAIN, ROUNDED, EITHER };

template <int HOW> VT_FN void add_tap(float& total, float w, float tap, int flags, int kind) {
    if (HOW == ROUNDED || (HOW == EITHER && (flags & PRODUCTS))) total += through(w * tap, kind);
    else total = vt_fma(w, tap, total);
}

// SiLU of eight sums that are stored as bfloat16: fast functions, and the polynomial where these might decide
// otherwise. Of fast.cuh's terms the exponent's rounding and that of log2(e) halve for x > -11, where |x| log2(e) < 16,
// and a division for two (1 / a = b / (ab)) costs 2 more: 22 in all, CLOSE is a quarter more. Above 11 e^-x and its
// errors vanish beside 1. One x <= -11 or NaN spoils its neighbour's division too: then the polynomial makes both.
#define CLOSE 28
#define LOWEST 0xc1300000u  // -11 as bits; the more negative, the larger

VT_FN void brain_silu(float (&y)[8], const float (&x)[8]) {
    unsigned nearest = 0xffffffffu, lowest = 0, left = 0;
    float number = 0.0f;  // or NaN
#pragma unroll
    for (int v = 0; v < 8; v += 2) {
        const float a = 1.0f + fast_exp2(x[v] * -1.442695f), b = 1.0f + fast_exp2(x[v + 1] * -1.442695f);
        const float both = fast_reciprocal(a * b);
        number += both;
        y[v] = x[v] * (both * b);
        y[v + 1] = x[v + 1] * (both * a);
    }
#pragma unroll
    for (int v = 0; v < 8; ++v) {
        const unsigned off = ((unsigned)vt_bits(y[v]) + 0x8000 + CLOSE) << 16, bits = (unsigned)vt_bits(x[v]);
        nearest = off < nearest ? off : nearest;
        lowest = bits > lowest ? bits : lowest;
    }
    const bool fair = lowest < LOWEST && number == number;
    if (nearest > (2 * CLOSE) << 16 && fair) return;
#pragma unroll
    for (int v = 0; v < 8; ++v)
        if (((unsigned)vt_bits(y[v]) + 0x8000 + CLOSE) << 16 <= (2 * CLOSE) << 16 || !(x[v] > -11.0f) ||
            !(x[v ^ 1] > -11.0f))
            left |= 1u << v;
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

VT_FN float load_element(const void* base, i64 at, int kind) {
    float x[1];
    load(x, base, at, kind);
    return x[0];
}

VT_FN void store_element(void* base, i64 at, float y, int kind) {
    float x[1] = {y};
    store(base, at, x, kind);
}
