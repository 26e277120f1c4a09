// Around DeepGEMM's grouped products: tokens to the rows of their experts and back, SiLU products as e4m3 between them.
//
// The ladder:
// 1. Places of a stable order: a warp counts 128 choices, 32 at a time, in a table of its own; tables of warps and of
//    blocks are added up before and behind each other. No two runs differ, as they do with atomic places.
// 2. ep_copy_*: a token's bytes are read once and written to all of its rows, eight at once.
// 3. ep_whole_*: few choices are counted by every block, which moves its own token's bytes meanwhile.
// 4. ep_gather_v8: FLIGHT rows of a token are under way before the first is added.
// The activation's is in expert_silu.cuh.
#include "early.cuh"
#include "expert_silu.cuh"

#define THREADS 256
#define WARPS 8
#define STEPS 4       // times 32 choices of a warp
#define CHUNK 1024    // choices of a block, device/deep_gemm_moe.py
#define LOOKED_AT 8   // choices of a thread that counts all
#define FLIGHT 8

#ifdef __CUDACC__
VT_FN unsigned lanes_with(int value) { return __match_any_sync(FULL_WARP, value); }
VT_FN void lanes_meet() { __syncwarp(); }
#else
VT_FN unsigned lanes_with(int value) {
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= (unsigned)(__shfl_sync(FULL_WARP, value, lane) == value) << lane;
    return found;
}
VT_FN void lanes_meet() { __shfl_xor_sync(FULL_WARP, 0, 0); }
#endif

// The choices of all tokens, and the experts that are here.
struct Choices {
    const void* ids;
    bool wide;  // of 64 bits
    i64 count;
    const int* known;  // number here of an expert, or null
    i64 names;         // how many of them
    int experts;

    VT_MEMBER int expert(i64 number) const {
        if (number >= count) return -1;
        i64 id = wide ? ((const i64*)ids)[number] : (i64)((const int*)ids)[number];
        if (id < 0 || id >= names) return -1;
        int here = known != nullptr ? known[id] : (int)id;
        return here < experts ? here : -1;
    }
};
#define CHOICES const void *ids, i64 wide, i64 count, const int *known, i64 names, i64 experts
#define CHOICES_GIVEN Choices{ids, wide != 0, count, known, names, (int)experts}

VT_FN void nobody(int* m_indices, i64 rows, i64 blocks) {
    for (i64 row = (i64)blockIdx.x * THREADS + threadIdx.x; row < rows; row += blocks * THREADS) m_indices[row] = -1;
}

// How many choices of a chunk each expert has.
extern "C" __global__ void __launch_bounds__(THREADS) ep_count_early(CHOICES, i64 chunks, int* counts, int* m_indices,
                                                                     i64 rows) {
    VT_SHARED(memory);
    others_may_start();
    after_others();
    int* mine = (int*)memory;
    const Choices choices = CHOICES_GIVEN;
    for (int e = threadIdx.x; e < experts; e += THREADS) mine[e] = 0;
    __syncthreads();
    int found[CHUNK / THREADS];
#pragma unroll
    for (int i = 0; i < CHUNK / THREADS; ++i)
        found[i] = choices.expert((i64)blockIdx.x * CHUNK + threadIdx.x + i * THREADS);
#pragma unroll
    for (int i = 0; i < CHUNK / THREADS; ++i)
        if (found[i] >= 0) atomicAdd(mine + found[i], 1);
    nobody(m_indices, rows, chunks);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) counts[blockIdx.x * experts + e] = mine[e];
}

