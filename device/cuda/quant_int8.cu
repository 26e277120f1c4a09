// INT8 quantisers: static, per token and per group of neighbours, with and without a zero point.
//
// The ladder:
// 1. *_v1, token kernels *_v8: any width and stride; a row that was measured is read again. group_any: a warp a group.
// 2. static_v8, *_flat: 16-byte loads; the quotient is a product and a correction (fp8_scales.cuh), which decides every
//    half and whole number up to 128 as a division does (parity/test_device_calls_int8.py).
// 3. *_rows, *_block: a row of bfloat16 waits in registers for its scale. group_v8, group_deep: so does a group.
// 4. int8_group_bf16_early: started while the kernel before ends (early.cuh), 0.6 us less for few groups.
#include "bf16_range.cuh"
#include "found.cuh"
#include "fp8_scales.cuh"
#include "int_codes.cuh"
#include "rows.cuh"

#define DEPTH 2  // groups a thread of the static kernels, device/quant_int8.py
#define GROUP_DEPTH 4  // vectors a thread of group_deep

enum { OF_CUDA = 0, OF_CPU = 1, OF_TRITON = 2 };  // whose roundings; device/quant_int8.py: RULES

// nearest_int(v) + azp where that cut to int16 first leaves the same code: a conversion cuts without being told.
#define SMALL_AZP 32640
VT_FN int nearest_and(float v, int azp) {
#ifdef __CUDACC__
    short q;
    asm("cvt.rni.s16.f32 %0, %1;" : "=h"(q) : "f"(v));
    return (int)q + azp;
#else
    return between(nearest_int(v), -32768, 32767) + azp;
#endif
}

// nearest_int(v) + azp, to within what `four_codes` cuts; most zero points are small.
template <int V> VT_FN void shifted_codes(int (&c)[V], const float (&v)[V], int azp) {
    if (azp >= -SMALL_AZP && azp <= SMALL_AZP) {
#pragma unroll
        for (int j = 0; j < V; ++j) c[j] = nearest_and(v[j], azp);
    } else {
#pragma unroll
        for (int j = 0; j < V; ++j) c[j] = between((i64)nearest_int(v[j]) + azp, -128, 127);
    }
}

VT_FN int half_away(float v) {
    float whole = truncf(v);
    float more = vt_abs(v - whole) >= 0.5f ? (v < 0.0f ? -1.0f : 1.0f) : 0.0f;
    return nearest_int(whole + more);
}

VT_FN void store_codes(signed char* out, i64 at, const int (&c)[8]) {
    *(uint2*)(out + at) = {four_codes(c[0], c[1], c[2], c[3]), four_codes(c[4], c[5], c[6], c[7])};
}

VT_FN void store_codes(signed char* out, i64 at, const int (&c)[1]) { out[at] = (signed char)between(c[0], -128, 127); }

// A vector's codes; shifted: by a zero point.
template <int V>
VT_FN void put_static(signed char* out, i64 at, const float (&v)[V], float by, float inverse, bool shifted, int zero,
                      i64 rule) {
    float q[V];
    int c[V];
    if (!shifted && rule == OF_CUDA) Divisor(by, largest_of(v, false), false).divide(q, v);
    else products(q, v, inverse);
    if (shifted && rule == OF_CPU) {
#pragma unroll
        for (int j = 0; j < V; ++j) q[j] += (float)zero;
    }
    if (shifted && rule == OF_CUDA) {
        shifted_codes(c, q, zero);
    } else {
#pragma unroll
        for (int j = 0; j < V; ++j) c[j] = nearest_int(q[j]);
    }
    store_codes(out, at, c);
}

