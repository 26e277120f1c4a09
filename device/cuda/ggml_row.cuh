// What the products of one row of activations share: its values as they are asked for, the shares of rows of the weight,
// teams of warps, and products of bytes on the tensor cores.
#pragma once
#include "ggml_blocks.cuh"
#include "ggml_codes.cuh"
#include "mma.cuh"

constexpr unsigned ALL = 0xffffffffu;
constexpr int CREW = 16, TILE = 8;  // warps of a block; rows whose terms a warp keeps at once

struct Row {
    i64 columns, depth;
    const void* a;
    i64 a_kind;
    const u8* b;
    i64 stride;
    void* out;
    i64 kind;
};

// Where part `i` of `parts` of `count` begins, whose size is `each` or, of the first ones, one more.
VT_FN int begin_of(int i, int parts, int count, int each) {
    int over = count - parts * each;
    return i * each + (i < over ? i : over);
}

// Eight neighbours of the row at a time, `step` times eight from one to the next, and zeros past its end. AHEAD times are
// on their way together: asked for before the weight, whose bytes they would else have to wait for.
struct Eights {
    static constexpr int AHEAD = 4;
    const Row& p;
    int at, step, taken = 0;
    bool wide;
    Raw<8> raw[AHEAD];

    VT_MEMBER Eights(const Row& row, int first, int apart) : p(row), at(first), step(apart) {
        wide = ((unsigned long long)p.a & 15) == 0;
        ask();
    }
    VT_MEMBER void ask() {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            raw[i] = {};  // nothing is copied out of what is on its way: that would wait for it
            if (!wide || (at + i * step) * 8 >= (int)p.depth) continue;
            const uint4* from = (const uint4*)((const char*)p.a + (i64)(at + i * step) * 8 * item_size((int)p.a_kind));
            raw[i].a = from[0];
            if (p.a_kind == F32) raw[i].b = from[1];
        }
    }
    VT_MEMBER void next(float (&x)[8]) {
        widen(x, raw[0], (int)p.a_kind);
        if (!wide && at * 8 < (int)p.depth) load_eight(x, p.a, (i64)at * 8, (int)p.a_kind, false);
        at += step;
#pragma unroll
        for (int i = 0; i + 1 < AHEAD; ++i) raw[i] = raw[i + 1];
        if (++taken % AHEAD == 0) ask();
    }
};

#ifdef __CUDACC__
// The warps of a team meet, whatever other teams do.
VT_FN void team_meets(int team, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(team), "r"(threads) : "memory");
}
// A place in shared memory for copies, made once: from a pointer it would be made anew for each.
typedef unsigned Spot;
VT_FN Spot spot_of(const void* shared) {
    Spot spot;
    asm volatile("mov.b32 %0, %1;" : "=r"(spot) : "r"((unsigned)__cvta_generic_to_shared(shared)));
    return spot;
}
// Shared memory whose address stays in a register: it would be asked for anew again and again.
VT_FN u8* in_register(u8* shared) { return (u8*)__cvta_shared_to_generic(spot_of(shared)); }
VT_FN void copy_to(Spot to, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
VT_FN int ones_of(unsigned bits) { return __popc(bits); }
// Bytes of b and a by the lowest four nibbles of `select`: 0 to 3 are a's, and from 8 on their upper bits alone.
VT_FN unsigned picked(unsigned a, unsigned b, unsigned select) {
    unsigned found;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(select));
    return found;
}
// As one instruction, whatever else is multiplied by `a`.
VT_FN unsigned times_plus(unsigned a, unsigned b, unsigned c) {
    asm("mad.lo.u32 %0, %0, %1, %2;" : "+r"(a) : "r"(b), "r"(c));
    return a;
}
// Bits of a where those of `mask` are set, else of b: as one instruction.
VT_FN unsigned chosen(unsigned mask, unsigned a, unsigned b) {
    asm("lop3.b32 %0, %1, %2, %0, 0xca;" : "+r"(b) : "r"(mask), "r"(a));
    return b;
}
VT_FN int dot2_low(int pair, unsigned bytes, int sum) { return __dp2a_lo(pair, (int)bytes, sum); }
VT_FN int dot2_high(int pair, unsigned bytes, int sum) { return __dp2a_hi(pair, (int)bytes, sum); }
VT_FN int dot4_unsigned(unsigned w, unsigned a, int sum) {
    int found;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(found) : "r"(w), "r"(a), "r"(sum));
    return found;
}

