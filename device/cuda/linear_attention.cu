// Lightning attention: S = exp(-slope) S + k v^T; o = q S, one token a row or along sequences. States have rows of keys.
//
// A sum runs over the rows of a column, in the order of strips.cuh: lane t of eight has the keys 4t ... 4t + 3, then the
// four 32 further on. Here the lanes are threads of several warps, so that a warp reads along rows.
//
// The ladder:
// 1. lightning_v1: a column and lane a thread. 2. lightning_v4: four columns, 16-byte accesses. Both have up to 16
//    loads under way before the first store, so that a head of 128 is one round trip, and keys and queries come with them.
// 3. tokens_4, tokens_8: a column and lane a thread, up to 16 or 32 keys of a state in its registers along a sequence.
// 3a. tokens_4_young, tokens_8_young: vLLM's blocks, which read the state before them a decay too young.
#include "strips.cuh"

#define COLUMNS 8  // groups of columns of a block, device/linear_attention.py
#define TURNS 4    // of 32 keys, under way at once

VT_FN void columns_of(float (&x)[4], const float* base, i64 at) { widen_four(x, fetch_four(base, at, F32), F32); }
VT_FN void columns_of(float (&x)[1], const float* base, i64 at) { x[0] = base[at]; }
VT_FN void keep_columns(float* base, i64 at, const float (&x)[4]) { store_four(base, at, x, F32); }
VT_FN void keep_columns(float* base, i64 at, const float (&x)[1]) { base[at] = x[0]; }

// Four neighbours of q or k from `at` on, as many as there are before `end`; whole fours where columns come in fours.
template <int V> VT_FN void neighbours(float (&x)[4], const void* base, i64 at, int count, int kind) {
    if (V == 4) return widen_four(x, fetch_four(base, at, kind), kind);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = j < count ? load_one(base, at + j, kind) : 0.0f;
}

// The tree over a column's lanes, `step` apart in shared memory.
VT_FN float tree_of_column(const float* partial, int step, int lanes) {
    float p[STRIP_LANES];
#pragma unroll
    for (int t = 0; t < STRIP_LANES; ++t) p[t] = partial[t * step];
#pragma unroll
    for (int m = STRIP_LANES / 2; m >= 1; m >>= 1)
        if (m < lanes) {
#pragma unroll
            for (int t = 0; t < m; ++t) p[t] += p[t + m];
        }
    return p[0];
}

template <int V>
VT_FN void lightning(const void* q, const void* k, const void* v, i64 kind, float* state, i64 slots, const float* slope,
                     const int* state_idx, i64 heads, i64 width, i64 tiles, i64 lanes, void* out) {
    __shared__ float partial[STRIP_LANES][COLUMNS * V];
    const unsigned unit = blockIdx.x / (unsigned)tiles, row = unit / (unsigned)heads, head = unit - row * (unsigned)heads;
    const int group = threadIdx.x, lane = threadIdx.y, dtype = (int)kind, size = (int)width;
    const int column = ((int)(blockIdx.x - unit * (unsigned)tiles) * COLUMNS + group) * V;
    const i64 vector = unit * width;
    const bool inside = column < size;  // the others still come to the barrier
    i64 slot = state_idx == nullptr ? row : state_idx[row];
    if (slot >= slots) slot = -1;
    float sums[V] = {}, own[V], S[TURNS][4][V];
    if (inside && slot >= 0) {
        float* base = state + (slot * heads + head) * width * width + column;
        const float keep = vt_exp(-slope[head]);
#pragma unroll
        for (int i = 0; i < V; ++i) own[i] = load_one(v, vector + column + i, dtype);
        const int end = (size + STRIP_TURN - 1) / STRIP_TURN * STRIP_TURN;
        for (int begin = 4 * lane; begin < end; begin += TURNS * STRIP_TURN) {
            float keys[TURNS][4], queries[TURNS][4];
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn) {
                const int first = begin + turn * STRIP_TURN;
                if (first >= size) continue;
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (first + j < size) columns_of(S[turn][j], base, (i64)(first + j) * width);
                neighbours<V>(keys[turn], k, vector + first, size - first, dtype);
                neighbours<V>(queries[turn], q, vector + first, size - first, dtype);
            }
#pragma unroll
            for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int at = begin + turn * STRIP_TURN + j;
                    if (at < size) {
                        const float key = keys[turn][j], query = queries[turn][j];
#pragma unroll
                        for (int i = 0; i < V; ++i) {
                            S[turn][j][i] = S[turn][j][i] * keep + through(key * own[i], dtype);
                            sums[i] = vt_fma(S[turn][j][i], query, sums[i]);
                        }
                        keep_columns(base, (i64)at * width, S[turn][j]);
                    } else if (at < end) {
#pragma unroll
                        for (int i = 0; i < V; ++i) sums[i] += 0.0f;
                    }
                }
        }
    }
