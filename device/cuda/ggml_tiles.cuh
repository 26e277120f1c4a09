// Blocks of 256: sixteen rows of the weight at once meet the row of a; warps have one kind of work each.
//
// Senders bring bytes by the copy engine: a slot of a ring is sixteen rows by up to sixteen blocks, neighbours in the
// order of tiles and, within a tile, of blocks, so that a slot may end one tile and begin another: two stretches of a
// row. They begin as soon as the row of a is asked for. Sixteen warps code that row; then they take a slot's blocks, one at
// a time on the tensor cores (ggml_meet.cuh), and leave its rows' terms where the block was. An adder adds terms in the
// order of blocks and hands the slot back. Nobody waits for a neighbour, but for codes, bytes, terms or a slot.
#pragma once
#include "early.cuh"
#include "ggml_meet.cuh"
#include "ggml_row_codes.cuh"
#include "ggml_whole.cuh"

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

// How far a sender has come, and the blocks that are left.
struct Sent {
    InTurn at;
    int slot, left;
    unsigned parity;
};

// Rows from the sixteen bytes that a stretch begins in, for all slots; nothing past the weight is touched.
template <int TYPE> VT_MEMBER void send_for(const Row& p, const Share& w, Sent& sent) {
    using T = Tiles<TYPE>;
    int lane = threadIdx.x & 31, mine = ((int)threadIdx.x / 32 - CREW) * (16 / SENDERS) + lane;
    bool sends = lane < 16 / SENDERS;
    InTurn& at = sent.at;
    int& slot = sent.slot;
    while (sent.left > 0) {
        phase_over(w.empty + slot, sent.parity);
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

// Terms of the slots' blocks, one block after the other: a lane has a row's sum. What this warp has to do for a slot keeps
// others waiting at the end, so it is as little as can be where eight blocks are of one tile.
template <int TYPE> VT_MEMBER void add_up(const Row& p, const Share& w) {
    using T = Tiles<TYPE>;
    int lane = threadIdx.x & 31, row = lane & 15, slot = 0, last = w.blocks, top = w.first;  // last: blocks of this tile
    unsigned parity = 0;
    float sum = 0.0f;
    for (int left = w.all; left > 0; left -= w.per) {
        phase_over(w.done + slot, parity);
        const u8* from = w.ring + slot * T::SLOT + row * T::PITCH;
        float term[T::ITEMS], total[1] = {0.0f};
        bool ends = false;
#pragma unroll
        for (int i = 0; i < T::ITEMS; ++i) term[i] = *(const float*)(from + T::terms_of(i));
        int count = left < w.per ? left : w.per;
#pragma unroll
        for (int item = 0; item < T::ITEMS; item += 8) {
            if (last >= 8 && count - item >= 8) {
#pragma unroll
                for (int k = 0; k < 8; ++k) sum = sum + term[item + k];
                last -= 8;
            } else {
#pragma unroll 1
                for (int k = item; k < item + 8 && k < count; ++k) {
                    sum = sum + *(const float*)(from + T::terms_of(k));
                    if (--last) continue;
                    ends = true;
                    total[0] = sum;
                    sum = 0.0f;
                    last = w.blocks;
                }
            }
            if (last) continue;
            ends = true;  // one tile at most
            total[0] = sum;
            sum = 0.0f;
            last = w.blocks;
        }
        if (left > w.slots * w.per) {  // others come into the slot
            before_copies();
            warp_meets();
            if (lane == 0) arrive(w.empty + slot);
        }
        if (ends) {  // its results are on their way when the slot is no longer waited for
            if (lane < 16 && top + row < w.last) store(p.out, top + row, total, (int)p.kind);
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
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5, g = T::WHOLE ? lane & 7 : lane >> 2, t = lane & 3;
    int item = warp % T::MATES, slot = warp / T::MATES, step = T::TEAMS * w.per;
    if (TYPE == Q6_K) item ^= warp >> 2 & 1;  // blocks at odd halves of words take longer: two a scheduler
    if (T::WHOLE) item = 4 * item + (lane >> 3);
    int block = slot * w.per + item;
    while (block >= w.blocks) block -= w.blocks;
    while (step >= w.blocks) step -= w.blocks;
    unsigned parity = 0;
    int skew[2];  // of the rows' first bytes: sixteen rows further on it is the same
#pragma unroll
    for (int k = 0; k < 2; ++k)
        skew[k] = (int)(unsigned long long)(p.b + (w.first + g + 8 * k) * p.stride) & 15;
    int within[2], known = -1;
    Coded a;
    for (int before = slot * w.per; before < w.all; before += T::TEAMS * w.per) {
        bool has = item < w.per && before + item < w.all;
        if (has && known != block) {  // where rows have as many blocks as slots, it is always the same
            int begin = item - block, moved = begin > 0 ? 0 : -begin * T::BYTES;
            int place = begin > 0 ? T::start_of(begin) + block * T::BYTES : item * T::BYTES;
#pragma unroll
            for (int k = 0; k < 2; ++k)
                within[k] = (g + 8 * k) * T::PITCH + (T::ALIGNED ? item * T::BYTES : place + (skew[k] + moved & 15));
            known = block;
            if constexpr (T::WHOLE) a.d = w.scales[known];
            else take_coded<TYPE>(a, w, known, g, t);
        }
        phase_over(w.full + slot, parity);
        if (has) {
            u8 *held = w.ring + slot * T::SLOT, *to = held + T::terms_of(item) + g * T::PITCH;
            const u8* const mine[2] = {held + within[0], held + within[1]};
            if constexpr (T::WHOLE) {
                float term[2];
                meet_whole(term, mine, w.codes + block * T::CODES, a.d, w.sums + block * T::A_SUMS);
#pragma unroll
                for (int k = 0; k < 2; ++k) *(float*)(to + 8 * k * T::PITCH) = term[k];
            } else {
                float term = meet_block<TYPE>(mine, within, a, t);
                warp_meets();  // everybody has read the block
                if (t < 2) *(float*)(to + 8 * t * T::PITCH) = term;
            }
        }
        arrive(w.done + slot);  // each lane for its own terms: race checkers do not let one lane speak for all
        slot += T::TEAMS;
        if (slot >= w.slots) {
            slot -= w.slots;
            parity ^= 1;
        }
        block += step;
        if (block >= w.blocks) block -= w.blocks;
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
    w.ring = memory + 24 * MOST_SLOTS;
    w.codes = w.ring + slots * T::SLOT;
    w.sums = (unsigned short*)(w.codes + w.blocks * T::CODES);
    w.scales = (float*)(w.sums + w.blocks * T::A_SUMS);
    w.first = begin_of((int)blockIdx.x, grid, (int)p.columns, each);
    w.last = begin_of((int)blockIdx.x + 1, grid, (int)p.columns, each);
    // A row of fewer blocks than a slot has fills it alone: a slot has blocks of two tiles at most.
    w.per = w.blocks < T::ITEMS ? w.blocks : T::ITEMS;
    w.all = (w.last - w.first + 15) / 16 * w.blocks;
    constexpr int ARRIVALS[3] = {16, 32 * T::MATES, 1};
    if (lane == 0) {  // each warp some of the barriers: to begin one takes long
#pragma unroll
        for (int i = warp; i < 3 * MOST_SLOTS; i += CREW + SENDERS + 1)
            phases_begin(w.full + i, i < MOST_SLOTS ? ARRIVALS[0] : i < 2 * MOST_SLOTS ? ARRIVALS[1] : ARRIVALS[2]);
        phases_seen();
    }
    after_others();
    Eights eights(p, warp < CREW ? (int)threadIdx.x : (int)p.depth, 32 * CREW);  // asked for before the weight
    __syncthreads();
    if (warp < CREW) {
        code_tiles<TYPE>(w, eights);
        team_meets(1, 32 * CREW);
        meet_up<TYPE>(p, w);
    } else if (warp < CREW + SENDERS) {
        Sent sent = {InTurn(w.blocks), 0, w.all, 1};
        send_for<TYPE>(p, w, sent);
    } else {
        add_up<TYPE>(p, w);
    }
}
