// NVFP4: codes of e2m1, two to a byte, and e4m3 scales of blocks of 16, in rows or in tiles of 128 rows x 4 blocks.
#pragma once
#include "e4m3.cuh"

// a * b + c cut to [0, 1], in one instruction; 0 for NaN.
#ifdef __CUDACC__
VT_FN float fma_to_unit(float a, float b, float c) {
    float y;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
    return y;
}
#else
VT_FN float fma_to_unit(float a, float b, float c) {
    float y = vt_fma(a, b, c);
    return y > 0.0f ? (y < 1.0f ? y : 1.0f) : 0.0f;
}
#endif

// acc - unit * the code of v, where that of a negative v has 8 more. No comparison and no integer: the seven steps of
// e2m1 are sums that round, to halves below 2 and to whole numbers below 4, and products that saturate, and the parts
// 4, 2 and 1 of 7 - code are accumulated. A NaN leaves nothing of them, so that it has code 7.
// Below 0.25 there is no sign (NATIVE: there is one for all but zero).
template <bool NATIVE> VT_FN float with_code(float acc, float v, float unit) {
    float size = vt_abs(v);
    float below_2 = fma_to_unit(size + 6291456.0f, -0.5f, 3145729.0f);   // (4 - rint(2 size)) / 4
    float below_4 = fma_to_unit(size + 12582912.0f, -0.5f, 6291458.0f);  // (4 - rint(size)) / 2
    float up_to_5 = fma_to_unit(size, -2097152.0f, 10485761.0f);         // 0 from 5 + 2^-21
    float negative = NATIVE ? (v < 0.0f ? 1.0f : 0.0f) : fma_to_unit(v, -33554432.0f, -8388608.0f);  // 1 under -0.25
    acc = vt_fma(below_2, -4.0f * unit, acc);
    acc = vt_fma(below_4, -2.0f * unit, acc);
    acc = vt_fma(up_to_5, -unit, acc);
    return vt_fma(negative, 8.0f * unit, acc);
}

// Eight codes, the first in the lowest bits: 2^23 and a number under 2^16 is a float32 that ends in the number's bits.
template <bool NATIVE> VT_FN unsigned e2m1_word(const float (&v)[8]) {
    float lo = 8388608.0f + 30583.0f, hi = lo;  // 0x7777
    float unit = 1.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        lo = with_code<NATIVE>(lo, v[j], unit);
        hi = with_code<NATIVE>(hi, v[j + 4], unit);
        unit *= 16.0f;
    }
    return ((unsigned)vt_bits(lo) & 0xffffu) | (unsigned)vt_bits(hi) << 16;
}

// Four codes.
VT_FN unsigned e2m1_four(const float (&v)[4]) {
    float four = 8388608.0f + 30583.0f, unit = 1.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        four = with_code<false>(four, v[j], unit);
        unit *= 16.0f;
    }
    return (unsigned)vt_bits(four) & 0xffffu;
}

// Of element `at` and its seven neighbours.
VT_FN void store_e2m1(unsigned char* out, i64 at, const float (&v)[8]) {
    *(unsigned*)(out + (at >> 1)) = e2m1_word<false>(v);
}

VT_FN unsigned e4m3_code(float x) { return e4m3_pair(x, 0.0f) & 0xffu; }

// The code's bits are those of a float32 that is 2^120 times smaller.
VT_FN float e4m3_value(unsigned code) {
    if ((code & 0x7fu) == 0x7fu) return vt_float(0x7fc00000);
    return vt_float((int)((code & 0x80u) << 24 | (code & 0x7fu) << 20)) * 0x1p120f;
}

// So are those of e2m1, 2^126 times.
VT_FN float e2m1_value(unsigned code) { return vt_float((int)((code & 8u) << 28 | (code & 7u) << 22)) * 0x1p126f; }

VT_FN float through_e4m3(float x) { return e4m3_value(e4m3_code(x)); }

// Among tiles, `across` of them side by side.
template <class I> VT_FN I tiled_place(I row, I column, I across) {
    return (((row >> 7) * across + (column >> 2)) * 32 + (row & 31)) * 16 + (row >> 5 & 3) * 4 + (column & 3);
}

// The scale of block `column` of a row. Among tiles the last block of a row fills its tile up with zeros to the right;
// what is below the last row is fill_tiles' part.
template <bool TILED, class I>
VT_FN void store_scale(unsigned char* scales, I rows, I row, I blocks, I column, unsigned code) {
    if (!TILED) {
        scales[row * blocks + column] = (unsigned char)code;
        return;
    }
    I across = (blocks + 3) >> 2;
    scales[tiled_place<I>(row, column, across)] = (unsigned char)code;
    if (column == blocks - 1)
#pragma unroll 1
        for (I c = blocks; c < across * 4; ++c) scales[tiled_place<I>(row, c, across)] = 0;
}

// Zeros below the last row of tiles, which start at an address of whole words, by all `threads` of a grid: 16 bytes of a
// tile have the words of four rows that are 32 apart.
VT_FN void fill_tiles(unsigned char* scales, i64 rows, i64 blocks, i64 thread, i64 threads) {
    int real = (int)(rows & 127);
    if (real == 0) return;
    i64 across = (blocks + 3) >> 2;
    unsigned* words = (unsigned*)(scales + (rows >> 7) * across * 512);
    bool wide = ((unsigned long long)scales & 15u) == 0;
#pragma unroll 1
    for (i64 n = thread; n < across * 32; n += threads) {
        int row = (int)(n & 31);
        if (wide && row >= real) {
            *(uint4*)(words + n * 4) = {0u, 0u, 0u, 0u};
        } else {
#pragma unroll
            for (int w = 0; w < 4; ++w)
                if (row + 32 * w >= real) words[n * 4 + w] = 0u;
        }
    }
}
