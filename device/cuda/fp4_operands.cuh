// What products of FP4 codes in rows on Hopper have in common: scales of a lane's columns, how codes become operands of
// tensor cores, the way of sums to the result.
#pragma once
#include "e4m3_halves.cuh"
#include "fp4_product.cuh"
#include "shared_places.cuh"

#if VT_TILES

#ifndef __CUDACC__
struct float4 { float x, y, z, w; };
#endif
#define FP4_TILES_SHARED ((227 << 10) - 512)
#define FP4_TILES_BARRIERS 1280  // bytes

#ifdef __CUDACC__
// A pair by the lower or the upper half of `both`: the multiplier takes a half twice.
template <int KIND, bool UPPER> VT_FN unsigned pair_by_half(unsigned pair, unsigned both) {
    unsigned twice;
    if (UPPER) asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(twice) : "r"(both));
    else asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(twice) : "r"(both));
    return times_pair<KIND>(pair, twice);
}
template <int KIND, bool UPPER> VT_FN unsigned pair_by_half(unsigned pair, unsigned both, unsigned more) {
    unsigned twice;
    if (UPPER) asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(twice) : "r"(both));
    else asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(twice) : "r"(both));
    return fma_pair<KIND>(pair, twice, more);
}
template <int FURTHER> VT_FN unsigned byte_at(SharedPlace at) {
    unsigned x;
    asm volatile("ld.shared.u8 %0, [%1 + %2];" : "=r"(x) : "r"(at), "n"(FURTHER) : "memory");
    return x;
}
// Two e4m3 codes as float32.
VT_FN void two_scales(float (&x)[2], unsigned codes) {
    const unsigned halves = e4m3_halves(codes);
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(x[0]), "=f"(x[1]) : "r"(halves));
}
#else
template <int KIND, bool UPPER> unsigned pair_by_half(unsigned pair, unsigned both) {
    return times_pair<KIND>(pair, (UPPER ? both >> 16 : both & 0xffffu) * 0x10001u);
}
template <int KIND, bool UPPER> unsigned pair_by_half(unsigned pair, unsigned both, unsigned more) {
    return fma_pair<KIND>(pair, (UPPER ? both >> 16 : both & 0xffffu) * 0x10001u, more);
}
template <int FURTHER> unsigned byte_at(SharedPlace at) { return at[FURTHER]; }
static inline void two_scales(float (&x)[2], unsigned codes) { x[0] = e4m3_value(codes & 0xffu), x[1] = e4m3_value(codes >> 8 & 0xffu); }
#endif

// Scales of a lane's two columns, for both halves of its 32 k, and what is left to multiply sums by.
// Weights of e4m3 scales are 2^8 too small: a code's bits are 2^126 too small as a number, and 2^118 is in the scale.
template <int SCALE> struct TileScales {
    static constexpr int BYTES = 1024;  // of 128 columns x 128 k
    unsigned both[2];
    VT_MEMBER static int place(int t) { return (t >> 1) * 512 + (t & 1) * 2; }
    VT_MEMBER void begin(const float*) {}
    VT_MEMBER void take(SharedPlace at) {
        float x[2], y[2];
        two_scales(x, half_at<0>(at)), two_scales(y, half_at<128>(at));
#pragma unroll
        for (int h = 0; h < 2; ++h) both[h] = times_pair<BF16>(pair<BF16>(x[h], y[h]), 0x7a807a80u);
    }
    template <bool UPPER> VT_MEMBER unsigned weights(unsigned small, int half) const { return pair_by_half<BF16, UPPER>(small, both[half]); }
    VT_MEMBER void finish(unsigned (&)[4][4]) const {}
    static VT_MEMBER float last(float x, const float* factor) { return x * 0x1p8f * factor[0]; }
};
// The factor's exponent waits for the sum. A scale is two bfloat16, the second what the first one leaves.
template <> struct TileScales<E4M3_ROUNDED> {
    static constexpr int BYTES = 1024;
    unsigned both[2], rest[2];
    float of_all;
    VT_MEMBER static int place(int t) { return TileScales<E4M3>::place(t); }
    VT_MEMBER static int exponent(float x) {
        int e = vt_bits(x) >> 23 & 0xff;
        return e == 0 || e == 0xff ? 127 : e == 0xfe ? 0xfd : e;
    }
    VT_MEMBER void begin(const float* factor) { of_all = factor[0] * vt_float((254 - exponent(factor[0])) << 23) * 0x1p116f; }
    VT_MEMBER void take(SharedPlace at) {
        float x[2], y[2];
        two_scales(x, half_at<0>(at)), two_scales(y, half_at<128>(at));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float u = x[h] * of_all, v = y[h] * of_all;
            both[h] = pair<BF16>(u, v);
            rest[h] = pair<BF16>(u - vt_float((int)(both[h] << 16)), v - vt_float((int)(both[h] & 0xffff0000u)));
        }
    }
    template <bool UPPER> VT_MEMBER unsigned weights(unsigned small, int half) const {
        return pair_by_half<BF16, UPPER>(small, both[half], pair_by_half<BF16, UPPER>(small, rest[half]));
    }
    VT_MEMBER void finish(unsigned (&)[4][4]) const {}
    static VT_MEMBER float last(float x, const float* factor) { return x * 0x1p10f * vt_float(exponent(factor[0]) << 23); }
};
// A power of two has bfloat16's range itself: weights are 2^7 too small. Of powers above 2^8 what is beyond them waits, as NaN does.
template <> struct TileScales<E8M0> {
    static constexpr int BYTES = 512;
    unsigned both, beyond;
    VT_MEMBER static int place(int t) { return t; }
    VT_MEMBER void begin(const float*) {}
    VT_MEMBER void take(SharedPlace at) {
        unsigned two = byte_at<0>(at) | byte_at<128>(at) << 16;
        beyond = two + 0x00780078u & 0x01000100u;
        if (beyond) {
            unsigned a = two & 0xffffu, b = two >> 16;
            beyond = beyond_of(a) | beyond_of(b) << 16;
            two = (a < 135 ? a : 135) | (b < 135 ? b : 135) << 16;
        }
        both = (two << 7) + 119 * 0x00800080u;
    }
    static VT_MEMBER unsigned beyond_of(unsigned code) { return code == 255 ? 0x7fc0u : code < 135 ? 0x3f80u : (code - 8) << 7; }
    template <bool UPPER> VT_MEMBER unsigned weights(unsigned small, int) const { return pair_by_half<BF16, UPPER>(small, both); }
    VT_MEMBER void finish(unsigned (&a)[4][4]) const {
        if (beyond)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int r = 0; r < 4; ++r) a[i][r] = r & 1 ? pair_by_half<BF16, true>(a[i][r], beyond) : pair_by_half<BF16, false>(a[i][r], beyond);
    }
    static VT_MEMBER float last(float x, const float* factor) { return factor == nullptr ? x * 0x1p7f : x * 0x1p7f * factor[0]; }
};

