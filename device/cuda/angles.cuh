// Cosine and sine in float64: the steps of ops/numerics/angles.py in the same order, so that the bits are the same.
// Where NumPy needs Dekker's exact product, a fused multiply-add gives the same number.
#pragma once
#include "storage.cuh"

typedef unsigned long long u64;

#ifdef __CUDACC__
VT_FN double fused_f64(double a, double b, double c) { return __fma_rn(a, b, c); }
VT_FN u64 upper_product(u64 a, u64 b) { return __umul64hi(a, b); }
VT_FN u64 bits_f64(double x) { return (u64)__double_as_longlong(x); }
VT_FN double float_f64(u64 bits) { return __longlong_as_double((long long)bits); }
#else
VT_FN double fused_f64(double a, double b, double c) { return std::fma(a, b, c); }
VT_FN u64 upper_product(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
VT_FN u64 bits_f64(double x) { u64 bits; std::memcpy(&bits, &x, 8); return bits; }
VT_FN double float_f64(u64 bits) { double x; std::memcpy(&x, &bits, 8); return x; }
#endif

// 2/pi in binary after 64 zeros.
VT_TABLE u64 two_over_pi[20] = {
    0x0000000000000000, 0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041, 0xfe5163abdebbc561,
    0xb7246e3a424dd2e0, 0x06492eea09d1921c, 0xfe1deb1cb129a73e, 0xe88235f52ebb4484, 0xe99c7026b45f7e41,
    0x3991d639835339f4, 0x9c845f8bbdf9283b, 0x1ff897ffde05980f, 0xef2f118b5a0a6d1f, 0x6d367ecf27cb09b7,
    0x4f463f669e5fea2d, 0x7527bac7ebe5f17b, 0x3d0739f78a5292ea, 0x6bfb5fb11f8d5d08, 0x56033046fc7b6bab,
};

struct Reduced {
    double r, rest;
    int quarter;
};

// a >= 1/2 is quarter * pi/2 + r + rest.
VT_FN Reduced reduce_angle(double a) {
    const u64 bits = bits_f64(a);
    const u64 m = (bits & 0xfffffffffffffull) | 0x10000000000000ull;
    const int at = (int)(bits >> 52) - 1013, word = at >> 6, shift = at & 63;
    const u64* w = two_over_pi + word;
    u64 high = w[0] << shift | w[1] >> 1 >> (63 - shift);
    u64 middle = w[1] << shift | w[2] >> 1 >> (63 - shift);
    u64 low = w[2] << shift | w[3] >> 1 >> (63 - shift);
    u64 below = upper_product(m, low);
    u64 fraction = below + m * middle;
    u64 turn = m * high + upper_product(m, middle) + (fraction < below ? 1 : 0);
    u64 quarter = (turn + (1ull << 61)) >> 62;
    i64 rounded = (i64)(turn - (quarter << 62));
    double upper = (double)(int)(rounded >> 32) * 4294967296.0, lower = (double)(unsigned)rounded;
    double lead = upper + lower;
    double tail = (double)(unsigned)(fraction >> 32) * 4294967296.0 + (double)(unsigned)fraction;
    tail = (lower - (lead - upper)) + tail * 0x1p-64;
    const double unit = 1.5707963267948966 * 0x1p-62, unit_rest = 6.123233995736766e-17 * 0x1p-62;
    double product = lead * unit;
    double error = fused_f64(lead, unit, -product) + (lead * unit_rest + tail * unit);
    double r = product + error;
    return {r, (product - r) + error, (int)quarter & 3};
}

VT_FN void cos_sin(double x, double& cos, double& sin) {
    double a = x < 0.0 ? -x : x;
    Reduced at = {a, 0.0, 0};
    if ((bits_f64(a) << 1) >> 53 >= 2047) {
        cos = sin = x - x;
        return;
    }
    if (a >= 0.5) at = reduce_angle(a);
    double r = at.r, z = r * r;
    double s = 1.0 / 355687428096000.0, c = -1.0 / 6402373705728000.0;
    s = s * z + -1.0 / 1307674368000.0;
    s = s * z + 1.0 / 6227020800.0;
    s = s * z + -1.0 / 39916800.0;
    s = s * z + 1.0 / 362880.0;
    s = s * z + -1.0 / 5040.0;
    s = s * z + 1.0 / 120.0;
    s = s * z + -1.0 / 6.0;
    c = c * z + 1.0 / 20922789888000.0;
    c = c * z + -1.0 / 87178291200.0;
    c = c * z + 1.0 / 479001600.0;
    c = c * z + -1.0 / 3628800.0;
    c = c * z + 1.0 / 40320.0;
    c = c * z + -1.0 / 720.0;
    c = c * z + 1.0 / 24.0;
    double half = 0.5 * z, most = 1.0 - half;
    s = r + (r * (z * s) + at.rest * (1.0 - half));
    c = most + (((1.0 - most) - half) + (z * (z * c) - r * at.rest));
    bool odd = at.quarter & 1;
    cos = odd ? s : c;
    sin = odd ? c : s;
    if ((at.quarter + 1) & 2) cos = -cos;
    if (((at.quarter & 2) != 0) != (x < 0.0)) sin = -sin;
}
