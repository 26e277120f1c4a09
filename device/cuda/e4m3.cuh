// Codes of float8 e4m3fn: to nearest even, saturating at +-448, infinities included.
#pragma once
#include "storage.cuh"

// What a float32 that is no NaN becomes, in integers.
VT_FN unsigned e4m3_by_hand(float x) {
    unsigned sign = (unsigned)vt_bits(x) >> 24 & 0x80u;
    float size = vt_abs(x);
    if (size >= 448.0f) return sign | 0x7eu;
    if (size < 0.015625f) {  // below the least normal number codes count 2^-9: 1.5 * 2^23 + n has n in its last bits
        return sign | ((unsigned)vt_bits(size * 512.0f + 12582912.0f) & 0xfu);
    }
    unsigned bits = (unsigned)vt_bits(size);
    bits += 0x7ffffu + (bits >> 20 & 1u);
    return sign | ((bits >> 20) - (120u << 3));
}

// Two codes, lo in the low byte; 0x7f for a NaN of either sign.
VT_FN unsigned e4m3_pair(float lo, float hi) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(hi), "f"(lo));
    return pair;
#else
    return (lo != lo ? 0x7fu : e4m3_by_hand(lo)) | (hi != hi ? 0x7fu : e4m3_by_hand(hi)) << 8;
#endif
}

// The top bits of the bytes that are NaN among four codes.
VT_FN unsigned nans_of(unsigned codes) { return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }

VT_FN unsigned with_nan(unsigned codes, unsigned nan) {
    unsigned bytes = (nans_of(codes) >> 7) * 0xffu;
    return (codes & ~bytes) | (nan * 0x01010101u & bytes);
}

// `nan` stands for a NaN of either sign.
VT_FN void store_e4m3(unsigned char* out, i64 at, const float (&x)[8], unsigned nan) {
    uint2 codes;
    codes.x = e4m3_pair(x[0], x[1]) | e4m3_pair(x[2], x[3]) << 16;
    codes.y = e4m3_pair(x[4], x[5]) | e4m3_pair(x[6], x[7]) << 16;
    if (nan != 0x7fu && (nans_of(codes.x) | nans_of(codes.y))) {
        codes.x = with_nan(codes.x, nan);
        codes.y = with_nan(codes.y, nan);
    }
    *(uint2*)(out + at) = codes;
}

VT_FN void store_e4m3(unsigned char* out, i64 at, const float (&x)[1], unsigned nan) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned code = e4m3_pair(x[0], 0.0f) & 0xffu;
#else
    unsigned code = e4m3_by_hand(x[0]);
#endif
    out[at] = (unsigned char)(x[0] != x[0] ? nan : code);
}