// Eight codes of column g + 8 h are half the left operands 2 j and 2 j + 1 of four: pairs of codes four apart. Of four bits, and
// again six places on, the first time the three that are a code's size count, the second time its sign.
template <class S> VT_FN void unpack_word(unsigned (&a)[4][4], int j, int h, unsigned word, const S& held, int half) {
    unsigned later = kept(word >> 8);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        unsigned code = (p & 2 ? later : word) & (p & 1 ? 0x00f000f0u : 0x000f000fu);
        unsigned small = code * (p & 1 ? 0x104u : 0x1040u) & 0x81c081c0u;
        a[2 * j + (p >> 1)][2 * (p & 1) + h] = h ? held.template weights<true>(small, half) : held.template weights<false>(small, half);
    }
}

// Rows of operands are columns of the result in an order in which eight lanes that read codes meet in no bank: the one that is
// row g of a warp, the other being 8 further.
VT_FN int column_of_lane(int own) { return (own >> 1 & 0x30) + (own >> 3 & 3) + (own & 4); }

// A group's sums of ROWS x 64 of the result, from row `top` and column `left` on, by way of `mine`.
template <int ROWS, class S>
VT_FN void sums_leave(u8* mine, const float (&sums)[ROWS / 2], const S& held, const float* factor, int group, void* out,
                      i64 kind, i64 rows, i64 columns, i64 top, i64 left, i64 vectors) {
    int at = thread_from_here() & 127, t = at & 3, row = column_of_lane(at);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int column = row + 8 * h;
#pragma unroll
        for (int i = 0; i < ROWS / 2; i += 4)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float x = held.last(sums[i + 2 * h + e], factor);
                unsigned bits = kind == BF16 ? pair<BF16>(x, 0.0f) : pair<F16>(x, 0.0f);
                *(unsigned short*)(mine + place(2 * i + 2 * t + e, column >> 3) + 2 * (column & 7)) = (unsigned short)bits;
            }
    }
    group_meets(group);
#pragma unroll
    for (int i = 0; i < (ROWS + 15) / 16; ++i) {
        int m = (at >> 3) + 16 * i, v = at & 7;
        i64 n = left + 8 * v;
        if (m >= ROWS || top + m >= rows || n >= columns) continue;
        uint4 x = *(const uint4*)(mine + place(m, v));
        unsigned short* to = (unsigned short*)out + (top + m) * columns + n;
        if (vectors) {
            *(uint4*)to = x;
        } else {
            const unsigned pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (n + e < columns) to[e] = (unsigned short)(pairs[e >> 1] >> 16 * (e & 1));
        }
    }
}
#endif
