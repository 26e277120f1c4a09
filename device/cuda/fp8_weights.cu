// FP8 under given scales: one for each group of rows and columns, and shards of a weight brought to the largest scale.
//
// The ladder:
// 1. group_codes_v1: an element a thread, four rows of it.
// 2. group_codes_v8: 16 bytes a thread of four neighbouring rows, all on their way before the scales are known;
//    reciprocals are found again only where a row belongs to another group of rows.
// 3. group_line*_early: bfloat16 without gaps, groups of whole vectors side by side: a scale a vector, quotients as
//    products, started while the kernel before ends. group_channels*_early: a scale a channel: a thread has eight
//    reciprocals and a band of rows. 50 us for 8192 x 5120 became 30.4; most of it had gone into whole quotients.
// 4. shard_codes_v16_early: 16 codes at once, converted in pairs, of eight shards a launch, where every thread finds the
//    largest scale: 16.6 us for 6144 x 5120, where launches for it and each of three shards took 21.6.
#include "e4m3_halves.cuh"
#include "early.cuh"
#include "fast.cuh"
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

#define LINE_DEPTH 2    // vectors a thread of group_line_early, device/fp8_weights.py
#define CHANNEL_ROWS 4  // rows a thread of group_channels_v8_early, device/fp8_weights.py

// Bfloat16 without gaps, vectors of one scale each. Of every pair: what whole_quotient divides with, for the vectors of a
// row, the rows of a group and the vectors of a group.
template <int DEPTH>
VT_FN void line_codes(unsigned count, const uint4* x, const float* scale, unsigned per_row, unsigned across,
                      const unsigned (&magic)[3], const int (&shift)[3], unsigned char* out, unsigned nan) {
    const unsigned first = blockIdx.x * blockDim.x * DEPTH + threadIdx.x;
    const float* from[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        const unsigned at = first + d * blockDim.x, row = whole_quotient(at, magic[0], shift[0]);
        unsigned place = whole_quotient(row, magic[1], shift[1]);
        if (across > 1) place = place * across + whole_quotient(at - row * per_row, magic[2], shift[2]);
        from[d] = scale + place;
    }
    if (DEPTH == 1) others_may_start();
    after_others();
    Raw<8> raw[DEPTH];
    float one[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (first + d * blockDim.x < count) raw[d].a = x[first + d * blockDim.x];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (first + d * blockDim.x < count) one[d] = *from[d];
    if (DEPTH > 1) others_may_start();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        const unsigned at = first + d * blockDim.x;
        if (at >= count) continue;
        float v[8], q[8];
        widen(v, raw[d], BF16);
        products(q, v, 1.0f / one[d]);
        store_e4m3(out, (i64)at * 8, q, nan);
    }
}

#define LINE(NAME, DEPTH)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                       \
        i64 count, const uint4* x, const float* scale, i64 per_row, i64 across, i64 magic_row, i64 shift_row,     \
        i64 magic_rows, i64 shift_rows, i64 magic_each, i64 shift_each, unsigned char* out, i64 nan) {            \
        const unsigned magic[3] = {(unsigned)magic_row, (unsigned)magic_rows, (unsigned)magic_each};              \
        const int shift[3] = {(int)shift_row, (int)shift_rows, (int)shift_each};                                  \
        line_codes<DEPTH>((unsigned)count, x, scale, (unsigned)per_row, (unsigned)across, magic, shift, out,      \
                          (unsigned)nan);                                                                         \
    }
LINE(group_line_few_early, 1)
LINE(group_line_early, LINE_DEPTH)

// 1 / x to nearest: of eight numbers between 2^-100 and 2^100 by the hardware's reciprocals and a step of correction each.
VT_FN void reciprocals(float (&x)[8]) {
    bool middling = true;
#pragma unroll
    for (int j = 0; j < 8; ++j) middling &= (unsigned)vt_bits(x[j]) - 0x0d800000u < 0x64000000u;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (middling) {
            const float near = fast_reciprocal(x[j]);
            x[j] = vt_fma(near, -vt_fma(x[j], near, -1.0f), near);
        } else {
            x[j] = 1.0f / x[j];
        }
    }
}

