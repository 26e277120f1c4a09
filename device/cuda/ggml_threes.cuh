// Q3_K's blocks meet a row of activations on the tensor cores: sixteen rows of the weight at once, a block a warp.
//
// Senders, a crew and one that adds, as in ggml_tiles.cuh. What bounds it is the number of instructions, not bytes. So a
// warp keeps the activations of its block in registers while it meets that block of one tile after the other; codes are
// masked where they lie, at whatever power of two; and scales are multiplied into sums, of which there are few. Each of
// the products' eight columns has the activations of one sub-block alone, zeros elsewhere: four products leave the sums of
// the eight sub-blocks of a half beside each other.
#pragma once
#include "ggml_tiles.cuh"

constexpr int TWO = 2;  // warps that send, eight rows each: with more, others would have fewer registers
constexpr int TURNS = 8, SUMS_KEPT = TURNS * 16 * 4;  // tiles that take turns, bytes of sums of those that wait

// Sixteen blocks of a tile, the same ones of the next, of TURNS tiles, then their next sixteen, so that a place in a slot
// has one block again and again. Where blocks are no eights, a tile after the other: a slot has two stretches of a row.
struct Walk {
    int blocks, tiles, turns, most, first = 0, turn = 0, chunk = 0, at = 0, size;
    VT_MEMBER Walk(int all_blocks, int all_tiles) : blocks(all_blocks), tiles(all_tiles) {
        bool even = blocks % 8 == 0 && blocks > 16;
        turns = even ? TURNS : 1;
        size = most = even ? 16 : blocks;
    }
    VT_MEMBER int tile() const { return first + turn; }
    VT_MEMBER int block() const { return chunk + at; }
    VT_MEMBER int together(int left) const { return size - at < left ? size - at : left; }
    // Steps of `per` on which the block stays the same.
    VT_MEMBER int same(int per) const {
        if (blocks <= per) return tiles;
        int others = (turns < tiles - first ? turns : tiles - first) - 1 - turn;
        return turns == 1 ? 1 : 1 + (size < per ? others >> 1 : others);
    }
    VT_MEMBER void forward(int step) {
        at += step;
        while (at >= size) {
            at -= size;
            if (turn + 1 < turns && tile() + 1 < tiles) {
                ++turn;
                continue;
            }
            turn = 0;
            chunk += most;
            if (chunk >= blocks) {
                chunk = 0;
                first += turns;
            }
            size = blocks - chunk < most ? blocks - chunk : most;
        }
    }
};

// A block's codes as they lie, the sums of sixteen of them, and their scale.
VT_MEMBER void put_three(const Share& w, int block, const Words& c) {
    int lane = threadIdx.x & 31;
    *(uint2*)(w.codes + block * 256 + 8 * lane) = {c.low, c.high};
    int total = dot4(c.low, 0x01010101u, dot4(c.high, 0x01010101u, 0));
    total += __shfl_xor_sync(ALL, total, 1);
    if ((lane & 1) == 0) w.sums[block * 16 + lane / 2] = (unsigned short)total;
    if (lane == 0) w.scales[block] = c.d;
}

// A warp's blocks, as many at once as it has, or four: one after the other they take long. Words of values that are far
// off are made as everywhere else.
template <int AT_ONCE> VT_MEMBER void code_threes(const Share& w, Eights& eights) {
#pragma unroll 1
    for (int block = (int)threadIdx.x >> 5; block < w.blocks; block += AT_ONCE * CREW) {
        float x[AT_ONCE][8];
        unsigned largest[AT_ONCE];
        bool far = false;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            eights.next(x[i]);
            float most = 0.0f;
#pragma unroll
            for (int k = 0; k < 8; ++k) most = larger(most, vt_abs(x[i][k]));
            largest[i] = largest_of_warp((unsigned)vt_bits(most));
            far |= block + i * CREW < w.blocks && far_off(largest[i]);
        }
        Words c[AT_ONCE];
        if (__builtin_expect(far, 0)) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) c[i] = words_256(x[i]);
        } else {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                float inverse = quotient_of(127.0f, vt_float((int)largest[i]));
                unsigned near[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) near[k] = (unsigned)vt_bits(inverse * x[i][k] + 12582912.0f);
                c[i].d = quotient_of(1.0f, inverse);
                c[i].low = permute(permute(near[0], near[1], 0x0040), permute(near[2], near[3], 0x0040), 0x5410);
                c[i].high = permute(permute(near[4], near[5], 0x0040), permute(near[6], near[7], 0x0040), 0x5410);
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (block + i * CREW < w.blocks) put_three(w, block + i * CREW, c[i]);
    }
}

