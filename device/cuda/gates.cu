// Sigmoid gates, and the gates and post-convolution step of the gated delta rule.
//
// The ladder:
// 1. sigmoid_gate_v1: an element a thread; sigmoid_gate_v8: 16-byte loads and stores; fast functions where they give
//    the polynomial's bytes (fast.cuh).
// 2. gdn_g_beta: a (token, head) a thread.
// 3. gdn_post_conv_v1: a warp a head, and a value head's warp also makes its gates, so that the chain of four ops is
//    one pass over conv.
// 4. gdn_post_conv_v8: a head in the registers of up to 32 lanes, 16 bytes a lane, four heads a thread, whose loads are
//    under way together. Gates have blocks of their own among the others: in a lane of a head's they would hold up 31.
#include "fast.cuh"
#include "rows.cuh"
#include "teams.cuh"

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

#define POST_CONV_PARAMETERS                                                                                      \
    i64 tokens, i64 heads, const void *conv, i64 stride, i64 kind, i64 keys, i64 key_width, i64 value_width, void *q, \
        void *k, void *v, i64 out_kind, float eps, GATES_PARAMETERS

// The heads of a token, in order: keys q, keys k, then the values. One of them, and where it goes.
struct Head {
    i64 token, head, begin, to;
    int width;
    void* out;
    bool value;
};

VT_FN Head head_of(i64 unit, i64 heads, i64 stride, i64 keys, i64 key_width, i64 value_width, void* q, void* k, void* v) {
    i64 units = 2 * keys + heads, token = unit / units, head = unit % units;
    if (head < 2 * keys)
        return {token, head, token * stride + head * key_width, (token * keys + head % keys) * key_width,
                (int)key_width, head < keys ? q : k, false};
    head -= 2 * keys;
    return {token, head, token * stride + 2 * keys * key_width + head * value_width,
            (token * heads + head) * value_width, (int)value_width, v, true};
}

extern "C" __global__ void __launch_bounds__(256) gdn_post_conv_v1(POST_CONV_PARAMETERS) {
    const Gates gates = GATES_ARGUMENTS;
    i64 unit = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    int lane = threadIdx.x & 31;
    if (unit >= tokens * (2 * keys + heads)) return;  // a whole warp
    const Head head = head_of(unit, heads, stride, keys, key_width, value_width, q, k, v);
    float x[1], inverse = 1.0f;
    if (!head.value) {
        float p[8] = {};
        for (int base = 0; base < head.width; base += TREE_SPAN) {
#pragma unroll
            for (int w = 0; w < 8; ++w) {
                int first = base + (lane + 32 * w) * 8;
                for (int i = first; i < first + 8 && i < head.width; ++i) {
                    load(x, conv, head.begin + i, (int)kind);
                    p[w] += x[0] * x[0];
                }
            }
        }
        inverse = inverse_root(tree_of_warp(p), 0.0f, eps);
    }
    for (int i = lane; i < head.width; i += 32) {
        Raw<1> raw = fetch<1>(conv, head.begin + i, (int)kind);
        widen(x, raw, (int)kind);
        x[0] = x[0] * inverse;
        if (head.value && kind == out_kind) put(head.out, head.to + i, raw, (int)kind);
        else store(head.out, head.to + i, x, (int)out_kind);
    }
    if (head.value && lane == 0) gates.make(head.token, head.head);
}

#define POST_HEADS 4  // of a thread, at the most; a team's are keys (q's, then k's) or values

// Every `every`-th block makes gates, as many as it has threads. `key_teams` of a token's `teams` have keys.
extern "C" __global__ void __launch_bounds__(256)
    gdn_post_conv_v8(POST_CONV_PARAMETERS, i64 every, i64 shift, i64 key_teams, i64 teams) {
    const unsigned turn = blockIdx.x / (unsigned)every, at_turn = blockIdx.x - turn * (unsigned)every;
    if (at_turn == 0) {
        const Gates gates = GATES_ARGUMENTS;
        const unsigned at = turn * blockDim.x + threadIdx.x;
        if (at < tokens * heads) gates.make(at / (unsigned)heads, at % (unsigned)heads);
        return;
    }
    const Team team((int)shift);
    const unsigned number = team_number(turn * (unsigned)(every - 1) + at_turn - 1, (int)shift);
    const unsigned token = number / (unsigned)teams;
    int first = (int)(number - token * (unsigned)teams);
    const bool value = first >= key_teams;
    if (value) first -= (int)key_teams;
    const int step = (int)(value ? teams - key_teams : key_teams), count = (int)(value ? heads : 2 * keys);
    const int width = (int)(value ? value_width : key_width), lane = team.place * 8;
    const bool inside = token < tokens && lane < width;  // the others still take part in the exchanges
    const i64 from = token * stride + (value ? 2 * keys * key_width : 0) + lane;
    Raw<8> raw[POST_HEADS];
#pragma unroll
    for (int j = 0; j < POST_HEADS; ++j) {
        const int head = first + j * step;
        raw[j] = {};
        if (inside && head < count) raw[j] = fetch<8>(conv, from + (i64)head * width, (int)kind);
    }
    const bool normed = __any_sync(VT_ALL_LANES, !value);  // some head of this warp's
    float roots = 1.0f;
    if (normed) {
        float partial[POST_HEADS];
#pragma unroll
        for (int j = 0; j < POST_HEADS; ++j) {
            float x[8];
            widen(x, raw[j], (int)kind);
            partial[j] = 0.0f;
            add_squares(partial[j], x);
        }
        roots = team.roots(partial, 0.0f, eps);
    }
#pragma unroll
    for (int j = 0; j < POST_HEADS; ++j) {
        const int head = first + j * step;
        const float inverse = normed ? team.root_of(roots, j) : 1.0f;
        if (!inside || head >= count) continue;
        const bool of_k = !value && head >= keys;
        void* out = value ? v : of_k ? k : q;
        const i64 to = (token * (value ? heads : keys) + head - (of_k ? keys : 0)) * width + lane;
        if (value && kind == out_kind) {
            put(out, to, raw[j], (int)kind);
            continue;
        }
        float x[8];
        widen(x, raw[j], (int)kind);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = value ? x[i] : x[i] * inverse;
        store(out, to, x, (int)out_kind);
    }
}
