// Scales and codes of sums that are near the mirror's: those that all sums as near have, and which may be others.
#pragma once
#include "rotated_codes.cuh"

// 16 numbers and a sum cut off two bits below the last of the largest as a float32, 8.5 of it (8.3 was the most seen), and
// then their sum, 2 of that, on Hopper; one bit below, by eights, before.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define TENSOR_STEP 10.5f
#else
#define TENSOR_STEP 24.0f
#endif

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

#define UNSURE 0x0e0e0e0eu
#define CROSSED 0x01000100u

// Of four values' float16s a byte each: sign, three zeros, the code cut off, its half, which 1 more rounds.
VT_FN unsigned four_rounded(unsigned low, unsigned high) {
#ifdef __CUDACC__
    unsigned bytes;  // by one instruction, which the compiler takes apart
    asm("prmt.b32 %0, %1, %2, 0x7531;" : "=r"(bytes) : "r"(low), "r"(high));
    return bytes + 0x01010101u;
#else
    return chosen_bytes(low, high, 0x7531u) + 0x01010101u;
#endif
}

// Of eight codes in that form, the even ones and the odd ones: the word, without codes of -0.
VT_FN unsigned codes_of_bytes(unsigned even, unsigned odd) {
    const unsigned word = joined_halves(even >> 1, odd * 8u);
    const unsigned signs = (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
    return word | (signs & (word + 0x77777777u));
}

// Eight values and their neighbours `near` above and below, as float16s: 0 and 2, 4 and 6, 1 and 3, 5 and 7.
VT_FN void halves_around(unsigned (&high)[4], unsigned (&low)[4], const float (&y)[8], float factor, float near) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float one = y[i / 2 + i % 2 * 4], two = y[i / 2 + i % 2 * 4 + 2];
        high[i] = cut_to_halves(vt_fma(one, factor, near), vt_fma(two, factor, near));
        low[i] = cut_to_halves(vt_fma(one, factor, -near), vt_fma(two, factor, -near));
    }
}

// Ones of UNSURE where a code changes within `near`, whose values may be beyond the largest code.
VT_FN unsigned which_unsure(const float (&y)[8], float factor, float near) {
    unsigned high[4], low[4];
    halves_around(high, low, y, factor, near);
#pragma unroll
    for (int i = 0; i < 4; ++i) high[i] = no_more_than_six(high[i]), low[i] = no_more_than_six(low[i]);
    const unsigned even = four_rounded(high[0], high[1]) ^ four_rounded(low[0], low[1]);
    return (even | (four_rounded(high[2], high[3]) ^ four_rounded(low[2], low[3]))) & UNSURE;
}

// Eight codes of sums times factor 2^14. `unsure`: ones of UNSURE where some change within `near` 2^14, or where values may be
// beyond the largest code, of CROSSED where a multiple of a quarter lies within, of which every other one is where codes
// change.
template <bool BOUNDED> VT_FN unsigned codes_near(const float (&y)[8], float factor, float near, unsigned& unsure) {
    unsigned high[4], low[4];
    halves_around(high, low, y, factor, near);
    if (!BOUNDED) {
        unsure = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) unsure |= high[i] ^ low[i], high[i] = no_more_than_six(high[i]);
    }
    const unsigned even = four_rounded(high[0], high[1]), odd = four_rounded(high[2], high[3]);
    if (BOUNDED) {
        unsure = even ^ four_rounded(low[0], low[1]);
        unsure |= odd ^ four_rounded(low[2], low[3]);
    }
    return codes_of_bytes(even, odd);
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

