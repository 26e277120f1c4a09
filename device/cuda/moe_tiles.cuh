// Tiles of pairs, and what all kernels of experts' products with packed weights are given.
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

// A pair's row of x, which has one for each `choices` pairs.
VT_FN unsigned row_of(int pair, i64 choices) { return choices == 1 ? (unsigned)pair : (unsigned)pair / (unsigned)choices; }

VT_FN Tile tile_of(unsigned number, const int* ids, const int* order, const uint4* tiles) {
    if (tiles == nullptr) return {ids[number], (int)number, 1, nullptr};
    uint4 found = tiles[number];
    return {(int)found.x, (int)found.y, (int)found.z, order};
}

#define MOE_PARAMETERS                                                                                           \
    i64 choices, i64 experts, i64 columns, i64 depth, const void *x, const int *ids, const float *factors,       \
        void *out, const int *order, const uint4 *tiles, i64 count
#define MOE_NAMES choices, experts, columns, depth, x, ids, factors, out, order, tiles, count

// Zeros in the rows of a tile without an expert, NaN in those of one that there is not, from column `first` on.
template <int KIND, int ACROSS>
VT_FN void fill_out(const Tile& tile, i64 first, i64 columns, void* out, int thread, int threads) {
    for (int at = thread; at < tile.rows * ACROSS; at += threads) {
        i64 column = first + at % ACROSS;
        if (column < columns)
            store_one(out, tile.pair(at / ACROSS) * columns + column, tile.expert == NO_EXPERT ? 0.0f : VT_NAN, KIND);
    }
}

// Whether a block's tile was such a one, or none; its rows are filled out.
template <int KIND, int ACROSS> VT_FN bool left_out(const Tile& tile, i64 experts, i64 first, i64 columns, void* out) {
    if (tile.rows > 0 && tile.expert >= 0 && tile.expert < experts) return false;
    fill_out<KIND, ACROSS>(tile, first, columns, out, threadIdx.x, blockDim.x);
    return true;
}
