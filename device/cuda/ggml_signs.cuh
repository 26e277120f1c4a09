// One row meets the i-quants' blocks of 256: a lane has whole blocks of two rows of the weight, and makes bytes of
// their values with one permutation each for four of them, which then meet four activations at once.
//
// Where rows lie one after the other and their blocks fit a slot of the ring, sixteen of them are one stretch; else they
// are sent for as in ggml_tiles.cuh. Who sends waits for nobody: the copy engine takes one stretch after the other, some
// 400 cycles each, and whoever comes first is the first to be met.
#pragma once
#include "early.cuh"
#include "ggml_sign_tables.cuh"

// The terms of a lane's block of two rows.
template <int TYPE>
VT_MEMBER void meet_signs(float (&term)[2], const u8* const (&p)[2], const u8* codes, float d, Tables tables) {
    const uint4* x = (const uint4*)codes;
    int total[2] = {0, 0};
    unsigned select[2];
    const unsigned* q[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        unsigned apart = (unsigned)(unsigned long long)(p[r] + 2) & 2;
        q[r] = (const unsigned*)(p[r] + 2 - apart);
        select[r] = apart ? 0x5432u : 0x3210u;
    }
    auto word = [&](int r, int i) { return picked(q[r][i], q[r][i + 1], select[r]); };
#pragma unroll
    for (int u = 0; u < 8; ++u) {
        uint4 one = x[2 * u], two = x[2 * u + 1];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            unsigned low = word(r, 2 * u), high = word(r, 2 * u + 1);
            unsigned beside = TYPE == IQ2_XXS ? high : word(r, 16 + u), v[8];
            if (TYPE == IQ2_XXS) high = low;
            eight_values<TYPE, 0>(v[0], v[1], tables, low, beside);
            eight_values<TYPE, 1>(v[2], v[3], tables, low, beside);
            eight_values<TYPE, 2>(v[4], v[5], tables, high, beside);
            eight_values<TYPE, 3>(v[6], v[7], tables, high, beside);
            int sum = dot4(v[3], one.w, dot4(v[2], one.z, dot4(v[1], one.y, dot4(v[0], one.x, 0))));
            sum = dot4(v[7], two.w, dot4(v[6], two.z, dot4(v[5], two.y, dot4(v[4], two.x, sum))));
            total[r] += (int)(beside >> 27 | 1) * sum;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) term[r] = (float)total[r] * (f16_at(p[r]) * d);
}

// Warps besides the crew's sixteen: SENDERS, of which all but one add where a slot's rows are one stretch, and MORE,
// which fill the tables and then join the crew; the last of them add where rows are stretches of their own. Turns take
// barriers in turn, no fewer than there are slots, and so many that the same warps have each of a barrier's phases: a
// multiple of the teams, or of those that add.
constexpr int MORE = 12, ALL_WARPS = CREW + SENDERS + MORE, FULLS = 16, DONES = 12;
constexpr int ITEMS = Tiles<IQ2_XXS>::ITEMS;  // blocks of each row in a slot

// The share of a block of warps whose rows lie one after the other, or not.
struct Signs : Share {
    bool whole;
    u8* tables;
    int turns, skew, size, teams, fulls;  // skew: of the first row to a multiple of 16; size: of a slot; teams: of four warps
};

// A place in a ring, and whether its end was passed an odd number of times; a step is no longer than the ring.
struct Turning {
    int at = 0;
    unsigned parity = 0;
    VT_MEMBER void forward(int step, int size) {
        at += step;
        if (at < size) return;
        at -= size;
        parity ^= 1;
    }
};

// The stretch of turn number `turn` on its way into `slot`; nothing past the weight is touched.
VT_MEMBER void send_whole(const Row& p, const Signs& w, int turn, int slot, u64* full) {
    int row = w.first + 16 * turn, rows = w.last - row < 16 ? w.last - row : 16;
    int end = w.skew + rows * (int)p.stride, bytes = end + 15 & ~15;
    const u8* from = p.b + row * p.stride - w.skew;
    u8* to = w.ring + slot * w.size;
    if (row + rows == (int)p.columns) {
        bytes = end & ~15;
        for (int i = bytes; i < end; i += 2) *(unsigned short*)(to + i) = *(const unsigned short*)(from + i);
    }
    if (bytes) stretch(to, from, bytes, full);
    arrive(full);
}

// How far a sender has come.
struct SentSigns {
    int turn, left;
    Place at;
    Turning slot, full;
};

