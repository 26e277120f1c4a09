// Rows of a ring (ring_rows.cuh) into NVFP4.
//
// Scales among tiles: a thread keeps its codes of the last four rows, the newest on top. Where these rows lie 32 apart, four
// lanes then have 16 neighbouring bytes; byte by byte the stores took 2.3 us longer for 8192 x 5120 than those into rows.
#pragma once
#include "chain_fp4.cuh"
#include "early.cuh"
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

// normed(x, weights, number): eight bfloat16. shape: twice the grid's blocks, and one more where rows, whole tiles of them,
// are taken four at a time.
template <bool TILED, int B, class R, class N>
VT_FN void ring_blocks(i64 rows, i64 width_, i64 shape, const void* x, i64 x_stride, const void* weight, float scale, float back,
                       R&& root, N&& normed, void* codes, void* scale_codes) {
    VT_SHARED(memory);
    __shared__ float factors[256];
    const int width = (int)width_, grid = (int)shape >> 1;
    const RowRing<B> ring(memory, width);
    const RowOrder order((int)rows, grid, TILED && (shape & 1));
    const BlockScales by{scale, back, nullptr};
    const unsigned wide = (unsigned)ring.blocks;
    unsigned char* const scales = (unsigned char*)scale_codes;
    unsigned four[TILED ? B : 1] = {};  // scales of as many rows
    auto meanwhile = [&] {
        if (TILED) fill_tiles(scales, rows, wide, (i64)blockIdx.x * blockDim.x + threadIdx.x, (i64)grid * blockDim.x);
#pragma unroll 1
        for (int c = threadIdx.x; c < 256; c += blockDim.x) factors[c] = by.quick(c);
    };
    each_row(ring, order, x, x_stride, weight, meanwhile, root, [&](int row, int turn, int slot, float number) {
        unsigned char* const out = (unsigned char*)codes + ((i64)row * width >> 1) + ring.thread * 8;
        unsigned char* const beside = scales + (i64)row * wide + ring.thread;
        unsigned open = 0;
        auto put = [&](int i, unsigned a, unsigned b, unsigned code) {
            *(uint2*)(out + i * (TEAM * 8)) = {ring.flipped ? b : a, ring.flipped ? a : b};
            if (!TILED) beside[i * TEAM] = (unsigned char)code;
        };
        EACH(i, B) {
            if (!ring.inside(i)) continue;
            uint4 y[2];
            EACH(h, 2) {
                float v[8], w[8];
                ring.values(v, slot, i, h);
                ring.weights_of(w, i, h);
                y[h] = normed(v, w, number).a;
            }
            const unsigned code = by.code(largest_of_sixteen<true>(y[0], y[1]));
            const float quick = factors[code];
            if (quick == 0.0f) open |= 1u << i;
            const unsigned a = e2m1_of_brains(y[0], quick), b = e2m1_of_brains(y[1], quick);
            if (TILED) four[TILED ? i : 0] = chosen_bytes(four[TILED ? i : 0], code, 0x4321u);
            put(i, a, b, code);
        }
#pragma unroll 1
        for (; open; open &= open - 1) {
            const int i = lowest_bit(open);
            uint4 y[2];
            EACH(h, 2) {
                float v[8], w[8];
                ring.values(v, slot, i, h);
                ring.weights_of(w, i, h);
                y[h] = normed(v, w, number).a;
            }
            const unsigned code = by.code(largest_of_sixteen<false>(y[0], y[1]));
            if (TILED)
                EACH(n, B)
                    if (n == i) four[TILED ? n : 0] = chosen_bytes(four[TILED ? n : 0], code, 0x4210u);
            const unsigned a = by.word({y[0], {}}, code), b = by.word({y[1], {}}, code);
            put(i, a, b, code);
        }
        if (TILED && order.fours && (turn & 3) == 3) {
            const unsigned across = (wide + 3) >> 2, lane = threadIdx.x & 3;
            unsigned char* const tile = scales + (unsigned)(row >> 7) * across * 512 + (row & 31) * 16 + lane * 4;
            EACH(i, B) {
                const unsigned own = turned_bytes(four[TILED ? i : 0]);
                if (ring.block(i) - lane < wide) *(unsigned*)(tile + (ring.block(i) >> 2) * 512) = own;
            }
        }
        if (TILED && !order.fours)
            EACH(i, B)
                if (ring.inside(i))
                    store_scale<true, unsigned>(scales, (unsigned)rows, (unsigned)row, wide, (unsigned)ring.block(i),
                                                four[TILED ? i : 0] >> 24);
    });
}
