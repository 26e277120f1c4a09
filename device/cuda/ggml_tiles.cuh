// Blocks of 256: sixteen rows of the weight at once meet the row of a; warps have one kind of work each.
//
// Senders bring bytes by the copy engine: a slot of a ring is sixteen rows by up to sixteen blocks, neighbours in the
// order of tiles and, within a tile, of blocks, so that a slot may end one tile and begin another: two stretches of a
// row. Sixteen warps code the row of a first; then they take a slot's blocks, one at a time on the tensor cores where
// sums run in eight lanes (ggml_meet.cuh), else four (ggml_whole.cuh), and leave their terms where the block was, or
// beside the ring. Adders add terms in the order of blocks and hand the slot back. Nobody waits for a neighbour, but
// for bytes, for terms or for a slot. There are four senders and four adders because one warp's copies or sums of a
// slot would take longer than the products.
#pragma once
#include "ggml_ring.cuh"
#include "ggml_whole.cuh"

constexpr int ITEMS = 16;                // blocks of each row in a slot
constexpr int SENDERS = 4, ADDERS = 4;  // warps that send for a slot and add its terms, rows by rows

template <int TYPE> struct Tiles {
    static constexpr int BYTES = Block<TYPE>::BYTES, SUMS = Block<TYPE>::LANES ? 8 : 1;  // SUMS: of a row
    static constexpr bool ALIGNED = BYTES % 16 == 0, GRID = TYPE == IQ2_XXS || TYPE == IQ3_XXS;
    static constexpr int ADD = SUMS == 8 ? ADDERS : 1;  // warps that add
    static constexpr int AT_ONCE = SUMS == 1 ? 4 : 1;  // blocks of sixteen rows that a warp has
    static constexpr bool MINIMUM = Block<TYPE>::MINIMUM, HALVES = TYPE == Q2_K;  // HALVES: minimums of half units
    static constexpr bool LANE_SUMS = TYPE == Q3_K;               // sums of the activations by lanes, not by units
    static constexpr bool PAIRED = ALIGNED || LANE_SUMS;          // lane t has words 2 t and 2 t + 1, else t and t + 4
    static constexpr int A_SUMS = LANE_SUMS ? 8 : MINIMUM ? HALVES ? 16 : 8 : 0;  // the activations', of a block
    static constexpr bool LOWS = MINIMUM && SUMS == 8;            // minimums run by themselves
    // From row to row of a slot: rows' words of one number meet in no bank.
    static constexpr int PITCH = ALIGNED ? ITEMS * BYTES + 32 : 16 * ((ITEMS * BYTES + 80) / 16 | 1);
    static constexpr int SLOT = 16 * PITCH;
    static constexpr int CODES = SUMS == 1 ? 272 : 256;  // from block to block of the row of a: four meet in no bank

    // Where the stretch begins that has blocks from number `item` of a slot on: the 16 bytes that its first one is in.
    static VT_MEMBER int start_of(int item) {
        return ALIGNED ? item * BYTES : (item * BYTES + 15 & ~15) + (item ? 32 : 0);
    }
    // Where a row leaves its eight terms of block `item`, and that of its minimums after them: within that block.
    static VT_MEMBER int terms_of(int item) { return ALIGNED ? item * BYTES : item * BYTES + 64 + 15 & ~15; }
};

// What the warps of a block share: rows [first, last) of the weight, `turns` slots of `per` blocks but for the last,
// and memory: barriers of the ring's slots, terms of blocks with one sum, the ring, and the row of a.
struct Share {
    int blocks, first, last, per, all, turns, slots;
    u64 *full, *done, *empty;
    float* ones;
    u8 *tables, *ring, *codes;
    unsigned short* sums;
    float* scales;
};

