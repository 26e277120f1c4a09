// From logits to the most likely tokens: arg-max, probabilities, log-probabilities, the largest of them and ranks.
//
// The ladder:
// 1. A row over many blocks, 16-byte loads, four under way: arg-max in two launches (chunks, rows), probabilities and
//    their logarithms in three (maxima, sums, results); the row stays in the L2 cache between them.
// 2. The n largest without a sort: with at least n chunks the n-th largest of the chunks' maxima is a lower bound of the
//    n-th largest of all, so that one block a row reads those few chunks and orders the few that reach the bound by
//    counting. Where ties make them more than 4096, the n-th largest itself is found first. More than 128, or more than
//    there are chunks: every element counts all larger ones, V^2 comparisons over the whole GPU.
#include "selection.cuh"

// Arg-max: the code above the complement of the column, so that the larger key wins and the lower column of equals.
VT_FN u64 key_of(unsigned code, i64 column) { return (u64)code << 32 | (unsigned)~(unsigned)column; }

template <int V> VT_FN void argmax_chunks(i64 width, i64 chunks, i64 per, const float* logits, u64* keys) {
    __shared__ u64 room[32];
    const Chunk part = chunk_of(width, chunks, per);
    u64 best = 0;
    each_logit<V>(logits + part.row * width, part.begin, part.end, [&](float x, i64 at) {
        unsigned code = x == x ? code_of(x) : at == 0 ? CODE_NAN : CODE_MINUS_INF;
        u64 key = key_of(code, at);
        best = key > best ? key : best;
    });
    best = over_block(best, (u64)0, room, Larger());
    if (threadIdx.x == 0) keys[blockIdx.x] = best;
}

extern "C" __global__ void __launch_bounds__(256) argmax_rows(i64 chunks, const u64* keys, i64* ids) {
    __shared__ u64 room[32];
    u64 best = 0;
    for (i64 i = threadIdx.x; i < chunks; i += blockDim.x) {
        u64 key = keys[(i64)blockIdx.x * chunks + i];
        best = key > best ? key : best;
    }
    best = over_block(best, (u64)0, room, Larger());
    if (threadIdx.x == 0) ids[blockIdx.x] = (unsigned)~(unsigned)best;
}

template <int V>
VT_FN void probs(i64 width, i64 chunks, i64 per, const float* logits, const unsigned* maxima, const u64* sums, float* out) {
    const Chunk part = chunk_of(width, chunks, per);
    const Softmax row = row_softmax(maxima + part.row * chunks, sums + part.row * chunks, chunks);
    map_logits<V>(logits + part.row * width, out + part.row * width, part.begin, part.end,
                  [&](float x, i64) { return vt_exp(x - row.peak) / row.sum; });
}

template <int V>
VT_FN void logprobs(i64 width, i64 chunks, i64 per, const float* logits, const unsigned* maxima, const u64* sums, float* out) {
    const Chunk part = chunk_of(width, chunks, per);
    const Softmax row = row_softmax(maxima + part.row * chunks, sums + part.row * chunks, chunks);
    const float log_sum = vt_log(row.sum);
    map_logits<V>(logits + part.row * width, out + part.row * width, part.begin, part.end,
                  [&](float x, i64) { return ((x + 0.0f) - row.peak) - log_sum; });
}

// The chunks' maxima, and how many of each chunk are not below the row's chosen one.
template <int V>
VT_FN void gather_chunks(i64 width, i64 chunks, i64 per, const float* values, const i64* ids, unsigned* maxima, unsigned* reach) {
    __shared__ unsigned room[32];
    const Chunk part = chunk_of(width, chunks, per);
    const i64 id = ids[part.row];
    const float chosen = id >= 0 && id < width ? values[part.row * width + id] : VT_NAN;
    unsigned largest = 0, count = 0;
    each_logit<V>(values + part.row * width, part.begin, part.end, [&](float x, i64) {
        unsigned code = code_of(x);
        largest = code > largest ? code : largest;
        count += x >= chosen;
    });
    largest = over_block(largest, 0u, room, Larger());
    count = over_block(count, 0u, room, Sum());
    if (threadIdx.x == 0) {
        maxima[blockIdx.x] = largest;
        reach[blockIdx.x] = count;
    }
}

#define GATHER_CHUNKS 1024  // of a row, at most

struct Gathering {
    Selection s;
    unsigned maxima[GATHER_CHUNKS], bound;
    unsigned short qualified[GATHER_CHUNKS];
    unsigned many;
};

// Appends the elements of chunks whose maximum reaches `least` that reach it themselves.
VT_FN void gather_above(Gathering& g, const float* row, i64 width, i64 chunks, i64 per, unsigned least) {
    if (threadIdx.x == 0) g.s.listed = g.many = 0;
    __syncthreads();
    for (i64 c = threadIdx.x; c < chunks; c += blockDim.x)
        if (g.maxima[c] >= least) g.qualified[atomicAdd(&g.many, 1u)] = (unsigned short)c;
    __syncthreads();
    const i64 all = (i64)g.many * per;
    for (i64 i = threadIdx.x; i < all; i += blockDim.x) {
        i64 column = g.qualified[i / per] * per + i % per;
        if (column >= width) continue;
        unsigned code = code_of(row[column]);
        if (code < least) continue;
        unsigned slot = atomicAdd(&g.s.listed, 1u);
        if (slot < ROOM) g.s.list[slot] = key_of(code, column);
    }
    __syncthreads();
}

