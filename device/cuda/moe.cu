// Products with the matrix of the expert that each row goes to: out[p, n] = w[p] sum_k x[row of p, k] W_e[n, k], where
// pair p is a choice of a token and e = ids[p].
//
// `moe_sort`, one block, puts the pairs in the order of their experts and cuts each expert's into tiles of at most `high`
// pairs, `moe_count` and `moe_place` do so with many; nobody but the device knows how many tiles there are, so the grid has
// blocks for the most that there can be. The choices of few tokens are tiles of their own, unsorted. How pairs are tiled
// changes no byte: each element is summed in one order in all kernels of its dtypes.
//
// The ladder:
// 1. moe_exact_*: the order of matmul.cu, for any dtypes, widths and addresses: chain l of 32 is a sequence of fma over
//    k = 16 l ... 16 l + 15, then the sixteen 512 further on, and so on; chains are added up from l = 0. A warp takes two
//    rows of weights, lane l chain l of each, and up to eight pairs.
// 2. moe_16_*: bfloat16 or float16 on tensor cores, weights the left operand, 16 pairs and 64 columns a block: for few
//    pairs an expert, whose weights stream through a ring in shared memory at the speed of memory.
// 3. moe_32_*: 32 pairs, for which weights that experts with more than 16 would read twice are read once.
// 4. moe_64_*: 64 pairs and 256 columns, 64 of each a warp: an operand fetched from shared memory serves four or eight
//    products, which is what tensor cores need to be busy.
// 5. moe_128_*: twice the pairs and the warps, for experts with so many that hardly a tile is left half empty: shared
//    memory, which has as much to do as the tensor cores there, is written less.
// 6. moe_wide_*: on Hopper instead of 4 and 5, moe_wide.cuh.
#include "early.cuh"
#include "elements.cuh"
#include "mma.cuh"

#define CHAINS 32
#define PIECE 16               // neighbouring k of one chain
#define TURN (CHAINS * PIECE)  // distance between a chain's pieces
#define WARPS 4  // side by side

// x has a row for each `choices` pairs. order: pairs by expert; without tiles a pair is a tile, in its place.
#define MOE_PARAMETERS                                                                                           \
    i64 choices, i64 experts, i64 columns, i64 depth, const void *x, i64 x_kind, const void *weight,             \
        i64 weight_kind, const int *ids, const float *factors, void *out, i64 out_kind, const int *order,        \
        const uint4 *tiles, i64 count
#define MOE_NAMES                                                                                                \
    choices, experts, columns, depth, x, x_kind, weight, weight_kind, ids, factors, out, out_kind, order, tiles, count

enum { NO_EXPERT = -1 };

// The pairs order[first] ... of one expert.
struct Tile {
    int expert, first, rows;
    const int* order;

    VT_MEMBER int pair(int row) const { return order == nullptr ? first : order[first + row]; }
};

VT_FN Tile tile_of(unsigned number, const int* ids, const int* order, const uint4* tiles) {
    if (tiles == nullptr) return {ids[number], (int)number, 1, nullptr};
    uint4 found = tiles[number];
    return {(int)found.x, (int)found.y, (int)found.z, order};
}

// Rows without an expert are zeros, those of one that there is not are NaN. Whether the tile was such.
VT_FN bool filled(const Tile& tile, i64 experts, i64 first, int wide, i64 columns, void* out, i64 kind) {
    if (tile.expert >= 0 && tile.expert < experts) return false;
    for (int at = threadIdx.x; at < tile.rows * wide; at += blockDim.x) {
        i64 column = first + at % wide;
        if (column < columns)
            store_one(out, tile.pair(at / wide) * columns + column, tile.expert == NO_EXPERT ? 0.0f : VT_NAN, (int)kind);
    }
    return true;
}

// The first pair whose expert there is not.
extern "C" __global__ void __launch_bounds__(256) moe_ids_fit(i64 pairs, const int* ids, i64 experts, i64* first_bad) {
    i64 pair = (i64)blockIdx.x * 256 + threadIdx.x;
    if (pair < pairs && (ids[pair] < NO_EXPERT || ids[pair] >= experts)) atomicMin(first_bad, pair);
}

