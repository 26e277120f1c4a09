// One row of a vocabulary over many blocks. A row is cut into `chunks` of `per` columns (a multiple of 4), block b works
// on chunk b % chunks of row b / chunks, and whatever blocks leave for each other are maxima and integer sums, which no
// cut of the row can change. A later launch reads them; nothing waits inside a kernel and nothing has to be reset.
#pragma once
#include "storage.cuh"

typedef unsigned long long u64;

#define VOCAB_LANES 0xffffffffu
#define DEPTH 4  // loads of a thread under way together, where many blocks share a row

// Codes ascend with the value; -0 is +0, every NaN is the same and above +inf (oracle/logits.py: ordered_codes).
#define CODE_NAN 0xffffffffu
#define CODE_INF 0xff800000u
#define CODE_LARGEST 0xff7fffffu
#define CODE_MINUS_INF 0x007fffffu

VT_FN unsigned code_of(float x) {
    unsigned bits = (unsigned)vt_bits(x);
    if (x != x) return CODE_NAN;
    if (x == 0.0f) return 0x80000000u;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
VT_FN float value_of(unsigned code) { return vt_float((int)(code & 0x80000000u ? code & 0x7fffffffu : ~code)); }

VT_FN bool is_finite(unsigned code) { return code > CODE_MINUS_INF && code < CODE_INF; }

// Weights of a softmax as multiples of 2^-42 (oracle/fixed_point.py).
VT_FN u64 units(float weight) {
    i64 n = (i64)llrintf(weight * 0x1p42f);
    return weight > 0.0f ? (u64)(n > 0 ? n : 1) : 0;
}
VT_FN float sum_of(u64 units) { return (float)units * 0x1p-42f; }

// join over a warp, then over a block of whole warps; `room` is shared memory for one value a warp, free again when the
// call returns. Every thread gets the result.
template <class T, class F> VT_FN T over_warp(T x, F&& join) {
#pragma unroll
    for (int m = 16; m >= 1; m >>= 1) x = join(x, __shfl_xor_sync(VOCAB_LANES, x, m));
    return x;
}

template <class T, class F> VT_FN T over_block(T x, T none, T* room, F&& join) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    x = over_warp(x, join);
    if (lane == 0) room[warp] = x;
    __syncthreads();
    x = over_warp(lane < (int)(blockDim.x >> 5) ? room[lane] : none, join);
    __syncthreads();
    return x;
}

struct Larger {
    template <class T> VT_MEMBER T operator()(T a, T b) const { return a > b ? a : b; }
};
struct Sum {
    template <class T> VT_MEMBER T operator()(T a, T b) const { return a + b; }
};

// This block's part of a row.
struct Chunk {
    i64 row, begin, end;
};

VT_FN Chunk chunk_of(i64 width, i64 chunks, i64 per) {
    i64 row = blockIdx.x, chunk = 0;
    if (chunks > 1) {
        row = blockIdx.x / (unsigned)chunks;
        chunk = blockIdx.x - (unsigned)row * (unsigned)chunks;
    }
    i64 begin = chunk * per;
    return {row, begin, begin + per < width ? begin + per : width};
}

template <int V> VT_FN void load_logits(float (&x)[V], const float* at) {
    if constexpr (V == 4) {
        uint4 w = *(const uint4*)at;
        x[0] = vt_float((int)w.x);
        x[1] = vt_float((int)w.y);
        x[2] = vt_float((int)w.z);
        x[3] = vt_float((int)w.w);
    } else {
        x[0] = *at;
    }
}

template <int V> VT_FN void store_logits(float* at, const float (&x)[V]) {
    if constexpr (V == 4)
        *(uint4*)at = {(unsigned)vt_bits(x[0]), (unsigned)vt_bits(x[1]), (unsigned)vt_bits(x[2]), (unsigned)vt_bits(x[3])};
    else
        *at = x[0];
}