// Terms of the slots' blocks in the order of blocks: a lane has a row. `kept`: sums of tiles whose turn it is not.
VT_MEMBER void add_threes(const Row& p, const Share& w, float* kept) {
    using T = Tiles<Q3_K>;
    int lane = threadIdx.x & 31, row = lane & 15, slot = 0;
    Walk at(w.blocks, (w.last - w.first + 15) / 16);
    kept += row;
    unsigned round = 0;
    for (int left = w.all; left > 0;) {
        phase_over(w.done + slot, round);
        bool again = left > w.slots * w.per;  // whether others come into the slot
        int count = left < w.per ? left : w.per;
        left -= count;
        const float* from = w.ones + slot * T::ITEMS * 16 + row;
        for (int item = 0; item < count;) {
            int n = at.together(count - item), i = 0;
            float sum = at.block() > 0 ? kept[at.turn * 16] : 0.0f;
            const float* terms = from + item * 16;
            for (; i + 8 <= n; i += 8) {
                float term[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) term[k] = terms[(i + k) * 16];
#pragma unroll
                for (int k = 0; k < 8; ++k) sum = sum + term[k];
            }
#pragma unroll 1
            for (; i < n; ++i) sum = sum + terms[i * 16];
            if (at.block() + n == w.blocks) {
                int column = w.first + 16 * at.tile() + row;
                float total[1] = {sum};
                if (lane < 16 && column < w.last) store(p.out, column, total, (int)p.kind);
            } else {
                warp_meets();
                if (lane < 16) kept[at.turn * 16] = sum;
                warp_meets();
            }
            item += n;
            at.forward(n);
        }
        if (again) {
            before_copies();
            warp_meets();
            if (lane == 0) arrive(w.empty + slot);
        }
        if (++slot == w.slots) {
            slot = 0;
            round ^= 1;
        }
    }
}

// What a lane 4 g + t keeps while its warp has one block. Lane's words of every 32 bytes are at `first` and `other` of a
// row. FORM: STRAIGHT, or all rows' blocks begin ODD, two bytes after a multiple of four, or (MIXED) some do. Where all
// are odd, words are taken as they lie: those of lanes 0 to 3 from the second byte on, and what is left of the 32 bytes,
// two bytes before and two behind, is lane 3's, which has them from two words; the activations are placed alike.
enum { STRAIGHT, ODD, MIXED };
struct Kept {
    unsigned b[16];  // of field f of half h 8 h + 2 f and the next one: the column's, if it is of the lane's sub-block
    int begin[4];    // what sums begin with: codes are 4 too large
    unsigned select, up, one[4];  // up: of scales' upper bits to where they stand in the first half's
    int less, first, other, down, scale;  // down: of upper bits to the second half's; scale: where the lane's row has it
    float d;
};

