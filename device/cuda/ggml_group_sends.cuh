// What a block of groups of four warps (ggml_groups.cuh) has to do and in shared memory, and the warps that send for it.
#pragma once
#include "early.cuh"
#include "ggml_halves.cuh"
#include "wgmma_registers.cuh"

// Where a column's scale stands, so that four a thread needs lie side by side.
VT_FN int scale_place(int n) { return ((n / 16) * 4 + n % 8 / 2) * 4 + n / 8 % 2 * 2 + n % 2; }

struct Groups {
    i64 rows, columns, stages, stride, out_stride;
    const u8 *b, *records;
    void* out;
    int kind, slots, grid;
};

#if VT_TILES

// TURNS: groups have the same 64 rows, of which each takes every other stage, and 64 rows of their own each otherwise.
template <int TYPE, int N, bool TURNS = false> struct GroupSends {
    using B = Block<TYPE>;
    static constexpr int ROWS = TURNS ? 64 : 128;
    static constexpr int CHUNK = B::BYTES * (B::LARGE ? 1 : 8);  // bytes of a row of a stage
    static constexpr bool SKEWED = CHUNK % 16 != 0;
    static constexpr int PIECES = (CHUNK + 15 + 14 * SKEWED) / 16, PITCH = 16 * (PIECES | 1);  // rows meet in no bank
    // A stage's record of activations: codes, what minimums meet, scales.
    static constexpr int LOWN = N < 32 ? N : 32;  // columns whose minimums are one product's
    static constexpr bool LOWS = B::LARGE && B::MINIMUM, SUMS = !B::LARGE && B::MINIMUM;
    static constexpr int CODES = (B::LARGE ? 256 : 512) * N, LOW = LOWS ? 128 * LOWN : SUMS ? 32 * N : 0;
    static constexpr int SCALES = B::LARGE ? 4 * N : 32 * N;
    static constexpr int RECORD = CODES + LOW + SCALES, SLOT = (RECORD + ROWS * PITCH + 1023) / 1024 * 1024;
    static constexpr int CHAIN = TURNS ? 256 * N : 0;        // where groups leave their sums for each other
    static constexpr int UNITS = TYPE == Q8_0 || TYPE == Q5_0 ? 2 : 8;  // of 32, together: more of them where registers last
    static constexpr int STEP = N < 64 ? N : 64, PARTS = N / STEP;  // columns of a product
    static constexpr int MANY = 232, FEW = 40;  // registers of groups and of those that send
    static constexpr int BUFFERS = 2;
    static constexpr bool HALVES = PARTS == 2;

    const Groups& p;
    u8* ring;
    int warp;

    VT_MEMBER GroupSends(const Groups& given, u8* memory) : p(given) {
        ring = memory + (-(u64)memory & 1023);
        warp = same_in_warp((int)threadIdx.x >> 5);
    }
    VT_MEMBER u8* chain() const { return ring + p.slots * SLOT; }
    VT_MEMBER u64* full() const { return (u64*)(chain() + CHAIN); }
    VT_MEMBER u64* empty() const { return full() + p.slots; }
    VT_MEMBER u64* turn() const { return empty() + p.slots; }  // two of them
    VT_MEMBER int across() const { return (int)((p.rows + N - 1) / N); }
    // The last tiles are cut in two where that lets more blocks have a part of them: rows in two, columns a group each.
    VT_MEMBER int tiles() const { return (int)((p.columns + ROWS - 1) / ROWS) * across(); }
    VT_MEMBER int whole() const {
        int all = tiles(), last = all % p.grid;
        return HALVES && 2 * last <= p.grid ? all - last : all;
    }
    VT_MEMBER int items() const { return 2 * tiles() - whole(); }
    static VT_MEMBER int skew_of(int stage) { return SKEWED ? stage * CHUNK & 15 : 0; }

    // Item `item` of the work: a tile, or the first or the last half of its rows.
    VT_MEMBER bool is_half(int item) const { return HALVES && item >= whole(); }
    VT_MEMBER int tile_of_item(int item) const { return is_half(item) ? whole() + (item - whole()) / 2 : item; }
    VT_MEMBER i64 top_of(int item) const {
        i64 top = (i64)(tile_of_item(item) / across()) * ROWS;
        return is_half(item) ? top + (item - whole()) % 2 * (ROWS / 2) : top;
    }

    // Where an item's rows of the weight begin, how many there are, and its records.
    struct Part { const u8 *rows, *records; int high; };
    // WIDTH pieces of each row from piece FIRST on, a thread each: rows that are all there, or up to `high` and `end` bytes.
    template <int FIRST, int WIDTH> VT_MEMBER void send_pieces(Spot to, const u8* from, int high, int end) const {
        constexpr int STEP = 128 / WIDTH, COUNT = (ROWS + STEP - 1) / STEP;
        const int thread = (int)threadIdx.x & 127, stride = (int)p.stride, piece = FIRST + thread % WIDTH;
        int row = thread / WIDTH;
        if ((FIRST + WIDTH > PIECES && piece >= PIECES) || (STEP > ROWS && row >= ROWS)) return;
        to += row * PITCH + 16 * piece, from += row * stride + 16 * piece;
        if (high == ROWS && (!SKEWED || end >= 16 * PIECES)) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) copy_to(to + i * (STEP * PITCH), from + (i64)i * (STEP * stride));
        } else if (!SKEWED || 16 * piece < end) {
#pragma unroll 1
            for (; row < high; row += STEP, to += STEP * PITCH, from += STEP * stride) copy_to(to, from);
        }
    }
    // Rows by a group's 128 threads, 16 bytes each at a time: one copy of a row by the copy engine costs as much as ten of
    // these, since a warp starts its lanes' one after the other. What no row is there for, nothing is made of.
    VT_MEMBER void send_rows(const Part& part, int stage, int slot) const {
        constexpr int MAIN = PIECES > 16 ? 16 : 8, LEFT = PIECES - MAIN, REST = LEFT > 4 ? 8 : LEFT > 2 ? 4 : LEFT;
        const i64 begin = (i64)stage * CHUNK - skew_of(stage);
        const int end = SKEWED ? (int)(p.stages * CHUNK - begin) : 16 * PIECES;
        const Spot to = spot_of(ring + slot * SLOT + RECORD);
        send_pieces<0, MAIN>(to, part.rows + begin, part.high, end);
        if constexpr (LEFT > 0) send_pieces<MAIN, REST>(to, part.rows + begin, part.high, end);
        barrier_arrive_with_copies(full() + slot);
    }
    VT_MEMBER void send_record(const Part& part, int stage, int slot) const {
        if (((int)threadIdx.x & 127) != 0) return;
        barrier_expect(full() + slot, RECORD);
        load_bytes(ring + slot * SLOT, part.records + (i64)stage * RECORD, full() + slot, RECORD);
    }
    VT_MEMBER Part part_of(int item) const {
        const i64 top = top_of(item), left = p.columns - top;
        const int most = is_half(item) ? ROWS / 2 : ROWS;
        return {p.b + top * p.stride, p.records + (i64)(tile_of_item(item) % across()) * p.stages * RECORD,
                left < most ? (int)left : most};
    }
    VT_MEMBER void send() const {
        const int first = (int)blockIdx.x, all = items();
        int ahead = 0;
        if (first < all) {
            const Part part = part_of(first);
            for (; ahead < p.slots && ahead < p.stages; ++ahead) send_rows(part, ahead, ahead);
        }
        after_others();  // what the activations became; weights were there before
        int slot = 0, parity = 1, sent = 0;
        for (int item = first; item < all; item += p.grid) {
            const Part part = part_of(item);
            for (int stage = 0; stage < p.stages; ++stage) {
                if (sent >= ahead) {
                    barrier_wait(empty() + slot, parity);
                    send_rows(part, stage, slot);
                }
                send_record(part, stage, slot);
                sent += sent < ahead;
                if (++slot == p.slots) slot = 0, parity ^= 1;
            }
        }
    }
};

#endif
