// Q3_K's blocks meet a row of activations on the tensor cores: sixteen rows of the weight at once, a block a warp.
//
// Senders, a crew and adders, as in ggml_tiles.cuh. What bounds it is the number of instructions, not bytes: some 290 for a
// block of sixteen rows, beside products and shared memory that hardly overlap with them. So a warp keeps the activations of
// its block in registers while it meets that block of one tile after the other. Words of the next tile, fetched while those
// of one meet, were no gain, nor were fewer senders or adders, with more registers for the crew.
#pragma once
#include "ggml_tiles.cuh"

constexpr int MIDDLE = 0x4b400000;  // bits of 1.5 * 2^23, to which integers can be added
constexpr int TURNS = 8, SUMS_KEPT = TURNS * 128 * 4;  // tiles that take turns, bytes of sums of those that wait

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

// The row's codes as lanes take them, and of each block its scale.
VT_MEMBER void code_threes(const Share& w, Eights& eights) {
    int lane = threadIdx.x & 31, part = lane & 3, unit = lane >> 2;
    int within = (unit >> 1) * 64 + (unit & 1) * 8 + (part >> 1) * 32 + ((part ^ part >> 1) & 1) * 4;
#pragma unroll 1
    for (int block = (int)threadIdx.x >> 5; block < w.blocks; block += CREW) {
        float x[8];
        eights.next(x);
        Words c = words_256(x);
        u8* to = w.codes + block * Tiles<Q3_K>::CODES + within;
        *(unsigned*)to = c.low;
        *(unsigned*)(to + 16) = c.high;
        if (lane == 0) w.scales[block] = c.d;
    }
}

