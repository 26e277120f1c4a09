// What products of 8-bit operands are made of: out[m, n] = sum_k a[m, k] b[n, k], tile by tile.
#pragma once
#include "wgmma.cuh"

#define FETCHING 128   // threads that fetch
#define K_TILE 128     // bytes of k in a stage
#define MOST_STAGES 16
#define TURN 2048      // tokens that take turns before the next weights are read: both stay in L2

// One tile: `a` and `b` at its first token and weight row, how many tokens are to be multiplied and weight rows exist,
// where it is in `out` and how many rows it has there; expert < 0 for one that is only to be zeros.
struct Tile {
    const u8 *a, *b;
    i64 token, column;
    int tokens, columns, rows, expert;
};

// Tiles in the order in which blocks take them.
struct Order {
    i64 down, across, high;  // high: token tiles of a turn
    VT_MEMBER i64 count() const { return down * across; }
    VT_MEMBER void at(i64 number, i64& token_tile, i64& weight_tile) const {
        unsigned turn = (unsigned)number / (unsigned)(high * across), rest = (unsigned)(number - turn * high * across);
        unsigned left = (unsigned)(down - turn * high < high ? down - turn * high : high);
        token_tile = turn * high + rest % left;
        weight_tile = rest / left;
    }
};
