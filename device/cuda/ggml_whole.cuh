// Q2_K's blocks meet the activations' codes: a lane has a whole block of two rows, four products an instruction. Their
// codes are so few that a warp has less to do for four blocks of sixteen rows than on the tensor cores (ggml_meet.cuh).
#pragma once
#include "ggml_share.cuh"

VT_FN unsigned word_in(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// The terms of a block of two rows.
VT_MEMBER void meet_whole(float (&term)[2], const u8* const (&p)[2], const u8* codes, float d,
                          const unsigned short* sums) {
    const uint4* x = (const uint4*)codes;
    int total[2] = {0, 0}, fourfold[2] = {0, 0}, minimum[2] = {0, 0};
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
        for (int u = 0; u < 4; u += 2) {  // units' products are 1, 4, 16 and 64 times as large
            int even[2][2] = {}, odd[2][2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint4 a = x[8 * h + 2 * u + half], b = x[8 * h + 2 * u + 2 + half];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        unsigned four = q[r][4 * half + i];
                        even[r][half] = dot4_unsigned(four & 0x03030303u << 2 * u, word_in(a, i), even[r][half]);
                        odd[r][half] = dot4_unsigned(four & 0x0c0c0c0cu << 2 * u, word_in(b, i), odd[r][half]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                unsigned scales = s[r][u / 2] & 0x0f0f0f0fu;
                if (u == 0) {
                    int low = (int)permute((unsigned)even[r][0], (unsigned)even[r][1], 0x5410);
                    int high = (int)permute((unsigned)odd[r][0], (unsigned)odd[r][1], 0x5410);
                    total[r] = dot2_low(low, scales, total[r]);
                    fourfold[r] = dot2_high(high, scales, fourfold[r]);
                } else {
                    int low = (int)permute((unsigned)even[r][0] * 16, (unsigned)even[r][1] * 16, 0x6521);
                    int high = (int)permute((unsigned)odd[r][0] * 4, (unsigned)odd[r][1] * 4, 0x6521);
                    total[r] = dot2_high(high, scales, dot2_low(low, scales, total[r]));
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float whole = (float)(total[r] + (fourfold[r] >> 2)), less = (float)minimum[r];
        term[r] = (d * f16_at(p[r] + 80)) * whole - (d * f16_at(p[r] + 82)) * less;
    }
}
