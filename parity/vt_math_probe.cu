// Every float32 through the functions of vt_math.cuh. As plain C++ it measures them against the double functions of the
// C library; as CUDA it gives the digests that must equal the host's. Built and driven by parity/prove_numerics.py.
#include "../device/cuda/vt_math.cuh"

#define VT_FUNCTIONS(F) \
    F(0, exp) F(1, log) F(2, log1p) F(3, tanh) F(4, sigmoid) F(5, silu) F(6, softplus) F(7, erf) F(8, gelu_tanh) \
    F(9, gelu_erf)

typedef unsigned long long u64;

template <int N> struct Function;
#define VT_DEFINE(number, name) \
    template <> struct Function<number> { VT_FN float at(float x) { return vt_##name(x); } };
VT_FUNCTIONS(VT_DEFINE)

// A mix of an input and its result; NaN counts as one value. Sums of these do not depend on the order.
VT_FN u64 mix(unsigned input, unsigned result) {
    if ((result & 0x7fffffffu) > 0x7f800000u) result = 0x7fc00000u;
    u64 h = ((u64)input << 32 | result) * 0x9e3779b97f4a7c15ull;
    h = (h ^ (h >> 29)) * 0xbf58476d1ce4e5b9ull;
    return h ^ (h >> 32);
}

#ifdef __CUDACC__

template <int N>
static __device__ u64 digest(u64 begin, u64 end) {
    u64 sum = 0;
    for (u64 i = begin + blockIdx.x * (u64)blockDim.x + threadIdx.x; i < end; i += gridDim.x * (u64)blockDim.x)
        sum += mix((unsigned)i, (unsigned)vt_bits(Function<N>::at(vt_float((int)(unsigned)i))));
    return sum;
}

#define VT_KERNELS(number, name)                                                                         \
    extern "C" __global__ void digest_##name(u64 begin, u64 end, u64* out) {                             \
        atomicAdd(out, digest<number>(begin, end));                                                      \
    }                                                                                                    \
    extern "C" __global__ void apply_##name(const float* x, float* y, int n) {                           \
        int i = blockIdx.x * blockDim.x + threadIdx.x;                                                   \
        if (i < n) y[i] = vt_##name(x[i]);                                                               \
    }
VT_FUNCTIONS(VT_KERNELS)

#else

#include <cstdint>

static double sigmoid_of(double x) {
    double e = std::exp(-std::fabs(x));
    return (x >= 0 ? 1.0 : e) / (1.0 + e);
}

static double truth(int function, double x) {
    switch (function) {
        case 0: return std::exp(x);
        case 1: return std::log(x);
        case 2: return std::log1p(x);
        case 3: return std::tanh(x);
        case 4: return sigmoid_of(x);
        case 5: return x * sigmoid_of(x);
        case 6: return (x > 0 ? x : x == x ? 0.0 : x) + std::log1p(std::exp(-std::fabs(x)));
        case 7: return std::erf(x);
        case 8: return x * sigmoid_of(1.5957691216057307118 * (x + 0.044715 * x * x * x));
        default: return 0.5 * x * std::erfc(-x * 0.70710678118654752440);
    }
}

// |got - want| in units of the float32 spacing at want, which is 2^-149 under 2^-126.
static double ulps(float got, double want) {
    int64_t bits;
    std::memcpy(&bits, &want, 8);
    int exponent = (int)(bits >> 52 & 0x7ff) - 1023;
    bits = (int64_t)(1023 - ((exponent < -126 ? -126 : exponent) - 23)) << 52;
    double per_unit;
    std::memcpy(&per_unit, &bits, 8);
    return std::fabs((double)got - want) * per_unit;
}

struct Verdict {
    double worst;          // ulp
    u64 digest;
    unsigned worst_at, unlike_at;
    u64 unlike;            // NaN, infinity or sign not that of the truth
};

template <int N>
static void apply(const float* x, float* y, int n) {
    for (int i = 0; i < n; ++i) y[i] = Function<N>::at(x[i]);
}

static void apply_any(int function, const float* x, float* y, int n) {
    switch (function) {
#define VT_CASE(number, name) \
    case number: apply<number>(x, y, n); break;
        VT_FUNCTIONS(VT_CASE)
    }
}

extern "C" void vt_probe_apply(int function, const float* x, float* y, int n) { apply_any(function, x, y, n); }

extern "C" void vt_probe_prove(int function, u64 begin, u64 end, Verdict* verdict) {
    const int block = 2048;
    static thread_local float x[block], y[block];
    for (u64 start = begin; start < end; start += block) {
        int n = (int)(end - start < block ? end - start : block);
        for (int i = 0; i < n; ++i) x[i] = vt_float((int)(unsigned)(start + i));
        apply_any(function, x, y, n);
        for (int i = 0; i < n; ++i) {
            verdict->digest += mix((unsigned)(start + i), (unsigned)vt_bits(y[i]));
            double want = truth(function, x[i]);
            float rounded = (float)want;
            bool like = (y[i] != y[i]) == (want != want) && std::isinf(y[i]) == std::isinf(rounded) &&
                        (want != want || std::signbit(y[i]) == std::signbit(want));
            if (!like) {
                if (!verdict->unlike++) verdict->unlike_at = (unsigned)(start + i);
            } else if (std::isfinite(rounded)) {
                double error = ulps(y[i], want);
                if (error > verdict->worst) verdict->worst = error, verdict->worst_at = (unsigned)(start + i);
            }
        }
    }
}

#endif
