// Rows of a ring (ring_rows.cuh) into codes of e4m3, and a scale for each row.
#pragma once
#include "bf16_quotients.cuh"
#include "e2m1_steps.cuh"
#include "ring_rows.cuh"

// Eight codes; `nan` stands for a NaN of either sign.
VT_FN uint2 e4m3_eight(const float (&x)[8], unsigned nan) {
    uint2 codes = {e4m3_pair(x[0], x[1]) | e4m3_pair(x[2], x[3]) << 16, e4m3_pair(x[4], x[5]) | e4m3_pair(x[6], x[7]) << 16};
    if (nan != 0x7fu && (nans_of(codes.x) | nans_of(codes.y))) codes = {with_nan(codes.x, nan), with_nan(codes.y, nan)};
    return codes;
}

// A thread's blocks of a row, as they are read: normed(values, weights, number), eight bfloat16. Zeros outside.
template <int T, int B, class N>
VT_FN void ring_normed(uint4 (&y)[B][2], const RowRing<T, B>& ring, int slot, float number, N&& normed) {
    float v[8], w[8];
#pragma unroll
    for (int i = 0; i < B; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            ring.values(v, slot, i, h);
            ring.weights_of(w, i, h);
            y[i][h] = normed(v, w, number).a;
        }
}

// Their codes in a row at `out`. by(i): what divides those of block i, whether it is inside or not. ANY: by large scales too,
// and with any `nan`; else it is 0x7f. One choice for a row: a branch for each vector, around what is hardly ever done, takes
// 3 to 8 % of the time.
template <bool ANY, int T, int B, class Q>
VT_FN void ring_codes(const uint4 (&y)[B][2], const RowRing<T, B>& ring, unsigned char* out, unsigned nan, Q&& by) {
#pragma unroll
    for (int i = 0; i < B; ++i) {
        const Quotients quotients = by(i);
        uint2 made[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float v[8], q[8];
            widen(v, {y[i][h], {}}, BF16);
            if (ANY) {
                quotients.divide(q, v);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) q[j] = vt_fma(v[j], quotients.inverse, v[j] * quotients.low);
            }
            made[h] = e4m3_eight(q, ANY ? nan : 0x7fu);
        }
        const uint2 a = ring.flipped ? made[1] : made[0], b = ring.flipped ? made[0] : made[1];
        if (ring.inside(i)) *(uint4*)(out + ring.block(i) * 16) = {a.x, a.y, b.x, b.y};
    }
}

// The larger sizes of two pairs of bfloat16, under signs of no meaning. A NaN is passed over for a number.
VT_FN unsigned larger_sizes(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
    return a;
#else
    return larger_pair<false>(larger_pair<false>(0u, a & 0x7fff7fffu), b & 0x7fff7fffu);
#endif
}
VT_FN unsigned larger_sizes(const uint4& a, const uint4& b) {
    return larger_sizes(larger_sizes(larger_sizes(a.x, a.y), larger_sizes(a.z, a.w)),
                        larger_sizes(larger_sizes(b.x, b.y), larger_sizes(b.z, b.w)));
}

// The bits of a row's largest size; a NaN is passed over. `tops`: a word a warp of the team.
template <int T, int B> VT_FN unsigned ring_largest(const uint4 (&y)[B][2], const RowRing<T, B>& ring, uint4& tops) {
    unsigned pair = larger_sizes(y[0][0], y[0][1]);
#pragma unroll
    for (int i = 1; i < B; ++i) pair = larger_sizes(pair, larger_sizes(y[i][0], y[i][1]));
    pair = larger_pair<false>(0u, pair & 0x7fff7fffu);
    unsigned top = largest_of_lanes(larger(pair << 16, pair & 0xffff0000u), 32);
    if (T == 32) return top;
    if ((threadIdx.x & 31) == 0) ((unsigned*)&tops)[ring.thread / 32] = top;
    team_joins<T>(ring.team);
    const uint4 t = tops;
    top = larger(t.x, t.y);
    return T == 64 ? top : larger(top, larger(t.z, t.w));
}

// normed as for ring_normed; scale_of(bits of the largest size): no less than some usual number, or NaN.
template <int T, int B, class R, class N, class S>
VT_FN void ring_tokens(i64 rows, i64 width_, i64 grid, const void* x, i64 x_stride, const void* weight, R&& root, N&& normed,
                       S&& scale_of, unsigned char* codes, float* scales, unsigned nan) {
    VT_SHARED(memory);
    __shared__ uint4 tops[MOST_TEAMS][AHEAD];
    const int width = (int)width_;
    const RowRing<T, B> ring(memory, width);
    const RowOrder order((int)rows, (int)grid, ring.team, ring.teams);
    each_row(ring, order, x, x_stride, weight, [] {}, root, [&](int row, int, int slot, float number, auto&&) {
        uint4 y[B][2];
        ring_normed(y, ring, slot, number, normed);
        const float scale = scale_of(ring_largest(y, ring, tops[ring.team][slot]));
        if (ring.thread == 0) scales[row] = scale;
        const Quotients by(scale);
        auto same = [&](int) -> const Quotients& { return by; };
        if (by.large || nan != 0x7fu) ring_codes<true>(y, ring, codes + (i64)row * width, nan, same);
        else ring_codes<false>(y, ring, codes + (i64)row * width, nan, same);
    });
}
