// Weights of 4 and 8 bits as operands of tensor cores: the formats they are packed in, and the pairs of 16-bit numbers that
// masks and magic numbers make of codes. A code's bits beside those of a power of two are a number that much larger.
#pragma once
#include "mma.cuh"

#define CHUNK 64    // k that are sent for at a time, four instructions' worth
#define COLUMNS 64  // of a warp

#ifdef __CUDACC__
// c += a b where `yes`, which is the same for all lanes: no branch, so that what comes next may begin before.
template <int KIND> VT_FN void multiply_if(bool yes, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (KIND == BF16)
        asm("{.reg .pred p; setp.ne.s32 p, %10, 0; @p mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};}"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"((int)yes));
    else
        asm("{.reg .pred p; setp.ne.s32 p, %10, 0; @p mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};}"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"((int)yes));
}
// A value that the compiler keeps in a register: it would rather make it anew at every use.
template <class T> VT_FN T kept(T x) {
    asm("" : "+r"(x));
    return x;
}
// Branches that differ in N alone stay branches: as one they would index registers, which would then lie in memory.
template <int N> VT_FN void stay_apart() { asm volatile("// %0" ::"n"(N)); }
template <int SELECT> VT_FN unsigned pick(unsigned a, unsigned b) { return __byte_perm(a, b, SELECT); }
template <int KIND> VT_FN unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
    unsigned d;
    if constexpr (KIND == BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#else
template <int KIND> void multiply_if(bool yes, float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if (yes) multiply<KIND>(c, a, b0, b1);
}
template <class T> T kept(T x) { return x; }
template <int N> void stay_apart() {}
template <int SELECT> unsigned pick(unsigned a, unsigned b) {
    uint64_t both = (uint64_t)b << 32 | a;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) out |= (unsigned)(both >> 8 * (SELECT >> 4 * i & 7) & 0xff) << 8 * i;
    return out;
}
template <int KIND> unsigned fma_pair(unsigned a, unsigned b, unsigned c) {
    float sums[2];  // exact but for the rounding to KIND: products have at most 22 bits
    for (int i = 0; i < 2; ++i)
        sums[i] = emulation::half_of<KIND>(a, i) * emulation::half_of<KIND>(b, i) + emulation::half_of<KIND>(c, i);
    return pair<KIND>(sums[0], sums[1]);
}
#endif

// Pairs of numbers of KIND: 1, -0, a number whose last bits are a code's, and its negative.
template <int KIND> struct Pairs {
    static constexpr unsigned ONE = KIND == BF16 ? 0x3f803f80u : 0x3c003c00u, MINUS_ZERO = 0x80008000u;
    static constexpr unsigned BASE = KIND == BF16 ? 0x43004300u : 0x64006400u, MINUS_BASE = BASE | 0x80008000u;
};

template <int N> struct Number { static constexpr int value = N; };
template <int N, int END, class F> VT_FN void each_number(F act) {
    if constexpr (N < END) {
        act(Number<N>());
        each_number<N + 1, END>(act);
    }
}

VT_FN unsigned word_at(const char* shared, int offset) { return *(const unsigned*)(shared + offset); }
VT_FN uint4 words_at(const char* shared, int offset) { return *(const uint4*)(shared + offset); }

// Formats. A warp's 64 columns x 64 k are four quarters: lane l copies BITS / 4 times 16 neighbouring bytes of each, from
// `from` on, `quarter` bytes apart, to `to`. `codes` gives, for instruction s of the four, the words whose masked
// bits are the codes of register r of tile t: rows (columns of weights) g and g + 8 of 16 are numbers p = 2 t and 2 t + 1
// of lane group g's eight columns. `column` says which of the 64 columns those are, `scale` where their scales lie among
// the group's 64, `nibble` which of a word's zero points are theirs.
template <int BITS_> struct MarlinWords {
    static constexpr int BITS = BITS_, BYTES = COLUMNS * CHUNK * BITS / 8;
    static constexpr bool NEIGHBOURS = true, ZEROS_ADDED = false;
    static VT_MEMBER int number(int column) { return (column & 7) | (column >> 3) << 3; }
    static VT_MEMBER int scale(int g, int p, int) { return 8 * g + p; }
    static VT_MEMBER int nibble(int p) { return (p >> 1) + 4 * (p & 1); }
    static VT_MEMBER i64 from(i64 n, i64, int lane) { return n * 2 * BITS + lane * 4 * BITS; }
    static VT_MEMBER i64 quarter(i64 columns) { return columns * 2 * BITS; }
    static VT_MEMBER int to(int lane) { return lane * 16; }
    static VT_MEMBER void codes(unsigned (&raw)[4][4], const char* shared, int s, int lane, int) {
        uint4 q[BITS / 4];
#pragma unroll
        for (int h = 0; h < BITS / 4; ++h) q[h] = words_at(shared, (s * BITS / 4 + h) * 512 + lane * 16);
        if constexpr (BITS == 4) {
            const unsigned w[4] = {q[0].x, q[0].y, q[0].z, q[0].w};
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                raw[t][0] = w[t], raw[t][2] = w[t] >> 4, raw[t][1] = w[t] >> 8, raw[t][3] = w[t] >> 12;
            }
        } else {
            const unsigned w[8] = {q[0].x, q[0].y, q[0].z, q[0].w, q[1].x, q[1].y, q[1].z, q[1].w};
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                raw[t][0] = w[2 * t], raw[t][2] = w[2 * t] >> 8;
                raw[t][1] = w[2 * t + 1], raw[t][3] = w[2 * t + 1] >> 8;
            }
        }
    }
};

