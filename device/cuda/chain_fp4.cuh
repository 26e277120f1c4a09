// The NVFP4 quantiser at the end of a generated chain: blocks of 16 bfloat16, whose codes are made out of float16s
// (e2m1_halves.cuh) and which take MIRROR's steps only where those could differ, or where there is a NaN.
//
// The ladder:
// 1. Codes by comparisons or by sums (fp4.cuh), a division a block: 54 us for 8192 x 5120 normed, 257 for 8192 x 17408 with
//    SiLU.
// 2. A block is two lanes', which exchange what is its largest; of two turns each finds one scale. *_half5 with a residual.
// 3. Where frames hold PAIRS of turns a block is one thread's: half as many scales, and no exchange. *_v16; *_pairs2 and
//    *_pairs3, few rows, whose spans of 2048 all are whole but the last. *_v16 in 56 registers instead of 66: 175 us for
//    8192 x 17408 with SiLU instead of 184.
// 4. ring_blocks.cuh: many rows of one operand, the next ones under way. With the next one in a block's registers they took
//    35 us instead of 38; with a residual that takes too many registers.
// 5. Among tiles of scales a warp of *_tiles has all 32 bytes of a sector, and its grid every byte of a tile.
#pragma once
#include "chain.cuh"
#include "e2m1_halves.cuh"
#include "fp4.cuh"
#include "units.cuh"

// A block of 16 a thread, as place<16> finds it.
struct SixteenFrame : Frame {
    static constexpr int V = 8, TURNS = 2;
    static constexpr bool EARLY = true, PAIRS = true;
    i64 row, first;
    bool present;

    VT_MEMBER SixteenFrame(i64 rows, i64 width, i64 chunks) {
        const Place spot = place<16>(rows, width, chunks);
        row = spot.row;
        first = spot.column;
        present = spot.inside;
    }
    VT_MEMBER bool inside(int) const { return present; }
    VT_MEMBER i64 at(int t) const { return first + t * 8; }
};

// A byte of the tiles a thread, whether a block has it or not; `shape` divides by the tiles across: its lower half is
// whole_quotient's factor, its upper half the shift. A warp has four blocks of eight rows.
struct TilesFrame : Frame {
    static constexpr int V = 8, TURNS = 2;
    static constexpr bool EARLY = true, PAIRS = true, PADS = true;
    i64 row;
    int first;
    unsigned byte;
    bool present, pads;

    VT_MEMBER TilesFrame(i64 rows, i64 width, i64 shape) {
        const unsigned across = ((unsigned)(width >> 4) + 3) >> 2, lane = threadIdx.x & 31;
        const unsigned warp = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
        const unsigned eight = whole_quotient(warp, (unsigned)shape, (int)(shape >> 32)), column = warp - eight * across;
        const unsigned down = (eight >> 4) * 128 + (eight & 15) * 2 + (lane >> 2 & 3) * 32 + (lane >> 4);
        row = down;
        first = (int)(column * 4 + (lane & 3)) * 16;
        byte = ((eight >> 4) * across + column) * 512 + (eight & 15) * 32 + lane;
        present = row < rows && first < width;
        pads = !present && eight < ((unsigned)(rows + 127) >> 7) * 16;
    }
    VT_MEMBER bool inside(int) const { return present; }
    VT_MEMBER i64 at(int t) const { return first + t * 8; }
};

// A row a block of 128 threads: two neighbouring partials of the tree are a thread's. All spans but the last are whole.
// `warps`: 8 floats for each reduction of the kernel.
template <int SPANS> struct PairsFrame : Frame {
    static constexpr int V = 8, TURNS = 2 * SPANS;
    static constexpr bool EARLY = true, PAIRS = true, SKIPS = true;
    i64 row;
    int width, first;
    float* warps;

    VT_MEMBER PairsFrame(i64 width, float* warps)
        : row(blockIdx.x), width((int)width), first(threadIdx.x * 16), warps(warps) {}
    VT_MEMBER bool inside(int t) const { return t < TURNS - 2 || at(t) < width; }
    VT_MEMBER i64 at(int t) const { return first + (t >> 1) * TREE_SPAN + (t & 1) * 8; }
    VT_MEMBER float sum(const float (&x)[TURNS][8], int number) const {
        float partials[2] = {};
        EACH(t, TURNS)
            if (inside(t)) add_terms(partials[t & 1], x[t]);
        return joined(partials, number);
    }
    VT_MEMBER float squares(const float (&x)[TURNS][8], int number) const {
        float partials[2] = {};
        add_squares_in_turn(partials, x);
        return joined(partials, number);
    }
    VT_MEMBER float joined(const float (&partials)[2], int number) const {
        return tree_of_two<8>(partials, warps + 8 * number);
    }
    VT_MEMBER i64 blocks(i64 rows) const { return rows; }
};

// The scale of a block by its largest element, and what makes codes of its elements.
struct BlockScales {
    float global, back;  // the global scale, and its reciprocal or 0

    VT_MEMBER unsigned code(unsigned top) const {
        return e4m3_pair(global * (vt_float((int)top) * vt_float(0x3e2aaaab)), 0.0f);  // float32(1 / 6)
    }
    VT_MEMBER float quick(unsigned code) const {
        const float scale = normal_e4m3(code);
        return factor_to_halves(scale * back, scale);
    }
    VT_MEMBER unsigned word(const Raw<8>& y, unsigned code) const {
        const float step = e4m3_value(code) * back, factor = step == 0.0f ? 0.0f : 1.0f / step;
        float v[8];
        widen(v, y, BF16);
        EACH(j, 8) v[j] *= factor;
        return e2m1_word<false>(v);
    }
};