// The sums of rows g and g + 8, 32 times as large, of this lane's sub-blocks.
template <int FORM> VT_MEMBER void meet_three(int (&sum)[2], const Kept& k, const u8* of, int t) {
    constexpr int DOWN = 8 * Tiles<Q3_K>::PITCH;
    unsigned q[3][4], pair[2], high[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u8 *row = of + r * DOWN, *one = row + k.first, *two = row + k.other, *beside = row;
        unsigned before = 0;
        if constexpr (FORM == ODD) before = *(const unsigned*)row, beside += 2;
        if constexpr (FORM == MIXED) beside += k.select & 2;
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            if constexpr (FORM == MIXED) {
                q[i][r] = word_of<true>(one + 32 * i, k.select);
                q[i][2 + r] = word_of<true>(two + 32 * i, k.select);
            } else {
                unsigned last = *(const unsigned*)(two + 32 * i);
                q[i][r] = *(const unsigned*)(one + 32 * i);
                q[i][2 + r] = FORM == ODD ? picked(last, before, k.select) : last;
                before = last;
            }
        }
        pair[r] = half_at(beside + 96 + 2 * t);
        high[r] = half_at(beside + 104 + 2 * (t & 1));
    }
    int total[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        total[h][0] = total[h][2] = k.begin[2 * h];
        total[h][1] = total[h][3] = k.begin[2 * h + 1];
        unsigned even[4], odd[4], a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // third bits of fields 0 and 1 at 2 and 3 of a byte, of fields 2 and 3 at 6 and 7
            unsigned w = q[0][i], third = h ? chosen(0x0f0f0f0fu, w >> 2, w) : chosen(0x0f0f0f0fu, w << 2, w << 4);
            even[i] = chosen(0x33333333u, q[1 + h][i], third);
            odd[i] = chosen(0x66666666u, q[1 + h][i] >> 1, third);
        }
        constexpr unsigned MASK[4] = {0x07070707u, 0x0e0e0e0eu, 0x70707070u, 0xe0e0e0e0u};
#pragma unroll
        for (int f = 0; f < 4; ++f) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = (f & 1 ? odd[i] : even[i]) & MASK[f];
            multiply_unsigned(total[h], a, k.b[8 * h + 2 * f], k.b[8 * h + 2 * f + 1]);
        }
    }
    // Scales of the first half's two sub-blocks of row g, then of row g + 8; and of the second half's.
    unsigned fours = times_plus(pair[1], 0x10000u, pair[0]), twos = times_plus(high[1], 0x10000u, high[0]);
    unsigned s[2] = {(fours & 0x0f0f0f0fu) | (times_plus(twos, k.up, 0) & 0x30303030u),
                     (fours >> 4 & 0x0f0f0f0fu) | (twos >> k.down & 0x30303030u)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int column = 2 * r + (i & 1);
            sum[r] += dot4(s[i >> 1], k.one[column], k.less) * total[i >> 1][column];
        }
    }
}

// The activations of `block`, whose rows begin `odd` as FORM says.
template <int FORM> VT_MEMBER void keep_three(Kept& k, const Share& w, int block, int lane, int odd) {
    int g = lane >> 2, t = lane & 3;
    const unsigned* codes = (const unsigned*)(w.codes + block * 256) + lane;
    const unsigned* sums = (const unsigned*)(w.sums + block * 16) + t;
    const int shift = 2 * (t & 2) + (t & 1);  // of the lane's field
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        unsigned own = codes[32 * h], more = 0, both = sums[4 * h];
        if constexpr (FORM == ODD) {
            own = t == 3 ? own >> 16 : permute(own, codes[32 * h + (t != 3)], 0x5432u);
            more = t == 3 ? codes[32 * h - 3] << 16 : 0;
        }
#pragma unroll
        for (int f = 0; f < 4; ++f) {
            bool mine = g >> 1 == f;
            k.b[8 * h + 2 * f] = mine ? g & 1 ? more : own : 0;
            k.b[8 * h + 2 * f + 1] = mine ? g & 1 ? own : more : 0;
        }
        k.begin[2 * h] = (int)(short)both * (int)(0u - (4u << shift));
        k.begin[2 * h + 1] = ((int)both >> 16) * (int)(0u - (4u << shift));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) k.one[i] = 32u >> shift << 8 * i;
    k.less = (int)(0u - (1024u >> shift));
    k.first = 4 * t + (FORM == ODD ? 4 : 0);
    k.other = FORM == ODD ? t < 3 ? 20 + 4 * t : 32 : 16 + 4 * t;
    k.select = FORM == ODD ? t < 3 ? 0x3210u : 0x7610u : odd ? 0x5432u : 0x3210u;
    k.up = t < 2 ? 16 : 4;
    k.down = t & 2;
    k.scale = (t & 1) * 8 * Tiles<Q3_K>::PITCH + 108 + odd;
    k.d = w.scales[block];
}

