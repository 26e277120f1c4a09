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

// vt_softplus for -18 < x <= 80, to the byte: no power of two is out of reach, so they are put into exponents, and nothing
// is clipped or replaced.
VT_FN float softplus_in_reach(float x) {
    const vt_scaled g = vt_exp_parts(-vt_abs(x), 0.0f);
    const unsigned power = (unsigned)vt_bits(g.t) << 23;  // what MAGIC adds to it is shifted away
    const float e = vt_float((int)((unsigned)vt_bits(g.hi) + power)), e_lo = g.lo * vt_float((int)(power + 0x3f800000u));
    const bool half = e >= 0.5f;
    const vt_pair s = vt_log_parts(half ? 0.5f * (e - 1.0f) : e, half ? 0.5f * e_lo : e_lo, half ? 1.0f : 0.0f);
    const float floor = x > 0.0f ? x : 0.0f, y = floor + s.hi, back = y - floor;
    return y + (((floor - (y - back)) + (s.hi - back)) + s.lo);
}

// g = -exp(A_log) softplus(g1 + dt_bias), the softplus with a slope and a threshold from which on it is a line. Rows are
// tokens and heads.
template <int V>
VT_FN void decay_gate(i64 rows, i64 width, i64 chunks, const void* g1, i64 kind, const float* A_log,
                      const float* dt_bias, i64 heads, float slope, float threshold, float* out) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    const i64 head = at.row >> 32 ? at.row % heads : (unsigned)at.row % (unsigned)heads;
    float y[V], bias[V] = {};
    const Raw<V> raw = fetch<V>(g1, at.row * width + at.column, (int)kind);
    const float rate = A_log[head];
    if (dt_bias != nullptr) load(bias, dt_bias, head * width + at.column, F32);
    const float fade = -vt_exp(rate);
    widen(y, raw, (int)kind);
    const float most = threshold < 80.0f ? threshold : 80.0f;
    bool reach = slope == 1.0f;
#pragma unroll
    for (int j = 0; j < V; ++j) {
        if (dt_bias != nullptr) y[j] += bias[j];
        reach &= (y[j] > -18.0f) & (y[j] <= most);
    }
    if (reach) {
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] = fade * softplus_in_reach(y[j]);
    } else {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            float scaled = y[j] * slope;
            if (!(scaled > threshold)) {
                y[j] = vt_softplus(scaled);
                if (slope != 1.0f) y[j] = y[j] / slope;
            }
            y[j] = fade * y[j];
        }
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
