// Scales of FP8 quantisers and the values that they make codes of, as oracle/quant_fp8.py defines them.
#pragma once
#include "e4m3.cuh"

#define FULL_WARP 0xffffffffu
#define E4M3_LARGEST 448.0f
#define E4M3_RECIPROCAL vt_float(0x3b124925)  // float32(1 / 448)
#define SCALE_FLOOR vt_float(0x36924925)      // float32(1 / (448 * 512))
#define INT8_FLOOR 0x1p-23f

enum { VT = 0, VLLM = 1, VLLM_NATIVE = 2 };  // device/quant_fp8.py: RULES

// |x| as an unsigned number that orders like it; a NaN counts as 0, or (native form) as more than infinity.
VT_FN unsigned size_of(float x, bool keep_nan) {
    unsigned size = (unsigned)vt_bits(x) & 0x7fffffffu;
    return size > 0x7f800000u && !keep_nan ? 0u : size;
}

VT_FN unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }

template <int V> VT_FN unsigned largest_of(const float (&x)[V], bool keep_nan) {
    unsigned top = 0;
#pragma unroll
    for (int j = 0; j < V; ++j) top = larger(top, size_of(x[j], keep_nan));
    return top;
}

// Over 1, 2, 4 ... 32 neighbouring lanes; all lanes of the warp must come here.
VT_FN unsigned largest_of_lanes(unsigned top, int lanes) {
    for (int m = lanes >> 1; m >= 1; m >>= 1) top = larger(top, __shfl_xor_sync(FULL_WARP, top, m));
    return top;
}

// Over a block of whole warps, at most 256 threads; `tops`: 8 numbers of shared memory for this use alone.
VT_FN unsigned largest_of_block(unsigned top, unsigned* tops) {
    top = largest_of_lanes(top, 32);
    int count = blockDim.x >> 5;
    if (count == 1) return top;
    if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = top;
    __syncthreads();
    top = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) top = larger(top, w < count ? tops[w] : 0u);
    return top;
}

// The scale of what is `top` large: `size_ub` bounds the size, `scale_ub` the scale; either may be null.
VT_FN float floored_scale(unsigned top, int rule, const float* size_ub, const float* scale_ub) {
    float size = vt_float((int)top);
    if (size_ub != nullptr) size = vt_minimum(size, size_ub[0]);
    float scale = rule == VLLM ? size * E4M3_RECIPROCAL : size / E4M3_LARGEST;
    if (scale_ub != nullptr) scale = vt_minimum(scale, scale_ub[0]);
    return vt_maximum(scale, SCALE_FLOOR);
}

VT_FN float int8_scale(unsigned top, const float* size_ub) {
    float size = vt_float((int)top);
    if (size_ub != nullptr) size = vt_minimum(size, size_ub[0]);
    return vt_maximum(size / 127.0f, INT8_FLOOR);
}

// The least power of two that is not below the scale; 0, infinity and NaN stay.
VT_FN float power_of_two(float scale) {
    unsigned bits = (unsigned)vt_bits(scale);
    if (bits == 0 || bits >= 0x7f800000u) return scale;
    if (bits <= 0x00400000u) return vt_float(0x00400000);  // 2^-127
    return vt_float((int)((bits + 0x7fffffu) & 0x7f800000u));
}

// A product with the reciprocal is within three float32 ulps of the quotient and has its code, unless it lies that
// close to halfway between two codes or among the subnormal ones; then the division decides.
#define CLOSE 4u
VT_FN bool decided(float q) {
    unsigned off = ((unsigned)vt_bits(q) + 0x80000u + CLOSE) & 0xfffffu;
    return (off > 2 * CLOSE && vt_abs(q) >= 0.0157f) || q == 0.0f || q != q;
}

// Values with the codes of x / scale; inverse = 1 / scale, of no use where it overflows.
template <int V> VT_FN void quotients(float (&q)[V], const float (&x)[V], float scale, float inverse) {
    bool fine = inverse < 0x1p126f, sure = fine;
#pragma unroll
    for (int j = 0; j < V; ++j) {
        q[j] = x[j] * inverse;
        sure = sure && decided(q[j]);
    }
    if (sure) return;
#pragma unroll
    for (int j = 0; j < V; ++j)
        if (!fine || !decided(q[j])) q[j] = x[j] / scale;
}

template <int V> VT_FN void products(float (&q)[V], const float (&x)[V], float factor) {
#pragma unroll
    for (int j = 0; j < V; ++j) q[j] = x[j] * factor;
}

VT_FN unsigned int8_code(float x, float scale) {
    float q = rintf(x / scale);
    q = q < -128.0f ? -128.0f : q > 127.0f ? 127.0f : q;
    return q != q ? 0u : (unsigned)(int)q & 0xffu;
}

VT_FN void store_int8(unsigned char* out, i64 at, const float (&x)[8], float scale) {
    unsigned lo = 0, hi = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        lo |= int8_code(x[j], scale) << 8 * j;
        hi |= int8_code(x[j + 4], scale) << 8 * j;
    }
    *(unsigned long long*)(out + at) = lo | (unsigned long long)hi << 32;
}

VT_FN void store_int8(unsigned char* out, i64 at, const float (&x)[1], float scale) {
    out[at] = (unsigned char)int8_code(x[0], scale);
}

// A token's codes under its scale.
struct TokenCodes {
    const float* scale_ub;
    unsigned char* out;
    float* scales;
    int rule;
    unsigned nan;
    bool int8;

    VT_MEMBER bool keeps_nan() const { return rule == VLLM_NATIVE && !int8; }
    VT_MEMBER float scale(unsigned top) const {
        return int8 ? int8_scale(top, scale_ub) : floored_scale(top, rule, scale_ub, nullptr);
    }
    template <int V> VT_MEMBER void put(i64 at, const float (&x)[V], float scale, float inverse) const {
        if (int8) return store_int8(out, at, x, scale);
        float q[V];
        if (rule == VLLM_NATIVE) products(q, x, inverse);
        else quotients(q, x, scale, inverse);
        store_e4m3(out, at, q, nan);
    }
};