// c += a b, exactly: 16 rows by 8 columns, over 16 k or 32. A lane 4 g + t gives the bytes k 4 t ... 4 t + 3 of rows g
// and g + 8 of a and of column g of b, then those 16 further on; it holds row g's columns 2 t and 2 t + 1, then row
// g + 8's.
VT_FN void multiply_bytes(int (&c)[4], const unsigned (&a)[2], unsigned b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}
VT_FN void multiply_bytes(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same with bytes of a from 0 to 255.
VT_FN void multiply_unsigned(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
namespace emulation {
inline Meeting teams[16];
struct Bytes4 { unsigned a[2], b; };
inline Open<Bytes4> bytes4;
}  // namespace emulation
static inline void team_meets(int team, int threads) {
    emulation::teams[team].size = threads;
    emulation::wait_for(emulation::teams[team]);
}
typedef u8* Spot;
static inline Spot spot_of(u8* shared) { return shared; }
static inline u8* in_register(u8* shared) { return shared; }
static inline void copy_to(Spot to, const void* global) { copy_async(to, global); }
static inline int ones_of(unsigned bits) { return __builtin_popcount(bits); }
static inline unsigned picked(unsigned a, unsigned b, unsigned select) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) {
        unsigned nibble = select >> 4 * i & 15, byte = (unsigned)(both >> 8 * (nibble & 7)) & 255;
        found |= (nibble < 8 ? byte : byte > 127 ? 255u : 0u) << 8 * i;
    }
    return found;
}
static inline unsigned times_plus(unsigned a, unsigned b, unsigned c) { return a * b + c; }
static inline unsigned chosen(unsigned mask, unsigned a, unsigned b) { return (a & mask) | (b & ~mask); }
static inline int dot2(int pair, unsigned bytes, int sum) {
    return sum + (short)pair * (int)(signed char)bytes + (pair >> 16) * (int)(signed char)(bytes >> 8);
}
static inline int dot2_low(int pair, unsigned bytes, int sum) { return dot2(pair, bytes, sum); }
static inline int dot2_high(int pair, unsigned bytes, int sum) { return dot2(pair, bytes >> 16, sum); }
static inline int dot4_unsigned(unsigned w, unsigned a, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(w >> i & 255) * (int)(signed char)(a >> i);
    return sum;
}
template <class A> void multiply_as(int (&c)[4], unsigned a0, unsigned a1, unsigned b) {
    using namespace emulation;
    int lane = running->number & 31, g = lane >> 2, t = lane & 3;
    const Bytes4* lanes = bytes4.lanes({{a0, a1}, b});
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) {
            unsigned x = lanes[4 * g + k / 4].a[i >> 1] >> 8 * (k & 3), y = lanes[4 * (2 * t + (i & 1)) + k / 4].b >> 8 * (k & 3);
            c[i] += (int)(A)x * (int)(signed char)y;
        }
    bytes4.close();
}
static inline void multiply_bytes(int (&c)[4], const unsigned (&a)[2], unsigned b) { multiply_as<signed char>(c, a[0], a[1], b); }
static inline void multiply_bytes(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_as<signed char>(c, a[0], a[1], b0);
    multiply_as<signed char>(c, a[2], a[3], b1);
}
static inline void multiply_unsigned(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    multiply_as<unsigned char>(c, a[0], a[1], b0);
    multiply_as<unsigned char>(c, a[2], a[3], b1);
}
#endif

// n / x for x from 2^-100 to 2^100 and n that is 1 or like them: a division as it is compiled, without asking where x lies.
#ifdef __CUDACC__
VT_FN float quotient_of(float n, float x) {
    float y, q;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    y = __fmaf_rn(y, __fmaf_rn(-x, y, 1.0f), y);
    q = n * y;
    q = __fmaf_rn(__fmaf_rn(-x, q, n), y, q);
    return __fmaf_rn(__fmaf_rn(-x, q, n), y, q);
}
#else
static inline float quotient_of(float n, float x) { return n / x; }
#endif
// Whether a size is none of those, or NaN.
VT_FN bool far_off(unsigned size) { return size - 0x0d800000u >= 0x71800000u - 0x0d800000u; }

// codes_256 as two words a lane, or all of them and their scale with the other sign, which no product sees. Where no
// value is NaN or infinite and the largest no smaller than 2^-120, products of the inverse are at most 127 when rounded:
// their nearest integer is left in the lowest bits of 1.5 * 2^23 and them.
struct Words {
    float d;
    unsigned low, high;
};
VT_FN Words words_256(const float (&x)[8]) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = larger(most, vt_abs(x[i]));
    unsigned largest = largest_of_warp((unsigned)vt_bits(most));
    if (__builtin_expect(largest - 0x03800000u >= 0x7f800000u - 0x03800000u, 0)) {
        Codes c = codes_256(x);
        return {c.d, packed4(c.code[0], c.code[1], c.code[2], c.code[3]),
                packed4(c.code[4], c.code[5], c.code[6], c.code[7])};
    }
    float inverse = 127.0f / vt_float((int)largest);
    unsigned near[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) near[i] = (unsigned)vt_bits(inverse * x[i] + 12582912.0f);
    return {1.0f / inverse, permute(permute(near[0], near[1], 0x0040), permute(near[2], near[3], 0x0040), 0x5410),
            permute(permute(near[4], near[5], 0x0040), permute(near[6], near[7], 0x0040), 0x5410)};
}

// codes_32 of N blocks at once, and four lanes' totals.
template <int N> VT_FN void words_32(Codes (&c)[N], const float (&x)[N][8]) {
    float peak[N];
    bool far = false;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        peak[n] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) peak[n] = larger(peak[n], vt_abs(x[n][i]));
#pragma unroll
        for (int m = 1; m <= 2; m *= 2) peak[n] = larger(peak[n], __shfl_xor_sync(ALL, peak[n], m));
        far |= far_off((unsigned)vt_bits(peak[n]));
    }
    if (__builtin_expect(__any_sync(ALL, far), 0)) {
#pragma unroll
        for (int n = 0; n < N; ++n) c[n] = codes_32(x[n]);
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            c[n].d = quotient_of(peak[n], 127.0f);
            float inverse = quotient_of(1.0f, c[n].d);
            c[n].total = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                c[n].code[i] = nearest_away(x[n][i] * inverse);
                c[n].total += c[n].code[i];
            }
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int m = 1; m <= 2; m *= 2) c[n].total += __shfl_xor_sync(ALL, c[n].total, m);
    }
}
