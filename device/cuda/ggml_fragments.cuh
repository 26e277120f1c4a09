// ggml's blocks as operands of the tensor cores, for products with several rows of activations.
//
// A warp has sixteen rows of the weight, lane 4 g + t parts of rows g and g + 8. Codes are bytes, and a unit is one product
// over 32 k.
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
// Of pairs of float16: x - y and x y + z.
VT_FN unsigned pair_less(unsigned x, unsigned y) {
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
    return x;
}
VT_FN unsigned pair_times_plus(unsigned x, unsigned y, unsigned z) {
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(y), "r"(z));
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
static inline unsigned pair_times_plus(unsigned x, unsigned y, unsigned z) {
    return narrow_f16(widen_f16(x & 0xffffu) * widen_f16(y & 0xffffu) + widen_f16(z & 0xffffu),
                      widen_f16(x >> 16) * widen_f16(y >> 16) + widen_f16(z >> 16));
}

#endif

// A word at a multiple of ALIGNED bytes.
template <int ALIGNED> VT_FN unsigned word_at(const u8* p) {
    if constexpr (ALIGNED == 2) return half_at(p) | half_at(p + 2) << 16;
    return *(const unsigned*)p;
}

constexpr unsigned THOUSAND = 0x64006400u;  // float16 pairs of 1024, whose last bits are integers
VT_FN unsigned pair_of_bytes(unsigned w) { return bits_onto(w, 0x00ff00ffu, THOUSAND); }  // bytes 0 and 2, and 1024

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

// Codes and scales of the eight units of the i-quants' blocks.
template <int TYPE> struct WholePart { unsigned low[8], high[8]; int s[8]; float d; };

template <int TYPE> VT_FN void whole_of_row(WholePart<TYPE>& f, const u8* p, int t, const unsigned* grid) {
    constexpr int ALIGNED = Block<TYPE>::ALIGNED;
    f.d = f16_at(p);
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
