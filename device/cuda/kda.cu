// Kimi delta attention, token by token: the delta rule with a decay for each channel of the keys; its decay gate.
//
// The ladder:
// 1. kda_any: as gdn_any.
// 2. kda_rows: as gdn_rows, two rows a thread: a block makes the 128 decays once for all of its rows.
// 3. kda_tokens: as gdn_tokens.
// 4. kda_decay_gate_v1, _v8: an element, or 16-byte accesses, a thread.
#include "delta.cuh"
#include "rows.cuh"

RULE_ANY(kda_any, true)
RULE_TILE(kda_rows, 2, 5, F32, true, true)
RULE_TILE(kda_tokens, 2, 4, F32, true, false)

// g = -exp(A_log) softplus(g1 + dt_bias), the softplus with a slope and a threshold from which on it is a line. Rows are
// tokens and heads.
template <int V>
VT_FN void decay_gate(i64 rows, i64 width, i64 chunks, const void* g1, i64 kind, const float* A_log,
                      const float* dt_bias, i64 heads, float slope, float threshold, float* out) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    const i64 head = at.row % heads;
    float y[V], bias[V] = {};
    const Raw<V> raw = fetch<V>(g1, at.row * width + at.column, (int)kind);
    if (dt_bias != nullptr) load(bias, dt_bias, head * width + at.column, F32);
    const float fade = -vt_exp(A_log[head]);
    widen(y, raw, (int)kind);
#pragma unroll
    for (int j = 0; j < V; ++j) {
        if (dt_bias != nullptr) y[j] += bias[j];
        float scaled = y[j] * slope;
        if (!(scaled > threshold)) {
            y[j] = vt_softplus(scaled);
            if (slope != 1.0f) y[j] = y[j] / slope;
        }
        y[j] = fade * y[j];
    }
    store(out, at.row * width + at.column, y, F32);
}

#define DECAY_GATE(V)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) kda_decay_gate_v##V(                                        \
        i64 rows, i64 width, i64 chunks, const void* g1, i64 kind, const float* A_log, const float* dt_bias,      \
        i64 heads, float slope, float threshold, float* out) {                                                    \
        decay_gate<V>(rows, width, chunks, g1, kind, A_log, dt_bias, heads, slope, threshold, out);               \
    }
DECAY_GATE(8)
DECAY_GATE(1)
