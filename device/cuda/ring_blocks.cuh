// Rows of a ring (ring_rows.cuh) into NVFP4.
//
// Scales among tiles: a thread keeps its codes of the last four rows, the newest on top. Where these rows lie 32 apart, four
// lanes then have 16 neighbouring bytes. 8192 x 5120, whose scales in rows take 0.5 us: so 1.1; row by row 4.2; by the warps of
// a block that gather fours in shared memory 1.6; by eight rows, whole sectors, as by four.
#pragma once
#include "chain_fp4.cuh"
#include "ring_rows.cuh"

// Eight codes of eight bfloat16s and their factor, as e2m1_of_bf16 makes them; which elements are a pair of halves spares the
// bytes' second sorting.
VT_FN unsigned e2m1_of_brains(const uint4& raw, float factor) {
    const unsigned w[4] = {raw.x, raw.y, raw.z, raw.w};
    unsigned even[2], odd[2];
    EACH(i, 2) {
        auto low = [&](int n) { return vt_float((int)(w[n] << 16)) * factor; };
        auto high = [&](int n) { return vt_float((int)(w[n] & 0xffff0000u)) * factor; };
        even[i] = cut_to_halves(low(2 * i), low(2 * i + 1)), odd[i] = cut_to_halves(high(2 * i), high(2 * i + 1));
    }
    const unsigned a = chosen_bytes(even[0], even[1], 0x7531u), b = chosen_bytes(odd[0], odd[1], 0x7531u);
    const unsigned word = joined_halves((a + 0x01010101u) >> 1, b * 8u + 0x08080808u);
    const unsigned signs = (a >> 4 & 0x08080808u) | (b & 0x80808080u);
    return word | (signs & (word + 0x77777777u));
}

// Of a lane's four bytes and those of its three neighbours, those of one row: bytes [row][lane] of [lane][row].
VT_FN unsigned turned_bytes(unsigned own) {
    const int lane = threadIdx.x & 3;
    own = chosen_bytes(own, __shfl_xor_sync(FULL_WARP, own, 1), lane & 1 ? 0x3715u : 0x6240u);
    return chosen_bytes(own, __shfl_xor_sync(FULL_WARP, own, 2), lane & 2 ? 0x3276u : 0x5410u);
}

// Which rows a team takes where scales lie among tiles: fours of rows, 32 apart, as long as all teams have one, and then
// `rest` rows each of the fours that are left, the rows of the last tiles, if these are not whole, one by one.
struct TileOrder {
    int own, teams, fours, rest, whole, turns;

    VT_MEMBER TileOrder(int rows, int grid, int team, int team_count)
        : own(blockIdx.x + grid * team), teams(grid * team_count), whole(rows & ~127) {
        const int most = (rows + teams - 1) / teams, rounds = whole / (4 * teams);
        fours = (most - 1) / 4 < rounds ? (most - 1) / 4 : rounds;
        rest = most - 4 * fours;
        const int left = rows - 4 * fours * teams - own * rest;
        turns = 4 * fours + (left < 0 ? 0 : left < rest ? left : rest);
    }
    VT_MEMBER int row(int turn) const {
        const bool common = turn < 4 * fours;
        const int n = common ? 4 * (own + (turn >> 2) * teams) + (turn & 3) : 4 * fours * (teams - 1) + own * rest + turn;
        return n < whole ? (n >> 7) * 128 + (n >> 2 & 31) + (n & 3) * 32 : n;
    }
    // Whether the next row is not of the same four.
    VT_MEMBER bool ends(int row, int turn) const { return (row & 96) == 96 || row >= whole || turn == turns - 1; }
};

template <bool TILED> struct OrderOf { typedef RowOrder Is; };
template <> struct OrderOf<true> { typedef TileOrder Is; };

// normed(x, weights, number): eight bfloat16. scales_by(): the scales of blocks, once the first rows are on their way.
template <bool TILED, int T, int B, class S, class R, class N>
VT_FN void ring_blocks(i64 rows, i64 width_, i64 grid_, const void* x, i64 x_stride, const void* weight, S&& scales_by, R&& root,
                       N&& normed, void* codes, void* scale_codes) {
    VT_SHARED(memory);
    __shared__ float factors[256];
    const int width = (int)width_, grid = (int)grid_;
    const RowRing<T, B> ring(memory, width);
    const typename OrderOf<TILED>::Is order((int)rows, grid, ring.team, ring.teams);
    BlockScales by;
    const unsigned wide = (unsigned)ring.blocks;
    unsigned char* const scales = (unsigned char*)scale_codes;
    unsigned four[TILED ? B : 1] = {};  // scales of as many rows
    int held = 0;
    auto meanwhile = [&] {
        by = scales_by();
        if (TILED) fill_tiles(scales, rows, wide, (i64)blockIdx.x * blockDim.x + threadIdx.x, (i64)grid * blockDim.x);
#pragma unroll 1
        for (int c = blockDim.x - 1 - threadIdx.x; c < 256; c += blockDim.x) factors[c] = by.quick(c);
    };
    each_row(ring, order, x, x_stride, weight, meanwhile, root, [&](int row, int turn, int slot, float number) {
        unsigned char* const out = (unsigned char*)codes + ((i64)row * width >> 1) + ring.thread * 8;
        unsigned char* const beside = scales + (i64)row * wide + ring.thread;
        unsigned open = 0;
        auto brains = [&](uint4 (&y)[2], int i) {
            EACH(h, 2) {
                float v[8], w[8];
                ring.values(v, slot, i, h);
                ring.weights_of(w, i, h);
                y[h] = normed(v, w, number).a;
            }
        };
        auto put = [&](int i, unsigned a, unsigned b, unsigned code) {
            *(uint2*)(out + i * (T * 8)) = {ring.flipped ? b : a, ring.flipped ? a : b};
            if (!TILED) beside[i * T] = (unsigned char)code;
        };
        EACH(i, B) {
            if (!ring.inside(i)) continue;
            uint4 y[2];
            brains(y, i);
            const unsigned code = by.code(largest_of_sixteen<true>(y[0], y[1]));
            const float quick = factors[code];
            if (quick == 0.0f) open |= 1u << i;
            if (TILED) four[TILED ? i : 0] = chosen_bytes(four[TILED ? i : 0], code, 0x4321u);
            put(i, e2m1_of_brains(y[0], quick), e2m1_of_brains(y[1], quick), code);
        }
#pragma unroll 1
        for (; open; open &= open - 1) {
            const int i = lowest_bit(open);
            uint4 y[2];
            brains(y, i);
            const unsigned code = by.code(largest_of_sixteen<false>(y[0], y[1]));
            if (TILED)
                EACH(n, B)
                    if (n == i) four[TILED ? n : 0] = chosen_bytes(four[TILED ? n : 0], code, 0x4210u);
            put(i, by.word({y[0], {}}, code), by.word({y[1], {}}, code), code);
        }
        if constexpr (TILED) {
            ++held;
            if (!order.ends(row, turn)) return;
            // Lane 3 of four has the last row's scales, the others those of the rows before.
            const int across = (int)(wide + 3) >> 2, lane = threadIdx.x & 3;
            unsigned char* const tile = scales + (unsigned)(row >> 7) * (across * 512) + (row & 31) * 16 + (row >> 5 & 3) * 4;
            EACH(i, B) {
                const unsigned own = turned_bytes(four[TILED ? i : 0]);
                if (ring.block(i) - lane < (int)wide && lane + held > 3)
                    *(unsigned*)(tile + (ring.block(i) >> 2) * 512 + (lane - 3) * 4) = own;
            }
            held = 0;
        }
    });
}
