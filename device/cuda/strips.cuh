// strided_tree(8, vector=4), the order of sums over a row of a recurrent state: lane t of eight adds the elements 4t ...
// 4t + 3, then the four 32 further on, and so on; then p[t] += p[t + m] for m = 4, 2, 1. A row of up to 4 * lanes
// elements has 1, 2 or 4 lanes only. Eight neighbouring threads are the lanes, so a warp's access of 16 bytes a thread
// covers whole 128-byte lines of four rows.
//
// A float32 sum of two does not depend on their order, so a butterfly gives every lane the tree's bits. What lies beyond
// a row's end counts as +0 where the row is not a whole number of turns: it makes a partial of -0 a +0.
#pragma once
#include "elements.cuh"
#include "tree.cuh"

#define STRIP_LANES 8
#define STRIP_TURN 32

// Four elements as they lie in memory.
struct Four { unsigned w[4]; };

VT_FN Four fetch_four(const void* base, i64 at, int kind) {
    if (kind == F32) {
        const uint4 p = *(const uint4*)((const char*)base + at * 4);
        return {{p.x, p.y, p.z, p.w}};
    }
    const uint2 p = *(const uint2*)((const char*)base + at * 2);
    return {{p.x, p.y, 0u, 0u}};
}

VT_FN void widen_four(float (&x)[4], const Four& raw, int kind) {
    if (kind == F32) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = vt_float((int)raw.w[j]);
    } else if (kind == BF16) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = vt_float((int)(j & 1 ? raw.w[j / 2] & 0xffff0000u : raw.w[j / 2] << 16));
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = widen_f16(j & 1 ? raw.w[j / 2] >> 16 : raw.w[j / 2] & 0xffffu);
    }
}

VT_FN void store_four(void* base, i64 at, const float (&x)[4], int kind) {
    if (kind == F32) {
        *(uint4*)((char*)base + at * 4) = {(unsigned)vt_bits(x[0]), (unsigned)vt_bits(x[1]), (unsigned)vt_bits(x[2]),
                                           (unsigned)vt_bits(x[3])};
    } else if (kind == BF16) {
        *(uint2*)((char*)base + at * 2) = {narrow_bf16(x[0], x[1]), narrow_bf16(x[2], x[3])};
    } else {
        *(uint2*)((char*)base + at * 2) = {narrow_f16(x[0], x[1]), narrow_f16(x[2], x[3])};
    }
}

// The trees of R rows at once: their exchanges are under way together.
template <int R> VT_FN void trees(float (&p)[R], int lanes) {
#pragma unroll
    for (int m = STRIP_LANES / 2; m >= 1; m >>= 1) {
        if (m >= lanes) continue;
#pragma unroll
        for (int r = 0; r < R; ++r) p[r] += other_lane(p[r], m);
    }
}

// The sum over a row of `length` elements of any number; `term(at, partial)` adds one, `pad` stands for none.
template <class F> VT_FN float strip_sum(int length, int lanes, F&& term) {
    const int lane = threadIdx.x & (STRIP_LANES - 1), end = (length + STRIP_TURN - 1) / STRIP_TURN * STRIP_TURN;
    float partial[1] = {0.0f};
    for (int turn = 4 * lane; turn < end; turn += STRIP_TURN)
        for (int at = turn; at < turn + 4; ++at) partial[0] = at < length ? term(at, partial[0]) : partial[0] + 0.0f;
    trees(partial, lanes);
    return partial[0];
}