// Buckets are the experts, then NO_EXPERT, then all that there are not.
VT_FN int bucket_of(int id, int experts) { return id == NO_EXPERT ? experts : id < 0 || id >= experts ? experts + 1 : id; }

// One block cuts buckets into tiles: next[b] has a bucket's pairs, and then the place of its first one. Tiles of no pair fill
// up to `count`; `tiles` may be another block's to write.
VT_FN void cut_into_tiles(int* next, int buckets, int experts, int high, uint4* tiles, i64 count) {
    __shared__ unsigned long long warps[32];
    int threads = blockDim.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    // Pairs and tiles before this thread's buckets, the tiles in the upper half.
    int each = (buckets + threads - 1) / threads, first = threadIdx.x * each;
    int last = first + each < buckets ? first + each : buckets;
    auto tiles_of = [&](int b) { return (next[b] + high - 1) / high; };
    unsigned long long own = 0, before = 0, all = 0;
    for (int b = first; b < last; ++b) own += (unsigned long long)tiles_of(b) << 32 | (unsigned)next[b];
    unsigned long long sum = own;
    for (int d = 1; d < 32; d <<= 1) {
        unsigned long long other = __shfl_sync(WARP_LANES, sum, (lane - d) & 31);
        if (lane >= d) sum += other;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    for (int w = 0; w < threads / 32; ++w) {
        if (w < warp) before += warps[w];
        all += warps[w];
    }
    before += sum - own;
    int place = (int)(unsigned)before, at = (int)(before >> 32);
    for (int b = first; b < last; ++b) {
        int rows = next[b], expert = b < experts ? b : experts - b - 1;
        next[b] = place;
        if (tiles != nullptr)
            for (int row = 0; row < rows; row += high, ++at)
                tiles[at] = {(unsigned)expert, (unsigned)(place + row), (unsigned)(rows - row < high ? rows - row : high), 0u};
        place += rows;
    }
    if (tiles != nullptr)
        for (i64 empty = (i64)(all >> 32) + threadIdx.x; empty < count; empty += threads) tiles[empty] = {0u, 0u, 0u, 0u};
    __syncthreads();
}

// One block, for few pairs.
extern "C" __global__ void __launch_bounds__(1024)
    moe_sort_early(i64 pairs, i64 experts, i64 high, const int* ids, int* order, uint4* tiles, i64 count) {
    VT_SHARED(memory);
    int* next = (int*)memory;  // of each bucket: its pairs, then the place of the next one
    int buckets = (int)experts + 2, threads = blockDim.x;
    others_may_start();
    for (int b = threadIdx.x; b < buckets; b += threads) next[b] = 0;
    __syncthreads();
    after_others();
#pragma unroll 4
    for (i64 pair = threadIdx.x; pair < pairs; pair += threads) atomicAdd(&next[bucket_of(ids[pair], (int)experts)], 1);
    __syncthreads();
    cut_into_tiles(next, buckets, (int)experts, (int)high, tiles, count);
#pragma unroll 4
    for (i64 pair = threadIdx.x; pair < pairs; pair += threads)
        order[atomicAdd(&next[bucket_of(ids[pair], (int)experts)], 1)] = (int)pair;
}

// For many pairs, a block for each PART of them: how many of each bucket there are, and of them before each pair.
#define PART 2048
extern "C" __global__ void __launch_bounds__(512)
    moe_count_early(i64 pairs, i64 experts, const int* ids, int* before, int* counts) {
    VT_SHARED(memory);
    int *found = (int*)memory, buckets = (int)experts + 2;
    others_may_start();
    for (int b = threadIdx.x; b < buckets; b += 512) found[b] = 0;
    __syncthreads();
    after_others();
#pragma unroll
    for (int i = 0; i < PART / 512; ++i) {
        i64 pair = (i64)blockIdx.x * PART + i * 512 + threadIdx.x;
        if (pair < pairs) before[pair] = atomicAdd(&found[bucket_of(ids[pair], (int)experts)], 1);
    }
    __syncthreads();
    for (int b = threadIdx.x; b < buckets; b += 512) counts[(i64)blockIdx.x * buckets + b] = found[b];
}
// Each of those blocks again, once all have counted: where its pairs go; the first one has the tiles.
extern "C" __global__ void __launch_bounds__(512)
    moe_place_early(i64 pairs, i64 experts, i64 high, const int* ids, const int* before, const int* counts, i64 parts, int* order,
              uint4* tiles, i64 count) {
    VT_SHARED(memory);
    int buckets = (int)experts + 2, *next = (int*)memory, *own = next + buckets;  // own: of the parts before this one
    others_may_start();
    after_others();
    for (int b = threadIdx.x; b < buckets; b += 512) {
        int sum = 0, here = 0;
#pragma unroll 4
        for (int part = 0; part < (int)parts; ++part) {
            if (part == (int)blockIdx.x) here = sum;
            sum += counts[(i64)part * buckets + b];
        }
        next[b] = sum, own[b] = here;
    }
    __syncthreads();
    cut_into_tiles(next, buckets, (int)experts, (int)high, blockIdx.x == 0 ? tiles : nullptr, count);
#pragma unroll
    for (int i = 0; i < PART / 512; ++i) {
        i64 pair = (i64)blockIdx.x * PART + i * 512 + threadIdx.x;
        if (pair >= pairs) continue;
        int b = bucket_of(ids[pair], (int)experts);
        order[next[b] + own[b] + before[pair]] = (int)pair;
    }
}

// The eight elements from k on: those from `depth` on are zeros.
template <bool WIDE> VT_FN void eight(float (&y)[8], const void* base, i64 row, i64 k, i64 depth, int kind) {
    if constexpr (WIDE) {
        load(y, base, row * depth + k, kind);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = k + j < depth ? load_one(base, row * depth + k + j, kind) : 0.0f;
    }
}

// WIDE: whole pieces, at addresses of vectors. Neighbouring blocks take the next tiles.
template <bool WIDE> VT_FN void exact(MOE_PARAMETERS) {
    constexpr int M = 8, R = 2;
    __shared__ float sums[WARPS][R * M][CHAINS + 1];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    unsigned across = blockIdx.x / (unsigned)count;
    i64 left = (i64)across * (WARPS * R), first = left + warp * R;
    const Tile tile = tile_of(blockIdx.x - across * (unsigned)count, ids, order, tiles);
    if (filled(tile, experts, left, WARPS * R, columns, out, out_kind)) return;
    i64 row[M], line[R];
#pragma unroll
    for (int m = 0; m < M; ++m) row[m] = m < tile.rows ? tile.pair(m) / choices : 0;
#pragma unroll
    for (int r = 0; r < R; ++r) line[r] = tile.expert * columns + (first + r < columns ? first + r : columns - 1);
    float sum[R][M] = {};
    if (tile.rows == 0) return;
    for (i64 k = lane * PIECE; k < depth; k += TURN) {
#pragma unroll
        for (int h = 0; h < PIECE; h += 8) {
            float y[R][8];
#pragma unroll
            for (int r = 0; r < R; ++r) eight<WIDE>(y[r], weight, line[r], k + h, depth, (int)weight_kind);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                if (m >= tile.rows) break;
                float z[8];
                eight<WIDE>(z, x, row[m], k + h, depth, (int)x_kind);
#pragma unroll
                for (int r = 0; r < R; ++r)
#pragma unroll
                    for (int j = 0; j < 8; ++j) sum[r][m] = vt_fma(z[j], y[r][j], sum[r][m]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int m = 0; m < M; ++m) sums[warp][r * M + m][lane] = sum[r][m];
    warp_meets();
    int m = lane % M, r = lane / M;
    if (r >= R || m >= tile.rows || first + r >= columns) return;
    float total = 0.0f;
#pragma unroll 8
    for (int l = 0; l < CHAINS; ++l) total += sums[warp][lane][l];
    int pair = tile.pair(m);
    if (factors != nullptr) total *= factors[pair];
    store_one(out, pair * columns + first + r, total, (int)out_kind);
}

#define EXACT(NAME, WIDE)                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) NAME(MOE_PARAMETERS) { exact<WIDE>(MOE_NAMES); }

EXACT(moe_exact, true)
EXACT(moe_exact_any, false)

// A warp has 16 * SIXTEENS columns and 8 * EIGHTS pairs; a block four of them side by side, DOWN times. VECTORS of k are a
// stage of the ring: sixteen, 256 bytes of a row, where weights come from memory and long pieces of it come faster.
template <int KIND, int SIXTEENS, int EIGHTS, int DOWN, int VECTORS, int STAGES> VT_FN void cores(MOE_PARAMETERS) {
    constexpr int THREADS = DOWN * WARPS * 32, LINE = VECTORS * 16, DEEP = VECTORS * 8, PASS = THREADS / VECTORS;
    constexpr int OWN = 16 * SIXTEENS, ACROSS = WARPS * OWN, HIGH = DOWN * 8 * EIGHTS, STAGE = (ACROSS + HIGH) * LINE;
    constexpr int LEFTS = ACROSS / PASS, RIGHTS = HIGH / PASS, PITCH = ACROSS + 8;
    VT_SHARED(memory);  // [STAGES][ACROSS + HIGH][LINE], then the results
    __shared__ float factor[HIGH];
    __shared__ int pairs[HIGH];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, top = (threadIdx.x >> 7) * 8 * EIGHTS;
    unsigned beside = blockIdx.x / (unsigned)count;
    i64 first = (i64)beside * ACROSS;
    const Tile tile = tile_of(blockIdx.x - beside * (unsigned)count, ids, order, tiles);
    if (tile.rows == 0 || filled(tile, experts, first, ACROSS, columns, out, out_kind)) return;
    if ((int)threadIdx.x < tile.rows) {
        int pair = tile.pair(threadIdx.x);
        pairs[threadIdx.x] = pair;
        factor[threadIdx.x] = factors == nullptr ? 1.0f : factors[pair];
    }
    __syncthreads();

    // What this thread copies: a vector of every PASS-th line of weights, and of pairs.
    int line = threadIdx.x / VECTORS, vector = threadIdx.x % VECTORS;
    const char *left = (const char*)weight + ((tile.expert * columns + first + line) * depth + vector * 8) * 2, *right[RIGHTS];
    i64 apart = PASS * depth * 2;
    int lines = (int)(columns - first < ACROSS ? columns - first : ACROSS) - line, rows = tile.rows - line;
#pragma unroll
    for (int i = 0; i < RIGHTS; ++i) {
        i64 row = i * PASS < rows ? pairs[line + i * PASS] / choices : 0;
        right[i] = (const char*)x + (row * depth + vector * 8) * 2;
    }
    i64 ahead = vector * 8;  // k of the next vector to send for
    char* to = (char*)memory + swizzled<VECTORS>(line, vector);
    int stage_ahead = 0;
    auto send = [&] {
        char* stage = to + stage_ahead * STAGE;
        bool there = ahead < depth;
        const char* from = left;
#pragma unroll
        for (int i = 0; i < LEFTS; ++i, from += apart) copy_or_zero(stage + i * PASS * LINE, from, there && i * PASS < lines);
#pragma unroll
        for (int i = 0; i < RIGHTS; ++i) {
            copy_or_zero(stage + (ACROSS + i * PASS) * LINE, right[i], there && i * PASS < rows);
            right[i] += LINE;
        }
        left += LINE;
        ahead += DEEP;
        stage_ahead = stage_ahead + 1 == STAGES ? 0 : stage_ahead + 1;
        copies_close();
    };

    float sum[EIGHTS][SIXTEENS][4] = {};
    int turn = lane & 7;
    int left_row = warp * OWN + turn + (lane >> 3 & 1) * 8, left_vector = lane >> 4;
    int right_row = ACROSS + top + turn + (lane >> 4) * 8, right_vector = lane >> 3 & 1, stage_here = 0;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) send();
    for (i64 k = 0; k < depth; k += DEEP) {
        copies_wait<STAGES - 2>();
        __syncthreads();  // this stage is there for all, and none reads the one before any more
        send();
        const char* stage = (const char*)memory + stage_here * STAGE;
        auto sixteen_k = [&](int s) {
            unsigned a[SIXTEENS][4];
#pragma unroll
            for (int t = 0; t < SIXTEENS; ++t)
                fetch_matrices(a[t], stage + (left_row + 16 * t) * LINE + ((2 * s + left_vector) ^ turn) * 16);
#pragma unroll
            for (int e = 0; e < EIGHTS; e += 2) {
                unsigned b[4];
                fetch_matrices(b, stage + (right_row + 8 * e) * LINE + ((2 * s + right_vector) ^ turn) * 16);
#pragma unroll
                for (int t = 0; t < SIXTEENS; ++t) {
                    multiply<KIND>(sum[e][t], a[t], b[0], b[1]);
                    multiply<KIND>(sum[e + 1][t], a[t], b[2], b[3]);
                }
            }
        };
        if (k + DEEP <= depth) {  // one piece of code, in which operands are fetched while products go on
#pragma unroll
            for (int s = 0; s < VECTORS / 2; ++s) sixteen_k(s);
        } else {
#pragma unroll 1
            for (int s = 0; k + 16 * s < depth; ++s) sixteen_k(s);
        }
        stage_here = stage_here + 1 == STAGES ? 0 : stage_here + 1;
    }
    copies_wait<0>();
    __syncthreads();

    unsigned short* results = (unsigned short*)memory;
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int row = top + 8 * e + 2 * (lane & 3) + h;
            float by = row < tile.rows ? factor[row] : 0.0f;
#pragma unroll
            for (int t = 0; t < SIXTEENS; ++t)
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    results[row * PITCH + warp * OWN + 16 * t + 8 * r + (lane >> 2)] =
                        (unsigned short)pair<KIND>(sum[e][t][2 * r + h] * by, 0.0f);
        }
    __syncthreads();
    bool wide = columns % 8 == 0 && ((unsigned long long)out & 15) == 0;
    for (int at = threadIdx.x; at < tile.rows * (ACROSS / 8); at += THREADS) {
        int row = at / (ACROSS / 8), inside = at % (ACROSS / 8) * 8;
        const unsigned short* from = results + row * PITCH + inside;
        i64 column = first + inside;
        unsigned short* target = (unsigned short*)out + pairs[row] * columns + column;
        if (wide) {
            if (column < columns) *(uint4*)target = *(const uint4*)from;
        } else {
            for (int j = 0; j < 8 && column + j < columns; ++j) target[j] = from[j];
        }
    }
}

#define CORES(NAME, KIND, SIXTEENS, EIGHTS, DOWN, VECTORS, STAGES, BLOCKS)                                       \
    extern "C" __global__ void __launch_bounds__(DOWN * WARPS * 32, BLOCKS) NAME(MOE_PARAMETERS) {               \
        cores<KIND, SIXTEENS, EIGHTS, DOWN, VECTORS, STAGES>(MOE_NAMES);                                         \
    }

CORES(moe_16_bf16, BF16, 1, 2, 1, 16, 3, 3)
CORES(moe_16_f16, F16, 1, 2, 1, 16, 3, 3)
CORES(moe_32_bf16, BF16, 1, 4, 1, 16, 3, 3)
CORES(moe_32_f16, F16, 1, 4, 1, 16, 3, 3)
CORES(moe_64_bf16, BF16, 4, 8, 1, 8, 2, 2)
CORES(moe_64_f16, F16, 4, 8, 1, 8, 2, 2)
CORES(moe_128_bf16, BF16, 4, 8, 2, 8, 3, 1)
CORES(moe_128_f16, F16, 4, 8, 2, 8, 3, 1)

#include "moe_wide.cuh"

#if VT_TILES
WIDE(moe_wide_bf16, BF16, 160, 2, 2)
WIDE(moe_wide_f16, F16, 160, 2, 2)
#endif
