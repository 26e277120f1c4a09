// Marlin's layouts: weights by moves.cuh, zero points by codes.cuh, scales and biases element by element.
#include "moves.cuh"

MOVE_CODES(marlin_codes)
MOVE_OF_WORDS(down_to_marlin, into_tiles, DOWN, MARLIN)
MOVE_OF_WORDS(down_to_wide, into_tiles, DOWN, MARLIN_WIDE)
MOVE_OF_WORDS(rows_to_marlin, into_tiles, INTERLEAVED, MARLIN)
MOVE_OF_WORDS(rows_to_wide, into_tiles, INTERLEAVED, MARLIN_WIDE)

// Of each `run` of 64 columns out[8 i + j] = s[i + 8 j]; of 32, out[8 i + 2 j + d] = s[2 i + 8 j + d]. Items of 2 or 4 bytes.
extern "C" __global__ void __launch_bounds__(256) marlin_columns(i64 count, i64 run, const void* s, void* out, i64 item) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    i64 p = at % run, from = at - p + (run == 64 ? p / 8 + p % 8 * 8 : p / 8 * 2 + p % 8 / 2 * 8 + p % 2);
    if (item == 2) ((unsigned short*)out)[at] = ((const unsigned short*)s)[from];
    else ((unsigned*)out)[at] = ((const unsigned*)s)[from];
}