// Terms of the slots' blocks in the order of blocks: a lane has one of a row's eight sums. `kept`: those of tiles whose turn
// it is not.
VT_MEMBER void add_threes(const Row& p, const Share& w, float* kept) {
    using T = Tiles<Q3_K>;
    int lane = threadIdx.x & 31, adder = (int)threadIdx.x / 32 - CREW - SENDERS;
    int row = adder / 2 * 8 + lane / 8 * 2 + adder % 2;  // four rows' terms meet in no bank
    Walk at(w.blocks, (w.last - w.first + 15) / 16);
    const u8* own = w.ring + row * T::PITCH + lane % 8 * 4;
    kept += adder * 32 + lane;
    int slot = 0;
    unsigned round = 0;
    for (int left = w.all; left > 0;) {
        phase_over(w.done + slot, round);
        bool again = left > w.slots * w.per;  // whether others come into the slot
        int count = left < w.per ? left : w.per;
        left -= count;
        const u8* from = own + slot * T::SLOT;
        for (int item = 0; item < count;) {
            int n = at.together(count - item);
            float sum = at.block() > 0 ? kept[at.turn * 128] : 0.0f;
            for (int i = item; i < item + n; i += 8) {
                if (i + 8 <= item + n && i % 8 == 0) {  // at distances that are known when compiled
                    float term[8];
                    const u8* terms = from + i * T::BYTES;
#pragma unroll
                    for (int k = 0; k < 8; ++k) term[k] = *(const float*)(terms + T::terms_of(k));
#pragma unroll
                    for (int k = 0; k < 8; ++k) sum = sum + term[k];
                } else {
#pragma unroll 1
                    for (int k = i; k < i + 8 && k < item + n; ++k)
                        sum = sum + *(const float*)(from + T::terms_of(k));
                }
            }
            if (at.block() + n == w.blocks) {
                int column = w.first + 16 * at.tile() + row;
                float total[1] = {0.0f};
#pragma unroll
                for (int c = 0; c < 8; ++c) total[0] = total[0] + __shfl_sync(ALL, sum, (lane & 24) + c);
                if (lane % 8 == 0 && column < w.last) store(p.out, column, total, (int)p.kind);
            } else {
                kept[at.turn * 128] = sum;
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

// Lanes' integers and MIDDLE of a block of rows g and g + 8. A lane has two words of every 32 bytes, both of one half, at
// `first` and `other`: t has 0 and 2, 1 and 3, 6 and 4, or 7 and 5, so that the first ones of eight rows meet in no bank, nor
// do the second ones; and of `scales` the bytes `low` and `high` pick. Where blocks begin APART from words, `select` picks a
// word out of two. A code from -4 to 3 times its scale from -32 to 31, and 127: a byte of a word that is multiplied as one
// number.
template <bool APART>
VT_MEMBER void meet_three(int (&total)[4], float (&factor)[2], const u8* first, const u8* other, const u8* scales,
                          const unsigned (&b)[16], unsigned select, unsigned low, unsigned high) {
    constexpr int DOWN = 8 * Tiles<Q3_K>::PITCH;
    unsigned q[2][2][2], s[2][2], third[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u8 *one = first + r * DOWN, *two = other + r * DOWN, *beside = scales + r * DOWN;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            q[r][h][0] = word_of<APART>(one + 32 + 32 * h, select);
            q[r][h][1] = word_of<APART>(two + 32 + 32 * h, select);
        }
        unsigned bits[2] = {word_of<APART>(one, select), word_of<APART>(two, select)}, w[3], d;
#pragma unroll
        for (int i = 0; i < 3; ++i) w[i] = word_of<APART>(beside + 4 * i, select);
        if constexpr (APART) d = picked(*(const unsigned*)(beside + 12), 0, select) & 0xffffu;
        else d = half_at(beside + 12);
        factor[r] = widen_f16(d) * factor[r];
        // Bytes of units 0 to 3 and 4 to 7, each of this lane's half of a unit, and 32.
        unsigned four = permute(w[0], w[1], low), two_bits = permute(w[2], 0, high);
        two_bits = permute(two_bits, two_bits >> 2, 0x7610u);
        s[r][0] = (four & 0x0f0f0f0fu) | (two_bits << 4 & 0x30303030u);
        s[r][1] = (four >> 4 & 0x0f0f0f0fu) | (two_bits & 0x30303030u);
#pragma unroll
        for (int i = 0; i < 2; ++i)  // third bits of units u and u + 2 four apart: bits 2 and 3 meet 4 and 5
            third[r][i] = chosen(0x30303030u, bits[i] << 2, chosen(0x0c0c0c0cu, bits[i] >> 2, bits[i]));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int v = 0; v < 2; ++v) {  // units 4 h + v and 4 h + v + 2
            unsigned codes[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                unsigned two = q[i & 1][h][i >> 1] >> 2 * v, top = third[i & 1][i >> 1];
                codes[i] = chosen(0x33333333u, two, h && v ? top >> 1 : top << 2 - 2 * h - v);
            }
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                int unit = 4 * h + v + 2 * upper;
                unsigned a[4], scale[2], more[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    scale[r] = (unsigned)dot4(s[r][h], 1u << 8 * (v + 2 * upper), -32);
                    more[r] = times_plus(scale[r], 0u - 0x04040404u, 0x7f7f7f7fu);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = (codes[i] >> 4 * upper & 0x07070707u) * scale[i & 1] + more[i & 1];
                multiply_unsigned(total, a, b[2 * unit], b[2 * unit + 1]);
            }
        }
    }
}

// A place of the slots: its activations come with the first of them that has another block than the one before.
VT_MEMBER void meet_threes(const Row& p, const Share& w) {
    using T = Tiles<Q3_K>;
    int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int item = warp ^ (warp >> 2 & 1);  // blocks at odd halves of words take longer: two a scheduler
    Walk at(w.blocks, (w.last - w.first + 15) / 16);
    at.forward(item);
    // Eight rows further on it is the same.
    const int skew = (int)(unsigned long long)(p.b + (w.first + g) * p.stride) & 15;
    const int words = 4 * t + (t & 2) * 8;
    const unsigned low = t < 2 ? 0x6420u : 0x7531u, high = t < 2 ? 0x2020u : 0x3131u;
    // Column g of the activations is lane g's: a byte of even words, which t = 0 and 2 have, or of odd ones.
    const unsigned mine = (g < 4) == ((t & 1) == 0) ? 0xffu << 8 * (g & 3) : 0u;
    unsigned b[16], select = 0, round = 0;
    int begin[2] = {}, within = 0, known = -1, slot = 0;
    bool apart = false;
    float d = 0.0f;
    for (int before = 0; before < w.all; before += w.per) {
        int block = at.block();
        bool has = item < w.per && before + item < w.all;
        if (has && block != known) {
            known = block;
            int all[4] = {MIDDLE, MIDDLE, MIDDLE, MIDDLE};  // and -127 times the activations' sums
            const unsigned minus[4] = {0x81818181u, 0x81818181u, 0x81818181u, 0x81818181u};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                uint4 x = *(const uint4*)(w.codes + block * 256 + 64 * k + 16 * t);
                b[4 * k] = x.x & mine, b[4 * k + 1] = x.y & mine, b[4 * k + 2] = x.z & mine, b[4 * k + 3] = x.w & mine;
                multiply_bytes(all, minus, b[4 * k], b[4 * k + 1]);
                multiply_bytes(all, minus, b[4 * k + 2], b[4 * k + 3]);
            }
            begin[0] = all[0], begin[1] = all[1];
            d = w.scales[block];
            int run = item - at.at, ahead = run > 0 ? at.at : item;  // where the stretch begins that has the block
            within = (run > 0 ? T::start_of(run) : 0) + (skew + (block - ahead) * T::BYTES & 15) + ahead * T::BYTES;
            apart = __any_sync(ALL, within & 2);
            select = within & 2 ? 0x5432u : 0x3210u;
            within += g * T::PITCH;
        }
        phase_over(w.full + slot, round);
        if (has) {
            u8* held = w.ring + slot * T::SLOT;
            const u8* of = held + (within & ~3);
            int total[4] = {begin[0], begin[1], begin[0], begin[1]};
            float factor[2] = {d, d};
            if (apart) meet_three<true>(total, factor, of + words, of + (words ^ 8), of + 96, b, select, low, high);
            else meet_three<false>(total, factor, of + words, of + (words ^ 8), of + 96, b, select, low, high);
            warp_meets();  // everybody has read the block
            u8* to = held + T::terms_of(item) + g * T::PITCH + 8 * t;
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float x = factor[k] * (vt_float(total[2 * k]) - 12582912.0f);
                float y = factor[k] * (vt_float(total[2 * k + 1]) - 12582912.0f);
                *(uint2*)(to + 8 * k * T::PITCH) = {(unsigned)vt_bits(x), (unsigned)vt_bits(y)};
            }
        }
        arrive(w.done + slot);  // each lane for its own terms: race checkers do not let one lane speak for all
        if (++slot == w.slots) {
            slot = 0;
            round ^= 1;
        }
        if (w.blocks > T::ITEMS) at.forward(w.per);  // else each slot has the same
    }
}