// A warp's place in the ring, and where its block and its terms are in a slot.
struct Round {
    int slot = 0;
    unsigned round = 0;
    const u8* of;
    float* ones;
    VT_MEMBER void forward(int slots) {
        if (++slot == slots) {
            slot = 0;
            round ^= 1;
        }
    }
};

// The same block of as many slots, one after the other.
template <int FORM> VT_MEMBER void meet_run(const Share& w, const Kept& k, Round& at, int slots, int t) {
    using T = Tiles<Q3_K>;
    do {
        phase_over(w.full + at.slot, at.round);
        const u8* of = at.of + at.slot * T::SLOT;
        int sum[2];
        meet_three<FORM>(sum, k, of, t);
        int mine = t & 1 ? sum[1] : sum[0];
        mine += __shfl_xor_sync(ALL, t & 1 ? sum[0] : sum[1], 1);
        mine += __shfl_xor_sync(ALL, mine, 2);
        float term = (float)mine * 0.03125f * (f16_at(of + k.scale) * k.d);
        if (t < 2) at.ones[at.slot * T::ITEMS * 16] = term;
        arrive(w.done + at.slot);  // each lane for its own terms: race checkers do not let one lane speak for all
        at.forward(w.slots);
    } while (--slots > 0);
}

// A place of the slots: its activations come with the first of them that has another block than the one before.
VT_MEMBER void meet_threes(const Row& p, const Share& w) {
    using T = Tiles<Q3_K>;
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int item = warp ^ (warp >> 2 & 1);  // blocks at odd halves of words take longer: two a scheduler
    Walk walk(w.blocks, (w.last - w.first + 15) / 16);
    walk.forward(item);
    // Eight rows further on it is the same.
    const int skew = (int)(unsigned long long)(p.b + (w.first + g) * p.stride) & 15;
    Round at;
    at.ones = w.ones + item * 16 + g + 8 * (t & 1);
    Kept k;
    // Of all slots those that have a block here: the last one may be short.
    const int all = (w.all + w.per - 1) / w.per, mine = item >= w.per ? 0 : all - (item >= w.all - (all - 1) * w.per);
    int slots = 0;
    for (int left = mine; left > 0; left -= slots) {
        int block = walk.block();
        int run = item - walk.at, ahead = run > 0 ? walk.at : item;  // where the stretch begins that has the block
        int within = (run > 0 ? T::start_of(run) : 0) + (skew + (block - ahead) * T::BYTES & 15) + ahead * T::BYTES;
        int odd = within & 2;
        slots = walk.same(w.per);
        if (slots > left) slots = left;
        at.of = w.ring + within + g * T::PITCH - odd;
        if (!__any_sync(ALL, odd)) {
            keep_three<STRAIGHT>(k, w, block, lane, odd);
            meet_run<STRAIGHT>(w, k, at, slots, t);
        } else if (!__any_sync(ALL, !odd)) {
            keep_three<ODD>(k, w, block, lane, odd);
            meet_run<ODD>(w, k, at, slots, t);
        } else {
            keep_three<STRAIGHT>(k, w, block, lane, odd);
            meet_run<MIXED>(w, k, at, slots, t);
        }
        if (w.blocks > T::ITEMS) walk.forward(slots * w.per);  // else each slot has the same
    }
#pragma unroll 1
    for (int left = all - mine; left > 0; --left) {
        phase_over(w.full + at.slot, at.round);
        arrive(w.done + at.slot);
        at.forward(w.slots);
    }
}

