// RMSNorm and SiLU-and-mul whose bfloat16 result becomes FP8 codes without passing through memory.
//
// The ladder:
// 1. Whatever has no kernel here (device/norm_quant.py) is the norm's or activation's kernel, then the quantiser's.
// 2. *_rows: a row of at most 256 elements in 1 to 32 lanes. *_block4: a block a row of at most 8192: the row is read
//    once, its normed values wait in registers, packed, for the scale. *_few4: the weights are sent for with the row.
//    *_block5: 128 threads a row of at most 5120, each with two of the tree's partials, weights sent for early: half as
//    many threads find the row's root and scale, and no warp idles. With a residual it takes too many registers.
// 3. Three kinds of scale, three sets of kernels: given (static), one a row (token), one for each 1 to 32 lanes (group).
// 4. silu_*: no row has to be known whole: two vectors a thread, one element or vector where they are few; the
//    hardware's fast functions where they give the polynomial's bytes (fast.cuh). All rows are one row of vectors: where
//    each lies in x takes a product, and of 64 bits only the address.
#include "fast.cuh"
#include "fp8_scales.cuh"
#include "rows.cuh"
#include "tree.cuh"

enum { GEMMA = 1, NATIVE = 2 };
enum { STATIC = 0, TOKEN = 1, GROUP = 2 };

struct Normed {
    const void *x, *weight, *residual;
    void* residual_out;
    i64 x_stride, residual_stride, width;
    int flags;

    VT_MEMBER void sum(float (&v)[8], const Raw<8>& raw, const Raw<8>& other) const {
        float r[8];
        widen(v, raw, BF16);
        widen(r, other, BF16);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] += r[j];
    }

    VT_MEMBER Raw<8> weighted(float (&v)[8], const Raw<8>& raw, float inverse) const {
        float w[8];
        widen(w, raw, BF16);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float scaled = v[j] * inverse;
            if (flags & GEMMA) v[j] = scaled * (w[j] + 1.0f);
            else if (flags & NATIVE) v[j] = through(scaled, BF16) * w[j];
            else v[j] = scaled * w[j];
        }
        return narrow(v, BF16);
    }
};

// Elements first + SPAN g ..., g < G, of a normed row. SPAN is the tree's, or half of it: then a thread holds two of
// the tree's partials. sum(first, second) joins the team's.
template <int G, int SPAN, bool EARLY, class S>
VT_FN void normed_row(Raw<8> (&y)[G], const Normed& norm, i64 row, int first, float eps, S&& sum) {
    const bool add = norm.residual != nullptr, native = norm.flags & NATIVE;
    Raw<8> other[G], weights[EARLY ? G : 1];
    int width = (int)norm.width;
    float v[8], partials[2] = {};
#pragma unroll
    for (int g = 0; g < G; ++g) {
        int at = first + g * SPAN;
        if (at >= width) continue;
        y[g] = fetch<8>(norm.x, row * norm.x_stride + at, BF16);
        if (add) other[g] = fetch<8>(norm.residual, row * norm.residual_stride + at, BF16);
    }
    if (EARLY) {
#pragma unroll
        for (int g = 0; g < G; ++g)
            if (first + g * SPAN < width) weights[g] = fetch<8>(norm.weight, first + g * SPAN, BF16);
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
        int at = first + g * SPAN;
        if (at >= width) continue;
        if (add) {
            norm.sum(v, y[g], other[g]);
            Raw<8> rounded = narrow(v, BF16);
            put(norm.residual_out, row * norm.width + at, rounded, BF16);
            if (!native) {
                y[g] = rounded;
                widen(v, rounded, BF16);
            }
        } else {
            widen(v, y[g], BF16);
        }
        add_squares(partials[SPAN < TREE_SPAN ? g & 1 : 0], v);
    }
    float inverse = inverse_root(sum(partials[0], partials[1]), (float)width, eps);
#pragma unroll
    for (int g = 0; g < G; ++g) {
        int at = first + g * SPAN;
        if (at >= width) continue;
        if (!EARLY) weights[0] = fetch<8>(norm.weight, at, BF16);
        if (add && native) norm.sum(v, y[g], other[g]);
        else widen(v, y[g], BF16);
        y[g] = norm.weighted(v, weights[EARLY ? g : 0], inverse);
    }
}

