// What tiles of the convolution are made of: neighbouring bfloat16, taps of several channels, the sequence of a token.
#pragma once
#include "conv.cuh"
#include "mma.cuh"

// The lanes in which `yes` holds, as bits; all lanes come here.
#ifdef __CUDACC__
VT_FN unsigned lanes_where(bool yes) { return __ballot_sync(0xffffffffu, yes); }
VT_FN int bits_of(unsigned bits) { return __popc(bits); }
VT_FN int lowest_bit(unsigned long long bits) { return __ffsll((long long)bits) - 1; }
#else
VT_FN unsigned lanes_where(bool yes) {
    unsigned bits = yes ? 1u << (threadIdx.x & 31) : 0u;
    for (int m = 16; m >= 1; m >>= 1) bits |= __shfl_xor_sync(0xffffffffu, bits, m);
    return bits;
}
VT_FN int bits_of(unsigned bits) { return __builtin_popcount(bits); }
VT_FN int lowest_bit(unsigned long long bits) { return __builtin_ctzll(bits); }
#endif

// The last sequence that begins at `token` or before. A warp looks at 32 places at once.
VT_FN int sequence_of(const int* starts, int count, int token) {
    int low = 0;
    while (count > 1) {
        const int step = (count + 31) >> 5, at = (threadIdx.x & 31) * step;
        const unsigned before = lanes_where(at < count && starts[low + at] <= token);
        const int skip = before ? (bits_of(before) - 1) * step : 0;
        low += skip;
        count = count - skip < step ? count - skip : step;
    }
    return low;
}

// V neighbouring bfloat16 as they lie in memory.
template <int V> struct alignas(2 * V) Words { unsigned w[V / 2]; };

template <int V> VT_FN void widen_words(float (&x)[V], const Words<V>& raw) {
#pragma unroll
    for (int p = 0; p < V / 2; ++p) {
        x[2 * p] = vt_float((int)(raw.w[p] << 16));
        x[2 * p + 1] = vt_float((int)(raw.w[p] & 0xffff0000u));
    }
}
// The compiler shall not make a value again wherever it is used.
#ifdef __CUDACC__
VT_FN void made_once(float& x) { asm volatile("" : "+f"(x)); }
#else
VT_FN void made_once(float&) {}
#endif
template <int V> VT_FN Words<V> narrow_words(const float (&x)[V]) {
    Words<V> raw;
#pragma unroll
    for (int p = 0; p < V / 2; ++p) raw.w[p] = narrow_bf16(x[2 * p], x[2 * p + 1]);
    return raw;
}

// N elements of any storage dtype, four at a time.
template <int N> VT_FN void load_fours(float (&x)[N], const void* base, i64 at, int kind) {
    if (kind == BF16) {
        Words<4> raw[N / 4];
#pragma unroll
        for (int i = 0; i < N / 4; ++i) raw[i] = ((const Words<4>*)((const unsigned short*)base + at))[i];
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            x[i] = vt_float((int)(raw[i / 4].w[i / 2 % 2] << 16));
            x[i + 1] = vt_float((int)(raw[i / 4].w[i / 2 % 2] & 0xffff0000u));
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        if (kind == F32) {
            const uint4 raw = *(const uint4*)((const float*)base + at + i);
            x[i] = vt_float((int)raw.x), x[i + 1] = vt_float((int)raw.y);
            x[i + 2] = vt_float((int)raw.z), x[i + 3] = vt_float((int)raw.w);
        } else {
            const Words<4> raw = *(const Words<4>*)((const unsigned short*)base + at + i);
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                x[i + 2 * p] = widen_f16(raw.w[p] & 0xffffu);
                x[i + 2 * p + 1] = widen_f16(raw.w[p] >> 16);
            }
        }
    }
}
template <int N> VT_FN void store_fours(void* base, i64 at, const float (&x)[N], int kind) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        if (kind == F32) {
            *(uint4*)((float*)base + at + i) = {(unsigned)vt_bits(x[i]), (unsigned)vt_bits(x[i + 1]),
                                                (unsigned)vt_bits(x[i + 2]), (unsigned)vt_bits(x[i + 3])};
        } else {
            uint2 raw;
            raw.x = kind == BF16 ? narrow_bf16(x[i], x[i + 1]) : narrow_f16(x[i], x[i + 1]);
            raw.y = kind == BF16 ? narrow_bf16(x[i + 2], x[i + 3]) : narrow_f16(x[i + 2], x[i + 3]);
            *(uint2*)((unsigned short*)base + at + i) = raw;
        }
    }
}

// A tap of V channels, and what it adds to their sums.
template <int V, int K, int HOW> struct Line;
template <int V, int K> struct Line<V, K, PLAIN> {
    struct Filter { float w[V * K]; };
    float x[V];

    static VT_MEMBER Filter filter(const float (&w)[V * K]) {
        Filter f;
#pragma unroll
        for (int i = 0; i < V * K; ++i) f.w[i] = w[i];
        return f;
    }
    VT_MEMBER void take(const Words<V>& raw) {
        widen_words(x, raw);
#pragma unroll
        for (int v = 0; v < V; ++v) made_once(x[v]);
    }
    VT_MEMBER void take(const float (&y)[V]) {
#pragma unroll
        for (int v = 0; v < V; ++v) x[v] = y[v];
    }
    VT_MEMBER void add(float (&total)[V], const Filter& f, int j) const {
#pragma unroll
        for (int v = 0; v < V; ++v) total[v] = vt_fma(f.w[v * K + j], x[v], total[v]);
    }
};

// Pairs of bfloat16, whose products come in pairs.
template <int V, int K> struct Line<V, K, ROUNDED> {
    struct Filter { unsigned w[V / 2 * K]; };
    Words<V> x;

    static VT_MEMBER Filter filter(const float (&w)[V * K]) {
        Filter f;
#pragma unroll
        for (int p = 0; p < V / 2; ++p)
#pragma unroll
            for (int j = 0; j < K; ++j) f.w[p * K + j] = narrow_bf16(w[2 * p * K + j], w[(2 * p + 1) * K + j]);
        return f;
    }
    VT_MEMBER void take(const Words<V>& raw) { x = raw; }
    VT_MEMBER void take(const float (&y)[V]) { x = narrow_words(y); }
    VT_MEMBER void add(float (&total)[V], const Filter& f, int j) const {
#pragma unroll
        for (int p = 0; p < V / 2; ++p) {
            const unsigned products = brain_products(f.w[p * K + j], x.w[p]);
            total[2 * p] += vt_float((int)(products << 16));
            total[2 * p + 1] += vt_float((int)(products & 0xffff0000u));
        }
    }
};
