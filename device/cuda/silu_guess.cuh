// SiLU and sigmoid of bfloat16 by the hardware's fast functions (fast.cuh), and how far those may be from MIRROR's
// polynomials: where nothing is seen of a result but a bfloat16 or a code, only what lies that close to the middle of
// two of them is computed as MIRROR does.
#pragma once
#include "fast.cuh"

// The index of the lowest bit that is set.
VT_FN int lowest_bit(unsigned bits) {
#ifdef __CUDACC__
    return __ffs((int)bits) - 1;
#else
    return __builtin_ctz(bits);
#endif
}

// The least of eight bfloat16; NaN are passed over.
VT_FN float least_of_bf16(const Raw<8>& raw) {
#ifdef __CUDACC__
    unsigned a, b;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(a) : "r"(raw.a.x), "r"(raw.a.y));
    asm("min.bf16x2 %0, %1, %2;" : "=r"(b) : "r"(raw.a.z), "r"(raw.a.w));
    asm("min.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return fminf(vt_float((int)(a << 16)), vt_float((int)(a & 0xffff0000u)));
#else
    float x[8], least = VT_INF;
    widen(x, raw, BF16);
    for (int j = 0; j < 8; ++j) least = fminf(least, x[j]);
    return least;
#endif
}

// The error of fast_act(g) * u, relative and in units of 2^-24, which are at most an ulp: with e = exp(-g) the rounding
// of its exponent (2.8 for g > -4, 44.4 for g > -87), that of log2(e) (0.9, 19.5), ex2 4, the sum 1, rcp 2, two
// products 2, MIRROR's own 3. A positive g makes e, and what is wrong with it, small. From -87 down the reciprocal may
// be zero.
#define NEAR_MIDDLING 20
#define NEAR_LARGE 96
#define MIDDLING_GATE -4.0f
#define LARGEST_GATE -87.0f

// Whether a float32 that is that close to the middle of two bfloat16 is among those seen; `least`: that of the gates.
// Hopper and later look at the lower halves of two floats' bits at once, in the two halves of a word.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MIDDLES_BY_PAIRS 1
#else
#define MIDDLES_BY_PAIRS 0
#endif
struct Middles {
    unsigned start, most, nearest;

    VT_MEMBER Middles(float least) : nearest(0xffffffffu) {
        const unsigned near = least > MIDDLING_GATE ? NEAR_MIDDLING : NEAR_LARGE;
        start = (0x8000u + near) * (MIDDLES_BY_PAIRS ? 0x10001u : 0x10000u);
        most = least > LARGEST_GATE ? near << 17 : 0xffffffffu;
    }
    // The lower half of x's bits, from the middle on, in the upper half of a word.
    VT_MEMBER unsigned off(float x) const { return ((unsigned)vt_bits(x) << 16) + (start & 0xffff0000u); }
    VT_MEMBER void see(float a, float b) {
#if MIDDLES_BY_PAIRS
        asm("{\n.reg .b32 off;\nprmt.b32 off, %1, %2, 0x5410;\nadd.u16x2 off, off, %3;\nmin.u16x2 %0, %0, off;\n}"
            : "+r"(nearest) : "r"(vt_bits(a)), "r"(vt_bits(b)), "r"(start));
#else
        const unsigned one = off(a), two = off(b), less = one < two ? one : two;
        nearest = less < nearest ? less : nearest;
#endif
    }
    VT_MEMBER bool any() const { return nearest <= (most | 0xffffu) || (MIDDLES_BY_PAIRS && nearest << 16 <= most); }
    VT_MEMBER bool near(float x) const { return off(x) <= most; }
};
