// What the elements of a head become under the head's own scale: codes of a byte, int8 or e4m3, or of four bits.
#pragma once
#include "bf16_range.cuh"
#include "int_codes.cuh"
#include "kv_rows.cuh"

#define HEADS_FLOOR 1e-6f

// y and a half of its sign.
#ifdef __CUDACC__
VT_FN float with_half(float y) {
    unsigned half;
    asm("lop3.b32 %0, %1, 0x80000000, %2, 0xea;" : "=r"(half) : "r"(vt_bits(y)), "r"(0x3f000000));
    return y + vt_float((int)half);
}
#else
VT_FN float with_half(float y) { return y + vt_float((vt_bits(y) & (int)0x80000000u) | 0x3f000000); }
#endif

// size / D to nearest, for all sizes but those under 2^-90, by its product with the reciprocal and one step of
// correction: tried with every mantissa for 15 and for 127.
VT_FN float over_whole(float size, float d, float reciprocal) {
    const float near = size * reciprocal, corrected = vt_fma(-vt_fma(near, d, -size), reciprocal, near);
    return size < VT_INF ? corrected : near;
}

// Four numbers, each cut to [0, 255], in a word.
VT_FN unsigned four_bytes(int a, int b, int c, int d) {
#ifdef __CUDACC__
    unsigned high, word;
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(d), "r"(c));
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(b), "r"(a), "r"(high));
    return word;
#else
    auto one = [](int q) { return (unsigned)between(q, 0, 255); };
    return one(a) | one(b) << 8 | one(c) << 16 | one(d) << 24;
#endif
}

// What the elements of a head become: a code a byte, and the scale.
struct ByteCodes {
    bool int8;
    VT_MEMBER float scale(unsigned top) const {
        float size = vt_float((int)top);
        return vt_maximum(int8 ? over_whole(size, 127.0f, 1.0f / 127.0f) : over_largest(size), HEADS_FLOOR);
    }
    VT_MEMBER unsigned word(float a, float b, float c, float d, float inverse) const {
        a *= inverse, b *= inverse, c *= inverse, d *= inverse;
        if (!int8) return e4m3_pair(a, b) | e4m3_pair(c, d) << 16;
        return four_codes(whole_int(with_half(a)), whole_int(with_half(b)), whole_int(with_half(c)),
                          whole_int(with_half(d)));
    }
    VT_MEMBER uint2 words(const float (&x)[8], float inverse) const {
        return {word(x[0], x[1], x[2], x[3], inverse), word(x[4], x[5], x[6], x[7], inverse)};
    }
    VT_MEMBER unsigned one(float x, float inverse) const {
        float y = x * inverse;
        return (int8 ? (unsigned)between(whole_int(with_half(y)), -128, 127) : e4m3_pair(y, 0.0f)) & 0xffu;
    }
};

// Codes of 0 to 15 of a row between its least and its largest element.
struct NibbleCodes {
    float scale, inverse, zero;

    VT_MEMBER NibbleCodes(float high, float low) {
        scale = vt_maximum(over_whole(high - low, 15.0f, 1.0f / 15.0f), HEADS_FLOOR);
        inverse = 1.0f / scale;
        float z = truncf(with_half(-low / scale));
        zero = z < 0.0f ? 0.0f : z > 15.0f ? 15.0f : z;
    }
    VT_MEMBER NibbleCodes(float inverse, float zero, int) : scale(0.0f), inverse(inverse), zero(zero) {}
    VT_MEMBER float stored() const { return vt_float((vt_bits(scale) & ~15) | (int)zero); }
    // What is under zero has half subtracted and becomes zero at last; so it does with half added.
    VT_MEMBER int number(float x) const { return whole_int((x * inverse + zero) + 0.5f); }
    VT_MEMBER unsigned one(float x) const { return (unsigned)between(number(x), 0, 15); }
    // In sixteenths, all roundings alike, and cut to [0, 255] as bytes: a code is the upper half of one.
    VT_MEMBER int sixteenths(float x) const { return whole_int((x * (16.0f * inverse) + 16.0f * zero) + 8.0f); }
    VT_MEMBER unsigned word(const float (&x)[8]) const {
        int c[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) c[j] = sixteenths(x[j]);
        const unsigned even = four_bytes(c[0], c[2], c[4], c[6]), odd = four_bytes(c[1], c[3], c[5], c[7]);
        return (even >> 4 & 0x0f0f0f0fu) | (odd & 0xf0f0f0f0u);
    }
};
