// One row meets the i-quants' blocks of 256: a lane has whole blocks of two rows of the weight, and makes bytes of
// their values with one permutation each for four of them, which then meet four activations at once.
//
// The tables lie in shared memory once for each lane, whose bank nobody else asks: entry e of the grid at 256 e, and
// 128 bytes on what eight bits say of eight signs, the last of which is not asked, so that one permutation makes an
// address of a byte. An entry's and a pattern's nibbles together pick four signed bytes of eight: IQ2_XXS's from the
// magnitudes and their negatives, IQ3_XXS's from an entry and its negative.
//
// Where rows lie one after the other and their blocks fit a slot of the ring, sixteen of them are one stretch, which is
// on its way before anything else is done; else they are sent for as in ggml_tiles.cuh.
#pragma once
#include "ggml_tiles.cuh"

// TABLES_AT: where they begin within 65,536 bytes of shared memory, at whose beginning 1,024 bytes are the system's.
constexpr int TABLE_BYTES = 256 * 256, SIGNS_AT = 128, TABLES_AT = 1024;

// Eight bits to the third bits of eight digits.
VT_FN unsigned thirds_of(unsigned bits) {
    bits = bits * 0x1001u & 0x000f000fu;
    bits = bits * 0x41u & 0x03030303u;
    return bits * 0x24u & 0x44444444u;
}

// `warps` warps of which this is number `warp` fill the tables; each reads its entries at once, and writes four at a
// time, 16 bytes a lane.
template <int TYPE> VT_MEMBER void fill_tables(u8* tables, int warp, int warps) {
    int lane = threadIdx.x & 31;
    for (int first = 32 * warp; first < 512; first += 32 * warps) {
        unsigned entry = (unsigned)first + lane;
        if (first < 256) {
            if constexpr (TYPE == IQ2_XXS) entry = IQ2_XXS_DIGITS[entry];
            else entry = permute(0x1c140c04u, 0x3e342c24u, IQ3_XXS_DIGITS[entry]);
        } else {
            unsigned seven = entry & 127, signs = seven | (ones_of(seven) & 1u) << 7;  // their number is even
            entry = thirds_of(signs) | (TYPE == IQ3_XXS ? 0x32103210u : 0u);
        }
        u8* to = tables + ((first & 255) + (lane >> 3)) * 256 + (first < 256 ? 0 : SIGNS_AT) + (lane & 7) * 16;
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            unsigned one = __shfl_sync(ALL, entry, i + (lane >> 3));
            *(uint4*)(to + 256 * i) = {one, one, one, one};
        }
    }
}

// The word at `place` and FURTHER: a lane's `place` in the tables, of whose address bits 8 to 15 are not there.
#ifdef __CUDACC__
struct Tables { unsigned place, minus_one; };
VT_FN Tables tables_of(const u8* tables, int blocks) {
    return {ring_address(tables) - TABLES_AT + 4 * (threadIdx.x & 31), 0u - (blocks > 0)};
}
template <int FURTHER> VT_FN unsigned entry_at(Tables, unsigned place) {
    unsigned found;
    asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(found) : "r"(place), "n"(FURTHER + TABLES_AT));
    return found;
}
VT_FN unsigned place_in(Tables tables) { return tables.place; }
#else
struct Tables { const u8* tables; unsigned minus_one; };
static inline Tables tables_of(const u8* tables, int) { return {tables, ~0u}; }
template <int FURTHER> unsigned entry_at(Tables tables, unsigned place) {
    return *(const unsigned*)(tables.tables + place + FURTHER);
}
static inline unsigned place_in(Tables) { return 4 * (threadIdx.x & 31); }
#endif

// Entries by byte BYTE of `bits`, or by seven bits from 7 L on.
template <int BYTE> VT_FN unsigned of_byte(Tables tables, unsigned bits) {
    return entry_at<0>(tables, picked(bits, place_in(tables), 0x7604 | BYTE << 4));
}
template <int L> VT_FN unsigned of_seven(Tables tables, unsigned bits) {
    return entry_at<SIGNS_AT>(tables, picked(bits << L, place_in(tables), 0x7604 | L << 4));
}

// The negatives of four bytes, none of which is 0. As a product, for which there is room.
VT_FN unsigned negatives_of(Tables t, unsigned x) { return times_plus(x, t.minus_one, 0x01010100u); }

// Eight values of a unit from 8 L on, four and four; `bits` has their numbers in the grid.
template <int TYPE, int L>
VT_FN void eight_values(unsigned& low, unsigned& high, Tables tables, unsigned bits, unsigned beside) {
    unsigned minus = of_seven<L>(tables, beside);
    if constexpr (TYPE == IQ2_XXS) {
        unsigned digits = of_byte<L>(tables, bits) + minus;
        low = picked(0x002b1908u, 0x00d5e7f8u, digits);
        high = picked(0x002b1908u, 0x00d5e7f8u, digits >> 16);
    } else {
        unsigned x = of_byte<2 * (L & 1)>(tables, bits), y = of_byte<2 * (L & 1) + 1>(tables, bits);
        low = picked(x, negatives_of(tables, x), minus);
        high = picked(y, negatives_of(tables, y), minus >> 16);
    }
}

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
            int a = dot4(v[2], one.z, dot4(v[0], one.x, 0)), b = dot4(v[3], one.w, dot4(v[1], one.y, 0));
            a = dot4(v[6], two.z, dot4(v[4], two.x, a)), b = dot4(v[7], two.w, dot4(v[5], two.y, b));
            total[r] += (int)(beside >> 27 | 1) * (a + b);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) term[r] = (float)total[r] * (f16_at(p[r]) * d);
}

