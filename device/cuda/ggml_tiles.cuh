// Blocks of 256: sixteen rows of the weight at once meet the row of a on the tensor cores, a block a warp.
//
// Warps have one kind of work each. One sends for the weight: a slot of the ring is sixteen rows by up to eight blocks,
// neighbours in the order of tiles and, within a tile, of blocks, and the copy engine brings a stretch of each row.
// Eight by eight the others code the row of a first, then take a slot's blocks, a warp each, and leave their terms
// where the block was. The last warp adds terms in the order of blocks and hands the slot back. Nobody waits for a
// neighbour, but for bytes or for a slot.
#pragma once
#include "ggml_ring.cuh"
#include "ggml_whole.cuh"

#ifndef GGML_ITEMS
#define GGML_ITEMS 16
#endif
#ifndef GGML_SENDERS
#define GGML_SENDERS 4
#endif
constexpr int ITEMS = GGML_ITEMS;  // blocks of each row in a slot
constexpr int SENDERS = GGML_SENDERS, ADDERS = 4;  // warps that send for a slot and add its terms, some rows each

template <int TYPE> struct Tiles {
    static constexpr int BYTES = Block<TYPE>::BYTES, SUMS = Block<TYPE>::LANES ? 8 : 1;  // SUMS: of a row
    static constexpr bool ALIGNED = BYTES % 16 == 0, GRID = TYPE == IQ2_XXS || TYPE == IQ3_XXS;
    static constexpr int ADD = SUMS == 8 ? ADDERS : 1;   // warps that add
    static constexpr int AT_ONCE = SUMS == 1 ? 4 : 1;  // blocks of sixteen rows that a warp has
    static constexpr bool MINIMUM = Block<TYPE>::MINIMUM, HALVES = TYPE == Q2_K;  // HALVES: minimums of half units
    static constexpr bool LANE_SUMS = TYPE == Q3_K, PAIRED = ALIGNED || LANE_SUMS;  // sums of lanes, else of units or halves
    static constexpr int A_SUMS = LANE_SUMS ? 8 : MINIMUM ? HALVES ? 16 : 8 : 0;  // the activations', of a block
    static constexpr bool LOWS = MINIMUM && SUMS == 8;            // minimums run by themselves
    // From row to row of a slot: rows' words of one number meet in no bank.
    static constexpr int PITCH = ALIGNED ? ITEMS * BYTES + 32 : 16 * ((ITEMS * BYTES + 80) / 16 | 1);
    static constexpr int SLOT = 16 * PITCH;
    static constexpr int CODES = SUMS == 1 ? 272 : 256;  // bytes from block to block of the row of a: four meet in no bank

    // Where the stretch begins that has blocks from number `item` of a slot on: the 16 bytes that its first one is in.
    static VT_MEMBER int start_of(int item) { return ALIGNED ? item * BYTES : (item * BYTES + 15 & ~15) + (item ? 32 : 0); }
    // Where a row leaves its eight terms of block `item`, and that of its minimums after them: within that block.
    static VT_MEMBER int terms_of(int item) { return ALIGNED ? item * BYTES : item * BYTES + 64 + 15 & ~15; }
};

// The row's codes, of each block its scale, and the sums of its units or of their halves.
template <int TYPE> VT_MEMBER void code_tiles(const Row& p, Eights& eights, u8* codes, float* scales, unsigned short* sums) {
    using T = Tiles<TYPE>;
    int blocks = (int)(p.depth / 256), lane = threadIdx.x & 31, part = lane & 3;
    for (int block = (int)threadIdx.x >> 5; block < blocks; block += CREW) {
        float x[8];
        eights.next(x);
        Codes c = codes_256(x);
        unsigned low = packed4(c.code[0], c.code[1], c.code[2], c.code[3]);
        unsigned high = packed4(c.code[4], c.code[5], c.code[6], c.code[7]);
        int unit = lane >> 2;
        u8* to = codes + block * 256 + (unit >> 1) * 64 + (unit & 1) * 8;
        if constexpr (T::SUMS == 1) {
            *(uint2*)(codes + block * T::CODES + lane * 8) = {low, high};
        } else if constexpr (T::PAIRED) {  // lane t of those that meet it has words 2 t and 2 t + 1 of a unit
            *(uint2*)(to + part * 16) = {low, high};
        } else {  // words t and t + 4
            unsigned* words = (unsigned*)(to + (part & 1) * 32 + (part >> 1) * 4);
            words[0] = low;
            words[4] = high;
        }
        if constexpr (T::MINIMUM) {
            int total = c.total + __shfl_xor_sync(ALL, c.total, 1);
            if constexpr (!T::HALVES) total += __shfl_xor_sync(ALL, total, 2);
            if (T::HALVES ? (part & 1) == 0 : part == 0) sums[block * T::A_SUMS + (T::HALVES ? lane / 2 : unit)] = (unsigned short)total;
        }
        if constexpr (T::LANE_SUMS) {
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                int two = c.code[i] + c.code[i + 1] * 65536;
#pragma unroll
                for (int m = 1; m <= 16; m *= 2) two += __shfl_xor_sync(ALL, two, m);
                if (lane == i) *(int*)(sums + block * 8 + i) = (two & 0xffff) | (two - (short)two & ~0xffff);
            }
        }
        if (lane == 0) scales[block] = c.d;
    }
}

