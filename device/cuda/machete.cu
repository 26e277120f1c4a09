// Machete's prepacked weights, both ways: moves.cuh, codes.cuh; and products with them: w4a16.cuh, whose ladder this is.
#include "moves.cuh"
#include "w4a16.cuh"

MOVE_CODES(machete_codes)
MOVE_OF_WORDS(down_to_machete, into_tiles, DOWN, MACHETE)
W4A16_KERNELS(machete4_bf16, BF16, MacheteWords<4>)
W4A16_KERNELS(machete4_f16, F16, MacheteWords<4>)
W4A16_KERNELS(machete8_bf16, BF16, MacheteWords<8>)
W4A16_KERNELS(machete8_f16, F16, MacheteWords<8>)
