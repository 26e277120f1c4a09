// Weights of 4 bits that are entries of their scales' tables of eight e4m3 codes, as byte permutations look them up.
#pragma once
#include "w4a8.cuh"

#ifdef __CUDACC__
// Unlike __byte_perm this takes `places` as they are, whose upper half does not count: nothing is masked once more.
VT_FN unsigned permuted(unsigned a, unsigned b, unsigned places) {
    unsigned out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(places));
    return out;
}
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
    VT_MEMBER void fetch(const void* from) {
        negative = *(const uint2*)from;
        positive = {(negative.x ^ 0x80808080u) & 0xffffff00u, negative.y ^ 0x80808080u};
    }
    VT_MEMBER unsigned look_up(unsigned places, unsigned which) const {
        unsigned below = permuted(negative.x, negative.y, places);
        return permuted(below, permuted(positive.x, positive.y, places), which);
    }
};

// Eight codes' places in a table, and which of them are below zero; a column's four are the low half or the upper one.
struct Places {
    unsigned places, which;
    // `order` is ORDER, in a register: so the last two steps are one.
    static constexpr unsigned ORDER = 0x76547654u;
    VT_MEMBER Places(unsigned w, unsigned order) : places(w & 0x77777777u), which((w >> 1 & 0x44444444u) ^ order) {}
    VT_MEMBER unsigned look_up(const Table& low) const { return low.look_up(places, which); }
    VT_MEMBER unsigned look_up_upper(const Table& up) const { return up.look_up(places >> 16, which >> 16); }
};
