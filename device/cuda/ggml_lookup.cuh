// Rows of a table in blocks as floats: neighbouring lanes store what is beside, whole sectors at once.
//
// Codes are bytes without a sign, OFFSET above what they mean: with the exponent of 2^23 on top they are float32s that
// a difference makes numbers of, which takes less than a conversion.
#pragma once
#include "early.cuh"
#include "ggml_blocks.cuh"
#include "rows.cuh"

// value = scale * (code - OFFSET) - minimum
struct Eight {
    unsigned q[2];
    float scale, minimum;
};

template <int TYPE> struct Offset {
    static constexpr int OF[12] = {8, 16, 128, 0, 0, 0, 4, 0, 0, 32, 128, 128};
    static constexpr float VALUE = 8388608.0f + OF[TYPE];
};

template <int ALIGNED> VT_FN void two_words(unsigned (&w)[2], const u8* p) {
    if constexpr (ALIGNED == 16) {
        const uint2 two = *(const uint2*)p;
        w[0] = two.x;
        w[1] = two.y;
    } else if constexpr (ALIGNED == 4) {
        w[0] = *(const unsigned*)p;
        w[1] = *(const unsigned*)(p + 4);
    } else {
        const unsigned apart = (unsigned)(unsigned long long)p & 2u;  // a difference of addresses stays in global memory
        const unsigned* from = (const unsigned*)(p - apart);
        const unsigned last = apart ? half_at((const u8*)(from + 2)) : 0, select = apart ? 0x5432u : 0x3210u;
        w[0] = permute(from[0], from[1], select);
        w[1] = permute(from[1], last, select);
    }
}
VT_FN unsigned word_of_halves(const u8* p) { return half_at(p) | half_at(p + 2) << 16; }

// Values 8 e ... 8 e + 7 of unit u of the block at p, which is not of Q6_K.
template <int TYPE> VT_FN Eight eight_of(const u8* p, int u, int e) {
    using B = Block<TYPE>;
    constexpr int ALIGNED = B::ALIGNED;
    constexpr int D = TYPE == Q2_K ? 80 : TYPE == Q3_K ? 108 : 0;
    Eight k;
    unsigned(&q)[2] = k.q;
    const float whole = f16_at(p + D);
    float least = 0.0f;
    int scale = 1, minimum = 1;
    if constexpr (B::MINIMUM) least = f16_at(p + D + 2);
    if constexpr (TYPE == Q8_0) {
        two_words<ALIGNED>(q, p + 2 + 8 * e);
        q[0] ^= 0x80808080u;
        q[1] ^= 0x80808080u;
    } else if constexpr (TYPE <= Q5_1) {
        constexpr bool FIVE = TYPE == Q5_0 || TYPE == Q5_1;
        constexpr int HEAD = 2 + 2 * B::MINIMUM;
        two_words<ALIGNED>(q, p + HEAD + 4 * FIVE + 8 * (e & 1));
        unsigned fifth = 0;
        if constexpr (FIVE) fifth = p[HEAD + e];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            q[i] = q[i] >> 4 * (e >> 1) & 0x0f0f0f0fu;
            if constexpr (FIVE) q[i] |= spread4(fifth >> 4 * i) << 4;
        }
        minimum = -1;
    } else if constexpr (TYPE == Q2_K || TYPE == Q3_K) {
        two_words<ALIGNED>(q, p + (TYPE == Q2_K ? 16 : 32) + 32 * (u >> 2) + 8 * e);
#pragma unroll
        for (int i = 0; i < 2; ++i) q[i] = q[i] >> 2 * (u & 3) & 0x03030303u;
        const int j = 2 * u + (e >> 1);
        if constexpr (TYPE == Q2_K) {
            scale = p[j] & 15;
            minimum = p[j] >> 4;
        } else {
            unsigned mask[2];
            two_words<ALIGNED>(mask, p + 8 * e);
#pragma unroll
            for (int i = 0; i < 2; ++i) q[i] |= (mask[i] >> u & 0x01010101u) << 2;
            const u8* scales = p + 96;
            scale = ((scales[j & 7] >> 4 * (j >> 3) & 15) | (scales[8 + (j & 3)] >> 2 * (j >> 2) & 3) << 4) - 32;
        }
    } else if constexpr (TYPE == Q4_K || TYPE == Q5_K) {
        two_words<ALIGNED>(q, p + (TYPE == Q4_K ? 16 : 48) + 32 * (u >> 1) + 8 * e);
#pragma unroll
        for (int i = 0; i < 2; ++i) q[i] = q[i] >> 4 * (u & 1) & 0x0f0f0f0fu;
        if constexpr (TYPE == Q5_K) {
            unsigned fifth[2];
            two_words<ALIGNED>(fifth, p + 16 + 8 * e);
#pragma unroll
            for (int i = 0; i < 2; ++i) q[i] |= (fifth[i] >> u & 0x01010101u) << 4;
        }
        Scales six;
        six_bits(six, p + 4, u);
        scale = six.s[0];
        minimum = six.m[0];
    } else {
        const u8* from = p + 2 + 8 * u;
        const unsigned a = word_of_halves(TYPE == IQ2_XXS ? from + 4 : p + 66 + 4 * u);
        const unsigned minus = signs_of(a >> 7 * e & 127u);
        if constexpr (TYPE == IQ2_XXS) {
            const unsigned digits = IQ2_XXS_DIGITS[from[e]];
            q[0] = permute(0x002b1908u, 0, digits & 0xffffu);
            q[1] = permute(0x002b1908u, 0, digits >> 16);
        } else {
            const unsigned pair = half_at(from + 2 * e);
            q[0] = permute(0x1c140c04u, 0x3e342c24u, IQ3_XXS_DIGITS[pair & 255u]);
            q[1] = permute(0x1c140c04u, 0x3e342c24u, IQ3_XXS_DIGITS[pair >> 8]);
        }
        q[0] = signed4(q[0], minus) ^ 0x80808080u;
        q[1] = signed4(q[1], minus >> 4) ^ 0x80808080u;
        scale = 2 * (int)(a >> 28) + 1;
    }
    k.scale = B::LARGE ? whole * ((float)scale * B::FOLD) : whole;
    k.minimum = B::MINIMUM ? (B::LARGE ? least * (float)minimum : -least) : 0.0f;
    return k;
}