VT_FN int min_of(int a, int b) { return a < b ? a : b; }

// What becomes of a normed row. In GROUP mode, and where G > 1, a group is at least 8 lanes wide.
struct Quantised {
    TokenCodes codes;
    const float* scale;
    i64 row_step, group_step;
    int group_shift;  // a group is 1 << group_shift lanes wide

    // most(top): the largest of the team; lanes: how many of the team's lanes lie in one warp.
    template <int MODE, int G, int SPAN, class M>
    VT_MEMBER void row(const Raw<8> (&y)[G], i64 row, int first, int width, int lanes, M&& most) const {
        float v[8];
        if (MODE == TOKEN) {
            unsigned top = 0;
#pragma unroll
            for (int g = 0; g < G; ++g)
                if (first + g * SPAN < width) top = larger(top, largest_of_bf16(y[g], codes.keeps_nan()));
            top = most(top);
            Divisor by = codes.divisor(codes.scale(top), top);
            if (first == 0) codes.scales[row] = by.scale;
#pragma unroll
            for (int g = 0; g < G; ++g) {
                if (first + g * SPAN >= width) continue;
                widen(v, y[g], BF16);
                codes.put(row * (i64)width + first + g * SPAN, v, by);
            }
            return;
        }
        if (MODE == STATIC) {
            float inverse = 1.0f / scale[0], q[8];
#pragma unroll
            for (int g = 0; g < G; ++g) {
                if (first + g * SPAN >= width) continue;
                widen(v, y[g], BF16);
                products(q, v, inverse);
                store_e4m3(codes.out, row * (i64)width + first + g * SPAN, q, codes.nan);
            }
        } else if constexpr (G == 1) {
            bool inside = first < width;
            unsigned top = inside ? largest_of_bf16(y[0], false) : 0u;
            top = largest_of_lanes(top, min_of(1 << group_shift, lanes));
            if (!inside) return;
            Divisor by(floored_scale(top, codes.scale_ub, nullptr), top, false);
            widen(v, y[0], BF16);
            codes.put(row * (i64)width + first, v, by);
            if ((first & ((8 << group_shift) - 1)) == 0)
                codes.scales[row * row_step + (first >> (3 + group_shift)) * group_step] = by.scale;
        } else {
            constexpr int D = G > 4 ? 8 : 4;
            unsigned tops[D] = {};
#pragma unroll
            for (int g = 0; g < G; ++g)
                if (first + g * SPAN < width) tops[g] = largest_pair<false>(y[g].a);
            GroupScales<D> found;
            found.template join<false>(tops, min_of(1 << group_shift, lanes), [&](unsigned top) {
                return floored_scale(top, codes.scale_ub, nullptr);
            });
            int within = first & ((8 << group_shift) - 1), begin = first - within + found.own * SPAN;
            if (within < 8 * D && begin < width)
                codes.scales[row * row_step + (begin >> (3 + group_shift)) * group_step] = found.scale;
#pragma unroll
            for (int g = 0; g < G; ++g) {
                Divisor by = found.of(g);
                if (first + g * SPAN >= width) continue;
                widen(v, y[g], BF16);
                codes.put(row * (i64)width + first + g * SPAN, v, by);
            }
        }
    }
};

#define NORM_PARAMETERS                                                                                           \
    i64 rows, i64 width, const void *x, i64 x_stride, const void *weight, const void *residual,                   \
        i64 residual_stride, void *residual_out, float eps, i64 flags, const float *scale, const float *scale_ub, \
        unsigned char *out, float *scales, i64 rule, i64 nan, i64 int8, i64 group_shift, i64 row_step, i64 group_step
#define NORMED_ALONE(FLAGS) Normed{x, weight, nullptr, nullptr, x_stride, 0, width, FLAGS}
#define NORMED_ADD(FLAGS) Normed{x, weight, residual, residual_out, x_stride, residual_stride, width, FLAGS}
#define QUANTISED                                                                                                 \
    Quantised{{scale_ub, out, scales, (int)rule, (unsigned)nan, int8 != 0}, scale, row_step, group_step,          \
              (int)group_shift}