VT_FN float top_of(const float (&y)[8]) {
    float top[2] = {vt_abs(y[0]), vt_abs(y[1])};
#pragma unroll
    for (int j = 2; j < 8; ++j) top[j & 1] = larger_or_nan(top[j & 1], vt_abs(y[j]));
    return larger_or_nan(top[0], top[1]);
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

// How far sums by tensor cores are from the mirror's, where a group is a vector: of the largest of them, as 2^-24 of it. A
// chain's roundings are at most 38.3 sqrt(sum x^2) c of its 16 elements (the root of 15^2 + 15^2 + 14^2 + ... + 1), and
// sqrt(sum x^2) c of the vector is the root of the sums' mean square.
#define CHAIN_ROUNDS 38.3f

// Of four rows, four lanes one each. The largest size's exponent is what counts; the bound's last part is for what rounds on
// the way to a code, twice.
template <int R, bool Q>
VT_FN void near_of(Near (&near)[1], const float (&y)[4][8], const float (&bounds)[1], float, const ToMx<ABS_MAX, Q>&) {
    float top[1];
    const float tops[4] = {top_of(y[0]), top_of(y[1]), top_of(y[2]), top_of(y[3])};
    folded<4>(top, tops, larger_or_nan);
    const float share = (R > 32 ? 4.0f : 5.0f + 1.4143f * CHAIN_ROUNDS + 2.0f * TENSOR_STEP) * 0x1p-24f;
    const float bound = vt_fma(top[0], share, bounds[0]);
    const unsigned most = (unsigned)vt_bits(top[0] + bound + TINY), least = (unsigned)vt_bits(top[0] - bound + TINY);
    const unsigned byte = most >> 23;
    const float factor = vt_float((int)((241u - byte) << 23 | 0x400000u));  // 3 2^(113 - byte)
    near[0] = settled_near(byte, factor, bound * factor, ((most ^ least) < 0x800000u) & (byte < 220u));
}

// Deviations differ by that of the differences, at most `bound`, variances by that times their sum; both ways round the sum
// and the squares' some 100 times by 2^-24 of the mean square. Larger ones might be infinite in one way alone. The sums'
// mean is a vector's first element times c, where a group is a vector.
template <int R, bool Q>
VT_FN void near_of(Near (&near)[1], const float (&y)[4][8], const float (&bounds)[1], float mean, const ToMx<QUEST, Q>&) {
    float squares[4], more[1];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        squares[q] = y[q][0] * y[q][0];
#pragma unroll
        for (int j = 1; j < 8; ++j) squares[q] = vt_fma(y[q][j], y[q][j], squares[q]);
    }
    auto plus = [](float a, float b) { return a + b; };
    if (R > 32) {
        float sums[4], sum[1];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            sums[q] = y[q][0] + y[q][1];
#pragma unroll
            for (int j = 2; j < 8; ++j) sums[q] += y[q][j];
        }
        folded<4>(sum, sums, plus);
        mean = sum[0] * 0.03125f;
    }
    folded<4>(more, squares, plus);
    const float square = more[0] * 0.03125f, root = fast_root(square);
    // Chains, their sum, two products by tensor cores, of which the second has the first's sum, up to 4 c sqrt(sum x^2) of its
    // elements, among what it adds.
    const float share = (1.4143f * CHAIN_ROUNDS + 5.7f + TENSOR_STEP * 5.9f) * 1.01f * 0x1p-24f;
    const float bound = R > 32 ? bounds[0] : root * share;
    const float variance = vt_fma(-mean, mean, square), scale = vt_float(0x3ef96285);  // float32(2.92247856 / 6)
    const float doubt = vt_fma(square, 0x1p-16f, bound * vt_fma(2.1f, root, bound));
    const unsigned most = (unsigned)vt_bits(vt_fma(fast_root(variance + doubt), scale, TINY));
    const unsigned least = (unsigned)vt_bits(vt_fma(fast_root(variance - doubt), scale, TINY));
    const unsigned byte = most >> 23;
    const float factor = vt_float((int)((240u - byte) << 23));
    const bool none = (square == 0.0f) & (R > 32 ? bound == 0.0f : mean == 0.0f), known = (variance > doubt) | none;
    near[0] = settled_near(byte, factor, vt_fma(bound, factor, 0x1p-35f),
                           ((most ^ least) < 0x800000u) & (byte < 170u) & known);
}

// Of four rows, two lanes two each.
template <int R>
VT_FN void near_of(Near (&near)[2], const float (&y)[4][8], const float (&bounds)[2], float, const ToNv& to) {
    float top[2];
    const float tops[4] = {top_of(y[0]), top_of(y[1]), top_of(y[2]), top_of(y[3])}, sixth = vt_float(0x3e2aaaab);
    folded<2>(top, tops, larger_or_nan);
    const float more = R < 32 ? 4.0f + CHAIN_ROUNDS + TENSOR_STEP : 5.0f + 1.4143f * CHAIN_ROUNDS + 2.0f * TENSOR_STEP;
    const float share = (R > 32 ? 4.0f : more) * 0x1p-24f;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float all = R == 32 ? larger_or_nan(top[n], __shfl_xor_sync(FULL_WARP, top[n], 2)) : top[n];
        const float bound = vt_fma(all, share, bounds[n]);
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
