// Scales and codes of sums that are near the mirror's: those that all sums as near have, and which may be others.
#pragma once
#include "rotated_codes.cuh"

// Sizes of at most 6 2^-14, the signs as they were.
VT_FN unsigned no_more_than_six(unsigned pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    asm("min.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x0e000e00u));
    return pair;
#else
    const unsigned low = pair & 0x7fffu, high = pair >> 16 & 0x7fffu;
    return (pair & 0x80008000u) | (low < 0x0e00u ? low : 0x0e00u) | (high < 0x0e00u ? high : 0x0e00u) << 16;
#endif
}

#ifdef __CUDACC__
VT_FN float fast_root(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
VT_FN float fast_root(float x) { return sqrtf(x); }
#endif

// Of four values a byte each: sign, three zeros, the code cut off, its half, which 1 more rounds.
template <bool BOUNDED> VT_FN unsigned four_rounded(float a, float b, float c, float d) {
    unsigned low = cut_to_halves(a, b), high = cut_to_halves(c, d);
    if (!BOUNDED) low = no_more_than_six(low), high = no_more_than_six(high);
    return chosen_bytes(low, high, 0x7531u) + 0x01010101u;
}

#define UNSURE 0x0e0e0e0eu

// Eight codes of the columns' sums, in halves, times factor 2^14; ones of UNSURE where some change within `near` 2^14.
template <bool BOUNDED> VT_FN unsigned codes_near(const float (&half)[8], float factor, float near, unsigned& unsure) {
    float y[8], high[8], low[8];
#pragma unroll
    for (int i = 0; i < 8; i += 4)
#pragma unroll
        for (int e = i; e < i + 2; ++e) y[e] = half[e] + half[e + 2], y[e + 2] = half[e] - half[e + 2];
#pragma unroll
    for (int j = 0; j < 8; ++j) high[j] = vt_fma(y[j], factor, near), low[j] = vt_fma(y[j], factor, -near);
    const unsigned even = four_rounded<BOUNDED>(high[0], high[2], high[4], high[6]);
    const unsigned odd = four_rounded<BOUNDED>(high[1], high[3], high[5], high[7]);
    unsure = even ^ four_rounded<BOUNDED>(low[0], low[2], low[4], low[6]);
    unsure |= odd ^ four_rounded<BOUNDED>(low[1], low[3], low[5], low[7]);
    const unsigned word = joined_halves(even >> 1, odd * 8u);
    const unsigned signs = (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
    return word | (signs & (word + 0x77777777u));
}

// What a row's sums are made codes with: the code of their scale, `factor` times 2^-14, `near` times both; whether all sums
// within `bound` have that code, and `near` leaves a code's sign in no doubt but that of zero.
struct Near {
    unsigned code;
    float factor, near;
    bool sure;
};

VT_FN Near settled_near(unsigned code, float factor, float near, bool sure) {
    return {code, factor, near, sure && near < 0x1p-16f};
}

// Of the sums and differences of halves 0 and 2, 1 and 3, 4 and 6, 5 and 7: the larger of two is their sizes' sum.
VT_FN float top_of(const float (&half)[8]) {
    const float a = larger_or_nan(vt_abs(half[0]) + vt_abs(half[2]), vt_abs(half[1]) + vt_abs(half[3]));
    const float b = larger_or_nan(vt_abs(half[4]) + vt_abs(half[6]), vt_abs(half[5]) + vt_abs(half[7]));
    return larger_or_nan(a, b);
}

// What LANES lanes have of four rows, put together: row n LANES + t in lane t of them.
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

// Of four rows, four lanes one each. The largest size's exponent is what counts; the bound's last part is for what rounds on
// the way to a code, twice.
template <bool Q>
VT_FN void near_of(Near (&near)[1], const float (&half)[4][8], const float (&bounds)[1], const ToMx<ABS_MAX, Q>&) {
    float top[1];
    const float tops[4] = {top_of(half[0]), top_of(half[1]), top_of(half[2]), top_of(half[3])};
    folded<4>(top, tops, larger_or_nan);
    const float bound = vt_fma(top[0], 0x1p-22f, bounds[0]);
    const unsigned most = (unsigned)vt_bits(top[0] + bound + TINY), least = (unsigned)vt_bits(top[0] - bound + TINY);
    const unsigned byte = most >> 23;
    const float factor = vt_float((int)((241u - byte) << 23 | 0x400000u));  // 3 2^(113 - byte)
    near[0] = settled_near(byte, factor, bound * factor, ((most ^ least) < 0x800000u) & (byte < 220u));
}

// Deviations differ by that of the differences, at most `bound`, variances by that times their sum; both ways round the sum
// and the squares' some 100 times by 2^-24 of the mean square. Larger ones might be infinite in one way alone.
template <bool Q>
VT_FN void near_of(Near (&near)[1], const float (&half)[4][8], const float (&bounds)[1], const ToMx<QUEST, Q>&) {
    float sums[4], squares[4], sum[1], more[1];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        sums[q] = half[q][0] + half[q][1] + (half[q][4] + half[q][5]);
        squares[q] = half[q][0] * half[q][0];
#pragma unroll
        for (int j = 1; j < 8; ++j) squares[q] = vt_fma(half[q][j], half[q][j], squares[q]);
    }
    auto plus = [](float a, float b) { return a + b; };
    folded<4>(sum, sums, plus);
    folded<4>(more, squares, plus);
    const float bound = bounds[0], mean = sum[0] * 0.0625f, square = more[0] * 0.0625f;
    const float variance = vt_fma(-mean, mean, square), scale = vt_float(0x3ef96285);  // float32(2.92247856 / 6)
    const float doubt = vt_fma(square, 0x1p-16f, bound * vt_fma(2.1f, fast_root(square), bound));
    const unsigned most = (unsigned)vt_bits(vt_fma(fast_root(variance + doubt), scale, TINY));
    const unsigned least = (unsigned)vt_bits(vt_fma(fast_root(variance - doubt), scale, TINY));
    const unsigned byte = most >> 23;
    const float factor = vt_float((int)((240u - byte) << 23));
    const bool none = (square == 0.0f) & (bound == 0.0f), known = (variance > doubt) | none;
    near[0] = settled_near(byte, factor, vt_fma(bound, factor, 0x1p-35f),
                           ((most ^ least) < 0x800000u) & (byte < 170u) & known);
}

// Of four rows, two lanes two each.
VT_FN void near_of(Near (&near)[2], const float (&half)[4][8], const float (&bounds)[2], const ToNv& to) {
    float top[2];
    const float tops[4] = {top_of(half[0]), top_of(half[1]), top_of(half[2]), top_of(half[3])}, sixth = vt_float(0x3e2aaaab);
    folded<2>(top, tops, larger_or_nan);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float bound = vt_fma(top[n], 0x1p-22f, bounds[n]);
        const unsigned both = e4m3_pair(to.global * ((top[n] + bound) * sixth), to.global * ((top[n] - bound) * sixth));
        const unsigned code = both & 0xffu;
        const float scale = normal_e4m3(code), step = scale * to.back, factor = middling_reciprocal(step) * TO_HALVES;
        const bool none = top[n] + bound == 0.0f, sure = (code == both >> 8) & (none | is_middling(step, scale));
        near[n] = settled_near(code, none ? 0.0f : factor, none ? 0.0f : bound * factor, sure);
    }
}

// The scale's byte of 32 sums, one a lane.
template <int METHOD> VT_FN unsigned mx_scale_of_lanes(float y) {
    float statistic;
    if (METHOD == ABS_MAX) {
        float top = vt_abs(y);
#pragma unroll
        for (int m = 16; m >= 1; m >>= 1) top = larger_or_nan(top, __shfl_xor_sync(FULL_WARP, top, m));
        statistic = top + TINY;
    } else {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll 4
        for (int j = 0; j < 32; ++j) {
            const float one = __shfl_sync(FULL_WARP, y, j);
            sum += one;
            squares += one * one;
        }
        statistic = quest_statistic(sum, squares);
    }
    return (unsigned)vt_bits(statistic) >> 23 & 0xffu;
}

// Of a lane's own value and of its neighbours.
VT_FN void put_code(unsigned char* out, i64 at, int lane, bool own, unsigned code) {
    const unsigned both = code | __shfl_xor_sync(FULL_WARP, code, 1) << 4;
    if (own && !(lane & 1)) out[(at + lane) >> 1] = (unsigned char)both;
}

// The codes of a group whose sums are the mirror's, one a lane (lanes from 16 on as those below, where a group has 16), and
// its scale's, where that is not known: -1.
template <int METHOD, bool Q> VT_FN void put_by_lanes(i64 at, float y, int known, const ToMx<METHOD, Q>& to) {
    const int lane = (int)threadIdx.x & 31;
    const unsigned byte = known >= 0 ? (unsigned)known : mx_scale_of_lanes<METHOD>(y);
    float one = vt_float((int)(byte << 23)), z = METHOD == ABS_MAX ? y * 3.0f : y;
    if (byte >= 253u) {
        one = vt_float((int)(byte - 8u << 23));
        z = fmaxf(fminf(z * 0x1p-8f, 6.0f * one), -6.0f * one);
    }
    const float v[8] = {z, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    put_code(to.out, at, lane, true, byte == 255u ? 7u : e2m1_steps<METHOD == ABS_MAX>(v, one) & 15u);
    if (lane == 0) to.scales[at / 32] = (unsigned char)byte;
}

VT_FN void put_by_lanes(i64 at, float y, int known, const ToNv& to) {
    const int lane = (int)threadIdx.x & 31;
    unsigned scale = (unsigned)known;
    if (known < 0) {
        float top = fmaxf(0.0f, vt_abs(y));
#pragma unroll
        for (int m = 8; m >= 1; m >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, m));
        scale = e4m3_code(to.global * (top * vt_float(0x3e2aaaab)));
    }
    const float step = e4m3_value(scale) * to.back, factor = step == 0.0f ? 0.0f : 1.0f / step;
    const float v[8] = {a_number(y * factor), 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    put_code(to.out, at, lane, lane < 16, e2m1_steps<false>(v, 1.0f) & 15u);
    if (lane == 0) to.scales[at / 16] = (unsigned char)scale;
}
