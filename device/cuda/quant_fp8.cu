// FP8 quantisers: static, per tensor, per token, per group of neighbours.
//
// The ladder:
// 1. *_v1, token_v8: any width and stride; a row that was measured is read again. group_any: a warp a group of any size.
// 2. *_v8, *_bf16_*: 16-byte loads and 8-byte stores, two under way a thread.
// 3. token_bf16_*: the row waits in registers for its scale; where rows are few, a block has a thread for every vector,
//    so that a row takes one trip to memory. group_*v8: so does a group, in 1 to 32 neighbouring lanes.
// 4. Division by a scale is a product with its reciprocal and a step of correction (fp8_scales.cuh), and maxima are
//    taken of pairs as they lie in memory: with IEEE divisions the arithmetic takes longer than the bytes.
// 5. *_early (device/early.py): one token 1.8 -> 1.3 us behind another such kernel, 0.3 more behind one that is none. Groups
//    of 256 rows lose 0.7 that way.
// 6. Per tensor: two launches. Blocks leave their maxima, every block of the second finds the largest of them. One launch
//    reads 16-bit elements once (kept_tensor.cuh).
#include "early.cuh"
#include "fp8_scales.cuh"
#include "kept_tensor.cuh"
#include "rows.cuh"

#define DEPTH 2          // groups a thread of the static kernels, device/quant_fp8.py
#define GROUP_DEPTH 4    // vectors a thread of group_bf16_deep
#define MOST_MAXIMA 528  // blocks that leave a maximum

// First of all in a kernel that starts early.
VT_FN void begin_early() {
    others_may_start();
    after_others();
}

template <int V>
VT_FN void static_codes(i64 rows, i64 width, i64 chunks, const void* x, i64 stride, int kind, const float* scale,
                        unsigned char* out, unsigned nan) {
    Place at[DEPTH];
    Raw<V> raw[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        at[d] = place<V>(rows, width, chunks, DEPTH, d);
        if (at[d].inside) raw[d] = fetch<V>(x, at[d].row * stride + at[d].column, kind);
    }
    float inverse = 1.0f / scale[0];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (!at[d].inside) continue;
        float v[V], q[V];
        widen(v, raw[d], kind);
        products(q, v, inverse);
        store_e4m3(out, at[d].row * width + at[d].column, q, nan);
    }
}

#define STATIC(NAME, V, KIND, BEGIN)                                                                              \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                       \
        i64 rows, i64 width, i64 chunks, const void* x, i64 stride, i64 kind, const float* scale,                 \
        unsigned char* out, i64 nan) {                                                                            \
        BEGIN;                                                                                                    \
        static_codes<V>(rows, width, chunks, x, stride, KIND, scale, out, (unsigned)nan);                         \
    }
STATIC(static_bf16_v8_early, 8, BF16, begin_early())
STATIC(static_v8, 8, (int)kind, )
STATIC(static_v1, 1, (int)kind, )

// The `number`-th group of V elements of all of x: where it is in x and in a contiguous result.
template <int V> struct Walk {
    i64 count, per_row, stride, width;
    VT_MEMBER Walk(i64 rows, i64 width, i64 stride)
        : count(rows * (width / V)), per_row(width / V), stride(stride), width(width) {}
    VT_MEMBER i64 in(i64 number) const {
        if (count == per_row) return number * V;
        i64 row = number / per_row;
        return row * stride + (number - row * per_row) * V;
    }
};

// The threads' groups, `step` apart, four at a time: load(number) of all four comes before use(number, raw).
template <int V, class L, class U> VT_FN void four_by_four(i64 count, i64 first, i64 step, L&& load, U&& use) {
    for (i64 at = first; at < count; at += 4 * step) {
        Raw<V> raw[4];
#pragma unroll
        for (int d = 0; d < 4; ++d)
            if (at + d * step < count) raw[d] = load(at + d * step);
#pragma unroll
        for (int d = 0; d < 4; ++d)
            if (at + d * step < count) use(at + d * step, raw[d]);
    }
}

template <int V>
VT_FN void tensor_maximum(i64 rows, i64 width, const void* x, i64 stride, int kind, unsigned* maxima, i64 blocks,
                          i64 rule) {
    __shared__ unsigned tops[8];
    const Walk<V> walk(rows, width, stride);
    unsigned top = 0;
    four_by_four<V>(walk.count, (i64)blockIdx.x * 256 + threadIdx.x, blocks * 256,
                    [&](i64 n) { return fetch<V>(x, walk.in(n), kind); },
                    [&](i64, const Raw<V>& raw) {
                        float v[V];
                        widen(v, raw, kind);
                        top = larger(top, largest_of(v, rule == VLLM_NATIVE));
                    });
    top = largest_of_block(top, tops);
    if (threadIdx.x == 0) maxima[blockIdx.x] = top;
}

