// Sigmoid gates, and the gates and post-convolution step of the gated delta rule.
//
// The ladder:
// 1. sigmoid_gate_v1: an element a thread; sigmoid_gate_v8: 16-byte loads and stores; fast functions where they give
//    the polynomial's bytes (fast.cuh).
// 2. gdn_g_beta: a (token, head) a thread.
// 3. gdn_post_conv: a warp a head; the L2 norm's 256 partials are eight accumulators a lane, its value heads' warps
//    also make the gates, so that the chain of four ops is one pass over conv.
#include "fast.cuh"
#include "rows.cuh"
#include "tree.cuh"

#define ROWS i64 rows, i64 width, i64 chunks

// out = x * sigmoid(gate), the sigmoid rounded to `act_kind` first; one gate a row for gate_step = 0.
template <int V>
VT_FN void sigmoid_gate(ROWS, const void* x, i64 kind, const void* gate, i64 gate_stride, i64 gate_step, i64 gate_kind,
                        i64 act_kind, void* out, i64 out_kind) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    float v[V], z[V], y[V];
    Raw<V> raw = fetch<V>(x, at.row * width + at.column, (int)kind);
    if (gate_step) {
        load(z, gate, at.row * gate_stride + at.column, (int)gate_kind);
        widen(v, raw, (int)kind);
        gate_products<false>(y, z, v, (int)act_kind, (int)out_kind);
    } else {
        float one[1];
        load(one, gate, at.row * gate_stride, (int)gate_kind);
        float weight = through(vt_sigmoid(one[0]), (int)act_kind);
        widen(v, raw, (int)kind);
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] = v[j] * weight;
    }
    store(out, at.row * width + at.column, y, (int)out_kind);
}

#define SIGMOID_GATE(V)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) sigmoid_gate_v##V(                                          \
        ROWS, const void* x, i64 kind, const void* gate, i64 gate_stride, i64 gate_step, i64 gate_kind,           \
        i64 act_kind, void* out, i64 out_kind) {                                                                  \
        sigmoid_gate<V>(rows, width, chunks, x, kind, gate, gate_stride, gate_step, gate_kind, act_kind, out,     \
                        out_kind);                                                                                \
    }
SIGMOID_GATE(8)
SIGMOID_GATE(1)

// The decay (a logarithm) and the write strength of one token and head.
struct Gates {
    const void *a, *b;
    const float *A_log, *dt_bias;
    i64 a_stride, b_stride, heads;
    int a_kind, b_kind;
    float* g;
    void* beta;
    int beta_kind;

    VT_MEMBER void make(i64 token, i64 head) const {
        float y[1], z[1];
        load(y, a, token * a_stride + head, a_kind);
        load(z, b, token * b_stride + head, b_kind);
        g[token * heads + head] = -vt_exp(A_log[head]) * vt_softplus(y[0] + dt_bias[head]);
        z[0] = vt_sigmoid(z[0]);
        store(beta, token * heads + head, z, beta_kind);
    }
};

#define GATES_PARAMETERS                                                                                          \
    const void *a, i64 a_stride, i64 a_kind, const void *b, i64 b_stride, i64 b_kind, const float *A_log,         \
        const float *dt_bias, float *g, void *beta, i64 beta_kind
#define GATES_ARGUMENTS                                                                                           \
    {a, b, A_log, dt_bias, a_stride, b_stride, heads, (int)a_kind, (int)b_kind, g, beta, (int)beta_kind}

extern "C" __global__ void __launch_bounds__(256) gdn_g_beta(i64 tokens, i64 heads, GATES_PARAMETERS) {
    const Gates gates = GATES_ARGUMENTS;
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < tokens * heads) gates.make(at / heads, at % heads);
}

// Heads of one token in order: keys q, keys k, values v with their gates.
extern "C" __global__ void __launch_bounds__(256) gdn_post_conv(
    i64 tokens, i64 heads, const void* conv, i64 stride, i64 kind, i64 keys, i64 key_width, i64 value_width, void* q,
    void* k, void* v, i64 out_kind, float eps, GATES_PARAMETERS) {
    const Gates gates = GATES_ARGUMENTS;
    i64 unit = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32, units = 2 * keys + heads;
    int lane = threadIdx.x & 31;
    if (unit >= tokens * units) return;  // a whole warp
    i64 token = unit / units, head = unit % units;
    float x[1];
    if (head < 2 * keys) {
        i64 begin = token * stride + head * key_width;
        float p[8] = {};
        for (i64 base = 0; base < key_width; base += 256) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                i64 i = base + 32 * j + lane;
                if (i < key_width) {
                    load(x, conv, begin + i, (int)kind);
                    p[j] += x[0] * x[0];
                }
            }
        }
        float inverse = inverse_root(tree_of_strided(p), 0.0f, eps);
        void* out = head < keys ? q : k;
        i64 to = (token * keys + head % keys) * key_width;
        for (i64 i = lane; i < key_width; i += 32) {
            load(x, conv, begin + i, (int)kind);
            x[0] = x[0] * inverse;
            store(out, to + i, x, (int)out_kind);
        }
        return;
    }
    head -= 2 * keys;
    i64 begin = token * stride + 2 * keys * key_width + head * value_width;
    for (i64 i = lane; i < value_width; i += 32) {
        Raw<1> raw = fetch<1>(conv, begin + i, (int)kind);
        if (kind == out_kind) {
            put(v, (token * heads + head) * value_width + i, raw, (int)kind);
        } else {
            widen(x, raw, (int)kind);
            store(v, (token * heads + head) * value_width + i, x, (int)out_kind);
        }
    }
    if (lane == 0) gates.make(token, head);
}
