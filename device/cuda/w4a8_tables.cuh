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
    // Those of four codes: `places` are their lower three bits, `below` has all bits of the bytes whose code is below zero.
    VT_MEMBER unsigned look_up(unsigned places, unsigned below) const {
        return (permuted(negative.x, negative.y, places) & below) | (permuted(positive.x, positive.y, places) & ~below);
    }
};

// Entries of eight codes: a column's four are the lower half, another one's the upper. A byte's sign, as far as permutations
// spread it, is that of an odd code or, four bits further up, of an even one.
VT_FN void look_up_eight(unsigned w, const Table& low, const Table& up, unsigned& lower, unsigned& upper) {
    unsigned places = w & 0x77777777u, further = w << 4;
    lower = low.look_up(places, permuted(w, further, 0x9d8cu));
    upper = up.look_up(places >> 16, permuted(w, further, 0xbfaeu));
}
