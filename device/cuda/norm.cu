// Norms over rows; every statistic is a sum in the order of tree.cuh.
//
// The ladder:
// 1. *_v1, *_v8: a block of 256 threads a row of any width, in three passes; V elements an access.
// 2. *_rows: a row of at most 256 elements in the registers of 1, 2, 4 ... 32 lanes.
// 2a. *_two, *_four: many of them, that many rows a team: fewer lanes find roots, more loads are under way.
// 3. *_block1, *_block4: a block a row, up to 1 or 4 loads of 16 bytes a thread under way at once; the row stays in
//    registers between its two uses, so it is read once.
// 4. *_few4: for few rows, whose latency nothing else hides: the weights are sent for together with the row.
// 5. *_bf16_*: the same, knowing that everything is bfloat16: branches on dtypes between a load and its use cost
//    latency (10 to 40 %).
// Tried and left: the order strided_tree(256), whose partials do not lie 16 bytes together, so that every term crossed
// over through shared memory: 65 us for 8192 x 5120.
#include "fast.cuh"
#include "rowwise.cuh"

enum { GEMMA = 1, NATIVE = 2 };

struct RmsNorm {
    static constexpr bool CENTRED = false;
    const void *x, *weight, *residual;
    void *residual_out, *out;
    i64 x_stride, residual_stride, width;
    int kind, weight_kind, residual_kind, flags;

    VT_MEMBER float count(i64 width) const { return (float)width; }

    template <int V> VT_MEMBER Operands<V> read(i64 row, i64 at) const {
        Operands<V> raw;
        raw.x = fetch<V>(x, row * x_stride + at, kind);
        raw.other = raw.x;
        if (residual != nullptr) raw.other = fetch<V>(residual, row * residual_stride + at, residual_kind);
        return raw;
    }

    // x, or x + residual, rounded to the residual's dtype unless vLLM's native form is asked for. The rounded sum is
    // the new residual and, where it is what is normalised, takes the raw residual's place.
    template <int V> VT_MEMBER void value(float (&v)[V], i64 row, i64 at, Operands<V>& raw) const {
        if (residual == nullptr) return widen(v, raw.x, kind);
        sum(v, raw);
        Raw<V> rounded = narrow(v, residual_kind);
        put(residual_out, row * width + at, rounded, residual_kind);
        if (flags & NATIVE) return;
        raw.other = rounded;
        widen(v, rounded, residual_kind);
    }

    template <int V> VT_MEMBER void again(float (&v)[V], const Operands<V>& raw) const {
        if (residual == nullptr) widen(v, raw.x, kind);
        else if (flags & NATIVE) sum(v, raw);
        else widen(v, raw.other, residual_kind);
    }

    template <int V> VT_MEMBER void sum(float (&v)[V], const Operands<V>& raw) const {
        float r[V];
        widen(v, raw.x, kind);
        widen(r, raw.other, residual_kind);
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] += r[j];
    }

    template <int V> VT_MEMBER Weights<V> weights(i64 at) const {
        Weights<V> raw;
        raw.scale = fetch<V>(weight, at, weight_kind);
        return raw;
    }

    template <int V>
    VT_MEMBER void finish(float (&v)[V], i64 row, i64 at, const Operands<V>&, const Weights<V>& raw, float,
                          float inverse) const {
        float w[V];
        widen(w, raw.scale, weight_kind);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            float scaled = v[j] * inverse;
            if (flags & GEMMA) v[j] = scaled * (w[j] + 1.0f);
            else if (flags & NATIVE) v[j] = through(through(scaled, weight_kind) * w[j], weight_kind);
            else v[j] = scaled * w[j];
        }
        store(out, row * width + at, v, kind);
    }
};

#define RMS_PARAMETERS                                                                                            \
    i64 rows, i64 width, const void *x, i64 x_stride, i64 kind, const void *weight, i64 weight_kind,              \
        const void *residual, i64 residual_stride, i64 residual_kind, void *residual_out, void *out, float eps,   \
        i64 flags
#define RMS_NORM                                                                                                  \
    RmsNorm{x, weight, residual, residual_out, out, x_stride, residual_stride, width, (int)kind, (int)weight_kind,\
            (int)residual_kind, (int)flags}
#define RMS_BF16                                                                                                  \
    RmsNorm{x, weight, nullptr, nullptr, out, x_stride, 0, width, BF16, BF16, BF16, (int)flags & GEMMA}
#define RMS_ADD_BF16                                                                                              \
    RmsNorm{x, weight, residual, residual_out, out, x_stride, residual_stride, width, BF16, BF16, BF16,           \
            (int)flags & GEMMA}

LONG_NORM_KERNELS(rms_norm, RMS_PARAMETERS, RMS_NORM)
NARROW_NORM_KERNELS(rms_norm, RMS_PARAMETERS, RMS_NORM)
NARROW_NORM_KERNELS(rms_norm_bf16, RMS_PARAMETERS, RMS_BF16)
SEVERAL_NORM_KERNELS(rms_norm_bf16, RMS_PARAMETERS, RMS_BF16)
WIDE_NORM_KERNELS(rms_norm_bf16, RMS_PARAMETERS, RMS_BF16)
NARROW_NORM_KERNELS(rms_norm_add_bf16, RMS_PARAMETERS, RMS_ADD_BF16)
WIDE_NORM_KERNELS(rms_norm_add_bf16, RMS_PARAMETERS, RMS_ADD_BF16)

// RMSNorm times a gate: ((x * inv) * w) * act(gate); without weight and gate, and with the sum for the mean, L2 norm.
struct Gated {
    static constexpr bool CENTRED = false;
    const void *x, *weight, *gate;
    void* out;
    i64 x_stride, gate_stride, width;
    int kind, weight_kind, gate_kind, out_kind;
    bool sigmoid;

