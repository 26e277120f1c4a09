// What a kernel reads first, on its way into the second-level cache while the kernel before it ends. Others' stores come to
// that cache as well, so that it shows nothing and has nobody to wait for.
#pragma once
#include "storage.cuh"

// A multiple of 16 bytes at a multiple of 16.
VT_FN void read_soon(const void* from, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}