// The codes and scales of what a frame holds, where it is inside.
template <bool TILED, class F>
VT_FN void put_blocks(const F& frame, const Raw<8> (&y)[F::TURNS], const BlockScales& by, i64 rows, i64 row_number,
                      i64 width, void* codes, void* scale_codes) {
    constexpr int TURNS = F::TURNS, EACH_HAS = F::PAIRS ? 2 : 1, COUNT = TURNS / EACH_HAS;
    unsigned char *out = (unsigned char*)codes, *scales = (unsigned char*)scale_codes;
    const unsigned row = (unsigned)row_number, wide = (unsigned)(width >> 4);
    unsigned code[COUNT] = {};
    float quick[COUNT];
    auto put_scale = [&](int n) {
        if constexpr (F::PADS) {
            scales[frame.byte] = (unsigned char)code[n];
        } else {
            const unsigned block = (unsigned)frame.at(n * EACH_HAS) >> 4;
            store_scale<TILED, unsigned>(scales, (unsigned)rows, row, wide, block, code[n]);
        }
    };
    const i64 from = row_number * width;
    if constexpr (F::PAIRS) {
        if constexpr (F::PADS)
            if (frame.pads) scales[frame.byte] = 0;
        EACH(n, COUNT) {
            quick[n] = 0.0f;
            if (F::SKIPS && !frame.inside(2 * n)) continue;
            code[n] = by.code(largest_of_sixteen<true>(y[2 * n].a, y[2 * n + 1].a));
            quick[n] = by.quick(code[n]);
        }
        bool slow = false;
        EACH(n, COUNT) {
            if (!frame.inside(2 * n)) continue;
            slow |= quick[n] == 0.0f;
            *(uint2*)(out + ((from + frame.at(2 * n)) >> 1)) = {e2m1_of_bf16(y[2 * n].a, quick[n]),
                                                                e2m1_of_bf16(y[2 * n + 1].a, quick[n])};
            put_scale(n);
        }
        if (!slow) return;
        EACH(n, COUNT) {
            if (!frame.inside(2 * n) || quick[n] != 0.0f) continue;
            code[n] = by.code(largest_of_sixteen<false>(y[2 * n].a, y[2 * n + 1].a));
            *(uint2*)(out + ((from + frame.at(2 * n)) >> 1)) = {by.word(y[2 * n], code[n]), by.word(y[2 * n + 1], code[n])};
            put_scale(n);
        }
    } else {
        // Of two turns each lane of a block finds one scale.
        const bool odd = (frame.at(0) & 8) != 0;
        unsigned sizes[TURNS], own;
        bool slow = false;
        EACH(t, TURNS) sizes[t] = frame.inside(t) ? largest_pair<true>(y[t].a) : 0u;
        EACH(h, (TURNS + 1) / 2) {
            const int t = 2 * h, next = t + 1 < TURNS ? t + 1 : t;
            unsigned both = larger_pair<true>(chosen_bytes(sizes[t], sizes[next], 0x5410u),
                                              chosen_bytes(sizes[t], sizes[next], 0x7632u));
            both = larger_pair<true>(both, __shfl_xor_sync(FULL_WARP, both, 1));
            own = by.code(odd ? both & 0xffff0000u : both << 16);
            const float mine = by.quick(own), others = other_lane(mine, 1);
            quick[t] = odd ? others : mine;
            quick[next] = next == t ? quick[t] : odd ? mine : others;
            code[t] = code[next] = own;
        }
        EACH(t, TURNS) {
            if (!frame.inside(t)) continue;
            slow |= quick[t] == 0.0f;
            *(unsigned*)(out + ((from + frame.at(t)) >> 1)) = e2m1_of_bf16(y[t].a, quick[t]);
            if (odd == (t & 1)) put_scale(t);
        }
        if (!__any_sync(FULL_WARP, slow)) return;
        EACH(t, TURNS) {
            unsigned pair = frame.inside(t) ? largest_pair<false>(y[t].a) : 0u;
            pair = larger_pair<false>(pair, __shfl_xor_sync(FULL_WARP, pair, 1));
            if (!frame.inside(t) || quick[t] != 0.0f) continue;
            code[t] = by.code(larger(pair << 16, pair & 0xffff0000u));
            *(unsigned*)(out + ((from + frame.at(t)) >> 1)) = by.word(y[t], code[t]);
            if (odd == (t & 1)) put_scale(t);
        }
    }
}

// The last row of tiles is filled by whole blocks at a grid's end, a word a thread, where a block has a row: whether this is
// one of them. Where a grid has rows and columns all its threads do it, while they wait for what they have sent for.
template <class F> VT_FN bool fills_tiles(const F& frame, void* scales, i64 rows, i64 width) {
    if constexpr (!F::PADS && !F::MAPS) {
        const unsigned own = (unsigned)frame.blocks(rows);
        if (blockIdx.x < own) return false;
        fill_tiles((unsigned char*)scales, rows, width >> 4, (blockIdx.x - own) * blockDim.x + threadIdx.x, width * 32);
        return true;
    }
    return false;
}
template <class F> VT_FN void fill_beside(const F& frame, void* scales, i64 rows, i64 width) {
    if constexpr (F::MAPS) {
        const unsigned threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
        loads_are_under_way();
        fill_tiles((unsigned char*)scales, rows, width >> 4, (i64)blockIdx.x * threads + thread, frame.blocks(rows) * threads);
    }
}