template <int V>
VT_FN void tensor_codes(i64 rows, i64 width, const void* x, i64 stride, int kind, const unsigned* maxima, i64 blocks,
                        i64 rule, float* scale_out, unsigned char* out, unsigned nan) {
    __shared__ unsigned tops[8];
    unsigned top = 0;
    for (i64 n = threadIdx.x; n < blocks; n += 256) top = larger(top, maxima[n]);
    const TensorScale by(largest_of_block(top, tops), (int)rule);
    if (blockIdx.x == 0 && threadIdx.x == 0) scale_out[0] = by.scale;
    const Walk<V> walk(rows, width, stride);
    four_by_four<V>(walk.count, (i64)blockIdx.x * 256 + threadIdx.x, blocks * 256,
                    [&](i64 n) { return fetch<V>(x, walk.in(n), kind); },
                    [&](i64 n, const Raw<V>& raw) {
                        float v[V], q[V];
                        widen(v, raw, kind);
                        products(q, v, by.inverse);
                        store_e4m3(out, n * V, q, nan);
                    });
}

#define TENSOR(V)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) tensor_maximum_v##V(                                        \
        i64 rows, i64 width, const void* x, i64 stride, i64 kind, unsigned* maxima, i64 blocks, i64 rule) {       \
        tensor_maximum<V>(rows, width, x, stride, (int)kind, maxima, blocks, rule);                               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) tensor_codes_v##V(                                          \
        i64 rows, i64 width, const void* x, i64 stride, i64 kind, const unsigned* maxima, i64 blocks, i64 rule,   \
        float* scale, unsigned char* out, i64 nan) {                                                              \
        tensor_codes<V>(rows, width, x, stride, (int)kind, maxima, blocks, rule, scale, out, (unsigned)nan);      \
    }
TENSOR(8)
TENSOR(1)

#define KEPT_TENSOR(NAME, KIND, KEPT, STAGED)                                                                     \
    extern "C" __global__ void __launch_bounds__(TEAM, 1) NAME(                                                   \
        i64 count, i64 turns, i64 shares, const uint4* x, unsigned* meeting, i64 rule, float* scale,              \
        unsigned char* out, i64 nan) {                                                                            \
        begin_early();                                                                                            \
        kept_tensor<KIND, KEPT, STAGED>(count, (int)turns, (int)shares, x, meeting, (int)rule, scale, out,        \
                                        (unsigned)nan);                                                           \
    }
KEPT_TENSOR(tensor_few_bf16_early, BF16, FEW, false)
KEPT_TENSOR(tensor_few_f16_early, F16, FEW, false)
KEPT_TENSOR(tensor_many_bf16_early, BF16, MANY, true)
KEPT_TENSOR(tensor_many_f16_early, F16, MANY, true)

#define TOKEN_PARAMETERS                                                                                          \
    i64 rows, i64 width, const void *x, i64 stride, i64 kind, const float *scale_ub, unsigned char *out,          \
        float *scales, i64 rule, i64 nan, i64 int8
#define TOKEN_CODES TokenCodes{scale_ub, out, scales, (int)rule, (unsigned)nan, int8 != 0}

// Elements first + step g ..., g < G, of a row in registers; most(top) is the team's maximum.
template <int G, class M>
VT_FN void token_row(const TokenCodes& codes, i64 row, int first, int step, int width, const void* x, i64 stride,
                     M&& most) {
    Raw<8> raw[G];
    unsigned top = 0;
#pragma unroll
    for (int g = 0; g < G; ++g)
        if (first + g * step < width) raw[g] = fetch<8>(x, row * stride + first + g * step, BF16);
#pragma unroll
    for (int g = 0; g < G; ++g)
        if (first + g * step < width) top = larger(top, largest_of_bf16(raw[g], codes.keeps_nan()));
    top = most(top);
    Divisor by = codes.divisor(codes.scale(top), top);
    if (first == 0) codes.scales[row] = by.scale;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        if (first + g * step >= width) continue;
        float v[8];
        widen(v, raw[g], BF16);
        codes.put(row * width + first + g * step, v, by);
    }
}

