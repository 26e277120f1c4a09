// Blocks of 256 as the tensor cores take them: bytes, for products with several rows of activations.
//
// Codes times their scales are exact in one plane of bytes (Q2_K; Q3_K, whose products from -124 to 128 change their sign)
// or in two, the first of which counts 2^SHIFT times: codes times the upper and the lower three bits of a scale (Q4_K,
// Q5_K), or the upper and the lower byte of a product of thirteen bits (Q6_K). A block's sum stays below 2^31.
#pragma once
#include "ggml_fragments.cuh"

// A lane's part of a row's block: words as they lie, scales a byte each, minimums in pairs for halves_product. Unit u has
// k 4 t ... 4 t + 3 of it in one word and those 16 further on in the next.
template <int TYPE> struct Planes {
    static constexpr int ALIGNED = Block<TYPE>::ALIGNED, COUNT = TYPE == Q2_K || TYPE == Q3_K ? 1 : 2;
    static constexpr int SHIFT = TYPE == Q6_K ? 8 : 3, SIGN = TYPE == Q3_K ? -1 : 1;
    static constexpr bool SIGNED = TYPE == Q3_K || TYPE == Q6_K;  // the first plane; the second one never is
    unsigned q[8], top[4], s[4], m[2];
    float d, dmin;

    VT_MEMBER void fetch(const u8* p, int t) {
        auto word = [&](int at) { return word_at<ALIGNED>(p + at); };
        constexpr int CODES = TYPE == Q3_K ? 32 : TYPE == Q5_K ? 48 : TYPE == Q6_K ? 0 : 16;
        constexpr int WORDS = COUNT == 1 ? 4 : 8, TOP = TYPE == Q6_K ? 128 : TYPE == Q5_K ? 16 : 0;
        constexpr int TOPS = TYPE == Q6_K ? 4 : TYPE == Q3_K || TYPE == Q5_K ? 2 : 0;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) q[i] = word(CODES + 16 * i + 4 * t);
#pragma unroll
        for (int i = 0; i < TOPS; ++i) top[i] = word(TOP + 16 * i + 4 * t);
        dmin = 0.0f;
        if constexpr (TYPE == Q2_K) {
            d = f16_at(p + 80), dmin = f16_at(p + 82);
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = word(4 * i) & 0x0f0f0f0fu;
#pragma unroll
            for (int h = 0; h < 2; ++h) m[h] = minimums(half_at(p + 8 * h + 2 * t) >> 4 & 0x0f0fu, 0x4140u);
        } else if constexpr (TYPE == Q3_K) {
            d = f16_at(p + 108);
            unsigned low[2] = {word(96), word(100)}, high = word(104);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned four = low[i & 1] >> 4 * (i >> 1) & 0x0f0f0f0fu;
                s[i] = less(four | (high >> 2 * i & 0x03030303u) << 4, 32);
            }
        } else if constexpr (TYPE == Q6_K) {
            d = f16_at(p + 208);
#pragma unroll
            for (int i = 0; i < 4; ++i) s[i] = word(192 + 4 * i);
        } else {
            unsigned head = word(0), y = word(4), z = word(8), w = word(12);
            d = widen_f16(head & 0xffffu), dmin = widen_f16(head >> 16);
            const unsigned six[2] = {y & 0x3f3f3f3fu, (w & 0x0f0f0f0fu) | (y >> 2 & 0x30303030u)};
            const unsigned low[2] = {z & 0x3f3f3f3fu, (w >> 4 & 0x0f0f0f0fu) | (z >> 2 & 0x30303030u)};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                s[h] = six[h] >> 3 & 0x07070707u;
                s[2 + h] = six[h] & 0x07070707u;
                m[h] = minimums(low[h], 0x4040u + 0x0101u * t);
            }
        }
    }
    // Two bytes as float16.
    static VT_MEMBER unsigned minimums(unsigned bytes, unsigned select) {
        return pair_less(permute(bytes, 0x64646464u, select), THOUSAND);
    }
    // Byte `i` of scales, with its sign.
    static VT_MEMBER unsigned scale(unsigned four, int i) { return picked(four, 0, 0x8880u + 0x1111u * i); }

    // Both words of unit u, 0 ... 7, in each plane.
    VT_MEMBER void take(unsigned (&a)[COUNT][2], int u) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int j = 2 * u + i;  // its sixteen
            if constexpr (TYPE == Q2_K) {
                a[0][i] = (q[2 * (u >> 2) + i] >> 2 * (u & 3) & 0x03030303u) * permute(s[j >> 2], 0, 0x4440u + (j & 3));
            } else if constexpr (TYPE == Q3_K) {
                unsigned third = u < 2 ? top[i] << 2 - u : top[i] >> u - 2;
                unsigned code = (q[2 * (u >> 2) + i] >> 2 * (u & 3) & 0x03030303u) | (third & 0x04040404u);
                a[0][i] = times_plus(0x04040404u - code, scale(s[j >> 2], j & 3), 0x80808080u) ^ 0x80808080u;
            } else if constexpr (TYPE == Q6_K) {
                unsigned four = q[4 * (u >> 2) + 2 * (u & 1) + i] >> 4 * (u >> 1 & 1) & 0x0f0f0f0fu, two = top[2 * (u >> 2) + i];
                unsigned code = four | ((u & 3) < 2 ? two << 4 - 2 * (u & 3) : two >> 2 * (u & 3) - 4) & 0x30303030u;
                unsigned times = scale(s[j >> 2], j & 3), less32 = 0x80008000u - times * 0x00200020u;  // no half borrows
                unsigned first = times_plus(permute(code, 0, 0x4140u), times, less32);
                unsigned second = times_plus(permute(code, 0, 0x4342u), times, less32);
                a[0][i] = permute(first, second, 0x7531u) ^ 0x80808080u;
                a[COUNT - 1][i] = permute(first, second, 0x6420u);
            } else {
                unsigned code = q[2 * (u >> 1) + i] >> 4 * (u & 1) & 0x0f0f0f0fu;
                if constexpr (TYPE == Q5_K) code |= (u < 4 ? top[i] << 4 - u : top[i] >> u - 4) & 0x10101010u;
#pragma unroll
                for (int plane = 0; plane < COUNT; ++plane)
                    a[plane][i] = code * permute(s[2 * plane + (u >> 2)], 0, 0x4440u + (u & 3));
            }
        }
    }
};

// What a block adds: its sum and that of its minimums, scaled.
template <int TYPE> VT_FN float term_of_block(int sum, float less, float dw, float dmin, float da) {
    const float whole = (float)(Planes<TYPE>::SIGN * sum);
    if constexpr (Block<TYPE>::MINIMUM) return (dw * da) * whole - (da * dmin) * less;
    return whole * (dw * da);
}
