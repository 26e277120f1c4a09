// Storage dtypes in device memory: loads that widen to float32, stores that round once to nearest even.
//
// A kernel takes its operands' dtypes as numbers at run time. The branch on such a number is the same for all threads,
// and only the second half of a float32 load hangs on it, so it costs next to nothing in memory-bound code and spares
// 27 instantiations an op. V = 8 elements move as 16-byte accesses (two for float32), V = 1 one by one.
#pragma once
#include "vt_math.cuh"

#ifdef __CUDACC__
#define VT_MEMBER __device__ __forceinline__
#define VT_ASSUME(condition) __builtin_assume(condition)
#define VT_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#else
#define VT_MEMBER inline
#define VT_ASSUME(condition)
#include "emulation.hpp"  // the same kernels on a host: parity/emulation.hpp
#endif

typedef long long i64;

enum { F32 = 0, BF16 = 1, F16 = 2 };  // device/launch.py: KINDS

VT_FN int item_size(int kind) { return kind == F32 ? 4 : 2; }

#ifdef __CUDACC__
VT_FN float widen_f16(unsigned bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
    return x;
}
VT_FN unsigned narrow_bf16(float lo, float hi) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}
VT_FN unsigned narrow_f16(float lo, float hi) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}
#endif

// 16 bytes on their way from global into shared memory, without a register; all are there after `copies_arrive`, for
// the thread that sent for them.
#ifdef __CUDACC__
VT_FN void copy_async(void* shared, const void* global) {
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
VT_FN void copies_arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

VT_FN float widen_bf16(unsigned bits) { return vt_float((int)(bits << 16)); }

// x after a store to `kind` and a load: one rounding point.
VT_FN float through(float x, int kind) {
    if (kind == BF16) return widen_bf16(narrow_bf16(x, 0.0f) & 0xffffu);
    if (kind == F16) return widen_f16(narrow_f16(x, 0.0f) & 0xffffu);
    return x;
}

// V elements as they lie in memory: loads can all be under way before the first is looked at.
template <int V> struct Raw;
template <> struct Raw<8> { uint4 a, b; };
template <> struct Raw<1> { unsigned bits; };

template <int V> VT_FN Raw<V> fetch(const void* base, i64 at, int kind) {
    Raw<V> raw;
    if constexpr (V == 8) {
        const uint4* p = (const uint4*)((const char*)base + at * item_size(kind));
        raw.a = p[0];
        raw.b = raw.a;
        if (kind == F32) raw.b = p[1];
    } else if (kind == F32) {
        raw.bits = ((const unsigned*)base)[at];
    } else {
        raw.bits = ((const unsigned short*)base)[at];
    }
    return raw;
}

VT_FN void widen(float (&x)[8], const Raw<8>& raw, int kind) {
    const unsigned w[8] = {raw.a.x, raw.a.y, raw.a.z, raw.a.w, raw.b.x, raw.b.y, raw.b.z, raw.b.w};
    if (kind == F32) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = vt_float((int)w[i]);
    } else if (kind == BF16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = vt_float((int)(w[i] << 16));
            x[2 * i + 1] = vt_float((int)(w[i] & 0xffff0000u));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = widen_f16(w[i] & 0xffffu);
            x[2 * i + 1] = widen_f16(w[i] >> 16);
        }
    }
}

VT_FN void widen(float (&x)[1], const Raw<1>& raw, int kind) {
    x[0] = kind == F32 ? vt_float((int)raw.bits) : kind == BF16 ? widen_bf16(raw.bits) : widen_f16(raw.bits);
}

template <int V> VT_FN void load(float (&x)[V], const void* base, i64 at, int kind) {
    widen(x, fetch<V>(base, at, kind), kind);
}

// x as `kind`: what `store` writes.
VT_FN Raw<8> narrow(const float (&x)[8], int kind) {
    unsigned w[8];
    if (kind == F32) {
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = (unsigned)vt_bits(x[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            w[i] = kind == BF16 ? narrow_bf16(x[2 * i], x[2 * i + 1]) : narrow_f16(x[2 * i], x[2 * i + 1]);
            w[i + 4] = 0;
        }
    }
    return {{w[0], w[1], w[2], w[3]}, {w[4], w[5], w[6], w[7]}};
}

VT_FN Raw<1> narrow(const float (&x)[1], int kind) {
    if (kind == F32) return {(unsigned)vt_bits(x[0])};
    return {(kind == BF16 ? narrow_bf16(x[0], 0.0f) : narrow_f16(x[0], 0.0f)) & 0xffffu};
}

VT_FN void put(void* base, i64 at, const Raw<8>& raw, int kind) {
    uint4* p = (uint4*)((char*)base + at * item_size(kind));
    p[0] = raw.a;
    if (kind == F32) p[1] = raw.b;
}

VT_FN void put(void* base, i64 at, const Raw<1>& raw, int kind) {
    if (kind == F32) ((unsigned*)base)[at] = raw.bits;
    else ((unsigned short*)base)[at] = (unsigned short)raw.bits;
}

template <int V> VT_FN void store(void* base, i64 at, const float (&x)[V], int kind) { put(base, at, narrow(x, kind), kind); }
