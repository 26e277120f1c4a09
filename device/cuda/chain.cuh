// What generated kernels stand on (device/fusion/emit.py): how the threads of a grid share rows. A frame says which of
// its row a thread holds, TURNS times V neighbours in registers, and reduces over the row. Every thread of a warp or
// block takes part in the reductions, with or without a place inside.
//
// The ladder:
// 1. *_long: a block of 256 a row of any width and address, an element at a time; what it needs again it computes again.
// 2. *_rows: rows of up to 256, several to a warp. *_block1, *_block4: a block a row of up to 2048 or 8192, read once,
//    everything between its loads and its stores in registers.
// 3. block4 reads what all rows share when it needs it: held from the start it would cost registers, and with them rows
//    under way. *_few4, for few rows: it is sent for with the row, whose latency hides its own.
//    *_half5, for many rows of 2048 to 5120 of which more is found than a sum: 128 threads find it in less time than 256.
// 4. *_v8, *_v1: chains without a reduction over the row, on a grid of rows and columns.
#pragma once
#include "bf16_quotients.cuh"
#include "e4m3.cuh"
#include "silu_guess.cuh"
#include "rows.cuh"
#include "tree.cuh"

#define EACH(index, count) _Pragma("unroll") for (int index = 0; index < count; ++index)

// The only element of an operand, or the one of a row or group of a result.
VT_FN float load_one(const void* from, int kind) {
    float x[1];
    load(x, from, 0, kind);
    return x[0];
}
VT_FN void store_one(void* to, i64 at, float value, int kind) {
    const float x[1] = {value};
    store(to, at, x, kind);
}

VT_FN float max_of_lanes(float x, int lanes) {
    for (int m = lanes >> 1; m >= 1; m >>= 1) x = vt_maximum(x, other_lane(x, m));
    return x;
}

// As tree_of_block.
VT_FN float max_of_block(float x, float* warps) {
    x = max_of_lanes(x, 32);
    int count = blockDim.x >> 5;
    if (count == 1) return x;
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = x;
    __syncthreads();
    x = warps[0];
    for (int w = 1; w < count; ++w) x = vt_maximum(x, warps[w]);
    return x;
}

// The largest |x| that is a number; numbers from 0 on order like their bits.
template <int V> VT_FN unsigned size_of(const float (&x)[V], unsigned top, bool inside) {
    return inside ? larger(top, largest_of(x, false)) : top;
}
template <int LANES, int V> VT_FN float group_size(const float (&x)[V], bool inside) {
    return vt_float((int)largest_of_lanes(size_of(x, 0u, inside), LANES));
}

// Codes of e4m3 see no difference to x / scale (fp8_scales.cuh); bf16_quotients: of bfloat16 x and a scale that is no less
// than some usual number.
template <int V> VT_FN void quotients(float (&q)[V], const float (&x)[V], float scale) {
    Divisor(scale, largest_of(x, false), false).divide(q, x);
}
template <int V> VT_FN void bf16_quotients(float (&q)[V], const float (&x)[V], float scale) {
    Quotients(scale).divide(q, x);
}

// gate_products of bfloat16 results (silu_guess.cuh), one by one as ever.
template <bool SILU> VT_FN void gated(float (&out)[8], const float (&g)[8], const float (&u)[8], int act_kind) {
    float least = VT_INF;
    EACH(j, 8) least = fminf(least, g[j]);
    guessed_products<SILU>(out, g, u, least, act_kind == BF16);
}
template <bool SILU> VT_FN void gated(float (&out)[1], const float (&g)[1], const float (&u)[1], int act_kind) {
    gate_products<SILU>(out, g, u, act_kind, BF16);
}

template <int V> VT_FN float max_of(const float (&x)[V], float start, bool inside) {
    if (inside)
        EACH(j, V) start = vt_maximum(start, x[j]);
    return start;
}

// Over a group of 8 * LANES neighbours, which lanes of one warp hold: to each of them.
template <int LANES> VT_FN float group_max(const float (&x)[8], float start, bool inside) {
    return max_of_lanes(max_of(x, start, inside), LANES);
}

template <int V_, int TURNS_> struct MapFrame {
    static constexpr int V = V_, TURNS = TURNS_;
    static constexpr bool EARLY = true;
    i64 row;
    Place places[TURNS];
    unsigned across;

    VT_MEMBER MapFrame(i64 rows, i64 width, i64 chunks) : across((unsigned)chunks) {
        EACH(t, TURNS) places[t] = place<V>(rows, width, chunks, TURNS, t);
        row = places[0].row;
    }
    VT_MEMBER bool inside(int t) const { return places[t].inside; }
    VT_MEMBER i64 at(int t) const { return places[t].column; }
    VT_MEMBER i64 blocks(i64 rows) const { return (rows + blockDim.y - 1) / blockDim.y * across; }
};