template <int BITS_> struct MacheteWords {
    static constexpr int BITS = BITS_, BYTES = COLUMNS * CHUNK * BITS / 8;
    static constexpr bool NEIGHBOURS = false, ZEROS_ADDED = true;
    static VT_MEMBER int number(int column) { return column; }
    static VT_MEMBER int scale(int g, int p, int) { return g + 8 * p; }
    static VT_MEMBER int nibble(int) { return 0; }
    static VT_MEMBER i64 from(i64 n, i64, int lane) { return n / 128 * (1024 * BITS) + (n & 64) * (8 * BITS) + lane * 4 * BITS; }
    static VT_MEMBER i64 quarter(i64) { return 128 * BITS; }
    static VT_MEMBER int to(int lane) { return lane * 16; }
    static VT_MEMBER void codes(unsigned (&raw)[4][4], const char* shared, int s, int lane, int) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            if constexpr (BITS == 4) {
                unsigned w = word_at(shared, t * 512 + lane * 16 + s * 4);
#pragma unroll
                for (int r = 0; r < 4; ++r) raw[t][r] = w >> 4 * r;
            } else {
                const uint2 w = *(const uint2*)(shared + (t * 2 + s / 2) * 512 + lane * 16 + s % 2 * 8);
                raw[t][0] = pick<0x1100>(w.x, 0), raw[t][1] = pick<0x3322>(w.x, 0);
                raw[t][2] = pick<0x1100>(w.y, 0), raw[t][3] = pick<0x3322>(w.y, 0);
            }
        }
    }
};

// Words along K: `order` is 1 for codes in sequence, 0 where a word's even ones lie in its low half (exllama's).
struct GptqWords {
    static constexpr int BITS = 4, BYTES = COLUMNS * CHUNK / 2;
    static constexpr bool NEIGHBOURS = true, ZEROS_ADDED = false;
    static VT_MEMBER int number(int column) { return column >> 3 | (column & 7) << 3; }
    static VT_MEMBER int scale(int g, int p, int) { return 8 * g + p; }
    static VT_MEMBER int nibble(int p) { return p; }
    static VT_MEMBER i64 from(i64 n, i64 columns, int lane) { return (lane / 16 * columns + n) * 4 + lane % 16 * 16; }
    static VT_MEMBER i64 quarter(i64 columns) { return columns * 8; }
    static VT_MEMBER int to(int lane) { return lane * 16; }
    static VT_MEMBER void codes(unsigned (&raw)[4][4], const char* shared, int s, int lane, int order) {
        int shift = (order ? 8 : 4) * (lane & 3);
        unsigned own = order ? 0xffffu : 0xffffffffu, moved = order ? 0xf0000u : 0u;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int t = 0; t < 4; t += 2) {
                uint4 q = words_at(shared, (2 * s + half) * 256 + (lane >> 2) * 32 + t * 8);
                const unsigned w[4] = {q.x >> shift, q.y >> shift, q.z >> shift, q.w >> shift};
#pragma unroll
                for (int p = 0; p < 4; ++p) raw[t + p / 2][2 * half + p % 2] = (w[p] & own) | (w[p] << 12 & moved);
            }
    }
};

// Words along N: `order` is 1 for AWQ's interleaved places, 0 for places in sequence.
struct AwqWords {
    static constexpr int BITS = 4, BYTES = COLUMNS * CHUNK / 2;
    static constexpr bool NEIGHBOURS = false, ZEROS_ADDED = false;
    static VT_MEMBER int place(int p, int order) { return order ? (p & 3) << 1 | p >> 2 : p; }
    static VT_MEMBER int number(int column, int order) {
        int c = column & 7;
        return column >> 3 | (order ? (c & 1) << 2 | c >> 1 : c) << 3;
    }
    static VT_MEMBER int scale(int g, int p, int order) { return 8 * g + place(p, order); }
    static VT_MEMBER int nibble(int p) { return p; }
    static VT_MEMBER int row(int k) { return (k ^ (k >> 2 & 1)) * 32; }  // the rows that lanes read meet in no bank
    static VT_MEMBER i64 from(i64 n, i64 columns, int lane) { return (lane / 2 * columns + n) / 2 + lane % 2 * 16; }
    static VT_MEMBER i64 quarter(i64 columns) { return columns * 8; }
    static VT_MEMBER int to(int lane) { return row(lane / 2) + lane % 2 * 16; }
    static VT_MEMBER void codes(unsigned (&raw)[4][4], const char* shared, int s, int lane, int) {
        int k = 16 * s + 2 * (lane & 3), column = lane >> 2 << 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned first = word_at(shared, row(k + 8 * half) + column), second = word_at(shared, row(k + 8 * half + 1) + column);
            const unsigned both[2] = {pick<0x5410>(first, second), pick<0x7632>(first, second)};
#pragma unroll
            for (int t = 0; t < 4; ++t)
#pragma unroll
                for (int r = 0; r < 2; ++r) raw[t][2 * half + r] = both[t / 2] >> (8 * (t & 1) + 4 * r);
        }
    }
};

template <class W> VT_FN int number_of(int column, int order) {
    if constexpr (W::BITS == 4 && !W::NEIGHBOURS && !W::ZEROS_ADDED) return W::number(column, order);
    else return W::number(column);
}