// A tile's rows and blocks from some slot to another that is `step` blocks further on.
struct Place {
    int tile, block;
    VT_MEMBER void forward(int step, int blocks) {
        block += step;
        while (block >= blocks) {
            block -= blocks;
            ++tile;
        }
    }
};

// Rows from the sixteen bytes that a stretch begins in; nothing past the weight is touched.
template <int TYPE> VT_MEMBER void send_for(const Row& p, int first, int last, int turns, int per, int slots, u8* ring, u64* full, u64* empty) {
    using T = Tiles<TYPE>;
    int lane = threadIdx.x & 31, mine = ((int)threadIdx.x / 32 - CREW) * (16 / SENDERS) + lane, blocks = (int)(p.depth / 256), slot = 0;
    bool sends = lane < 16 / SENDERS;
    unsigned parity = 1;
    Place at = {0, 0};
    int left = (last - first + 15) / 16 * blocks;
    for (int turn = 0; turn < turns; ++turn) {
        phase_over(empty + slot, parity);
        int count = left < per ? left : per;
        left -= count;
        for (int item = 0; item < count;) {
            int n = blocks - at.block < count - item ? blocks - at.block : count - item, row = first + 16 * at.tile + mine;
            if (sends && row < last) {
                const u8* from = p.b + row * p.stride + at.block * T::BYTES;
                u8* to = ring + slot * T::SLOT + mine * T::PITCH + T::start_of(item);
                int skew = T::ALIGNED ? 0 : (int)(unsigned long long)from & 15, end = skew + n * T::BYTES;
                from -= skew;
                int whole = T::ALIGNED ? end : end + 15 & ~15;
                if (!T::ALIGNED && row + 1 == (int)p.columns && at.block + n == blocks) {
                    whole = end & ~15;
                    for (int i = whole; i < end; i += 2) *(unsigned short*)(to + i) = *(const unsigned short*)(from + i);
                }
                if (whole) stretch(to, from, whole, full + slot);
            }
            item += n;
            at.forward(n, blocks);
        }
        if (sends) arrive(full + slot);
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
}

// Terms of the slots' blocks, one block after the other: a lane has one of a row's sums.
template <int TYPE> VT_MEMBER void add_up(const Row& p, int first, int last, int turns, int per, int slots, const u8* ring, const float* ones, u64* done, u64* empty) {
    using T = Tiles<TYPE>;
    int lane = threadIdx.x & 31, row = T::SUMS == 8 ? ((int)threadIdx.x / 32 - CREW - SENDERS) * 4 + lane / 8 : lane & 15;
    int blocks = (int)(p.depth / 256), slot = 0, left = (last - first + 15) / 16 * blocks, block = 0, top = first;
    unsigned parity = 0;
    float sum = 0.0f, low = 0.0f;
    for (int turn = 0; turn < turns; ++turn) {
        phase_over(done + slot, parity);
        int count = left < per ? left : per;
        left -= count;
        for (int item = 0; item < count;) {
            int n = blocks - block < count - item ? blocks - block : count - item;
            for (int i = 0; i < n; i += 8) {
                float term[8], less[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    term[k] = less[k] = 0.0f;
                    if (i + k >= n) continue;
                    const u8* from = T::SUMS == 8 ? ring + slot * T::SLOT + row * T::PITCH + T::terms_of(item + i + k)
                                                  : (const u8*)(ones + (slot * ITEMS + item + i + k) * 16 + row);
                    term[k] = *(const float*)(from + (T::SUMS == 8 ? lane % 8 * 4 : 0));
                    if constexpr (T::LOWS) less[k] = *(const float*)(from + 32);
                }
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    if (i + k >= n) continue;
                    sum = sum + term[k];
                    if (T::LOWS) low = low - less[k];
                }
            }
            item += n;
            block += n;
            if (block < blocks) continue;
            float total[1] = {low};
            if constexpr (T::SUMS == 8) {
#pragma unroll
                for (int c = 0; c < 8; ++c) total[0] = total[0] + __shfl_sync(ALL, sum, (lane & 24) + c);
            } else {
                total[0] = sum * Block<TYPE>::FOLD;
            }
            if ((T::SUMS == 8 ? lane % 8 == 0 : lane < 16) && top + row < last) store(p.out, top + row, total, (int)p.kind);
            sum = low = 0.0f;
            block = 0;
            top += 16;
        }
        before_copies();
        warp_meets();
        if (lane == 0) arrive(empty + slot);
        if (++slot == slots) {
            slot = 0;
            parity ^= 1;
        }
    }
}