template <int MODE> VT_FN void quant_rows(i64 rows, i64 lane_shift, float eps, const Normed& norm,
                                          const Quantised& quant) {
    int team = 1 << lane_shift, lane = threadIdx.x & (team - 1);
    i64 row = (i64)blockIdx.x * (128 >> lane_shift) + (threadIdx.x >> lane_shift);
    int first = row < rows ? lane * 8 : (int)norm.width;  // a team without a row still takes part in exchanges
    Raw<8> y[1];
    normed_row<1, TREE_SPAN, true>(y, norm, row, first, eps, [&](float p, float) { return tree_of_lanes(p, team); });
    quant.row<MODE, 1, TREE_SPAN>(y, row, first, (int)norm.width, team,
                                  [&](unsigned top) { return largest_of_lanes(top, team); });
}

// tree_of_block for blocks of up to 128 threads of two partials each, number t and 128 further.
VT_FN float tree_of_halves(float low, float high, float* warps) {
    int count = blockDim.x >> 5, warp = threadIdx.x >> 5;
    low = tree_of_lanes(low, 32);
    high = tree_of_lanes(high, 32);
    if ((threadIdx.x & 31) == 0) {
        warps[warp] = low;
        warps[warp + 4] = high;
    }
    __syncthreads();
    float s[8];
#pragma unroll
    for (int w = 0; w < 8; ++w) s[w] = (w & 3) < count ? warps[w] : 0.0f;
    return tree_of_eight(s);
}

template <int MODE, int G, int SPAN, bool EARLY>
VT_FN void quant_block(float eps, const Normed& norm, const Quantised& quant) {
    __shared__ float warps[8];
    __shared__ unsigned tops[32];
    i64 row = blockIdx.x;
    int first = threadIdx.x * 8;
    Raw<8> y[G];
    normed_row<G, SPAN, EARLY>(y, norm, row, first, eps, [&](float p, float other) {
        return SPAN < TREE_SPAN ? tree_of_halves(p, other, warps) : tree_of_block(p, warps);
    });
    quant.row<MODE, G, SPAN>(y, row, first, (int)norm.width, 32,
                             [&](unsigned top) { return largest_of_block(top, tops); });
}

// NORM is built of literals where the operands are known: the compiler then drops what they rule out.
#define NORM_KERNELS(NAME, MODE, NORM)                                                                            \
    extern "C" __global__ void __launch_bounds__(128) NAME##_rows(NORM_PARAMETERS, i64 lane_shift) {              \
        quant_rows<MODE>(rows, lane_shift, eps, NORM, QUANTISED);                                                 \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) NAME##_few4(NORM_PARAMETERS) {                              \
        quant_block<MODE, 4, TREE_SPAN, true>(eps, NORM, QUANTISED);                                              \
    }
#define ALONE_KERNELS(NAME, MODE, FLAG)                                                                           \
    NORM_KERNELS(NAME, MODE, NORMED_ALONE((int)flags & FLAG))                                                     \
    extern "C" __global__ void __launch_bounds__(128) NAME##_block5(NORM_PARAMETERS) {                            \
        quant_block<MODE, 5, TREE_SPAN / 2, true>(eps, NORMED_ALONE((int)flags & FLAG), QUANTISED);               \
    }
#define ADD_KERNELS(NAME, MODE, FLAG)                                                                             \
    NORM_KERNELS(NAME, MODE, NORMED_ADD((int)flags & FLAG))                                                       \
    extern "C" __global__ void __launch_bounds__(256, 3) NAME##_block4(NORM_PARAMETERS) {                         \
        quant_block<MODE, 4, TREE_SPAN, false>(eps, NORMED_ADD((int)flags & FLAG), QUANTISED);                    \
    }
ALONE_KERNELS(static_alone, STATIC, GEMMA)
ALONE_KERNELS(token_alone, TOKEN, NATIVE)
ALONE_KERNELS(group_alone, GROUP, NATIVE)
ADD_KERNELS(static_add, STATIC, GEMMA)
ADD_KERNELS(token_add, TOKEN, NATIVE)
ADD_KERNELS(group_add, GROUP, NATIVE)

