// Quotients of bfloat16 by a scale of which nothing is seen but codes of e4m3, in two operations.
#pragma once
#include "fp8_scales.cuh"

VT_FN bool usual(float scale) { return scale < 0x1p60f && scale > 0x1p-60f; }

// x / s as x (inverse + low), the reciprocal in two parts: the sum is within 2^-45 of the quotient before it is rounded,
// and then both are the same float32 unless the quotient is that close to the middle of two of them. Only the two middles
// beside a value halfway between two codes matter, t sixteenths, 16 <= t < 32. With M the 24 bits of s, and x of eight
// bits, that takes an M within 16 of a multiple of 2^20, and there all are tried (parity/test_device_calls_quant.py).
// The first part is rounded down, so that the second has its sign and zeros keep theirs; it is never 0, so that infinity
// stays. Scales from 2^-60 on, infinity and NaN: large ones are shrunk, as are the x, of which none that matters becomes
// subnormal.
struct Quotients {
    float inverse, low;
    bool large;

    VT_MEMBER Quotients(float inverse, float low) : inverse(inverse), low(low), large(false) {}
    VT_MEMBER explicit Quotients(float scale) : large(!usual(scale)) {
        if (large) scale *= 0x1p-64f;
        inverse = 1.0f / scale;
        float rest = vt_fma(-inverse, scale, 1.0f);
        if (rest < 0.0f) {
            inverse = vt_float(vt_bits(inverse) - 1);
            rest = vt_fma(-inverse, scale, 1.0f);
        }
        low = fmaxf(rest * inverse, 0x1p-140f);
    }
    template <int V> VT_MEMBER void divide(float (&q)[V], const float (&x)[V]) const {
        if (large) {
#pragma unroll
            for (int j = 0; j < V; ++j) q[j] = x[j] * 0x1p-64f;
#pragma unroll
            for (int j = 0; j < V; ++j) q[j] = vt_fma(q[j], inverse, q[j] * low);
            return;
        }
#pragma unroll
        for (int j = 0; j < V; ++j) q[j] = vt_fma(x[j], inverse, x[j] * low);
    }
};