template <int V>
VT_FN void static_codes(i64 rows, i64 width, i64 chunks, const void* x, i64 stride, int kind, const float* scale,
                        const int* azp, signed char* out, i64 rule) {
    Place at[DEPTH];
    Raw<V> raw[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        at[d] = place<V>(rows, width, chunks, DEPTH, d);
        if (at[d].inside) raw[d] = fetch<V>(x, at[d].row * stride + at[d].column, kind);
    }
    const float by = scale[0], inverse = 1.0f / by;
    const int zero = azp == nullptr ? 0 : azp[0];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (!at[d].inside) continue;
        float v[V];
        widen(v, raw[d], kind);
        put_static(out, at[d].row * width + at[d].column, v, by, inverse, azp != nullptr, zero, rule);
    }
}

#define STATIC(NAME, V)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                       \
        i64 rows, i64 width, i64 chunks, const void* x, i64 stride, i64 kind, const float* scale, const int* azp, \
        signed char* out, i64 rule) {                                                                             \
        static_codes<V>(rows, width, chunks, x, stride, (int)kind, scale, azp, out, rule);                        \
    }
STATIC(int8_static_v8, 8)
STATIC(int8_static_v1, 1)

// `count` vectors of bfloat16 that follow each other, under the rule of CUDA; what has no place reads the last one.
template <bool AZP> VT_FN void static_flat(i64 count, const void* x, const float* scale, const int* azp, signed char* out) {
    const unsigned first = blockIdx.x * (blockDim.x * DEPTH) + threadIdx.x, most = (unsigned)count;
    Raw<8> raw[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        const unsigned at = first + d * blockDim.x;
        raw[d] = fetch<8>(x, (i64)(at < most ? at : most - 1) * 8, BF16);
    }
    const float by = scale[0], inverse = 1.0f / by;
    const int zero = AZP ? azp[0] : 0;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        const unsigned at = first + d * blockDim.x;
        if (at >= most) return;
        float v[8];
        widen(v, raw[d], BF16);
        put_static(out, (i64)at * 8, v, by, inverse, AZP, zero, OF_CUDA);
    }
}

extern "C" __global__ void __launch_bounds__(128) int8_static_flat(i64 count, const void* x, const float* scale,
                                                                   signed char* out) {
    static_flat<false>(count, x, scale, nullptr, out);
}
extern "C" __global__ void __launch_bounds__(128) int8_azp_flat(i64 count, const void* x, const float* scale,
                                                                const int* azp, signed char* out) {
    static_flat<true>(count, x, scale, azp, out);
}

VT_FN float largest_float(float x, int lanes) {
    for (int m = lanes >> 1; m >= 1; m >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, m));
    return x;
}

// Over a block of whole warps; all of its threads come here.
VT_FN float largest_float_of_block(float x, float* tops) {
    x = largest_float(x, 32);
    int count = blockDim.x >> 5, lane = threadIdx.x & 31;
    if (count == 1) return x;
    if (lane == 0) tops[threadIdx.x >> 5] = x;
    __syncthreads();
    return largest_float(lane < count ? tops[lane] : -VT_INF, 32);
}

// What a row spans: its largest |x|, or its largest x and the opposite of its least. NaN are passed over.
template <bool SYMMETRIC> struct Span;
template <> struct Span<true> {
    unsigned top = 0;

    Span() = default;
    VT_MEMBER Span(unsigned top) : top(top) {}
    template <int V> VT_MEMBER void add(const float (&v)[V]) { top = larger(top, largest_of(v, false)); }
    VT_MEMBER void over_block(float* tops) { top = largest_of_block(top, (unsigned*)tops); }
};
template <> struct Span<false> {
    float high = -VT_INF, below = -VT_INF;

    Span() = default;
    VT_MEMBER Span(unsigned range) : high(widen_bf16(range & 0xffffu)), below(widen_bf16(range >> 16)) {}
    template <int V> VT_MEMBER void add(const float (&v)[V]) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            high = fmaxf(high, v[j]);
            below = fmaxf(below, -v[j]);
        }
    }
    VT_MEMBER void over_block(float* tops) {
        high = largest_float_of_block(high, tops);
        below = largest_float_of_block(below, tops + 32);
    }
};

