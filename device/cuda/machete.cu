// Machete's prepacked weights, both ways: codes.cuh; and products with them: w4a16.cuh, whose ladder this is.
#include "codes.cuh"
#include "w4a16.cuh"

MOVE_CODES(machete_codes)
W4A16_KERNELS(machete4_bf16, BF16, MacheteWords<4>)
W4A16_KERNELS(machete4_f16, F16, MacheteWords<4>)
W4A16_KERNELS(machete8_bf16, BF16, MacheteWords<8>)
W4A16_KERNELS(machete8_f16, F16, MacheteWords<8>)
