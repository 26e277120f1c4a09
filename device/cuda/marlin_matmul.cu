// Products with weights in Marlin's layouts, of 4 and 8 bits: w4a16.cuh, whose ladder this is.
#include "w4a16.cuh"

W4A16_KERNELS(marlin4_bf16, BF16, MarlinWords<4>)
W4A16_KERNELS(marlin4_f16, F16, MarlinWords<4>)
W4A16_KERNELS(marlin8_bf16, BF16, MarlinWords<8>)
W4A16_KERNELS(marlin8_f16, F16, MarlinWords<8>)

#include "marlin_few.cuh"
#include "marlin_loaded.cuh"
#include "marlin_stream.cuh"

#if VT_TILES
#define MARLIN_FORMS(NAME, KIND, BITS, ZEROED)                                                                        \
    typedef StreamedCodes<KIND, BITS, ZEROED> NAME##_codes;                                                           \
    MARLIN_FEW(NAME, NAME##_codes, 8)                                                                                 \
    MARLIN_FEW(NAME, NAME##_codes, 16)                                                                                \
    MARLIN_STREAM(NAME, NAME##_codes, 32)                                                                             \
    MARLIN_STREAM(NAME, NAME##_codes, 64)                                                                             \
    MARLIN_LOADED_FORMS(NAME, NAME##_codes)
MARLIN_FORMS(marlin4_bf16, BF16, 4, false)
MARLIN_FORMS(marlin4_f16, F16, 4, false)
MARLIN_FORMS(marlin4_zeros_bf16, BF16, 4, true)
MARLIN_FORMS(marlin4_zeros_f16, F16, 4, true)
MARLIN_FORMS(marlin8_bf16, BF16, 8, false)
MARLIN_FORMS(marlin8_f16, F16, 8, false)
#endif
