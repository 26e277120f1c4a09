// SiLU-and-mul into FP8 codes under a scale for each group of neighbours: steps 1 to 3 of silu_codes.cuh.
#pragma once
#include "mended.cuh"
#include "silu_halves.cuh"

// Vectors a thread, as device/norm_quant.py knows: of silu_group_bf16_deep, silu_group_kept_bf16_deep.
#define GROUP_DEPTH 2
#define KEPT_DEPTH 4

VT_FN uint2 e4m3_eight(const float (&q)[8]) {
    return {e4m3_pair(q[0], q[1]) | e4m3_pair(q[2], q[3]) << 16, e4m3_pair(q[4], q[5]) | e4m3_pair(q[6], q[7]) << 16};
}

#define SILU_GROUP_PARAMETERS                                                                                     \
    i64 rows, i64 width, const void *x, i64 kind, i64 group_size, const float *scale_ub, unsigned char *out,      \
        float *scales, i64 row_step, i64 group_step, i64 rule, i64 nan
#define SILU_MAGIC i64 lane_shift, i64 magic, i64 magic_shift

// What a group is made of: rounded to x's dtype, or (vLLM) kept in float32.
template <int V> VT_FN void silu_values(float (&y)[V], const Raw<V>& gate, const Raw<V>& up, int kind, i64 rule) {
    if (rule != VLLM) return silu_products(y, gate, up, kind, false);
    float g[V], u[V];
    widen(g, gate, kind);
    widen(u, up, kind);
#pragma unroll
    for (int j = 0; j < V; ++j) y[j] = vt_silu(g[j]) * u[j];
}

// In the kernels below rows are whole groups of 8 << lane_shift elements, so that their groups follow each other.
VT_FN void silu_group(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    unsigned per_row = (unsigned)width >> 3;
    const Halves<1> raw(x, (int)kind, rows, per_row, (unsigned)magic, (int)magic_shift);
    float y[8], q[8];
    silu_values(y, raw.gate[0], raw.up[0], (int)kind, rule);
    unsigned top = largest_of_lanes(largest_of(y, false), 1 << lane_shift);
    if (!raw.inside(0)) return;
    Divisor by(floored_scale(top, nullptr, scale_ub), top, false);
    by.divide(q, y);
    store_e4m3(out, (i64)raw.number(0) * 8, q, (unsigned)nan);
    unsigned column = raw.number(0) - raw.row[0] * per_row;
    if ((column & ((1u << lane_shift) - 1)) == 0)
        scales[raw.row[0] * row_step + (column >> lane_shift) * group_step] = by.scale;
}

extern "C" __global__ void __launch_bounds__(256) silu_group_v8(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    silu_group(rows, width, x, kind, group_size, scale_ub, out, scales, row_step, group_step, rule, nan, lane_shift,
               magic, magic_shift);
}

// The scale of group `own`, stored by one lane of each; false where it has no place.
template <int D>
VT_FN void store_own_scale(const Halves<D>& raw, float* scales, float scale, int own, i64 row_step, i64 group_step,
                           i64 lane_shift) {
    unsigned row = raw.row[0], stored = raw.number(own);
#pragma unroll
    for (int d = 1; d < D; ++d)
        if (own == d) row = raw.row[d];
    if ((threadIdx.x & ((1u << lane_shift) - 1)) < D && stored < raw.count)
        scales[row * row_step + ((stored - row * raw.per_row) >> lane_shift) * group_step] = scale;
}

