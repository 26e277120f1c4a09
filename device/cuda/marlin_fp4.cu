// FP4 weights in Marlin's tiles: products by fp4_product.cuh, whose ladder this is, and what prepares scales.
//
// The ladder of the rest: a thread an element, once a weight is loaded; of NVFP4's scales eight. A largest scale is one of
// a part each from as many blocks as fill the GPU, and of those parts by every block that asks.
#include "fp4_product.cuh"
#include "fp8_scales.cuh"

typedef MarlinCodes<BF16, S0E5M3> NvBf16;
typedef MarlinCodes<F16, S0E5M3> NvF16;
typedef MarlinCodes<BF16, E8M0> MxBf16;

FP4_KERNELS(marlin_nvfp4_bf16, NvBf16)
FP4_KERNELS(marlin_nvfp4_f16, NvF16)
FP4_KERNELS(marlin_mxfp4_bf16, MxBf16)

#include "marlin_formats_fp4.cuh"
#include "marlin_few.cuh"
#include "marlin_loaded.cuh"
#include "marlin_stream.cuh"

#if VT_TILES
#define MARLIN_FORMS(NAME, KIND, SCALE)                                                                               \
    typedef StreamedFp4<KIND, SCALE> NAME##_codes;                                                                    \
    MARLIN_FEW(NAME, NAME##_codes, 8)                                                                                 \
    MARLIN_FEW(NAME, NAME##_codes, 16)                                                                                \
    MARLIN_STREAM(NAME, NAME##_codes, 32)                                                                             \
    MARLIN_STREAM(NAME, NAME##_codes, 64)                                                                             \
    MARLIN_LOADED_FORMS(NAME, NAME##_codes)
MARLIN_FORMS(marlin_nvfp4_bf16, BF16, S0E5M3)
MARLIN_FORMS(marlin_nvfp4_f16, F16, S0E5M3)
MARLIN_FORMS(marlin_mxfp4_bf16, BF16, E8M0)
#endif

VT_FN float element(const void* x, i64 at, i64 kind) {
    float one[1];
    load(one, x, at, (int)kind);
    return one[0];
}
// Of each four columns 0, 2, 1, 3.
VT_FN i64 mixed(i64 at) { return at & ~3ll | (at & 1) << 1 | (at >> 1 & 1); }

// Eight neighbours from `at` on, zeros beyond the last of `count`.
VT_FN void eight_scales(float (&x)[8], const void* scales, i64 at, i64 count, i64 kind, bool wide) {
    if (wide && at + 8 <= count) return load(x, scales, at, (int)kind);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = at + j < count ? element(scales, at + j, kind) : 0.0f;
}

// The largest of a block's part of `count` scales, 0 among them; of float16 numbers where `half`.
extern "C" __global__ void __launch_bounds__(256) marlin_fp4_largest(
    i64 count, i64 parts, const void* scales, i64 kind, i64 half, i64 wide, float* largest) {
    __shared__ unsigned tops[8];
    unsigned top = 0;
    for (i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) * 8; at < count; at += parts * 2048) {
        float x[8];
        eight_scales(x, scales, at, count, kind, wide != 0);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (half) x[j] = through(x[j], F16);
            if (x[j] > 0.0f) top = larger(top, (unsigned)vt_bits(x[j]));
        }
    }
    top = largest_of_block(top, tops);
    if (threadIdx.x == 0) largest[blockIdx.x] = vt_float((int)top);
}

// Of all parts, for each thread of a block of 256.
VT_FN float largest_of_parts(const float* largest, i64 parts) {
    __shared__ unsigned tops[8];
    unsigned top = 0;
    for (i64 at = threadIdx.x; at < parts; at += 256) top = larger(top, (unsigned)vt_bits(largest[at]));
    return vt_float((int)largest_of_block(top, tops));
}

// `lift`: the largest scale is brought near 448 by a power of two; else `factor` is given, or 1. `wide`: eight at a time,
// else four; rows are of whole fours.
extern "C" __global__ void __launch_bounds__(256) marlin_nvfp4_scales(
    i64 count, const void* scales, i64 kind, i64 lift, const float* largest, i64 parts, float given, unsigned char* out,
    float* factor, i64 wide) {
    i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) * 8;
    float power = given, x[8];
    if (at < count) eight_scales(x, scales, at, count, kind, wide != 0);
    if (lift) {
        const float top = largest_of_parts(largest, parts);
        if (top > 0.0f && top < 448.0f) power = vt_float(vt_bits(448.0f / top) & 0x7f800000);
    }
    if (at == 0) factor[0] = power;
    if (at >= count) return;
    unsigned words[2] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float y = through(x[mixed(j)], F16) * (power * 128.0f);
        words[j / 4] |= ((y < 2.0f ? 0u : narrow_f16(y, 0.0f)) >> 7 & 0xffu) << j % 4 * 8;
    }
    if (wide && at + 8 <= count) {
        *(uint2*)(out + at) = {words[0], words[1]};
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (at + j < count) out[at + j] = (unsigned char)(words[j / 4] >> j % 4 * 8);
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
    i64 count, const void* scales, i64 kind, const float* largest, i64 parts, short* out, float* factor) {
    const float top = largest_of_parts(largest, parts);
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at == 0) factor[0] = top / 4096.0f;
    if (at >= count) return;
    out[at] = (short)(int)rintf(through(element(scales, at, kind) / top, (int)kind) * 4096.0f);
}
