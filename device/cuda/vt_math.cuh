// The transcendental functions of MIRROR for device code: the steps of ops/numerics/transcendental.py in the same order
// with the same constants, so that results are equal to the byte (NaN payloads aside). Within 1 ulp of the exact value
// over all of float32, gradual underflow included (parity/numerics_proof.json).
//
// Compile with -fmad=false, without -ftz=true and -use_fast_math: a product and a sum that the compiler fuses round
// once where MIRROR rounds twice. CuPy adds -ftz=true to whatever it compiles itself (RawModule(code=...), seen in
// 14.2.0), and then subnormals vanish: build a cubin with nvcc or NVRTC and let CuPy load that. As plain C++
// (-ffp-contract=off) the same text runs on a host, for the proof.
#pragma once

#ifdef __CUDACC__
#define VT_FN static __device__ __forceinline__
#define VT_TABLE static __device__ const
VT_FN float vt_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
VT_FN float vt_reciprocal(float x) { return __frcp_rn(x); }
VT_FN int vt_bits(float x) { return __float_as_int(x); }
VT_FN float vt_float(int bits) { return __int_as_float(bits); }
VT_FN float vt_abs(float x) { return fabsf(x); }
VT_FN float vt_load(const float* p) { return __ldg(p); }
#else
#include <cmath>
#include <cstring>
#define VT_FN static inline
#define VT_TABLE static const
VT_FN float vt_fma(float a, float b, float c) { return std::fma(a, b, c); }
VT_FN float vt_reciprocal(float x) { return 1.0f / x; }
VT_FN int vt_bits(float x) { int bits; std::memcpy(&bits, &x, 4); return bits; }
VT_FN float vt_float(int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
VT_FN float vt_abs(float x) { return std::fabs(x); }
VT_FN float vt_load(const float* p) { return *p; }
#endif

#define VT_LN2_HI 0.69314575f
#define VT_LN2_LO 1.4286068e-06f
#define VT_MAGIC 12582912.0f  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
#define VT_INF vt_float(0x7f800000)
#define VT_NAN vt_float(0x7fffffff)

// MIRROR's minimum and maximum: a NaN on either side stays (fminf and fmaxf drop it).
VT_FN float vt_minimum(float a, float b) { return (a <= b || a != a) ? a : b; }
VT_FN float vt_maximum(float a, float b) { return (a >= b || a != a) ? a : b; }

template <int N>
VT_FN float vt_horner(const float (&c)[N], float x) {
    float total = vt_fma(c[N - 1], x, c[N - 2]);
#pragma unroll
    for (int i = N - 3; i >= 0; --i) total = vt_fma(total, x, c[i]);
    return total;
}

VT_FN float vt_clip(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

VT_FN float vt_power(int k) { return vt_float((int)((unsigned)(k + 127) << 23)); }

// x * 2^(t - MAGIC), rounded once: the first of the two factors is exact for x near 1.
VT_FN float vt_scale(float x, float t) {
    int k = (int)((unsigned)vt_bits(t) - 0x4b400000u);
    int half = k >> 1;
    return x * vt_power(half) * vt_power(k - half);
}

struct vt_pair { float hi, lo; };         // hi + lo, unevaluated
struct vt_scaled { float hi, lo, t; };    // (hi + lo) * 2^(t - MAGIC)

// e^(x + x_lo), |x| <= 120.
VT_FN vt_scaled vt_exp_parts(float x, float x_lo) {
    const float c[] = {0.49999994f, 0.16666521f, 0.04166827f, 0.008368679f, 0.0013820437f};
    float t = vt_fma(x, 1.442695f, VT_MAGIC);
    float n = t - VT_MAGIC;
    float whole = vt_fma(n, -VT_LN2_HI, x);
    float r = vt_fma(n, -VT_LN2_LO, whole);
    float r_lo = vt_fma(n, -VT_LN2_LO, whole - r) + x_lo;
    float q = (r * r) * vt_horner(c, r);
    float one = 1.0f + r;
    float p = one + q;
    float p_lo = vt_fma(r_lo, p, (r - (one - 1.0f)) + (q - (p - one)));
    return {p, p_lo, t};
}

// k ln2 + log(1 + f + f_lo), -0.293 <= f < 0.5.
VT_FN vt_pair vt_log_parts(float f, float f_lo, float k) {
    const float c[] = {
        0.3333332f, -0.2500027f, 0.2000177f, -0.16653953f, 0.14216301f, -0.12638055f,
        0.12129186f, -0.1045032f, 0.047999755f};
    float big = k * VT_LN2_HI;
    float line = big + f;
    float square = f * f;
    float half = 0.5f * square;
    float s = line - half;
    float low = vt_fma(square, f * vt_horner(c, f), k * VT_LN2_LO);
    low = vt_fma(-0.5f, vt_fma(f, f, -square), low);
    low = vt_fma(f_lo, vt_fma(f, f - 1.0f, 1.0f), low);
    return {s, (f - (line - big)) + (((line - s) - half) + low)};
}

// y, or what log makes of `at`, its argument, where that is no positive number.
VT_FN float vt_log_of(float y, float at) {
    y = at < VT_INF ? y : at;
    return at > 0.0f ? y : (at == 0.0f ? -VT_INF : VT_NAN);
}

// 1 / (1 + e^-(x + x_lo)), |x| <= 120.
VT_FN vt_scaled vt_sigmoid_parts(float x, float x_lo) {
    bool negative = x < 0.0f;
    vt_scaled g = vt_exp_parts(negative ? x : -x, negative ? x_lo : -x_lo);
    float e = vt_scale(g.hi, g.t);
    float d = 1.0f + e;
    float d_lo = (e - (d - 1.0f)) + vt_scale(g.lo, g.t);
    float inverse = vt_reciprocal(d);
    float top = negative ? g.hi : 1.0f, top_lo = negative ? g.lo : 0.0f;
    float q = top * inverse;
    float rest = vt_fma(-q, d_lo, vt_fma(-q, d, top)) + top_lo;
    return {q, rest * inverse, negative ? g.t : VT_MAGIC};
}

// x * w, rounded once; beyond +-limit x, or zero (NaN at -inf).
VT_FN float vt_gated(float x, vt_scaled w, float limit) {
    float y = vt_scale(vt_fma(x, w.hi, x * w.lo), w.t);
    y = x > limit ? x : y;
    y = x < -limit ? x * 0.0f : y;
    return x == 0.0f ? x : y;
}

VT_FN float vt_copysign(float size, float sign) {
    return vt_float((vt_bits(size) & 0x7fffffff) | (vt_bits(sign) & (int)0x80000000));
}

// 1 - (hi + lo) * 2^(t - MAGIC)
VT_FN vt_pair vt_one_minus(float hi, float lo) {
    float rest = 1.0f - hi;
    return {rest, ((1.0f - rest) - hi) - lo};
}

VT_FN float vt_exp(float x) {
    vt_scaled g = vt_exp_parts(vt_clip(x, -104.0f, 89.0f), 0.0f);
    return vt_scale(g.hi + g.lo, g.t);
}

VT_FN float vt_log(float x) {
    bool tiny = x < 0x1p-126f;
    int bits = vt_bits(tiny ? x * 0x1p23f : x);
    int k = (int)((unsigned)bits - 0x3f3504f3u) >> 23;
    float f = vt_float((int)((unsigned)bits - ((unsigned)k << 23))) - 1.0f;
    vt_pair y = vt_log_parts(f, 0.0f, (float)k - (tiny ? 23.0f : 0.0f));
    return vt_log_of(y.hi + y.lo, x);
}

VT_FN float vt_log1p(float x) {
    float u = 1.0f + x;
    float lost = vt_abs(x) < 1.0f ? x - (u - 1.0f) : 1.0f - (u - x);
    int bits = vt_bits(u);
    int k = (int)((unsigned)bits - 0x3f3504f3u) >> 23;
    float f = vt_float((int)((unsigned)bits - ((unsigned)k << 23))) - 1.0f;
    float f_lo = lost * vt_power(-(k < 126 ? k : 126));
    bool near = k == 0;
    vt_pair y = vt_log_parts(near ? x : f, near ? 0.0f : f_lo, (float)k);
    return x == 0.0f ? x : vt_log_of(y.hi + y.lo, u);
}

VT_FN float vt_sigmoid(float x) {
    vt_scaled q = vt_sigmoid_parts(vt_clip(x, -120.0f, 120.0f), 0.0f);
    return vt_scale(q.hi + q.lo, q.t);
}

VT_FN float vt_silu(float x) {
    return vt_gated(x, vt_sigmoid_parts(vt_clip(x, -120.0f, 120.0f), 0.0f), 120.0f);
}

VT_FN float vt_tanh(float x) {
    const float c[] = {-0.3333332f, 0.13332637f, -0.053856853f, 0.02108834f, -0.006295717f};
    float a = vt_abs(x);
    float z = a * a;
    float near = vt_fma(a, z * vt_horner(c, z), a);
    vt_scaled q = vt_sigmoid_parts(vt_clip(-2.0f * a, -40.0f, 0.0f), 0.0f);
    vt_pair far = vt_one_minus(2.0f * vt_scale(q.hi, q.t), 2.0f * vt_scale(q.lo, q.t));
    return vt_copysign(a < 0.55f ? near : far.hi + far.lo, x);
}

VT_FN float vt_softplus(float x) {
    vt_scaled g = vt_exp_parts(vt_clip(-vt_abs(x), -120.0f, 0.0f), 0.0f);
    float e = vt_scale(g.hi, g.t), e_lo = vt_scale(g.lo, g.t);
    bool half = e >= 0.5f;
    vt_pair s = vt_log_parts(half ? 0.5f * (e - 1.0f) : e, half ? 0.5f * e_lo : e_lo, half ? 1.0f : 0.0f);
    float floor = x > 0.0f ? x : 0.0f;
    float y = floor + s.hi;
    float back = y - floor;
    y = y + (((floor - (y - back)) + (s.hi - back)) + s.lo);
    y = x < -18.0f ? vt_scale(g.hi + g.lo, g.t) : y;
    y = x > 120.0f ? x : y;
    return x == x ? y : x;
}

VT_FN float vt_erf(float x) {
    const float c[] = {
        0.12837917f, -0.3761263f, 0.112836204f, -0.026855117f, 0.005190035f, -8.012929e-04f,
        7.797189e-05f};
    const float p[] = {
        1.1293337f, 0.6337739f, 0.1077158f, -0.024662342f, 0.0039387792f, -3.62172e-04f,
        8.502449e-06f, 9.397571e-07f};
    float a = vt_abs(x);
    float near = vt_fma(a, vt_horner(c, a * a), a);
    float b = vt_clip(a, 0.875f, 4.0f);
    float slope = vt_horner(p, b);
    float y = -(b * slope);
    vt_scaled g = vt_exp_parts(y, -vt_fma(b, slope, y) - -1.4165572e-04f);
    vt_pair far = vt_one_minus(vt_scale(g.hi, g.t), vt_scale(g.lo, g.t));
    return vt_copysign(a < 0.875f ? near : far.hi + far.lo, x);
}

VT_FN float vt_gelu_tanh(float x) {
    const float linear = 1.5957692f, linear_lo = -4.534068e-08f;
    const float cube = 0.071354814f, cube_lo = 2.3988325e-09f;
    float a = vt_clip(x, -11.0f, 11.0f);
    float z = a * a;
    float z_lo = vt_fma(a, a, -z);
    float cubic = cube * z;
    float cubic_lo = vt_fma(cube, z, -cubic) + vt_fma(cube, z_lo, cube_lo * z);
    float slope = linear + cubic;
    float back = slope - linear;
    float slope_lo = ((linear - (slope - back)) + (cubic - back)) + (cubic_lo + linear_lo);
    float u = a * slope;
    float u_lo = vt_fma(a, slope, -u) + a * slope_lo;
    return vt_gated(x, vt_sigmoid_parts(u, u_lo), 11.0f);
}

// exp(a^2/2) * Phi(-a) around a = 1/4, 3/4 ... : c0 ... c6, low part of c0.
VT_TABLE float vt_mills[30][8] = {
    {0.4140321f, -0.2954343f, 0.17008673f, -0.08429804f,
     0.03725315f, -0.01520605f, 0.005625127f, 1.4961116e-09f},
    {0.30023247f, -0.17376795f, 0.084953256f, -0.036681972f,
     0.014359442f, -0.005250639f, 0.0017652562f, -7.658652e-09f},
    {0.23076032f, -0.11049189f, 0.046322737f, -0.017528629f,
     0.0061025256f, -0.00200319f, 6.107139e-04f, 2.9307848e-10f},
    {0.18523167f, -0.07478687f, 0.027177325f, -0.009075104f,
     0.0028236783f, -8.3624444e-04f, 2.3209234e-04f, -6.0568377e-09f},
    {0.15365194f, -0.05322542f, 0.01694737f, -0.005031281f,
     0.0014067388f, -3.7476482e-04f, 9.491184e-05f, -4.1790665e-10f},
    {0.13072473f, -0.039449263f, 0.011119633f, -0.0029566258f,
     7.470932e-04f, -1.8275826e-04f, 4.251314e-05f, 5.9934875e-09f},
    {0.11345206f, -0.030223079f, 0.0076135285f, -0.0018263265f,
     4.1945197e-04f, -9.346889e-05f, 1.9866324e-05f, 1.1859828e-10f},
    {0.10003921f, -0.023795245f, 0.005403522f, -0.001177281f,
     2.4710782e-04f, -5.108959e-05f, 1.0031733e-05f, 3.1902594e-09f},
    {0.08935932f, -0.019165177f, 0.00395366f, -7.873317e-04f,
     1.5181964e-04f, -2.9025585e-05f, 5.3134268e-06f, -2.080488e-09f},
    {0.0806754f, -0.015734134f, 0.0029691306f, -5.43593e-04f,
     9.676843e-05f, -1.6752198e-05f, 2.8747688e-06f, -1.6209993e-09f},
    {0.07348823f, -0.013129069f, 0.0022803107f, -3.8580422e-04f,
     6.3702035e-05f, -1.0399019e-05f, 1.6018781e-06f, 2.8296423e-09f},
    {0.067449234f, -0.0111092f, 0.0017856653f, -2.8052993e-04f,
     4.3137752e-05f, -6.658519e-06f, 9.688863e-07f, -3.0745622e-09f},
    {0.062308487f, -0.009514237f, 0.001422252f, -2.0841268e-04f,
     2.996313e-05f, -3.908323e-06f, 5.270492e-07f, 3.5731604e-10f},
    {0.057882633f, -0.008234517f, 0.0011498235f, -1.577069e-04f,
     2.127195e-05f, -3.199113e-06f, 4.259194e-07f, -1.3363367e-09f},
    {0.05403436f, -0.0071931747f, 9.419215e-04f, -1.21415e-04f,
     1.5415584e-05f, -1.9268043e-06f, 2.4492067e-07f, -3.4389622e-10f},
    {0.050658982f, -0.006335167f, 7.807179e-04f, -9.487367e-05f,
     1.13726255e-05f, -1.2734855e-06f, 1.5698382e-07f, 8.8082805e-11f},
    {0.04767539f, -0.005620307f, 6.5392937e-04f, -7.513523e-05f,
     8.527309e-06f, -8.8857774e-07f, 1.0110505e-07f, 9.300554e-10f},
    {0.04501983f, -0.005018742f, 5.5292185e-04f, -6.0213482e-05f,
     6.4863357e-06f, -8.4232767e-07f, 9.0957904e-08f, 1.4928536e-09f},
    {0.04264155f, -0.004507948f, 4.7151503e-04f, -4.880269e-05f,
     5.001857e-06f, -6.1913414e-07f, 5.986143e-08f, -8.5839846e-10f},
    {0.04049965f, -0.00407069f, 4.0521176e-04f, -3.995983e-05f,
     3.9050287e-06f, -3.5968512e-07f, 2.9688993e-08f, 3.634465e-10f},
    {0.038560845f, -0.0036936065f, 3.5069004e-04f, -3.300993e-05f,
     3.0817585e-06f, -3.0121902e-07f, 2.344896e-08f, 1.2810543e-09f},
    {0.036797773f, -0.0033662186f, 3.0546196e-04f, -2.7494007e-05f,
     2.456159e-06f, -3.0582916e-07f, 2.828983e-08f, 1.0344488e-10f},
    {0.03518774f, -0.0030802186f, 2.6764063e-04f, -2.308013e-05f,
     1.9765464e-06f, -2.5861235e-07f, 2.4826079e-08f, -1.0391719e-09f},
    {0.033711772f, -0.0028289545f, 2.3577832e-04f, -1.9522651e-05f,
     1.605844e-06f, -9.362633e-08f, 5.8284035e-09f, 2.3523822e-12f},
    {0.032353897f, -0.0026070524f, 2.0875238e-04f, -1.6606553e-05f,
     1.3132156e-06f, -1.7278289e-07f, 1.6227947e-08f, -4.812592e-10f},
    {0.03110056f, -0.002410133f, 1.8568333e-04f, -1.4220654e-05f,
     1.0830494e-06f, -1.1868046e-07f, 1.0163111e-08f, 6.118861e-10f},
    {0.029940203f, -0.0022346f, 1.6587606e-04f, -1.2246994e-05f,
     8.9967205e-07f, -7.0892604e-08f, 3.4921155e-09f, -5.3872695e-10f},
    {0.028862895f, -0.0020774794f, 1.4877638e-04f, -1.0603184e-05f,
     7.515625e-07f, -3.038068e-08f, 4.87953e-09f, -8.263708e-10f},
    {0.02786007f, -0.0019362941f, 1.3393885e-04f, -9.221926e-06f,
     6.321095e-07f, -4.162897e-08f, 1.9868753e-09f, -4.3611614e-10f},
    {0.026924292f, -0.0018089686f, 1.21002886e-04f, -8.057025e-06f,
     5.343869e-07f, -5.632073e-08f, 2.6815972e-09f, 7.0126577e-10f},
};

VT_FN float vt_gelu_erf(float x) {
    float a = vt_clip(vt_abs(x), 0.0f, 14.75f);
    int at = a >= 0.0f ? (int)(a * 2.0f) : 0;
    const float* c = vt_mills[at];
    float d = a - ((float)at * 0.5f + 0.25f);
    float bend = vt_load(c + 6);
#pragma unroll
    for (int i = 5; i >= 1; --i) bend = vt_fma(bend, d, vt_load(c + i));
    bend = bend * d;
    float c0 = vt_load(c);
    float m = c0 + bend;
    float m_lo = (bend - (m - c0)) + vt_load(c + 7);
    float z = a * a;
    vt_scaled g = vt_exp_parts(-0.5f * z, -0.5f * vt_fma(a, a, -z));
    float tail = g.hi * m;
    float tail_lo = vt_fma(g.hi, m, -tail) + vt_fma(g.hi, m_lo, g.lo * m);
    vt_pair rest = vt_one_minus(vt_scale(tail, g.t), vt_scale(tail_lo, g.t));
    bool negative = x < 0.0f;
    vt_scaled w = {negative ? tail : rest.hi, negative ? tail_lo : rest.lo, negative ? g.t : VT_MAGIC};
    return vt_gated(x, w, 14.75f);
}
