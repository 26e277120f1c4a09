// FP4 codes in Marlin's tiles as a format of marlin_formats.cuh: the numbers of fp4_product.cuh, whose chains are the parts here.
#pragma once
#include "fp4_product.cuh"
#include "marlin_formats.cuh"

#if VT_TILES

template <int KIND_, int SCALE> struct StreamedFp4 {
    static constexpr int KIND = KIND_, TILE = 4, EVERY = SCALE == E8M0 ? 2 : 1, SCALE_ROWS = 4 / EVERY;
    static constexpr int SCALE_BYTES = COLUMNS, ZERO_BYTES = 0;

    template <int TILES> struct Held {
        unsigned bytes[SCALE_ROWS][(TILES + 1) / 2], pair[TILES][2];

        VT_MEMBER void begin(i64, i64) {}
        // Of each four columns 0, 2, 1, 3: a word has two tiles' scales of columns g and g + 8.
        VT_MEMBER void take(const char* scales, int row_bytes, const char*, int first, int g, i64) {
#pragma unroll
            for (int r = 0; r < SCALE_ROWS; ++r)
#pragma unroll
                for (int i = 0; i < (TILES + 1) / 2; ++i)
                    bytes[r][i] = word_at(scales, r * row_bytes + g * 8 + (first / 2 + i) * 4) >> (TILES == 1 ? 8 * (first & 1) : 0);
        }
        VT_MEMBER void operands(unsigned (&a)[4], const unsigned* words, int s, int j, int) {
            if (s % EVERY == 0) {
                unsigned both = scale_pair<KIND, SCALE>(bytes[s / EVERY][j / 2] >> 8 * (j & 1) & 0x00ff00ffu);
                pair[j][0] = pick<0x1010>(both, 0), pair[j][1] = pick<0x3232>(both, 0);
            }
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                unsigned code = small_pair<KIND>(words[0], 8 * (r & 1) + 4 * (r >> 1));
                if (SCALE == E8M0) code = times_pair<KIND>(code, 0x7e807e80u);
                a[r] = times_pair<KIND>(code, pair[j][r & 1]);
            }
        }
    };
    static VT_MEMBER float last(float x, i64 n, const void* factor, const void* bias) {
        return fp4_finished<KIND, SCALE>(x, n, (const float*)factor, bias);
    }
};

#endif
