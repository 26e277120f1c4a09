// Machete's prepacked weights, both ways: moves.cuh, codes.cuh; and products with them: w4a16.cuh, whose ladder this is.
#include "moves.cuh"
#include "w4a16.cuh"
#include "machete_loaded.cuh"

MOVE_CODES(machete_codes)
MOVE_OF_WORDS(down_to_machete, into_tiles, DOWN, MACHETE)
W4A16_KERNELS(machete4_bf16, BF16, MacheteWords<4>)
W4A16_KERNELS(machete4_f16, F16, MacheteWords<4>)
W4A16_KERNELS(machete8_bf16, BF16, MacheteWords<8>)
W4A16_KERNELS(machete8_f16, F16, MacheteWords<8>)

#if VT_TILES
// The forms of device/machete_loaded.py.
#define LOADED_FORMS(NAME, KIND, ZEROS)                               \
    MACHETE_LOADED(NAME##_64_2_2_2_1, KIND, ZEROS, 64, 2, 2, 2, 1, 4)    \
    MACHETE_LOADED(NAME##_128_1_1_1_2, KIND, ZEROS, 128, 1, 1, 1, 2, 2)  \
    MACHETE_LOADED(NAME##_128_2_1_1_2, KIND, ZEROS, 128, 2, 1, 1, 2, 2)
LOADED_FORMS(machete4_bf16_loaded, BF16, false)
LOADED_FORMS(machete4_f16_loaded, F16, false)
LOADED_FORMS(machete4_bf16_zeros_loaded, BF16, true)
LOADED_FORMS(machete4_f16_zeros_loaded, F16, true)
#endif
