// Codes of sums that are the mirror's, one a lane.
#pragma once
#include "rotated_codes.cuh"

// The code of one value, as e2m1_steps has it.
VT_FN unsigned e2m1_of_one(float v) {
    const float size = fminf(vt_abs(v), 6.0f), power = vt_float(vt_bits(fmaxf(size, 1.0f)) & 0x7f800000);
    const unsigned bits = (unsigned)vt_bits(vt_fma(size, 0x1p-22f, power));
    const unsigned code = (bits + (bits >> 22) - (0x3f800000u >> 22)) & 15u;
    return code ? code | ((unsigned)vt_bits(v) >> 28 & 8u) : 0u;
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
// its scale's.
template <int METHOD, bool Q> VT_FN void put_by_lanes(i64 at, float y, const ToMx<METHOD, Q>& to) {
    const int lane = (int)threadIdx.x & 31;
    const unsigned byte = mx_scale_of_lanes<METHOD>(y);
    float one = vt_float((int)(byte << 23)), z = METHOD == ABS_MAX ? y * 3.0f : y;
    if (byte >= 253u) {
        one = vt_float((int)(byte - 8u << 23));
        z = fmaxf(fminf(z * 0x1p-8f, 6.0f * one), -6.0f * one);
    }
    const float v[8] = {z, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    put_code(to.out, at, lane, true, byte == 255u ? 7u : e2m1_steps<METHOD == ABS_MAX>(v, one) & 15u);
    if (lane == 0) to.scales[at / 32] = (unsigned char)byte;
}

VT_FN void put_by_lanes(i64 at, float y, ToNv to) {
    to.begin();  // seldom: no register holds its numbers meanwhile
    const int lane = (int)threadIdx.x & 31;
    float top = fmaxf(0.0f, vt_abs(y));
#pragma unroll
    for (int m = 8; m >= 1; m >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, m));
    const unsigned scale = e4m3_code(to.global * (top * vt_float(0x3e2aaaab)));
    const float step = e4m3_value(scale) * to.back, factor = step == 0.0f ? 0.0f : 1.0f / step;
    const float v[8] = {a_number(y * factor), 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    put_code(to.out, at, lane, lane < 16, e2m1_steps<false>(v, 1.0f) & 15u);
    if (lane == 0) to.scales[at / 16] = (unsigned char)scale;
}
