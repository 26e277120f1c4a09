// Activations to codes of eight bits: a lane has eight neighbours, four lanes a block of 32, a warp one of 256.
#pragma once
#include "storage.cuh"

struct Codes {
    float d;
    int code[8];
    int total;  // of this lane's codes
};

VT_FN void load_eight(float (&x)[8], const void* a, i64 at, int kind, bool wide) {
    if (wide) return load(x, a, at, kind);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float one[1];
        load(one, a, at + i, kind);
        x[i] = one[0];
    }
}

VT_FN Codes codes_32(const float (&x)[8]) {
    Codes found;
    float peak = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) peak = x[i] != x[i] || vt_abs(x[i]) > peak ? vt_abs(x[i]) : peak;
#pragma unroll
    for (int m = 1; m <= 2; m *= 2) {
        float other = __shfl_xor_sync(0xffffffffu, peak, m);
        peak = other != other || other > peak ? other : peak;
    }
    found.d = peak / 127.0f;
    float inverse = 1.0f / found.d;
    if (!(vt_abs(inverse) < VT_INF)) inverse = 0.0f;
    found.total = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float v = x[i] * inverse, size = v == v ? vt_abs(v) : 0.0f;
        int low = (int)size;
        low += size - (float)low >= 0.5f;
        found.code[i] = v < 0.0f ? -low : low;
        found.total += found.code[i];
    }
    return found;
}

VT_FN Codes codes_256(const float (&x)[8], int lane) {
    Codes found;
    float most = 0.0f, extremum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (vt_abs(x[i]) > most) {
            most = vt_abs(x[i]);
            extremum = x[i];
        }
    }
    int first = lane;
#pragma unroll
    for (int m = 16; m >= 1; m /= 2) {
        float size = __shfl_xor_sync(0xffffffffu, most, m), value = __shfl_xor_sync(0xffffffffu, extremum, m);
        int place = __shfl_xor_sync(0xffffffffu, first, m);
        if (size > most || (size == most && place < first)) {
            most = size;
            extremum = value;
            first = place;
        }
    }
    float inverse = -127.0f / extremum;
    bool dead = most == 0.0f || !(vt_abs(inverse) < VT_INF);
    found.d = dead ? 0.0f : 1.0f / inverse;
    found.total = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float v = inverse * x[i];
        v = dead || v != v ? 0.0f : rintf(v);
        found.code[i] = v > 127.0f ? 127 : (int)v;
        found.total += found.code[i];
    }
    return found;
}

// d as float16 bits, and Q8_1's d * total: a NaN has the bits that a host's has.
VT_FN unsigned f16_of(float x) { return x != x ? 0x7e00u : narrow_f16(x, 0.0f) & 0xffffu; }
VT_FN unsigned f16_of_sum(float d, int total) {
    float sum = d * (float)total;
    return sum != sum && d == d ? 0xfe00u : f16_of(sum);
}

VT_FN unsigned packed4(int a, int b, int c, int d) {
    return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (unsigned)d << 24;
}