// A row's scale, its zero point, and its codes.
template <bool SYMMETRIC> struct TokenInt8 {
    float scale, factor;  // a factor of 0 and no shift for codes under a scale of 0
    int azp, shift, rule;

    VT_MEMBER TokenInt8(const Span<true>& span, int rule) : azp(0), shift(0), rule(rule) {
        float size = vt_float((int)span.top);
        if (rule == OF_TRITON) size = vt_maximum(size, 1e-10f);
        scale = size / 127.0f;
        factor = scale == 0.0f ? 0.0f : rule == OF_CPU ? 1.0f / scale : 127.0f / size;
    }
    VT_MEMBER TokenInt8(const Span<false>& span, int rule) : rule(rule) {
        float low = -span.below, high = span.high;
        if (low > high) low = high = 0.0f;  // nothing but NaN
        scale = (high - low) / 255.0f;
        bool none = scale == 0.0f;
        factor = none ? 0.0f : 1.0f / scale;
        azp = none ? -128 : nearest_int(-128.0f - low / scale);
        shift = none ? 0 : azp;
    }
    template <int V> VT_MEMBER void put(signed char* out, i64 at, const float (&x)[V]) const {
        float v[V];
        int c[V];
        products(v, x, factor);
        if (!SYMMETRIC && rule == OF_CPU) {
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] += (float)shift;
        }
        if (SYMMETRIC && rule == OF_TRITON) {
#pragma unroll
            for (int j = 0; j < V; ++j) c[j] = half_away(v[j]);
        } else if (!SYMMETRIC && rule != OF_CPU) {
            shifted_codes(c, v, shift);
        } else {
#pragma unroll
            for (int j = 0; j < V; ++j) c[j] = nearest_int(v[j]);
        }
        store_codes(out, at, c);
    }
    VT_MEMBER void leave(float* scales, int* azps, i64 row) const {
        scales[row] = scale;
        if (!SYMMETRIC) azps[row] = azp;
    }
};

#define TOKEN_PARAMETERS                                                                                          \
    i64 rows, i64 width, const void *x, i64 stride, i64 kind, signed char *out, float *scales, int *azps, i64 rule

// What bfloat16 span, a word of it: `largest_of_bf16`, or bf16_range.cuh's.
template <bool SYMMETRIC> VT_FN unsigned joined(unsigned a, unsigned b) {
    return SYMMETRIC ? larger(a, b) : larger_signed_pair(a, b);
}
template <bool SYMMETRIC> VT_FN unsigned joined_of_lanes(unsigned a, int lanes) {
    return SYMMETRIC ? largest_of_lanes(a, lanes) : range_of_lanes(a, lanes);
}
template <bool SYMMETRIC> VT_FN unsigned joined_of_block(unsigned a, unsigned* words) {
    if (SYMMETRIC) return largest_of_block(a, words);
    a = range_of_lanes(a, 32);
    const int count = blockDim.x >> 5, lane = threadIdx.x & 31;
    if (count == 1) return a;
    if (lane == 0) words[threadIdx.x >> 5] = a;
    __syncthreads();
    return range_of_lanes(lane < count ? words[lane] : NO_RANGE, 32);
}

// Elements first + step g ..., g < G, of a row in registers; join(a): what the team's span.
template <bool SYMMETRIC, int G, class J>
VT_FN void token_row(i64 row, int first, int step, int width, const void* x, i64 stride, signed char* out,
                     float* scales, int* azps, int rule, J&& join) {
    Raw<8> raw[G];
    unsigned span = SYMMETRIC ? 0u : NO_RANGE;
    float v[8];
#pragma unroll
    for (int g = 0; g < G; ++g)
        if (first + g * step < width) raw[g] = fetch<8>(x, row * stride + first + g * step, BF16);
#pragma unroll
    for (int g = 0; g < G; ++g)
        if (first + g * step < width)
            span = joined<SYMMETRIC>(span, SYMMETRIC ? largest_of_bf16(raw[g], false) : range_of(raw[g].a));
    const TokenInt8<SYMMETRIC> codes(Span<SYMMETRIC>(join(span)), rule);
    if (first == 0) codes.leave(scales, azps, row);
#pragma unroll
    for (int g = 0; g < G; ++g) {
        if (first + g * step >= width) continue;
        widen(v, raw[g], BF16);
        codes.put(out, row * width + first + g * step, v);
    }
}

