// The element of a row at which a monotone condition starts to hold, found by one block without sorting: histograms of
// 256 bins over an interval of codes or columns, the bin that holds it, histograms of that bin ... until one is left.
#pragma once
#include "vocab.cuh"

#define LEVEL 256
#define ROOM 4096  // candidates a block keeps in shared memory; more are looked up in the row again at each level

// How many elements lie below something, and the units of their weights.
struct Below {
    unsigned count;
    u64 mass;
};

VT_FN Below operator+(Below a, Below b) { return {a.count + b.count, a.mass + b.mass}; }

struct Selection {
    u64 list[ROOM];  // code above column
    unsigned count[LEVEL], low[LEVEL], high[LEVEL];
    Below warps[33], before;
    unsigned chosen, at, listed;
};

VT_FN Below warp_before(Below mine, Below& all) {
    Below before = {0, 0};
    all = mine;
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
        Below other = {__shfl_xor_sync(VOCAB_LANES, all.count, m), __shfl_xor_sync(VOCAB_LANES, all.mass, m)};
        if (threadIdx.x & m) before = before + other;
        all = all + other;
    }
    return before;
}

// The sum over all threads of lower number, and over the block; `warps` is in use until the next barrier.
VT_FN Below block_before(Below mine, Below* warps, Below& all) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    Below before = warp_before(mine, all);
    if (lane == 0) warps[warp] = all;
    __syncthreads();
    if (warp == 0) {
        Below none = {0, 0};
        Below sum = warp_before(lane < (int)(blockDim.x >> 5) ? warps[lane] : none, all);
        warps[lane] = sum;
        if (lane == 0) warps[32] = all;
    }
    __syncthreads();
    all = warps[32];
    return warps[warp] + before;
}

// Shared memory has no fast 64-bit sum: two of 32, and whoever overflows the lower one carries.
VT_FN void add_units(unsigned* low, unsigned* high, u64 n) {
    unsigned small = (unsigned)n, large = (unsigned)(n >> 32);
    unsigned old = atomicAdd(low, small);
    if (old + small < old) ++large;
    if (large) atomicAdd(high, large);
}

// The elements to look at: `listed` of shared memory, or all of a row for listed < 0.
struct Source {
    const u64* list;
    int listed;
    const float* row;
    i64 width;

    template <class F> VT_MEMBER void each(F&& f) const {
        if (listed < 0)
            each_logit<1>(row, 0, width, [&](float x, i64 at) { f(code_of(x), (unsigned)at); });
        else
            for (int i = threadIdx.x; i < listed; i += blockDim.x) f((unsigned)(list[i] >> 32), (unsigned)list[i]);
    }
};

// The least and largest value of the elements that are inside, and how many there are.
struct Extent {
    unsigned least, most, count;
};

template <class Value, class Inside> VT_FN Extent extent(const Source& from, Value&& value, Inside&& inside) {
    __shared__ unsigned room[32];
    unsigned least = 0xffffffffu, most = 0, count = 0;
    from.each([&](unsigned code, unsigned column) {
        if (!inside(code, column)) return;
        unsigned v = value(code, column);
        least = v < least ? v : least;
        most = v > most ? v : most;
        ++count;
    });
    least = ~over_block(~least, 0u, room, Larger());
    most = over_block(most, 0u, room, Larger());
    return {least, most, over_block(count, 0u, room, Sum())};
}

// The value in [least, most] of the first element, in ascending order, at which `past` holds of what lies below it and
// itself. `below`: what lies below `least`, and in the end below that value. `count`: elements of that value. `weight`:
// the units of an element, asked for where masses matter.
template <class Value, class Inside, class Weight, class Past>
VT_FN unsigned narrow(Selection& s, const Source& from, unsigned least, unsigned most, Below& below, unsigned& count,
                      bool masses, Value&& value, Inside&& inside, Weight&& weight, Past&& past) {
    while (least < most) {
        int shift = 0;
        while ((most - least) >> shift >= LEVEL) ++shift;
        for (int i = threadIdx.x; i < LEVEL; i += blockDim.x) s.count[i] = s.low[i] = s.high[i] = 0;
        __syncthreads();
        from.each([&](unsigned code, unsigned column) {
            if (!inside(code, column)) return;
            unsigned v = value(code, column);
            if (v < least || v > most) return;
            unsigned at = (v - least) >> shift;
            atomicAdd(&s.count[at], 1u);
            if (masses) add_units(&s.low[at], &s.high[at], weight(code));
        });
        __syncthreads();
        Below mine = {0, 0}, all;
        if (threadIdx.x < LEVEL)
            mine = {s.count[threadIdx.x], (u64)s.high[threadIdx.x] << 32 | s.low[threadIdx.x]};
        Below first = below + block_before(mine, s.warps, all);
        if (threadIdx.x < LEVEL && !past(first) && past(first + mine)) {
            s.chosen = threadIdx.x;
            s.before = first;
            s.at = mine.count;
        }
        __syncthreads();
        least += s.chosen << shift;
        unsigned last = least + ((1u << shift) - 1u);
        most = last < most ? last : most;
        below = s.before;
        count = s.at;
    }
    return least;
}
