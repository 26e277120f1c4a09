// Mamba-2's gated norm, (h / sqrt(mean(h^2) + eps)) weight with h = y silu(z); a row is a group of a token's channels.
//
// The ladder: that of norm.cu, whose drivers these are (rowwise.cuh). h stays in registers between its two uses.
#include "rowwise.cuh"

struct MambaNorm {
    static constexpr bool CENTRED = false;
    const void *y, *z, *weight;
    void* out;
    i64 groups, width;
    int kind, weight_kind, rounded;

    VT_MEMBER float count(i64 width) const { return (float)width; }

    template <int V> VT_MEMBER Operands<V> read(i64 row, i64 at) const {
        return {fetch<V>(y, row * width + at, kind), fetch<V>(z, row * width + at, kind)};
    }
    template <int V> VT_MEMBER void product(float (&v)[V], const Operands<V>& raw) const {
        float gate[V];
        widen(v, raw.x, kind);
        widen(gate, raw.other, kind);
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] *= vt_silu(gate[j]);
    }
    template <int V> VT_MEMBER void value(float (&v)[V], i64, i64, Operands<V>& raw) const {
        product(v, raw);
        raw.x = narrow(v, F32);
    }
    template <int V> VT_MEMBER void again(float (&v)[V], const Operands<V>& raw) const { widen(v, raw.x, F32); }
    template <int V> VT_MEMBER Weights<V> weights(i64) const { return {}; }

    template <int V>
    VT_MEMBER void finish(float (&v)[V], i64 row, i64 at, const Operands<V>&, const Weights<V>&, float,
                          float inverse) const {
        float w[V];
        load(w, weight, (groups == 1 ? 0 : row % groups * width) + at, weight_kind);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            float scaled = again_of(v[j], inverse);
            v[j] = scaled * w[j];
        }
        store(out, row * width + at, v, kind);
    }
    VT_MEMBER float again_of(float x, float inverse) const {
        return rounded ? through(x * inverse, kind) : x * inverse;
    }
};

#define MAMBA_PARAMETERS                                                                                          \
    i64 rows, i64 width, const void *y, const void *z, i64 kind, const void *weight, i64 weight_kind, i64 groups, \
        void *out, float eps, i64 rounded
#define MAMBA_NORM MambaNorm{y, z, weight, out, groups, width, (int)kind, (int)weight_kind, (int)rounded}

LONG_NORM_KERNELS(mamba_norm, MAMBA_PARAMETERS, MAMBA_NORM)
NARROW_NORM_KERNELS(mamba_norm, MAMBA_PARAMETERS, MAMBA_NORM)
extern "C" __global__ void __launch_bounds__(256, 3) mamba_norm_block4(MAMBA_PARAMETERS) {
    norm_block<4, false>(width, eps, MAMBA_NORM);
}
