// Tiles of the chunked gated delta rule on tensor cores: 64 tokens a chunk, heads of 128, bfloat16; four warps a block.
#pragma once
#include "chunks.cuh"
#include "fast.cuh"
#include "mma.cuh"

#define SIZE 64
#define WIDTH 128
#define THREADS 128  // device/gdn_chunk_states.py
#define ROW 16                        // vectors of a head's row
#define TILE (SIZE * WIDTH * 2)       // bytes of a chunk's rows

VT_FN float faded(float x) { return fast_exp2(x * 1.442695f); }

VT_FN int lane_of() { return threadIdx.x & 31; }
VT_FN int warp_of() { return threadIdx.x >> 5; }

// A lane's address for 16 rows from `row`, two vectors from `v`, which is even: an `a` by fetch_matrices; two
// neighbouring `b` of a tile whose rows are k by fetch_transposed.
template <int VECTORS> VT_FN const unsigned char* tall(const unsigned char* tile, int row, int v) {
    int lane = lane_of();
    return tile + swizzled<VECTORS>(row + (lane & 15), v ^ lane >> 4);
}

// The same for two neighbouring `b` of a tile whose rows are columns, by fetch_matrices.
template <int VECTORS> VT_FN const unsigned char* flat(const unsigned char* tile, int row, int v) {
    int lane = lane_of();
    return tile + swizzled<VECTORS>(row + (lane & 7) + (lane >> 4) * 8, v ^ (lane >> 3 & 1));
}

// Send for ROWS rows of VECTORS vectors, `step` elements apart; those from `rows` on are zeros. A thread's copies are
// whole rounds of the swizzle apart.
template <int VECTORS, int ROWS = SIZE> VT_FN void send_rows(unsigned char* tile, const void* from, i64 step, int rows) {
    constexpr int TURN = THREADS / VECTORS;
    int row = threadIdx.x / VECTORS, v = threadIdx.x % VECTORS;
    const char* source = (const char*)from + (row * step + v * 8) * 2;
    unsigned char* to = tile + swizzled<VECTORS>(row, v);
#pragma unroll
    for (int r = 0; r < ROWS; r += TURN, source += TURN * step * 2)
        copy_or_zero(to + r * VECTORS * 16, source, row + r < rows);
}

// A warp's MANY vectors from `v` of the tile's rows `row` ... row + ROWS - 1 below `rows` to memory; `to` is where the
// tile's first element goes.
template <int VECTORS, int MANY, int ROWS>
VT_FN void write_rows(void* to, i64 step, const unsigned char* tile, int row, int rows, int v) {
    int first = row + lane_of() / MANY, column = v + lane_of() % MANY;
    char* target = (char*)to + (first * step + column * 8) * 2;
#pragma unroll
    for (int r = 0; r < ROWS; r += 32 / MANY, target += 32 / MANY * step * 2)
        if (first + r < rows) *(uint4*)target = *(const uint4*)(tile + swizzled<VECTORS>(first + r, column));
}

// Two neighbours of a sum's row g (or g + 8), as bfloat16, into column 8 n + 2 t of a tile.
template <int VECTORS> VT_FN void put_pair(unsigned char* tile, int row, int n, unsigned bits) {
    *(unsigned*)(tile + swizzled<VECTORS>(row, n) + (lane_of() & 3) * 4) = bits;
}

VT_FN void split(unsigned& high, unsigned& low, float x, float y) {
    high = pair<BF16>(x, y);
    low = pair<BF16>(x - widen_bf16(high & 0xffffu), y - widen_bf16(high >> 16));
}
