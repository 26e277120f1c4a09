// Rows of a ring (ring_rows.cuh) into codes of e4m3 under a scale for each 8 or 16 lanes' elements, 128 or 256 of them.
#pragma once
#include "ring_tokens.cuh"

// The largest sizes of B blocks' groups, two to a word: lanes part with what others join, so that three or four exchanges
// serve up to four words. Each lane is left with that of group `own`.
template <int B> struct RingScales {
    unsigned top;
    int own, base;

    VT_MEMBER RingScales(const uint4 (&y)[B][2], int lanes) {
        const int lane = threadIdx.x & 31;
        auto join = [](unsigned a, unsigned b) { return larger_pair<false>(a, b); };
        auto away = [](unsigned a, int m) { return __shfl_xor_sync(FULL_WARP, a, m); };
        auto split = [&](unsigned a, unsigned b, int m) { return join(lane & m ? b : a, away(lane & m ? a : b, m)); };
        auto meet = [&](unsigned a, int m) { return join(a, away(a, m)); };
        unsigned word[4] = {};
#pragma unroll
        for (int i = 0; i < B; i += 2) {
            const int next = i + 1 < B ? i + 1 : i;
            const unsigned low = join(largest_pair<false>(y[i][0]), largest_pair<false>(y[i][1]));
            const unsigned high = join(largest_pair<false>(y[next][0]), largest_pair<false>(y[next][1]));
            word[i / 2] = join(chosen_bytes(low, high, 0x5410u), chosen_bytes(low, high, 0x7632u));
            if (lanes == 16) word[i / 2] = meet(word[i / 2], 8);
        }
        unsigned a = B > 2 ? split(word[0], word[1], 4) : meet(word[0], 4);
        if (B > 4) a = split(a, B > 6 ? split(word[2], word[3], 4) : meet(word[2], 4), 2);
        else a = meet(a, 2);
        a = meet(a, 1);
        const int later = B > 4 ? (lane & 2) * 2 : 0;
        own = later + (B > 6 || (B > 2 && later == 0) ? (lane & 4) / 2 : 0) + (lane & 1);
        top = lane & 1 ? a & 0xffff0000u : a << 16;
        base = lane & (32 - lanes);
    }
    VT_MEMBER int lane_of(int i) const { return base + (i & 1) + (i & 2) * 2 + (i & 4) / 2; }
};

// normed(values, weights, number): eight bfloat16. put_scale(row, first element, scale).
template <int T, int B, class R, class N, class S, class P>
VT_FN void ring_groups(i64 rows, i64 width_, int grid, int lanes, const void* x, i64 x_stride, const void* weight, R&& root,
                       N&& normed, S&& scale_of, P&& put_scale, unsigned char* codes, unsigned nan) {
    VT_SHARED(memory);
    const int width = (int)width_, lane = threadIdx.x & 31;
    const RowRing<T, B> ring(memory, width);
    const RowOrder order((int)rows, grid, ring.team, ring.teams);
    each_row(ring, order, x, x_stride, weight, [] {}, root, [&](int row, int, int slot, float number, auto&&) {
        uint4 y[B][2];
        ring_normed(y, ring, slot, number, normed);
        const RingScales<B> found(y, lanes);
        const float scale = scale_of(found.top);
        const int first = (ring.block(found.own) - (lane - found.base)) * 16;
        if (lane == found.lane_of(found.own) && found.own < B && first < width) put_scale(row, first, scale);
        const Quotients own(scale);
        const bool large = __any_sync(FULL_WARP, own.large);
        unsigned char* const out = codes + (i64)row * width;
        auto of_lane = [&](int i) {
            const int from = found.lane_of(i);
            return Quotients(__shfl_sync(FULL_WARP, own.inverse, from), __shfl_sync(FULL_WARP, own.low, from));
        };
        auto anew = [&](int i) { return Quotients(__shfl_sync(FULL_WARP, scale, found.lane_of(i))); };
        if (large) ring_codes<true>(y, ring, out, nan, anew);
        else if (nan != 0x7fu) ring_codes<true>(y, ring, out, nan, of_lane);
        else ring_codes<false>(y, ring, out, nan, of_lane);
    });
}
