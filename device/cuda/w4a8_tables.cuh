// Weights of 4 bits that are entries of their scales' tables of eight e4m3 codes, as byte permutations look them up.
#pragma once
#include "w4a8.cuh"

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

// Eight codes' places in a table, and which of them are below zero; a column's four are the low half or the upper one.
struct Places {
    unsigned places, which;
    VT_MEMBER explicit Places(unsigned w) : places(w & 0x77777777u), which((w >> 1 & 0x44444444u) ^ 0x76547654u) {}
    VT_MEMBER Places(unsigned places, unsigned which) : places(places), which(which) {}
    VT_MEMBER Places upper() const { return {places >> 16, which >> 16}; }
};

// A column's table: entries as they are, and with signs flipped and a zero for code 0.
struct Table {
    uint2 negative, positive;
    VT_MEMBER void fetch(const void* from) {
        negative = *(const uint2*)from;
        positive = {(negative.x ^ 0x80808080u) & 0xffffff00u, negative.y ^ 0x80808080u};
    }
    VT_MEMBER unsigned look_up(Places at) const {
        unsigned below = permuted(negative.x, negative.y, at.places);
        return permuted(below, permuted(positive.x, positive.y, at.places), at.which);
    }
};
