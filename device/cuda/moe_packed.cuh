// Products of rows of 16 bits with the packed matrix of the expert that each goes to: weights go from memory into
// registers and there become operands of tensor cores. out[p, n] = sum_k x[row of p, k] W_e[n, k] for the pairs (choices
// of tokens) of each expert, as `moe_sort` of moe.cu has put them in order and cut them into tiles.
//
// Weights are the left operand. A block has a tile of pairs and the columns of a warp; each of its TEAM warps has a chain
// of K: every TEAM-th turn from its own number on. Chain sums meet in shared memory and are added from the first on. So K
// is cut in one way, whatever the number of pairs, and a pair has the same bytes in any batch. Nothing but the sums goes
// through shared memory: rows of x come from the first-level cache, where their neighbours of the turn find them.
#pragma once
#include "elements.cuh"
#include "packed_words.cuh"

#define TEAM 4

enum { NO_EXPERT = -1 };

// The pairs order[first] ... of one expert; without tiles a pair is a tile, in its place.
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

// x has a row for each `choices` pairs.
#define MOE_PARAMETERS                                                                                           \
    i64 choices, i64 experts, i64 columns, i64 depth, const void *x, const int *ids, const float *factors,       \
        void *out, const int *order, const uint4 *tiles, i64 count
#define MOE_NAMES choices, experts, columns, depth, x, ids, factors, out, order, tiles, count

// W, the weights of one format: ACROSS (columns of a warp), DEEP (k of a turn), STEPS (of a turn, EACH instructions a
// step); open(expert, first column, lane), fetch(turn) of what the next `take` makes the turn's, step(turn, s),
// left(a, t, s): operands of tile t of 16 columns, right(b, row of x, turn, s): those of a pair; end(total, expert, column,
// pair): the element as it is stored.
template <int KIND, int EIGHTS, class W> VT_FN void moe_packed(W& weights, MOE_PARAMETERS) {
    constexpr int HIGH = 8 * EIGHTS, ACROSS = W::ACROSS, SIXTEENS = ACROSS / 16, APART = ACROSS + 4;
    __shared__ float sums[TEAM][HIGH][APART];
    __shared__ int pairs[HIGH];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    unsigned beside = blockIdx.x / (unsigned)count;
    i64 first = (i64)beside * ACROSS;
    const Tile tile = tile_of(blockIdx.x - beside * (unsigned)count, ids, order, tiles);
    if (tile.rows == 0) return;
    if (tile.expert < 0 || tile.expert >= experts) {  // rows without an expert, or of one that there is not
        for (int at = threadIdx.x; at < tile.rows * ACROSS; at += TEAM * 32) {
            i64 column = first + at % ACROSS;
            if (column < columns)
                store_one(out, tile.pair(at / ACROSS) * columns + column, tile.expert == NO_EXPERT ? 0.0f : VT_NAN, KIND);
        }
        return;
    }
    if ((int)threadIdx.x < tile.rows) pairs[threadIdx.x] = tile.pair(threadIdx.x);

    const char* rows[EIGHTS];  // of this lane's pairs; beyond the tile's, its first
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
        int row = 8 * e + (lane >> 2);
        rows[e] = (const char*)x + tile.pair(row < tile.rows ? row : 0) / choices * depth * 2;
    }
    float sum[SIXTEENS][EIGHTS][4] = {};
    int turns = (int)((depth + W::DEEP - 1) / W::DEEP);
    weights.open(tile.expert, first, lane);
    weights.fetch(warp);
    for (int turn = warp; turn < turns; turn += TEAM) {
        weights.take();
        weights.fetch(turn + TEAM);
#pragma unroll
        for (int s = 0; s < W::STEPS; ++s) {
            weights.step(turn, s);
            unsigned b[EIGHTS][2 * W::EACH];
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) weights.right(b[e], rows[e], turn, s);
#pragma unroll
            for (int t = 0; t < SIXTEENS; ++t) {
                unsigned a[W::EACH][4];
                weights.left(a, t, s);
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
                    for (int i = 0; i < W::EACH; ++i) multiply<KIND>(sum[t][e], a[i], b[e][2 * i], b[e][2 * i + 1]);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < SIXTEENS; ++t)
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[warp][8 * e + 2 * (lane & 3) + (i & 1)][16 * t + 8 * (i >> 1) + (lane >> 2)] = sum[t][e][i];
    __syncthreads();
    for (int at = threadIdx.x; at < tile.rows * ACROSS; at += TEAM * 32) {
        int row = at / ACROSS, inside = at % ACROSS, pair = pairs[row];
        i64 column = first + inside;
        if (column >= columns) continue;
        float total = sums[0][row][inside];
#pragma unroll
        for (int other = 1; other < TEAM; ++other) total += sums[other][row][inside];
        store_one(out, pair * columns + column, weights.end(total, tile.expert, column, factors, pair), KIND);
    }
}