// Groups of at least D lanes, "vt": values are bfloat16 before anything is asked of them.
template <int D> VT_FN void silu_group_rounded(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    const Halves<D> raw(x, BF16, rows, (unsigned)width >> 3, (unsigned)magic, (int)magic_shift);
    others_may_start();
    const int own = threadIdx.x & (D - 1), lanes = 1 << lane_shift;
    uint4 made[D];
    unsigned left = 0;
    float top[D], y[8], q[8];
#pragma unroll
    for (int d = 0; d < D; ++d) {
        float g[8], u[8];
        widen(g, raw.gate[d], BF16);
        widen(u, raw.up[d], BF16);
        Middles middles(least_of_bf16(raw.gate[d]));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            y[j] = fast_act<true>(g[j]) * u[j];
            if (j & 1) middles.see(y[j - 1], y[j]);
        }
        if (middles.any() && raw.inside(d)) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (middles.near(y[j])) left |= 1u << (8 * d + j);
        }
        made[d] = narrow(y, BF16).a;
    }
    mend(made, left, [&](int n) { return raw.exact(n >> 3, n & 7, false); });
#pragma unroll
    for (int d = 0; d < D; ++d) {
        unsigned pair = largest_pair<false>(made[d]);
        top[d] = fmaxf(vt_float((int)(pair << 16)), vt_float((int)(pair & 0xffff0000u)));
    }
    float scale = floored_scale((unsigned)vt_bits(own_largest(top, own, lanes)), nullptr, scale_ub);
    const Quotients mine(scale);
    store_own_scale(raw, scales, scale, own, row_step, group_step, lane_shift);
    const bool large = __any_sync(FULL_WARP, mine.large);
#pragma unroll
    for (int d = 0; d < D; ++d) {
        Quotients by(__shfl_xor_sync(FULL_WARP, mine.inverse, own ^ d), __shfl_xor_sync(FULL_WARP, mine.low, own ^ d));
        if (large) by = Quotients(__shfl_xor_sync(FULL_WARP, scale, own ^ d));
        if (!raw.inside(d)) continue;
        widen(y, {made[d], made[d]}, BF16);
        by.divide(q, y);
        store_e4m3(out, (i64)raw.number(d) * 8, q, (unsigned)nan);
    }
}

extern "C" __global__ void __launch_bounds__(64) silu_group_bf16_early(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    silu_group_rounded<1>(rows, width, x, kind, group_size, scale_ub, out, scales, row_step, group_step, rule, nan,
                          lane_shift, magic, magic_shift);
}
extern "C" __global__ void __launch_bounds__(64) silu_group_bf16_deep_early(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    silu_group_rounded<GROUP_DEPTH>(rows, width, x, kind, group_size, scale_ub, out, scales, row_step, group_step, rule,
                                    nan, lane_shift, magic, magic_shift);
}

// Groups of at least D lanes, "vllm": values stay float32, so that a scale shows every bit of the largest. What the fast
// functions make is within NEAR_LARGE units, and the roundings of a product or two: GUESS covers it from either side,
// 2 * GUESS a comparison of two. So the polynomial is for what may be the largest, and for what has other codes GUESS
// away. Under 2^-60 all codes are 0 and the scale is at its floor; from 2^120 on nothing is left to the fast functions.
#define GUESS 0x1p-17f
template <int D> VT_FN void silu_group_kept(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    const Halves<D> raw(x, BF16, rows, (unsigned)width >> 3, (unsigned)magic, (int)magic_shift);
    others_may_start();
    const int own = threadIdx.x & (D - 1), lanes = 1 << lane_shift;
    float y[D][8], top[D];
    unsigned some = 0, extreme = 0;
#pragma unroll
    for (int d = 0; d < D; ++d) {
        float g[8], u[8];
        widen(g, raw.gate[d], BF16);
        widen(u, raw.up[d], BF16);
        if (!(least_of_bf16(raw.gate[d]) > LARGEST_GATE)) extreme |= 0xffu << 8 * d;
        top[d] = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            y[d][j] = fast_act<true>(g[j]) * u[j];
            top[d] = fmaxf(top[d], vt_abs(y[d][j]));
        }
    }
    float least = fmaxf(fminf(own_largest(top, own, lanes), 0x1p120f) * (1.0f - 2.0f * GUESS), 0x1p-60f);
#pragma unroll
    for (int d = 0; d < D; ++d) {
        float bound = __shfl_xor_sync(FULL_WARP, least, own ^ d);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (vt_abs(y[d][j]) >= bound) some |= 1u << (8 * d + j);
        top[d] = 0.0f;
    }
    unsigned present = 0;  // bits of the vectors that have a place