// Warps besides the crew's sixteen: SENDERS, of which all but one add where a slot's rows are one stretch, and MORE,
// which fill the tables and then join the crew; the last of them add where rows are stretches of their own. Turns take
// barriers in turn, no fewer than there are slots, and so many that the same warps have each of a barrier's phases: a
// multiple of the teams, or of those that add.
constexpr int MORE = 12, ALL_WARPS = CREW + SENDERS + MORE, FULLS = 14, DONES = 12;
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
template <int TYPE> VT_MEMBER void meet_signs_up(const Row& p, const Signs& w, int crew) {
    using T = Tiles<TYPE>;
    constexpr int MATES = ITEMS / T::AT_ONCE;
    int lane = threadIdx.x & 31, g = lane >> 2, mate = crew % MATES, team = crew / MATES;
    bool across = w.whole && w.blocks > 8;
    int item = (mate & 1) + 2 * (lane & 3) + 8 * (across ? g >> 2 : mate >> 1);
    int mine = across ? (g & 3) + 8 * (mate >> 1) : g, other = across ? 4 : 8;  // the rows, and how far the second is
    int step = (int)((unsigned)w.teams % (unsigned)w.slots);
    Turning full, slot, done;
    full.at = done.at = team;
    slot.at = (int)((unsigned)team % (unsigned)w.slots);
    Place at = {team, item};
    if (!w.whole) {
        at = {0, 0};
        at.forward(team * w.per + item, w.blocks);
    }
    Tables tables = tables_of(w.tables, w.blocks);
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
    int lap = (int)((unsigned)step % (unsigned)w.slots);
    Turning done, slot;
    done.at = first;
    slot.at = (int)((unsigned)first % (unsigned)w.slots);
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

// Of `grid` blocks, which have `each` rows or one more.
template <int TYPE> VT_MEMBER void in_signs(const Row& p, int grid, int each, int slots) {
    using T = Tiles<TYPE>;
    constexpr int MATES = ITEMS / T::AT_ONCE;
    VT_SHARED(memory);
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    Eights eights(p, warp < CREW ? (int)threadIdx.x : (int)p.depth, 32 * CREW);
    Signs w;
    w.blocks = (int)(p.depth / 256);
    w.slots = slots;
    w.whole = w.blocks <= ITEMS && p.stride == w.blocks * T::BYTES;
    w.size = w.whole ? 16 * (int)p.stride + 16 : T::SLOT;
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
    w.ones = (float*)(w.empty + MOST_SLOTS);
    w.ring = (u8*)w.ones + w.slots * ITEMS * 64;
    w.codes = w.ring + w.slots * w.size;
    w.sums = 0;
    w.scales = (float*)(w.codes + w.blocks * T::CODES);
    if (warp < CREW) code_tiles<TYPE>(w, eights);
    else if (warp >= CREW + SENDERS) fill_tables<TYPE>(w.tables, warp - CREW - SENDERS, MORE);
    w.first = begin_of((int)blockIdx.x, grid, (int)p.columns, each);
    w.last = begin_of((int)blockIdx.x + 1, grid, (int)p.columns, each);
    w.skew = (int)(unsigned long long)(p.b + w.first * p.stride) & 15;
    // A row of fewer blocks than a slot has fills it alone: a slot has blocks of two tiles at most.
    w.per = w.blocks < ITEMS ? w.blocks : ITEMS;
    w.all = (w.last - w.first + 15) / 16 * w.blocks;
    w.turns = w.blocks < ITEMS ? (w.last - w.first + 15) / 16 : (w.all + ITEMS - 1) / ITEMS;
    int sender = warp - CREW;
    bool sends = sender >= 0 && sender < SENDERS, whole_sends = sends && w.whole && sender == 0;
    SentSigns sent = {0, w.all, {0, 0}, {}, {}};
    int first = w.turns < w.slots ? w.turns : w.slots;  // turns that are sent for before all is ready
    if (whole_sends) {
        if (lane == 0) {
            for (int turn = 0; turn < first; ++turn) {
                phases_begin(w.full + turn, 1);
                phases_seen();
                send_whole(p, w, turn, turn, w.full + turn);
            }
            for (int i = first; i < w.turns && i < w.fulls; ++i) phases_begin(w.full + i, 1);
            phases_seen();
        }
    } else if (sends) {
        if (lane == 0) {  // barriers of which there is need
            if (!w.whole)
                for (int i = sender; i < w.fulls && i < w.turns; i += SENDERS) phases_begin(w.full + i, 16);
            for (int i = sender - 1; i >= 0 && i < MOST_SLOTS && i < w.turns; i += SENDERS - 1) {
                phases_begin(w.empty + i, 1);
                phases_begin(w.done + i, 32 * MATES);
            }
            phases_seen();
        }
    }
    if (sends && !w.whole) {
        team_meets(1, 32 * SENDERS);
        send_rows<TYPE>(p, w, sent, first);
    }
    __syncthreads();
    if (!sends) {
        int crew = warp < CREW ? warp : warp - SENDERS;
        if (crew < MATES * w.teams) meet_signs_up<TYPE>(p, w, crew);
        else if (crew == MATES * w.teams) add_signs<TYPE>(p, w, 0, 1);
    } else if (!w.whole) {
        send_rows<TYPE>(p, w, sent, w.turns);
    } else if (!whole_sends) {
        add_signs<TYPE>(p, w, sender - 1, SENDERS - 1);
    } else if (lane == 0) {
        Turning slot, full;
        slot.forward(first, w.slots);
        full.forward(first, w.fulls);
        for (int turn = first; turn < w.turns; ++turn) {
            phase_over(w.empty + slot.at, slot.parity ^ 1);
            send_whole(p, w, turn, slot.at, w.full + full.at);
            slot.forward(1, w.slots);
            full.forward(1, w.fulls);
        }
    }
}
