// Codes of e2m1 out of float16s, four instructions an element.
//
// e2m1 has one bit of mantissa, and below 1 no exponent; float16 has none below 2^-14. So the bits of the float16
// v 2^-14 but for the last nine are the code of v, cut off, the ninth is its half, and sums of 1 round: where v was cut
// off to float16, what is in the middle goes up, as it must at 0.75, 1.75 and 3.5. At 0.25, 1.25, 2.5 and 5 it must go
// down, so that no v may be one of those: `may_tie` says of a factor whether a product of a bfloat16 with it can be, and
// where no factor says it, values with ones among their last 16 bits are none.
#pragma once
#include "e2m1_steps.cuh"
#include "fast.cuh"
#include "fp8_scales.cuh"

// To float16, cut off.
#ifdef __CUDACC__
VT_FN unsigned cut_to_halves(float lo, float hi) {
    unsigned pair;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}
#else
static inline unsigned cut_to_half(float x) {
    const unsigned sign = (unsigned)vt_bits(x) >> 16 & 0x8000u;
    const float size = vt_abs(x);
    if (!(size < 65536.0f)) return sign | (x == x ? 0x7bffu : 0x7fffu);
    if (size < 0x1p-14f) return sign | (unsigned)(size * 0x1p24f);
    return sign | ((unsigned)vt_bits(size) - (112u << 23)) >> 13;
}
static inline unsigned cut_to_halves(float lo, float hi) { return cut_to_half(lo) | cut_to_half(hi) << 16; }
#endif

#define TO_HALVES 0x1p-14f  // a value's factor

// The lower halves of a's bytes and the upper ones of b's.
VT_FN unsigned joined_halves(unsigned a, unsigned b) {
#ifdef __CUDACC__
    unsigned c;
    asm("lop3.b32 %0, %1, %2, 0x0f0f0f0f, 0xe4;" : "=r"(c) : "r"(a), "r"(b));
    return c;
#else
    return (a & 0x0f0f0f0fu) | (b & 0xf0f0f0f0u);
#endif
}

// Eight codes, no code of -0, of values under 7 that were cut off to float16, or (CUT false) rounded.
template <bool CUT = true> VT_FN unsigned e2m1_of_halves(const unsigned (&h)[4]) {
    const unsigned a = chosen_bytes(h[0], h[1], 0x7351u), b = chosen_bytes(h[2], h[3], 0x7351u), half = CUT ? 0x01010101u : 0u;
    const unsigned even = chosen_bytes(a, b, 0x5410u), odd = chosen_bytes(a, b, 0x7632u);
    const unsigned word = joined_halves((even + half) >> 1, odd * 8u + half * 8u);
    const unsigned signs = (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
    return word | (signs & (word + 0x77777777u));
}

// Of four, a byte each: their sign, four zeros, their code, and its half.
VT_FN unsigned upper_bytes(unsigned a, unsigned b) { return chosen_bytes(a, b, 0x7531u); }
VT_FN unsigned e2m1_of_bytes(unsigned bytes) {
    const unsigned sums = bytes + 0x01010101u, codes = sums >> 1 & 0x07070707u;
    const unsigned with_signs = codes | (sums >> 4 & 0x08080808u & (codes + 0x07070707u));
    return chosen_bytes(with_signs | with_signs >> 4, 0u, 0x4420u);
}

// Of eight bfloat16 and their factor.
VT_FN unsigned e2m1_of_bf16(const uint4& raw, float factor) {
    const unsigned w[4] = {raw.x, raw.y, raw.z, raw.w};
    unsigned h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        h[i] = cut_to_halves(vt_float((int)(w[i] << 16)) * factor, vt_float((int)(w[i] & 0xffff0000u)) * factor);
    return e2m1_of_halves(h);
}

// Of eight bfloat16 and a power of two: the products are float16s, ties among them.
VT_FN unsigned e2m1_of_exact(const uint4& raw, float factor) {
    const unsigned w[4] = {raw.x, raw.y, raw.z, raw.w};
    unsigned h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        h[i] = cut_to_halves(vt_float((int)(w[i] << 16)) * factor, vt_float((int)(w[i] & 0xffff0000u)) * factor);
        h[i] += 0x00ff00ffu + (h[i] >> 9 & 0x00010001u);
    }
    return e2m1_of_halves<false>(h);
}

