// Decays of Kimi delta attention, one for each channel, as powers of 2.
#pragma once
#include "fast.cuh"

// MIRROR's 2^x.
VT_FN float exp2_of(float x) { return vt_exp(x * 0.6931471805599453f); }

#ifdef __CUDACC__
VT_FN float fast_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
VT_FN float fast_log2(float x) { return std::log2(x); }
#endif

// log2(1 + 2^(y log2 e)), a softplus over ln 2, to about 2^-16 of itself: where 1 + e would round e away, a series.
VT_FN float fast_softplus(float y) {
    float scaled = y * 1.442695f, e = fast_exp2(scaled);
    float series = vt_fma(e, vt_fma(e, vt_fma(e, -0.36067376f, 0.48089835f), -0.7213475f), 1.442695f);
    float y2 = e < 0x1p-6f ? e * series : fast_log2(1.0f + e);
    return y > 20.0f ? scaled : y2;
}
