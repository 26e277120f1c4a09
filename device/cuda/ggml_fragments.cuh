// ggml's blocks as operands of the tensor cores, for products with several rows of activations.
//
// A warp has sixteen rows of the weight, lane 4 g + t parts of rows g and g + 8. Where a block or unit has one sum, codes
// are signed bytes and a unit is one product over 32 k. Where sums run in eight lanes, codes are multiplied by their
// scales as float16 pairs, exactly: an integer up to 2048 is a float16, and what Q6_K's products up to 4096 lose is a
// float16, too. Their sums of 32 stay below 2^24, so that float32 sums of them are exact.
#pragma once
#include "ggml_row.cuh"

constexpr int MAGIC = 0x4b400000;  // of VT_MAGIC: a float32 whose last bits are an integer's, if that is below 2^22

struct alignas(16) Four { float x[4]; };

#ifdef __CUDACC__

// c = start + a b of bytes, signed or (of a) unsigned.
template <bool SIGNED> VT_FN void bytes_onto(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int start) {
    if constexpr (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
            : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start));
}
// c = a b of float16.
VT_FN void halves_product(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
// (x & mask) | base and (x & mask) ^ base: one instruction each, where a compiler would make two out of two constants.
VT_FN unsigned bits_onto(unsigned x, unsigned mask, unsigned base) {
    asm("lop3.b32 %0, %0, %1, %2, 0xea;" : "+r"(x) : "r"(mask), "r"(base));
    return x;
}
VT_FN unsigned bits_against(unsigned x, unsigned mask, unsigned base) {
    asm("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(x) : "r"(mask), "r"(base));
    return x;
}
// Of pairs of float16: x - y, x y, x y + z, and what x y was rounded by to `rounded`.
VT_FN unsigned pair_less(unsigned x, unsigned y) {
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
    return x;
}
VT_FN unsigned pair_times(unsigned x, unsigned y) {
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
    return x;
}
VT_FN unsigned pair_times_plus(unsigned x, unsigned y, unsigned z) {
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z));
    return x;
}
VT_FN unsigned pair_lost(unsigned x, unsigned y, unsigned rounded) {
    asm("{\n.reg .b32 n;\nneg.f16x2 n, %2;\nfma.rn.f16x2 %0, %0, %1, n;\n}" : "+r"(x) : "r"(y), "r"(rounded));
    return x;
}

#else

template <bool SIGNED> void bytes_onto(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int start) {
    for (int i = 0; i < 4; ++i) c[i] = start;
    if (SIGNED) multiply_bytes(c, a, b0, b1);
    else multiply_unsigned(c, a, b0, b1);
}
static inline void halves_product(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    for (int i = 0; i < 4; ++i) c[i] = 0.0f;
    multiply<F16>(c, a, b0, b1);
}
static inline unsigned bits_onto(unsigned x, unsigned mask, unsigned base) { return (x & mask) | base; }
static inline unsigned bits_against(unsigned x, unsigned mask, unsigned base) { return (x & mask) ^ base; }
static inline unsigned pair_less(unsigned x, unsigned y) {
    return narrow_f16(widen_f16(x & 0xffffu) - widen_f16(y & 0xffffu), widen_f16(x >> 16) - widen_f16(y >> 16));
}
static inline unsigned pair_times(unsigned x, unsigned y) {
    return narrow_f16(widen_f16(x & 0xffffu) * widen_f16(y & 0xffffu), widen_f16(x >> 16) * widen_f16(y >> 16));
}
static inline unsigned pair_times_plus(unsigned x, unsigned y, unsigned z) {
    return narrow_f16(widen_f16(x & 0xffffu) * widen_f16(y & 0xffffu) + widen_f16(z & 0xffffu),
                      widen_f16(x >> 16) * widen_f16(y >> 16) + widen_f16(z >> 16));
}
static inline unsigned pair_lost(unsigned x, unsigned y, unsigned r) {
    return narrow_f16(widen_f16(x & 0xffffu) * widen_f16(y & 0xffffu) - widen_f16(r & 0xffffu),
                      widen_f16(x >> 16) * widen_f16(y >> 16) - widen_f16(r >> 16));
}

