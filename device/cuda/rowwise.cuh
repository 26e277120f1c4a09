// A row in the hands of a team of threads: everything is sent for at once and waits in registers for its second use.
//
// What is done to a row is a struct N with
//   CENTRED                      whether the statistic is the variance, else the mean square
//   read(row, at) -> Operands    the row's own operands, as they lie in memory
//   value(v, row, at, raw)       what is normalised, made once; may write a side result and change raw for `again`
//   again(v, raw)                the same values, from what `value` left in raw
//   weights(at) -> Weights       operands that all rows share
//   finish(v, row, at, raw, w, mean, inverse)
// each for V = 8 neighbours or one.
#pragma once
#include "teams.cuh"

template <int V> struct Operands { Raw<V> x, other; };
template <int V> struct Weights { Raw<V> scale, shift; };

template <class N, int V> VT_FN void add_values(float& partial, float (&v)[V], float mean) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
        if (N::CENTRED) v[j] -= mean;
        partial += v[j] * v[j];
    }
}

// Elements first + 2048 g ..., g < G, of a row; `sum(partial, n)` joins the team's partials, n = 0 or 1. EARLY: the
// weights are sent for with the row, which hides their latency and costs registers.
template <int G, bool EARLY, class N, class S>
VT_FN void norm_row(const N& norm, i64 row, int first, int width, float eps, S&& sum) {
    Operands<8> raw[G];
    Weights<8> weights[EARLY ? G : 1];
    float v[8], partial = 0.0f, mean = 0.0f;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        int at = first + g * TREE_SPAN;
        if (at < width) raw[g] = norm.template read<8>(row, at);
    }
    if (EARLY) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
            int at = first + g * TREE_SPAN;
            if (at < width) weights[g] = norm.template weights<8>(at);
        }
    }
    if (N::CENTRED) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
            if (first + g * TREE_SPAN >= width) continue;
            norm.again(v, raw[g]);
            add_terms(partial, v);
        }
        mean = sum(partial, 0) / (float)width;
        partial = 0.0f;
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
        int at = first + g * TREE_SPAN;
        if (at >= width) continue;
        norm.value(v, row, at, raw[g]);
        add_values<N>(partial, v, mean);
    }
    float inverse = inverse_root(sum(partial, 1), norm.count(width), eps);
#pragma unroll
    for (int g = 0; g < G; ++g) {
        int at = first + g * TREE_SPAN;
        if (at >= width) continue;
        if (!EARLY) weights[0] = norm.template weights<8>(at);
        norm.again(v, raw[g]);
        norm.finish(v, row, at, raw[g], weights[EARLY ? g : 0], mean, inverse);
    }
}

// Rows of at most 8 * lanes elements, several to a warp.
template <class N> VT_FN void norm_rows(i64 rows, i64 width, float eps, i64 lanes, const N& norm) {
    int team = (int)lanes, lane = threadIdx.x & (team - 1);
    i64 row = (i64)blockIdx.x * (blockDim.x / team) + threadIdx.x / team;
    int first = row < rows ? lane * 8 : (int)width;  // a team without a row still takes part in its warp's exchanges
    norm_row<1, true>(norm, row, first, (int)width, eps, [&](float p, int) { return tree_of_lanes(p, team); });
}

// ROWS neighbouring rows of at most 8 << shift elements to a team of 1 << shift >= ROWS lanes, sent for together; each
// row's root is found by a lane of its own (teams.cuh).
template <int ROWS, class N> VT_FN void norm_some_rows(i64 rows, i64 width, float eps, i64 shift, const N& norm) {
    const Team team((int)shift);
    i64 first = (i64)team_number(blockIdx.x, (int)shift) * ROWS;
    int at = team.place * 8, here = at < width ? (rows - first < ROWS ? (int)(rows - first) : ROWS) : 0;
    Operands<8> raw[ROWS];
    Weights<8> weights;
    float v[8], partial[ROWS] = {};
#pragma unroll
    for (int j = 0; j < ROWS; ++j)
        if (j < here) raw[j] = norm.template read<8>(first + j, at);
    if (here > 0) weights = norm.template weights<8>(at);
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        if (j >= here) continue;
        norm.value(v, first + j, at, raw[j]);
        add_values<N>(partial[j], v, 0.0f);
    }
    float roots = team.roots(partial, norm.count(width), eps);
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        float inverse = team.root_of(roots, j);
        if (j >= here) continue;
        norm.again(v, raw[j]);
        norm.finish(v, first + j, at, raw[j], weights, 0.0f, inverse);
    }
}