#pragma unroll
    for (int d = 0; d < D; ++d)
        if (raw.inside(d)) present |= 0xffu << 8 * d;
    some = (some | extreme) & present;
#pragma unroll 1
    for (; some; some &= some - 1) {
        int n = lowest_bit(some);
        float size = vt_abs(raw.exact(n >> 3, n & 7, false));
#pragma unroll
        for (int d = 0; d < D; ++d)
            if (n >> 3 == d) top[d] = fmaxf(top[d], size);
    }
    float scale = floored_scale((unsigned)vt_bits(own_largest(top, own, lanes)), nullptr, scale_ub);
    float inverse = usual(scale) ? 1.0f / scale : VT_NAN;
    store_own_scale(raw, scales, scale, own, row_step, group_step, lane_shift);
#pragma unroll
    for (int d = 0; d < D; ++d) {
        float by = __shfl_xor_sync(FULL_WARP, inverse, own ^ d);
        if (!raw.inside(d)) continue;
        float q[8];
        products(q, y[d], by * (1.0f - GUESS));
        uint2 below = e4m3_eight(q);
        products(q, y[d], by * (1.0f + GUESS));
        uint2 codes = e4m3_eight(q);
        unsigned low = (below.x ^ codes.x) | nans_of(codes.x), high = (below.y ^ codes.y) | nans_of(codes.y);
        *(uint2*)(out + (i64)raw.number(d) * 8) = codes;
        if ((low | high) == 0) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (low >> 8 * j & 0xffu) some |= 1u << (8 * d + j);
            if (high >> 8 * j & 0xffu) some |= 16u << (8 * d + j);
        }
    }
    some |= extreme & present;
    if (__any_sync(FULL_WARP, some != 0 || !usual(scale))) {
        float whole[D];
#pragma unroll
        for (int d = 0; d < D; ++d) {
            whole[d] = __shfl_xor_sync(FULL_WARP, scale, own ^ d);
            if (!usual(whole[d])) some |= present & 0xffu << 8 * d;
        }
#pragma unroll 1
        for (; some; some &= some - 1) {
            int n = lowest_bit(some);
            float by = whole[0];
#pragma unroll
            for (int d = 1; d < D; ++d)
                if (n >> 3 == d) by = whole[d];
            out[(i64)(raw.first + (n >> 3) * raw.step) * 8 + (n & 7)] =
                one_code(raw.exact(n >> 3, n & 7, false) / by, (unsigned)nan);
        }
    }
}

// Few groups of bfloat16 of at most 32 << 2 elements, four a lane: MIRROR's functions take less time than a decision would.
extern "C" __global__ void __launch_bounds__(128) silu_group_few_early(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    const unsigned per_row = (unsigned)width >> 2, count = (unsigned)rows * per_row;
    const unsigned number = blockIdx.x * blockDim.x + threadIdx.x, place = number < count ? number : count - 1;
    const unsigned row = whole_quotient(place, (unsigned)magic, (int)magic_shift);
    const uint2* from = (const uint2*)x + place + (i64)row * per_row;
    after_others();
    const uint2 a = from[0], b = from[per_row];
    others_may_start();
    const float g[4] = {widen_bf16(a.x & 0xffffu), widen_bf16(a.x >> 16), widen_bf16(a.y & 0xffffu), widen_bf16(a.y >> 16)};
    const float u[4] = {widen_bf16(b.x & 0xffffu), widen_bf16(b.x >> 16), widen_bf16(b.y & 0xffffu), widen_bf16(b.y >> 16)};
    float y[4], q[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        y[j] = vt_silu(g[j]) * u[j];
        if (rule != VLLM) y[j] = through(y[j], BF16);
    }
    unsigned top = largest_of(y, false);
    top = lane_shift == 5 ? largest_of_warp(top) : largest_of_lanes(top, 1 << lane_shift);
    const float scale = floored_scale(top, nullptr, scale_ub);
    if (number >= count) return;
    Divisor(scale, top, false).divide(q, y);
    unsigned codes = e4m3_pair(q[0], q[1]) | e4m3_pair(q[2], q[3]) << 16;
    if (nan != 0x7f) codes = with_nan(codes, (unsigned)nan);
    *(unsigned*)(out + (i64)number * 4) = codes;
    const unsigned column = number - row * per_row;
    if ((column & ((1u << lane_shift) - 1)) == 0)
        scales[row * row_step + (column >> lane_shift) * group_step] = scale;
}