template <bool SYMMETRIC, int V> VT_FN void token_long(TOKEN_PARAMETERS) {
    __shared__ float tops[64];
    i64 row = blockIdx.x;
    float v[V];
    Span<SYMMETRIC> span;
    for (i64 at = threadIdx.x * V; at < width; at += 256 * V) {
        load(v, x, row * stride + at, (int)kind);
        span.add(v);
    }
    span.over_block(tops);
    const TokenInt8<SYMMETRIC> codes(span, (int)rule);
    if (threadIdx.x == 0) codes.leave(scales, azps, row);
    for (i64 at = threadIdx.x * V; at < width; at += 256 * V) {
        load(v, x, row * stride + at, (int)kind);
        codes.put(out, row * width + at, v);
    }
}

#define TOKEN_KERNELS(NAME, SYMMETRIC)                                                                            \
    extern "C" __global__ void __launch_bounds__(128) NAME##_rows(TOKEN_PARAMETERS, i64 lane_shift) {             \
        int team = 1 << lane_shift, lane = threadIdx.x & (team - 1);                                              \
        i64 row = (i64)blockIdx.x * (128 >> lane_shift) + (threadIdx.x >> lane_shift);                            \
        token_row<SYMMETRIC, 1>(row, row < rows ? lane * 8 : (int)width, 0, (int)width, x, stride, out, scales,   \
                                azps, (int)rule, [&](unsigned span) { return joined_of_lanes<SYMMETRIC>(span, team); });       \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(1024) NAME##_block(TOKEN_PARAMETERS) {                           \
        __shared__ unsigned words[32];                                                                            \
        token_row<SYMMETRIC, 4>(blockIdx.x, threadIdx.x * 8, blockDim.x * 8, (int)width, x, stride, out, scales,  \
                                azps, (int)rule, [&](unsigned span) { return joined_of_block<SYMMETRIC>(span, words); });      \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) NAME##_v8(TOKEN_PARAMETERS) {                               \
        token_long<SYMMETRIC, 8>(rows, width, x, stride, kind, out, scales, azps, rule);                          \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) NAME##_v1(TOKEN_PARAMETERS) {                               \
        token_long<SYMMETRIC, 1>(rows, width, x, stride, kind, out, scales, azps, rule);                          \
    }
TOKEN_KERNELS(symmetric, true)
TOKEN_KERNELS(asymmetric, false)

VT_FN float group_scale(unsigned top, float eps) { return vt_maximum(vt_float((int)top), eps) / 127.0f; }

template <int V> VT_FN void put_cut(signed char* out, i64 at, const float (&x)[V], const Divisor& by) {
    float q[V];
    int c[V];
    by.divide(q, x);
#pragma unroll
    for (int j = 0; j < V; ++j) c[j] = whole_int(q[j]);
    store_codes(out, at, c);
}

#define GROUP_PARAMETERS                                                                                          \
    i64 rows, i64 width, const void *x, i64 stride, i64 kind, i64 group_size, signed char *out, float *scales,    \
        float eps

