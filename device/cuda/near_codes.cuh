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

// Of eight codes in that form, the even ones and the odd ones: the word, without codes of -0. BOUNDED: none is beyond the
// largest code, whose place those of values under 64 take elsewhere.
template <bool BOUNDED> VT_FN unsigned codes_of_bytes(unsigned even, unsigned odd) {
    unsigned word = joined_halves(even >> 1, odd * 8u);
    if (!BOUNDED) {
        const unsigned beyond = word & 0x88888888u;
        word = (word | (beyond - (beyond >> 3))) & 0x77777777u;
    }
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

// Eight codes of sums times factor 2^14. `unsure`: ones of UNSURE where some change within `near` 2^14, be they beyond
// the largest code.
template <bool BOUNDED> VT_FN unsigned codes_near(const float (&y)[8], float factor, float near, unsigned& unsure) {
    unsigned high[4], low[4];
    halves_around(high, low, y, factor, near);
    const unsigned even = four_rounded(high[0], high[1]), odd = four_rounded(high[2], high[3]);
    unsure = even ^ four_rounded(low[0], low[1]);
    unsure |= odd ^ four_rounded(low[2], low[3]);
    return codes_of_bytes<BOUNDED>(even, odd);
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

// Whether the last rounding of NVFP4's factors is left to bytes in doubt: elsewhere registers are short then.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define QUICK_FACTORS false
#else
#define QUICK_FACTORS true
#endif

// What a quantiser's scales are made with, and a code's factor as the mirror has it.
template <int METHOD, bool Q> struct NearMx {
    VT_MEMBER explicit NearMx(const ToMx<METHOD, Q>&) {}
    static VT_MEMBER float exactly(unsigned, float factor) { return factor * 0x1p14f; }
};
// sixth: of the global scale; unit: 2^14 times its reciprocal. Where that is beyond 2^-95 ... 2^95 no scale is sure.
struct NearNv {
    float sixth, unit;
    VT_MEMBER explicit NearNv(const ToNv& to) : sixth(to.global * vt_float(0x3e2aaaab)) {
        const float back = to.global == 0.0f ? 0.0f : 1.0f / to.global;
        unit = back * 0x1p14f;
        if (!((unsigned)vt_bits(back) - 0x10000000u < 0x5f000000u)) sixth = vt_float(0x7fc00000);
    }
    VT_MEMBER float exactly(unsigned code, float factor) const {
        if (!QUICK_FACTORS) return factor * 0x1p14f;
        return middling_reciprocal(normal_e4m3(code & 0xffu) * unit) * 0x1p14f;
    }
};
template <int METHOD, bool Q> VT_FN NearMx<METHOD, Q> near_by(const ToMx<METHOD, Q>& to) { return NearMx<METHOD, Q>(to); }
VT_FN NearNv near_by(const ToNv& to) { return NearNv(to); }

// The largest size's exponent is what counts.
VT_FN Near near_of_top(float top, float bound) {
    const unsigned most = (unsigned)vt_bits(top + bound + TINY), least = (unsigned)vt_bits(top - bound + TINY);
    const unsigned byte = most >> 23;
    const float factor = vt_float((int)((241u - byte) << 23 | 0x400000u));  // 3 2^(113 - byte)
    return settled_near(byte, factor, bound * factor, ((most ^ least) < 0x800000u) & (byte < 220u));
}

// Of the sums' mean square, its root, and their mean. Deviations differ by that of the differences, at most `bound`,
// variances by that times their sum; both ways round the sum and the squares' some 100 times by 2^-24 of the mean square.
// Where squares are infinite the byte is 255. Of a variance that may be negative there is no root: LEAST_BOUND in `bound` is
// for squares too small for float32's normal numbers. `none`: all squares are zero.
// What is sure has 2.1 root + 64 bound below 16 steps: no value, at most sqrt(32) root, is 64 steps, and `bound` is below a
// quarter of one.
#define LEAST_BOUND 0x1p-60f
VT_FN Near near_of_squares(float square, float root, float mean, float bound, bool none) {
    const float variance = vt_fma(-mean, mean, square), scale = vt_float(0x3ef96285);  // float32(2.92247856 / 6)
    const float both = vt_fma(2.1f / 64.0f, root, bound), doubt = vt_fma(square, 0x1p-16f, 128.0f * bound * both);
    const unsigned most = (unsigned)vt_bits(vt_fma(fast_root(variance + doubt), scale, TINY));
    const unsigned least = (unsigned)vt_bits(vt_fma(fast_root(variance - doubt), scale, TINY));
    const unsigned byte = most >> 23;
    const float factor = vt_float((int)((240u - byte) << 23));
    const bool sure = (((most ^ least) < 0x800000u) | none) & (byte < 170u) & (both * factor < 0x1p-16f);
    return {byte, factor, vt_fma(bound, factor, 0x1p-35f), sure};
}

// e4m3_pair, of which the compiler need not be told that its upper half is zero.
VT_FN unsigned e4m3_word(float lo, float hi) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned word;
    asm("{.reg .b16 pair, zero;\nmov.b16 zero, 0;\ncvt.rn.satfinite.e4m3x2.f32 pair, %1, %2;\nmov.b32 %0, {pair, zero};}"
        : "=r"(word) : "f"(hi), "f"(lo));
    return word;
#else
    return e4m3_pair(lo, hi);
#endif
}

// Of 16 sums the largest size. Where sums are zero any scale has their codes. In `bound` are 8 more than sums are apart: the
// scale is of three products that round and the mirror's of two, a value of one that the mirror rounds and of a factor that
// is 1 ulp from the reciprocal, as the mirror's is half of one.
VT_FN Near near_of_sixteen(float top, float bound, const NearNv& by) {
    const float away = bound * by.sixth, most = vt_fma(top, by.sixth, away);
    const unsigned both = e4m3_word(most, vt_fma(top, by.sixth, -away)), exponent = both << 20 & 0x0ff00000u;
    const float step = vt_float((int)(exponent + 0x3c000000u)) * by.unit;
    const float factor = QUICK_FACTORS ? fast_reciprocal(step) : middling_reciprocal(step);
    const bool sure = ((both ^ both >> 8) & 0xffu) == 0 & (most == 0.0f | (exponent - 0x00800000u < 0x07600000u));
    return settled_near(both, factor, bound * factor, sure);
}
