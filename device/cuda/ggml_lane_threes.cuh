// Halves of Q3_K's blocks that lanes meet (ggml_lanes.cuh).
//
// Two bits of a code are masked where they lie, and so are third ones, where they are not set: a code is the two bits
// less four of those. Sums of sixteen are brought to the same power of two by what their scales are taken times.
#pragma once
#include "ggml_lanes.cuh"

template <> struct Met<Q3_K> {
    static constexpr int TABLES = 0, SCALE = 108;
    static constexpr float UNIT = 0.015625f;  // 1 / 64
    static VT_MEMBER u8* place(u8* memory) { return memory; }
    VT_MEMBER void ask() {}
    VT_MEMBER void fill(u8*, int) {}
    VT_MEMBER void begin(u8*, int) {}
    VT_MEMBER int operator()(const u8* p, int half, const Activations& a) const {
        const EvenWords words(p), own = words.further(32 + 32 * half);
        const unsigned low = words[24], high = words[25], top = words[26];
        int total = 0;
#pragma unroll
        for (int j = 0; j < 2; ++j) {  // sixteen of each 32
            int two[4] = {0, 0, 0, 0}, none[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; ++i) {
                const unsigned w = own[i], third = words[i] >> 4 * half;
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    two[s] = dot4_unsigned(w & 0x03030303u << 2 * s, a.x[8 * s + i], two[s]);
                    none[s] = dot4_unsigned(~third & 0x01010101u << s, a.x[8 * s + i], none[s]);
                }
            }
            // Of the half's scales four bits stand in every other byte; upper ones of the last two are two bits further on.
            const unsigned four = permute(low, high, j ? 0x7531u : 0x6420u) >> 4 * half;
            const unsigned upper = permute(top, top, j ? 0x3131u : 0x2020u) >> 4 * half;
            const unsigned scales = (four & 0x0f0f0f0fu) | (chosen(0x0000ffffu, upper << 4, upper << 2) & 0x30303030u);
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                const int sum = two[s] - (none[s] << s + 2);
                total += dot4_unsigned(scales, 64u >> 2 * s << 8 * s, -(2048 >> 2 * s)) * sum;
            }
        }
        return total;
    }
};