extern "C" __global__ void __launch_bounds__(128) token_bf16_rows_early(TOKEN_PARAMETERS, i64 lane_shift) {
    begin_early();
    int team = 1 << lane_shift, lane = threadIdx.x & (team - 1);
    i64 row = (i64)blockIdx.x * (128 >> lane_shift) + (threadIdx.x >> lane_shift);
    int first = row < rows ? lane * 8 : (int)width;
    token_row<1>(TOKEN_CODES, row, first, 0, (int)width, x, stride,
                 [&](unsigned top) { return largest_of_lanes(top, team); });
}

extern "C" __global__ void __launch_bounds__(1024) token_bf16_block_early(TOKEN_PARAMETERS) {
    begin_early();
    __shared__ unsigned tops[32];
    token_row<4>(TOKEN_CODES, blockIdx.x, threadIdx.x * 8, blockDim.x * 8, (int)width, x, stride,
                 [&](unsigned top) { return largest_of_block(top, tops); });
}

template <int V> VT_FN void token_long(const TokenCodes& codes, i64 width, const void* x, i64 stride, int kind) {
    __shared__ unsigned tops[8];
    i64 row = blockIdx.x;
    float v[V];
    unsigned top = 0;
    for (i64 at = threadIdx.x * V; at < width; at += 256 * V) {
        load(v, x, row * stride + at, kind);
        top = larger(top, largest_of(v, codes.keeps_nan()));
    }
    top = largest_of_block(top, tops);
    Divisor by = codes.divisor(codes.scale(top), top);
    if (threadIdx.x == 0) codes.scales[row] = by.scale;
    for (i64 at = threadIdx.x * V; at < width; at += 256 * V) {
        load(v, x, row * stride + at, kind);
        codes.put(row * width + at, v, by);
    }
}

extern "C" __global__ void __launch_bounds__(256) token_v8(TOKEN_PARAMETERS) {
    token_long<8>(TOKEN_CODES, width, x, stride, (int)kind);
}
extern "C" __global__ void __launch_bounds__(256) token_v1(TOKEN_PARAMETERS) {
    token_long<1>(TOKEN_CODES, width, x, stride, (int)kind);
}

// A group's scale and codes. `floored`: the scale of the fused ops, with a least value and no eps.
struct GroupCodes {
    const float* scale_ub;
    unsigned char* out;
    float* scales;
    i64 row_step, group_step;  // between scales of neighbouring rows and of neighbouring groups
    float eps;
    int rule;
    unsigned nan;
    bool ue8m0, floored;

    VT_MEMBER bool keeps_nan() const { return rule == VLLM_NATIVE; }
    VT_MEMBER float scale(unsigned top) const {
        if (floored) return floored_scale(top, scale_ub, nullptr);
        float size = vt_float((int)top);
        if (rule != VLLM_NATIVE) size = vt_maximum(size, eps);
        float scale = size < 0x1p-90f ? size / E4M3_LARGEST : over_largest(size);
        if (ue8m0) scale = power_of_two(rule == VLLM_NATIVE ? scale : vt_maximum(scale, 1e-10f));
        return rule == VLLM_NATIVE ? vt_maximum(scale, SCALE_FLOOR) : scale;
    }
    template <int V> VT_MEMBER void put(i64 at, const float (&x)[V], const Divisor& by) const {
        float q[V];
        by.divide(q, x);
        store_e4m3(out, at, q, nan);
    }
};

#define GROUP_PARAMETERS                                                                                          \
    i64 rows, i64 width, const void *x, i64 stride, i64 kind, i64 group_size, const float *scale_ub,              \
        unsigned char *out, float *scales, i64 row_step, i64 group_step, float eps, i64 rule, i64 nan, i64 flags
#define VECTOR_PARAMETERS i64 lane_shift, i64 magic, i64 magic_shift
#define VECTOR_NAMES lane_shift, magic, magic_shift
#define GROUP_CODES                                                                                               \
    GroupCodes{scale_ub, out, scales, row_step, group_step, eps, (int)rule, (unsigned)nan, (flags & 1) != 0,      \
               (flags & 2) != 0}

// In the kernels below x is contiguous and its rows are whole groups of 8 << lane_shift elements, so that all of it is
// one row of vectors. magic: of the groups of a row.
VT_FN void put_scale(const GroupCodes& codes, i64 width, unsigned vector, float scale, VECTOR_PARAMETERS) {
    unsigned group = vector >> lane_shift, row = whole_quotient(group, (unsigned)magic, (int)magic_shift);
    unsigned per_row = (unsigned)(width >> (lane_shift + 3));
    codes.scales[row * codes.row_step + (group - row * per_row) * codes.group_step] = scale;
}