// As send_for (ggml_tiles.cuh), up to turn number `turns`, the barriers being those of turns.
template <int TYPE> VT_MEMBER void send_rows(const Row& p, const Signs& w, SentSigns& sent, int turns) {
    using T = Tiles<TYPE>;
    int lane = threadIdx.x & 31, mine = ((int)threadIdx.x / 32 - CREW) * (16 / SENDERS) + lane;
    bool sends = lane < 16 / SENDERS;
    Turning &slot = sent.slot, &full = sent.full;
    Place& at = sent.at;
    for (; sent.turn < turns; ++sent.turn) {
        if (sent.turn >= w.slots) phase_over(w.empty + slot.at, slot.parity ^ 1);
        int count = sent.left < w.per ? sent.left : w.per;
        sent.left -= count;
        for (int item = 0; item < count;) {
            int n = w.blocks - at.block < count - item ? w.blocks - at.block : count - item;
            int row = w.first + 16 * at.tile + mine;
            if (sends && row < w.last) {
                const u8* from = p.b + row * p.stride + at.block * T::BYTES;
                u8* to = w.ring + slot.at * w.size + mine * T::PITCH + T::start_of(item);
                int skew = (int)(unsigned long long)from & 15, end = skew + n * T::BYTES, bytes = end + 15 & ~15;
                from -= skew;
                if (row + 1 == (int)p.columns && at.block + n == w.blocks) {  // nothing past the weight is touched
                    bytes = end & ~15;
                    for (int i = bytes; i < end; i += 2)
                        *(unsigned short*)(to + i) = *(const unsigned short*)(from + i);
                }
                if (bytes) stretch(to, from, bytes, w.full + full.at);
            }
            item += n;
            at.forward(n, w.blocks);
        }
        if (sends) arrive(w.full + full.at);
        full.forward(1, w.fulls);
        slot.forward(1, w.slots);
    }
}

// As meet_up (ggml_tiles.cuh), `crew` being this warp's number in it. Rows' words of one number meet in no bank: a
// lane's neighbours have blocks two apart, and where a row is 32 bytes more than a multiple of all banks, half of the
// lanes have blocks eight further on, not rows.
template <int TYPE> VT_MEMBER void meet_signs_up(const Row& p, const Signs& w, int crew, u64* ready) {
    using T = Tiles<TYPE>;
    constexpr int MATES = ITEMS / T::AT_ONCE;
    int lane = threadIdx.x & 31, g = lane >> 2, mate = crew % MATES, team = crew / MATES;
    bool across = w.whole && w.blocks > 8;
    int item = (mate & 1) + 2 * (lane & 3) + 8 * (across ? g >> 2 : mate >> 1);
    int mine = across ? (g & 3) + 8 * (mate >> 1) : g, other = across ? 4 : 8;  // the rows, and how far the second is
    int step = w.teams, from = team;
    while (step >= w.slots) step -= w.slots;
    while (from >= w.slots) from -= w.slots;
    Turning full, slot, done;
    full.at = done.at = team;
    slot.at = from;
    Place at = {team, item};
    if (!w.whole) {
        at = {0, 0};
        at.forward(team * w.per + item, w.blocks);
    }
    Tables tables = tables_of(w.tables, w.blocks);
    phase_over(ready, 0);
    for (int turn = team; turn < w.turns; turn += w.teams) {
        phase_over(w.full + full.at, full.parity);
        if (item < w.per && turn * w.per + item < w.all) {
            const u8* held[2];
            if (w.whole) {
                held[0] = w.ring + slot.at * w.size + w.skew + item * T::BYTES + mine * (int)p.stride;
                held[1] = held[0] + other * (int)p.stride;
            } else {
                int begin = at.block < item ? item - at.block : 0;  // of this stretch
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    int row = g + 8 * k;
                    i64 away = (w.first + 16 * at.tile + row) * p.stride + (at.block - item + begin) * T::BYTES;
                    int skew = (int)(unsigned long long)(p.b + away) & 15;
                    int within = T::start_of(begin) + skew + (item - begin) * T::BYTES;
                    held[k] = w.ring + slot.at * w.size + row * T::PITCH + within;
                }
            }
            float term[2], *to = w.ones + (slot.at * ITEMS + item) * 16 + mine;
            meet_signs<TYPE>(term, held, w.codes + at.block * T::CODES, w.scales[at.block], tables);
            to[0] = term[0];
            to[other] = term[1];
        }
        warp_meets();
        // Each lane for its own terms: race checkers do not let one lane speak for all.
        arrive(w.done + done.at);
        full.forward(w.teams, w.fulls);
        slot.forward(step, w.slots);
        done.forward(w.teams, DONES);
        if (!w.whole) at.forward(w.teams * w.per, w.blocks);
    }
}

// As add_up (ggml_tiles.cuh): this warp has turns first, first + step, ...
template <int TYPE> VT_MEMBER void add_signs(const Row& p, const Signs& w, int first, int step) {
    int lane = threadIdx.x & 31, row = lane & 15, block = 0, top = w.first + 16 * first;
    int lap = step, from = first;
    while (lap >= w.slots) lap -= w.slots;
    while (from >= w.slots) from -= w.slots;
    Turning done, slot;
    done.at = first;
    slot.at = from;
    float sum = 0.0f;
    for (int turn = first; turn < w.turns; turn += step) {
        phase_over(w.done + done.at, done.parity);
        int left = w.all - turn * w.per, count = left < w.per ? left : w.per, last = w.blocks - block;
        float term[ITEMS], total[1] = {0.0f};
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) term[i] = w.ones[(slot.at * ITEMS + i) * 16 + row];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (i >= count) continue;
            sum = sum + term[i];
            if (i + 1 != last) continue;  // of this tile
            total[0] = sum * Block<TYPE>::FOLD;
            sum = 0.0f;
        }
        warp_meets();
        if (lane == 0) arrive(w.empty + slot.at);
        block += count;
        if (count >= last) {
            if (lane < 16 && top + row < w.last) store(p.out, top + row, total, (int)p.kind);
            block -= w.blocks;
            top += 16 * step;
        }
        done.forward(step, DONES);
        slot.forward(lap, w.slots);
    }
}