// The row's codes, of each block its scale, and the sums of its units or of their halves, or by lanes.
template <int TYPE> VT_MEMBER void code_tiles(const Share& w, Eights& eights) {
    using T = Tiles<TYPE>;
    int lane = threadIdx.x & 31, part = lane & 3, unit = lane >> 2;
    for (int block = (int)threadIdx.x >> 5; block < w.blocks; block += CREW) {
        float x[8];
        eights.next(x);
        Codes c = codes_256(x);
        unsigned low = packed4(c.code[0], c.code[1], c.code[2], c.code[3]);
        unsigned high = packed4(c.code[4], c.code[5], c.code[6], c.code[7]);
        u8* codes = w.codes + block * T::CODES;
        u8* to = codes + (unit >> 1) * 64 + (unit & 1) * 8;
        if constexpr (T::SUMS == 1) {
            *(uint2*)(codes + lane * 8) = {low, high};
        } else if constexpr (T::PAIRED) {
            *(uint2*)(to + part * 16) = {low, high};
        } else {
            unsigned* words = (unsigned*)(to + (part & 1) * 32 + (part >> 1) * 4);
            words[0] = low;
            words[4] = high;
        }
        if constexpr (T::MINIMUM) {
            int total = c.total + __shfl_xor_sync(ALL, c.total, 1);
            if constexpr (!T::HALVES) total += __shfl_xor_sync(ALL, total, 2);
            unsigned short* to = w.sums + block * T::A_SUMS + (T::HALVES ? lane / 2 : unit);
            if (T::HALVES ? (part & 1) == 0 : part == 0) *to = (unsigned short)total;
        }
        if constexpr (T::LANE_SUMS) {
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                int two = c.code[i] + c.code[i + 1] * 65536;
#pragma unroll
                for (int m = 1; m <= 16; m *= 2) two += __shfl_xor_sync(ALL, two, m);
                if (lane == i) *(int*)(w.sums + block * 8 + i) = (two & 0xffff) | (two - (short)two & ~0xffff);
            }
        }
        if (lane == 0) w.scales[block] = c.d;
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
template <int TYPE> VT_MEMBER void send_for(const Row& p, const Share& w) {
    using T = Tiles<TYPE>;
    int lane = threadIdx.x & 31, mine = ((int)threadIdx.x / 32 - CREW) * (16 / SENDERS) + lane, slot = 0, left = w.all;
    bool sends = lane < 16 / SENDERS;
    unsigned parity = 1;
    Place at = {0, 0};
    for (int turn = 0; turn < w.turns; ++turn) {
        phase_over(w.empty + slot, parity);
        int count = left < w.per ? left : w.per;
        left -= count;
        for (int item = 0; item < count;) {
            int n = w.blocks - at.block < count - item ? w.blocks - at.block : count - item;
            int row = w.first + 16 * at.tile + mine;
            if (sends && row < w.last) {
                const u8* from = p.b + row * p.stride + at.block * T::BYTES;
                u8* to = w.ring + slot * T::SLOT + mine * T::PITCH + T::start_of(item);
                int skew = T::ALIGNED ? 0 : (int)(unsigned long long)from & 15, end = skew + n * T::BYTES;
                from -= skew;
                int whole = T::ALIGNED ? end : end + 15 & ~15;
                if (!T::ALIGNED && row + 1 == (int)p.columns && at.block + n == w.blocks) {
                    whole = end & ~15;
                    for (int i = whole; i < end; i += 2)
                        *(unsigned short*)(to + i) = *(const unsigned short*)(from + i);
                }
                if (whole) stretch(to, from, whole, w.full + slot);
            }
            item += n;
            at.forward(n, w.blocks);
        }
        if (sends) arrive(w.full + slot);
        if (++slot == w.slots) {
            slot = 0;
            parity ^= 1;
        }
    }
}

// Terms of the slots' blocks, one block after the other: a lane has one of a row's sums.
template <int TYPE> VT_MEMBER void add_up(const Row& p, const Share& w) {
    using T = Tiles<TYPE>;
    constexpr bool EIGHT = T::SUMS == 8;
    int lane = threadIdx.x & 31, row = EIGHT ? ((int)threadIdx.x / 32 - CREW - SENDERS) * 4 + lane / 8 : lane & 15;
    int slot = 0, left = w.all, block = 0, top = w.first;
    unsigned parity = 0;
    float sum = 0.0f, low = 0.0f;
    for (int turn = 0; turn < w.turns; ++turn) {
        phase_over(w.done + slot, parity);
        int count = left < w.per ? left : w.per;
        left -= count;
        for (int item = 0; item < count;) {
            int n = w.blocks - block < count - item ? w.blocks - block : count - item;
            for (int i = 0; i < n; i += 8) {
                float term[8], less[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    term[k] = less[k] = 0.0f;
                    if (i + k >= n) continue;
                    if constexpr (EIGHT) {
                        const u8* from = w.ring + slot * T::SLOT + row * T::PITCH + T::terms_of(item + i + k);
                        term[k] = *(const float*)(from + lane % 8 * 4);
                        if constexpr (T::LOWS) less[k] = *(const float*)(from + 32);
                    } else {
                        term[k] = w.ones[(slot * ITEMS + item + i + k) * 16 + row];
                    }
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
            if (block < w.blocks) continue;
            float total[1] = {low};
            if constexpr (EIGHT) {
#pragma unroll
                for (int c = 0; c < 8; ++c) total[0] = total[0] + __shfl_sync(ALL, sum, (lane & 24) + c);
            } else {
                total[0] = sum * Block<TYPE>::FOLD;
            }
            bool mine = EIGHT ? lane % 8 == 0 : lane < 16;
            if (mine && top + row < w.last) store(p.out, top + row, total, (int)p.kind);
            sum = low = 0.0f;
            block = 0;
            top += 16;
        }
        before_copies();
        warp_meets();
        if (lane == 0) arrive(w.empty + slot);
        if (++slot == w.slots) {
            slot = 0;
            parity ^= 1;
        }
    }
}

// A slot's blocks, as many at a time as T::AT_ONCE says.
template <int TYPE> VT_MEMBER void meet_up(const Row& p, const Share& w) {
    using T = Tiles<TYPE>;
    constexpr int MATES = ITEMS / T::AT_ONCE, TEAMS = CREW / MATES;  // MATES: warps of a slot
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int item = warp % MATES, slot = warp / MATES;
    if constexpr (T::SUMS == 1) {
        item = 4 * item + (lane >> 3);
        g = lane & 7;
    }
    unsigned parity = 0;
    Place at = {0, 0};
    at.forward(slot * w.per + item, w.blocks);
    for (int turn = slot; turn < w.turns; turn += TEAMS) {
        phase_over(w.full + slot, parity);
        if (item < w.per && turn * w.per + item < w.all) {
            u8* held = w.ring + slot * T::SLOT;
            const u8* mine[2];
            int begin = at.block < item ? item - at.block : 0;  // of this stretch
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                int row = g + 8 * k, within = item * T::BYTES;
                if constexpr (!T::ALIGNED) {
                    i64 away = (w.first + 16 * at.tile + row) * p.stride + (at.block - item + begin) * T::BYTES;
                    int skew = (int)(unsigned long long)(p.b + away) & 15;
                    within = T::start_of(begin) + skew + (item - begin) * T::BYTES;
                }
                mine[k] = held + row * T::PITCH + within;
            }
            const u8* codes = w.codes + at.block * T::CODES;
            const unsigned short* sums = w.sums + at.block * T::A_SUMS;
            float d = w.scales[at.block];
            if constexpr (T::SUMS == 8) {
                int total[4];
                float factor[2], less;
                meet_lanes<TYPE>(total, factor, less, mine, codes, d, sums, g, t);
                warp_meets();  // everybody has read the block
                u8* to = held + T::terms_of(item);
                if (T::LOWS && t < 2) *(float*)(to + (g + 8 * t) * T::PITCH + 32) = less;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float x = factor[k] * (float)total[2 * k], y = factor[k] * (float)total[2 * k + 1];
                    *(uint2*)(to + (g + 8 * k) * T::PITCH + 8 * t) = {(unsigned)vt_bits(x), (unsigned)vt_bits(y)};
                }
            } else {
                float term[2], *to = w.ones + (slot * ITEMS + item) * 16 + g;
                meet_whole<TYPE>(term, mine, codes, d, sums, w.tables + 4 * lane);
                to[0] = term[0];
                to[8] = term[1];
            }
        }
        warp_meets();
        arrive(w.done + slot);  // each lane for its own terms: race checkers do not let one lane speak for all
        slot += TEAMS;
        if (slot >= w.slots) {
            slot -= w.slots;
            parity ^= 1;
        }
        at.forward(TEAMS * w.per, w.blocks);
    }
}

// `slots` are a multiple of TEAMS: the same warps have a slot again and again, and see each of its phases.
template <int TYPE> VT_MEMBER void in_tiles(const Row& p, int grid, int slots) {
    using T = Tiles<TYPE>;
    VT_SHARED(memory);
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    Share w;
    w.blocks = (int)(p.depth / 256);
    w.slots = slots;
    w.full = (u64*)memory;
    w.done = w.full + slots;
    w.empty = w.done + slots;
    w.tables = memory + (slots * 24 + 15 & ~15);
    w.ones = (float*)(w.tables + (T::GRID ? (GRID_WORDS + SIGN_WORDS) * 4 : 0));
    w.ring = (u8*)w.ones + (T::SUMS == 1 ? slots * ITEMS * 64 : 0);
    w.codes = w.ring + slots * T::SLOT;
    w.sums = (unsigned short*)(w.codes + w.blocks * T::CODES);
    w.scales = (float*)(w.sums + w.blocks * T::A_SUMS);
    // The first blocks have a row more where rows do not come out even.
    int number = (int)blockIdx.x, rows = (int)((unsigned)p.columns / (unsigned)grid);
    int over = (int)p.columns - rows * grid;
    w.first = number * rows + (number < over ? number : over);
    w.last = w.first + rows + (number < over);
    // A row of fewer blocks than a slot has fills it alone: a slot has blocks of two tiles at most.
    w.per = w.blocks < ITEMS ? w.blocks : ITEMS;
    w.all = (w.last - w.first + 15) / 16 * w.blocks;
    w.turns = (w.all + w.per - 1) / w.per;
    Eights eights(p, warp < CREW ? (int)threadIdx.x : (int)p.depth, 32 * CREW);
    if (lane == 0) {  // a warp a barrier: to begin one takes long
        for (int i = warp; i < 3 * slots; i += CREW + SENDERS + ADDERS)
            phases_begin(w.full + i, i < slots ? 16 : i < 2 * slots ? 32 * ITEMS / T::AT_ONCE : T::ADD);
        phases_seen();
    }
    __syncthreads();
    if (warp >= CREW + SENDERS + T::ADD) return;
    if (warp >= CREW + SENDERS) return add_up<TYPE>(p, w);
    if (warp >= CREW) return send_for<TYPE>(p, w);
    if constexpr (T::GRID) unfold<TYPE>((unsigned*)w.tables);
    code_tiles<TYPE>(w, eights);
    team_meets(1, 32 * CREW);
    meet_up<TYPE>(p, w);
}