// f(x, column) for V columns at a time of [begin, end), by the whole block; V = 4 wants begin, end and the address of
// the row to be multiples of four elements. LOADS: how many of a thread are under way together.
template <int V, int LOADS = DEPTH, class F> VT_FN void each_group(const float* row, i64 begin, i64 end, F&& f) {
    const i64 step = (i64)blockDim.x * V;
    for (i64 at = begin + (i64)threadIdx.x * V; at < end; at += step * LOADS) {
        float x[LOADS][V];
#pragma unroll
        for (int d = 0; d < LOADS; ++d)
            if (at + d * step < end) load_logits(x[d], row + at + d * step);
#pragma unroll
        for (int d = 0; d < LOADS; ++d)
            if (at + d * step < end) f(x[d], at + d * step);
    }
}

// f(x, column) for every column of [begin, end).
template <int V, int LOADS = DEPTH, class F>
VT_FN void each_logit(const float* row, i64 begin, i64 end, F&& f) {
    each_group<V, LOADS>(row, begin, end, [&](const float(&x)[V], i64 at) {
#pragma unroll
        for (int j = 0; j < V; ++j) f(x[j], at + j);
    });
}

// out = f(x, column) for every column of [begin, end).
template <int V, class F> VT_FN void map_logits(const float* row, float* out, i64 begin, i64 end, F&& f) {
    each_group<V>(row, begin, end, [&](float(&x)[V], i64 at) {
#pragma unroll
        for (int j = 0; j < V; ++j) x[j] = f(x[j], at + j);
        store_logits(out + at, x);
    });
}

// maxima[row, chunk] = the largest code of this block's chunk.
template <int V> VT_FN void chunk_maximum(i64 width, i64 chunks, i64 per, const float* logits, unsigned* maxima) {
    __shared__ unsigned room[32];
    Chunk part = chunk_of(width, chunks, per);
    unsigned largest = 0;
    each_logit<V>(logits + part.row * width, part.begin, part.end, [&](float x, i64) {
        unsigned code = code_of(x);
        largest = code > largest ? code : largest;
    });
    largest = over_block(largest, 0u, room, Larger());
    if (threadIdx.x == 0) maxima[blockIdx.x] = largest;
}

// The largest code of a row out of its chunks' maxima.
VT_FN unsigned row_maximum(const unsigned* maxima, i64 chunks) {
    __shared__ unsigned room[32];
    unsigned largest = 0;
    for (i64 i = threadIdx.x; i < chunks; i += blockDim.x) largest = maxima[i] > largest ? maxima[i] : largest;
    return over_block(largest, 0u, room, Larger());
}

// sums[row, chunk] = the units of exp(l - max) of this block's chunk; 0 where the maximum is infinite or NaN.
template <int V>
VT_FN void chunk_sum(i64 width, i64 chunks, i64 per, const float* logits, const unsigned* maxima, u64* sums) {
    __shared__ u64 room[32];
    Chunk part = chunk_of(width, chunks, per);
    unsigned top = row_maximum(maxima + part.row * chunks, chunks);
    float peak = value_of(top);
    u64 total = 0;
    if (is_finite(top))
        each_logit<V>(logits + part.row * width, part.begin, part.end,
                      [&](float x, i64) { total += units(vt_exp(x - peak)); });
    total = over_block(total, (u64)0, room, Sum());
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// max and sum of a row's softmax. Without a finite maximum the sum is 0, and whatever comes of the row is NaN.
struct Softmax {
    float peak, sum;
};

VT_FN Softmax row_softmax(const unsigned* maxima, const u64* sums, i64 chunks) {
    __shared__ u64 room[32];
    unsigned top = row_maximum(maxima, chunks);
    u64 total = 0;
    for (i64 i = threadIdx.x; i < chunks; i += blockDim.x) total += sums[i];
    total = over_block(total, (u64)0, room, Sum());
    return {value_of(top), sum_of(total)};
}

// The two launches that come before whatever needs a softmax; families prefix their names.
#define SOFTMAX_KERNELS(FAMILY, V)                                                                                \
    extern "C" __global__ void __launch_bounds__(256) FAMILY##_maximum_v##V(                                      \
        i64 width, i64 chunks, i64 per, const float* logits, unsigned* maxima) {                                  \
        chunk_maximum<V>(width, chunks, per, logits, maxima);                                                     \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) FAMILY##_sum_v##V(                                          \
        i64 width, i64 chunks, i64 per, const float* logits, const unsigned* maxima, u64* sums) {                 \
        chunk_sum<V>(width, chunks, per, logits, maxima, sums);                                                   \
    }