// y = ((x * inv) * w) * act(gate), rounded, of rows of 16 to 256 elements, `depth` rows a team: 1, or 2 whose roots its
// even and odd lanes find.
extern "C" __global__ void __launch_bounds__(128) gated_rows(
    i64 rows, i64 width, const void* x, const void* weight, const void* gate, i64 gate_stride, float eps, i64 sigmoid,
    const float* scale, unsigned char* out, i64 nan, i64 lane_shift, i64 depth) {
    int first = (threadIdx.x & ((1 << lane_shift) - 1)) * 8, step = 128 >> lane_shift, own = threadIdx.x & (depth - 1);
    i64 row = (i64)blockIdx.x * (step * (int)depth) + (threadIdx.x >> lane_shift);
    Raw<8> a[2], b, c[2];
    float v[8], w[8], z[8], y[8], partial[2] = {};
    if (first < width) b = fetch<8>(weight, first, BF16);
#pragma unroll
    for (int d = 0; d < 2; ++d) {
        if (d >= depth || first >= width || row + d * step >= rows) continue;
        a[d] = fetch<8>(x, (row + d * step) * width + first, BF16);
        c[d] = fetch<8>(gate, (row + d * step) * gate_stride + first, BF16);
    }
#pragma unroll
    for (int d = 0; d < 2; ++d) {
        if (d >= depth || first >= width || row + d * step >= rows) continue;
        widen(v, a[d], BF16);
        add_squares(partial[d], v);
    }
    for (int m = 1 << lane_shift >> 1; m >= 1; m >>= 1) {
        partial[0] += other_lane(partial[0], m);
        partial[1] += other_lane(partial[1], m);
    }
    float root = inverse_root(own ? partial[1] : partial[0], (float)width, eps), factor = 1.0f / scale[0];
    widen(w, b, BF16);
#pragma unroll
    for (int d = 0; d < 2; ++d) {
        if (d >= depth) break;
        float inverse = other_lane(root, own ^ d);
        if (first >= width || row + d * step >= rows) continue;
        widen(v, a[d], BF16);
        widen(z, c[d], BF16);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = v[j] * inverse * w[j];
        if (sigmoid) gate_products<false>(y, z, v, F32, BF16);
        else gate_products<true>(y, z, v, F32, BF16);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = through(y[j], BF16) * factor;
        store_e4m3(out, (row + d * step) * width + first, y, (unsigned)nan);
    }
}

#define DEPTH 2        // vectors a thread of the static kernels, device/norm_quant.py
#define GROUP_DEPTH 2  // and of silu_group_bf16_deep

// y = round(act * up) as the activation stores it.
template <int V> VT_FN void silu_products(float (&y)[V], const Raw<V>& gate, const Raw<V>& up, int kind, bool rounded) {
    float g[V], u[V];
    widen(g, gate, kind);
    widen(u, up, kind);
    gate_products<true>(y, g, u, rounded ? kind : F32, kind);
#pragma unroll
    for (int j = 0; j < V; ++j) y[j] = through(y[j], kind);
}

template <int V>
VT_FN void silu_static(i64 rows, i64 width, i64 chunks, const void* x, int kind, const float* scale,
                       unsigned char* out, unsigned nan, bool rounded) {
    Place at[DEPTH];
    Raw<V> a[DEPTH], b[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        at[d] = place<V>(rows, width, chunks, DEPTH, d);
        if (!at[d].inside) continue;
        a[d] = fetch<V>(x, at[d].row * 2 * width + at[d].column, kind);
        b[d] = fetch<V>(x, at[d].row * 2 * width + width + at[d].column, kind);
    }
    float inverse = 1.0f / scale[0];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (!at[d].inside) continue;
        float y[V], q[V];
        silu_products(y, a[d], b[d], kind, rounded);
        products(q, y, inverse);
        store_e4m3(out, at[d].row * width + at[d].column, q, nan);
    }
}

#define SILU_STATIC(NAME, V)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                       \
        i64 rows, i64 width, i64 chunks, const void* x, i64 kind, const float* scale, unsigned char* out,         \
        i64 nan, i64 rounded) {                                                                                   \
        silu_static<V>(rows, width, chunks, x, (int)kind, scale, out, (unsigned)nan, rounded != 0);               \
    }
