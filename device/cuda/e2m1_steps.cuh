// Codes of e2m1 under a power of two, by one rounding an element that hits the code's last bit wherever it stands.
//
// With 2^e the greatest power that is not above the size, and not below `one`, which has code 2, size * 2^-22 + 2^e ends
// in n = round(2 size / 2^e), to even: 0 to 4. The sum's exponent stands one bit higher than its last bits, so that
// n + 2 e is what is left of a code but for twice the exponent of `one`, the same for all.
#pragma once
#include "storage.cuh"

// Bytes of a and b, 0 to 3 and 4 to 7, that the halves of `which` name, the first in the lowest; 8 more: the sign, eight
// times.
VT_FN unsigned chosen_bytes(unsigned a, unsigned b, unsigned which) {
#ifdef __CUDACC__
    unsigned out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(which));
    return out;
#else
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned n = which >> 4 * i & 15u, byte = ((n & 4u) ? b : a) >> 8 * (n & 3u) & 255u;
        if (n & 8u) byte = byte & 128u ? 255u : 0u;
        out |= byte << 8 * i;
    }
    return out;
#endif
}

// In all four bits of half-byte j the sign of v[j].
VT_FN unsigned signs_of(const float (&v)[8]) {
    unsigned b[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) b[j] = (unsigned)vt_bits(v[j]);
    unsigned even = chosen_bytes(b[0], b[2], 0x00fbu), odd = chosen_bytes(b[1], b[3], 0x00fbu);
    even = chosen_bytes(even, b[4], 0x0f10u), odd = chosen_bytes(odd, b[5], 0x0f10u);
    even = chosen_bytes(even, b[6], 0xf210u), odd = chosen_bytes(odd, b[7], 0xf210u);
    return (even & 0x0f0f0f0fu) | (odd & 0xf0f0f0f0u);
}

// Eight codes, no code of -0. one: a power of two from 2^-126 to 2^125. BOUNDED: no size is 7 * one or more, or NaN.
template <bool BOUNDED> VT_FN unsigned e2m1_steps(const float (&v)[8], float one) {
    const float six = 6.0f * one;
    const unsigned less = (unsigned)vt_bits(one) >> 22;
    unsigned half[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        unsigned sum = 0;
#pragma unroll
        for (int j = 3; j >= 0; --j) {
            float size = vt_abs(v[4 * i + j]);
            if (!BOUNDED) size = fminf(size, six);
            const float power = vt_float(vt_bits(fmaxf(size, one)) & 0x7f800000);
            const unsigned bits = (unsigned)vt_bits(vt_fma(size, 0x1p-22f, power));
            sum = (sum << 4) + (bits + (bits >> 22));
        }
        half[i] = sum - less * 0x1111u;
    }
    const unsigned word = chosen_bytes(half[0], half[1], 0x5410u);
    return word | (signs_of(v) & (word + 0x77777777u) & 0x88888888u);
}

// x, where a NaN has no sign: on GPUs no result has one.
#ifdef __CUDACC__
VT_FN float a_number(float x) { return x; }
#else
static inline float a_number(float x) { return x == x ? x : vt_float(0x7fffffff); }
#endif