// Very few groups of 128 bfloat16, one a block and an element a thread: a multiprocessor each. `magic` divides by groups.
extern "C" __global__ void __launch_bounds__(128) silu_group_alone_early(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    __shared__ unsigned tops[4];
    const unsigned row = whole_quotient(blockIdx.x, (unsigned)magic, (int)magic_shift);
    const unsigned group = blockIdx.x - row * ((unsigned)width >> 7);
    const unsigned short* const from = (const unsigned short*)x + (i64)row * width * 2 + group * 128 + threadIdx.x;
    after_others();
    const unsigned gate = from[0], up = from[width];
    others_may_start();
    float y[1] = {vt_silu(widen_bf16(gate)) * widen_bf16(up)}, q[1];
    if (rule != VLLM) y[0] = through(y[0], BF16);
    unsigned top = largest_of_warp(largest_of(y, false));
    if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = top;
    __syncthreads();
    top = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
    const float scale = floored_scale(top, nullptr, scale_ub);
    Divisor(scale, top, false).divide(q, y);
    out[(i64)blockIdx.x * 128 + threadIdx.x] = one_code(q[0], (unsigned)nan);
    if (threadIdx.x == 0) scales[row * row_step + group * group_step] = scale;
}

extern "C" __global__ void __launch_bounds__(64) silu_group_kept_bf16_early(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    silu_group_kept<1>(rows, width, x, kind, group_size, scale_ub, out, scales, row_step, group_step, rule, nan,
                       lane_shift, magic, magic_shift);
}
extern "C" __global__ void __launch_bounds__(32) silu_group_kept_bf16_deep_early(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    silu_group_kept<KEPT_DEPTH>(rows, width, x, kind, group_size, scale_ub, out, scales, row_step, group_step, rule,
                                nan, lane_shift, magic, magic_shift);
}

// A warp a group of any size; what it needs again it computes again.
extern "C" __global__ void __launch_bounds__(256) silu_group_any(SILU_GROUP_PARAMETERS) {
    unsigned groups = ((unsigned)width + (unsigned)group_size - 1) / (unsigned)group_size;
    unsigned number = blockIdx.x * 8 + (threadIdx.x >> 5);  // of 32 bits: the launcher refuses more
    bool inside = number < rows * groups;
    i64 row = number / groups, group = number - (unsigned)row * groups;
    i64 begin = group * group_size, end = begin + group_size < width ? begin + group_size : width;
    float y[1];
    auto value = [&](i64 at) {
        Raw<1> gate = fetch<1>(x, row * 2 * width + at, (int)kind);
        silu_values(y, gate, fetch<1>(x, row * 2 * width + width + at, (int)kind), (int)kind, rule);
    };
    unsigned top = 0;
    for (i64 at = begin + (threadIdx.x & 31); inside && at < end; at += 32) {
        value(at);
        top = larger(top, largest_of(y, false));
    }
    top = largest_of_warp(top);
    if (!inside) return;
    Divisor by(floored_scale(top, nullptr, scale_ub), top, false);
    if ((threadIdx.x & 31) == 0) scales[row * row_step + group * group_step] = by.scale;
    for (i64 at = begin + (threadIdx.x & 31); at < end; at += 32) {
        value(at);
        float q[1];
        by.divide(q, y);
        store_e4m3(out, row * width + at, q, (unsigned)nan);
    }
}
