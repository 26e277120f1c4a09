// What the warps of a block share where blocks of 256 of the weight come in slots of a ring (ggml_tiles.cuh).
#pragma once
#include "ggml_ring.cuh"

constexpr int MOST_SLOTS = 12;  // slots of a ring at most
constexpr int SENDERS = 4;     // warps that send for a slot, rows by rows

template <int TYPE> struct Tiles {
    static constexpr bool LANES = TYPE == Q3_K || TYPE >= IQ2_XXS;  // ggml_lanes.cuh
    static constexpr int BYTES = Block<TYPE>::BYTES;
    static constexpr bool ALIGNED = BYTES % 16 == 0;
    // Blocks of each row in a slot: where the last slot's products would take long, half as many.
    static constexpr int ITEMS = TYPE == Q6_K ? 8 : 16;
    static constexpr bool WHOLE = TYPE == Q2_K;      // a lane has whole blocks: ggml_whole.cuh
    static constexpr int AT_ONCE = WHOLE ? 4 : 1;               // blocks of sixteen rows that a warp has
    static constexpr int MATES = ITEMS / AT_ONCE, TEAMS = CREW / MATES;  // MATES: warps of a slot
    static constexpr bool HALVES = WHOLE || TYPE == Q6_K;              // scales of half units
    static constexpr int A_SUMS = LANES ? 0 : 16;  // the activations' sums, of a block
    // From row to row of a slot: rows' words of one number meet in no bank.
    static constexpr int PITCH = ALIGNED ? ITEMS * BYTES + 32 : 16 * ((ITEMS * BYTES + 80) / 16 | 1);
    static constexpr int SLOT = 16 * PITCH;
    static constexpr int CODES = LANES || WHOLE ? 272 : 256;  // from block to block of the row of a: four meet in no bank

    // Where the stretch begins that has blocks from number `item` of a slot on: the 16 bytes that its first one is in.
    static VT_MEMBER int start_of(int item) {
        return ALIGNED ? item * BYTES : (item * BYTES + 15 & ~15) + (item ? 32 : 0);
    }
    // Where a row leaves its term of block `item`: within that block.
    static VT_MEMBER int terms_of(int item) { return ALIGNED ? item * BYTES : item * BYTES + 64 + 15 & ~15; }
};

// What the warps of a block share: rows [first, last) of the weight, whose `all` blocks of tiles are in
// slots of `per` each but for the last, and memory: barriers of the ring's slots, the ring,
// and the row of a.
struct Share {
    int blocks, first, last, per, all, slots;
    u64 *full, *done, *empty;
    u8 *ring, *codes;
    unsigned short* sums;
    float* scales;
};