#endif

// A word at a multiple of ALIGNED bytes.
template <int ALIGNED> VT_FN unsigned word_at(const u8* p) {
    if constexpr (ALIGNED == 2) return half_at(p) | half_at(p + 2) << 16;
    return *(const unsigned*)p;
}

constexpr unsigned THOUSAND = 0x64006400u;  // float16 pairs of 1024, whose last bits are integers
VT_FN unsigned pair_of_bytes(unsigned w) { return bits_onto(w, 0x00ff00ffu, THOUSAND); }  // bytes 0 and 2, and 1024

// A row's part of a block in eight lanes: bytes of lanes 4 HALF ... 4 HALF + 3, element 8 t + lane of unit u in q[u], or
// (Q4_K) of units 2 c and 2 c + 1 in q[c]; the scales of units u and u + 2 in pairs, of u = 0, 1, 4, 5; -1024 times these
// (or, where the codes are sixteen times as large, -64 times); the minimums of units t and 4 + t, twice each.
struct LanesPart { unsigned q[8], s[4], off[4], m[2]; float d, dmin; };

// What the bytes are above their values, in pairs of float16 beside 1024.
template <int TYPE> VT_FN constexpr unsigned lanes_base() {
    return TYPE == Q3_K ? 0x64046404u : 0x64206420u;
}

template <int TYPE> VT_FN void lanes_of_row(LanesPart& f, const u8* p, int t, int half) {
    constexpr int ALIGNED = Block<TYPE>::ALIGNED;
    const int at = 8 * t + 4 * half;
    if constexpr (TYPE == Q4_K || TYPE == Q5_K) {
        unsigned s[2], m[2], y = *(const unsigned*)(p + 4), z = *(const unsigned*)(p + 8), w = *(const unsigned*)(p + 12);
        unsigned head = *(const unsigned*)p;
        f.d = widen_f16(head & 0xffffu);
        f.dmin = widen_f16(head >> 16);
        s[0] = y & 0x3f3f3f3fu;
        s[1] = (w & 0x0f0f0f0fu) | (y >> 2 & 0x30303030u);
        m[0] = z & 0x3f3f3f3fu;
        m[1] = (w >> 4 & 0x0f0f0f0fu) | (z >> 2 & 0x30303030u);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            f.s[2 * h] = pair_less(pair_of_bytes(s[h]), THOUSAND);
            f.s[2 * h + 1] = pair_less(pair_of_bytes(s[h] >> 8), THOUSAND);
            f.off[2 * h] = pair_times(f.s[2 * h], 0xe400e400u);
            if constexpr (TYPE == Q4_K) f.s[2 * h + 1] = pair_times(f.s[2 * h + 1], 0x2c002c00u);
            f.off[2 * h + 1] = pair_times(f.s[2 * h + 1], 0xe400e400u);
            f.m[h] = pair_less(permute(m[h], 0x64646464u, 0x4040u + 0x0101u * t), THOUSAND);
        }
        unsigned fifth = TYPE == Q5_K ? *(const unsigned*)(p + 16 + at) : 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            unsigned four = *(const unsigned*)(p + (TYPE == Q4_K ? 16 : 48) + 32 * c + at);
            if constexpr (TYPE == Q4_K) {
                f.q[c] = four;
            } else {
                f.q[2 * c] = four & 0x0f0f0f0fu;
                f.q[2 * c + 1] = four >> 4 & 0x0f0f0f0fu;
                f.q[2 * c] |= (c < 2 ? fifth << 4 - 2 * c : fifth >> 2 * c - 4) & 0x10101010u;
                f.q[2 * c + 1] |= (c < 2 ? fifth << 3 - 2 * c : fifth >> 2 * c - 3) & 0x10101010u;
            }
        }
    } else if constexpr (TYPE == Q3_K) {
        f.d = f16_at(p + 108);
        unsigned first = word_at<ALIGNED>(p + 96), second = word_at<ALIGNED>(p + 100), two = word_at<ALIGNED>(p + 104);
        // Bytes of units 0 to 3 and 4 to 7, each of this lane's half of a unit: scale 2 u + t / 2.
        unsigned four = permute(first, second, t < 2 ? 0x6420u : 0x7531u);
        two = permute(two, 0, t < 2 ? 0x2020u : 0x3131u);
        two = permute(two, two >> 2, 0x7610u);
        unsigned s[2] = {(four & 0x0f0f0f0fu) | (two << 4 & 0x30303030u), (four >> 4 & 0x0f0f0f0fu) | (two & 0x30303030u)};
        unsigned third = word_at<ALIGNED>(p + at);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            f.s[2 * h] = pair_less(pair_of_bytes(s[h]), 0x64206420u);  // less 32
            f.s[2 * h + 1] = pair_less(pair_of_bytes(s[h] >> 8), 0x64206420u);
            unsigned codes = word_at<ALIGNED>(p + 32 + 32 * h + at);
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                int up = 2 - (4 * h + u);
                f.q[4 * h + u] = (codes >> 2 * u & 0x03030303u) | ((up > 0 ? third << up : third >> -up) & 0x04040404u);
            }
        }
    } else {
        f.d = f16_at(p + 208);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            unsigned first = word_at<ALIGNED>(p + 192 + 8 * h), second = word_at<ALIGNED>(p + 196 + 8 * h);
            unsigned even = permute(first, second, t < 2 ? 0x0400u : 0x0501u) ^ 0x00800080u;
            unsigned odd = permute(first, second, t < 2 ? 0x0602u : 0x0703u) ^ 0x00800080u;
            f.s[2 * h] = pair_less(pair_of_bytes(even), 0x64806480u);
            f.s[2 * h + 1] = pair_less(pair_of_bytes(odd), 0x64806480u);
            unsigned w0 = word_at<ALIGNED>(p + 64 * h + at), w1 = word_at<ALIGNED>(p + 64 * h + 32 + at);
            unsigned high = word_at<ALIGNED>(p + 128 + 32 * h + at);
            f.q[4 * h] = (w0 & 0x0f0f0f0fu) | (high << 4 & 0x30303030u);
            f.q[4 * h + 1] = (w1 & 0x0f0f0f0fu) | (high << 2 & 0x30303030u);
            f.q[4 * h + 2] = (w0 >> 4 & 0x0f0f0f0fu) | (high & 0x30303030u);
            f.q[4 * h + 3] = (w1 >> 4 & 0x0f0f0f0fu) | (high >> 2 & 0x30303030u);
        }
    }
}