// This thread's number among all of the grid, and theirs.
VT_FN i64 grid_thread() { return ((i64)blockIdx.x * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; }
VT_FN i64 grid_threads(i64 blocks) { return blocks * blockDim.x * blockDim.y; }

struct LanesFrame {
    static constexpr int V = 8, TURNS = 1;
    static constexpr bool EARLY = true;
    i64 row;
    int first, lanes;
    bool present;

    VT_MEMBER LanesFrame(i64 rows, i64 width, int shift) : lanes(1 << shift) {
        row = (i64)blockIdx.x * (blockDim.x >> shift) + (threadIdx.x >> shift);
        first = (threadIdx.x & (lanes - 1)) * 8;
        present = row < rows && first < width;
    }
    VT_MEMBER bool inside(int) const { return present; }
    VT_MEMBER i64 at(int) const { return first; }
    VT_MEMBER float sum(const float (&x)[1][8], int) const {
        float partial = 0.0f;
        if (present) add_terms(partial, x[0]);
        return tree_of_lanes(partial, lanes);
    }
    VT_MEMBER float max(const float (&x)[1][8], float start, int) const {
        return max_of_lanes(max_of(x[0], start, present), lanes);
    }
    VT_MEMBER float size(const float (&x)[1][8], int) const {
        return vt_float((int)largest_of_lanes(size_of(x[0], 0u, present), lanes));
    }
    VT_MEMBER i64 blocks(i64 rows) const {
        const int each = (int)(blockDim.x / (unsigned)lanes);
        return (rows + each - 1) / each;
    }
};

// A block of 128 a row: a thread holds two of the tree's partials, of the even turns and of the odd ones.
template <int TURNS_, bool EARLY_> struct HalfFrame {
    static constexpr int V = 8, TURNS = TURNS_;
    static constexpr bool EARLY = EARLY_;
    i64 row;
    int width, first;
    float* warps;  // 8 floats for each reduction of the kernel

    VT_MEMBER HalfFrame(i64 width, float* warps)
        : row(blockIdx.x), width((int)width), first(threadIdx.x * 8), warps(warps) {}
    VT_MEMBER bool inside(int t) const { return at(t) < width; }
    VT_MEMBER i64 at(int t) const { return first + t * (TREE_SPAN / 2); }
    VT_MEMBER float sum(const float (&x)[TURNS][8], int number) const {
        float partials[2] = {}, s[8], *warp = warps + 8 * number;
        EACH(t, TURNS)
            if (inside(t)) add_terms(partials[t & 1], x[t]);
        EACH(h, 2) {
            partials[h] = tree_of_lanes(partials[h], 32);
            if ((threadIdx.x & 31) == 0) warp[4 * h + (threadIdx.x >> 5)] = partials[h];
        }
        __syncthreads();
        EACH(w, 8) s[w] = warp[w];
        return tree_of_eight(s);
    }
    VT_MEMBER float max(const float (&x)[TURNS][8], float start, int number) const {
        EACH(t, TURNS) start = max_of(x[t], start, inside(t));
        return max_of_block(start, warps + 8 * number);
    }
    VT_MEMBER float size(const float (&x)[TURNS][8], int number) const {
        unsigned top = 0;
        EACH(t, TURNS) top = size_of(x[t], top, inside(t));
        return vt_float((int)largest_of_block(top, (unsigned*)warps + 8 * number));
    }
    VT_MEMBER i64 blocks(i64 rows) const { return rows; }
};

template <int TURNS_, bool EARLY_> struct BlockFrame {
    static constexpr int V = 8, TURNS = TURNS_;
    static constexpr bool EARLY = EARLY_;
    i64 row;
    int width, first;
    float* warps;  // 8 floats for each reduction of the kernel

    VT_MEMBER BlockFrame(i64 width, float* warps)
        : row(blockIdx.x), width((int)width), first(threadIdx.x * 8), warps(warps) {}
    VT_MEMBER bool inside(int t) const { return at(t) < width; }
    VT_MEMBER i64 at(int t) const { return first + t * TREE_SPAN; }
    VT_MEMBER float sum(const float (&x)[TURNS][8], int number) const {
        float partial = 0.0f;
        EACH(t, TURNS)
            if (inside(t)) add_terms(partial, x[t]);
        return tree_of_block(partial, warps + 8 * number);
    }
    VT_MEMBER float max(const float (&x)[TURNS][8], float start, int number) const {
        EACH(t, TURNS) start = max_of(x[t], start, inside(t));
        return max_of_block(start, warps + 8 * number);
    }
    VT_MEMBER float size(const float (&x)[TURNS][8], int number) const {
        unsigned top = 0;
        EACH(t, TURNS) top = size_of(x[t], top, inside(t));
        return vt_float((int)largest_of_block(top, (unsigned*)warps + 8 * number));
    }
    VT_MEMBER i64 blocks(i64 rows) const { return rows; }
};

// work(at) for each of a thread's elements of a row of any width, in the order of its partial sum.
template <class W> VT_FN void each_of_long(i64 width, W&& work) {
    for (i64 base = threadIdx.x * 8; base < width; base += TREE_SPAN)
        for (i64 at = base; at < base + 8 && at < width; ++at) work(at);
}
