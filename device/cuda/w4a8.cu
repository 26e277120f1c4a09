// W4A8's weights: eighths of scales, codes less eight, codes encoded in the order of the tensor cores' operands and back,
// tables of scales, weights as e4m3 codes.
//
// The ladder: a thread a word of what is written, or a code of it where there are few. Weights are prepared once.
#include "w4a8.cuh"

#define HERE(count)                                        \
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;          \
    if (at >= count) return;
#define KERNEL extern "C" __global__ void __launch_bounds__(256)

// Codes p become those of an eighth of their values; factors of `channels` rows become eight times as large.
KERNEL w4a8_eighths(i64 count, i64 channels, unsigned char* codes, float* factors) {
    HERE(count)
    codes[at] = (unsigned char)one_e4m3(e4m3_value(codes[at]) * 0.125f);
    if (at < channels) factors[at] *= 8.0f;
}

KERNEL w4a8_signed(i64 count, const unsigned* words, unsigned* out) {
    HERE(count)
    out[at] = words[at] ^ 0x88888888u;
}

// Words [depth / 8, columns] along k become words in order, column after column of `out`.
KERNEL w4a8_encode(i64 count, i64 high, i64 columns, const unsigned* words, unsigned* out) {
    HERE(count)
    i64 number = at % columns * high + at / columns, tile = number / 64, across = columns / 16;
    int lane = (int)(number % 64 / 2), half = (int)(number % 2), t = lane % 4;
    const unsigned* from = words + (tile / across * 4 + 2 * half + t / 2) * columns + tile % across * 16 + lane / 4;
    unsigned low = from[0] >> 16 * (t % 2) & 0xffffu, up = from[8] >> 16 * (t % 2) & 0xffffu;
    out[at] = encoded(low | up << 16);
}

KERNEL w4a8_decode(i64 count, i64 high, i64 columns, const unsigned* words, unsigned* out) {
    HERE(count)
    i64 k = at / columns * 8, n = at % columns;
    int shift = 4 * nibble_of(k, n);
    i64 first = word_of(k, n, columns), second = word_of(k + 4, n, columns);
    unsigned low = words[first % high * columns + first / high] >> shift & 0xffffu;
    unsigned up = words[second % high * columns + second / high] >> shift & 0xffffu;
    out[at] = encoded(low | up << 16);
}

KERNEL w4a8_tables(i64 count, const unsigned char* scales, unsigned char* out) {
    HERE(count)
    float scale = e4m3_value(scales[at]);
    for (int i = 0; i < 8; ++i) out[8 * at + i] = (unsigned char)one_e4m3(scale * (float)(i - 8));
}

// Words along k of groups of 128: eight codes of a column.
KERNEL w4a8_weights(i64 count, i64 columns, const unsigned* words, const unsigned char* scales, unsigned char* out) {
    HERE(count)
    i64 row = at / columns, n = at % columns;
    unsigned w = words[at];
    float scale = e4m3_value(scales[row / 16 * columns + n]);
    for (int i = 0; i < 8; ++i) {
        int q = (int)(w << (28 - 4 * i)) >> 28;
        out[(8 * row + i) * columns + n] = q ? (unsigned char)one_e4m3(scale * (float)q) : 0;
    }
}
