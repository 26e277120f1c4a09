// Blocks of 256 of sixteen rows meet the activations' codes: lane 4 g + t has words of rows g and g + 8, p[0] and p[1].
//
// Where sums run in eight lanes, column g of the activations holds lane g's values alone, so that the tensor cores leave
// the eight lanes' integers beside each other. Where there is one sum, the columns hold different units, or halves of
// units, so that each has its own scale. Two neighbours' integers fit sixteen bits and meet two scales at once.
#pragma once
#include "ggml_row.cuh"

// A word that may stand at an even address: what is `apart` is joined from two aligned ones.
template <bool APART> VT_FN unsigned word_of(const u8* aligned, unsigned select) {
    const unsigned* q = (const unsigned*)aligned;
    if constexpr (APART) return picked(q[0], q[1], select);
    return q[0];
}

// Scales of Q4_K and Q5_K, six bits each, four to a word; the minimums stand in the other words of the same form.
VT_FN void six_bits_apart(unsigned (&s)[2], unsigned first, unsigned third) {
    s[0] = first & 0x3f3f3f3fu;
    s[1] = (third & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u);
}

// Products with one scale and with the next, of two rows, each times its scale: bytes 0 and 1 of s, or UPPER ones.
template <bool UPPER> VT_FN void scaled(int (&total)[4], const int (&one)[4], const int (&two)[4], unsigned s0, unsigned s1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int pair = (int)permute((unsigned)one[i], (unsigned)two[i], 0x5410);
        total[i] = UPPER ? dot2_high(pair, i < 2 ? s0 : s1, total[i]) : dot2_low(pair, i < 2 ? s0 : s1, total[i]);
    }
}

// Of Q6_K: a half of a block's bytes and the eight scales that go with it, of each row.
struct Half { unsigned q[6][2], s[2][2]; };
template <bool APART>
VT_FN void fetch_half(Half& f, const u8* const (&p)[2], const unsigned (&select)[2], int h, int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u8* q = p[r] + 4 * t;
#pragma unroll
        for (int i = 0; i < 4; ++i) f.q[i][r] = word_of<APART>(q + 64 * h + 16 * i, select[r]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            f.q[4 + i][r] = word_of<APART>(q + 128 + 32 * h + 16 * i, select[r]);
            f.s[i][r] = word_of<APART>(p[r] + 192 + 8 * h + 4 * i, select[r]);
        }
    }
}

// The integers of lanes 2 t and 2 t + 1 of both rows, and the rows' factors. `low` is the first row's term of the
// minimums for t = 0, the second one's for t = 1. `within`: where blocks begin after a multiple of 16.
template <int TYPE>
VT_MEMBER void meet_lanes(int (&total)[4], float (&factor)[2], float& low, const u8* const (&p)[2], const int (&within)[2],
                          const u8* codes, float d, const unsigned short* sums, int g, int t) {
    unsigned mine = 0xffu << 8 * (g & 3);  // the byte of a word that is lane g's, of an even word or an odd one
    unsigned m0 = g < 4 ? mine : 0u, m1 = g < 4 ? 0u : mine;
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = 0;
    if constexpr (TYPE == Q4_K || TYPE == Q5_K) {
        uint4 head[2] = {*(const uint4*)p[0], *(const uint4*)p[1]};
        unsigned s0[2], s1[2], m[2];
        six_bits_apart(s0, head[0].y, head[0].w);
        six_bits_apart(s1, head[1].y, head[1].w);
        uint4 other = t & 1 ? head[1] : head[0], a = *(const uint4*)sums;
        six_bits_apart(m, other.z, other.w >> 4);
        int minimum = dot2_high((int)a.y, m[0], dot2_low((int)a.x, m[0], 0));
        minimum = dot2_high((int)a.w, m[1], dot2_low((int)a.z, m[1], minimum));
        low = (widen_f16(other.x >> 16) * d) * (float)minimum;
        factor[0] = widen_f16(head[0].x & 0xffffu) * d;
        factor[1] = widen_f16(head[1].x & 0xffffu) * d;
        unsigned fifth[4] = {};
        if constexpr (TYPE == Q5_K) {
            uint2 f0 = *(const uint2*)(p[0] + 16 + 8 * t), f1 = *(const uint2*)(p[1] + 16 + 8 * t);
            fifth[0] = f0.x, fifth[1] = f1.x, fifth[2] = f0.y, fifth[3] = f1.y;
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            uint4 x = *(const uint4*)(codes + 64 * c + 16 * t);
            int at = (TYPE == Q4_K ? 16 : 48) + 32 * c + 8 * t;
            uint2 w0 = *(const uint2*)(p[0] + at), w1 = *(const uint2*)(p[1] + at);
            const unsigned w[4] = {w0.x, w1.x, w0.y, w1.y};
            unsigned even[4], odd[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                even[i] = w[i] & 0x0f0f0f0fu;
                odd[i] = w[i] >> 4 & 0x0f0f0f0fu;
                if constexpr (TYPE == Q5_K) {
                    even[i] |= (c < 2 ? fifth[i] << 4 - 2 * c : fifth[i] >> 2 * c - 4) & 0x10101010u;
                    odd[i] |= (c < 2 ? fifth[i] << 3 - 2 * c : fifth[i] >> 2 * c - 3) & 0x10101010u;
                }
            }
            int one[4] = {0, 0, 0, 0}, two[4] = {0, 0, 0, 0};
            multiply_bytes(one, even, x.x & m0, x.y & m1);
            multiply_bytes(two, odd, x.z & m0, x.w & m1);
            if (c & 1) scaled<true>(total, one, two, s0[c >> 1], s1[c >> 1]);
            else scaled<false>(total, one, two, s0[c >> 1], s1[c >> 1]);
        }
    } else {
        // Codes less 32 are their six bits with the upper one turned over, four times as large at the top of a byte.
        unsigned m = (g < 4) == ((t & 1) == 0) ? mine : 0u, select[2];
        const u8* aligned[2];
        low = 0.0f;
        int either = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int apart = within[r] & 2;
            either |= apart;
            aligned[r] = p[r] - apart;
            select[r] = apart ? 0x5432u : 0x3210u;
            factor[r] = f16_at(p[r] + 208) * d;
        }
        bool straight = !__any_sync(ALL, either);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Half f;
            if (straight) fetch_half<false>(f, aligned, select, h, t);
            else fetch_half<true>(f, aligned, select, h, t);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                f.q[4][r] = turned(f.q[4][r], 0xaaaaaaaau);
                f.q[5][r] = turned(f.q[5][r], 0xaaaaaaaau);
            }
#pragma unroll
            for (int u = 0; u < 4; u += 2) {
                uint4 x = *(const uint4*)(codes + 128 * h + 32 * u + 16 * t);
                const unsigned a[4] = {x.x & m, x.y & m, x.z & m, x.w & m};
                int part[4][4] = {};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    unsigned b[2];
                    int unit = u + (i >> 1);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        unsigned nibbles = (u ? f.q[i][r] >> 2 : f.q[i][r] << 2) & 0x3c3c3c3cu;
                        b[r] = nibbles | (f.q[4 + (i & 1)][r] << 6 - 2 * unit & 0xc0c0c0c0u);
                    }
                    multiply_bytes(part[i], b, a[i]);
                }
                scaled<false>(total, part[0], part[1], f.s[u >> 1][0], f.s[u >> 1][1]);
                scaled<true>(total, part[2], part[3], f.s[u >> 1][0], f.s[u >> 1][1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] >>= 2;
    }
}