#pragma unroll
    for (int i = 0; i < V; ++i) partial[lane][group * V + i] = sums[i];
    __syncthreads();
    if (lane != 0 || !inside) return;
    for (int i = 0; i < V; ++i)
        store_one(out, vector + column + i, tree_of_column(partial[0] + group * V + i, COLUMNS * V, (int)lanes), dtype);
}

#define LIGHTNING(V)                                                                                              \
    extern "C" __global__ void __launch_bounds__(COLUMNS * STRIP_LANES) lightning_v##V(                           \
        const void *q, const void *k, const void *v, i64 kind, float *state, i64 slots, const float *slope,       \
        const int *state_idx, i64 heads, i64 width, i64 tiles, i64 lanes, void *out) {                            \
        lightning<V>(q, k, v, kind, state, slots, slope, state_idx, heads, width, tiles, lanes, out);             \
    }
LIGHTNING(4)
LIGHTNING(1)

#define ABREAST 32  // columns of a block, device/linear_attention.py
#define BLOCK 256   // tokens between two states that vLLM's blocks read

// YOUNG: token i of a block reads what was before it without this step's decay.
template <int HELD, bool YOUNG>
VT_FN void lightning_tokens(const void* q, const void* k, const void* v, i64 kind, float* state, const float* slope,
                            const int* starts, i64 tokens, i64 heads, i64 width, i64 tiles, i64 lanes, void* out) {
    __shared__ float partial[2][STRIP_LANES][ABREAST];
    const i64 unit = blockIdx.x / tiles, n = unit / heads, head = unit - n * heads;
    const int lane = threadIdx.y, dtype = (int)kind, size = (int)width, group = threadIdx.x;
    const int column = (int)(blockIdx.x - unit * tiles) * ABREAST + group;
    const bool inside = column < size;  // the others still come to the barriers
    const i64 begin = starts[n] < 0 ? 0 : starts[n], end = starts[n + 1] < tokens ? starts[n + 1] : tokens;
    const int turns = (size + STRIP_TURN - 1) / STRIP_TURN;
    float S[HELD][4], before[HELD][4];
    float* base = state + unit * width * width + column;
    const float keep = vt_exp(-slope[head]);
#pragma unroll
    for (int turn = 0; turn < HELD; ++turn)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = turn * STRIP_TURN + 4 * lane + j;
            S[turn][j] = at < size && inside ? base[(i64)at * width] : 0.0f;
            before[turn][j] = S[turn][j];
        }
    for (i64 token = begin; token < end; ++token) {
        const i64 vector = (token * heads + head) * width;
        const float own = inside ? load_one(v, vector + column, dtype) : 0.0f;
        const bool last = (token - begin) % BLOCK == BLOCK - 1;
        float sum = 0.0f;
#pragma unroll
        for (int turn = 0; turn < HELD; ++turn) {
            if (turn >= turns) continue;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = turn * STRIP_TURN + 4 * lane + j;
                if (at >= size) {
                    sum += 0.0f;
                    continue;
                }
                S[turn][j] = S[turn][j] * keep + load_one(k, vector + at, dtype) * own;
                float seen = S[turn][j];
                if (YOUNG) {
                    const float faded = before[turn][j] * keep;
                    seen += before[turn][j] - faded;
                    before[turn][j] = last ? S[turn][j] : faded;
                }
                sum = vt_fma(seen, load_one(q, vector + at, dtype), sum);
            }
        }
        float(&sums)[STRIP_LANES][ABREAST] = partial[(token - begin) & 1];
        sums[lane][group] = sum;
        __syncthreads();
        if (lane == 0 && inside) store_one(out, vector + column, tree_of_column(sums[0] + group, ABREAST, (int)lanes), dtype);
    }
    if (begin >= end || !inside) return;
#pragma unroll
    for (int turn = 0; turn < HELD; ++turn)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = turn * STRIP_TURN + 4 * lane + j;
            if (at < size) base[(i64)at * width] = S[turn][j];
        }
}

#define LIGHTNING_TOKENS(NAME, HELD, YOUNG)                                                                       \
    extern "C" __global__ void __launch_bounds__(ABREAST * STRIP_LANES, 1) NAME(                                  \
        const void *q, const void *k, const void *v, i64 kind, float *state, const float *slope,                  \
        const int *starts, i64 tokens, i64 heads, i64 width, i64 tiles, i64 lanes, void *out) {                   \
        lightning_tokens<HELD, YOUNG>(q, k, v, kind, state, slope, starts, tokens, heads, width, tiles, lanes,    \
                                      out);                                                                       \
    }
LIGHTNING_TOKENS(tokens_4, 4, false)
LIGHTNING_TOKENS(tokens_4_young, 4, true)
LIGHTNING_TOKENS(tokens_8, 8, false)
LIGHTNING_TOKENS(tokens_8_young, 8, true)
