// ggml's blocks taken apart in registers: a unit is 32 neighbours, whose codes become eight words of four signed bytes.
//
// Blocks of 144 and 176 bytes are read 16 bytes at a time. Those of 18, 22, 34, 66, 98, 110 and 210 stand at even
// addresses alone: their words are joined from two aligned ones, of which the last is not read past the field.
#pragma once
#include "ggml_grids.cuh"

enum { Q4_0, Q5_0, Q8_0, Q4_1, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ3_XXS };  // ops/blocks.py: WEIGHT_TYPES

typedef unsigned char u8;

// BYTES of a block, at multiples of ALIGNED (device/ggml.py: reachable); LARGE: of 256 values, not 32.
template <int TYPE> struct Block {
    static constexpr int SIZES[12] = {18, 22, 34, 20, 24, 84, 110, 144, 176, 210, 66, 98};
    static constexpr int BYTES = SIZES[TYPE];
    static constexpr bool LARGE = TYPE >= Q2_K;
    static constexpr int ALIGNED = BYTES % 16 == 0 ? 16 : BYTES % 4 == 0 ? 4 : 2;
    static constexpr bool MINIMUM = TYPE == Q4_1 || TYPE == Q5_1 || TYPE == Q2_K || TYPE == Q4_K || TYPE == Q5_K;
    static constexpr float FOLD = TYPE == IQ2_XXS ? 0.125f : TYPE == IQ3_XXS ? 0.25f : 1.0f;
};

// Bytes of b and a by the nibbles of `select`, the lowest first; 0 to 3 are a's.
VT_FN unsigned permute(unsigned a, unsigned b, unsigned select) {
#ifdef __CUDACC__
    return __byte_perm(a, b, select);
#else
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) found |= (unsigned)(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
    return found;
#endif
}

VT_FN int dot4(unsigned a, unsigned b, int sum) {
#ifdef __CUDACC__
    return __dp4a((int)a, (int)b, sum);
#else
    for (int i = 0; i < 32; i += 8) sum += (int)(signed char)(a >> i) * (int)(signed char)(b >> i);
    return sum;
#endif
}

VT_FN unsigned half_at(const u8* p) { return *(const unsigned short*)p; }
VT_FN float f16_at(const u8* p) { return widen_f16(half_at(p)); }

// N words from an address that is a multiple of ALIGNED bytes.
template <int N, int ALIGNED> VT_FN void words_at(unsigned (&w)[N], const u8* p) {
    if constexpr (ALIGNED == 16) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            uint4 four = *(const uint4*)(p + 4 * i);
            w[i] = four.x;
            w[i + 1] = four.y;
            w[i + 2] = four.z;
            w[i + 3] = four.w;
        }
        return;
    }
    const unsigned* q = (const unsigned*)((unsigned long long)p & ~3ull);
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = q[i];
    if constexpr (ALIGNED == 2) {
        bool apart = ((unsigned long long)p & 2) != 0;
        unsigned last = apart ? half_at((const u8*)(q + N)) : 0, select = apart ? 0x5432u : 0x3210u;
#pragma unroll
        for (int i = 0; i < N; ++i) w[i] = permute(w[i], i + 1 < N ? w[i + 1] : last, select);
    }
}

// Bits 0 to 3 to the lowest bits of four bytes.
VT_FN unsigned spread4(unsigned bits) { return (bits & 15u) * 0x00204081u & 0x01010101u; }
// Bytes below 128 less `offset`, each by itself.
VT_FN unsigned less(unsigned w, unsigned offset) {
    return ((w | 0x80808080u) - offset * 0x01010101u) ^ 0x80808080u;
}

// Scales of a unit: value = d * s * q - dmin * m, with s and m of its first and last sixteen; those without are 1 and 0.
struct Scales {
    float d, dmin;
    int s[2], m[2];
};

// j-th six-bit scale and minimum of Q4_K and Q5_K; the upper two bits of the last four stand on top of the first four.
VT_FN void six_bits(Scales& k, const u8* scales, int j) {
    int a = scales[j & 3], b = scales[4 + (j & 3)], c = scales[8 + (j & 3)];
    k.s[0] = k.s[1] = j < 4 ? a & 63 : (c & 15) | a >> 6 << 4;
    k.m[0] = k.m[1] = j < 4 ? b & 63 : c >> 4 | b >> 6 << 4;
}

VT_FN unsigned signed4(unsigned magnitudes, unsigned bits) {
    unsigned ones = spread4(bits);
    return (magnitudes ^ ones * 255u) + ones;
}

// The signs that seven bits pick: the eighth makes their number even.
VT_FN unsigned signs_of(unsigned index) {
    unsigned p = index ^ index >> 4;
    p ^= p >> 2;
    return index | ((p ^ p >> 1) & 1u) << 7;
}

