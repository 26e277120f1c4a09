// FP4 weights in Marlin's tiles: products by fp4_product.cuh, whose ladder this is, and what prepares scales.
//
// The ladder of the rest: a thread an element, once a weight is loaded; a largest scale by one block.
#include "fp4_product.cuh"
#include "fp8_scales.cuh"

typedef MarlinCodes<BF16, S0E5M3> NvBf16;
typedef MarlinCodes<F16, S0E5M3> NvF16;
typedef MarlinCodes<BF16, E8M0> MxBf16;

FP4_KERNELS(marlin_nvfp4_bf16, NvBf16)
FP4_KERNELS(marlin_nvfp4_f16, NvF16)
FP4_KERNELS(marlin_mxfp4_bf16, MxBf16)

#include "marlin_stream_fp4.cuh"

#if VT_TILES
typedef StreamedFp4<BF16, S0E5M3> StreamedNvBf16;
typedef StreamedFp4<F16, S0E5M3> StreamedNvF16;
typedef StreamedFp4<BF16, E8M0> StreamedMxBf16;
MARLIN_STREAMED(marlin_nvfp4_bf16, StreamedNvBf16)
MARLIN_STREAMED(marlin_nvfp4_f16, StreamedNvF16)
MARLIN_STREAMED(marlin_mxfp4_bf16, StreamedMxBf16)
#endif

VT_FN float element(const void* x, i64 at, i64 kind) {
    float one[1];
    load(one, x, at, (int)kind);
    return one[0];
}
// Of each four columns 0, 2, 1, 3.
VT_FN i64 mixed(i64 at) { return at & ~3ll | (at & 1) << 1 | (at >> 1 & 1); }

// The largest of `count` scales, 0 among them, by one block; of float16 numbers where `half`.
extern "C" __global__ void __launch_bounds__(1024) marlin_fp4_largest(
    i64 count, const void* scales, i64 kind, i64 half, float* largest) {
    VT_SHARED(memory);
    unsigned top = 0;
    for (i64 at = threadIdx.x; at < count; at += blockDim.x) {
        float x = element(scales, at, kind);
        if (half) x = through(x, F16);
        if (x > 0.0f) top = larger(top, (unsigned)vt_bits(x));
    }
    top = largest_of_block(top, (unsigned*)memory);
    if (threadIdx.x == 0) largest[0] = vt_float((int)top);
}

// `lift`: the largest scale is brought near 448 by a power of two; else `factor` is given, or 1.
extern "C" __global__ void __launch_bounds__(256) marlin_nvfp4_scales(
    i64 count, const void* scales, i64 kind, i64 lift, const float* largest, float given, unsigned char* out,
    float* factor) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    float power = given;
    if (lift && largest[0] > 0.0f && largest[0] < 448.0f)
        power = vt_float(vt_bits(448.0f / largest[0]) & 0x7f800000);
    if (at == 0) factor[0] = power;
    if (at >= count) return;
    float x = through(element(scales, mixed(at), kind), F16) * (power * 128.0f);
    out[at] = (unsigned char)((x < 2.0f ? 0u : narrow_f16(x, 0.0f)) >> 7);
}

// x * 2^exponent.
extern "C" __global__ void __launch_bounds__(256) marlin_nvfp4_global(i64 count, const float* x, i64 exponent, float* out) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at < count) out[at] = x[at] * vt_float((int)(exponent + 127) << 23);
}

extern "C" __global__ void __launch_bounds__(256) marlin_mxfp4_scales(
    i64 count, const unsigned char* scales, i64 raise, unsigned char* out) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at < count) out[at] = raise ? (unsigned char)(scales[at] + 6) : scales[mixed(at)];
}

// Codes q of 4 bits as sign and magnitude around their zero points, a word of eight a thread.
extern "C" __global__ void __launch_bounds__(256) marlin_int4_codes(
    i64 count, i64 across, i64 group, const unsigned* words, const unsigned* zeros, unsigned* out) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    unsigned word = words[at], zero = 0x88888888u, codes = 0;
    if (zeros != nullptr) zero = zeros[at / across / group * across + at % across];
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        unsigned q = word >> i & 15u, z = zero >> i & 15u;
        codes |= (q >= z ? q - z : 15u - q) << i;
    }
    out[at] = codes;
}

// Scales over the largest, rounded to their dtype, in steps of 1 / 4096.
extern "C" __global__ void __launch_bounds__(256) marlin_int8_scales(
    i64 count, const void* scales, i64 kind, const float* largest, short* out, float* factor) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at == 0) factor[0] = largest[0] / 4096.0f;
    if (at >= count) return;
    out[at] = (short)(int)rintf(through(element(scales, at, kind) / largest[0], (int)kind) * 4096.0f);
}
