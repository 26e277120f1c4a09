// Codes of e2m1 where a tie goes to the smaller size.
#pragma once
#include "e2m1_halves.cuh"
#include "fp4.cuh"

// fma(a, b, c) rounded upwards.
#ifdef __CUDACC__
VT_FN float fma_up(float a, float b, float c) { return __fmaf_ru(a, b, c); }
#else
VT_FN float fma_up(float a, float b, float c) {
    double exact = (double)a * (double)b + (double)c;
    float y = (float)exact;
    return (double)y < exact ? std::nextafter(y, HUGE_VALF) : y;
}
#endif

// fp4.cuh's `with_code` where a tie goes to the smaller size: sums round upwards from the middles on, to whole numbers of
// halves below 2 and of ones below 4.
VT_FN float with_lower_code(float acc, float v, float unit) {
    float size = vt_abs(v);
    float below_2 = fma_to_unit(fma_up(size, 2.0f, 8388607.5f), -0.25f, 2097153.0f);  // 1 - ceil(2 size - 0.5) / 4
    float below_4 = fma_to_unit(fma_up(size, 1.0f, 8388605.5f), -0.5f, 4194305.0f);   // 1 - ceil(size - 2.5) / 2
    float up_to_5 = fma_to_unit(size, -2097152.0f, 10485761.0f);
    float negative = fma_to_unit(v, -33554432.0f, -8388608.0f);
    acc = vt_fma(below_2, -4.0f * unit, acc);
    acc = vt_fma(below_4, -2.0f * unit, acc);
    acc = vt_fma(up_to_5, -unit, acc);
    return vt_fma(negative, 8.0f * unit, acc);
}

VT_FN unsigned lower_word(const float (&v)[8]) {
    float lo = 8388608.0f + 30583.0f, hi = lo;  // 0x7777
    float unit = 1.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        lo = with_lower_code(lo, v[j], unit);
        hi = with_lower_code(hi, v[j + 4], unit);
        unit *= 16.0f;
    }
    return ((unsigned)vt_bits(lo) & 0xffffu) | (unsigned)vt_bits(hi) << 16;
}

// Eight codes of numbers under 7, a tie to the smaller size. A float32 times 1 - 2^-24, cut off, is the one before it.
#ifdef __CUDACC__
VT_FN float product_cut(float a, float b) { return __fmul_rz(a, b); }
#else
static inline float product_cut(float a, float b) {
    double exact = (double)a * (double)b;
    float y = (float)exact;
    return std::fabs((double)y) > std::fabs(exact) ? std::nextafter(y, 0.0f) : y;
}
#endif

VT_FN unsigned lower_word_of_numbers(const float (&v)[8]) {
    const float below = vt_float(0x387fffff);  // 2^-14 times that
    unsigned h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) h[i] = cut_to_halves(product_cut(v[2 * i], below), product_cut(v[2 * i + 1], below));
    return e2m1_of_halves(h);
}