// Rows from the sixteen bytes that a stretch begins in, for so many slots at most; nothing past the weight is touched.
VT_MEMBER void send_threes(const Row& p, const Share& w, Sent<Walk>& sent, int slots) {
    using T = Tiles<Q3_K>;
    constexpr int ROWS = 16 / TWO;
    int lane = threadIdx.x & 31, mine = ((int)threadIdx.x / 32 - CREW) * ROWS + lane;
    for (; sent.left > 0 && slots > 0; --slots) {
        phase_over(w.empty + sent.slot, sent.parity);
        int count = sent.left < w.per ? sent.left : w.per;
        sent.left -= count;
        for (int item = 0; item < count;) {
            int n = sent.at.together(count - item), row = w.first + 16 * sent.at.tile() + mine;
            if (lane < ROWS && row < w.last) {
                const u8* from = p.b + row * p.stride + sent.at.block() * T::BYTES;
                u8* to = w.ring + sent.slot * T::SLOT + mine * T::PITCH + T::start_of(item);
                int skew = (int)(unsigned long long)from & 15, end = skew + n * T::BYTES, whole = end + 15 & ~15;
                from -= skew;
                if (__builtin_expect(row + 1 == (int)p.columns && sent.at.block() + n == w.blocks, 0)) {
                    whole = end & ~15;
#pragma unroll 1
                    for (int i = whole; i < end; i += 2) *(unsigned short*)(to + i) = *(const unsigned short*)(from + i);
                }
                if (whole) stretch(to, from, whole, w.full + sent.slot);
            }
            item += n;
            sent.at.forward(n);
        }
        if (lane < ROWS) arrive(w.full + sent.slot);
        if (++sent.slot == w.slots) {
            sent.slot = 0;
            sent.parity ^= 1;
        }
    }
}

template <int TYPE> VT_MEMBER void in_threes(const Row& p, int grid, int each, int slots) {
    using T = Tiles<TYPE>;
    VT_SHARED(shared);
    others_may_start();
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    u8* memory = in_register(shared);
    Share w;
    w.blocks = (int)(p.depth / 256);
    w.slots = slots;
    w.full = (u64*)memory;
    w.done = w.full + MOST_SLOTS;
    w.empty = w.done + MOST_SLOTS;
    w.ones = (float*)(w.empty + MOST_SLOTS);
    w.ring = (u8*)w.ones + slots * T::ITEMS * 64;
    w.codes = w.ring + slots * T::SLOT;
    w.sums = (unsigned short*)(w.codes + w.blocks * 256);
    w.scales = (float*)(w.sums + w.blocks * 16);
    w.first = begin_of((int)blockIdx.x, grid, (int)p.columns, each);
    w.last = begin_of((int)blockIdx.x + 1, grid, (int)p.columns, each);
    w.per = w.blocks < T::ITEMS ? w.blocks : T::ITEMS;
    int tiles = (w.last - w.first + 15) / 16;
    w.all = tiles * w.blocks;
    Sent<Walk> sent = {Walk(w.blocks, tiles), 0, w.all, 1};
    if (warp < CREW) {
        after_others();
        Eights eights(p, (int)threadIdx.x, 32 * CREW);
        if (w.blocks <= CREW) code_threes<1>(w, eights);
        else if (w.blocks <= 2 * CREW) code_threes<2>(w, eights);
        else code_threes<4>(w, eights);
    } else {
        if (lane == 0) {
            bool sends = warp < CREW + TWO;
#pragma unroll 1
            for (int i = sends ? warp - CREW : 0; i < slots; i += sends ? TWO : 1) {
                phases_begin(sends ? w.full + i : w.done + i, sends ? 16 : 32 * CREW);
                if (sends) phases_begin(w.empty + i, 1);
            }
            phases_seen();
        }
        if (warp < CREW + TWO) team_meets(1, 32 * TWO);
        after_others();
        // Any more would keep loads of a waiting.
        if (warp < CREW + TWO) send_threes(p, w, sent, w.blocks > CREW ? 2 : 1);
    }
    __syncthreads();
    if (warp < CREW) meet_threes(p, w);
    else if (warp < CREW + TWO) send_threes(p, w, sent, 0x7fffffff);
    else add_threes(p, w, w.scales + w.blocks);
}
