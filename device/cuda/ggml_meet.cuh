// Blocks of 256 of sixteen rows meet the activations' codes on the tensor cores: lane 4 g + t has words of rows g and g + 8,
// p[0] and p[1].
//
// Column u of the activations is unit u's, zeros elsewhere, so that an integer a unit (or a half of one) is left beside
// the others, of which a lane has units 2 t and 2 t + 1, and meets its scale after all products. Codes are taken where
// they lie: bits of a byte that are a power of two too large, the same one for all of a lane's. Where two units' codes
// are one byte, products of the lower one's alone are taken from those of the byte.
#pragma once
#include "ggml_share.cuh"

// A word that may stand at an even address: what is `apart` is joined from two aligned ones.
template <bool APART> VT_FN unsigned word_of(const u8* aligned, unsigned select) {
    const unsigned* q = (const unsigned*)aligned;
    if constexpr (APART) return picked(q[0], q[1], select);
    return q[0];
}

// What a lane has of a block of the row of a: its column's eight codes, in the products of whose units they are, a word
// of the sums' lower seven bits or of what is above them, and the scale.
struct Coded {
    unsigned b[4][2], sums;
    float d;
};
template <int TYPE> VT_MEMBER void take_coded(Coded& a, const Share& w, int block, int g, int t) {
    using T = Tiles<TYPE>;
    const u8* codes = w.codes + block * T::CODES + 32 * g;
    uint2 x = T::HALVES ? uint2{*(const unsigned*)(codes + 4 * t), *(const unsigned*)(codes + 16 + 4 * t)}
                        : *(const uint2*)(codes + 8 * t);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        a.b[c][0] = g >> 1 == c ? x.x : 0u;
        a.b[c][1] = g >> 1 == c ? x.y : 0u;
    }
    a.sums = *(const unsigned*)((const u8*)(w.sums + block * T::A_SUMS) + (g & 1) * 16 + 4 * t);
    a.d = w.scales[block];
}

// Of Q4_K and Q5_K: bytes of scales 2 t and 2 t + 1 and of their minimums, of four and of the other four.
VT_FN unsigned six_bits_of(unsigned scales, unsigned minimums, unsigned upper, int t) {
    unsigned low = permute(scales, minimums, t & 1 ? 0x7632 : 0x5410), more = permute(upper, upper >> 4, t & 1 ? 0x7632 : 0x5410);
    return t < 2 ? low & 0x3f3f3f3fu : (more & 0x0f0f0f0fu) | (low >> 2 & 0x30303030u);
}

VT_FN void masked(unsigned (&to)[4], const unsigned (&from)[4], unsigned mask) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = from[i] & mask;
}

// Sixteen times a lane's share of the integers of both rows, and `s`, whose bytes that meet sums are minimums.
template <int TYPE>
VT_MEMBER void meet_nibbles(int (&total)[2], unsigned (&s)[2], const u8* const (&p)[2], const Coded& a, int t) {
    int lower[4] = {}, both[4] = {}, first[4] = {}, two[4] = {};
    unsigned fifth[4];
    if constexpr (TYPE == Q5_K) {
        uint2 f0 = *(const uint2*)(p[0] + 16 + 8 * t), f1 = *(const uint2*)(p[1] + 16 + 8 * t);
        fifth[0] = f0.x, fifth[1] = f1.x, fifth[2] = f0.y, fifth[3] = f1.y;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        int at = (TYPE == Q4_K ? 16 : 48) + 32 * c + 8 * t;
        uint2 w0 = *(const uint2*)(p[0] + at), w1 = *(const uint2*)(p[1] + at);
        const unsigned w[4] = {w0.x, w1.x, w0.y, w1.y};
        unsigned bits[4];
        masked(bits, w, 0x0f0f0f0fu);
        multiply_unsigned(lower, bits, a.b[c][0], a.b[c][1]);
        multiply_unsigned(both, w, a.b[c][0], a.b[c][1]);
        if constexpr (TYPE == Q5_K) {
            masked(bits, fifth, 0x01010101u << 2 * c);
            multiply_unsigned(first, bits, a.b[c][0], a.b[c][1]);
            masked(bits, fifth, 0x03030303u << 2 * c);
            multiply_unsigned(two, bits, a.b[c][0], a.b[c][1]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        uint4 head = *(const uint4*)p[r];
        s[r] = six_bits_of(head.y, head.z, head.w, t);
        int even = lower[2 * r], odd = both[2 * r + 1] - lower[2 * r + 1];
        if constexpr (TYPE == Q5_K) {
            even += (first[2 * r] >> 2 * t) * 16;
            odd += (two[2 * r + 1] - first[2 * r + 1] >> 2 * t + 1) * 256;
        }
        total[r] = even * (int)(s[r] & 255u) * 16 + odd * (int)(s[r] >> 8 & 255u);
    }
}

// Of Q6_K: words of both rows' halves of units, and the word of four scales that a lane's units have.
struct HalfUnits { unsigned lower[2][2][4], upper[2][4], s[2]; };
template <bool APART>
VT_FN void fetch_halves(HalfUnits& f, const u8* const (&p)[2], const unsigned (&select)[2], int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        f.s[r] = word_of<APART>(p[r] + 192 + 4 * t, select[r]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const u8* q = p[r] + 16 * k + 4 * t;
                f.upper[k][r + 2 * h] = word_of<APART>(q + 128 + 32 * h, select[r]);
                f.lower[k][0][r + 2 * h] = word_of<APART>(q + 64 * h, select[r]);
                f.lower[k][1][r + 2 * h] = word_of<APART>(q + 64 * h + 32, select[r]);
            }
        }
    }
}

