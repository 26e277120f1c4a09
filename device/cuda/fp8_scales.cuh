// Scales of FP8 quantisers and the values that they make codes of, as oracle/quant_fp8.py defines them.
#pragma once
#include "e4m3.cuh"

#define FULL_WARP 0xffffffffu
#define E4M3_LARGEST 448.0f
#define E4M3_RECIPROCAL vt_float(0x3b124925)  // float32(1 / 448)
#define SCALE_FLOOR vt_float(0x36924925)      // float32(1 / (448 * 512))
#define INT8_FLOOR 0x1p-23f

enum { VT = 0, VLLM = 1, VLLM_NATIVE = 2 };  // device/quant_fp8.py: RULES

VT_FN unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }

// The largest |x| as an unsigned number that orders like it: a NaN is passed over, or (native form) more than infinity.
template <int V> VT_FN unsigned largest_of(const float (&x)[V], bool keep_nan) {
    unsigned top = 0;
    float size = 0.0f;
    if (keep_nan) {
#pragma unroll
        for (int j = 0; j < V; ++j) top = larger(top, (unsigned)vt_bits(x[j]) & 0x7fffffffu);
        return top;
    }
#pragma unroll
    for (int j = 0; j < V; ++j) size = fmaxf(size, vt_abs(x[j]));
    return (unsigned)vt_bits(size);
}

// The larger of two bfloat16 without signs, in either half of a word. b may be NaN, which loses, or (KEEP) wins.
template <bool KEEP> VT_FN unsigned larger_pair(unsigned a, unsigned b) {
#ifdef __CUDACC__
    unsigned c;
    if (KEEP) asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    else asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
#else
    auto one = [](unsigned a, unsigned b) { return !KEEP && b > 0x7f80u ? a : larger(a, b); };
    return one(a & 0xffffu, b & 0xffffu) | one(a >> 16, b >> 16) << 16;
#endif
}

template <bool KEEP> VT_FN unsigned largest_pair(const uint4& words) {
    unsigned a = larger_pair<KEEP>(0u, words.x & 0x7fff7fffu), b = larger_pair<KEEP>(0u, words.y & 0x7fff7fffu);
    a = larger_pair<KEEP>(a, words.z & 0x7fff7fffu);
    b = larger_pair<KEEP>(b, words.w & 0x7fff7fffu);
    return larger_pair<KEEP>(a, b);
}

// `largest_of` of eight bfloat16 as they lie in memory.
VT_FN unsigned largest_of_bf16(const Raw<8>& raw, bool keep_nan) {
    unsigned top = keep_nan ? largest_pair<true>(raw.a) : largest_pair<false>(raw.a);
    return larger(top << 16, top & 0xffff0000u);
}

// Over 1, 2, 4 ... 32 neighbouring lanes; all lanes of the warp must come here.
VT_FN unsigned largest_of_lanes(unsigned top, int lanes) {
    for (int m = lanes >> 1; m >= 1; m >>= 1) top = larger(top, __shfl_xor_sync(FULL_WARP, top, m));
    return top;
}

VT_FN unsigned largest_of_warp(unsigned top) {
#ifdef __CUDACC__
    return __reduce_max_sync(FULL_WARP, top);
#else
    return largest_of_lanes(top, 32);
#endif
}

// Over a block of whole warps; `tops`: a number of shared memory for each of them, for this use alone.
VT_FN unsigned largest_of_block(unsigned top, unsigned* tops) {
    top = largest_of_warp(top);
    int count = blockDim.x >> 5, lane = threadIdx.x & 31;
    if (count == 1) return top;
    if (lane == 0) tops[threadIdx.x >> 5] = top;
    __syncthreads();
    return largest_of_warp(lane < count ? tops[lane] : 0u);
}

// size / 448 to nearest, for all sizes but those under 2^-90: one step of correction makes the product with the
// reciprocal the quotient. Tried with every mantissa.
VT_FN float over_largest(float size) {
    float scale = size * E4M3_RECIPROCAL;
    float corrected = vt_fma(-vt_fma(scale, E4M3_LARGEST, -size), E4M3_RECIPROCAL, scale);
    return size < VT_INF ? corrected : scale;
}