    VT_MEMBER float count(i64 width) const { return gate != nullptr ? (float)width : 0.0f; }

    template <int V> VT_MEMBER Operands<V> read(i64 row, i64 at) const {
        Operands<V> raw;
        raw.x = fetch<V>(x, row * x_stride + at, kind);
        if (gate != nullptr) raw.other = fetch<V>(gate, row * gate_stride + at, gate_kind);
        return raw;
    }
    template <int V> VT_MEMBER void value(float (&v)[V], i64, i64, Operands<V>& raw) const { widen(v, raw.x, kind); }
    template <int V> VT_MEMBER void again(float (&v)[V], const Operands<V>& raw) const { widen(v, raw.x, kind); }
    template <int V> VT_MEMBER Weights<V> weights(i64 at) const {
        Weights<V> raw;
        if (gate != nullptr) raw.scale = fetch<V>(weight, at, weight_kind);
        return raw;
    }

    template <int V>
    VT_MEMBER void finish(float (&v)[V], i64 row, i64 at, const Operands<V>& raw, const Weights<V>& shared, float,
                          float inverse) const {
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = v[j] * inverse;
        if (gate == nullptr) return store(out, row * width + at, v, out_kind);
        float w[V], z[V], y[V];
        widen(w, shared.scale, weight_kind);
        widen(z, raw.other, gate_kind);
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = v[j] * w[j];
        if (sigmoid) gate_products<false>(y, z, v, F32, out_kind);
        else gate_products<true>(y, z, v, F32, out_kind);
        store(out, row * width + at, y, out_kind);
    }
};

#define GATED_PARAMETERS                                                                                          \
    i64 rows, i64 width, const void *x, i64 x_stride, i64 kind, const void *weight, i64 weight_kind,              \
        const void *gate, i64 gate_stride, i64 gate_kind, void *out, i64 out_kind, float eps, i64 sigmoid
#define GATED_NORM                                                                                                \
    Gated{x, weight, gate, out, x_stride, gate_stride, width, (int)kind, (int)weight_kind, (int)gate_kind,        \
          (int)out_kind, sigmoid != 0}
#define GATED_BF16 Gated{x, weight, gate, out, x_stride, gate_stride, width, BF16, BF16, BF16, BF16, false}
#define L2_BF16 Gated{x, nullptr, nullptr, out, x_stride, 0, width, BF16, BF16, BF16, BF16, false}

LONG_NORM_KERNELS(gated_norm, GATED_PARAMETERS, GATED_NORM)
NARROW_NORM_KERNELS(gated_norm, GATED_PARAMETERS, GATED_NORM)
NARROW_NORM_KERNELS(gated_norm_bf16, GATED_PARAMETERS, GATED_BF16)
NARROW_NORM_KERNELS(l2norm_bf16, GATED_PARAMETERS, L2_BF16)
SEVERAL_NORM_KERNELS(gated_norm_bf16, GATED_PARAMETERS, GATED_BF16)
SEVERAL_NORM_KERNELS(l2norm_bf16, GATED_PARAMETERS, L2_BF16)

struct LayerNorm {
    static constexpr bool CENTRED = true;
    const void *x, *weight, *bias;
    void* out;
    i64 x_stride, width;
    int kind, weight_kind, bias_kind;

    VT_MEMBER float count(i64 width) const { return (float)width; }

    template <int V> VT_MEMBER Operands<V> read(i64 row, i64 at) const {
        Operands<V> raw;
        raw.x = fetch<V>(x, row * x_stride + at, kind);
        return raw;
    }
    template <int V> VT_MEMBER void value(float (&v)[V], i64, i64, Operands<V>& raw) const { widen(v, raw.x, kind); }
    template <int V> VT_MEMBER void again(float (&v)[V], const Operands<V>& raw) const { widen(v, raw.x, kind); }
    template <int V> VT_MEMBER Weights<V> weights(i64 at) const {
        Weights<V> raw;
        if (weight != nullptr) raw.scale = fetch<V>(weight, at, weight_kind);
        if (bias != nullptr) raw.shift = fetch<V>(bias, at, bias_kind);
        return raw;
    }

    template <int V>
    VT_MEMBER void finish(float (&v)[V], i64 row, i64 at, const Operands<V>&, const Weights<V>& raw, float mean,
                          float inverse) const {
        float w[V];
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = (v[j] - mean) * inverse;
        if (weight != nullptr) {
            widen(w, raw.scale, weight_kind);
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] *= w[j];
        }
        if (bias != nullptr) {
            widen(w, raw.shift, bias_kind);
#pragma unroll
            for (int j = 0; j < V; ++j) v[j] += w[j];
        }
        store(out, row * width + at, v, kind);
    }
};

#define LAYER_PARAMETERS                                                                                          \
    i64 rows, i64 width, const void *x, i64 x_stride, i64 kind, const void *weight, i64 weight_kind,              \
        const void *bias, i64 bias_kind, void *out, float eps
#define LAYER_NORM                                                                                                \
    LayerNorm{x, weight, bias, out, x_stride, width, (int)kind, (int)weight_kind, (int)bias_kind}
#define LAYER_BF16 LayerNorm{x, weight, bias, out, x_stride, width, BF16, BF16, BF16}

LONG_NORM_KERNELS(layer_norm, LAYER_PARAMETERS, LAYER_NORM)
NARROW_NORM_KERNELS(layer_norm, LAYER_PARAMETERS, LAYER_NORM)
NARROW_NORM_KERNELS(layer_norm_bf16, LAYER_PARAMETERS, LAYER_BF16)
WIDE_NORM_KERNELS(layer_norm_bf16, LAYER_PARAMETERS, LAYER_BF16)
