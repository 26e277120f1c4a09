// Activations to ggml's blocks of eight-bit codes, where there are many.
//
// Blocks of 34, 36 and 292 bytes leave as they lie in memory, 16 bytes a lane: a warp puts together what it made in
// shared memory. Codes are sums with a large number whose last bits they then are: cut off from 2^15 + 1/2 on for halves
// away from zero, rounded about 1.5 * 2^23 for halves to even. Divisions by 127 and of 127 are a product and a step of
// correction, which for sizes of the middle were tried with every mantissa.
#pragma once
#include "early.cuh"
#include "ggml_blocks.cuh"
#include "ggml_codes.cuh"
#include "ggml_sizes.cuh"

#define STAGED_DEPTH 4  // vectors of 8 a lane, device/ggml.py

#ifdef __CUDACC__
VT_FN void warp_joins() { __syncwarp(); }
VT_FN float sum_cut(float a, float b) { return __fadd_rz(a, b); }
// 255 in the first byte where a is negative and in the second where b is.
VT_FN unsigned negative_bytes(float a, float b) {
    unsigned both;
    asm("prmt.b32 %0, %1, %2, 0x00fb;" : "=r"(both) : "r"(vt_bits(a)), "r"(vt_bits(b)));
    return both;
}
#else
static inline void warp_joins() { __shfl_xor_sync(0xffffffffu, 0, 1); }
static inline float sum_cut(float a, float b) {
    if (a != a) return vt_float(0x7fffffff);  // as on a GPU
    double sum = (double)a + (double)b;  // exact, or cut off far from where it matters
    float y = (float)sum;
    return (double)y > sum ? std::nextafter(y, 0.0f) : y;  // of sums above 0
}
static inline unsigned negative_bytes(float a, float b) { return (vt_bits(a) < 0 ? 255u : 0u) | (vt_bits(b) < 0 ? 0xff00u : 0u); }
#endif

// The largest size of eight as a float32's bits, which order like sizes; NaN is more than infinity.
template <bool BRAIN> VT_FN unsigned size_of_eight(const Raw<8>& raw, const float (&x)[8]) {
    if (BRAIN) {
        const uint4& w = raw.a;
        unsigned pair = larger_halves(larger_halves(w.x & 0x7fff7fffu, w.y & 0x7fff7fffu),
                                      larger_halves(w.z & 0x7fff7fffu, w.w & 0x7fff7fffu));
        return larger_of(pair << 16, pair & 0xffff0000u);
    }
    unsigned top = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) top = larger_of(top, (unsigned)vt_bits(x[i]) & 0x7fffffffu);
    return top;
}

// Four numbers under 128 to the nearest integers, halves away from zero.
VT_FN unsigned four_away(float a, float b, float c, float d) {
    const float x[4] = {a, b, c, d};
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = (unsigned)vt_bits(sum_cut(vt_abs(x[i]), 32768.5f));
    const unsigned sizes = permute(permute(w[0], w[1], 0x5151u), permute(w[2], w[3], 0x5151u), 0x5410u);
    const unsigned minus = sizes & permute(negative_bytes(a, b), negative_bytes(c, d), 0x5410u);
    return (sizes - minus - minus + 0x80808080u) ^ 0x80808080u;  // no byte borrows from the next
}

// The same, halves to even.
VT_FN unsigned four_even(float a, float b, float c, float d) {
    const float x[4] = {a, b, c, d};
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = (unsigned)vt_bits(x[i] + 12582912.0f);
    return permute(permute(w[0], w[1], 0x4040u), permute(w[2], w[3], 0x4040u), 0x5410u);
}

struct Words { unsigned low, high; };

// d and the codes of a lane's share of a block of 32, of whose sizes `top` is the largest.
VT_FN Words words_of_32(const float (&x)[8], unsigned top, float& d) {
    float inverse;
    if (of_the_middle(top)) {
        d = over_127(vt_float((int)top));
        inverse = near_reciprocal(d);
    } else {
        d = vt_float((int)top) / 127.0f;
        inverse = 1.0f / d;
        if (!(vt_abs(inverse) < VT_INF)) inverse = 0.0f;
    }
    float t[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) t[i] = x[i] * inverse;
    Words made = {four_away(t[0], t[1], t[2], t[3]), four_away(t[4], t[5], t[6], t[7])};
    if (inverse == 0.0f) made = {0u, 0u};  // numbers, infinities and NaN alike
    return made;
}

// A lane's share of a block of 256.
template <bool BRAIN> VT_FN Words words_of_256(const float (&x)[8], const Raw<8>& raw, float& d) {
    const unsigned size = size_of_eight<BRAIN>(raw, x), top = largest_of_warp(size);
    if (!of_the_middle(top)) {
        const Codes c = codes_256(x);
        d = c.d;
        return {packed4(c.code[0], c.code[1], c.code[2], c.code[3]), packed4(c.code[4], c.code[5], c.code[6], c.code[7])};
    }
    const float most = vt_float((int)top);
    float extremum = most;
#pragma unroll
    for (int i = 7; i >= 0; --i)
        if (vt_abs(x[i]) == most) extremum = x[i];
    extremum = __shfl_sync(0xffffffffu, extremum, first_of_warp(size == top));
    const float inverse = copysignf(of_127(most), -extremum);
    d = copysignf(near_reciprocal(vt_abs(inverse)), -extremum);
    float t[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) t[i] = inverse * x[i];
    return {four_even(t[0], t[1], t[2], t[3]), four_even(t[4], t[5], t[6], t[7])};
}