// The rows of a chunk's choices, from all chunks' counts.
extern "C" __global__ void __launch_bounds__(THREADS) ep_place_early(CHOICES, i64 chunks, i64 alignment, const int* counts,
                                                                     int* inverse, int* m_indices, i64 rows) {
    VT_SHARED(memory);
    __shared__ int sums[WARPS];
    others_may_start();
    int *table = (int*)memory, *starts = table + WARPS * experts, *ahead = starts + experts + 1;
    const Choices choices = CHOICES_GIVEN;
    int lane = threadIdx.x & 31, *mine = table + (threadIdx.x >> 5) * experts, found[STEPS];
    i64 first = (i64)blockIdx.x * CHUNK + (threadIdx.x >> 5) * (32 * STEPS) + lane;
    for (int n = threadIdx.x; n < WARPS * experts; n += THREADS) table[n] = 0;
    __syncthreads();
    after_others();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) found[step] = choices.expert(first + 32 * step);
    starts_of<THREADS>((int)experts, starts, sums, [&](int e) {
        int total = 0, behind = 0;
#pragma unroll 16
        for (unsigned c = 0; c < (unsigned)chunks; ++c) {
            int here = counts[c * (unsigned)experts + e];
            if (c < blockIdx.x) behind += here;
            total += here;
        }
        ahead[e] = behind;
        return (total + (int)alignment - 1) / (int)alignment * (int)alignment;
    });
    unsigned same[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        same[step] = lanes_with(found[step]);
        if (found[step] >= 0 && (same[step] & ((1u << lane) - 1)) == 0) mine[found[step]] += ones(same[step]);
        lanes_meet();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        int own[WARPS], before = starts[e] + ahead[e];  // of all chunks and warps that come first
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) own[warp] = table[warp * experts + e];
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            table[warp * experts + e] = before;
            before += own[warp];
        }
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        int expert = found[step];
        unsigned before = same[step] & ((1u << lane) - 1);
        int row = expert >= 0 ? mine[expert] + ones(before) : -1;
        lanes_meet();
        if (expert >= 0 && before == 0) mine[expert] += ones(same[step]);
        lanes_meet();
        if (first + 32 * step >= count) continue;
        bool there = row >= 0 && row < rows;
        inverse[first + 32 * step] = there ? row : -1;
        if (there) m_indices[row] = expert;
    }
}

// A token's scales, of which each of its rows gets a copy.
struct Floats {
    const float* from;
    i64 row, group;

    VT_MEMBER float of(i64 token, i64 g) const { return from[token * row + g * group]; }
};

// Exponents of `count` groups, four to a word: byte j of word p is group 4 p + j's, 0 past the last.
struct Exponents {
    const unsigned char* from;
    i64 row, group, count;

    VT_MEMBER int of(i64 token, i64 p) const {
        unsigned word = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (4 * p + j < count) word |= (unsigned)from[token * row + (4 * p + j) * group] << 8 * j;
        return (int)word;
    }
};

// What nobody reads soon, as many rows as there are.
#ifdef __CUDACC__
template <class U> VT_FN void put_away(U* to, const U& value) { __stcs(to, value); }
#else
template <class U> VT_FN void put_away(U* to, const U& value) { *to = value; }
#endif

// A token's bytes, `units` of U, and its scales on their way to rows `to`[0 ... choices - 1], those under 0 left out.
#define ROWS_AT_ONCE 8
#define UNITS 2
template <class U, bool MANY> struct Moved {
    U some[UNITS];

    static VT_MEMBER void put(U* to, const U& value) {
        if constexpr (MANY) put_away(to, value);
        else *to = value;
    }

    VT_MEMBER Moved(const U* x, i64 units) {
#pragma unroll
        for (int d = 0; d < UNITS; ++d) {
            i64 n = threadIdx.x + d * blockDim.x;
            if (n < units) some[d] = x[n];
        }
    }
    template <class S, class Scales>
    VT_MEMBER void to_rows(const int* to, int choices, i64 units, const U* x, U* a, i64 token, i64 scales,
                           const Scales& given, S* a_scale, i64 a_row, i64 a_group) const {
        for (int first = 0; first < choices; first += ROWS_AT_ONCE) {
            int rows[ROWS_AT_ONCE];
#pragma unroll
            for (int r = 0; r < ROWS_AT_ONCE; ++r) rows[r] = first + r < choices ? to[first + r] : -1;
#pragma unroll
            for (int d = 0; d < UNITS; ++d) {
                i64 n = threadIdx.x + d * blockDim.x;
#pragma unroll
                for (int r = 0; r < ROWS_AT_ONCE; ++r)
                    if (rows[r] >= 0 && n < units) put(a + rows[r] * units + n, some[d]);
            }
            for (i64 n = threadIdx.x + UNITS * blockDim.x; n < units; n += blockDim.x) {
                U moved = x[n];
#pragma unroll
                for (int r = 0; r < ROWS_AT_ONCE; ++r)
                    if (rows[r] >= 0) put(a + rows[r] * units + n, moved);
            }
            for (i64 g = threadIdx.x; g < scales; g += blockDim.x) {
                S scale = given.of(token, g);
#pragma unroll
                for (int r = 0; r < ROWS_AT_ONCE; ++r)
                    if (rows[r] >= 0) a_scale[rows[r] * a_row + g * a_group] = scale;
            }
        }
    }
};

