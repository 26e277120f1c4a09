// AWQ's weights and plain columns of 4 bits: what they stand for, and products with them: w4a16.cuh, whose ladder this is.
#include "codes.cuh"
#include "plain_product.cuh"
#include "w4a16.cuh"
#include "w4a16_loaded.cuh"

#define ABREAST 4  // rows of a word each, device/awq.py

// The eight weights of a word in each of up to ABREAST rows of one group, (q - zero) * scale, rounded to the scales' dtype;
// interleaved or in sequence.
extern "C" __global__ void __launch_bounds__(256)
    awq_values(i64 count, i64 words_a_row, i64 rows, i64 rows_a_group, i64 abreast, const unsigned* words, const void* scales,
               const unsigned* zeros, i64 bias, i64 order, void* out, i64 kind, i64 wide) {
    i64 unit = (i64)blockIdx.x * 256 + threadIdx.x;
    if (unit >= count) return;
    i64 row, word;
    if (count < 1ll << 32) row = (unsigned)unit / (unsigned)words_a_row, word = (unsigned)unit % (unsigned)words_a_row;
    else row = unit / words_a_row, word = unit % words_a_row;
    row *= abreast;
    unsigned codes[ABREAST];
#pragma unroll
    for (int r = 0; r < ABREAST; ++r)
        if (r < abreast && row + r < rows) codes[r] = words[(row + r) * words_a_row + word];
    i64 group = rows < 1ll << 32 ? (unsigned)row / (unsigned)rows_a_group : row / rows_a_group;
    i64 beside = group * words_a_row + word;
    unsigned points = zeros != nullptr ? zeros[beside] : 0;
    float scale[8], w[8];
    if (wide) {
        load(scale, scales, beside * 8, (int)kind);
    } else {
        for (int j = 0; j < 8; ++j) {
            float one[1];
            load(one, scales, beside * 8 + j, (int)kind);
            scale[j] = one[0];
        }
    }
#pragma unroll
    for (int r = 0; r < ABREAST; ++r) {
        if (r >= abreast || row + r >= rows) return;
        i64 at = ((row + r) * words_a_row + word) * 8;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            int shift = 4 * (order ? parted(j, 8) : j);
            w[j] = (float)((int)(codes[r] >> shift & 15u) - (int)(points >> shift & 15u) - (int)bias) * scale[j];
        }
        if (wide) {
            store(out, at, w, (int)kind);
        } else {
            for (int j = 0; j < 8; ++j) {
                float one[1] = {w[j]};
                store(out, at + j, one, (int)kind);
            }
        }
    }
}

PLAIN_KERNELS(awq_plain)
W4A16_KERNELS(awq4_bf16, BF16, AwqWords)
W4A16_KERNELS(awq4_f16, F16, AwqWords)

#if VT_TILES
W4A16_LOADED_KERNELS(awq4_bf16_loaded, AwqRows, BF16)
W4A16_LOADED_KERNELS(awq4_f16_loaded, AwqRows, F16)
#endif
