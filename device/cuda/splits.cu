// Splits of packed rows into contiguous parts: bytes are moved, whatever they mean.
//
// The ladder:
// 1. split_2, split_4: a storage element a thread.
// 2. split_16: 16 bytes a thread, where every width, stride and address is a multiple of that.
#include "storage.cuh"

// A row is `periods` times [part 0 | part 1 | part 2]; part i of all periods is row-contiguous in `out[i]`. Widths,
// strides and offsets count units of type U.
template <class U>
VT_FN void split(i64 rows, i64 stride, i64 periods, i64 chunks, const void* packed, i64 w0, i64 w1, i64 w2, void* out0,
                 void* out1, void* out2) {
    i64 row = blockIdx.x / chunks, at = (blockIdx.x % chunks) * blockDim.x + threadIdx.x, width = w0 + w1 + w2;
    if (row >= rows || at >= periods * width) return;
    i64 period = periods == 1 ? 0 : at / width, within = at - period * width, group = row * periods + period;
    U value = ((const U*)packed)[row * stride + at];
    if (within < w0) ((U*)out0)[group * w0 + within] = value;
    else if (within < w0 + w1) ((U*)out1)[group * w1 + within - w0] = value;
    else ((U*)out2)[group * w2 + within - w0 - w1] = value;
}

#define SPLIT(BYTES, U)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) split_##BYTES(                                              \
        i64 rows, i64 stride, i64 periods, i64 chunks, const void* packed, i64 w0, i64 w1, i64 w2, void* out0,    \
        void* out1, void* out2) {                                                                                 \
        split<U>(rows, stride, periods, chunks, packed, w0, w1, w2, out0, out1, out2);                            \
    }
SPLIT(2, unsigned short)
SPLIT(4, unsigned)
SPLIT(16, uint4)