template <bool BRAIN>
VT_FN void group_vector(const GroupCodes& codes, i64 rows, i64 width, const void* x, int kind, VECTOR_PARAMETERS) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x, top = 0;
    bool inside = at < (unsigned)(rows * (width >> 3));
    float v[8];
    if (inside) {
        Raw<8> raw = fetch<8>(x, (i64)at * 8, kind);
        widen(v, raw, kind);
        top = BRAIN ? largest_of_bf16(raw, codes.keeps_nan()) : largest_of(v, codes.keeps_nan());
    }
    top = largest_of_lanes(top, 1 << lane_shift);
    if (!inside) return;
    Divisor by(codes.scale(top), top, false);
    codes.put((i64)at * 8, v, by);
    if ((threadIdx.x & ((1u << lane_shift) - 1)) == 0) put_scale(codes, width, at, by.scale, VECTOR_NAMES);
}

extern "C" __global__ void __launch_bounds__(256) group_v8(GROUP_PARAMETERS, VECTOR_PARAMETERS) {
    group_vector<false>(GROUP_CODES, rows, width, x, (int)kind, VECTOR_NAMES);
}
extern "C" __global__ void __launch_bounds__(256) group_bf16_v8(GROUP_PARAMETERS, VECTOR_PARAMETERS) {
    group_vector<true>(GROUP_CODES, rows, width, x, BF16, VECTOR_NAMES);
}

// Groups of at least GROUP_DEPTH lanes.
extern "C" __global__ void __launch_bounds__(256) group_bf16_deep(GROUP_PARAMETERS, VECTOR_PARAMETERS) {
    const GroupCodes codes = GROUP_CODES;
    unsigned count = (unsigned)(rows * (width >> 3)), first = blockIdx.x * (256 * GROUP_DEPTH) + threadIdx.x;
    Raw<8> raw[GROUP_DEPTH];
    unsigned tops[GROUP_DEPTH];
#pragma unroll
    for (int d = 0; d < GROUP_DEPTH; ++d)
        if (first + d * 256 < count) raw[d] = fetch<8>(x, (i64)(first + d * 256) * 8, BF16);
    auto find = [&](unsigned top) { return codes.scale(top); };
    GroupScales<GROUP_DEPTH> scales_of;
    if (codes.keeps_nan()) {
#pragma unroll
        for (int d = 0; d < GROUP_DEPTH; ++d) tops[d] = first + d * 256 < count ? largest_pair<true>(raw[d].a) : 0u;
        scales_of.join<true>(tops, 1 << lane_shift, find);
    } else {
#pragma unroll
        for (int d = 0; d < GROUP_DEPTH; ++d) tops[d] = first + d * 256 < count ? largest_pair<false>(raw[d].a) : 0u;
        scales_of.join<false>(tops, 1 << lane_shift, find);
    }
    unsigned stored = first + scales_of.own * 256;
    if ((threadIdx.x & ((1u << lane_shift) - 1)) < GROUP_DEPTH && stored < count)
        put_scale(codes, width, stored, scales_of.scale, VECTOR_NAMES);
#pragma unroll
    for (int d = 0; d < GROUP_DEPTH; ++d) {
        Divisor by = scales_of.of(d);
        if (first + d * 256 >= count) continue;
        float v[8];
        widen(v, raw[d], BF16);
        codes.put((i64)(first + d * 256) * 8, v, by);
    }
}

extern "C" __global__ void __launch_bounds__(256) group_any(GROUP_PARAMETERS) {
    const GroupCodes codes = GROUP_CODES;
    unsigned groups = ((unsigned)width + (unsigned)group_size - 1) / (unsigned)group_size;
    unsigned number = blockIdx.x * 8 + (threadIdx.x >> 5);  // of 32 bits: the launcher refuses more
    bool inside = number < rows * groups;
    i64 row = number / groups, group = number - (unsigned)row * groups;
    i64 begin = group * group_size, end = begin + group_size < width ? begin + group_size : width;
    float v[1];
    unsigned top = 0;
    for (i64 at = begin + (threadIdx.x & 31); inside && at < end; at += 32) {
        load(v, x, row * stride + at, (int)kind);
        top = larger(top, largest_of(v, codes.keeps_nan()));
    }
    top = largest_of_warp(top);
    if (!inside) return;
    Divisor by(codes.scale(top), top, false);
    if ((threadIdx.x & 31) == 0) codes.scales[row * row_step + group * group_step] = by.scale;
    for (i64 at = begin + (threadIdx.x & 31); at < end; at += 32) {
        load(v, x, row * stride + at, (int)kind);
        codes.put(row * width + at, v, by);
    }
}
