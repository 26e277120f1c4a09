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

// Two codes, lo in the low byte; `nan` stands for a NaN of either sign.
VT_FN unsigned e4m3_pair(float lo, float hi, unsigned nan) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(hi), "f"(lo));
    unsigned low = pair & 0xffu, high = pair >> 8;
#else
    unsigned low = e4m3_by_hand(lo), high = e4m3_by_hand(hi);
#endif
    return (lo != lo ? nan : low) | (hi != hi ? nan : high) << 8;
}

VT_FN void store_e4m3(unsigned char* out, i64 at, const float (&x)[8], unsigned nan) {
    unsigned lo = e4m3_pair(x[0], x[1], nan) | e4m3_pair(x[2], x[3], nan) << 16;
    unsigned hi = e4m3_pair(x[4], x[5], nan) | e4m3_pair(x[6], x[7], nan) << 16;
    *(unsigned long long*)(out + at) = lo | (unsigned long long)hi << 32;
}

VT_FN void store_e4m3(unsigned char* out, i64 at, const float (&x)[1], unsigned nan) {
    out[at] = (unsigned char)e4m3_pair(x[0], 0.0f, nan);
}
