// GPTQ's weights: what they stand for, and products with them: w4a16.cuh, whose ladder this is.
#include "codes.cuh"
#include "moves.cuh"
#include "plain_product.cuh"
#include "w4a16.cuh"

// w[k, n] = (q - zero) * scale, rounded to the scales' dtype: eight columns a thread, or one. Words in layout `from`; rows
// have the groups that `groups` names, or neighbours do; a group out of range is the first one. zero: `bias` without zeros.
template <int V> VT_FN void dequantise(
    i64 count, i64 k, i64 n, i64 bits, i64 from, const unsigned* words, const void* scales, const unsigned* zeros,
    const int* groups, i64 group_count, i64 bias, void* out, i64 kind) {
    i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) * V;
    if (at >= count) return;
    i64 row = at / n, column = at % n, group = row / (k / group_count);
    if (groups != nullptr) group = (unsigned long long)groups[row] < (unsigned long long)group_count ? groups[row] : 0;
    const Codes weights = {k, n, (int)bits, (int)from}, points = {group_count, n, (int)bits, ACROSS};
    float scale[V], w[V];
    load(scale, scales, group * n + column, (int)kind);
#pragma unroll
    for (int j = 0; j < V; ++j) {
        int zero = (int)bias + (zeros != nullptr ? (int)fetch_code(points, zeros, group, column + j) : 0);
        w[j] = (float)((int)fetch_code(weights, words, row, column + j) - zero) * scale[j];
    }
    store(out, at, w, (int)kind);
}

#define DEQUANTISE(NAME, V)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        NAME(i64 count, i64 k, i64 n, i64 bits, i64 from, const unsigned* words, const void* scales,             \
             const unsigned* zeros, const int* groups, i64 group_count, i64 bias, void* out, i64 kind) {         \
        dequantise<V>(count, k, n, bits, from, words, scales, zeros, groups, group_count, bias, out, kind);      \
    }

// Words of eight columns, codes of BITS bits a thread: scales and zero points are read again where a row has others.
template <int BITS, int FROM> VT_FN void dequantise_words(
    unsigned units, unsigned k, unsigned n, const unsigned* words, const void* scales, const unsigned* zeros,
    const int* groups, unsigned group_count, int bias, void* out, int kind) {
    constexpr unsigned COUNT = 32 / BITS, MASK = (1u << BITS) - 1;
    const unsigned unit = blockIdx.x * 256 + threadIdx.x, across = n / 8;
    if (unit >= units) return;
    const unsigned row = unit / across, column = (unit - row * across) * 8, rows = k / group_count;
    const uint4* from = (const uint4*)(words + (i64)row * n + column);
    const uint4 low = from[0], high = from[1];
    const unsigned own[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const bool one_group = rows % COUNT == 0;
    const unsigned first = row * COUNT / rows;
    float scale[8];
    unsigned points[BITS / 4], last = ~0u;
#pragma unroll
    for (unsigned i = 0; i < COUNT; ++i) {
        const unsigned at = row * COUNT + i;
        unsigned group = groups != nullptr ? (unsigned)groups[at] : one_group ? first : at / rows;
        if (group >= group_count) group = 0;
        if (group != last) {
            load(scale, scales, (i64)group * n + column, kind);
#pragma unroll
            for (int p = 0; p < BITS / 4; ++p)
                points[p] = zeros != nullptr ? zeros[(i64)group * (n / COUNT) + column / COUNT + p] : 0u;
            last = group;
        }
        float w[8];
#pragma unroll
        for (unsigned j = 0; j < 8; ++j) {
            const int zero = bias + (int)(points[j / COUNT] >> j % COUNT * BITS & MASK);
            w[j] = (float)((int)(own[j] >> bit_of<BITS, FROM>(i) & MASK) - zero) * scale[j];
        }
        store(out, (i64)at * n + column, w, kind);
    }
}

#define DEQUANTISE_WORDS(NAME, BITS, FROM)                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        NAME##_##BITS(i64 units, i64 k, i64 n, const unsigned* words, const void* scales, const unsigned* zeros,       \
                      const int* groups, i64 group_count, i64 bias, void* out, i64 kind) {                             \
        dequantise_words<BITS, FROM>((unsigned)units, (unsigned)k, (unsigned)n, words, scales, zeros, groups,          \
                                     (unsigned)group_count, (int)bias, out, (int)kind);                                \
    }
DEQUANTISE_WORDS(gptq_values_down, 4, DOWN)
DEQUANTISE_WORDS(gptq_values_down, 8, DOWN)
DEQUANTISE_WORDS(gptq_values_shuffled, 4, SHUFFLED)
DEQUANTISE_WORDS(gptq_values_shuffled, 8, SHUFFLED)
DEQUANTISE(gptq_values_v8, 8)
DEQUANTISE(gptq_values_v1, 1)
PLAIN_KERNELS(gptq_plain)

#include "gptq_direct.cuh"
#include "w4a16_loaded.cuh"

W4A16_KERNELS(gptq4_bf16, BF16, SequenceWords)
W4A16_KERNELS(gptq4_f16, F16, SequenceWords)
W4A16_KERNELS(exllama4_bf16, BF16, ShuffledWords)
W4A16_KERNELS(exllama4_f16, F16, ShuffledWords)
GPTQ_DIRECT(gptq4_bf16_direct, BF16, true)
GPTQ_DIRECT(gptq4_f16_direct, F16, true)
GPTQ_DIRECT(exllama4_bf16_direct, BF16, false)
GPTQ_DIRECT(exllama4_f16_direct, F16, false)

#if VT_TILES
W4A16_LOADED_KERNELS(gptq4_bf16_loaded, GptqRows<true>, BF16)
W4A16_LOADED_KERNELS(gptq4_f16_loaded, GptqRows<true>, F16)
W4A16_LOADED_KERNELS(exllama4_bf16_loaded, GptqRows<false>, BF16)
W4A16_LOADED_KERNELS(exllama4_f16_loaded, GptqRows<false>, F16)
#endif
