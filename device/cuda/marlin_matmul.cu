// Products with weights in Marlin's layouts, of 4 and 8 bits: w4a16.cuh, whose ladder this is.
#include "w4a16.cuh"

W4A16_KERNELS(marlin4_bf16, BF16, MarlinWords<4>)
W4A16_KERNELS(marlin4_f16, F16, MarlinWords<4>)
W4A16_KERNELS(marlin8_bf16, BF16, MarlinWords<8>)
W4A16_KERNELS(marlin8_f16, F16, MarlinWords<8>)

#include "marlin_loaded.cuh"

#if VT_TILES
MARLIN_LOADED(marlin4_bf16_loaded_64_by_64, BF16, 64, 1)
MARLIN_LOADED(marlin4_bf16_loaded_128_by_64, BF16, 128, 1)
MARLIN_LOADED(marlin4_bf16_loaded_128_by_128, BF16, 128, 2)
MARLIN_LOADED(marlin4_f16_loaded_64_by_64, F16, 64, 1)
MARLIN_LOADED(marlin4_f16_loaded_128_by_64, F16, 128, 1)
MARLIN_LOADED(marlin4_f16_loaded_128_by_128, F16, 128, 2)
#endif
