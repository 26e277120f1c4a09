// Activations: gated products of two halves, ReLU, the soft cap.
//
// The ladder:
// 1. *_v1: an element a thread, any width and address.
// 2. *_v8: 16-byte loads and stores, eight elements a thread; memory-bound but for the functions themselves.
// 3. SiLU into bfloat16: MIRROR's polynomial costs more time than the bytes. The fast hardware functions are within
//    NEAR float32 ulps of it, so their rounding to bfloat16 is the same unless the value lies that close to the middle
//    of two neighbours; then, about once in 800, the polynomial decides. The bytes are the polynomial's, always.
#include "rows.cuh"

enum { ROUND_ACT = 1, ROUND_ALL = 2 };  // vLLM's CUDA op and its Python form; 0: one rounding

#ifdef __CUDACC__
VT_FN float fast_exp2(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
VT_FN float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
VT_FN float fast_exp2(float x) { return std::exp2(x); }
VT_FN float fast_reciprocal(float x) { return 1.0f / x; }
#endif

// Relative error for |x| < 16, in 2^-24: the exponent's rounding 11.1 (|x| log2(e) < 32) and that of log2(e) 3.5, ex2
// 4, the sum 1, rcp 2, the product 1; one more for a product after it, and 3 for MIRROR's own: 26.6 in all.
#define NEAR 40
VT_FN float fast_silu(float x) { return x * fast_reciprocal(1.0f + fast_exp2(x * -1.442695f)); }

// Whether a float32 within NEAR ulps of y may round to another bfloat16 than y does.
VT_FN bool near_the_middle(float y) { return ((unsigned)(vt_bits(y) + 0x8000 + NEAR) & 0xffffu) <= 2 * NEAR; }

VT_FN float silu_product(float gate, float up, int kind, int variant) {
    float act = vt_silu(gate);
    return (variant ? through(act, kind) : act) * up;
}

template <int V> VT_FN void silu_products(float (&out)[V], const float (&g)[V], const float (&u)[V], int kind, int variant) {
    unsigned unsure = (1u << V) - 1;
    if (kind == BF16) {
        unsure = 0;
#pragma unroll
        for (int j = 0; j < V; ++j) {
            float act = fast_silu(g[j]);
            out[j] = (variant ? through(act, BF16) : act) * u[j];
            bool sure = vt_abs(g[j]) < 16.0f && !near_the_middle(variant ? act : out[j]);
            unsure |= (unsigned)!sure << j;
        }
    }
#pragma unroll
    for (int j = 0; j < V; ++j)
        if (unsure >> j & 1) out[j] = silu_product(g[j], u[j], kind, variant);
}

struct Silu {
    int kind, variant;
    template <int V> VT_MEMBER void operator()(float (&out)[V], const float (&g)[V], const float (&u)[V]) const {
        silu_products(out, g, u, kind, variant);
    }
};

// An act(gate) * up of single elements, applied to V.
struct Clamped {
    int kind, variant;
    float limit, alpha, beta;

    VT_MEMBER float point(float x) const { return variant == ROUND_ALL ? through(x, kind) : x; }

    template <int V> VT_MEMBER void operator()(float (&out)[V], const float (&g)[V], const float (&u)[V]) const {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            float gate = point(vt_minimum(g[j], limit));
            float up = point(vt_minimum(vt_maximum(u[j], -limit), limit));
            float act = gate * point(vt_sigmoid(point(alpha * gate)));
            if (variant) act = through(act, kind);
            out[j] = act * point(up + beta);
        }
    }
};

struct Gelu {
    int kind, variant;
    template <int V> VT_MEMBER void operator()(float (&out)[V], const float (&g)[V], const float (&u)[V]) const {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            float cube = ((0.044715f * g[j]) * g[j]) * g[j];
            float t = vt_tanh(0.7978845608028654f * (g[j] + cube));
            float act = (0.5f * g[j]) * (1.0f + t);
            out[j] = (variant ? through(act, kind) : act) * u[j];
        }
    }
};

#define ROWS i64 rows, i64 width, i64 chunks

template <int V, class F>
VT_FN void gated(ROWS, const void* gate, const void* up, i64 stride, int kind, void* out, const F& f) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    Raw<V> a = fetch<V>(gate, at.row * stride + at.column, kind), b = fetch<V>(up, at.row * stride + at.column, kind);
    float g[V], u[V], y[V];
    widen(g, a, kind);
    widen(u, b, kind);
    f(y, g, u);
    store(out, at.row * width + at.column, y, kind);
}

#define GATED(V)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) silu_v##V(                                                  \
        ROWS, const void* gate, const void* up, i64 stride, i64 kind, void* out, i64 variant) {                   \
        gated<V>(rows, width, chunks, gate, up, stride, (int)kind, out, Silu{(int)kind, (int)variant});           \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) silu_clamp_v##V(                                            \
        ROWS, const void* gate, const void* up, i64 stride, i64 kind, void* out, i64 variant, float limit,        \
        float alpha, float beta) {                                                                                \
        gated<V>(rows, width, chunks, gate, up, stride, (int)kind, out,                                           \
                 Clamped{(int)kind, (int)variant, limit, alpha, beta});                                           \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) gelu_v##V(                                                  \
        ROWS, const void* gate, const void* up, i64 stride, i64 kind, void* out, i64 variant) {                   \
        gated<V>(rows, width, chunks, gate, up, stride, (int)kind, out, Gelu{(int)kind, (int)variant});           \
    }
GATED(8)
GATED(1)

template <int V, class F> VT_FN void each(ROWS, const void* x, i64 kind, void* out, F&& f) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    float v[V];
    load(v, x, at.row * width + at.column, (int)kind);
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = f(v[j]);
    store(out, at.row * width + at.column, v, (int)kind);
}

template <int V> VT_FN void soft_cap(ROWS, const void* x, i64 kind, void* out, i64 variant, float cap) {
    auto point = [&](float y) { return variant ? through(y, (int)kind) : y; };
    each<V>(rows, width, chunks, x, kind, out, [&](float y) { return point(vt_tanh(point(y / cap))) * cap; });
}

#define UNARY(V)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) relu_v##V(ROWS, const void* x, i64 kind, void* out) {       \
        each<V>(rows, width, chunks, x, kind, out, [](float y) { return y > 0.0f ? y : 0.0f; });                  \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) soft_cap_v##V(                                              \
        ROWS, const void* x, i64 kind, void* out, i64 variant, float cap) {                                       \
        soft_cap<V>(rows, width, chunks, x, kind, out, variant, cap);                                             \
    }
UNARY(8)
UNARY(1)
