// RMSNorm and SiLU-and-mul whose bfloat16 result becomes FP8 codes without passing through memory.
//
// The ladder:
// 1. Whatever has no kernel here (device/norm_quant.py) is the norm's or activation's kernel, then the quantiser's.
// 2. *_rows: a row of at most 256 elements in 1 to 32 lanes. *_block4: a block a row of at most 8192: the row is read
//    once, its normed values wait in registers, packed, for the scale. *_few4: the weights are sent for with the row.
//    *_block5: 128 threads a row of at most 5120, each with two of the tree's partials, weights sent for early: half as
//    many threads find the row's root and scale, and no warp idles. With a residual it takes too many registers; *_half3:
//    of at most 3072 it does not, and 20480 x 2048 takes 72 us instead of 104.
// 3. *_ring32x1 ...: many rows without a residual take turns in shared memory (ring_rows.cuh). A row of 5120 a block of 128 took
//    33.6 us of 8192, the ring 34.6, and 31.7 once nothing but a row's own steps was left in its loop: the kind of norm is
//    chosen before it, and the first rows are announced to the second-level cache.
// 4. Three kinds of scale, three sets of kernels: given (static), one a row (token), one for each 1 to 32 lanes (group).
// 5. silu_codes.cuh: no row has to be known whole.
#include "alone_rows.cuh"
#include "early.cuh"
#include "gated_codes.cuh"
#include "ring_groups.cuh"
#include "rows.cuh"
#include "silu_codes.cuh"
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
        return weighted(v, w, inverse);
    }
    VT_MEMBER Raw<8> weighted(float (&v)[8], const float (&w)[8], float inverse) const {
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

// Elements first + SPAN g ..., g < G, of a normed row. sum(partials) joins the team's: a thread has two of the tree's where its
// team has half as many threads, of even g and of odd ones.
template <int SPAN, int G, bool EARLY, class S>
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
        add_squares(partials[SPAN == TREE_SPAN ? 0 : g & 1], v);
    }
    float inverse = inverse_root(sum(partials), (float)width, eps);
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
    template <int MODE, int SPAN, int G, class M>
    VT_MEMBER void row(const Raw<8> (&y)[G], i64 row, int first, int width, int lanes, M&& most) const {
        float v[8], q[8];
        if (MODE == TOKEN) {
            unsigned top = 0;
#pragma unroll
            for (int g = 0; g < G; ++g)
                if (first + g * SPAN < width) top = larger(top, largest_of_bf16(y[g], codes.keeps_nan()));
            top = most(top);
            const float scale = codes.scale(top);
            if (first == 0) codes.scales[row] = scale;
            if (!codes.int8 && codes.rule != VLLM_NATIVE) {
                const Quotients by(scale);
#pragma unroll
                for (int g = 0; g < G; ++g) {
                    if (first + g * SPAN >= width) continue;
                    widen(v, y[g], BF16);
                    by.divide(q, v);
                    store_e4m3(codes.out, row * (i64)width + first + g * SPAN, q, codes.nan);
                }
                return;
            }
            const Divisor by = codes.divisor(scale, top);
#pragma unroll
            for (int g = 0; g < G; ++g) {
                if (first + g * SPAN >= width) continue;
                widen(v, y[g], BF16);
                codes.put(row * (i64)width + first + g * SPAN, v, by);
            }
            return;
        }
        if (MODE == STATIC) {
            float inverse = 1.0f / scale[0];
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
            const float of_group = floored_scale(top, codes.scale_ub, nullptr);
            widen(v, y[0], BF16);
            Quotients(of_group).divide(q, v);
            store_e4m3(codes.out, row * (i64)width + first, q, codes.nan);
            if ((first & ((8 << group_shift) - 1)) == 0)
                codes.scales[row * row_step + (first >> (3 + group_shift)) * group_step] = of_group;
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
            const Quotients own(found.scale);
            const bool large = __any_sync(FULL_WARP, own.large);
#pragma unroll
            for (int g = 0; g < G; ++g) {
                const int away = found.own ^ g;
                Quotients by(other_lane(own.inverse, away), other_lane(own.low, away));
                if (large) by = Quotients(other_lane(found.scale, away));
                if (first + g * SPAN >= width) continue;
                widen(v, y[g], BF16);
                by.divide(q, v);
                store_e4m3(codes.out, row * (i64)width + first + g * SPAN, q, codes.nan);
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
    normed_row<TREE_SPAN, 1, true>(y, norm, row, first, eps, [&](const float (&p)[2]) { return tree_of_lanes(p[0], team); });
    quant.row<MODE, TREE_SPAN, 1>(y, row, first, (int)norm.width, team,
                                  [&](unsigned top) { return largest_of_lanes(top, team); });
}

// A row a block of SPAN / 8 threads.
template <int MODE, int SPAN, int G, bool EARLY> VT_FN void quant_block(float eps, const Normed& norm, const Quantised& quant) {
    __shared__ float warps[8];
    __shared__ unsigned tops[32];
    i64 row = blockIdx.x;
    int first = threadIdx.x * 8;
    Raw<8> y[G];
    normed_row<SPAN, G, EARLY>(y, norm, row, first, eps, [&](const float (&p)[2]) {
        if constexpr (SPAN == TREE_SPAN) return tree_of_block(p[0], warps);
        else return tree_of_two<16>(p, warps);
    });
    quant.row<MODE, SPAN, G>(y, row, first, (int)norm.width, 32,
                             [&](unsigned top) { return largest_of_block(top, tops); });
}

// A row a block of 128 threads, without a residual, into codes of e4m3.
template <int MODE, int G> VT_FN void alone_row(float eps, const Normed& norm, const Quantised& quant) {
    const i64 row = blockIdx.x;
    const int width = (int)norm.width, first = threadIdx.x * 8;
    const TokenCodes& codes = quant.codes;
    Raw<8> y[G];
    auto root = [&](float total) { return inverse_root(total, (float)width, eps); };
    auto normed = [&](const Raw<8>& x, const Raw<8>& weights, float inverse) {
        float v[8];
        widen(v, x, BF16);
        return norm.weighted(v, weights, inverse);
    };
    auto put = [&](auto&& quotients) { alone_codes(y, codes.out, row * width, width, codes.nan, quotients); };
    alone_normed(y, norm.x, row * norm.x_stride, width, norm.weight, root, normed);
    if (MODE == STATIC) {
        const float inverse = 1.0f / quant.scale[0];
        put([&](float (&q)[8], const float (&v)[8], int) { products(q, v, inverse); });
    } else if (MODE == TOKEN) {
        const float scale = codes.scale(codes.keeps_nan() ? alone_largest<true>(y) : alone_largest<false>(y));
        if (threadIdx.x == 0) codes.scales[row] = scale;
        if (codes.rule == VLLM_NATIVE) {
            const float inverse = 1.0f / scale;
            put([&](float (&q)[8], const float (&v)[8], int) { products(q, v, inverse); });
        } else {
            const Quotients by(scale);
            put([&](float (&q)[8], const float (&v)[8], int) { by.divide(q, v); });
        }
    }
}

// The same by the rows of a ring, under a scale for each row or for each group of 128 or 256.
template <int MODE, int T, int B>
VT_FN void ring_row(i64 rows, i64 grid, float eps, const Normed& norm, const Quantised& quant) {
    const TokenCodes& codes = quant.codes;
    auto root = [&](float total) { return inverse_root(total, (float)norm.width, eps); };
    auto normed = [&](float (&v)[8], const float (&w)[8], float inverse) { return norm.weighted(v, w, inverse); };
    auto scale_of = [&](unsigned top) { return floored_scale(top, codes.scale_ub, nullptr); };
    if (MODE == TOKEN) {
        ring_tokens<T, B>(rows, norm.width, grid, norm.x, norm.x_stride, norm.weight, root, normed, scale_of, codes.out,
                          codes.scales, codes.nan);
        return;
    }
    auto put_scale = [&](int row, int first, float scale) {
        codes.scales[row * quant.row_step + (first >> (3 + quant.group_shift)) * quant.group_step] = scale;
    };
    ring_groups<T, B>(rows, norm.width, (int)grid, 1 << (quant.group_shift - 1), norm.x, norm.x_stride, norm.weight, root, normed,
                      scale_of, put_scale, codes.out, codes.nan);
}

// NORM is built of literals where the operands are known: the compiler then drops what they rule out.
#define NORM_KERNELS(NAME, MODE, NORM)                                                                            \
    extern "C" __global__ void __launch_bounds__(128) NAME##_rows(NORM_PARAMETERS, i64 lane_shift) {              \
        quant_rows<MODE>(rows, lane_shift, eps, NORM, QUANTISED);                                                 \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) NAME##_few4(NORM_PARAMETERS) {                              \
        quant_block<MODE, TREE_SPAN, 4, true>(eps, NORM, QUANTISED);                                              \
    }