SILU_STATIC(silu_static_v8, 8)
SILU_STATIC(silu_static_v1, 1)

// Vectors of all rows in a row, D a thread, `step` apart. Number n of the result is made of numbers n + row * per_row
// and, per_row further, of x.
template <int D> struct Halves {
    Raw<8> gate[D], up[D];
    unsigned row[D], first, step, count;

    VT_MEMBER Halves(const void* x, int kind, i64 rows, unsigned per_row, unsigned magic, int magic_shift)
        : first(blockIdx.x * (blockDim.x * D) + threadIdx.x), step(blockDim.x), count((unsigned)rows * per_row) {
#pragma unroll
        for (int d = 0; d < D; ++d) {
            row[d] = whole_quotient(number(d), magic, magic_shift);
            unsigned at = number(d) + row[d] * per_row;
            if (!inside(d)) continue;
            gate[d] = fetch<8>(x, (i64)at * 8, kind);
            up[d] = fetch<8>(x, (i64)(at + per_row) * 8, kind);
        }
    }
    VT_MEMBER unsigned number(int d) const { return first + d * step; }
    VT_MEMBER bool inside(int d) const { return number(d) < count; }
};

template <int D, bool ROUNDED>
VT_FN void silu_vectors(i64 rows, i64 per_row, const void* x, const float* scale, unsigned char* out, unsigned nan,
                        i64 magic, i64 magic_shift) {
    const Halves<D> raw(x, BF16, rows, (unsigned)per_row, (unsigned)magic, (int)magic_shift);
    float inverse = 1.0f / scale[0];
#pragma unroll
    for (int d = 0; d < D; ++d) {
        if (!raw.inside(d)) return;
        float y[8], q[8];
        silu_products(y, raw.gate[d], raw.up[d], BF16, ROUNDED);
        products(q, y, inverse);
        store_e4m3(out, (i64)raw.number(d) * 8, q, nan);
    }
}

#define SILU_VECTORS(NAME, ROUNDED)                                                                               \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                       \
        i64 rows, i64 per_row, const void* x, const float* scale, unsigned char* out, i64 nan, i64 magic,         \
        i64 magic_shift) {                                                                                        \
        silu_vectors<DEPTH, ROUNDED>(rows, per_row, x, scale, out, (unsigned)nan, magic, magic_shift);            \
    }
SILU_VECTORS(silu_static_bf16, false)
SILU_VECTORS(silu_static_rounded_bf16, true)

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

// In the two kernels below rows are whole groups of 8 << lane_shift elements, so that their groups follow each other.
VT_FN void silu_group(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    unsigned per_row = (unsigned)width >> 3;
    const Halves<1> raw(x, (int)kind, rows, per_row, (unsigned)magic, (int)magic_shift);
    float y[8] = {}, q[8];
    if (raw.inside(0)) silu_values(y, raw.gate[0], raw.up[0], (int)kind, rule);
    unsigned top = largest_of_lanes(largest_of(y, false), 1 << lane_shift);
    if (!raw.inside(0)) return;
    Divisor by(floored_scale(top, nullptr, scale_ub), top, false);
    by.divide(q, y);
    store_e4m3(out, (i64)raw.number(0) * 8, q, (unsigned)nan);
    unsigned column = raw.number(0) - raw.row[0] * per_row;
    if ((column & ((1u << lane_shift) - 1)) == 0)
        scales[raw.row[0] * row_step + (column >> lane_shift) * group_step] = by.scale;
}

// silu_group_bf16: "vt" where there are few; what it cannot meet takes no instruction's room.
#define SILU_GROUP(NAME, KIND, RULE)                                                                              \
    extern "C" __global__ void __launch_bounds__(256) NAME(SILU_GROUP_PARAMETERS, SILU_MAGIC) {                   \
        silu_group(rows, width, x, KIND, group_size, scale_ub, out, scales, row_step, group_step, RULE, nan,      \
                   lane_shift, magic, magic_shift);                                                               \
    }
SILU_GROUP(silu_group_v8, kind, rule)
SILU_GROUP(silu_group_bf16, BF16, VT)