// Bfloat16 under a scale a channel, eight of them and a band of rows a thread.
template <int BAND>
VT_FN void channel_codes(i64 bands, i64 width, i64 chunks, i64 rows, const uint4* x, i64 stride, const float* scale,
                         unsigned char* out, unsigned nan) {
    const Place at = place<8>(bands, width, chunks);
    const i64 first = at.row * BAND;
    const int count = rows - first < BAND ? (int)(rows - first) : BAND;
    const uint4* from = x + ((first * stride + at.column) >> 3);
    unsigned char* to = out + first * width + at.column;
    if (BAND == 1) others_may_start();
    after_others();
    if (!at.inside) return;
    Raw<8> raw[BAND];
    float inverse[8];
#pragma unroll
    for (int r = 0; r < BAND; ++r)
        if (r < count) raw[r].a = from[r * (stride >> 3)];
    load(inverse, scale, at.column, F32);
    if (BAND > 1) others_may_start();
    reciprocals(inverse);
#pragma unroll
    for (int r = 0; r < BAND; ++r) {
        if (r >= count) continue;
        float v[8], q[8];
        widen(v, raw[r], BF16);
#pragma unroll
        for (int j = 0; j < 8; ++j) q[j] = v[j] * inverse[j];
        store_e4m3(to, r * width, q, nan);
    }
}

#define CHANNELS(NAME, BAND)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) NAME(i64 bands, i64 width, i64 chunks, i64 rows,            \
                                                           const uint4* x, i64 stride, const float* scale,        \
                                                           unsigned char* out, i64 nan) {                         \
        channel_codes<BAND>(bands, width, chunks, rows, x, stride, scale, out, (unsigned)nan);                    \
    }
CHANNELS(group_channels_few_v8_early, 1)
CHANNELS(group_channels_v8_early, CHANNEL_ROWS)

#define UNSET -448.0f

VT_FN float largest_scale(const float* scales, i64 count) {
    float most = scales[0];
    for (i64 i = 1; i < count; ++i) most = scales[i] > most ? scales[i] : most;
    return most;
}

// Four codes under another scale: their values to float16 in between.
VT_FN unsigned recoded(unsigned word, float scale, float inverse) {
    float v[4];
    unsigned out = 0;
    e4m3_values(v, word);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const unsigned halves = narrow_f16(v[2 * j] * scale, v[2 * j + 1] * scale);
        out |= e4m3_pair(widen_f16(halves & 0xffffu) * inverse, widen_f16(halves >> 16) * inverse) << 16 * j;
    }
    return out;
}

// `count` units of up to eight shards' codes, one after the other: the first ends before unit `end[0]`, and so on. Those of
// a weight that has one scale already stay. `most`: where the largest scale goes, if anywhere.
struct Shards {
    const float* scales;
    i64 count, first, end[7];
    float* most;
};
template <class U, int DEPTH> VT_FN void shard_codes(i64 count, const U* weight, const Shards& of, U* out) {
    const i64 begin = (i64)blockIdx.x * (blockDim.x * DEPTH) + threadIdx.x;
    U codes[DEPTH];
    after_others();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (begin + d * blockDim.x < count) codes[d] = weight[begin + d * blockDim.x];
    const float largest = largest_scale(of.scales, of.count), inverse = 1.0f / largest;
    const bool stay = of.scales[of.count - 1] <= UNSET;
    if (of.most != nullptr && begin == 0) *of.most = largest;
    others_may_start();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        const i64 at = begin + d * blockDim.x;
        if (at >= count) continue;
        if (!stay) {
            int shard = 0;
#pragma unroll
            for (int s = 0; s < 7; ++s) shard += at >= of.end[s];
            const float scale = of.scales[of.first + shard];
            if constexpr (sizeof(U) == 16) {
                codes[d].x = recoded(codes[d].x, scale, inverse);
                codes[d].y = recoded(codes[d].y, scale, inverse);
                codes[d].z = recoded(codes[d].z, scale, inverse);
                codes[d].w = recoded(codes[d].w, scale, inverse);
            } else {
                codes[d] = (U)recoded(codes[d], scale, inverse);
            }
        }
        out[at] = codes[d];
    }
}

#define SHARD_DEPTH 2  // units of 16 bytes a thread, device/fp8_weights.py

#define SHARD_CODES(NAME, U, DEPTH)                                                                               \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                       \
        i64 count, const U* weight, const float* scales, i64 shards, i64 first, i64 end0, i64 end1, i64 end2,     \
        i64 end3, i64 end4, i64 end5, i64 end6, U* out, float* most) {                                            \
        const Shards of{scales, shards, first, {end0, end1, end2, end3, end4, end5, end6}, most};                 \
        shard_codes<U, DEPTH>(count, weight, of, out);                                                            \
    }
SHARD_CODES(shard_codes_v16_early, uint4, SHARD_DEPTH)
SHARD_CODES(shard_codes_v1_early, unsigned char, 1)
