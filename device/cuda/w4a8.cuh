// Weights of 4 bits whose scales are tables of e4m3 codes: values of codes, encoded codes, and where their words lie.
#pragma once
#include "e4m3.cuh"

VT_FN float e4m3_value(unsigned code) {
    unsigned exponent = code >> 3 & 15u, digits = code & 7u;
    float size = exponent ? vt_float((int)((exponent + 120u) << 23 | digits << 20)) : (float)digits * 0.001953125f;
    if ((code & 0x7fu) == 0x7fu) size = VT_NAN;
    return code & 0x80u ? -size : size;
}

VT_FN unsigned one_e4m3(float x) { return e4m3_pair(x, 0.0f) & 0xffu; }

// Eight codes at a time: 1 ... 7 become 7 ... 1, others stay; its own inverse.
VT_FN unsigned encoded(unsigned w) {
    unsigned negative = (w >> 3 & 0x11111111u) * 15u;
    return (w & negative) | ((0x88888888u - (w & 0x77777777u)) & 0x77777777u & ~negative);
}

// The words' order: tiles of 32 k x 16 columns, along the columns first. A lane's two words are the codes that it multiplies:
// nibble i of word h is k = 16 h + 4 (lane % 4) + i % 4 of column lane / 4 + 8 (i / 4).
VT_FN i64 word_of(i64 k, i64 n, i64 columns) {
    return ((k / 32 * (columns / 16) + n / 16) * 32 + n % 8 * 4 + k % 16 / 4) * 2 + k % 32 / 16;
}
VT_FN int nibble_of(i64 k, i64 n) { return (int)(k % 4 + n % 16 / 8 * 4); }