// A lane's share of the integers of both rows, their codes with 32 more than they stand for.
VT_MEMBER void meet_halves(int (&total)[2], const HalfUnits& f, const Coded& a, int t) {
    total[0] = total[1] = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        int sum[2][4] = {}, more[2][4] = {};  // of even units and odd ones
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {  // sixteen times as large as the others
            unsigned bits[4];
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                masked(bits, f.upper[k], 0x03030303u << 2 * odd + 4 * upper);
                multiply_unsigned(more[odd], bits, a.b[upper][k], a.b[2 + upper][k]);
                masked(bits, f.lower[k][odd], 0x0f0f0f0fu << 4 * upper);
                multiply_unsigned(sum[odd], bits, a.b[upper][k], a.b[2 + upper][k]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int even = sum[0][2 * r] + more[0][2 * r] * 16, odd = sum[1][2 * r + 1] + more[1][2 * r + 1] * 4;
            total[r] += even * (int)(signed char)(f.s[r] >> 8 * k) + odd * (int)(signed char)(f.s[r] >> 16 + 8 * k);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) total[r] >>= 4 * (t & 1);
}

// The term of row g + 8 (t & 1). `within`: where blocks begin after a multiple of 16.
template <int TYPE>
VT_MEMBER float meet_block(const u8* const (&p)[2], const int (&within)[2], const Coded& a, int t) {
    int total[2], low[4] = {};
    unsigned m[2];  // bytes that meet the sums
    const u8* own = t & 1 ? p[1] : p[0];
    if constexpr (TYPE == Q6_K) {
        HalfUnits f;
        unsigned select[2];
        const u8* aligned[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            unsigned apart = within[r] & 2;
            aligned[r] = p[r] - apart;
            select[r] = apart ? 0x5432u : 0x3210u;
        }
        if (__any_sync(ALL, (within[0] | within[1]) & 2)) fetch_halves<true>(f, aligned, select, t);
        else fetch_halves<false>(f, aligned, select, t);
        m[0] = f.s[0], m[1] = f.s[1];
        meet_halves(total, f, a, t);
    } else {
        meet_nibbles<TYPE>(total, m, p, a, t);
    }
    multiply_bytes(low, m, a.sums);
    int sum = t & 1 ? total[1] : total[0], minimum = t & 1 ? low[2] + 128 * low[3] : low[0] + 128 * low[1];
    sum += __shfl_xor_sync(ALL, t & 1 ? total[0] : total[1], 1);
    sum += __shfl_xor_sync(ALL, sum, 2);
    if constexpr (TYPE == Q6_K) {
        return (float)(sum - 32 * minimum) * (f16_at(own + 208) * a.d);
    } else {
        unsigned both = *(const unsigned*)own;
        return (widen_f16(both & 0xffffu) * a.d) * (float)(sum >> 4) - (a.d * widen_f16(both >> 16)) * (float)minimum;
    }
}
