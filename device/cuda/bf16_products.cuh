// Products of bfloat16, two to a word.
#pragma once
#include "storage.cuh"

// Products of either half of a word, rounded once. So are those by way of float32: 16 bits of product are exact there
// from 2^-134 on, and what is less, and zero, has a code of zero by either way, and the product's sign.
VT_FN unsigned product_pair(unsigned a, unsigned b) {
#ifdef __CUDACC__
    unsigned c;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(0x80008000u));
    return c;
#else
    return narrow_bf16(widen_bf16(a & 0xffffu) * widen_bf16(b & 0xffffu), widen_bf16(a >> 16) * widen_bf16(b >> 16));
#endif
}