// Of lane `l` the codes times the scales of pair `i`: float16s, exactly, or `lost` is what they lack.
template <int TYPE> VT_FN unsigned lanes_pair(unsigned& lost, const LanesPart& f, int i, int l) {
    const int u = 4 * (i >> 1) + (i & 1);
    if constexpr (TYPE == Q4_K) {
        unsigned both = permute(f.q[i & 2], f.q[(i & 2) + 1], 0x0400u + 0x0101u * l);
        return pair_times_plus(bits_onto(both, i & 1 ? 0x00f000f0u : 0x000f000fu, THOUSAND), f.s[i], f.off[i]);
    }
    unsigned both = permute(f.q[u], f.q[u + 2], l & 2 ? 0x7362u : 0x5140u);
    unsigned x = permute(both, 0x64646464u, l & 1 ? 0x4342u : 0x4140u);
    if constexpr (TYPE == Q5_K) return pair_times_plus(x, f.s[i], f.off[i]);
    x = pair_less(x, lanes_base<TYPE>());
    unsigned made = pair_times(x, f.s[i]);
    if constexpr (TYPE == Q6_K) lost = pair_lost(x, f.s[i], made);
    return made;
}

// Scale and minimum of a block of 32, and its codes: k 4 t ... 4 t + 3 and those 16 further on, or (i-quants) 8 t ... 8 t + 7.
// Codes of four bits are sixteen times as large, their scale a sixteenth.
struct UnitPart { unsigned low, high, head; };
template <int TYPE> VT_FN float scale_of(const UnitPart& f) {
    float d = widen_f16(f.head & 0xffffu);
    return TYPE == Q4_0 ? d * 0.0625f : d;
}

