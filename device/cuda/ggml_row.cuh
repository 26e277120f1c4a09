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

// Bounds of part `i` of `parts` of [first, last).
VT_FN int cut(int first, int last, int i, int parts) { return first + (int)((i64)(last - first) * i / parts); }

// Eight neighbours of the row at a time, `step` times eight from one to the next, and zeros past its end; they are on
// their way one time ahead.
struct Eights {
    const Row& p;
    int at, step;
    bool wide;
    Raw<8> raw;

    VT_MEMBER Eights(const Row& row, int first, int apart) : p(row), at(first), step(apart) {
        wide = ((unsigned long long)p.a & 15) == 0;
        ask();
    }
    VT_MEMBER bool inside() const { return at * 8 < (int)p.depth; }
    VT_MEMBER void ask() {
        raw = {};
        if (wide && inside()) raw = fetch<8>(p.a, (i64)at * 8, (int)p.a_kind);
    }
    VT_MEMBER void next(float (&x)[8]) {
        widen(x, raw, (int)p.a_kind);
        if (!wide && inside()) load_eight(x, p.a, (i64)at * 8, (int)p.a_kind, false);
        at += step;
        if (wide) ask();
    }
};

#ifdef __CUDACC__
// The warps of a team meet, whatever other teams do.
VT_FN void team_meets(int team, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(team), "r"(threads) : "memory");
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
