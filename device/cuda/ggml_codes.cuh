// Activations to codes of eight bits: a lane has eight neighbours, four lanes a block of 32, a warp one of 256.
#pragma once
#include "storage.cuh"

struct Codes {
    float d;
    int code[8];
    int total;  // of this lane's codes
};

VT_FN void load_eight(float (&x)[8], const void* a, i64 at, int kind, bool wide) {
    if (wide) return load(x, a, at, kind);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float one[1];
        load(one, a, at + i, kind);
        x[i] = one[0];
    }
}

#ifdef __CUDACC__
// The larger one, or NaN where either is.
VT_FN float larger(float a, float b) {
    float x;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}
// The nearest integer, halves away from zero: half a step towards it, then what is left of the point. 0 for NaN.
VT_FN int nearest_away(float x) { return __float2int_rz(__fadd_rz(x, copysignf(0.5f, x))); }
VT_FN int nearest_even(float x) { return __float2int_rn(x); }
VT_FN unsigned largest_of_warp(unsigned x) { return __reduce_max_sync(0xffffffffu, x); }
VT_FN int first_of_warp(bool yes) { return __ffs(__ballot_sync(0xffffffffu, yes)) - 1; }
#else
static inline float larger(float a, float b) { return a != a || b != b ? VT_NAN : a > b ? a : b; }
static inline int nearest_away(float x) {
    double sum = (double)x + (x < 0.0f ? -0.5 : 0.5);  // exact, or far from any integer
    return x == x ? (int)sum : 0;
}
static inline int nearest_even(float x) { return x == x ? (int)rintf(x) : 0; }
static inline unsigned largest_of_warp(unsigned x) {
    for (int m = 16; m >= 1; m /= 2) {
        unsigned other = __shfl_xor_sync(0xffffffffu, x, m);
        x = other > x ? other : x;
    }
    return x;
}
static inline int first_of_warp(bool yes) {
    int first = yes ? emulation::running->number & 31 : 32;
    for (int m = 16; m >= 1; m /= 2) {
        int other = __shfl_xor_sync(0xffffffffu, first, m);
        first = other < first ? other : first;
    }
    return first;
}
#endif

VT_FN Codes codes_32(const float (&x)[8]) {
    Codes found;
    float peak = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) peak = larger(peak, vt_abs(x[i]));
#pragma unroll
    for (int m = 1; m <= 2; m *= 2) peak = larger(peak, __shfl_xor_sync(0xffffffffu, peak, m));
    found.d = peak / 127.0f;
    float inverse = 1.0f / found.d;
    if (!(vt_abs(inverse) < VT_INF)) inverse = 0.0f;
    found.total = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        found.code[i] = nearest_away(x[i] * inverse);
        found.total += found.code[i];
    }
    return found;
}

VT_FN Codes codes_256(const float (&x)[8]) {
    Codes found;
    float most = 0.0f, extremum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (vt_abs(x[i]) > most) {
            most = vt_abs(x[i]);
            extremum = x[i];
        }
    }
    // The first lane of those whose value is as large as any: sizes stand in the order of their bits.
    unsigned size = (unsigned)vt_bits(most), largest = largest_of_warp(size);
    extremum = __shfl_sync(0xffffffffu, extremum, first_of_warp(size == largest));
    most = vt_float((int)largest);
    float inverse = -127.0f / extremum;
    bool dead = most == 0.0f || !(vt_abs(inverse) < VT_INF);
    found.d = dead ? 0.0f : 1.0f / inverse;
    found.total = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        int code = dead ? 0 : nearest_even(inverse * x[i]);
        found.code[i] = code > 127 ? 127 : code;
        found.total += found.code[i];
    }
    return found;
}

// d as float16 bits, and Q8_1's d * total: a NaN has the bits that a host's has.
VT_FN unsigned f16_of(float x) { return x != x ? 0x7e00u : narrow_f16(x, 0.0f) & 0xffffu; }
VT_FN unsigned f16_of_sum(float d, int total) {
    float sum = d * (float)total;
    return sum != sum && d == d ? 0xfe00u : f16_of(sum);
}

VT_FN unsigned packed4(int a, int b, int c, int d) {
    return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (unsigned)d << 24;
}
