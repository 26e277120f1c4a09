// Blocks of 256: sixteen rows of the weight at once meet the row of a; warps have one kind of work each.
//
// Senders bring bytes by the copy engine: a slot of a ring is sixteen rows by up to sixteen blocks, neighbours in the
// order of tiles and, within a tile, of blocks, so that a slot may end one tile and begin another: two stretches of a
// row. They send for the first slots before anybody else has begun, and for the others once the row of a is coded: loads
// of it would wait for all that. Sixteen warps code that row first; then they take a slot's blocks, one at a time on the
// tensor cores where sums run in eight lanes (ggml_meet.cuh), else four (ggml_whole.cuh), and leave their terms where the
// block was, or beside the ring. Adders add terms in the order of blocks and hand the slot back. Nobody waits for a
// neighbour, but for bytes, for terms or for a slot.
#pragma once
#include "early.cuh"
#include "ggml_meet.cuh"
#include "ggml_share.cuh"
#include "ggml_whole.cuh"

// The row's codes, of each block its scale, and the sums of its units or of their halves.
template <int TYPE> VT_MEMBER void code_tiles(const Share& w, Eights& eights) {
    using T = Tiles<TYPE>;
    int lane = threadIdx.x & 31, part = lane & 3, unit = lane >> 2;
#pragma unroll 1
    for (int block = (int)threadIdx.x >> 5; block < w.blocks; block += CREW) {
        float x[8];
        eights.next(x);
        Words c = words_256(x);
        u8* codes = w.codes + block * T::CODES;
        u8* to = codes + (unit >> 1) * (T::CODES / 4) + (unit & 1) * 8;
        if constexpr (T::SUMS == 1) {
            *(uint2*)(codes + lane * 8) = {c.low, c.high};
        } else if constexpr (T::ALIGNED) {
            *(uint2*)(to + part * 16) = {c.low, c.high};
        } else {
            unsigned* words = (unsigned*)(to + (part & 1) * 32 + (part >> 1) * 4);
            words[0] = c.low;
            words[4] = c.high;
        }
        if constexpr (T::MINIMUM) {
            int total = dot4(c.low, 0x01010101u, dot4(c.high, 0x01010101u, 0));
            total += __shfl_xor_sync(ALL, total, 1);
            if constexpr (!T::HALVES) total += __shfl_xor_sync(ALL, total, 2);
            unsigned short* to = w.sums + block * T::A_SUMS + (T::HALVES ? lane / 2 : unit);
            if (T::HALVES ? (part & 1) == 0 : part == 0) *to = (unsigned short)total;
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

// One tile's blocks after the other's.
struct InTurn {
    int blocks;
    Place place = {0, 0};
    VT_MEMBER InTurn(int all) : blocks(all) {}
    VT_MEMBER int tile() const { return place.tile; }
    VT_MEMBER int block() const { return place.block; }
    // Blocks of a tile that follow each other from here on, `left` at most.
    VT_MEMBER int together(int left) const { return blocks - place.block < left ? blocks - place.block : left; }
    VT_MEMBER void forward(int step) { place.forward(step, blocks); }
};

// How far a sender has come, and the blocks that are left, in their ORDER.
template <class ORDER> struct Sent {
    ORDER at;
    int slot, left;
    unsigned parity;
};

// Rows from the sixteen bytes that a stretch begins in, for so many slots at most; nothing past the weight is touched.
template <int TYPE, class ORDER>
VT_MEMBER void send_for(const Row& p, const Share& w, Sent<ORDER>& sent, int slots, bool wait) {
    using T = Tiles<TYPE>;
    int lane = threadIdx.x & 31, mine = ((int)threadIdx.x / 32 - CREW) * (16 / SENDERS) + lane;
    bool sends = lane < 16 / SENDERS;
    ORDER& at = sent.at;
    int& slot = sent.slot;
    for (; sent.left > 0 && slots > 0; --slots) {
        if (wait) phase_over(w.empty + slot, sent.parity);
        int count = sent.left < w.per ? sent.left : w.per;
        sent.left -= count;
        for (int item = 0; item < count;) {
            int n = at.together(count - item), row = w.first + 16 * at.tile() + mine;
            if (sends && row < w.last) {
                const u8* from = p.b + row * p.stride + at.block() * T::BYTES;
                u8* to = w.ring + slot * T::SLOT + mine * T::PITCH + T::start_of(item);
                int skew = T::ALIGNED ? 0 : (int)(unsigned long long)from & 15, end = skew + n * T::BYTES;
                from -= skew;
                int whole = T::ALIGNED ? end : end + 15 & ~15;
                if (!T::ALIGNED && __builtin_expect(row + 1 == (int)p.columns && at.block() + n == w.blocks, 0)) {
                    whole = end & ~15;
#pragma unroll 1
                    for (int i = whole; i < end; i += 2)
                        *(unsigned short*)(to + i) = *(const unsigned short*)(from + i);
                }
                if (whole) stretch(to, from, whole, w.full + slot);
            }
            item += n;
            at.forward(n);
        }
        if (sends) arrive(w.full + slot);
        if (++slot == w.slots) {
            slot = 0;
            sent.parity ^= 1;
        }
    }
}

// Terms of the slots' blocks, one block after the other: a lane has one of a row's sums.
template <int TYPE> VT_MEMBER void add_up(const Row& p, const Share& w) {
    using T = Tiles<TYPE>;
    constexpr bool EIGHT = T::SUMS == 8;
    int lane = threadIdx.x & 31, adder = (int)threadIdx.x / 32 - CREW - SENDERS;
    // A warp's four rows, whose terms meet in no bank: neighbours, or every other one.
    int row = !EIGHT ? lane & 15 : T::ALIGNED ? adder * 4 + lane / 8 : adder / 2 * 8 + adder % 2 + lane / 8 * 2;
    int slot = 0, left = w.all, block = 0, top = w.first, own = EIGHT ? lane % 8 * 4 : 0;
    unsigned parity = 0;
    float sum = 0.0f, low = 0.0f, ready = 0.0f, ready_low = 0.0f;
    while (left > 0) {
        phase_over(w.done + slot, parity);
        bool again = left > w.slots * w.per, ends = false;  // whether others come into the slot; whether a tile ends in it
        int count = left < w.per ? left : w.per;
        left -= count;
        for (int item = 0; item < count;) {
            int n = w.blocks - block < count - item ? w.blocks - block : count - item;
            for (int i = 0; i < n; i += 8) {
                int first = item + i, here = n - i;
                const u8* from = EIGHT ? w.ring + slot * T::SLOT + row * T::PITCH
                                       : (const u8*)(w.ones + (slot * T::ITEMS + first) * 16 + row);
                if (here >= 8 && (!EIGHT || first % 8 == 0)) {  // their terms are at distances that are known when compiled
                    float term[8], less[8];
                    if constexpr (EIGHT) from += first * T::BYTES;
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        const u8* terms = from + (EIGHT ? T::terms_of(k) : 64 * k);
                        term[k] = *(const float*)(terms + own);
                        if constexpr (T::LOWS) less[k] = *(const float*)(terms + 32);
                    }
#pragma unroll
                    for (int k = 0; k < 8; ++k) {
                        sum = sum + term[k];
                        if (T::LOWS) low = low - less[k];
                    }
                } else {
#pragma unroll 1
                    for (int k = 0; k < 8 && k < here; ++k) {
                        const u8* terms = from + (EIGHT ? T::terms_of(first + k) : 64 * k);
                        sum = sum + *(const float*)(terms + own);
                        if constexpr (T::LOWS) low = low - *(const float*)(terms + 32);
                    }
                }
            }
            item += n;
            block += n;
            if (block < w.blocks) continue;
            ends = true;
            ready = sum, ready_low = low;
            sum = low = 0.0f;
            block = 0;
        }
        if (again) {
            before_copies();
            warp_meets();
            if (lane == 0) arrive(w.empty + slot);
        }
        if (ends) {  // one tile at most; its results are on their way when the slot is no longer waited for
            float total[1] = {ready_low};
            if constexpr (EIGHT) {
#pragma unroll
                for (int c = 0; c < 8; ++c) total[0] = total[0] + __shfl_sync(ALL, ready, (lane & 24) + c);
            } else {
                total[0] = ready * Block<TYPE>::FOLD;
            }
            bool mine = EIGHT ? lane % 8 == 0 : lane < 16;
            if (mine && top + row < w.last) store(p.out, top + row, total, (int)p.kind);
            top += 16;
        }
        if (++slot == w.slots) {
            slot = 0;
            parity ^= 1;
        }
    }
}

// A slot's blocks, as many at a time as T::AT_ONCE says.
template <int TYPE> VT_MEMBER void meet_up(const Row& p, const Share& w) {
    using T = Tiles<TYPE>;
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int item = warp % T::MATES, slot = warp / T::MATES;
    if (!T::ALIGNED && T::SUMS == 8) item ^= warp >> 2 & 1;  // blocks at odd halves of words take longer: two a scheduler
    if constexpr (T::SUMS == 1) {
        item = 4 * item + (lane >> 3);
        g = lane & 7;
    }
    unsigned parity = 0;
    InTurn at(w.blocks);
    at.forward(slot * w.per + item);
    int skew[2];  // of the rows' first bytes: sixteen rows further on it is the same
#pragma unroll
    for (int k = 0; k < 2; ++k)
        skew[k] = (int)(unsigned long long)(p.b + (w.first + g + 8 * k) * p.stride) & 15;
    int within[2], known = -1;
    float d = 0.0f;
    for (int before = slot * w.per; before < w.all; before += T::TEAMS * w.per) {
        phase_over(w.full + slot, parity);
        if (item < w.per && before + item < w.all) {
            u8* held = w.ring + slot * T::SLOT;
            const u8* mine[2];
            if (at.block() != known) {  // where rows have as many blocks as slots, it is always the same
                int begin = item - at.block(), moved = begin > 0 ? 0 : -begin * T::BYTES;
                int place = begin > 0 ? T::start_of(begin) + at.block() * T::BYTES : item * T::BYTES;
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    within[k] = (g + 8 * k) * T::PITCH + (T::ALIGNED ? item * T::BYTES : place + (skew[k] + moved & 15));
                d = w.scales[at.block()];
                known = at.block();
            }
#pragma unroll
            for (int k = 0; k < 2; ++k) mine[k] = held + within[k];
            const u8* codes = w.codes + at.block() * T::CODES;
            const unsigned short* sums = w.sums + at.block() * T::A_SUMS;
            if constexpr (T::SUMS == 8) {
                int total[4];
                float factor[2], less;
                meet_lanes<TYPE>(total, factor, less, mine, within, codes, d, sums, g, t);
                warp_meets();  // everybody has read the block
                u8* to = held + T::terms_of(item);
                if (T::LOWS && t < 2) *(float*)(to + (g + 8 * t) * T::PITCH + 32) = less;
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float x = factor[k] * (float)total[2 * k], y = factor[k] * (float)total[2 * k + 1];
                    *(uint2*)(to + (g + 8 * k) * T::PITCH + 8 * t) = {(unsigned)vt_bits(x), (unsigned)vt_bits(y)};
                }
            } else {
                float term[2], *to = w.ones + (slot * T::ITEMS + item) * 16 + g;
                meet_whole<TYPE>(term, mine, codes, d, sums);
#pragma unroll
                for (int k = 0; k < 2; ++k) to[8 * k] = term[k];
            }
        }
        warp_meets();
        arrive(w.done + slot);  // each lane for its own terms: race checkers do not let one lane speak for all
        slot += T::TEAMS;
        if (slot >= w.slots) {
            slot -= w.slots;
            parity ^= 1;
        }
        at.forward(T::TEAMS * w.per);
    }
}

// What senders and adders do before the row of a is coded: the ring's barriers, those that `mates` warps arrive at, and
// whatever is sent for first.
template <int TYPE, class ORDER>
VT_MEMBER void begin_ring(const Row& p, const Share& w, Sent<ORDER>& sent, int mates, int adders) {
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    if (warp < CREW + SENDERS) {
        if (lane == 0) {  // a warp a barrier: to begin one takes long
#pragma unroll 1
            for (int i = warp - CREW; i < w.slots; i += SENDERS) phases_begin(w.full + i, 16);
            phases_seen();
        }
        team_meets(1, 32 * SENDERS);
        after_others();
        send_for<TYPE>(p, w, sent, w.blocks > CREW ? 2 : 1, false);  // any more would keep loads of a waiting
    } else if (warp < CREW + SENDERS + adders) {
        if (lane == 0) {
#pragma unroll 1
            for (int i = warp - CREW - SENDERS; i < w.slots; i += adders) {
                phases_begin(w.done + i, 32 * mates);
                phases_begin(w.empty + i, adders);
            }
            phases_seen();
        }
        after_others();
    }
}

// `slots` are a multiple of TEAMS: the same warps have a slot again and again, and see each of its phases.
template <int TYPE> VT_MEMBER void in_tiles(const Row& p, int grid, int each, int slots) {
    using T = Tiles<TYPE>;
    VT_SHARED(memory);
    others_may_start();
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    Share w;
    w.blocks = (int)(p.depth / 256);
    w.slots = slots;
    w.full = (u64*)memory;
    w.done = w.full + MOST_SLOTS;
    w.empty = w.done + MOST_SLOTS;
    w.ones = (float*)(memory + 24 * MOST_SLOTS);
    w.ring = (u8*)w.ones + (T::SUMS == 1 ? slots * T::ITEMS * 64 : 0);
    w.codes = w.ring + slots * T::SLOT;
    w.sums = (unsigned short*)(w.codes + w.blocks * T::CODES);
    w.scales = (float*)(w.sums + w.blocks * T::A_SUMS);
    w.first = begin_of((int)blockIdx.x, grid, (int)p.columns, each);
    w.last = begin_of((int)blockIdx.x + 1, grid, (int)p.columns, each);
    // A row of fewer blocks than a slot has fills it alone: a slot has blocks of two tiles at most.
    w.per = w.blocks < T::ITEMS ? w.blocks : T::ITEMS;
    w.all = (w.last - w.first + 15) / 16 * w.blocks;
    Sent<InTurn> sent = {InTurn(w.blocks), 0, w.all, 1};
    if (warp < CREW) {
        after_others();
        Eights eights(p, (int)threadIdx.x, 32 * CREW);
        code_tiles<TYPE>(w, eights);
    } else {
        begin_ring<TYPE>(p, w, sent, T::MATES, T::ADD);
    }
    __syncthreads();
    if (warp < CREW) meet_up<TYPE>(p, w);
    else if (warp < CREW + SENDERS) send_for<TYPE>(p, w, sent, 0x7fffffff, true);
    else if (warp < CREW + SENDERS + T::ADD) add_up<TYPE>(p, w);
}