// The list becomes what the n largest are among: all above the n-th largest, and the first columns that equal it.
VT_FN void gather_ties(Gathering& g, const float* row, i64 width, i64 chunks, i64 per, i64 n) {
    const Source from = {g.s.list, -1, row, width};
    Below below = {0, 0};
    unsigned count = 0;
    const unsigned nth = narrow(
        g.s, from, 0u, CODE_NAN, below, count, false, [](unsigned code, unsigned) { return code; },
        [](unsigned, unsigned) { return true; }, [](unsigned) { return (u64)0; },
        [&](Below b) { return (i64)b.count > width - n; });
    __syncthreads();
    if (nth != CODE_NAN) gather_above(g, row, width, chunks, per, nth + 1);
    else if (threadIdx.x == 0) g.s.listed = 0;
    for (i64 first = 0; first < width; first += blockDim.x) {
        __syncthreads();
        if (g.s.listed >= n) break;
        __syncthreads();
        i64 column = first + threadIdx.x;
        if (column < width && code_of(row[column]) == nth) g.s.list[atomicAdd(&g.s.listed, 1u)] = key_of(nth, column);
    }
    __syncthreads();
}

// Column 0 and the rank; with `largest` the n others too. A bad id gives NaN and rank 0.
extern "C" __global__ void __launch_bounds__(512) gather_rows(
    i64 width, i64 chunks, i64 per, i64 n, i64 largest, const float* values, const i64* ids, const unsigned* maxima,
    const unsigned* reach, int* out_ids, float* out_values, i64* ranks) {
    __shared__ Gathering g;
    __shared__ unsigned room[32];
    const i64 row = blockIdx.x, id = ids[row];
    const float* own = values + row * width;
    unsigned count = 0;
    for (i64 i = threadIdx.x; i < chunks; i += blockDim.x) count += reach[row * chunks + i];
    count = over_block(count, 0u, room, Sum());
    if (threadIdx.x == 0) {
        out_ids[row * (n + 1)] = (int)id;
        out_values[row * (n + 1)] = id >= 0 && id < width ? own[id] : VT_NAN;
        ranks[row] = count;
    }
    if (!largest) return;
    for (i64 i = threadIdx.x; i < chunks; i += blockDim.x) g.maxima[i] = maxima[row * chunks + i];
    __syncthreads();
    for (i64 i = threadIdx.x; i < chunks; i += blockDim.x) {  // the n-th of the maxima, the first of equals first
        unsigned mine = g.maxima[i], above = 0;
        for (i64 j = 0; j < chunks; ++j) above += g.maxima[j] > mine || (g.maxima[j] == mine && j < i);
        if (above == (unsigned)n - 1u) g.bound = mine;
    }
    __syncthreads();
    gather_above(g, own, width, chunks, per, g.bound);
    if (g.s.listed > ROOM) gather_ties(g, own, width, chunks, per, n);
    const unsigned listed = g.s.listed;
    for (unsigned i = threadIdx.x; i < listed; i += blockDim.x) {
        u64 key = g.s.list[i];
        unsigned place = 0;
        for (unsigned j = 0; j < listed; ++j) place += g.s.list[j] > key;
        if (place >= (unsigned)n) continue;
        unsigned column = (unsigned)~(unsigned)key;
        out_ids[row * (n + 1) + 1 + place] = (int)column;
        out_values[row * (n + 1) + 1 + place] = own[column];
    }
}

// Every element counts those before it in descending order, a tile at a time; the first n go where that puts them.
extern "C" __global__ void __launch_bounds__(256) gather_all(i64 width, i64 chunks, i64 n, const float* values,
                                                             int* out_ids, float* out_values) {
    __shared__ u64 tile[1024];
    const Chunk part = chunk_of(width, chunks, 256);
    const float* own = values + part.row * width;
    const i64 column = part.begin + threadIdx.x;
    const u64 key = column < width ? key_of(code_of(own[column]), column) : ~(u64)0;
    i64 place = 0;
    for (i64 first = 0; first < width; first += 1024) {
        const int size = (int)(width - first < 1024 ? width - first : 1024);
        __syncthreads();
        for (int i = threadIdx.x; i < size; i += blockDim.x) tile[i] = key_of(code_of(own[first + i]), first + i);
        __syncthreads();
        for (int i = 0; i < size; ++i) place += tile[i] > key;
    }
    if (column >= width || place >= n) return;
    out_ids[part.row * (n + 1) + 1 + place] = (int)column;
    out_values[part.row * (n + 1) + 1 + place] = own[column];
}

// The lowest row whose id is outside the vocabulary.
extern "C" __global__ void gather_fault(i64 rows, const i64* ids, i64 width, i64* first_bad) {
    i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows && (ids[row] < 0 || ids[row] >= width)) atomicMin(first_bad, row);
}

#define SAMPLING(V)                                                                                               \
    SOFTMAX_KERNELS(sampling, V)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) argmax_chunks_v##V(                                         \
        i64 width, i64 chunks, i64 per, const float* logits, u64* keys) {                                         \
        argmax_chunks<V>(width, chunks, per, logits, keys);                                                       \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) probs_v##V(                                                 \
        i64 width, i64 chunks, i64 per, const float* logits, const unsigned* maxima, const u64* sums,             \
        float* out) {                                                                                             \
        probs<V>(width, chunks, per, logits, maxima, sums, out);                                                  \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) logprobs_v##V(                                              \
        i64 width, i64 chunks, i64 per, const float* logits, const unsigned* maxima, const u64* sums,             \
        float* out) {                                                                                             \
        logprobs<V>(width, chunks, per, logits, maxima, sums, out);                                               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) gather_chunks_v##V(                                         \
        i64 width, i64 chunks, i64 per, const float* values, const i64* ids, unsigned* maxima, unsigned* reach) { \
        gather_chunks<V>(width, chunks, per, values, ids, maxima, reach);                                         \
    }
SAMPLING(4)
SAMPLING(1)
