// Machete's prepacked weights, both ways: moves.cuh, codes.cuh; and products with them: w4a16.cuh, whose ladder this is.
#include "moves.cuh"
#include "w4a16.cuh"
#include "w4a16_loaded.cuh"

MOVE_CODES(machete_codes)
MOVE_OF_WORDS(down_to_machete, into_tiles, DOWN, MACHETE)
W4A16_KERNELS(machete4_bf16, BF16, MacheteWords<4>)
W4A16_KERNELS(machete4_f16, F16, MacheteWords<4>)
W4A16_KERNELS(machete8_bf16, BF16, MacheteWords<8>)
W4A16_KERNELS(machete8_f16, F16, MacheteWords<8>)

#if VT_TILES
W4A16_LOADED_KERNELS(machete4_bf16_loaded, MacheteTiles, BF16)
W4A16_LOADED_KERNELS(machete4_f16_loaded, MacheteTiles, F16)
#endif
