// Tiles of the chunked gated delta rule on tensor cores: 64 tokens a chunk, heads of 128, bfloat16; blocks of warps.
#pragma once
#include "chunks.cuh"
#include "fast.cuh"
#include "mma.cuh"

#define SIZE 64
#define WIDTH 128
#define ROW 16                        // vectors of a head's row
#define TILE (SIZE * WIDTH * 2)       // bytes of a chunk's rows

VT_FN float faded(float x) { return fast_exp2(x * 1.442695f); }

VT_FN int lane_of() { return threadIdx.x & 31; }
VT_FN int warp_of() { return threadIdx.x >> 5; }

// A lane's address for 16 rows from `row`, two vectors from `v`: an `a` by fetch_matrices; two neighbouring `b` of a
// tile whose rows are k by fetch_transposed.
template <int VECTORS> VT_FN const unsigned char* tall(const unsigned char* tile, int row, int v) {
    int lane = lane_of();
    return tile + swizzled<VECTORS>(row + (lane & 15), v + (lane >> 4));
}

// The same for two neighbouring `b` of a tile whose rows are columns, by fetch_matrices.
template <int VECTORS> VT_FN const unsigned char* flat(const unsigned char* tile, int row, int v) {
    int lane = lane_of();
    return tile + swizzled<VECTORS>(row + (lane & 7) + (lane >> 4) * 8, v + (lane >> 3 & 1));
}

// Send for rows of 2^LOG vectors, `step` elements apart; those from `rows` on are zeros.
template <int VECTORS>
VT_FN void send_rows(unsigned char* tile, const void* from, i64 step, int rows, int log, int all = SIZE) {
    for (int i = threadIdx.x; i < all << log; i += blockDim.x) {
        int row = i >> log, v = i & ((1 << log) - 1);
        copy_or_zero(tile + swizzled<VECTORS>(row, v), (const char*)from + (row * step + v * 8) * 2, row < rows);
    }
}

// A warp's 2^LOG vectors from `v` of `rows` rows of a tile from `row` to memory, `to` being the tile's first element
// there.
template <int VECTORS, int LOG>
VT_FN void write_rows(void* to, i64 step, const unsigned char* tile, int row, int rows, int v) {
    for (int i = lane_of(); i < rows << LOG; i += 32) {
        int at = row + (i >> LOG), column = v + (i & ((1 << LOG) - 1));
        *(uint4*)((char*)to + (at * step + column * 8) * 2) = *(const uint4*)(tile + swizzled<VECTORS>(at, column));
    }
}

// Two neighbours of a sum's row g (or g + 8), as bfloat16, into column 8 n + 2 t of a tile.
template <int VECTORS> VT_FN void put_pair(unsigned char* tile, int row, int n, unsigned bits) {
    *(unsigned*)(tile + swizzled<VECTORS>(row, n) + (lane_of() & 3) * 4) = bits;
}

VT_FN void split(unsigned& high, unsigned& low, float x, float y) {
    high = pair<BF16>(x, y);
    low = pair<BF16>(x - widen_bf16(high & 0xffffu), y - widen_bf16(high >> 16));
}
