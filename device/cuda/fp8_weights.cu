// FP8 under given scales: one for each group of rows and columns, and shards of a weight brought to the largest scale.
//
// The ladder:
// 1. group_codes_v1: an element a thread, four rows of it.
// 2. group_codes_v8: 16 bytes a thread of four neighbouring rows, all on their way before the scales are known;
//    reciprocals are found again only where a row belongs to another group of rows.
// 3. shard_codes_v16: 16 codes a thread; a shard a launch. Weights are brought to one scale once.
#include "fp4.cuh"
#include "fp8_scales.cuh"
#include "rows.cuh"

#define ROWS 4  // rows a thread, device/fp8_weights.py

// Groups of rows_each x columns_each elements have a scale each, `across` of them side by side.
struct Groups {
    const float* scale;
    unsigned rows_each, columns_each;
    i64 across;
};

template <int V>
VT_FN void inverses(float (&inverse)[V], const Groups& groups, unsigned row_of_groups, unsigned column) {
    const float* scales = groups.scale + row_of_groups * groups.across;
    const unsigned wide = groups.columns_each;
    if (wide % V == 0) {
        float one = 1.0f / scales[column / wide];
#pragma unroll
        for (int j = 0; j < V; ++j) inverse[j] = one;
    } else {
#pragma unroll
        for (int j = 0; j < V; ++j) inverse[j] = 1.0f / scales[wide == 1 ? column + j : (column + j) / wide];
    }
}

template <int V>
VT_FN void group_codes(i64 bands, i64 width, i64 chunks, i64 rows, const void* x, i64 stride, int kind,
                       const Groups& groups, unsigned char* out, unsigned nan) {
    const Place at = place<V>(bands, width, chunks);
    if (!at.inside) return;
    i64 first = at.row * ROWS;
    int count = rows - first < ROWS ? (int)(rows - first) : ROWS;
    Raw<V> raw[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        if (r < count) raw[r] = fetch<V>(x, (first + r) * stride + at.column, kind);
    float inverse[V];
    unsigned known = 0xffffffffu;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (r >= count) continue;
        unsigned row_of_groups = (unsigned)(first + r) / groups.rows_each;
        if (row_of_groups != known) inverses(inverse, groups, known = row_of_groups, (unsigned)at.column);
        float v[V], q[V];
        widen(v, raw[r], kind);
#pragma unroll
        for (int j = 0; j < V; ++j) q[j] = v[j] * inverse[j];
        store_e4m3(out, (first + r) * width + at.column, q, nan);
    }
}

#define GROUP_CODES(V)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) group_codes_v##V(                                           \
        i64 bands, i64 width, i64 chunks, i64 rows, const void* x, i64 stride, i64 kind, const float* scale,      \
        i64 rows_each, i64 columns_each, i64 across, unsigned char* out, i64 nan) {                               \
        group_codes<V>(bands, width, chunks, rows, x, stride, (int)kind,                                          \
                       Groups{scale, (unsigned)rows_each, (unsigned)columns_each, across}, out, (unsigned)nan);  \
    }
GROUP_CODES(8)
GROUP_CODES(1)

#define UNSET -448.0f

VT_FN float largest_scale(const float* scales, i64 count) {
    float most = scales[0];
    for (i64 i = 1; i < count; ++i) most = scales[i] > most ? scales[i] : most;
    return most;
}

extern "C" __global__ void __launch_bounds__(32) largest_of_scales(const float* scales, i64 count, float* out) {
    if (threadIdx.x == 0) out[0] = largest_scale(scales, count);
}

// A code under another scale: its value to float16 in between.
VT_FN unsigned recoded(unsigned code, float scale, float inverse) {
    return e4m3_code(through(e4m3_value(code) * scale, F16) * inverse);
}

VT_FN unsigned recoded_word(unsigned word, float scale, float inverse) {
    unsigned out = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) out |= recoded(word >> 8 * j & 0xffu, scale, inverse) << 8 * j;
    return out;
}

// `count` units of a shard's codes; those of a weight that has one scale already stay.
template <class U>
VT_FN void shard_codes(i64 count, const U* weight, const float* scales, i64 shards, i64 shard, U* out) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    U codes = weight[at];
    if (!(scales[shards - 1] <= UNSET)) {
        float scale = scales[shard], inverse = 1.0f / largest_scale(scales, shards);
        if constexpr (sizeof(U) == 16) {
            codes.x = recoded_word(codes.x, scale, inverse);
            codes.y = recoded_word(codes.y, scale, inverse);
            codes.z = recoded_word(codes.z, scale, inverse);
            codes.w = recoded_word(codes.w, scale, inverse);
        } else {
            codes = (U)recoded(codes, scale, inverse);
        }
    }
    out[at] = codes;
}

extern "C" __global__ void __launch_bounds__(256) shard_codes_v16(i64 count, const uint4* weight, const float* scales,
                                                                  i64 shards, i64 shard, uint4* out) {
    shard_codes(count, weight, scales, shards, shard, out);
}
extern "C" __global__ void __launch_bounds__(256) shard_codes_v1(i64 count, const unsigned char* weight,
                                                                 const float* scales, i64 shards, i64 shard,
                                                                 unsigned char* out) {
    shard_codes(count, weight, scales, shards, shard, out);
}
