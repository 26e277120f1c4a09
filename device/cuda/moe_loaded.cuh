// What experts' products on Hopper share: a tile's pairs, whose rows of x are brought one by one, from where they lie.
#pragma once
#include "moe_tiles.cuh"
#include "packed_loaded.cuh"

#if VT_TILES

// Pairs of a tile, in shared memory, and their rows of x in vectors of 16 bytes.
struct Pairing {
    const int* pairs;
    i64 choices, vectors;
    VT_MEMBER i64 line(int row) const { return row_of(pairs[row], choices) * vectors; }
};
VT_FN Pairing pairing(const Tile& tile, i64 choices, i64 depth, unsigned char* memory) {
    int* pairs = (int*)memory;
    for (int row = threadIdx.x; row < tile.rows; row += blockDim.x) pairs[row] = tile.pair(row);
    __syncthreads();
    return {pairs, choices, depth / 8};
}

// The work of a tile: its one tile of rows, `chunks` stages of K in TEAM chains of runs of RUN.
template <int ROWS, int RUN> VT_FN LoadedWork tile_work(const Tile& tile, i64 columns, i64 first, i64 depth, i64 stages, i64 whole) {
    LoadedWork work;
    work.first = 0, work.rows = tile.rows, work.top = 0, work.apart = ROWS, work.columns = columns, work.left = first;
    work.chunks = (int)(depth / CHUNK), work.length = (work.chunks / RUN + TEAM - 1) / TEAM * RUN;
    work.stages = (int)stages, work.vectors = (int)whole;
    return work;
}
#endif