// Whether float32(x / step), by way of float32(1 / step), can be 0.25, 1.25, 2.5 or 5 for a bfloat16 x: the two roundings
// move x by 3 ulps at most from a power of two times step or 1.25 step, which itself rounds, so that one of those ends in
// 16 zeros but for some 4 ulps. `step` is a middling number.
VT_FN bool may_tie(float step) {
    const unsigned one = (unsigned)vt_bits(step) + 4u, more = (unsigned)vt_bits(1.25f * step) + 4u;
    return (one & 0xffffu) <= 8u || (more & 0xffffu) <= 8u;
}

// 1 / x to nearest, of a middling x.
VT_FN float middling_reciprocal(float x) {
    const float near = fast_reciprocal(x);
    return vt_fma(near, -vt_fma(x, near, -1.0f), near);
}

// Whether the values of blocks are under 7: whose largest element is 6 times `step`, but for the rounding of its e4m3,
// `scale`, which is a normal number under the largest. The step is between 2^-100 and 2^100.
VT_FN bool is_middling(float step, float scale) {
    return (unsigned)vt_bits(scale) - 0x3c800000u < 0x07600000u && (unsigned)vt_bits(step) - 0x0d800000u < 0x64000000u;
}

// 2^-14 / step where the codes of such a block of bfloat16 may be made by halves, 0 elsewhere.
VT_FN float factor_to_halves(float step, float scale) {
    return is_middling(step, scale) && !may_tie(step) ? middling_reciprocal(step) * TO_HALVES : 0.0f;
}

// The value of e4m3's normal codes.
VT_FN float normal_e4m3(unsigned code) { return vt_float((int)((code << 20) + 0x3c000000u)); }

// The largest of 16 bfloat16, as a float32's bits.
template <bool KEEP> VT_FN unsigned largest_of_sixteen(const uint4& a, const uint4& b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
#define LARGER(KIND, C, A, B) asm("max" KIND ".xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(C) : "r"(A), "r"(B))
    const unsigned w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    unsigned top[8];  // without signs, which are of no meaning here
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        const unsigned one = i < 4 ? w[2 * i] : top[2 * i - 8], two = i < 4 ? w[2 * i + 1] : top[2 * i - 7];
        if (KEEP) LARGER(".NaN", top[i], one, two);
        else LARGER("", top[i], one, two);
    }
    const unsigned sizes = top[6] & 0x7fff7fffu, pair = KEEP ? sizes : larger_pair<false>(0u, sizes);
#else
    const unsigned pair = larger_pair<KEEP>(largest_pair<KEEP>(a), largest_pair<KEEP>(b));
#endif
    return larger(pair << 16, pair & 0xffff0000u);
}

// Where pairs of numbers have instructions.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define SUMS_BY_HALVES true
#else
#define SUMS_BY_HALVES false
#endif

// Of many values, the least of their last 16 bits, in either half of a word.
struct LastBits {
    unsigned least = 0xffffffffu;

    VT_MEMBER void see(float a, float b) {
        const unsigned pair = chosen_bytes((unsigned)vt_bits(a), (unsigned)vt_bits(b), 0x5410u);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm("min.u16x2 %0, %1, %2;" : "=r"(least) : "r"(least), "r"(pair));
#else
        const unsigned low = pair & 0xffffu, high = pair >> 16;
        least = (low < (least & 0xffffu) ? low : least & 0xffffu) | (high < least >> 16 ? high : least >> 16) << 16;
#endif
    }
    VT_MEMBER bool zeros() const { return (least & 0xffffu) == 0 || least >> 16 == 0; }
};

// Eight codes of sums times a factor, whose products are under 7 2^-14.
template <int N> VT_FN unsigned e2m1_of_sums(const float (&y)[N], int from, float factor, LastBits& last) {
    unsigned h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float low = a_number(y[from + 2 * i] * factor), high = a_number(y[from + 2 * i + 1] * factor);
        last.see(low, high);
        h[i] = cut_to_halves(low, high);
    }
    return e2m1_of_halves(h);
}

// The larger of two sizes, or NaN.
VT_FN float larger_or_nan(float a, float b) {
#ifdef __CUDACC__
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
#else
    return a != a || b != b ? vt_float(0x7fc00000) : a > b ? a : b;
#endif
}
