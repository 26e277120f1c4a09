// Scales and codes of sums that are near the mirror's: those that all sums as near have, and which may be others.
#pragma once
#include "rotated_codes.cuh"

// 16 numbers and a sum cut off two bits below the last of the largest as a float32, 8.5 of it (8.3 was the most seen), and
// then their sum, 2 of that, on Hopper; one bit below, by eights, before.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define TENSOR_STEP 10.5f
#else
#define TENSOR_STEP 24.0f
#endif

// Sizes of at most 6 2^-14, the signs as they were.
VT_FN unsigned no_more_than_six(unsigned pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    asm("min.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x0e000e00u));
    return pair;
#else
    const unsigned low = pair & 0x7fffu, high = pair >> 16 & 0x7fffu;
    return (pair & 0x80008000u) | (low < 0x0e00u ? low : 0x0e00u) | (high < 0x0e00u ? high : 0x0e00u) << 16;
#endif
}

#ifdef __CUDACC__
VT_FN float fast_root(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
VT_FN float fast_root(float x) { return sqrtf(x); }
#endif

#define UNSURE 0x0e0e0e0eu

// Of four values' float16s a byte each: sign, three zeros, the code cut off, its half, which 1 more rounds.
VT_FN unsigned four_rounded(unsigned low, unsigned high) {
#ifdef __CUDACC__
    unsigned bytes;  // by one instruction, which the compiler takes apart
    asm("prmt.b32 %0, %1, %2, 0x7531;" : "=r"(bytes) : "r"(low), "r"(high));
    return bytes + 0x01010101u;
#else
    return chosen_bytes(low, high, 0x7531u) + 0x01010101u;
#endif
}

// Of eight codes in that form, the even ones and the odd ones: the word, without codes of -0.
VT_FN unsigned codes_of_bytes(unsigned even, unsigned odd) {
    const unsigned word = joined_halves(even >> 1, odd * 8u);
    return word | (joined_halves(even >> 4, odd) & (word + 0x77777777u));
}

// Eight values and their neighbours `near` above and below, as float16s: 0 and 2, 4 and 6, 1 and 3, 5 and 7.
VT_FN void halves_around(unsigned (&high)[4], unsigned (&low)[4], const float (&y)[8], float factor, float near) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float one = y[i / 2 + i % 2 * 4], two = y[i / 2 + i % 2 * 4 + 2];
        high[i] = cut_to_halves(vt_fma(one, factor, near), vt_fma(two, factor, near));
        low[i] = cut_to_halves(vt_fma(one, factor, -near), vt_fma(two, factor, -near));
    }
}

// Eight codes of sums times factor 2^14. `unsure`: ones of UNSURE where some change within `near` 2^14; values beyond the
// largest code are as large as that.
template <bool BOUNDED> VT_FN unsigned codes_near(const float (&y)[8], float factor, float near, unsigned& unsure) {
    unsigned high[4], low[4];
    halves_around(high, low, y, factor, near);
    if (!BOUNDED)
#pragma unroll
        for (int i = 0; i < 4; ++i) high[i] = no_more_than_six(high[i]), low[i] = no_more_than_six(low[i]);
    const unsigned even = four_rounded(high[0], high[1]), odd = four_rounded(high[2], high[3]);
    unsure = even ^ four_rounded(low[0], low[1]);
    unsure |= odd ^ four_rounded(low[2], low[3]);
    return codes_of_bytes(even, odd);
}

// What a row's sums are made codes with: the code of their scale, `factor` times 2^-14, `near` times both; whether all sums
// within `bound` have that code, and `near` leaves a code's sign in no doubt but that of zero.
struct Near {
    unsigned code;
    float factor, near;
    bool sure;
};

VT_FN Near settled_near(unsigned code, float factor, float near, bool sure) {
    return {code, factor, near, sure && near < 0x1p-16f};
}

// How far sums by tensor cores are from the mirror's, where a group is a vector: of the largest of them, as 2^-24 of it. A
// chain's roundings are at most 38.3 sqrt(sum x^2) c of its 16 elements (the root of 15^2 + 15^2 + 14^2 + ... + 1), and
// sqrt(sum x^2) c of the vector is the root of the sums' mean square.
#define CHAIN_ROUNDS 38.3f

// The largest size's exponent is what counts.
VT_FN Near near_of_top(float top, float bound) {
    const unsigned most = (unsigned)vt_bits(top + bound + TINY), least = (unsigned)vt_bits(top - bound + TINY);
    const unsigned byte = most >> 23;
    const float factor = vt_float((int)((241u - byte) << 23 | 0x400000u));  // 3 2^(113 - byte)
    return settled_near(byte, factor, bound * factor, ((most ^ least) < 0x800000u) & (byte < 220u));
}

// Of the sums' mean square, its root, and their mean. Deviations differ by that of the differences, at most `bound`,
// variances by that times their sum; both ways round the sum and the squares' some 100 times by 2^-24 of the mean square.
// Larger ones might be infinite in one way alone. `none`: all are zero.
VT_FN Near near_of_squares(float square, float root, float mean, float bound, bool none) {
    const float variance = vt_fma(-mean, mean, square), scale = vt_float(0x3ef96285);  // float32(2.92247856 / 6)
    const float doubt = vt_fma(square, 0x1p-16f, 2.0f * bound * vt_fma(2.1f, root, bound));
    const unsigned most = (unsigned)vt_bits(vt_fma(fast_root(variance + doubt), scale, TINY));
    const unsigned least = (unsigned)vt_bits(vt_fma(fast_root(variance - doubt), scale, TINY));
    const unsigned byte = most >> 23;
    const float factor = vt_float((int)((240u - byte) << 23));
    return settled_near(byte, factor, vt_fma(bound, factor, 0x1p-35f),
                        ((most ^ least) < 0x800000u) & (byte < 170u) & ((variance > doubt) | none));
}

// Of 16 sums the largest size.
VT_FN Near near_of_sixteen(float top, float bound, const ToNv& to) {
    const float sixth = vt_float(0x3e2aaaab);
    const unsigned both = e4m3_pair(to.global * ((top + bound) * sixth), to.global * ((top - bound) * sixth));
    const unsigned code = both & 0xffu;
    const float scale = normal_e4m3(code), step = scale * to.back, factor = middling_reciprocal(step) * TO_HALVES;
    // Where all sums are zero any middling step has their codes.
    const bool none = top + bound == 0.0f, fine = (unsigned)vt_bits(step) - 0x0d800000u < 0x64000000u;
    const bool sure = (code == both >> 8) & fine & (none | ((unsigned)vt_bits(scale) - 0x3c800000u < 0x07600000u));
    return settled_near(code, factor, bound * factor, sure);
}
