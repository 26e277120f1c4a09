// Activations as groups of four warps take them (ggml_groups.cuh): codes of eight bits as float16, in tiles of 64 k.
#pragma once
#include "ggml_groups.cuh"

// What the tensor cores take of `wide` rows and 256 k stands together, `size` bytes: four tiles of 64 k, sums, scales.
VT_FN u8* record_of(u8* records, i64 row, i64 stage, i64 stages, i64 wide, i64 size) {
    return records + (row / wide * stages + stage) * size;
}

// Blocks of 32, four lanes each, with Q8_1's sum; zeros where the rows end.
extern "C" __global__ void __launch_bounds__(256)
    ggml_halves_32(i64 count, i64 rows, i64 stages, const void* a, i64 stride, i64 kind, i64 vectors, u8* records, i64 size, i64 wide) {
    i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) / 4;
    others_may_start();
    if (at >= count) return;  // count is a multiple of 64
    i64 row = at / (stages * 8), unit = at - row * stages * 8;
    int part = threadIdx.x & 3, n = (int)(row % wide), u = (int)(unit & 7);
    float x[8] = {};
    if (row < rows) load_eight(x, a, row * stride + unit * 32 + 8 * part, (int)kind, vectors != 0);
    Codes c = codes_32(x);
#pragma unroll
    for (int m = 1; m <= 2; m *= 2) c.total += __shfl_xor_sync(ALL, c.total, m);
    u8* record = record_of(records, row, unit / 8, stages, wide, size);
    u8* tile = record + u / 2 * (128 * wide);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        unsigned first = narrow_f16((float)c.code[odd], (float)c.code[2 + odd]);
        unsigned second = narrow_f16((float)c.code[4 + odd], (float)c.code[6 + odd]);
        *(uint2*)(tile + place(n, u % 2 * 4 + part / 2 * 2 + odd) + part % 2 * 8) = {first, second};
    }
    if (part == 0) {
        float* scale = (float*)(record + size - 32 * wide) + u * wide + scale_place(n);
        *scale = widen_f16(f16_of(c.d));
        if (size > (512 + 32) * wide) scale[-8 * wide] = widen_f16(f16_of_sum(c.d, c.total));
    }
}

// Blocks of 256, a warp each, as bytes in tiles of 128 k; beside them, if `share`, sums of their sixteens, for so many rows.
extern "C" __global__ void __launch_bounds__(256)
    ggml_bytes_256(i64 count, i64 rows, i64 stages, const void* a, i64 stride, i64 kind, i64 vectors, u8* records, i64 size, i64 wide,
                   i64 share) {
    i64 block = ((i64)blockIdx.x * 256 + threadIdx.x) / 32;
    others_may_start();
    if (block >= count) return;
    i64 row = block / stages, stage = block - row * stages;
    int lane = threadIdx.x & 31, part = lane & 3, unit = lane / 4, n = (int)(row % wide);
    float x[8] = {};
    if (row < rows) load_eight(x, a, row * stride + stage * 256 + 8 * lane, (int)kind, vectors != 0);
    Codes c = codes_256(x);
    u8* record = record_of(records, row, stage, stages, wide, size);
    uint2 words = {packed4(c.code[0], c.code[1], c.code[2], c.code[3]), packed4(c.code[4], c.code[5], c.code[6], c.code[7])};
    *(uint2*)(record + unit / 4 * (128 * wide) + place(n, lane % 16 / 2) + lane % 2 * 8) = words;
    int first = c.total + __shfl_xor_sync(ALL, c.total, 1), second = __shfl_xor_sync(ALL, first, 2);
    if (part == 0 && share) {
        u8* sums = record + 256 * wide + place(n % (int)share, n / (int)share * 2 + unit / 4) + unit % 4 * 4;
        *(unsigned*)sums = narrow_f16((float)first, (float)second);
    }
    if (lane == 0) ((float*)(record + size - 4 * wide))[scale_place(n)] = c.d;
}
