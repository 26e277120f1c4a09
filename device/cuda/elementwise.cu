// Sums, scalings, casts and the embedding gather.
//
// The ladder:
// 1. *_v1: an element a thread, any width, stride and address.
// 2. *_v8: 16-byte loads and stores, eight elements a thread.
#include "rows.cuh"

#define ROWS i64 rows, i64 width, i64 chunks

// out = f(v, row, column) for every group of V elements of x.
template <int V, class F>
VT_FN void each(ROWS, const void* x, i64 stride, i64 kind, void* out, i64 out_kind, F&& f) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    float v[V];
    Raw<V> raw = fetch<V>(x, at.row * stride + at.column, (int)kind);
    f(v, raw, at);
    store(out, at.row * width + at.column, v, (int)out_kind);
}

// A float32 NaN keeps its sign and the upper bits of its payload, which the hardware's conversion drops.
VT_FN unsigned cast_to_bf16(float x) {
    if (x != x) return (unsigned)vt_bits(x) >> 16 | 0x40u;
    return narrow_bf16(x, 0.0f) & 0xffffu;
}

VT_FN Raw<8> cast_to_bf16(const float (&x)[8]) {
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = cast_to_bf16(x[2 * i]) | cast_to_bf16(x[2 * i + 1]) << 16;
    return {{w[0], w[1], w[2], w[3]}, {0, 0, 0, 0}};
}
VT_FN Raw<1> cast_to_bf16(const float (&x)[1]) { return {cast_to_bf16(x[0])}; }

template <int V> VT_FN void cast_bf16(ROWS, const void* x, i64 stride, void* out) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    float v[V];
    load(v, x, at.row * stride + at.column, F32);
    put(out, at.row * width + at.column, cast_to_bf16(v), BF16);
}

// out[t] = table[ids[t]]; a bad id gives a row of NaN, and `first_bad` takes the lowest such t.
template <int V>
VT_FN void embedding(ROWS, const void* table, i64 kind, i64 entries, const void* ids, i64 wide_ids, void* out,
                     i64 out_kind, i64* first_bad) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    i64 id = wide_ids ? ((const i64*)ids)[at.row] : (i64)((const int*)ids)[at.row];
    i64 to = at.row * width + at.column;
    if (id < 0 || id >= entries) {
        float v[V];
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = VT_NAN;
        store(out, to, v, (int)out_kind);
        if (first_bad != nullptr && at.column == 0) atomicMin(first_bad, at.row);
        return;
    }
    Raw<V> raw = fetch<V>(table, id * width + at.column, (int)kind);
    if (kind == out_kind) {
        put(out, to, raw, (int)kind);
    } else {
        float v[V];
        widen(v, raw, (int)kind);
        store(out, to, v, (int)out_kind);
    }
}

template <int V>
VT_FN void add(ROWS, const void* a, int kind, const void* b, i64 b_stride, int b_kind, void* out) {
    each<V>(rows, width, chunks, a, width, kind, out, kind, [&](float(&v)[V], const Raw<V>& raw, const Place& at) {
        float w[V];
        Raw<V> other = fetch<V>(b, at.row * b_stride + at.column, b_kind);
        widen(v, raw, kind);
        widen(w, other, b_kind);
        for (int j = 0; j < V; ++j) v[j] += w[j];
    });
}

#define ELEMENTWISE(V)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) add_v##V(                                                   \
        ROWS, const void* a, i64 kind, const void* b, i64 b_stride, i64 b_kind, void* out) {                      \
        if (kind == BF16 && b_kind == BF16) /* no branch between a load and its use */                            \
            return add<V>(rows, width, chunks, a, BF16, b, b_stride, BF16, out);                                  \
        add<V>(rows, width, chunks, a, (int)kind, b, b_stride, (int)b_kind, out);                                 \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) mul_col_vec_v##V(                                           \
        ROWS, const void* x, i64 stride, const void* col, void* out) {                                            \
        each<V>(rows, width, chunks, x, stride, F32, out, F32,                                                    \
                [&](float(&v)[V], const Raw<V>& raw, const Place& at) {                                           \
                    float w[V];                                                                                   \
                    load(w, col, at.column, F32);                                                                 \
                    widen(v, raw, F32);                                                                           \
                    for (int j = 0; j < V; ++j) v[j] *= w[j];                                                     \
                });                                                                                               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) mul_scalar_v##V(                                            \
        ROWS, const void* x, i64 kind, void* out, float scale) {                                                  \
        each<V>(rows, width, chunks, x, width, kind, out, kind,                                                   \
                [&](float(&v)[V], const Raw<V>& raw, const Place&) {                                              \
                    widen(v, raw, (int)kind);                                                                     \
                    for (int j = 0; j < V; ++j) v[j] *= scale;                                                    \
                });                                                                                               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) cast_bf16_v##V(ROWS, const void* x, i64 stride, void* out) { \
        cast_bf16<V>(rows, width, chunks, x, stride, out);                                                        \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) cast_f32_v##V(ROWS, const void* x, i64 stride, void* out) { \
        each<V>(rows, width, chunks, x, stride, BF16, out, F32,                                                   \
                [&](float(&v)[V], const Raw<V>& raw, const Place&) { widen(v, raw, BF16); });                     \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) embedding_v##V(                                             \
        ROWS, const void* table, i64 kind, i64 entries, const void* ids, i64 wide_ids, void* out, i64 out_kind,   \
        i64* first_bad) {                                                                                         \
        embedding<V>(rows, width, chunks, table, kind, entries, ids, wide_ids, out, out_kind, first_bad);         \
    }
ELEMENTWISE(8)
ELEMENTWISE(1)

// *at = value: makes scratch ready inside the stream's order.
extern "C" __global__ void set_i64(i64* at, i64 value) { *at = value; }