template <int TYPE> VT_FN UnitPart unit_of_row(const u8* p, int t) {
    constexpr int ALIGNED = Block<TYPE>::ALIGNED;
    constexpr bool MINIMUM = Block<TYPE>::MINIMUM, FIVE = TYPE == Q5_0 || TYPE == Q5_1;
    UnitPart f;
    f.head = MINIMUM ? *(const unsigned*)p : half_at(p);
    if constexpr (TYPE == Q8_0) {
        f.low = word_at<ALIGNED>(p + 2 + 4 * t);
        f.high = word_at<ALIGNED>(p + 18 + 4 * t);
    } else {
        unsigned four = word_at<ALIGNED>(p + 2 + 2 * MINIMUM + 4 * FIVE + 4 * t);
        if constexpr (TYPE == Q4_0) {
            f.low = (four << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
            f.high = (four & 0xf0f0f0f0u) ^ 0x80808080u;
        } else {
            f.low = four & 0x0f0f0f0fu;
            f.high = four >> 4 & 0x0f0f0f0fu;
            if constexpr (FIVE) {
                unsigned fifth = word_at<ALIGNED>(p + 2 + 2 * MINIMUM) >> 4 * t;
                f.low |= spread4(fifth) << 4;
                f.high |= spread4(fifth >> 16) << 4;
            }
            if constexpr (TYPE == Q5_0) {
                f.low = less(f.low, 16);
                f.high = less(f.high, 16);
            }
        }
    }
    return f;
}

// Codes of the eight units of a block of 256 with one sum. Q2_K's are multiplied by their scales, the i-quants' scales
// are apart.
template <int TYPE> struct WholePart { unsigned low[8], high[8]; int s[8]; unsigned m[2]; float d, dmin; };

template <int TYPE> VT_FN void whole_of_row(WholePart<TYPE>& f, const u8* p, int t, const unsigned* grid) {
    constexpr int ALIGNED = Block<TYPE>::ALIGNED;
    if constexpr (TYPE == Q2_K) {
        f.d = f16_at(p + 80);
        f.dmin = f16_at(p + 82);
        f.m[0] = pair_less(permute(half_at(p + 2 * t) >> 4 & 0x0f0fu, 0x64646464u, 0x4140), THOUSAND);
        f.m[1] = pair_less(permute(half_at(p + 8 + 2 * t) >> 4 & 0x0f0fu, 0x64646464u, 0x4140), THOUSAND);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            unsigned low = word_at<ALIGNED>(p + 16 + 32 * h + 4 * t), high = word_at<ALIGNED>(p + 32 + 32 * h + 4 * t);
            unsigned s0 = word_at<ALIGNED>(p + 8 * h) & 0x0f0f0f0fu, s1 = word_at<ALIGNED>(p + 8 * h + 4) & 0x0f0f0f0fu;
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                unsigned two = (u < 2 ? s0 : s1) >> 16 * (u & 1);
                f.low[4 * h + u] = (low >> 2 * u & 0x03030303u) * (two & 255u);
                f.high[4 * h + u] = (high >> 2 * u & 0x03030303u) * (two >> 8 & 255u);
            }
        }
    } else {
        f.d = f16_at(p);
        f.dmin = 0.0f;
#pragma unroll
        for (int u = 0; u < 8; ++u) {
            unsigned beside = word_at<ALIGNED>(TYPE == IQ2_XXS ? p + 6 + 8 * u : p + 66 + 4 * u);
            unsigned minus = signs_of(beside >> 7 * t & 127u);
            f.s[u] = 2 * (int)(beside >> 28) + 1;
            if constexpr (TYPE == IQ2_XXS) {
                unsigned digits = grid[p[2 + 8 * u + t]];
                f.low[u] = signed4(permute(0x002b1908u, 0, digits & 0xffffu), minus);
                f.high[u] = signed4(permute(0x002b1908u, 0, digits >> 16), minus >> 4);
            } else {
                unsigned two = half_at(p + 2 + 8 * u + 2 * t);
                f.low[u] = signed4(grid[two & 255u], minus);
                f.high[u] = signed4(grid[two >> 8], minus >> 4);
            }
        }
    }
}
