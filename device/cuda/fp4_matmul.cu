// Products of NVFP4 and of MXFP4: fp4_product.cuh, whose ladder this is; on Hopper fp4_tiles.cuh. Where both
// sides have four bits, rows of `a` become bfloat16 first, which rounds nothing.
#include "fp4_tiles.cuh"

typedef CodesInRows<BF16, E4M3> Exact;
typedef CodesInRows<BF16, E4M3_ROUNDED> Rounded;
typedef CodesInRows<BF16, E8M0> Powers;

FP4_KERNELS(nvfp4, Exact)
FP4_KERNELS(nvfp4_rounded, Rounded)
FP4_KERNELS(mxfp4, Powers)
FP4_EXPANDED(nvfp4_values, E4M3)
FP4_EXPANDED(mxfp4_values, E8M0)

// x * factor as `kind`.
extern "C" __global__ void __launch_bounds__(256)
    fp4_scaled(i64 count, const float* x, const float* factor, void* out, i64 kind) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    const float one[1] = {x[at] * factor[0]};
    store(out, at, one, (int)kind);
}

extern "C" __global__ void __launch_bounds__(256) fp4_rows_early(i64 count, const uint4* x, uint4* out) {
    after_others();
    strided_rows(count, x, out);
}

#if VT_TILES
FP4_TILES_FORMS(nvfp4, E4M3)
FP4_TILES_FORMS(nvfp4_rounded, E4M3_ROUNDED)
FP4_TILES_FORMS(mxfp4, E8M0)
#endif