// Of `grid` blocks, which have `each` rows or one more. What every warp does before it begins its own work is little:
// eight warps share a scheduler.
template <int TYPE> VT_MEMBER void in_signs(const Row& p, int grid, int each, int slots) {
    using T = Tiles<TYPE>;
    constexpr int MATES = ITEMS / T::AT_ONCE;
    VT_SHARED(memory);
    others_may_start();
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5, sender = warp - CREW, stride = (int)p.stride;
    bool sends = sender >= 0 && sender < SENDERS;
    Signs w;
    w.blocks = (int)((unsigned)p.depth / 256);
    w.slots = slots;
    w.whole = w.blocks <= ITEMS && p.stride == w.blocks * T::BYTES;
    w.size = w.whole ? 16 * stride + 16 : T::SLOT;
    w.teams = (CREW + MORE) / MATES - (w.whole ? 0 : 1);
    w.fulls = 2 * w.teams;
#ifdef __CUDACC__
    w.tables = memory + ((TABLES_AT - ring_address(memory)) & 0xffff);
#else
    w.tables = memory;
#endif
    w.full = (u64*)(w.tables + TABLE_BYTES);
    w.done = w.full + FULLS;
    w.empty = w.done + DONES;
    u64* ready = w.empty + MOST_SLOTS;
    w.ones = (float*)(ready + 2);
    w.ring = (u8*)w.ones + slots * (ITEMS * 64);
    w.codes = w.ring + slots * w.size;
    w.sums = 0;
    w.scales = (float*)(w.codes + w.blocks * T::CODES);
    if (sends) {  // every barrier, before anybody comes to one
        int barrier = sender + SENDERS * lane;
        if (barrier <= FULLS + DONES + MOST_SLOTS) {
            int arrivals = barrier < FULLS ? w.whole ? 1 : 16 : barrier < FULLS + DONES ? 32 * MATES : 1;
            phases_begin(w.full + barrier, w.full + barrier == ready ? 32 * (CREW + MORE) : arrivals);
            phases_seen();
        }
    }
    __syncthreads();
    if (warp < CREW + SENDERS) after_others();  // tables are the module's own
    w.first = begin_of((int)blockIdx.x, grid, (int)p.columns, each);
    w.last = begin_of((int)blockIdx.x + 1, grid, (int)p.columns, each);
    if (warp < CREW) {
        Eights eights(p, (int)threadIdx.x, 32 * CREW);
        code_tiles<TYPE>(w, eights);
    } else if (!sends) {
        fill_tables<TYPE>(w.tables, warp - CREW - SENDERS, MORE);
    }
    // Found this late, since who codes has no registers to keep it in.
    w.skew = (int)((unsigned)(unsigned long long)p.b + (unsigned)w.first * (unsigned)stride & 15);
    // A row of fewer blocks than a slot has fills it alone: a slot has blocks of two tiles at most.
    int tiles = (w.last - w.first + 15) / 16;
    w.per = w.blocks < ITEMS ? w.blocks : ITEMS;
    w.all = tiles * w.blocks;
    w.turns = w.blocks < ITEMS ? tiles : (w.all + ITEMS - 1) / ITEMS;
    SentSigns sent = {0, w.all, {0, 0}, {}, {}};
    if (!sends) {
        arrive(ready);
        int crew = warp < CREW ? warp : warp - SENDERS;
        if (crew < MATES * w.teams) meet_signs_up<TYPE>(p, w, crew, ready);
        else if (crew == MATES * w.teams) add_signs<TYPE>(p, w, 0, 1);
    } else if (!w.whole) {
        send_rows<TYPE>(p, w, sent, w.turns < 2 ? w.turns : 2);  // any more would keep loads of a waiting
        phase_over(ready, 0);
        send_rows<TYPE>(p, w, sent, w.turns);
    } else if (sender > 0) {
        add_signs<TYPE>(p, w, sender - 1, SENDERS - 1);
    } else if (lane == 0) {
        Turning slot, full;
        for (int turn = 0; turn < w.turns; ++turn) {
            if (turn >= w.slots) phase_over(w.empty + slot.at, slot.parity ^ 1);
            send_whole(p, w, turn, slot.at, w.full + full.at);
            slot.forward(1, w.slots);
            full.forward(1, w.fulls);
        }
    }
}