#define ALONE_KERNELS(NAME, MODE, FLAG)                                                                           \
    NORM_KERNELS(NAME, MODE, NORMED_ALONE((int)flags & FLAG))                                                     \
    extern "C" __global__ void __launch_bounds__(128, 1) NAME##_block5(NORM_PARAMETERS) {                         \
        alone_row<MODE, 5>(eps, NORMED_ALONE((int)flags & FLAG), QUANTISED);                                      \
    }
#define ADD_KERNELS(NAME, MODE, FLAG)                                                                             \
    NORM_KERNELS(NAME, MODE, NORMED_ADD((int)flags & FLAG))                                                       \
    extern "C" __global__ void __launch_bounds__(256, 3) NAME##_block4(NORM_PARAMETERS) {                         \
        quant_block<MODE, TREE_SPAN, 4, false>(eps, NORMED_ADD((int)flags & FLAG), QUANTISED);                    \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(128, 1) NAME##_half3(NORM_PARAMETERS) {                          \
        quant_block<MODE, TREE_SPAN / 2, 3, true>(eps, NORMED_ADD((int)flags & FLAG), QUANTISED);                 \
    }
ALONE_KERNELS(static_alone, STATIC, GEMMA)
ALONE_KERNELS(token_alone, TOKEN, NATIVE)
NORM_KERNELS(group_alone, GROUP, NORMED_ALONE((int)flags & NATIVE))
ADD_KERNELS(static_add, STATIC, GEMMA)
ADD_KERNELS(token_add, TOKEN, NATIVE)
ADD_KERNELS(group_add, GROUP, NATIVE)