// x is contiguous and its rows are whole groups of 8 << lane_shift elements, so that all of it is one row of vectors.
VT_FN void group_of_vectors(GROUP_PARAMETERS, i64 lane_shift) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x, top = 0;
    bool inside = at < (unsigned)(rows * (width >> 3));
    float v[8];
    const char* from = (const char*)x + (i64)at * 8 * item_size((int)kind);
    found(from);
    others_may_start();
    after_others();
    if (inside) {
        load(v, from, 0, (int)kind);
        top = largest_of(v, false);
    }
    top = largest_of_lanes(top, 1 << lane_shift);
    if (!inside) return;
    Divisor by(group_scale(top, eps), top, false);
    put_cut(out, (i64)at * 8, v, by);
    if ((threadIdx.x & ((1u << lane_shift) - 1)) == 0) scales[at >> lane_shift] = by.scale;
}

#define GROUP(NAME, KIND)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) NAME(GROUP_PARAMETERS, i64 lane_shift) {                    \
        group_of_vectors(rows, width, x, stride, KIND, group_size, out, scales, eps, lane_shift);                 \
    }
extern "C" __global__ void __launch_bounds__(256) int8_group_bf16_early(
    i64 rows, i64 width, const void* x, i64 stride, i64 kind, i64 group_size, signed char* out, float* scales,
    i64 eps_bits, i64 lane_shift) {
    group_of_vectors(rows, width, x, stride, BF16, group_size, out, scales, vt_float((int)eps_bits), lane_shift);
}
GROUP(int8_group_v8, kind)

// Groups of bfloat16 of at least GROUP_DEPTH lanes.
extern "C" __global__ void __launch_bounds__(256) int8_group_deep(GROUP_PARAMETERS, i64 lane_shift) {
    unsigned count = (unsigned)(rows * (width >> 3)), first = blockIdx.x * (256 * GROUP_DEPTH) + threadIdx.x;
    Raw<8> raw[GROUP_DEPTH];
    unsigned tops[GROUP_DEPTH];
#pragma unroll
    for (int d = 0; d < GROUP_DEPTH; ++d)
        if (first + d * 256 < count) raw[d] = fetch<8>(x, (i64)(first + d * 256) * 8, BF16);
#pragma unroll
    for (int d = 0; d < GROUP_DEPTH; ++d) tops[d] = first + d * 256 < count ? largest_pair<false>(raw[d].a) : 0u;
    GroupScales<GROUP_DEPTH> scales_of;
    scales_of.join<false>(tops, 1 << lane_shift, [&](unsigned top) { return group_scale(top, eps); });
    unsigned stored = first + scales_of.own * 256;
    if ((threadIdx.x & ((1u << lane_shift) - 1)) < GROUP_DEPTH && stored < count)
        scales[stored >> lane_shift] = scales_of.scale;
#pragma unroll
    for (int d = 0; d < GROUP_DEPTH; ++d) {
        Divisor by = scales_of.of(d);
        if (first + d * 256 >= count) continue;
        float v[8];
        widen(v, raw[d], BF16);
        put_cut(out, (i64)(first + d * 256) * 8, v, by);
    }
}

extern "C" __global__ void __launch_bounds__(256) int8_group_any(GROUP_PARAMETERS) {
    unsigned groups = (unsigned)width / (unsigned)group_size, number = blockIdx.x * 8 + (threadIdx.x >> 5);
    bool inside = number < rows * groups;
    i64 row = number / groups, group = number - (unsigned)row * groups;
    i64 begin = group * group_size, end = begin + group_size;
    float v[1];
    unsigned top = 0;
    for (i64 at = begin + (threadIdx.x & 31); inside && at < end; at += 32) {
        load(v, x, row * stride + at, (int)kind);
        top = larger(top, largest_of(v, false));
    }
    top = largest_of_warp(top);
    if (!inside) return;
    Divisor by(group_scale(top, eps), top, false);
    if ((threadIdx.x & 31) == 0) scales[number] = by.scale;
    for (i64 at = begin + (threadIdx.x & 31); at < end; at += 32) {
        load(v, x, row * stride + at, (int)kind);
        put_cut(out, row * width + at, v, by);
    }
}