template <int TYPE> VT_FN void values_of(float (&v)[8], const Eight& k) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        v[i] = k.scale * (vt_float((int)permute(k.q[i / 4], 0x4b000000u, 0x7440u + (i & 3))) - Offset<TYPE>::VALUE);
        if constexpr (Block<TYPE>::MINIMUM) v[i] = v[i] - k.minimum;
    }
}

// What is stored is not read again here: it gives way to the table in the second-level cache.
#ifdef __CUDACC__
VT_FN void put_away(uint4* to, const uint4& value) { __stcs(to, value); }
#else
static inline void put_away(uint4* to, const uint4& value) { *to = value; }
#endif

// Eights of this lane and the next one, of an even lane first, as float32: 16 bytes of both a lane at a time.
VT_FN void put_floats(float* out, const float (&v)[8], bool inside) {
    const bool odd = (threadIdx.x & 1) != 0;
    unsigned low[4], high[4];  // of the even lane's values, and of the odd one's
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const unsigned own = (unsigned)vt_bits(odd ? v[i + 4] : v[i]);
        const unsigned other = __shfl_xor_sync(0xffffffffu, (unsigned)vt_bits(odd ? v[i] : v[i + 4]), 1);
        low[i] = odd ? other : own;
        high[i] = odd ? own : other;
    }
    if (!inside) return;
    uint4* to = (uint4*)out + (odd ? 1 : 0);
    put_away(to, {low[0], low[1], low[2], low[3]});
    put_away(to + 2, {high[0], high[1], high[2], high[3]});
}

