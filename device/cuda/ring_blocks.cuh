// Rows of a ring (ring_rows.cuh) into NVFP4.
//
// Scales among tiles: a thread keeps its codes of the last four rows, the newest on top. Where these rows lie 32 apart, four
// lanes then have 16 neighbouring bytes. 8192 x 5120, whose scales in rows take 0.5 us: so 1.1; row by row 4.2; by the warps of
// a block that gather fours in shared memory 1.6; by eight rows, whole sectors, as by four.
//
// 8192 x 2048, where instructions are in the way, 950 a row of a warp of which 840 are left: 12.15 us; 11.97 with fewer for
// signs, largest sizes and blocks that are open. 62 rows for each block instead of 60 or 64: 10.9 instead of 11.15. Widened by
// products: 10.9 instead of 11.05; so of the rows that are read, too: no gain.
#pragma once
#include "chain_fp4.cuh"
#include "ring_rows.cuh"

// Whether rows of up to 2048 stay in registers between their sum and their codes: elsewhere compilers find no room for them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define ROWS_STAY false
#else
#define ROWS_STAY true
#endif

// bfloat16s widened by products, which leaves the permuting of bits to others; where one is infinite or NaN it is NaN, and a
// block that has it is open. The factors are 0 and 1 of a pair, the terms 0 and -0; a grid is one high, which compilers do not
// know: they would take known pairs apart.
struct Widening {
#ifdef __CUDACC__
    unsigned one = gridDim.y * 0x3f800000u, zero = gridDim.y << 31;
#endif
    VT_MEMBER float upper(unsigned pair) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(one), "r"(zero));
        return vt_float((int)pair);
#else
        return vt_float((int)(pair & 0xffff0000u));
#endif
    }
    VT_MEMBER float lower(unsigned pair) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm("{\n.reg .b16 l, h;\n.reg .b32 d;\nmov.b32 {l, h}, %0;\nmov.b32 d, {l, l};\nfma.rn.bf16x2 %0, d, %1, %2;\n}"
            : "+r"(pair) : "r"(one), "r"(zero));
        return vt_float((int)pair);
#else
        return vt_float((int)(pair << 16));
#endif
    }
};

// Eight codes of eight bfloat16s and their factor, as e2m1_of_bf16 makes them; which elements are a pair of halves spares the
// bytes' second sorting.
VT_FN unsigned e2m1_of_brains(const uint4& raw, float factor, const Widening& by) {
    const unsigned w[4] = {raw.x, raw.y, raw.z, raw.w};
    unsigned even[2], odd[2];
    EACH(i, 2) {
        auto low = [&](int n) { return by.lower(w[n]) * factor; };
        auto high = [&](int n) { return by.upper(w[n]) * factor; };
        even[i] = cut_to_halves(low(2 * i), low(2 * i + 1)), odd[i] = cut_to_halves(high(2 * i), high(2 * i + 1));
    }
    const unsigned a = chosen_bytes(even[0], even[1], 0x7531u), b = chosen_bytes(odd[0], odd[1], 0x7531u);
    const unsigned word = joined_halves((a + 0x01010101u) >> 1, b * 8u + 0x08080808u), signs = joined_halves(a >> 4, b);
    return word | (signs & (word + 0x77777777u));
}

// As largest_of_sixteen<true>, but that infinity may be NaN: both leave a block open.
VT_FN unsigned largest_of_a_block(const uint4& a, const uint4& b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    auto larger_of = [](unsigned a, unsigned b) {
        unsigned c;
        asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
        return c;
    };
    const unsigned one = larger_of(larger_of(a.x, a.y), larger_of(a.z, a.w));
    const unsigned pair = larger_of(one, larger_of(larger_of(b.x, b.y), larger_of(b.z, b.w)));
    float top;
    asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(top) : "f"(vt_float((int)(pair << 16))), "f"(vt_float((int)pair)));
    return (unsigned)vt_bits(top) & 0x7fff0000u;
#else
    return largest_of_sixteen<true>(a, b);
#endif
}

// Of a lane's four bytes and those of its three neighbours, those of one row: bytes [row][lane] of [lane][row].
VT_FN unsigned turned_bytes(unsigned own) {
    const int lane = threadIdx.x & 3;
    own = chosen_bytes(own, __shfl_xor_sync(FULL_WARP, own, 1), lane & 1 ? 0x3715u : 0x6240u);
    return chosen_bytes(own, __shfl_xor_sync(FULL_WARP, own, 2), lane & 2 ? 0x3276u : 0x5410u);
}

// Which rows a team takes where scales lie among tiles: fours of rows, 32 apart, as long as all teams have one, and then
// neighbours of the fours that are left, `base` and so on, the rows of the last tiles, if these are not whole, one by one.
struct TileOrder {
    int own, teams, fours, base, whole, turns;