template <int TYPE> VT_MEMBER void in_tiles(const Row& p, int grid, int slots) {
    using T = Tiles<TYPE>;
    VT_SHARED(memory);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, blocks = (int)(p.depth / 256);
    u64 *full = (u64*)memory, *done = full + slots, *empty = done + slots;
    u8* rest = memory + (slots * 24 + 15 & ~15);
    unsigned* tables = (unsigned*)rest;
    if constexpr (T::GRID) rest += (GRID_WORDS + SIGN_WORDS) * 4;
    float* ones = (float*)rest;
    if constexpr (T::SUMS == 1) rest += slots * ITEMS * 64;
    u8 *ring = rest, *codes = ring + slots * T::SLOT;
    unsigned short* sums = (unsigned short*)(codes + blocks * T::CODES);
    float* scales = (float*)(sums + blocks * T::A_SUMS);
    // The first blocks have a row more where rows do not come out even.
    int number = (int)blockIdx.x, rows = (int)((unsigned)p.columns / (unsigned)grid), over = (int)p.columns - rows * grid;
    int first = number * rows + (number < over ? number : over), last = first + rows + (number < over);
    // A row of fewer blocks than a slot has fills it alone: a slot has blocks of two tiles at most.
    int per = blocks < ITEMS ? blocks : ITEMS, all = (last - first + 15) / 16 * blocks, turns = (all + per - 1) / per;
    Eights eights(p, warp < CREW ? (int)threadIdx.x : (int)p.depth, 32 * CREW);
    if (lane == 0) {  // a warp a barrier: to begin one takes long
        for (int i = warp; i < 3 * slots; i += CREW + SENDERS + ADDERS)
            phases_begin(full + i, i < slots ? 16 : i < 2 * slots ? ITEMS / T::AT_ONCE : T::ADD);
        phases_seen();
    }
    __syncthreads();
    if (warp >= CREW && warp < CREW + SENDERS) return send_for<TYPE>(p, first, last, turns, per, slots, ring, full, empty);
    if (warp >= CREW + SENDERS + T::ADD) return;
    if (warp >= CREW) return add_up<TYPE>(p, first, last, turns, per, slots, ring, ones, done, empty);
    if constexpr (T::GRID) unfold<TYPE>(tables);
    code_tiles<TYPE>(p, eights, codes, scales, sums);
    team_meets(1, 32 * CREW);
    constexpr int MATES = ITEMS / T::AT_ONCE, TEAMS = CREW / MATES;  // warps of a slot
    int g = lane >> 2, t = lane & 3, item = warp % MATES, slot = warp / MATES;
    if constexpr (T::SUMS == 1) {
        item = 4 * item + (lane >> 3);
        g = lane & 7;
    }
    unsigned parity = 0;
    Place at = {0, 0};
    at.forward(slot * per + item, blocks);
    for (int turn = slot; turn < turns; turn += TEAMS) {
        phase_over(full + slot, parity);
        if (item < per && turn * per + item < all) {
            u8* held = ring + slot * T::SLOT;
            const u8* mine[2];
            int begin = at.block < item ? item - at.block : 0;  // of this stretch
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                int row = g + 8 * k, within = item * T::BYTES;
                if constexpr (!T::ALIGNED) {
                    i64 away = (first + 16 * at.tile + row) * p.stride + (at.block - item + begin) * T::BYTES;
                    within = T::start_of(begin) + ((int)(unsigned long long)(p.b + away) & 15) + (item - begin) * T::BYTES;
                }
                mine[k] = held + row * T::PITCH + within;
            }
            const u8* met = codes + at.block * T::CODES;
            float d = scales[at.block];
            if constexpr (T::SUMS == 8) {
                int total[4];
                float factor[2], less;
                meet_lanes<TYPE>(total, factor, less, mine, met, d, sums + T::A_SUMS * at.block, g, t);
                warp_meets();  // everybody has read the block
                u8* to = held + T::terms_of(item);
                if (T::LOWS && t < 2) *(float*)(to + (g + 8 * t) * T::PITCH + 32) = less;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float x = factor[k] * (float)total[2 * k], y = factor[k] * (float)total[2 * k + 1];
                    *(uint2*)(to + (g + 8 * k) * T::PITCH + 8 * t) = {(unsigned)vt_bits(x), (unsigned)vt_bits(y)};
                }
            } else {
                float term[2];
                meet_whole<TYPE>(term, mine, met, d, sums + T::A_SUMS * at.block, (const u8*)(tables + lane));
                ones[(slot * ITEMS + item) * 16 + g] = term[0];
                ones[(slot * ITEMS + item) * 16 + g + 8] = term[1];
            }
        }
        warp_meets();
        if (lane == 0) arrive(done + slot);
        slot += TEAMS;
        if (slot >= slots) {
            slot -= slots;
            parity ^= 1;
        }
        at.forward(TEAMS * per, blocks);
    }
}