// A block a row of at most 2048 * G elements.
template <int G, bool EARLY, class N> VT_FN void norm_block(i64 width, float eps, const N& norm) {
    __shared__ float warps[16];
    norm_row<G, EARLY>(norm, blockIdx.x, threadIdx.x * 8, (int)width, eps,
                       [&](float p, int n) { return tree_of_block(p, warps + 8 * n); });
}

// A block of 256 threads a row of any width; what it needs again it reads again.
template <int V, class N> VT_FN void norm_long(i64 width, float eps, const N& norm) {
    __shared__ float warps[16];
    i64 row = blockIdx.x;
    float v[V], partial = 0.0f, mean = 0.0f;
    auto each = [&](auto&& work) {
        for (i64 base = threadIdx.x * 8; base < width; base += TREE_SPAN)
            for (i64 at = base; at < base + 8 && at < width; at += V) work(at, norm.template read<V>(row, at));
    };
    if (N::CENTRED) {
        each([&](i64, Operands<V> raw) {
            norm.again(v, raw);
            for (int j = 0; j < V; ++j) partial += v[j];
        });
        mean = tree_of_block(partial, warps) / (float)width;
        partial = 0.0f;
    }
    each([&](i64 at, Operands<V> raw) {
        norm.value(v, row, at, raw);
        add_values<N>(partial, v, mean);
    });
    float inverse = inverse_root(tree_of_block(partial, warps + 8), norm.count(width), eps);
    each([&](i64 at, Operands<V> raw) {
        norm.value(v, row, at, raw);
        norm.finish(v, row, at, raw, norm.template weights<V>(at), mean, inverse);
    });
}

// NAME's kernels for narrow rows. NORM is best built of literals where dtypes and flags are known.
#define NARROW_NORM_KERNELS(NAME, PARAMETERS, NORM)                                                       \
    extern "C" __global__ void __launch_bounds__(128) NAME##_rows(PARAMETERS, i64 lanes) {                        \
        norm_rows(rows, width, eps, lanes, NORM);                                                                 \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) NAME##_block1(PARAMETERS) {                                 \
        norm_block<1, true>(width, eps, NORM);                                                                    \
    }

// For many narrow rows without a mean.
#define SEVERAL_NORM_KERNELS(NAME, PARAMETERS, NORM)                                                              \
    extern "C" __global__ void __launch_bounds__(128) NAME##_two(PARAMETERS, i64 shift) {                         \
        norm_some_rows<2>(rows, width, eps, shift, NORM);                                                         \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(128) NAME##_four(PARAMETERS, i64 shift) {                        \
        norm_some_rows<4>(rows, width, eps, shift, NORM);                                                         \
    }

// For wide rows of 2-byte elements: four float32 loads a thread would not fit into registers.
#define WIDE_NORM_KERNELS(NAME, PARAMETERS, NORM)                                                         \
    extern "C" __global__ void __launch_bounds__(256, 3) NAME##_block4(PARAMETERS) {                              \
        norm_block<4, false>(width, eps, NORM);                                                                   \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) NAME##_few4(PARAMETERS) {                                   \
        norm_block<4, true>(width, eps, NORM);                                                                    \
    }

// For every other row.
#define LONG_NORM_KERNELS(NAME, PARAMETERS, NORM)                                                                 \
    extern "C" __global__ void __launch_bounds__(256) NAME##_v8(PARAMETERS) { norm_long<8>(width, eps, NORM); }   \
    extern "C" __global__ void __launch_bounds__(256) NAME##_v1(PARAMETERS) { norm_long<1>(width, eps, NORM); }
