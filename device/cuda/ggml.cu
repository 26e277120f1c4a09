// Activations to ggml's blocks of bytes, and rows of a table in blocks as floats.
//
// The ladder of the quantisers:
// 1. ggml_blocks_*: a warp codes 256 neighbours at a time, eight a lane, and stores them as blocks are, bytes by twos or fours.
// 2. ggml_staged_*: where there are many, without gaps: several vectors a lane under way, 16 bytes a store (ggml_staged.cuh).
#include "ggml_blocks.cuh"
#include "ggml_codes.cuh"
#include "ggml_lookup.cuh"
#include "ggml_staged.cuh"

// Blocks of 34 or 36 bytes (`sums`): four lanes each.
extern "C" __global__ void __launch_bounds__(256)
    ggml_blocks_32_early(i64 count, i64 blocks, const void* x, i64 stride, i64 kind, i64 wide, u8* out, i64 sums) {
    i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) / 4;
    bool inside = at < count;
    i64 block = inside ? at : count - 1;
    int lane = threadIdx.x & 3;
    float v[8];
    others_may_start();
    after_others();
    load_eight(v, x, block / blocks * stride + block % blocks * 32 + 8 * lane, (int)kind, wide != 0);
    Codes c = codes_32(v);
#pragma unroll
    for (int m = 1; m <= 2; m *= 2) c.total += __shfl_xor_sync(0xffffffffu, c.total, m);
    if (!inside) return;
    int head = sums ? 4 : 2;
    unsigned short* p = (unsigned short*)(out + block * (32 + head));
    if (lane == 0) {
        p[0] = (unsigned short)f16_of(c.d);
        if (sums) p[1] = (unsigned short)f16_of_sum(c.d, c.total);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        p[head / 2 + 4 * lane + i] = (unsigned short)((c.code[2 * i] & 255) | (c.code[2 * i + 1] & 255) << 8);
    }
}

// Blocks of 292 bytes: a warp each.
extern "C" __global__ void __launch_bounds__(256)
    ggml_blocks_256_early(i64 count, i64 blocks, const void* x, i64 stride, i64 kind, i64 wide, u8* out, i64) {
    i64 block = ((i64)blockIdx.x * 256 + threadIdx.x) / 32;
    if (block >= count) return;
    int lane = threadIdx.x & 31;
    float v[8];
    others_may_start();
    after_others();
    load_eight(v, x, block / blocks * stride + block % blocks * 256 + 8 * lane, (int)kind, wide != 0);
    Codes c = codes_256(v);
    int total = c.total + __shfl_xor_sync(0xffffffffu, c.total, 1);
    unsigned* p = (unsigned*)(out + block * 292);
    if (lane == 0) p[0] = (unsigned)vt_bits(c.d);
    p[1 + 2 * lane] = packed4(c.code[0], c.code[1], c.code[2], c.code[3]);
    p[2 + 2 * lane] = packed4(c.code[4], c.code[5], c.code[6], c.code[7]);
    if (lane % 2 == 0) ((unsigned short*)p)[130 + lane / 2] = (unsigned short)total;
}
