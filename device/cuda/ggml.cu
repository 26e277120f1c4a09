// Activations to ggml's blocks of bytes, and rows of a table in blocks as floats.
//
// Both are limited by memory: a warp codes 256 neighbours at a time, eight a lane; a lane of a lookup has one unit of 32
// and reads its share of the block where it lies, since the lanes beside it read the rest of the same sectors.
#include "ggml_blocks.cuh"
#include "ggml_codes.cuh"

// Blocks of 34 or 36 bytes (`sums`): four lanes each.
extern "C" __global__ void __launch_bounds__(256)
    ggml_blocks_32(i64 count, i64 blocks, const void* x, i64 stride, i64 kind, i64 wide, u8* out, i64 sums) {
    i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) / 4;
    bool inside = at < count;
    i64 block = inside ? at : count - 1;
    int lane = threadIdx.x & 3;
    float v[8];
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
    ggml_blocks_256(i64 count, i64 blocks, const void* x, i64 stride, i64 kind, i64 wide, u8* out, i64) {
    i64 block = ((i64)blockIdx.x * 256 + threadIdx.x) / 32;
    if (block >= count) return;
    int lane = threadIdx.x & 31;
    float v[8];
    load_eight(v, x, block / blocks * stride + block % blocks * 256 + 8 * lane, (int)kind, wide != 0);
    Codes c = codes_256(v);
    int total = c.total + __shfl_xor_sync(0xffffffffu, c.total, 1);
    unsigned* p = (unsigned*)(out + block * 292);
    if (lane == 0) p[0] = (unsigned)vt_bits(c.d);
    p[1 + 2 * lane] = packed4(c.code[0], c.code[1], c.code[2], c.code[3]);
    p[2 + 2 * lane] = packed4(c.code[4], c.code[5], c.code[6], c.code[7]);
    if (lane % 2 == 0) ((unsigned short*)p)[130 + lane / 2] = (unsigned short)total;
}

template <int TYPE>
VT_MEMBER void unit_of_row(const u8* row, i64 unit, void* out, i64 at, int kind, bool wide) {
    using B = Block<TYPE>;
    unsigned q[8];
    Scales k;
    take_apart<TYPE>(q, k, row + (B::LARGE ? unit / 8 : unit) * B::BYTES, (int)(unit & 7));
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        float scale = k.d, minimum = k.dmin, v[8];
        if constexpr (B::LARGE) {
            scale = k.d * ((float)k.s[g / 2] * B::FOLD);
            minimum = k.dmin * (float)k.m[g / 2];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[i] = scale * (float)(int)(signed char)(q[2 * g + i / 4] >> 8 * (i & 3));
            if constexpr (B::MINIMUM) v[i] = v[i] - minimum;
        }
        if (wide) {
            store(out, at + 8 * g, v, kind);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float one[1] = {v[i]};
                store(out, at + 8 * g + i, one, kind);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    ggml_rows(i64 count, i64 units, i64 type, const u8* table, i64 stride, const void* ids, i64 long_ids, void* out,
              i64 kind, i64 wide) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    i64 token = at / units, unit = at % units;
    const u8* row = table + (long_ids ? ((const i64*)ids)[token] : ((const int*)ids)[token]) * stride;
    switch ((int)type) {
#define TAKES(TYPE) \
    case TYPE: return unit_of_row<TYPE>(row, unit, out, at * 32, (int)kind, wide != 0);
        TAKES(Q4_0) TAKES(Q4_1) TAKES(Q5_0) TAKES(Q5_1) TAKES(Q8_0) TAKES(Q2_K) TAKES(Q3_K) TAKES(Q4_K) TAKES(Q5_K)
        TAKES(Q6_K) TAKES(IQ2_XXS) TAKES(IQ3_XXS)
    }
}
