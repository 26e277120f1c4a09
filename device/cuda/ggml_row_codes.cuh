// One row of activations to codes, a block of 256 a warp, as its products take them (ggml_tiles.cuh, ggml_lanes.cuh).
#pragma once
#include "ggml_share.cuh"
#include "ggml_sizes.cuh"

// Where a block has its codes: those of ggml_lanes.cuh the odd ones behind the even ones, neighbours in different banks.
template <int TYPE> VT_FN int place_of(const Share& w, int block) {
    return Tiles<TYPE>::LANES ? (block >> 1) + (block & 1 ? w.blocks + 1 >> 1 : 0) : block;
}

// A block's codes, its scale, and the sums of its units or of their halves: sixteen bits or, for the tensor cores, a byte of
// their lower seven bits and, sixteen further on, what is above them. Of a unit it stands where its minimum does
// (six_bits_of).
template <int TYPE> VT_MEMBER void keep_codes(const Share& w, int block, const Words& c) {
    using T = Tiles<TYPE>;
    int lane = threadIdx.x & 31, part = lane & 3;
    *(uint2*)(w.codes + place_of<TYPE>(w, block) * T::CODES + lane * 8) = {c.low, c.high};
    if constexpr (T::A_SUMS != 0) {
        int total = dot4(c.low, 0x01010101u, dot4(c.high, 0x01010101u, 0)), at = lane >> 1;
        total += __shfl_xor_sync(ALL, total, 1);
        if constexpr (!T::HALVES) {
            total += __shfl_xor_sync(ALL, total, 2);
            if (part > 1) total = 0;
            at = lane >> 3 << 2 | lane >> 2 & 1 | (part < 2 ? 2 : 0);
        }
        unsigned short* sums = w.sums + block * T::A_SUMS;
        if constexpr (!T::WHOLE) ((u8*)sums)[(lane & 1) * 16 + at] = (u8)(lane & 1 ? total >> 7 : total & 127);
        else if ((lane & 1) == 0) sums[at] = (unsigned short)total;
    }
    if (lane == 0) w.scales[block] = c.d;
}

// The largest size of eight as bits that order like sizes, those of a float32 or, for float16, of one in the upper half.
template <int KIND> VT_FN unsigned top_of(const Raw<8>& raw) {
    const unsigned w[8] = {raw.a.x, raw.a.y, raw.a.z, raw.a.w, raw.b.x, raw.b.y, raw.b.z, raw.b.w};
    unsigned top = 0;
    if constexpr (KIND == F32) {
#pragma unroll
        for (int i = 0; i < 8; ++i) top = larger_of(top, w[i] & 0x7fffffffu);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) top = larger_halves(top, w[i] & 0x7fff7fffu);
        top = larger_of(top << 16, top & 0xffff0000u);
    }
    return top;
}

// words_256 from values as they lie, and whether the largest size is a usual one; else the words are none.
template <int KIND> VT_FN bool words_of(Words& c, const Raw<8>& raw) {
    unsigned top = largest_of_warp(top_of<KIND>(raw)), near[8];
    float inverse = of_127(KIND == F16 ? widen_f16(top >> 16) : vt_float((int)top)), x[8];
    widen(x, raw, KIND);
#pragma unroll
    for (int i = 0; i < 8; ++i) near[i] = (unsigned)vt_bits(12582912.0f + inverse * x[i]);
    c = {near_reciprocal(inverse), permute(permute(near[0], near[1], 0x0040), permute(near[2], near[3], 0x0040), 0x5410),
         permute(permute(near[4], near[5], 0x0040), permute(near[6], near[7], 0x0040), 0x5410)};
    return KIND == F16 ? top - 0x00010000u < 0x7c000000u - 0x00010000u : of_the_middle(top);
}

// Whether all of a warp's blocks were of usual sizes.
template <int TYPE, int KIND, int WARPS> VT_MEMBER bool code_wide(const Share& w, Eights& eights) {
    bool usual = true;
#pragma unroll 1
    for (int block = (int)threadIdx.x >> 5; block < w.blocks;) {
#pragma unroll
        for (int i = 0; i < Eights::AHEAD; ++i, block += WARPS) {
            if (block >= w.blocks) continue;
            Words c;
            usual &= words_of<KIND>(c, eights.raw[i]);
            keep_codes<TYPE>(w, block, c);
        }
        eights.at += Eights::AHEAD * eights.step;
        if (block < w.blocks) eights.ask();
    }
    return usual;
}

// The row's codes by the first WARPS warps: a warp's blocks once more where one of them has a size that is not usual.
template <int TYPE, int WARPS = CREW> VT_MEMBER void code_tiles(const Share& w, Eights& eights) {
    bool done = false;
    int kind = (int)eights.p.a_kind;
    if (eights.wide) {
        done = kind == F32 ? code_wide<TYPE, F32, WARPS>(w, eights) : kind == BF16 ? code_wide<TYPE, BF16, WARPS>(w, eights)
                                                                            : code_wide<TYPE, F16, WARPS>(w, eights);
    }
    if (__builtin_expect(done, 1)) return;
#pragma unroll 1
    for (int block = (int)threadIdx.x >> 5; block < w.blocks; block += WARPS) {
        float x[8];
        load_eight(x, eights.p.a, (block * 32 + ((int)threadIdx.x & 31)) * 8, kind, eights.wide);
        keep_codes<TYPE>(w, block, words_256(x));
    }
}
