// For how many blocks a multiprocessor the generated kernels that fill tiles of scales have their registers cut: on Hopper for
// so many that they hide what each waits for, elsewhere for as many as need no memory in the place of registers.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define TILES_RESIDENT 12
#else
#define TILES_RESIDENT 9
#endif
