// Tables of e4m3 codes that codes of 4 bits are looked up in, four at a time; experts and their rows.
#pragma once
#include "w4a8.cuh"

#define GROUP 128  // k of a table

// Where an expert's rows begin and how many it has, within those that there are; all rows where no offsets are given.
struct Own { i64 first, count; };
VT_FN Own rows_of(const i64* offsets, const int* sizes, i64 expert, i64 rows) {
    if (offsets == nullptr) return {0, rows};
    i64 first = offsets[expert], count = sizes[3 * expert + 1];
    if (first < 0 || first > rows || count < 0) return {0, 0};
    return {first, count < rows - first ? count : rows - first};
}
#ifdef __CUDACC__
VT_FN unsigned permuted(unsigned a, unsigned b, unsigned places) { return __byte_perm(a, b, places); }
#else
static inline unsigned permuted(unsigned a, unsigned b, unsigned places) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned place = places >> 4 * i & 15u, byte = (unsigned)(both >> 8 * (place & 7u)) & 0xffu;
        out |= (place & 8u ? (byte >> 7) * 0xffu : byte) << 8 * i;
    }
    return out;
}
#endif

// A column's table: entries as they are, and with signs flipped and a zero for code 0.
struct Table {
    uint2 negative, positive;
    VT_MEMBER void fetch(const char* from) {
        negative = *(const uint2*)from;
        positive = {(negative.x ^ 0x80808080u) & 0xffffff00u, negative.y ^ 0x80808080u};
    }
    // Of the four codes in the low half of `w`.
    VT_MEMBER unsigned look_up(unsigned w) const {
        unsigned places = w & 0x7777u, below = permuted(negative.x, negative.y, places);
        return permuted(below, permuted(positive.x, positive.y, places), 0x7654u ^ (w >> 1 & 0x4444u));
    }
};
