// Scales of groups whose sums, as near the mirror's, are a warp's: of each lane's rows (rotated_tile.cuh).
#pragma once
#include "near_codes.cuh"

// Of vectors of up to 32: what LANES lanes have of four rows, put together: row n LANES + t in lane t of them.
template <int LANES, class F> VT_FN void folded(float (&all)[4 / LANES], const float (&v)[4], F&& with) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    float two[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float away = __shfl_xor_sync(FULL_WARP, odd ? v[2 * n] : v[2 * n + 1], 1);
        two[n] = with(odd ? v[2 * n + 1] : v[2 * n], away);
    }
    if constexpr (LANES == 2) all[0] = two[0], all[1] = two[1];
    else all[0] = with(upper ? two[1] : two[0], __shfl_xor_sync(FULL_WARP, upper ? two[0] : two[1], 2));
}

// The largest size of a row, or NaN.
VT_FN float top_of_row(const float (&y)[8]) {
    float top[2];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float one = vt_abs(y[j]);
        top[j & 1] = j < 2 ? one : larger_or_nan(top[j & 1], one);
    }
    return larger_or_nan(top[0], top[1]);
}
VT_FN void tops_of(float (&tops)[4], const float (&y)[4][8]) {
#pragma unroll
    for (int q = 0; q < 4; ++q) tops[q] = top_of_row(y[q]);
}

// Four lanes have a row each. The bound's last part is for what rounds on the way to a code, twice.
template <int R, bool Q> VT_FN void near_of(Near (&near)[1], const float (&y)[4][8], float, const NearMx<ABS_MAX, Q>&) {
    float top[1], tops[4];
    tops_of(tops, y);
    folded<4>(top, tops, larger_or_nan);
    near[0] = near_of_top(top[0], top[0] * ((5.0f + 1.4143f * CHAIN_ROUNDS + 2.0f * TENSOR_STEP) * 0x1p-24f));
}

// The sums' mean is a vector's first element times c.
template <int R, bool Q> VT_FN void near_of(Near (&near)[1], const float (&y)[4][8], float mean, const NearMx<QUEST, Q>&) {
    float squares[4], all[1];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        squares[q] = y[q][0] * y[q][0];
#pragma unroll
        for (int j = 1; j < 8; ++j) squares[q] = vt_fma(y[q][j], y[q][j], squares[q]);
    }
    folded<4>(all, squares, [](float a, float b) { return a + b; });
    const float square = all[0] * 0.03125f, root = fast_root(square);
    // Chains, their sum, two products by tensor cores, of which the second has the first's sum, up to 4 c sqrt(sum x^2) of its
    // elements, among what it adds.
    const float share = (1.4143f * CHAIN_ROUNDS + 5.7f + TENSOR_STEP * 5.9f) * 1.01f * 0x1p-24f;
    near[0] = near_of_squares(square, root, mean, vt_fma(root, share, LEAST_BOUND), square == 0.0f);
}

// Two lanes have two rows each.
template <int R> VT_FN void near_of(Near (&near)[2], const float (&y)[4][8], float, const NearNv& by) {
    float top[2], tops[4];
    tops_of(tops, y);
    folded<2>(top, tops, larger_or_nan);
    const float more = R < 32 ? 8.0f + CHAIN_ROUNDS + TENSOR_STEP : 9.0f + 1.4143f * CHAIN_ROUNDS + 2.0f * TENSOR_STEP;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float all = R == 32 ? larger_or_nan(top[n], __shfl_xor_sync(FULL_WARP, top[n], 2)) : top[n];
        near[n] = near_of_sixteen(top[n], all * (more * 0x1p-24f), by);
    }
}

// How far a sum of 64 or 128 is from the mirror's, over c sqrt(sum x^2) sqrt(R), a little more. The mirror's share, and that of
// the sums of pieces, is the root of the mean square of their roundings, 12.56 and 15.63: of each element's chain, of that
// chain's sums with others, and one or two. A tensor core's on Hopper: of a piece's halves a and b the first product is cut
// off 8.5 of its largest number, at most |a|, its sum, at most 4 |a|, 2 of that, the second 8.5 of the larger of |b| and that
// sum, and the whole 2 of 5.7 |a, b|: 61.8 |a, b| together, and of all pieces 61.8 sqrt(R / 32) sqrt(sum x^2), 10.93 in these
// units.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define TENSOR_ROOT 11.0f
#else
#define TENSOR_ROOT (1.6f * TENSOR_STEP)
#endif
#define ROOT_64 ((12.6f + TENSOR_ROOT) * 0x1p-24f)
#define ROOT_128 ((15.7f + TENSOR_ROOT) * 0x1p-24f)

// Of vectors of 64 and 128: a lane's sums of a vector are a group or two, or, of 64 in groups of 32, half of one, of which the
// lane beside has the other half. What rounds on the way to a code is 4 more; of NVFP4's 8 (near_of_sixteen).
template <int R, bool Q> VT_FN Near near_of_rows(float top, float bound, float, float, const NearMx<ABS_MAX, Q>&) {
    if (R == 64) top = larger_or_nan(top, __shfl_xor_sync(FULL_WARP, top, 1));
    return near_of_top(top, vt_fma(top, 4.0f * 0x1p-24f, bound));
}
// squares: of what sums and differences are taken of, so that theirs are PIECES times as many.
template <int R, bool Q> VT_FN Near near_of_rows(float, float, float mean, float squares, const NearMx<QUEST, Q>&) {
    constexpr float PIECES = R / 32;
    if (R == 64) {
        squares += __shfl_xor_sync(FULL_WARP, squares, 1);
        mean = (mean + __shfl_xor_sync(FULL_WARP, mean, 1)) * 0.5f;
    }
    const float square = squares * (0.03125f * PIECES), root = fast_root(square);
    // The root of the vector's sums' squares is c sqrt(R) sqrt(sum x^2).
    float vector = squares + __shfl_xor_sync(FULL_WARP, squares, 2);
    if (R == 128) vector += __shfl_xor_sync(FULL_WARP, vector, 1);
    const float bound = vt_fma(fast_root(vector), R == 128 ? 2.0f * ROOT_128 : 1.4143f * ROOT_64, LEAST_BOUND);
    return near_of_squares(square, root, mean, bound, vector == 0.0f);
}
template <int R> VT_FN Near near_of_rows(float top, float bound, float, float, const NearNv& by) {
    return near_of_sixteen(top, vt_fma(top, 8.0f * 0x1p-24f, bound), by);
}
