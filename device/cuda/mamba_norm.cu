// Mamba-2's gated norm, (h / sqrt(mean(h^2) + eps)) weight with h = y silu(z); a row is a group of a token's channels.
//
// The ladder:
// 1. That of norm.cu, whose drivers these are (rowwise.cuh). h stays in registers between its two uses. The polynomials of
//    SiLU, some 100 instructions with the branches of an exact reciprocal, cost 2.5 times the time of the bytes.
// 2. near_silu: the same steps for |z| < 16, some 45 instructions without a branch, eight chains side by side.
// 3. mamba_norm_bf16_*: the same, knowing that everything is bfloat16.
// 4. mamba_norm_table: a bfloat16 gate has few values: a block tabulates SiLU of the 4096 from 2^-12 to 16, and its warps
//    take row after row. Nothing approximate decides a byte, since every row's root hangs on all of its sum's bits.
#include "fast.cuh"
#include "rowwise.cuh"

#define NEAR_SILU 16.0f

// 1 / d for 1 <= d <= 2: the steps that __frcp_rn takes for such a number, without its branch for others.
VT_FN float near_reciprocal(float d) {
    float y = fast_reciprocal(d);
    return vt_fma(y, -vt_fma(d, y, -1.0f), y);
}

// vt_silu(x) to the bit for |x| < NEAR_SILU: powers of two are exact factors here, so that one product does for two, and
// nothing has to be clipped.
VT_FN float near_silu(float x) {
    bool negative = x < 0.0f;
    vt_scaled g = vt_exp_parts(-vt_abs(x), 0.0f);
    float power = vt_float((int)(((unsigned)vt_bits(g.t) << 23) + 0x3f800000u));
    float e = g.hi * power, d = 1.0f + e;
    float d_lo = (e - (d - 1.0f)) + g.lo * power;
    float inverse = near_reciprocal(d);
    float top = negative ? g.hi : 1.0f, top_lo = negative ? g.lo : 0.0f;
    float q = top * inverse;
    float rest = vt_fma(-q, d_lo, vt_fma(-q, d, top)) + top_lo;
    float y = vt_fma(x, q, x * (rest * inverse));
    return negative ? y * power : y;
}