    VT_MEMBER TileOrder(int rows, int grid, int team, int team_count)
        : own(blockIdx.x + grid * team), teams(grid * team_count), whole(rows & ~127) {
        const int most = (unsigned)(rows + teams - 1) / (unsigned)teams, rounds = (unsigned)whole / (unsigned)(4 * teams);
        fours = (most - 1) / 4 < rounds ? (most - 1) / 4 : rounds;
        const int left = rows - 4 * fours * teams, least = most - 4 * fours - 1, more = left - teams * least;
        base = 4 * fours * teams + own * least + (own < more ? own : more);  // the first `more` teams have one more
        turns = 4 * fours + least + (own < more ? 1 : 0);
    }
    VT_MEMBER int row(int turn) const {
        const int rest = turn - 4 * fours, n = rest < 0 ? 4 * (own + (turn >> 2) * teams) + (turn & 3) : base + rest;
        return n < whole ? (n >> 7) * 128 + (n >> 2 & 31) + (n & 3) * 32 : n;
    }
    // Whether a row is a four's last one, or is of none.
    VT_MEMBER bool last(int row) const { return (row & 96) == 96 || row >= whole; }
    VT_MEMBER int after(int own_row, int turn) const { return last(own_row) ? row(turn + 1) : own_row + 32; }
    VT_MEMBER bool ends(int row, int turn) const { return last(row) || turn == turns - 1; }
};

template <bool TILED> struct OrderOf { typedef RowOrder Is; };
template <> struct OrderOf<true> { typedef TileOrder Is; };

// normed(x, weights, number): eight bfloat16. scales_by(): the scales of blocks, once the first rows are on their way.
template <bool TILED, int T, int B, class S, class R, class N>
VT_FN void ring_blocks(i64 rows, i64 width_, i64 grid_, const void* x, i64 x_stride, const void* weight, S&& scales_by, R&& root,
                       N&& normed, void* codes, void* scale_codes) {
    VT_SHARED(memory);
    __shared__ float factors[256];
    constexpr int KEPT = ROWS_STAY && T == 32 && B <= 4 ? B : 0;
    typedef RowRing<T, B, KEPT> Ring;
    const int width = (int)width_, grid = (int)grid_;
    const Ring ring(memory, width);
    const typename OrderOf<TILED>::Is order((int)rows, grid, ring.team, ring.teams);
    BlockScales by;
    const Widening widening;
    const unsigned wide = (unsigned)ring.blocks;
    unsigned char* const scales = (unsigned char*)scale_codes;
    const int across = ((int)(wide + 3) >> 2) * 512, lane = threadIdx.x & 3;  // bytes of tiles side by side
    unsigned char* const own_codes = (unsigned char*)codes + ring.thread * 8;
    unsigned char* const own_tiles = scales + ((ring.thread >> 2) * 512 + (lane - 3) * 4);
    unsigned four[TILED ? B : 1] = {};  // scales of as many rows
    int held = 0;
    auto meanwhile = [&] {
        by = scales_by();
        if (TILED) fill_tiles(scales, rows, wide, (i64)blockIdx.x * blockDim.x + threadIdx.x, (i64)grid * blockDim.x);
#pragma unroll 1
        for (int c = blockDim.x - 1 - threadIdx.x; c < 256; c += blockDim.x) factors[c] = by.quick(c);
    };
    each_row(ring, order, x, x_stride, weight, meanwhile, root, [&](int row, int turn, int slot, float number,
                                                                    const typename Ring::Kept& kept) {
        unsigned char* const out = own_codes + (u64)(unsigned)row * (unsigned)(width >> 1);
        unsigned char* const beside = scales + (i64)row * wide + ring.thread;
        float least = 1.0f;
        auto brains = [&](uint4 (&y)[2], int i) {
            EACH(h, 2) {
                float v[8], w[8];
                ring.values(v, slot, i, h);
                ring.weights_of(w, i, h);
                y[h] = normed(v, w, number).a;
            }
        };
        auto kept_brains = [&](uint4 (&y)[2], const float (&v)[2][8], int i) {
            EACH(h, 2) {
                float w[8];
                ring.weights_of(w, i, h);
                y[h] = normed(v[h], w, number).a;
            }
        };
        auto put = [&](int i, unsigned a, unsigned b, unsigned code) {
            *(uint2*)(out + i * (T * 8)) = {ring.flipped ? b : a, ring.flipped ? a : b};
            if (!TILED) beside[i * T] = (unsigned char)code;
        };
        EACH(i, B) {
            if (!ring.inside(i)) continue;
            uint4 y[2];
            if (i < KEPT) kept_brains(y, kept.of[i < KEPT ? i : 0], i);
            else brains(y, i);
            const unsigned code = by.code(largest_of_a_block(y[0], y[1]));
            const float quick = factors[code];
            least = fminf(least, quick);
            if (TILED) four[TILED ? i : 0] = chosen_bytes(four[TILED ? i : 0], code, 0x4321u);
            put(i, e2m1_of_brains(y[0], quick, widening), e2m1_of_brains(y[1], quick, widening), code);
        }
#pragma unroll 1
        for (int i = 0; least == 0.0f && i < B; ++i) {
            if (ring.block(i) >= ring.blocks) continue;
            uint4 y[2];
            brains(y, i);
            if (factors[by.code(largest_of_a_block(y[0], y[1]))] != 0.0f) continue;
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
            unsigned char* const tile = own_tiles + ((unsigned)(row >> 7) * across + (row & 31) * 16 + (row >> 5 & 3) * 4);
            EACH(i, B) {
                const unsigned own = turned_bytes(four[TILED ? i : 0]);
                if (ring.block(i) - lane < (int)wide && lane + held > 3) *(unsigned*)(tile + i * (T / 4 * 512)) = own;
            }
            held = 0;
        }
    });
}
