// FP4 codes in Marlin's tiles as a format of marlin_formats.cuh: the numbers of fp4_product.cuh, whose chains are the parts here.
#pragma once
#include "fp4_product.cuh"
#include "marlin_formats.cuh"

#if VT_TILES

#ifdef __CUDACC__
// A pair by the lower or the upper half of `both`: the multiplier takes a half twice.
template <int KIND, bool UPPER> VT_FN unsigned times_half(unsigned code, unsigned both) {
    unsigned twice;
    if (UPPER) asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(twice) : "r"(both));
    else asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(twice) : "r"(both));
    return times_pair<KIND>(code, twice);
}
// Bytes FIRST and FIRST + 2, each below a byte of copies of its top bit.
template <int FIRST> VT_FN unsigned bytes_below_signs(unsigned bytes) {
    unsigned x;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(x) : "r"(bytes), "n"(0xa280 + 0x1111 * FIRST));
    return x;
}
#else
template <int KIND, bool UPPER> unsigned times_half(unsigned code, unsigned both) {
    return times_pair<KIND>(code, (UPPER ? both >> 16 : both & 0xffffu) * 0x10001u);
}
template <int FIRST> unsigned bytes_below_signs(unsigned bytes) {
    unsigned low = bytes >> 8 * FIRST & 0xffu, high = bytes >> (8 * FIRST + 16) & 0xffu;
    return low | (low & 0x80u ? 0xff00u : 0) | high << 16 | (high & 0x80u ? 0xff000000u : 0);
}
#endif

template <int KIND_, int SCALE> struct StreamedFp4 {
    static constexpr int KIND = KIND_, TILE = 4, EVERY = SCALE == E8M0 ? 2 : 1, SCALE_ROWS = 4 / EVERY;
    static constexpr int SCALE_BYTES = COLUMNS, ZERO_BYTES = 0;

    template <int TILES> struct Held {
        unsigned bytes[SCALE_ROWS][(TILES + 1) / 2], both[TILES];

        VT_MEMBER void begin(i64, i64) {}
        // Of each four columns 0, 2, 1, 3: a word has two tiles' scales of columns g and g + 8.
        VT_MEMBER void take(const char* scales, int row_bytes, const char*, int first, int g, i64) {
#pragma unroll
            for (int r = 0; r < SCALE_ROWS; ++r)
#pragma unroll
                for (int i = 0; i < (TILES + 1) / 2; ++i)
                    bytes[r][i] = word_at(scales, r * row_bytes + g * 8 + (first / 2 + i) * 4) >> (TILES == 1 ? 8 * (first & 1) : 0);
        }
        // Scales of columns g and g + 8 of tile j. Processed scales of NVFP4 are 0 or have their top bit set, copies of which
        // are the exponent's upper bits: 2^119 times the scale.
        static VT_MEMBER unsigned scales_of(unsigned four, int j) {
            if constexpr (KIND == BF16 && SCALE == S0E5M3)
                return (j & 1 ? bytes_below_signs<1>(four) : bytes_below_signs<0>(four)) << 4 & 0x7ff07ff0u;
            else
                return scale_pair<KIND, SCALE>(four >> 8 * (j & 1) & 0x00ff00ffu);
        }
        VT_MEMBER void operands(unsigned (&a)[4], const unsigned* words, int s, int j, int) {
            if (s % EVERY == 0) both[j] = scales_of(bytes[s / EVERY][j / 2], j);
            // Shifts to the left go through the multipliers: more of them where the multipliers have less to do.
            constexpr bool LEFT = KIND == BF16 && SCALE != E8M0;
            unsigned w = words[0], later = LEFT ? kept(w >> 8) : 0;
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                unsigned code = LEFT && r & 1 ? small_pair<KIND>(later, 4 * (r >> 1)) : small_pair<KIND>(w, 8 * (r & 1) + 4 * (r >> 1));
                if (SCALE == E8M0) code = times_pair<KIND>(code, 0x7e807e80u);
                a[r] = r & 1 ? times_half<KIND, true>(code, both[j]) : times_half<KIND, false>(code, both[j]);
            }
        }
    };
    static VT_MEMBER float last(float x, i64 n, const void* factor, const void* bias) {
        return fp4_finished<KIND, SCALE>(KIND == BF16 && SCALE == S0E5M3 ? 0.5f * x : x, n, (const float*)factor, bias);
    }
};

#endif
