// Activations: gated products of two halves, ReLU, the soft cap.
//
// The ladder:
// 1. *_v1: an element a thread, any width and address.
// 2. *_v8: 16-byte loads and stores, eight elements a thread; memory-bound but for the functions themselves.
// 3. SiLU and GELU into bfloat16 take the hardware's fast functions wherever they give the polynomial's bytes (fast.cuh).
// 4. Gated products: two groups a thread, so that four loads are under way before the arithmetic starts.
// 5. *_bf16_v8_early: group after group by guess and check (gated_guess.cuh), what is open at the end: GELU of 256 rows of
//    17408 takes 6.8 us instead of 9.5, of 8192 rows little more than their bytes do.
#include "gated_guess.cuh"

enum { ROUND_ACT = 1, ROUND_ALL = 2 };  // vLLM's CUDA op and its Python form; 0: one rounding

struct Silu {
    int kind, variant;
    template <int V> VT_MEMBER void operator()(float (&out)[V], const float (&g)[V], const float (&u)[V]) const {
        gate_products<true>(out, g, u, variant ? kind : F32, kind);
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
        gelu_products(out, g, u, variant ? kind : F32, kind);
    }
};

#define ROWS i64 rows, i64 width, i64 chunks

#define DEPTH 2  // groups a thread, device/activation.py

template <int V, class F>
VT_FN void gated(ROWS, const void* gate, const void* up, i64 stride, int kind, void* out, const F& f) {
    Place at[DEPTH];
    Raw<V> a[DEPTH], b[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        at[d] = place<V>(rows, width, chunks, DEPTH, d);
        if (!at[d].inside) continue;
        a[d] = fetch<V>(gate, at[d].row * stride + at[d].column, kind);
        b[d] = fetch<V>(up, at[d].row * stride + at[d].column, kind);
    }
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        if (!at[d].inside) continue;
        float g[V], u[V], y[V];
        widen(g, a[d], kind);
        widen(u, b[d], kind);
        f(y, g, u);
        store(out, at[d].row * width + at[d].column, y, kind);
    }
}

// NAME_v8 knows that it has 16-bit elements, NAME_f32_v8 that it has not: half the registers of raw data.
#define GATED(NAME, V, ASSUMED)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) silu_##NAME(                                                \
        ROWS, const void* gate, const void* up, i64 stride, i64 kind, void* out, i64 variant) {                   \
        VT_ASSUME(ASSUMED);                                                                                       \
        gated<V>(rows, width, chunks, gate, up, stride, (int)kind, out, Silu{(int)kind, (int)variant});           \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) silu_clamp_##NAME(                                          \
        ROWS, const void* gate, const void* up, i64 stride, i64 kind, void* out, i64 variant, float limit,        \
        float alpha, float beta) {                                                                                \
        VT_ASSUME(ASSUMED);                                                                                       \
        gated<V>(rows, width, chunks, gate, up, stride, (int)kind, out,                                           \
                 Clamped{(int)kind, (int)variant, limit, alpha, beta});                                           \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) gelu_##NAME(                                                \
        ROWS, const void* gate, const void* up, i64 stride, i64 kind, void* out, i64 variant) {                   \
        VT_ASSUME(ASSUMED);                                                                                       \
        gated<V>(rows, width, chunks, gate, up, stride, (int)kind, out, Gelu{(int)kind, (int)variant});           \
    }
GATED(v8, 8, (int)kind != F32)
GATED(f32_v8, 8, (int)kind == F32)
GATED(v1, 1, true)

#define GUESSED(NAME, F, ROUNDED)                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 10) NAME##_v8_early(                                        \
        ROWS, const void* gate, const void* up, i64 stride, i64 kind, void* out, i64 variant) {                   \
        guess_gated<F, DEPTH, ROUNDED>(rows, width, chunks, gate, up, stride, out);                               \
    }
GUESSED(silu_bf16, SiluGuess, false)
GUESSED(silu_rounded_bf16, SiluGuess, true)
GUESSED(gelu_bf16, GeluGuess, false)
GUESSED(gelu_rounded_bf16, GeluGuess, true)

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