VT_FN int sum_of(const Words& codes) { return dot4(codes.high, 0x01010101u, dot4(codes.low, 0x01010101u, 0)); }

enum { OF_34, OF_36, OF_292 };  // bytes of a block

template <int FORM> struct Staged {
    static constexpr int WORDS = FORM == OF_34 ? 68 : FORM == OF_36 ? 72 : 73;  // of 256 values
};

// A lane's words into those of 256 values.
template <int FORM, bool BRAIN> VT_FN void stage(unsigned* to, const Raw<8>& raw, int kind) {
    const int lane = threadIdx.x & 31, part = lane & 3;
    float v[8], d;
    widen(v, raw, BRAIN ? (int)BF16 : kind);
    if (FORM == OF_292) {
        const Words made = words_of_256<BRAIN>(v, raw, d);
        int total = sum_of(made);
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        const int other = __shfl_xor_sync(0xffffffffu, total, 2);
        if (lane == 0) to[0] = (unsigned)vt_bits(d);
        to[1 + 2 * lane] = made.low;
        to[2 + 2 * lane] = made.high;
        if (part == 0) to[65 + lane / 4] = (total & 0xffff) | (unsigned)other << 16;
        return;
    }
    unsigned top = size_of_eight<BRAIN>(raw, v);
#pragma unroll
    for (int m = 1; m <= 2; m *= 2) top = larger_of(top, __shfl_xor_sync(0xffffffffu, top, m));
    const Words made = words_of_32(v, top, d);
    if (FORM == OF_36) {
        int total = sum_of(made);
#pragma unroll
        for (int m = 1; m <= 2; m *= 2) total += __shfl_xor_sync(0xffffffffu, total, m);
        to += 9 * (lane / 4);
        if (part == 0) to[0] = f16_of(d) | f16_of_sum(d, total) << 16;
        to[1 + 2 * part] = made.low;
        to[2 + 2 * part] = made.high;
        return;
    }
    // Two blocks are 17 words; those of the first one lie across words, half of the ninth word is the second one's.
    const unsigned half = f16_of(d), other = __shfl_sync(0xffffffffu, made.high, lane - 1), before = part == 0 ? half << 16 : other;
    const bool second = (lane & 4) != 0;
    to += 17 * (lane / 8) + 2 * part + (second ? 9 : 0);
    to[0] = second ? made.low : permute(before, made.low, 0x5432u);
    to[1] = second ? made.high : permute(made.low, made.high, 0x5432u);
    if (second && part == 0) to[-1] = permute(other, before, 0x7632u);
}

// `count` vectors of 8 without gaps; their blocks are of whole 16 bytes in all.
template <int FORM, bool BRAIN> VT_FN void staged_blocks(unsigned count, const void* x, int kind, u8* out) {
    constexpr int WORDS = Staged<FORM>::WORDS, CHUNKS = STAGED_DEPTH * WORDS / 4;
    __shared__ uint4 staged[8 * CHUNKS];
    const unsigned lane = threadIdx.x & 31, warp = blockIdx.x * 8 + (threadIdx.x >> 5), first = warp * (32 * STAGED_DEPTH) + lane;
    uint4* mine = staged + (threadIdx.x >> 5) * CHUNKS;
    Raw<8> raw[STAGED_DEPTH];
    after_others();
#pragma unroll
    for (int d = 0; d < STAGED_DEPTH; ++d) {
        raw[d] = {};
        if (first + 32 * d < count) raw[d] = fetch<8>(x, (i64)(first + 32 * d) * 8, BRAIN ? (int)BF16 : kind);
    }
    others_may_start();
#pragma unroll
    for (int d = 0; d < STAGED_DEPTH; ++d) stage<FORM, BRAIN>((unsigned*)mine + d * WORDS, raw[d], kind);
    warp_joins();
    const i64 chunks = (i64)count * WORDS / 128;
    uint4* to = (uint4*)out + (i64)warp * CHUNKS;
    const i64 left = chunks - (i64)warp * CHUNKS;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += 32)
        if ((c + 32 <= CHUNKS || c + lane < CHUNKS) && c + lane < left) to[c + lane] = mine[c + lane];
}

#define STAGED(NAME, FORM)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) NAME##_bf16_early(i64 count, const void* x, i64, u8* out) {     \
        staged_blocks<FORM, true>((unsigned)count, x, BF16, out);                                                     \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) NAME##_early(i64 count, const void* x, i64 kind, u8* out) {     \
        staged_blocks<FORM, false>((unsigned)count, x, (int)kind, out);                                               \
    }
STAGED(ggml_staged_34, OF_34)
STAGED(ggml_staged_36, OF_36)
STAGED(ggml_staged_292, OF_292)