template <int TYPE> VT_MEMBER void in_threes(const Row& p, int grid, int each, int slots) {
    using T = Tiles<TYPE>;
    VT_SHARED(shared);
    others_may_start();
    int warp = (int)threadIdx.x >> 5;
    u8* memory = in_register(shared);
    Share w;
    w.blocks = (int)(p.depth / 256);
    w.slots = slots;
    w.full = (u64*)memory;
    w.done = w.full + MOST_SLOTS;
    w.empty = w.done + MOST_SLOTS;
    w.ring = memory + 24 * MOST_SLOTS;
    w.codes = w.ring + slots * T::SLOT;
    w.scales = (float*)(w.codes + w.blocks * T::CODES);
    w.first = begin_of((int)blockIdx.x, grid, (int)p.columns, each);
    w.last = begin_of((int)blockIdx.x + 1, grid, (int)p.columns, each);
    w.per = w.blocks < T::ITEMS ? w.blocks : T::ITEMS;
    int tiles = (w.last - w.first + 15) / 16;
    w.all = tiles * w.blocks;
    Sent<Walk> sent = {Walk(w.blocks, tiles), 0, w.all, 1};
    if (warp < CREW) {
        after_others();
        Eights eights(p, (int)threadIdx.x, 32 * CREW);
        code_threes(w, eights);
    } else {
        begin_ring<TYPE>(p, w, sent, CREW, ADDERS);
    }
    __syncthreads();
    if (warp < CREW) meet_threes(p, w);
    else if (warp < CREW + SENDERS) send_for<TYPE>(p, w, sent, 0x7fffffff, true);
    else add_threes(p, w, w.scales + w.blocks);
}