VT_FN void multiply_by_silu(float (&v)[1], const float (&gate)[1]) { v[0] *= vt_silu(gate[0]); }
VT_FN void multiply_by_silu(float (&v)[8], const float (&gate)[8]) {
    float act[8];
    unsigned far = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        act[j] = near_silu(gate[j]);
        far |= vt_abs(gate[j]) < NEAR_SILU ? 0u : 1u << j;
    }
    decide(act, far, gate, v, [](float z, float) { return vt_silu(z); });
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= act[j];
}

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
        multiply_by_silu(v, gate);
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
        weighted(v, w, row, at, inverse);
    }
    template <int V>
    VT_MEMBER void weighted(float (&v)[V], const float (&w)[V], i64 row, i64 at, float inverse) const {
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

// A block's one row: its weights are sent for with it.
struct MambaBlock : MambaNorm {
    template <int V> VT_MEMBER Weights<V> weights(i64 at) const {
        Weights<V> raw;
        raw.scale = fetch<V>(weight, blockIdx.x % (unsigned)groups * width + at, weight_kind);
        return raw;
    }
    template <int V>
    VT_MEMBER void finish(float (&v)[V], i64 row, i64 at, const Operands<V>&, const Weights<V>& raw, float,
                          float inverse) const {
        float w[V];
        widen(w, raw.scale, weight_kind);
        weighted(v, w, row, at, inverse);
    }
};

#define MAMBA_PARAMETERS                                                                                          \
    i64 rows, i64 width, const void *y, const void *z, i64 kind, const void *weight, i64 weight_kind, i64 groups, \
        void *out, float eps, i64 rounded
#define MAMBA_NORM MambaNorm{y, z, weight, out, groups, width, (int)kind, (int)weight_kind, (int)rounded}

#define MAMBA_BF16 MambaNorm{y, z, weight, out, groups, width, BF16, BF16, (int)rounded}

LONG_NORM_KERNELS(mamba_norm, MAMBA_PARAMETERS, MAMBA_NORM)
NARROW_NORM_KERNELS(mamba_norm, MAMBA_PARAMETERS, MAMBA_NORM)
extern "C" __global__ void __launch_bounds__(256, 2) mamba_norm_block4(MAMBA_PARAMETERS) {
    norm_block<4, false>(width, eps, MAMBA_NORM);
}
extern "C" __global__ void __launch_bounds__(256) mamba_norm_bf16_block1(MAMBA_PARAMETERS) {
    norm_block<1, true>(width, eps, MambaBlock{MAMBA_BF16});
}
extern "C" __global__ void __launch_bounds__(256, 2) mamba_norm_bf16_block4(MAMBA_PARAMETERS) {
    norm_block<4, false>(width, eps, MAMBA_BF16);
}

#define FIRST 0x3980   // the bits of 2^-12, the least gate of the table
#define TABULATED 2048 // gates of one sign up to 16
#define TURNS 4        // of 256 elements, that a warp takes of a row

struct SiluTable {
    const float* values;

    // v[j] = y[j] silu(z[j]) of the bfloat16 that `gates` holds.
    VT_MEMBER void product(float (&v)[8], const Raw<8>& gates) const {
        const unsigned w[4] = {gates.a.x, gates.a.y, gates.a.z, gates.a.w};
        float z[8], act[8];
        unsigned far = 0;
        widen(z, gates, BF16);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            unsigned from = ((j & 1 ? w[j / 2] >> 16 : w[j / 2] & 0xffffu) - FIRST) & 0xffffu;
            act[j] = values[(from & (TABULATED - 1)) | (from >> 4 & TABULATED)];  // of no use where the gate is not in the table
            far |= from & 0x7800u ? 1u << j : 0u;
        }
        decide(act, far, z, v, [](float gate, float) { return vt_silu(gate); });
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= act[j];
    }
};

struct Turns { Raw<8> y[TURNS], z[TURNS]; };

VT_FN void send(Turns& to, const MambaNorm& norm, i64 row, int first, int width) {
#pragma unroll
    for (int t = 0; t < TURNS; ++t) {
        const int at = first + t * 256;
        if (at >= width) continue;
        to.y[t] = fetch<8>(norm.y, row * width + at, BF16);
        to.z[t] = fetch<8>(norm.z, row * width + at, BF16);
    }
}

// A warp a row of at most 1024 elements, then the row `warps` further on, which is sent for before this one is done.
extern "C" __global__ void __launch_bounds__(512, 1) mamba_norm_table(MAMBA_PARAMETERS, i64 warps) {
    __shared__ float table[2 * TABULATED];
    for (int i = threadIdx.x; i < 2 * TABULATED; i += blockDim.x)
        table[i] = vt_silu(widen_bf16((unsigned)(FIRST + i % TABULATED + i / TABULATED * 0x8000)));
    __syncthreads();
    const SiluTable silu{table};
    const MambaNorm norm = MAMBA_BF16;
    const int first = (threadIdx.x & 31) * 8, size = (int)width;
    i64 row = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    Turns raw;
    if (row < rows) send(raw, norm, row, first, size);
    for (; row < rows; row += warps) {
        float h[TURNS][8], sums[8] = {};
#pragma unroll
        for (int t = 0; t < TURNS; ++t) {
            if (first + t * 256 >= size) continue;
            widen(h[t], raw.y[t], BF16);
            silu.product(h[t], raw.z[t]);
            add_squares(sums[t], h[t]);
        }
        if (row + warps < rows) send(raw, norm, row + warps, first, size);
#pragma unroll
        for (int t = 0; t < TURNS; ++t) sums[t] = tree_of_lanes(sums[t], 32);
        const float inverse = inverse_root(tree_of_eight(sums), (float)width, eps);
#pragma unroll
        for (int t = 0; t < TURNS; ++t) {
            const int at = first + t * 256;
            if (at < size) norm.finish(h[t], row, at, Operands<8>{}, Weights<8>{}, 0.0f, inverse);
        }
    }
}