// Groups of at least GROUP_DEPTH lanes, "vt".
extern "C" __global__ void __launch_bounds__(64) silu_group_bf16_deep(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    unsigned per_row = (unsigned)width >> 3, tops[GROUP_DEPTH];
    const Halves<GROUP_DEPTH> raw(x, BF16, rows, per_row, (unsigned)magic, (int)magic_shift);
    Raw<8> made[GROUP_DEPTH];
    float y[8], q[8];
#pragma unroll
    for (int d = 0; d < GROUP_DEPTH; ++d) {
        tops[d] = 0;
        if (!raw.inside(d)) continue;
        silu_products(y, raw.gate[d], raw.up[d], BF16, false);
        made[d] = narrow(y, BF16);
        tops[d] = largest_pair<false>(made[d].a);
    }
    GroupScales<GROUP_DEPTH> found;
    found.join<false>(tops, 1 << lane_shift,
                      [&](unsigned top) { return floored_scale(top, nullptr, scale_ub); });
    unsigned row = raw.row[0], stored = raw.number(found.own);
#pragma unroll
    for (int d = 1; d < GROUP_DEPTH; ++d)
        if (found.own == d) row = raw.row[d];
    if ((threadIdx.x & ((1u << lane_shift) - 1)) < GROUP_DEPTH && stored < raw.count)
        scales[row * row_step + ((stored - row * per_row) >> lane_shift) * group_step] = found.scale;
#pragma unroll
    for (int d = 0; d < GROUP_DEPTH; ++d) {
        Divisor by = found.of(d);
        if (!raw.inside(d)) continue;
        widen(y, made[d], BF16);
        by.divide(q, y);
        store_e4m3(out, (i64)raw.number(d) * 8, q, (unsigned)nan);
    }
}

// Rows of whole groups again, "vllm": values stay float32, so that the scale shows every bit of the largest, and the
// polynomial is for what may be it, or may have another code within TWICE its distance from the fast functions' value.
// What is under 2^-60 has code 0 and a scale at its floor.
#define TWICE 0x1p-17f
extern "C" __global__ void __launch_bounds__(256) silu_group_kept_bf16(SILU_GROUP_PARAMETERS, SILU_MAGIC) {
    unsigned per_row = (unsigned)width >> 3, some = 0, others = 0, top;
    const Halves<1> raw(x, BF16, rows, per_row, (unsigned)magic, (int)magic_shift);
    float g[8] = {}, u[8] = {}, y[8], q[8];
    auto exact = [](float gate, float up) { return vt_silu(gate) * up; };
    if (raw.inside(0)) {
        widen(g, raw.gate[0], BF16);
        widen(u, raw.up[0], BF16);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        y[j] = fast_act<true>(g[j]) * u[j];
        if (!(vt_abs(g[j]) < FAST_LIMIT)) some |= 1u << j;
    }
    decide(y, some, g, u, exact);
    top = largest_of_lanes(largest_of(y, false), 1 << lane_shift);
    float least = fmaxf(vt_float((int)top) * (1.0f - TWICE), 0x1p-60f);
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (vt_abs(y[j]) >= least) others |= 1u << j;
    others &= ~some;
    decide(y, others, g, u, exact);
    some |= others;
    top = largest_of_lanes(largest_of(y, false), 1 << lane_shift);
    if (!raw.inside(0)) return;
    Divisor by(floored_scale(top, nullptr, scale_ub), top, false);
    by.divide(q, y);
    others = 0;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        unsigned below = e4m3_pair(q[j] * (1.0f - TWICE / 2), q[j + 1] * (1.0f - TWICE / 2));
        unsigned above = e4m3_pair(q[j] * (1.0f + TWICE / 2), q[j + 1] * (1.0f + TWICE / 2));
        if ((below ^ above) & 0xffu) others |= 1u << j;
        if ((below ^ above) >> 8) others |= 2u << j;
    }
    decide(q, others & ~some, g, u, [&](float gate, float up) { return exact(gate, up) / by.scale; });
    store_e4m3(out, (i64)raw.number(0) * 8, q, (unsigned)nan);
    unsigned column = raw.number(0) - raw.row[0] * per_row;
    if ((column & ((1u << lane_shift) - 1)) == 0)
        scales[raw.row[0] * row_step + (column >> lane_shift) * group_step] = by.scale;
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
