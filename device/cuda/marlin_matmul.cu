// Products with weights in Marlin's layouts, of 4 and 8 bits: w4a16.cuh, whose ladder this is.
#include "w4a16.cuh"

W4A16_KERNELS(marlin4_bf16, BF16, MarlinWords<4>)
W4A16_KERNELS(marlin4_f16, F16, MarlinWords<4>)
W4A16_KERNELS(marlin8_bf16, BF16, MarlinWords<8>)
W4A16_KERNELS(marlin8_f16, F16, MarlinWords<8>)