// Q6_K: a thread has the same eight of two units whose codes lie in the same bytes.
VT_FN void lookup_q6_k(i64 rows, i64 width, i64 chunks, const u8* table, i64 stride, const void* ids, bool long_ids,
                       void* out, int kind) {
    const Place at = place<16>(rows, width, chunks);
    const i64 token = at.row < rows ? at.row : 0;
    const unsigned n = at.column < width ? (unsigned)at.column >> 4 : 0u;
    const unsigned block = n >> 4, half = n >> 3 & 1u, unit = n >> 2 & 1u, e = n & 3u;
    after_others();
    const u8* row = table + (long_ids ? ((const i64*)ids)[token] : ((const int*)ids)[token]) * stride;
    const u8* p = row + block * Block<Q6_K>::BYTES;
    unsigned low[2], high[2];
    two_words<2>(low, p + 64 * half + 32 * unit + 8 * e);
    two_words<2>(high, p + 128 + 32 * half + 8 * e);
    const u8* scales = p + 192 + 8 * half + 2 * unit + (e >> 1);
    const float whole = f16_at(p + 208), scale[2] = {(float)(signed char)scales[0], (float)(signed char)scales[4]};
    others_may_start();
    const i64 to = token * width + block * 256 + half * 128 + unit * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        Eight k;
        float v[8];
#pragma unroll
        for (int h = 0; h < 2; ++h)
            k.q[h] = (low[h] >> 4 * i & 0x0f0f0f0fu) | (high[h] >> (2 * unit + 4 * i) & 0x03030303u) << 4;
        k.scale = whole * scale[i];
        values_of<Q6_K>(v, k);
        if (kind == F32) put_floats((float*)out + to + 64 * i + 16 * (e >> 1), v, at.inside);
        else if (at.inside) put_away((uint4*)((unsigned short*)out + to + 64 * i + 8 * e), narrow(v, kind).a);
    }
}

// Two threads have a unit: the first and the third eight of it, and the others. What lies past the end is read elsewhere
// and not stored.
template <int TYPE>
VT_FN void lookup(i64 rows, i64 width, i64 chunks, const u8* table, i64 stride, const void* ids, bool long_ids, void* out,
                  int kind) {
    using B = Block<TYPE>;
    const Place at = place<16>(rows, width, chunks);
    const i64 token = at.row < rows ? at.row : 0;
    const unsigned column = at.column < width ? (unsigned)at.column : 0u, unit = column >> 5;
    const int part = (int)(column >> 4 & 1u);
    after_others();
    const u8* row = table + (long_ids ? ((const i64*)ids)[token] : ((const int*)ids)[token]) * stride;
    const u8* p = row + (B::LARGE ? unit >> 3 : unit) * (unsigned)B::BYTES;
    const Eight first = eight_of<TYPE>(p, (int)(unit & 7), part), third = eight_of<TYPE>(p, (int)(unit & 7), part + 2);
    others_may_start();
    float v[2][8];
    values_of<TYPE>(v[0], first);
    values_of<TYPE>(v[1], third);
    const i64 to = token * width + unit * 32;
    if (kind == F32) {
        put_floats((float*)out + to, v[0], at.inside);
        put_floats((float*)out + to + 16, v[1], at.inside);
    } else if (at.inside) {
        uint4* eights = (uint4*)((unsigned short*)out + to + 8 * part);
        put_away(eights, narrow(v[0], kind).a);
        put_away(eights + 2, narrow(v[1], kind).a);
    }
}

#define LOOKUP(NAME, F)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        NAME(i64 rows, i64 width, i64 chunks, const u8* table, i64 stride, const void* ids, i64 long_ids, void* out,  \
             i64 kind) {                                                                                              \
        F(rows, width, chunks, table, stride, ids, long_ids != 0, out, (int)kind);                                    \
    }
LOOKUP(ggml_rows_q4_0_v8_early, lookup<Q4_0>)
LOOKUP(ggml_rows_q5_0_v8_early, lookup<Q5_0>)
LOOKUP(ggml_rows_q8_0_v8_early, lookup<Q8_0>)
LOOKUP(ggml_rows_q4_1_v8_early, lookup<Q4_1>)
LOOKUP(ggml_rows_q5_1_v8_early, lookup<Q5_1>)
LOOKUP(ggml_rows_q2_k_v8_early, lookup<Q2_K>)
LOOKUP(ggml_rows_q3_k_v8_early, lookup<Q3_K>)
LOOKUP(ggml_rows_q4_k_v8_early, lookup<Q4_K>)
LOOKUP(ggml_rows_q5_k_v8_early, lookup<Q5_K>)
LOOKUP(ggml_rows_q6_k_v8_early, lookup_q6_k)
LOOKUP(ggml_rows_iq2_xxs_v8_early, lookup<IQ2_XXS>)
LOOKUP(ggml_rows_iq3_xxs_v8_early, lookup<IQ3_XXS>)
