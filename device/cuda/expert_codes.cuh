// SiLU products of bfloat16 as e4m3 under a scale for each 128, between the grouped products of DeepGEMM: the
// hardware's fast functions decide what is seen of a value, a bfloat16 or a code. Acts that are rounded to bfloat16 they
// decide all, but far down; products that are not are computed again as MIRROR does, from x once more, where they lie too
// close to the middle of two codes (silu_guess.cuh).
//
// 16 lanes have a group, eight neighbours each, and D groups at once; a lane finds the scale of one of those, `own`.
#pragma once
#include "bf16_quotients.cuh"
#include "powers.cuh"
#include "rows.cuh"
#include "silu_guess.cuh"

#define GROUP_LANES 16
#define LEAST 1e-10f

VT_FN float scale_of(unsigned top, bool ue8m0) {
    return rounded_up(vt_maximum(vt_float((int)top), LEAST) * E4M3_RECIPROCAL, ue8m0 ? BY_LOG2 : AS_IT_IS);
}

#ifdef __CUDACC__
VT_FN int ones(unsigned bits) { return __popc(bits); }
VT_FN unsigned group_votes(bool yes) { return __ballot_sync(FULL_WARP, yes) >> (threadIdx.x & GROUP_LANES) & 0xffffu; }
// Of two bfloat16 in either half of a word.
VT_FN unsigned product_of_pairs(unsigned a, unsigned b) {
    unsigned c;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(0x80008000u));
    return c;
}
VT_FN unsigned pair_and_zero(unsigned a) {
    unsigned c;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(0x3f803f80u), "r"(0u));
    return c;
}
VT_FN unsigned least_pair(unsigned a, unsigned b) {
    unsigned c;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
VT_FN unsigned most_pair(unsigned a, unsigned b) {
    unsigned c;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
#else
VT_FN int ones(unsigned bits) { return __builtin_popcount(bits); }
VT_FN unsigned group_votes(bool yes) {
    unsigned votes = 0;
    for (int lane = 0; lane < GROUP_LANES; ++lane)
        votes |= __shfl_sync(FULL_WARP, (unsigned)yes, (threadIdx.x & GROUP_LANES) + lane) << lane;
    return votes;
}
template <class F> VT_FN unsigned by_halves(unsigned a, unsigned b, F&& f) {
    return narrow_bf16(f(widen_bf16(a & 0xffffu), widen_bf16(b & 0xffffu)), f(widen_bf16(a >> 16), widen_bf16(b >> 16)));
}
VT_FN unsigned product_of_pairs(unsigned a, unsigned b) {
    return by_halves(a, b, [](float a, float b) { return a * b; });
}
VT_FN unsigned pair_and_zero(unsigned a) {
    return by_halves(a, a, [](float a, float) { return a + 0.0f; });
}
VT_FN unsigned least_pair(unsigned a, unsigned b) { return by_halves(a, b, vt_minimum); }
VT_FN unsigned most_pair(unsigned a, unsigned b) { return by_halves(a, b, vt_maximum); }
#endif

// An act of a bfloat16 gate above LARGEST_GATE, as far as a bfloat16 shows it, from the fast functions' y. There are few such
// gates, and of those acts that lie near the middle of two bfloat16 nearly all lie below it, by 19 units of 2^-24 or less;
// those above it are 27 or more away. With twelve taken off, what the fast functions may be wrong by moves none across
// (parity/test_device_calls_casts.py tries all). Below 2^-107 nothing is taken off: there acts are half the gate.
VT_FN float lowered(float y) {
#ifdef __CUDACC__
    float some;  // at most 1, so that infinity stays
    asm("mul.ftz.sat.f32 %0, %1, %2;" : "=f"(some) : "f"(vt_abs(y)), "f"(0x1.8p-21f));
#else
    float some = vt_abs(y) * 0x1.8p-21f;
    some = !(some >= 0x1p-126f) ? 0.0f : some < 1.0f ? some : 1.0f;
#endif
    return y - some;
}

template <class F> VT_FN uint4 each_word(const uint4& a, F&& f) { return {f(a.x), f(a.y), f(a.z), f(a.w)}; }

// Where a lane's D vectors of eight are in x and in the codes, and the scales of their groups.
struct Vectors {
    i64 gate, up, codes, scale;  // of vector 0: elements of x and of the results
    i64 gate_step, codes_step, scale_step;  // to the next
};

// Clamps of bfloat16 as pairs: the gate from above, `up` from both sides.
struct Clamps {
    bool some;
    unsigned high, low;

    VT_MEMBER Clamps(bool some, float limit) : some(some) {
        high = narrow_bf16(limit, limit);
        low = high | 0x80008000u;
    }
    VT_MEMBER uint4 gate(const uint4& words) const {
        if (!some) return words;
        return each_word(words, [&](unsigned w) { return least_pair(w, high); });
    }
    // What is added to it, 0, makes +0 of -0.
    VT_MEMBER uint4 up(const uint4& words) const {
        uint4 to = words;
        if (some) to = each_word(words, [&](unsigned w) { return least_pair(most_pair(w, low), high); });
        return each_word(to, pair_and_zero);
    }
    VT_MEMBER float act(const unsigned short* from) const {
        float g = widen_bf16(from[0]);
        return vt_silu(some ? vt_minimum(g, widen_bf16(high >> 16)) : g);
    }
};

VT_FN void put_codes(unsigned char* out, i64 at, const float (&q)[8], bool whole) {
    if (whole) return store_e4m3(out, at, q, 0x7fu);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float one[1] = {q[j]};
        store_e4m3(out, at + j, one, 0x7fu);
    }
}

// starts[e] = size(0) + ... + size(e - 1), e up to `experts`, by a block of T threads; `sums`: of its warps, for this
// use alone.
template <int T, class F> VT_FN void starts_of(int experts, int* starts, int* sums, F&& size) {
    const int each = (experts + T - 1) / T, first = threadIdx.x * each, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int own = 0;
    for (int e = first; e < first + each && e < experts; ++e) {
        starts[e] = own;
        own += size(e);
    }
    int sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_sync(FULL_WARP, sum, (lane - d) & 31);
        if (lane >= d) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    sum -= own;
#pragma unroll
    for (int w = 0; w < T / 32; ++w)
        if (w < warp) sum += sums[w];
    for (int e = first; e < first + each && e < experts; ++e) starts[e] += sum;
    if (threadIdx.x == T - 1) starts[experts] = sum + own;
    __syncthreads();
}

// The largest of D groups' bfloat16, which their lanes hold parts of as pairs without signs: that of group `own`.
template <int D> VT_FN unsigned own_pair(unsigned (&tops)[D], int own) {
    if constexpr (D == 1) {
#pragma unroll
        for (int m = GROUP_LANES / 2; m >= 1; m >>= 1)
            tops[0] = larger_pair<false>(tops[0], __shfl_xor_sync(FULL_WARP, tops[0], m));
        return larger(tops[0] << 16, tops[0] & 0xffff0000u);
    } else {
        unsigned pairs[D / 2];
#pragma unroll
        for (int d = 0; d < D; d += 2)
            pairs[d / 2] = larger_pair<false>((tops[d] & 0xffffu) | tops[d + 1] << 16,
                                              tops[d] >> 16 | (tops[d + 1] & 0xffff0000u));
        if constexpr (D == 4) {
            const bool second = own & 2;
            unsigned mine = second ? pairs[1] : pairs[0], sent = second ? pairs[0] : pairs[1];
            pairs[0] = larger_pair<false>(mine, __shfl_xor_sync(FULL_WARP, sent, 2));
        }
#pragma unroll
        for (int m = GROUP_LANES / 2; m >= 1; m >>= 1)
            if (D != 4 || m != 2) pairs[0] = larger_pair<false>(pairs[0], __shfl_xor_sync(FULL_WARP, pairs[0], m));
        return own & 1 ? pairs[0] & 0xffff0000u : pairs[0] << 16;
    }
}

// Acts and products are bfloat16 each, alpha is 1 and beta 0. What has no place computes with what the last one has.
template <int D>
VT_FN void rounded_group_codes(const unsigned short* x, const Vectors& at, int present, const Clamps& clamps,
                               unsigned char* codes, bool whole, float* scales, bool ue8m0) {
    const int own = threadIdx.x & (D - 1);
    uint4 gate[D], up[D], made[D];
    unsigned left = 0, tops[D];
#pragma unroll
    for (int d = 0; d < D; ++d) {
        int from = d < present ? d : 0;
        gate[d] = *(const uint4*)(x + at.gate + from * at.gate_step);
        up[d] = *(const uint4*)(x + at.up + from * at.gate_step);
    }
#pragma unroll
    for (int d = 0; d < D; ++d) {
        float g[8], y[8];
        Raw<8> raw;
        raw.a = clamps.gate(gate[d]);
        widen(g, raw, BF16);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = lowered(fast_act<true>(g[j]));
        if (!(least_of_bf16(raw) > LARGEST_GATE) && d < present) left |= 0xffu << 8 * d;
        made[d] = narrow(y, BF16).a;
    }
#pragma unroll 1
    for (; left; left &= left - 1) {
        int n = lowest_bit(left);
        unsigned bits = narrow_bf16(clamps.act(x + at.gate + (n >> 3) * at.gate_step + (n & 7)), 0.0f) & 0xffffu;
        unsigned kept = n & 1 ? 0x0000ffffu : 0xffff0000u, placed = n & 1 ? bits << 16 : bits;
#pragma unroll
        for (int d = 0; d < D; ++d) {
            if (n >> 1 == 4 * d) made[d].x = (made[d].x & kept) | placed;
            if (n >> 1 == 4 * d + 1) made[d].y = (made[d].y & kept) | placed;
            if (n >> 1 == 4 * d + 2) made[d].z = (made[d].z & kept) | placed;
            if (n >> 1 == 4 * d + 3) made[d].w = (made[d].w & kept) | placed;
        }
    }
#pragma unroll
    for (int d = 0; d < D; ++d) {
        const uint4 u = clamps.up(up[d]);
        made[d] = {product_of_pairs(made[d].x, u.x), product_of_pairs(made[d].y, u.y), product_of_pairs(made[d].z, u.z),
                   product_of_pairs(made[d].w, u.w)};
        tops[d] = largest_pair<false>(made[d]);
    }
    const float scale = scale_of(own_pair<D>(tops, own), ue8m0);
    const Quotients mine(scale);
    if ((threadIdx.x & (GROUP_LANES - 1)) < D && own < present) scales[at.scale + own * at.scale_step] = scale;
    const bool large = __any_sync(FULL_WARP, mine.large);
#pragma unroll
    for (int d = 0; d < D; ++d) {
        Quotients by = mine;
        if (D > 1) {
            by = Quotients(__shfl_xor_sync(FULL_WARP, mine.inverse, own ^ d), __shfl_xor_sync(FULL_WARP, mine.low, own ^ d));
            if (large) by = Quotients(__shfl_xor_sync(FULL_WARP, scale, own ^ d));
        }
        if (d >= present) continue;
        float y[8], q[8];
        widen(y, {made[d], made[d]}, BF16);
        by.divide(q, y);
        put_codes(codes, at.codes + d * at.codes_step, q, whole);
    }
}

// Of D groups' numbers, which their lanes hold parts of, the largest: that of group `own`.
template <int D> VT_FN float own_largest(float (&top)[D], int own) {
    int m = 1;
#pragma unroll
    for (int held = D; held > 1; held >>= 1, m <<= 1)
#pragma unroll
        for (int d = 0; d < held / 2; ++d) {
            const bool second = own & m;
            float mine = second ? top[2 * d + 1] : top[2 * d], sent = second ? top[2 * d] : top[2 * d + 1];
            top[d] = fmaxf(mine, __shfl_xor_sync(FULL_WARP, sent, m));
        }
#pragma unroll
    for (; m < GROUP_LANES; m <<= 1) top[0] = fmaxf(top[0], __shfl_xor_sync(FULL_WARP, top[0], m));
    return top[0];
}

// Products that stay float32, so that a scale shows every bit of the largest. What the fast functions make is within
// NEAR_LARGE units, and the roundings of a product or two: GUESS covers it from either side, 2 * GUESS a comparison of
// two. So the polynomial is for what may be the largest, and for what has other codes GUESS away. Under 2^-60 all codes
// are 0 and the scale is at its floor; from 2^120 on nothing is left to the fast functions.
#define GUESS 0x1p-17f
template <int D>
VT_FN void kept_group_codes(const unsigned short* x, const Vectors& at, bool inside, unsigned char* codes, bool whole,
                            float* scales, bool ue8m0) {
    const int own = threadIdx.x & (D - 1);
    const unsigned present = inside ? 0xffffffffu >> (32 - 8 * D) : 0u;
    auto exact = [&](int n) {
        i64 from = (n >> 3) * at.gate_step + (n & 7);
        return vt_silu(widen_bf16(x[at.gate + from])) * widen_bf16(x[at.up + from]);
    };
    uint4 gate[D], up[D];
    float y[D][8], top[D];
    unsigned some = 0, extreme = 0;
#pragma unroll
    for (int d = 0; d < D; ++d) {
        gate[d] = *(const uint4*)(x + at.gate + d * at.gate_step);
        up[d] = *(const uint4*)(x + at.up + d * at.gate_step);
    }
#pragma unroll
    for (int d = 0; d < D; ++d) {
        float g[8], u[8];
        const Raw<8> raw = {gate[d], gate[d]};
        widen(g, raw, BF16);
        widen(u, {up[d], up[d]}, BF16);
        if (!(least_of_bf16(raw) > LARGEST_GATE)) extreme |= 0xffu << 8 * d;
        top[d] = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            y[d][j] = fast_act<true>(g[j]) * u[j];
            top[d] = fmaxf(top[d], vt_abs(y[d][j]));
        }
    }
    float least = fmaxf(fminf(own_largest(top, own), 0x1p120f) * (1.0f - 2.0f * GUESS), 0x1p-60f);
#pragma unroll
    for (int d = 0; d < D; ++d) {
        float bound = __shfl_xor_sync(FULL_WARP, least, own ^ d);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (vt_abs(y[d][j]) >= bound) some |= 1u << (8 * d + j);
        top[d] = 0.0f;
    }
    some = (some | extreme) & present;
#pragma unroll 1
    for (; some; some &= some - 1) {
        int n = lowest_bit(some);
        float size = vt_abs(exact(n));
#pragma unroll
        for (int d = 0; d < D; ++d)
            if (n >> 3 == d) top[d] = fmaxf(top[d], size);
    }
    const float scale = scale_of((unsigned)vt_bits(own_largest(top, own)), ue8m0);
    const float inverse = usual(scale) ? 1.0f / scale : VT_NAN;
    if ((threadIdx.x & (GROUP_LANES - 1)) < D && inside) scales[at.scale + own * at.scale_step] = scale;
#pragma unroll
    for (int d = 0; d < D; ++d) {
        float by = __shfl_xor_sync(FULL_WARP, inverse, own ^ d), q[8];
        unsigned below[4];
        products(q, y[d], by * (1.0f - GUESS));
#pragma unroll
        for (int j = 0; j < 4; ++j) below[j] = e4m3_pair(q[2 * j], q[2 * j + 1]);
        products(q, y[d], by * (1.0f + GUESS));
        unsigned low = e4m3_pair(q[0], q[1]) | e4m3_pair(q[2], q[3]) << 16;
        unsigned high = e4m3_pair(q[4], q[5]) | e4m3_pair(q[6], q[7]) << 16;
        if (inside) put_codes(codes, at.codes + d * at.codes_step, q, whole);
        low = (low ^ (below[0] | below[1] << 16)) | nans_of(low);
        high = (high ^ (below[2] | below[3] << 16)) | nans_of(high);
        if ((low | high) == 0) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (low >> 8 * j & 0xffu) some |= 1u << (8 * d + j);
            if (high >> 8 * j & 0xffu) some |= 16u << (8 * d + j);
        }
    }
    some = (some | extreme) & present;
    if (__any_sync(FULL_WARP, some != 0)) {
        float whole_scale[D];
#pragma unroll
        for (int d = 0; d < D; ++d) whole_scale[d] = __shfl_xor_sync(FULL_WARP, scale, own ^ d);
#pragma unroll 1
        for (; some; some &= some - 1) {
            int n = lowest_bit(some);
            float by = whole_scale[0];
#pragma unroll
            for (int d = 1; d < D; ++d)
                if (n >> 3 == d) by = whole_scale[d];
            const float q[1] = {exact(n) / by};
            store_e4m3(codes, at.codes + (n >> 3) * at.codes_step + (n & 7), q, 0x7fu);
        }
    }
}
