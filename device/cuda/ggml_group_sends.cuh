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

template <int TYPE, int N> struct GroupSends {
    using B = Block<TYPE>;
    static constexpr int OWN = B::LANES ? 4 : 1, LW = B::LANES ? 2 : 1, ROWS = B::LANES ? 64 : 128;
    static constexpr int CHUNK = B::BYTES * (B::LARGE ? 1 : 8);  // bytes of a row of a stage
    static constexpr bool SKEWED = CHUNK % 16 != 0;
    static constexpr int PIECES = (CHUNK + 15 + 14 * SKEWED) / 16, PITCH = 16 * (PIECES | 1);  // rows meet in no bank
    // A stage's record of activations: codes, what minimums meet, scales.
    static constexpr int LOWN = N / LW < 8 ? 8 : N / LW;  // columns whose minimums are a group's
    static constexpr bool LOWS = B::LARGE && B::MINIMUM, SUMS = !B::LARGE && B::MINIMUM;
    static constexpr int CODES = 512 * N, LOW = LOWS ? 128 * LOWN : SUMS ? 32 * N : 0, SCALES = B::LARGE ? 4 * N : 32 * N;
    static constexpr int RECORD = CODES + LOW + SCALES, SLOT = (RECORD + ROWS * PITCH + 1023) / 1024 * 1024;
    static constexpr int MEET_PITCH = 68, MEET = LW > 1 ? MEET_PITCH * N * 4 : 0;  // where lanes' sums meet
    static constexpr int UNITS = TYPE == Q8_0 || TYPE == Q5_0 ? 2 : 8;  // of 32, together: more of them where registers last
    static constexpr int LOW_BYTES = LOWS ? 256 * LOWN : 0;  // of a group's running minimums
    // Words of the last two lanes stay in shared memory until their turn, for want of registers.
    static constexpr bool STASH = B::LANES && TYPE != Q4_K && N > 32;
    static constexpr int STEP = N < 64 ? N : 64, PARTS = N / STEP;  // columns of a product
    static constexpr int MANY = 232, FEW = 40;  // registers of groups and of those that send
    static constexpr int BUFFERS = N > 32 && B::LANES ? 1 : 2;
    static constexpr int PLANES = TYPE == Q6_K ? 2 : 1;
    static constexpr bool HALVES = !B::LANES && PARTS == 2;

    const Groups& p;
    u8* ring;
    int warp;

    VT_MEMBER GroupSends(const Groups& given, u8* memory) : p(given) {
        ring = memory + (-(u64)memory & 1023);
        warp = same_in_warp((int)threadIdx.x >> 5);
    }
    VT_MEMBER u8* meeting() const { return ring + p.slots * SLOT; }
    VT_MEMBER u64* full() const { return (u64*)(meeting() + MEET + 2 * LOW_BYTES + 8192 * STASH); }
    VT_MEMBER u64* empty() const { return full() + p.slots; }
    VT_MEMBER int across() const { return (int)((p.rows + N - 1) / N); }
    // The last tiles are cut in two where that lets more blocks have a part of them: rows in two, columns a group each.
    VT_MEMBER int tiles() const { return (int)((p.columns + ROWS - 1) / ROWS) * across(); }
    VT_MEMBER int whole() const {
        int all = tiles(), last = all % p.grid;
        return HALVES && 2 * last <= p.grid ? all - last : all;
    }
    VT_MEMBER int items() const { return 2 * tiles() - whole(); }
    VT_MEMBER Four* lows_of(int group) const { return (Four*)(meeting() + MEET + group * LOW_BYTES); }
    static VT_MEMBER int skew_of(int stage) { return SKEWED ? stage * CHUNK & 15 : 0; }

    // Item `item` of the work: a tile, or the first or the last half of its rows.
    VT_MEMBER bool is_half(int item) const { return HALVES && item >= whole(); }
    VT_MEMBER int tile_of_item(int item) const { return is_half(item) ? whole() + (item - whole()) / 2 : item; }
    VT_MEMBER i64 top_of(int item) const {
        i64 top = (i64)(tile_of_item(item) / across()) * ROWS;
        return is_half(item) ? top + (item - whole()) % 2 * (ROWS / 2) : top;
    }

    // Rows by a group's 128 threads, 16 bytes each at a time: one copy of a row by the copy engine costs as much as ten of
    // these, since a warp starts its lanes' one after the other.
    VT_MEMBER void send_rows(int item, int stage, int slot) const {
        const int thread = (int)threadIdx.x & 127, stride = (int)p.stride;
        const i64 top = top_of(item), left = p.columns - top, begin = (i64)stage * CHUNK - skew_of(stage);
        int high = is_half(item) ? ROWS / 2 : ROWS;
        if (left < high) high = (int)left;  // what no row is there for, nothing is made of
        int row = thread / PIECES, piece = thread - row * PIECES, at = row * stride + 16 * piece;
        const int end = SKEWED ? (int)(p.stages * CHUNK - begin) : 16 * PIECES;
        const u8* from = p.b + top * p.stride + begin;
        Spot to = spot_of(ring + slot * SLOT + RECORD) + row * PITCH + 16 * piece;
        constexpr int DOWN = 128 / PIECES, ON = 128 % PIECES;
#pragma unroll 3
        for (int i = 0; i < (ROWS * PIECES + 127) / 128; ++i) {
            if (row < high && (!SKEWED || 16 * piece < end)) copy_to(to, from + at);
            row += DOWN, piece += ON, at += DOWN * stride + 16 * ON, to += DOWN * PITCH + 16 * ON;
            if (piece >= PIECES) ++row, piece -= PIECES, at += stride - 16 * PIECES, to += PITCH - 16 * PIECES;
        }
        barrier_arrive_with_copies(full() + slot);
    }
    VT_MEMBER void send_record(int item, int stage, int slot) const {
        if (((int)threadIdx.x & 127) != 0) return;
        const u8* from = p.records + ((i64)(tile_of_item(item) % across()) * p.stages + stage) * RECORD;
        barrier_expect(full() + slot, RECORD);
        load_bytes(ring + slot * SLOT, from, full() + slot, RECORD);
    }
    VT_MEMBER void send() const {
        const int first = (int)blockIdx.x, all = items();
        int ahead = 0;
        for (; ahead < p.slots && ahead < p.stages && first < all; ++ahead) send_rows(first, ahead, ahead);
        after_others();  // what the activations became; weights were there before
        int slot = 0, parity = 1, sent = 0;
        for (int item = first; item < all; item += p.grid)
            for (int stage = 0; stage < p.stages; ++stage) {
                if (sent >= ahead) {
                    barrier_wait(empty() + slot, parity);
                    send_rows(item, stage, slot);
                }
                send_record(item, stage, slot);
                sent += sent < ahead;
                if (++slot == p.slots) slot = 0, parity ^= 1;
            }
    }
};

#endif