// Codes and scales of unit u of the block at p.
template <int TYPE> VT_FN void take_apart(unsigned (&q)[8], Scales& k, const u8* p, int u) {
    constexpr int ALIGNED = Block<TYPE>::ALIGNED;
    constexpr bool MINIMUM = Block<TYPE>::MINIMUM;
    k.s[0] = k.s[1] = 1;
    k.m[0] = k.m[1] = 0;
    k.dmin = 0.0f;
    constexpr int D = TYPE == Q2_K ? 80 : TYPE == Q3_K ? 108 : TYPE == Q6_K ? 208 : 0;
    k.d = f16_at(p + D);
    if constexpr (MINIMUM) k.dmin = f16_at(p + D + 2);
    if constexpr (TYPE == Q8_0) {
        words_at<8, ALIGNED>(q, p + 2);
    } else if constexpr (TYPE <= Q5_1) {
        constexpr bool FIVE = TYPE == Q5_0 || TYPE == Q5_1;
        unsigned w[4], fifth = 0;
        words_at<4, ALIGNED>(w, p + 2 + 2 * MINIMUM + 4 * FIVE);
        if constexpr (FIVE) fifth = half_at(p + 2 + 2 * MINIMUM) | half_at(p + 4 + 2 * MINIMUM) << 16;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            q[i] = (i < 4 ? w[i & 3] : w[i & 3] >> 4) & 0x0f0f0f0fu;
            if constexpr (FIVE) q[i] |= spread4(fifth >> 4 * i) << 4;
            if constexpr (!MINIMUM) q[i] = less(q[i], FIVE ? 16 : 8);
        }
        if constexpr (MINIMUM) k.dmin = -k.dmin;
    } else if constexpr (TYPE == Q2_K || TYPE == Q3_K) {
        words_at<8, ALIGNED>(q, p + (TYPE == Q2_K ? 16 : 32) + 32 * (u >> 2));
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] = q[i] >> 2 * (u & 3) & 0x03030303u;
        if constexpr (TYPE == Q2_K) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                k.s[i] = p[2 * u + i] & 15;
                k.m[i] = p[2 * u + i] >> 4;
            }
        } else {
            unsigned mask[8];
            words_at<8, ALIGNED>(mask, p);
            const u8* scales = p + 96;
#pragma unroll
            for (int i = 0; i < 8; ++i) q[i] = less(q[i] | (mask[i] >> u & 0x01010101u) << 2, 4);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int j = 2 * u + i, low = scales[j & 7] >> 4 * (j >> 3) & 15, high = scales[8 + (j & 3)] >> 2 * (j >> 2) & 3;
                k.s[i] = (low | high << 4) - 32;
            }
        }
    } else if constexpr (TYPE == Q4_K || TYPE == Q5_K) {
        words_at<8, ALIGNED>(q, p + (TYPE == Q4_K ? 16 : 48) + 32 * (u >> 1));
#pragma unroll
        for (int i = 0; i < 8; ++i) q[i] = q[i] >> 4 * (u & 1) & 0x0f0f0f0fu;
        if constexpr (TYPE == Q5_K) {
            unsigned fifth[8];
            words_at<8, ALIGNED>(fifth, p + 16);
#pragma unroll
            for (int i = 0; i < 8; ++i) q[i] |= (fifth[i] >> u & 0x01010101u) << 4;
        }
        six_bits(k, p + 4, u);
    } else if constexpr (TYPE == Q6_K) {
        int t = u & 3;
        unsigned high[8];
        words_at<8, ALIGNED>(q, p + 64 * (u >> 2) + 32 * (t & 1));
        words_at<8, ALIGNED>(high, p + 128 + 32 * (u >> 2));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            q[i] = less((q[i] >> 4 * (t >> 1) & 0x0f0f0f0fu) | (high[i] >> 2 * t & 0x03030303u) << 4, 32);
        }
        k.s[0] = (signed char)p[192 + 2 * u];
        k.s[1] = (signed char)p[193 + 2 * u];
    } else {
        unsigned w[2], a[1];
        words_at<2, ALIGNED>(w, p + 2 + 8 * u);
        a[0] = w[1];
        if constexpr (TYPE == IQ3_XXS) words_at<1, ALIGNED>(a, p + 66 + 4 * u);
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            unsigned minus = signs_of(a[0] >> 7 * l & 127u);
            if constexpr (TYPE == IQ2_XXS) {
                unsigned digits = IQ2_XXS_DIGITS[w[0] >> 8 * l & 255u];
                q[2 * l] = signed4(permute(0x002b1908u, 0, digits & 0xffffu), minus);
                q[2 * l + 1] = signed4(permute(0x002b1908u, 0, digits >> 16), minus >> 4);
            } else {
                unsigned pair = w[l >> 1] >> 16 * (l & 1);
                q[2 * l] = signed4(permute(0x1c140c04u, 0x3e342c24u, IQ3_XXS_DIGITS[pair & 255u]), minus);
                q[2 * l + 1] = signed4(permute(0x1c140c04u, 0x3e342c24u, IQ3_XXS_DIGITS[pair >> 8 & 255u]), minus >> 4);
            }
        }
        k.s[0] = k.s[1] = 2 * (int)(a[0] >> 28) + 1;
    }
}
