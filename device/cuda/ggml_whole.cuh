// Blocks of 256 with one sum each meet the activations' codes: a lane has a whole block of two rows, four products
// an instruction, and the tables of the i-quants lie in shared memory once for each lane, whose bank nobody else asks.
#pragma once
#include "ggml_meet.cuh"

constexpr int GRID_WORDS = 256 * 32, SIGN_WORDS = 128 * 32;

// Bytes of ones where the bits FIRST ... FIRST + 3 say minus, of which the upper bits matter.
template <int FIRST> VT_FN unsigned tops_of(unsigned bits) {
    return (bits & 15u << FIRST) * (0x10204080u >> FIRST) & 0x80808080u;
}
// Eight bits to the third bits of eight digits.
VT_FN unsigned thirds_of(unsigned bits) {
    bits = bits * 0x1001u & 0x000f000fu;
    bits = bits * 0x41u & 0x03030303u;
    return bits * 0x24u & 0x44444444u;
}

// Entries of the grid, eight digits of IQ2_XXS or four bytes of IQ3_XXS, and what seven bits say of eight signs: third
// bits of digits, which pick negative values, or the upper bits of four bytes and those below them.
template <int TYPE> VT_FN void unfold(unsigned* tables) {
    int lane = threadIdx.x & 31;
    for (int first = (int)threadIdx.x >> 5 << 5; first < 384; first += 32 * CREW) {
        int i = first + lane;
        unsigned entry;
        if (first < 256) {
            if constexpr (TYPE == IQ2_XXS) entry = IQ2_XXS_DIGITS[i];
            else entry = permute(0x1c140c04u, 0x3e342c24u, IQ3_XXS_DIGITS[i]);
        } else {
            unsigned seven = (unsigned)i - 256, signs = seven | (ones_of(seven) & 1u) << 7;  // their number is even
            entry = TYPE == IQ2_XXS ? thirds_of(signs) : tops_of<0>(signs) | tops_of<4>(signs) >> 1;
        }
        for (int k = 0; k < 32; ++k) tables[(first + k) * 32 + lane] = __shfl_sync(ALL, entry, k);
    }
}

// The lane's entry of the table at `tables`: its number is a byte, or seven bits from FIRST on.
template <int BYTE> VT_FN unsigned of_byte(const u8* tables, unsigned bits) {
    return *(const unsigned*)(tables + permute(bits, 0, 0x4440 + BYTE) * 128);
}
template <int FIRST> VT_FN unsigned of_seven(const u8* tables, unsigned bits) {
    return *(const unsigned*)(tables + (bits >> FIRST & 127u) * 128);
}

// The i-quants' eight values of a unit from 8 L on, and their part of a sum: `bits` has the numbers in the grid.
template <int TYPE, int L>
VT_FN void meet_eight(int& dot, int& less, const u8* tables, unsigned bits, unsigned beside, unsigned a0, unsigned a1) {
    unsigned minus = of_seven<7 * L>(tables + GRID_WORDS * 4, beside);
    if constexpr (TYPE == IQ2_XXS) {
        unsigned digits = of_byte<L>(tables, bits) | minus;
        dot = dot4(picked(0x002b1908u, 0x00d5e7f8u, digits), a0, dot);
        dot = dot4(picked(0x002b1908u, 0x00d5e7f8u, digits >> 16), a1, dot);
    } else {
        // The bits of a magnitude turned over are one less than its negative.
        unsigned m0 = picked(minus, 0, 0xba98), m1 = picked(minus << 1, 0, 0xba98);
        dot = dot4(of_byte<2 * (L & 1)>(tables, bits) ^ m0, a0, dot);
        dot = dot4(of_byte<2 * (L & 1) + 1>(tables, bits) ^ m1, a1, dot);
        less = dot4(m1, a1, dot4(m0, a0, less));
    }
}

VT_FN unsigned word_in(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// The terms of a block of two rows.
template <int TYPE>
VT_MEMBER void meet_whole(float (&term)[2], const u8* const (&p)[2], const u8* codes, float d,
                          const unsigned short* sums, const u8* tables) {
    const uint4* x = (const uint4*)codes;
    int total[2] = {0, 0};
    if constexpr (TYPE == Q2_K) {
        // Two units of four stand four times as high as the others.
        int fourfold[2] = {0, 0}, minimum[2] = {0, 0};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            unsigned s[2][2], q[2][8];
            uint4 of_a = *(const uint4*)(sums + 8 * h);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const unsigned* w = (const unsigned*)p[r];
#pragma unroll
                for (int i = 0; i < 2; ++i) s[r][i] = w[2 * h + i];
#pragma unroll
                for (int i = 0; i < 8; ++i) q[r][i] = w[4 + 8 * h + i];
                unsigned m0 = s[r][0] >> 4 & 0x0f0f0f0fu, m1 = s[r][1] >> 4 & 0x0f0f0f0fu;
                minimum[r] = dot2_high((int)of_a.y, m0, dot2_low((int)of_a.x, m0, minimum[r]));
                minimum[r] = dot2_high((int)of_a.w, m1, dot2_low((int)of_a.z, m1, minimum[r]));
            }
#pragma unroll
            for (int u = 0; u < 4; u += 2) {
                int even[2][2] = {}, odd[2][2] = {};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint4 a = x[8 * h + 2 * u + half], b = x[8 * h + 2 * u + 2 + half];
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            unsigned two = u ? q[r][4 * half + i] >> 4 : q[r][4 * half + i];
                            even[r][half] = dot4(two & 0x03030303u, word_in(a, i), even[r][half]);
                            odd[r][half] = dot4(two & 0x0c0c0c0cu, word_in(b, i), odd[r][half]);
                        }
                    }
                }
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    unsigned scales = s[r][u / 2] & 0x0f0f0f0fu;
                    int low = (int)permute((unsigned)even[r][0], (unsigned)even[r][1], 0x5410);
                    int high = (int)permute((unsigned)odd[r][0], (unsigned)odd[r][1], 0x5410);
                    total[r] = dot2_low(low, scales, total[r]);
                    fourfold[r] = dot2_high(high, scales, fourfold[r]);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float whole = (float)(total[r] + (fourfold[r] >> 2)), less = (float)minimum[r];
            term[r] = (d * f16_at(p[r] + 80)) * whole - (d * f16_at(p[r] + 82)) * less;
        }
    } else {
        unsigned apart[2];
        const unsigned* q[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            apart[r] = (unsigned)(unsigned long long)(p[r] + 2) & 2;
            q[r] = (const unsigned*)(p[r] + 2 - apart[r]);
        }
        auto word = [&](int r, int i) { return picked(q[r][i], q[r][i + 1], apart[r] ? 0x5432u : 0x3210u); };
#pragma unroll
        for (int u = 0; u < 8; ++u) {
            uint4 low = x[2 * u], high = x[2 * u + 1];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                unsigned one = word(r, 2 * u), two = word(r, 2 * u + 1), beside = TYPE == IQ2_XXS ? two : word(r, 16 + u);
                int dot = 0, less = 0;
                if constexpr (TYPE == IQ2_XXS) two = one;
                meet_eight<TYPE, 0>(dot, less, tables, one, beside, low.x, low.y);
                meet_eight<TYPE, 1>(dot, less, tables, one, beside, low.z, low.w);
                meet_eight<TYPE, 2>(dot, less, tables, two, beside, high.x, high.y);
                meet_eight<TYPE, 3>(dot, less, tables, two, beside, high.z, high.w);
                total[r] += (2 * (int)(beside >> 28) + 1) * (dot - less);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) term[r] = (float)total[r] * (f16_at(p[r]) * d);
    }
}
