// Float32 to whole numbers, and whole numbers cut to 8 or 4 bits and packed into words.
#pragma once
#include "storage.cuh"

// To nearest even, and towards zero; within int32, 0 for NaN.
#ifdef __CUDACC__
VT_FN int nearest_int(float v) {
    int q;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(q) : "f"(v));
    return q;
}
VT_FN int whole_int(float v) {
    int q;
    asm("cvt.rzi.s32.f32 %0, %1;" : "=r"(q) : "f"(v));
    return q;
}
#else
VT_FN int whole_int(float v) {
    if (v != v) return 0;
    return v >= 2147483648.0f ? 2147483647 : v <= -2147483648.0f ? -2147483647 - 1 : (int)v;
}
VT_FN int nearest_int(float v) { return whole_int(rintf(v)); }
#endif

VT_FN int between(i64 q, int low, int high) { return q < low ? low : q > high ? high : (int)q; }

// Four numbers, each cut to [-128, 127], in a word.
VT_FN unsigned four_codes(int a, int b, int c, int d) {
#ifdef __CUDACC__
    unsigned high, word;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(d), "r"(c));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(b), "r"(a), "r"(high));
    return word;
#else
    auto one = [](int q) { return (unsigned)between(q, -128, 127) & 0xffu; };
    return one(a) | one(b) << 8 | one(c) << 16 | one(d) << 24;
#endif
}

// Eight numbers, each cut to [0, 15], in a word.
VT_FN unsigned eight_codes(const int (&c)[8]) {
#ifdef __CUDACC__
    unsigned word = 0;
#pragma unroll
    for (int j = 6; j >= 0; j -= 2)
        asm("cvt.pack.sat.u4.s32.b32 %0, %1, %2, %0;" : "+r"(word) : "r"(c[j + 1]), "r"(c[j]));
    return word;
#else
    unsigned word = 0;
    for (int j = 0; j < 8; ++j) word |= (unsigned)between(c[j], 0, 15) << 4 * j;
    return word;
#endif
}
