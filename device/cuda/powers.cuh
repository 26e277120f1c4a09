// Scales rounded up to powers of two, as DeepGEMM's casts and vLLM's ue8m0 kernels do.
#pragma once
#include "fp8_scales.cuh"

enum { AS_IT_IS = 0, BY_BITS = 1, BY_LOG2 = 2 };  // device/fp8_casts.py: POWERS

// 2^ceil(l), l the float32 nearest to log2(scale), for normal scales; infinity stays. l is e itself where
// scale = (1 + j 2^-23) 2^e lies above 2^e by so little that log2(1 + j 2^-23) is at most half of what separates e from
// the next float32: 2^(k - 24) with 2^k the largest power of two up to e, or below -e.
VT_FN float power_by_log2(float scale) {
    unsigned bits = (unsigned)vt_bits(scale);
    if (bits >= 0x7f800000u) return scale;
    int e = (int)(bits >> 23) - 127, n = e > 0 ? e : -e - 1;
    int k = (vt_bits((float)n) >> 23) - 127;
    unsigned most = n < 2 ? 0u : (22713u << k) >> 16;  // j; 22713 = ln2 2^15
    return vt_float((int)((bits & 0x7f800000u) + ((bits & 0x7fffffu) > most ? 0x800000u : 0u)));
}

VT_FN float rounded_up(float scale, int rule) {
    if (rule == BY_LOG2) return power_by_log2(scale);
    return rule == BY_BITS ? power_of_two(scale) : scale;
}
