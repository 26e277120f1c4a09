// Products of 8-bit operands on Hopper's tensor cores: out[m, n] = sum_k a[m, k] b[n, k], tile by tile.
//
// The weights' rows (n) are the tensor cores' 64 rows and the tokens (m) their columns, whose number may be small: the
// same instructions serve one token and thousands, and a token's sums do not depend on how many stand beside it. A group
// of 128 threads fetches 128 bytes of k of the tile's rows at a time, several stages ahead; one or two groups multiply,
// 64 weight rows each, so that one adds up while the other multiplies. A block takes tile after tile, and fetches the
// next one's first stages while it writes the last one's results: these go through shared memory to leave in rows.
//
// Here products of int8, whose sums are exact and stay where they are; those of e4m3 are in fp8_loaded.cuh.
#pragma once
#include "wgmma.cuh"

#define FETCHING 128   // threads that fetch
#define K_TILE 128     // bytes of k in a stage
#define MOST_STAGES 16
#define TILES_DOWN 8   // token tiles that take turns before the next weights are read: both stay in L2

// One tile: `a` and `b` at its first token and weight row, how many tokens are to be multiplied and weight rows exist,
// where it is in `out` and how many rows it has there; expert < 0 for one that is only to be zeros.
struct Tile {
    const u8 *a, *b;
    i64 token, column;
    int tokens, columns, rows, expert;
};

// Tiles in the order in which blocks take them.
struct Order {
    i64 down, across;
    VT_MEMBER i64 count() const { return down * across; }
    VT_MEMBER void at(i64 number, i64& token_tile, i64& weight_tile) const {
        i64 turn = number / (TILES_DOWN * across), rest = number - turn * TILES_DOWN * across;
        i64 high = down - turn * TILES_DOWN < TILES_DOWN ? down - turn * TILES_DOWN : TILES_DOWN;
        token_tile = turn * TILES_DOWN + rest % high;
        weight_tile = rest / high;
    }
};

#if VT_TILES

// TOKENS: 16, 64 or 128 a tile; GROUPS: of 64 weight rows. JOB: what the tiles are and what becomes of their sums: grid,
// tiles(), tile(number), a_stride, b_stride, depth, write().
template <int TOKENS, int GROUPS, class JOB> VT_FN void multiply_tiles(const JOB& job, int stages, u8* memory) {
    constexpr int ROWS = 64 * GROUPS, STAGE = (ROWS + TOKENS) * K_TILE, PITCH = ROWS + 4, SUMS = TOKENS / 2;
    u8* tiles = (u8*)(((u64)memory + 1023) & ~1023ull);
    int* results = (int*)(tiles + stages * STAGE);
    u64 *full = (u64*)(results + TOKENS * PITCH), *empty = full + MOST_STAGES;
    int thread = (int)threadIdx.x;
    if (thread == 0) {
        for (int s = 0; s < stages; ++s) {
            barrier_init(full + s, FETCHING);
            barrier_init(empty + s, 4 * GROUPS);
        }
        barriers_ready();
    }
    __syncthreads();
    int blocks = (int)((job.depth + K_TILE - 1) / K_TILE), stage = 0, parity = 0;
    if (thread < FETCHING) {
        registers_down<56>();
        int v = thread & 7, first = thread >> 3;
        for (i64 number = blockIdx.x; number < job.template tiles<TOKENS, ROWS>(); number += job.grid) {
            Tile tile = job.template tile<TOKENS, ROWS>(number);
            if (tile.expert < 0) continue;
            unsigned from_a[TOKENS / 16], from_b[ROWS / 16];
#pragma unroll
            for (int i = 0; i < TOKENS / 16; ++i) {
                int row = first + 16 * i;
                from_a[i] = (unsigned)(row < tile.tokens ? row : tile.tokens - 1) * (unsigned)job.a_stride + 16 * v;
            }
#pragma unroll
            for (int i = 0; i < ROWS / 16; ++i) {
                int row = first + 16 * i;
                from_b[i] = (unsigned)(row < tile.columns ? row : tile.columns - 1) * (unsigned)job.b_stride + 16 * v;
            }
            for (int block = 0; block < blocks; ++block) {
                barrier_wait(empty + stage, parity ^ 1);
                u8* to = tiles + stage * STAGE;
                i64 k = (i64)block * K_TILE;
                bool there = k + 16 * v < job.depth;
#pragma unroll
                for (int i = 0; i < ROWS / 16; ++i) vector_or_zero(to + place(first + 16 * i, v), tile.b + k + from_b[i], there);
                to += ROWS * K_TILE;
#pragma unroll
                for (int i = 0; i < TOKENS / 16; ++i) vector_or_zero(to + place(first + 16 * i, v), tile.a + k + from_a[i], there);
                barrier_arrive_with_copies(full + stage);
                if (++stage == stages) stage = 0, parity ^= 1;
            }
        }
        copies_arrive();
    } else {
        registers_up<GROUPS == 2 ? 224 : 240>();
        int own = thread - FETCHING, group = own >> 7, lane = own & 127;
        int total[SUMS];
        for (i64 number = blockIdx.x; number < job.template tiles<TOKENS, ROWS>(); number += job.grid) {
            Tile tile = job.template tile<TOKENS, ROWS>(number);
#pragma unroll
            for (int i = 0; i < SUMS; ++i) total[i] = 0;
            if (tile.expert >= 0 && blocks > 0) {
                int before = 0;
                for (int block = 0; block < blocks; ++block) {
                    barrier_wait(full + stage, parity);
                    stores_to_products();
                    int here = stage;
                    if (++stage == stages) stage = 0, parity ^= 1;
                    const u8* from = tiles + here * STAGE;
                    u64 rows = tile_of(from + group * 64 * K_TILE), tokens = tile_of(from + ROWS * K_TILE);
                    products_begin();
#pragma unroll
                    for (int s = 0; s < K_TILE / 32; ++s) multiply_tile(total, further(rows, s), further(tokens, s), block > 0 || s > 0);
                    products_close();
                    products_wait<1>();
                    if (block > 0 && (lane & 31) == 0) barrier_arrive(empty + before);
                    before = here;
                }
                products_wait<0>();
                if ((lane & 31) == 0) barrier_arrive(empty + before);
            }
#pragma unroll
            for (int i = 0; i < SUMS; ++i) {
                int row = 64 * group + 16 * (lane >> 5) + 8 * (i >> 1 & 1) + (lane & 31) / 4, column = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
                results[column * PITCH + row] = total[i];
            }
            some_meet(128 * GROUPS);
            job.write(tile, results, PITCH, ROWS, own, 128 * GROUPS);
            some_meet(128 * GROUPS);
        }
    }
}

#endif
