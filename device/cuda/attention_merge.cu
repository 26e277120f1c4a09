// The merge of two partial attention results by their log-sum-exps.
//
// The ladder:
// 1. *_v1: an element a thread, any width, stride and address.
// 2. *_v8: 16-byte loads and stores, eight elements of one head a thread. Each thread finds the two weights for itself:
//    that costs less than the bytes take.
// 3. *_f32_v8 apart from the 16-bit types: half the registers of raw data for these.
#include "e4m3.cuh"
#include "rows.cuh"

struct Weights {
    float prefix, suffix, lse;
    bool none;  // neither side has a key
};

VT_FN Weights weights_of(float prefix_lse, float suffix_lse) {
    float prefix = prefix_lse == VT_INF ? -VT_INF : prefix_lse, suffix = suffix_lse == VT_INF ? -VT_INF : suffix_lse;
    float top = vt_maximum(prefix, suffix);
    bool none = top == -VT_INF;
    float base = none ? 0.0f : top, p = vt_exp(prefix - base), s = vt_exp(suffix - base), total = p + s;
    float divisor = none ? 1.0f : total;
    return {p / divisor, s / divisor, none ? -VT_INF : vt_log(total) + base, none};
}

#define MERGE_PARAMETERS                                                                                         \
    i64 rows, i64 width, i64 chunks, const void *prefix, i64 prefix_token, i64 prefix_head, const void *suffix,  \
        i64 suffix_token, i64 suffix_head, i64 kind, const float *prefix_lse, const float *suffix_lse, i64 heads, \
        i64 merged, i64 zeros, i64 scaled, float inverse_scale, void *out, float *lse
#define MERGE_NAMES                                                                                              \
    rows, width, chunks, prefix, prefix_token, prefix_head, suffix, suffix_token, suffix_head, kind, prefix_lse, \
        suffix_lse, heads, merged, zeros, scaled, inverse_scale, out, lse

template <int V> VT_FN void merge(MERGE_PARAMETERS) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    i64 token = (i64)((unsigned)at.row / (unsigned)heads), head = at.row - token * heads;
    i64 lse_at = head * (i64)((unsigned)rows / (unsigned)heads) + token;
    Raw<V> a = fetch<V>(prefix, token * prefix_token + head * prefix_head + at.column, (int)kind);
    Raw<V> b = fetch<V>(suffix, token * suffix_token + head * suffix_head + at.column, (int)kind);
    float suffix_here = suffix_lse[lse_at];
    Weights w = weights_of(prefix_lse[lse_at], suffix_here);
    bool both = token < merged;
    float x[V], y[V];
    widen(x, a, (int)kind);
    widen(y, b, (int)kind);
#pragma unroll
    for (int j = 0; j < V; ++j) {
        float mixed = x[j] * w.prefix + y[j] * w.suffix;
        if (w.none) mixed = zeros ? 0.0f : x[j];
        x[j] = both ? mixed : y[j];
        if (scaled) x[j] *= inverse_scale;
    }
    if (scaled) store_e4m3((unsigned char*)out, at.row * width + at.column, x, 0x7fu);
    else store(out, at.row * width + at.column, x, (int)kind);
    if (at.column == 0) lse[lse_at] = both ? w.lse : suffix_here;
}

#define MERGE(NAME, V, ASSUMED)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) merge_attn_states_##NAME(MERGE_PARAMETERS) {                \
        VT_ASSUME(ASSUMED);                                                                                       \
        merge<V>(MERGE_NAMES);                                                                                    \
    }
MERGE(v8, 8, (int)kind != F32)
MERGE(f32_v8, 8, (int)kind == F32)
MERGE(v1, 1, true)