// A token a block. There are many; blocks of another kernel that wait would take their place.
template <class U, class S, class Scales>
VT_FN void copies(const int* inverse, i64 choices, i64 units, const U* x, i64 stride, U* a, i64 scales,
                  const Scales& given, S* a_scale, i64 a_row, i64 a_group) {
    const i64 token = blockIdx.x;
    x += token * stride;
    after_others();
    const Moved<U, true> moved(x, units);
    moved.to_rows(inverse + token * choices, (int)choices, units, x, a, token, scales, given, a_scale, a_row, a_group);
}

// Few choices: every block counts all of them and finds its own places. `parts` blocks share a token's choices; those
// behind the last token's write m_indices, ROWS_A_BLOCK each.
#define ROWS_A_BLOCK 1024
#define FEW_TOKENS 128
template <class U, class S, class Scales>
VT_FN void whole_scatter(const Choices& all, i64 tokens, i64 choices, i64 parts, i64 alignment, int* inverse,
                         int* m_indices, i64 rows, i64 units, const U* x, i64 stride, U* a, i64 scales,
                         const Scales& given, S* a_scale, i64 a_row, i64 a_group) {
    VT_SHARED(memory);
    __shared__ int sums[WARPS], to[THREADS];
    if (tokens <= FEW_TOKENS) others_may_start();  // blocks that wait would take the place of those that work
    int *counts = (int*)memory, *before = counts + all.experts, *starts = before + all.experts;
    const i64 token = blockIdx.x / (unsigned)parts, part = blockIdx.x - token * parts;
    const bool moves = token < tokens;
    const int begin = (int)(part * choices / parts), end = (int)((part + 1) * choices / parts);
    x += moves ? token * stride : 0;
    for (int e = threadIdx.x; e < 2 * all.experts; e += THREADS) counts[e] = 0;
    __syncthreads();
    after_others();
    const Moved<U, false> moved(x, moves ? units : 0);
    for (i64 n = threadIdx.x; n < all.count; n += LOOKED_AT * THREADS) {
        int found[LOOKED_AT];
#pragma unroll
        for (int i = 0; i < LOOKED_AT; ++i) found[i] = all.expert(n + i * THREADS);
#pragma unroll
        for (int i = 0; i < LOOKED_AT; ++i) {
            if (found[i] < 0) continue;
            atomicAdd(counts + found[i], 1);
            if (n + i * THREADS < token * choices) atomicAdd(before + found[i], 1);
        }
    }
    __syncthreads();
    starts_of<THREADS>(all.experts, starts, sums,
                       [&](int e) { return (counts[e] + (int)alignment - 1) / (int)alignment * (int)alignment; });
    if (!moves) {
        for (i64 n = threadIdx.x; n < ROWS_A_BLOCK; n += THREADS) {
            const i64 row = (blockIdx.x - tokens * parts) * ROWS_A_BLOCK + n;
            int low = 0, high = all.experts;
            while (high - low > 1) {
                int middle = (low + high) >> 1;
                if (starts[middle] <= row) low = middle;
                else high = middle;
            }
            if (row < rows) m_indices[row] = row - starts[low] < counts[low] ? low : -1;
        }
        return;
    }
    for (int some = begin; some < end; some += THREADS) {
        if (some + (int)threadIdx.x < end) {
            const i64 mine = token * choices + some + threadIdx.x;
            const int expert = all.expert(mine);
            int row = -1;
            if (expert >= 0) {
                row = starts[expert] + before[expert];
                for (i64 n = token * choices; n < mine; ++n) row += all.expert(n) == expert;
            }
            to[threadIdx.x] = row = row < rows ? row : -1;
            inverse[mine] = row;
        }
        __syncthreads();
        moved.to_rows(to, end - some < THREADS ? end - some : THREADS, units, x, a, token, scales, given, a_scale, a_row,
                      a_group);
        __syncthreads();
    }
}

