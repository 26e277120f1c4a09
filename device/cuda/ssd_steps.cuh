// Mamba-2's time steps and the chunks that its stages are cut into.
#pragma once
#include "storage.cuh"

// dt of a token and head: clamp(softplus(dt + bias), low, high).
struct Steps {
    const void* dt;
    const float* bias;
    i64 heads;
    float low, high;
    int kind, softplus;

    VT_MEMBER float of(float x, i64 head) const {
        if (bias != nullptr) x += bias[head];
        if (softplus) x = vt_softplus(x);
        return vt_minimum(vt_maximum(x, low), high);
    }
    VT_MEMBER float at(i64 token, i64 head) const {
        float x[1];
        load(x, dt, token * heads + head, kind);
        return of(x[0], head);
    }
};

#define STEPS_PARAMETERS const void *dt, i64 dt_kind, const float *bias, i64 heads, i64 softplus, float low, float high
#define THE_STEPS Steps{dt, bias, heads, low, high, (int)dt_kind, (int)softplus}

// The tokens of a chunk; none where a capture could not refuse cuts that do not fit.
struct Cut {
    i64 first;
    int length;

    VT_MEMBER bool holds(i64 i) const { return i < length; }
};

VT_FN Cut cut_at(const int* cuts, i64 chunk, i64 size, i64 tokens) {
    const i64 first = cuts[chunk], end = cuts[chunk + 1];
    if (first < 0 || end <= first || end - first > size || end > tokens) return {0, 0};
    return {first, (int)(end - first)};
}

// exp(min(late - early, 0)).
VT_FN float between(float late, float early) { return vt_exp(vt_minimum(late - early, 0.0f)); }