#define RING_KERNEL(NAME, MODE, T, B, THREADS)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME##_ring##T##x##B##_early(NORM_PARAMETERS, i64 grid) { \
        if (flags & NATIVE) ring_row<MODE, T, B>(rows, grid, eps, NORMED_ALONE(NATIVE), QUANTISED);               \
        else ring_row<MODE, T, B>(rows, grid, eps, NORMED_ALONE(0), QUANTISED);                                   \
    }
#define RING_KERNELS(NAME, MODE)                                                                                  \
    RING_KERNEL(NAME, MODE, 32, 1, 512) RING_KERNEL(NAME, MODE, 32, 2, 512) RING_KERNEL(NAME, MODE, 32, 3, 512)   \
    RING_KERNEL(NAME, MODE, 32, 4, 512) RING_KERNEL(NAME, MODE, 32, 5, 512) RING_KERNEL(NAME, MODE, 32, 6, 512)   \
    RING_KERNEL(NAME, MODE, 64, 4, 512) RING_KERNEL(NAME, MODE, 64, 5, 512)                                       \
    RING_KERNEL(NAME, MODE, 128, 3, 768) RING_KERNEL(NAME, MODE, 128, 4, 640)
RING_KERNELS(token_alone, TOKEN)
RING_KERNELS(group_alone, GROUP)

GATED_TEAMS(gated_rows, 1)
GATED_TEAMS(gated_rows_deep, GATED_DEPTH)