// The scale of what is `top` large: `size_ub` bounds the size, `scale_ub` the scale; either may be null.
VT_FN float floored_scale(unsigned top, const float* size_ub, const float* scale_ub) {
    float size = vt_float((int)top);
    if (size_ub != nullptr) size = vt_minimum(size, size_ub[0]);
    float scale = over_largest(size);  // what is tiny goes under the floor
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

// How values are divided by their scale: one product with the reciprocal y of the scale s, q = x y, and one step of
// correction, q + (x - q s) y. q is within 1.5 ulps of x / s, so that the corrected sum is within 2^-22 ulps of it
// before its rounding, and both round to the same float32, unless x / s is that close to the middle of two of them. Of
// what that could change only the two middles beside a value halfway between two codes matter, 16 mantissas of 5 bits:
// they need an s within 8 ulps of a multiple of 2^-3, and there all are tried (parity/test_device_calls_quant.py).
// Signs of zero are kept by taking q s - x, and its opposite. Scales and values that are not of middling size are
// divided.
struct Divisor {
    float scale, inverse, back;  // back: 0 for products alone
    bool middling;

    VT_MEMBER Divisor(float scale, float inverse)  // as found elsewhere; inverse: 0 where not middling
        : scale(scale), inverse(inverse), back(inverse), middling(inverse > 0.0f) {}
    // top: the largest |x|; `product`: what is wanted is x * float32(1 / scale).
    VT_MEMBER Divisor(float scale, unsigned top, bool product) : scale(scale), inverse(1.0f / scale) {
        back = product ? 0.0f : inverse;
        middling = (unsigned)vt_bits(scale) - 0x21800000u < 0x3c000000u && top < 0x5d800000u;  // 2^-60 ... 2^60
    }
    template <int V> VT_MEMBER void divide(float (&q)[V], const float (&x)[V]) const {
        if (middling) {
#pragma unroll
            for (int j = 0; j < V; ++j) {
                float near = x[j] * inverse;
                q[j] = vt_fma(-vt_fma(near, scale, -x[j]), back, near);
            }
            return;
        }
#pragma unroll
        for (int j = 0; j < V; ++j) q[j] = back != inverse ? x[j] * inverse : x[j] / scale;
    }
};

// Scales of groups of `lanes` neighbours, at least D of them, that hold D vectors of bfloat16 each, one of D groups
// (the last ones may be missing). Maxima travel two by two, and each lane finds the scale of but one of its groups, number `own`.
template <int D> struct GroupScales {
    int own;
    float scale, inverse;  // of group `own`

    // tops[d]: largest_pair of vector d; find(top) -> scale
    template <bool KEEP, class F> VT_MEMBER void join(const unsigned (&tops)[D], int lanes, F&& find) {
        unsigned pairs[D / 2];
#pragma unroll
        for (int d = 0; d < D; d += 2)
            pairs[d / 2] = larger_pair<KEEP>((tops[d] & 0xffffu) | tops[d + 1] << 16,
                                             tops[d] >> 16 | (tops[d + 1] & 0xffff0000u));
        for (int m = lanes >> 1; m >= 1; m >>= 1)
#pragma unroll
            for (int p = 0; p < D / 2; ++p)
                pairs[p] = larger_pair<KEEP>(pairs[p], __shfl_xor_sync(FULL_WARP, pairs[p], m));
        own = threadIdx.x & (D - 1);
        unsigned pair = pairs[0];
#pragma unroll
        for (int p = 1; p < D / 2; ++p)
            if (own >> 1 == p) pair = pairs[p];
        unsigned top = own & 1 ? pair & 0xffff0000u : pair << 16;
        Divisor by(find(top), top, false);
        scale = by.scale;
        inverse = by.middling ? by.inverse : 0.0f;
    }
    VT_MEMBER Divisor of(int d) const {
        int away = own ^ d;
        return Divisor(__shfl_xor_sync(FULL_WARP, scale, away), __shfl_xor_sync(FULL_WARP, inverse, away));
    }
};

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
        return int8 ? int8_scale(top, scale_ub) : floored_scale(top, scale_ub, nullptr);
    }
    VT_MEMBER Divisor divisor(float scale, unsigned top) const { return Divisor(scale, top, rule == VLLM_NATIVE); }
    template <int V> VT_MEMBER void put(i64 at, const float (&x)[V], const Divisor& by) const {
        float q[V];
        if (int8 && rule == VLLM) {
            products(q, x, by.inverse);
            return store_int8(out, at, q, 1.0f);
        }
        if (int8) return store_int8(out, at, x, by.scale);
        by.divide(q, x);
        store_e4m3(out, at, q, nan);
    }
};

// n / d of whole numbers under 2^31 as a product: device/units.py's or a launcher's `magic` is 2^(31 + L) / d + 1 with
// 2^L the least power that is not below d, shift = 31 + L.
VT_FN unsigned whole_quotient(unsigned n, unsigned magic, int shift) {
    return (unsigned)((unsigned long long)n * magic >> shift);
}