#define EP_COPY(NAME, TYPE, SCALE, GIVEN, FROM, WORDS)                                                                 \
    extern "C" __global__ void __launch_bounds__(256, 1) ep_copy_##NAME##_early(                                       \
        const int* inverse, i64 choices, i64 units, const TYPE* x, i64 stride, TYPE* a, i64 groups,                    \
        const FROM* x_scale, i64 x_row, i64 x_group, SCALE* a_scale, i64 a_row, i64 a_group) {                         \
        copies(inverse, choices, units, x, stride, a, WORDS, GIVEN, a_scale, a_row, a_group);                          \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) ep_whole_##NAME##_early(                                  \
        CHOICES, i64 alignment, int* inverse, int* m_indices, i64 rows, i64 tokens, i64 parts, i64 choices, i64 units, \
        const TYPE* x, i64 stride, TYPE* a, i64 groups, const FROM* x_scale, i64 x_row, i64 x_group, SCALE* a_scale,   \
        i64 a_row, i64 a_group) {                                                                                      \
        const Choices all = CHOICES_GIVEN;                                                                             \
        whole_scatter(all, tokens, choices, parts, alignment, inverse, m_indices, rows, units, x, stride, a, WORDS,    \
                      GIVEN, a_scale, a_row, a_group);                                                                 \
    }
#define FLOATS Floats{x_scale, x_row, x_group}
#define EXPONENTS Exponents{x_scale, x_row, x_group, groups}
EP_COPY(16, uint4, float, FLOATS, float, groups)
EP_COPY(1, unsigned char, float, FLOATS, float, groups)
EP_COPY(packed_16, uint4, int, EXPONENTS, unsigned char, (groups + 3) / 4)
EP_COPY(packed_1, unsigned char, int, EXPONENTS, unsigned char, (groups + 3) / 4)

template <int V>
VT_FN void gather(i64 tokens, i64 width, i64 chunks, i64 choices, const void* a, i64 rows, i64 stride, int kind,
                  const float* weights, const int* inverse, void* out) {
    others_may_start();
    const Place at = place<V>(tokens, width, chunks);
    after_others();
    if (!at.inside) return;
    float total[V] = {}, v[V];
    for (i64 first = 0; first < choices; first += FLIGHT) {
        Raw<V> raw[FLIGHT];
        int row[FLIGHT];
#pragma unroll
        for (int r = 0; r < FLIGHT; ++r) {
            row[r] = first + r < choices ? inverse[at.row * choices + first + r] : -1;
            if (row[r] >= rows) row[r] = -1;
            if (row[r] >= 0) raw[r] = fetch<V>(a, row[r] * stride + at.column, kind);
        }
#pragma unroll
        for (int r = 0; r < FLIGHT; ++r) {
            if (row[r] < 0) continue;
            float weight = weights[at.row * choices + first + r];
            widen(v, raw[r], kind);
#pragma unroll
            for (int j = 0; j < V; ++j) total[j] += v[j] * weight;
        }
    }
    store(out, at.row * width + at.column, total, kind);
}

#define EP_GATHER(NAME, V, ASSUMED)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) ep_gather_##NAME##_early(                                        \
        i64 tokens, i64 width, i64 chunks, i64 choices, const void* a, i64 rows, i64 stride, i64 kind,                 \
        const float* weights, const int* inverse, void* out) {                                                         \
        VT_ASSUME(ASSUMED);                                                                                            \
        gather<V>(tokens, width, chunks, choices, a, rows, stride, (int)kind, weights, inverse, out);                  \
    }
EP_GATHER(v8, 8, (int)kind != F32)
EP_GATHER(f32_v8, 8, (int)kind == F32)
EP_GATHER(v1, 1, true)
