// Products of rows with weights that stay in ggml's blocks: integers within a block, the mirror's order between blocks.
//
// The ladder: (1) A warp had a row of the weight, a unit of 32 each lane, and four rows of `a`, four products an
// instruction: weights were read again for every four rows of `a`, and 16 of them took five times a bfloat16 product's
// time. (2) Several rows of `a`: they become codes once, in scratch, laid out as the tensor cores take them, and sixteen
// rows of the weight meet up to 64 of them, a warp: ggml_rows.cuh. (3) One row of `a`: a block a multiprocessor has its
// share of the weight's rows, codes that row for itself while the first of them are on their way, and lanes keep its
// codes (ggml_pairs.cuh, ggml_lanes.cuh), or the tensor cores meet sixteen rows (ggml_tiles.cuh).
#include "ggml_group_codes.cuh"
#include "ggml_lane_signs.cuh"
#include "ggml_lane_threes.cuh"
#include "ggml_pairs.cuh"
#include "ggml_rows.cuh"

// What the tensor cores take of eight rows and 256 k stands together: `size` bytes, its scales after `beside`, its sums
// after `codes`. Where a lane's codes of unit `unit` and eight neighbours `part` begin, four of them, and the four after
// them: k 4 t ... 4 t + 3 and 16 further on, or (`order` 2) 8 t ... 8 t + 7.
VT_FN u8* record_of(u8* records, i64 rows, i64 row, i64 stage, i64 size) { return records + (stage * ((rows + 7) / 8) + row / 8) * size; }
VT_FN void put_eight(u8* record, int row, int unit, int part, const int (&code)[8], bool neighbours) {
    unsigned low = packed4(code[0], code[1], code[2], code[3]), high = packed4(code[4], code[5], code[6], code[7]);
    u8* to = record + unit / 2 * 512 + unit % 2 * 8 + row % 8 * 64;
    if (neighbours) {
        *(uint2*)(to + part * 16) = {low, high};
    } else {
        to += part % 2 * 32 + part / 2 * 4;
        *(unsigned*)to = low;
        *(unsigned*)(to + 16) = high;
    }
}

// Blocks of 32, four lanes each, with Q8_1's sum; zeros where the rows or the last stage end.
extern "C" __global__ void __launch_bounds__(256)
    ggml_codes_32(i64 count, i64 rows, i64 units, const void* a, i64 stride, i64 kind, i64 wide, u8* records, i64 size, i64 stages) {
    i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) / 4;
    others_may_start();
    if (at >= count) return;  // count is a multiple of 64
    i64 row = at / (stages * 8), unit = at - row * stages * 8;
    int part = threadIdx.x & 3;
    bool inside = row < rows && unit < units;
    float x[8] = {};
    if (inside) load_eight(x, a, row * stride + unit * 32 + 8 * part, (int)kind, wide != 0);
    Codes c = codes_32(x);
#pragma unroll
    for (int m = 1; m <= 2; m *= 2) c.total += __shfl_xor_sync(ALL, c.total, m);
    u8* record = record_of(records, rows, row, unit / 8, size);
    put_eight(record, (int)(row & 7), (int)(unit & 7), part, c.code, false);
    if (part == 0) {
        float* scale = (float*)(record + size - 256) + unit % 8 * 8 + row % 8;
        *scale = widen_f16(f16_of(c.d));
        if (size > 2048 + 256) scale[-64] = widen_f16(f16_of_sum(c.d, c.total));
    }
}

// Blocks of 256, a warp each; beside them, if `sums`, those of the halves of units. `order`: 0 as they lie, 2 for the
// i-quants.
extern "C" __global__ void __launch_bounds__(256)
    ggml_codes_256(i64 count, i64 rows, i64 present, i64 blocks, const void* a, i64 stride, i64 kind, i64 wide, u8* records, i64 size,
                   i64 order) {
    i64 block = ((i64)blockIdx.x * 256 + threadIdx.x) / 32;
    others_may_start();
    if (block >= count) return;
    i64 row = block / blocks, stage = block - row * blocks;
    int lane = threadIdx.x & 31, part = lane & 3, unit = lane / 4, g = (int)(row & 7);
    float x[8] = {};
    if (row < rows && stage < present) load_eight(x, a, row * stride + stage * 256 + 8 * lane, (int)kind, wide != 0);
    Codes c = codes_256(x);
    u8* record = record_of(records, rows, row, stage, size);
    put_eight(record, g, unit, part, c.code, order == 2);
    int half = c.total + __shfl_xor_sync(ALL, c.total, 1), other = __shfl_xor_sync(ALL, half, 2);
    if (part == 0 && size > 2048 + 32) {
        *(unsigned*)(record + 2048 + g * 32 + unit % 4 * 8 + unit / 4 * 4) = narrow_f16((float)half, (float)other);
    }
    if (lane == 0) ((float*)(record + size - 32))[g] = c.d;
}

#define PRODUCT(name, threads, TYPE, TILES)                                                                           \
    extern "C" __global__ void __launch_bounds__(threads, 1)                                                          \
        name(i64 rows, i64 columns, i64 units, const u8* b, i64 stride, const u8* records, void* out, i64 out_stride, \
             i64 kind, i64 shares, i64 slots, i64 bulk) {                                                             \
        several<TYPE, TILES>({rows, columns, units, stride, out_stride, b, records, out, (int)kind, (int)shares,      \
                              (int)slots, (int)bulk});                                                                \
    }
#define ROW(name, FORM, WARPS_, TYPE)                                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * WARPS_, 1)                                                      \
        name(i64 columns, i64 depth, const void* a, i64 a_kind, const u8* b, i64 stride, void* out, i64 kind,         \
             i64 blocks, i64 each, i64 slots) {                                                                           \
        FORM<TYPE>({columns, depth, a, a_kind, b, stride, out, kind}, (int)blocks, (int)each, (int)slots);                 \
    }
#define ROWS(name, TYPE)                                                 \
    PRODUCT(name##_few_early, (Block<TYPE>::LARGE ? 384 : 512), TYPE, 2) \
    PRODUCT(name##_many_early, (Block<TYPE>::LARGE ? 256 : 512), TYPE, 8)
#define PRODUCTS(name, TYPE, FORM) ROWS(name, TYPE) ROW(name##_row_early, FORM, FORM##_warps, TYPE)
#define LANES(name, TYPE)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * MEETERS, 1)                                                     \
        name(i64 columns, i64 depth, const void* a, i64 a_kind, const u8* b, i64 stride, void* out, i64 kind,         \
             i64 blocks, i64 each, i64 kinds, i64 span, i64 high, i64 groups, i64 slots, i64 ahead,                   \
             i64 over_kinds, i64 over_span, i64 over_groups, i64 turned) {                                            \
        in_lanes<TYPE>({columns, depth, a, a_kind, b, stride, out, kind}, (int)blocks, (int)each,                     \
                       {(int)kinds, (int)span, (int)high, (int)groups, (int)slots, (int)ahead,                        \
                        (int)over_kinds, (int)over_span, (int)over_groups, (unsigned)turned});                        \
    }
constexpr int in_pairs_warps = CREW + 1, in_tiles_warps = CREW + SENDERS + 1;

PRODUCTS(ggml_q4_0, Q4_0, in_pairs)
PRODUCTS(ggml_q4_1, Q4_1, in_pairs)
PRODUCTS(ggml_q5_0, Q5_0, in_pairs)
PRODUCTS(ggml_q5_1, Q5_1, in_pairs)
PRODUCTS(ggml_q8_0, Q8_0, in_pairs)
PRODUCTS(ggml_q2_k, Q2_K, in_tiles)
ROWS(ggml_q3_k, Q3_K)
LANES(ggml_q3_k_lanes_early, Q3_K)
PRODUCTS(ggml_q4_k, Q4_K, in_tiles)
PRODUCTS(ggml_q5_k, Q5_K, in_tiles)
PRODUCTS(ggml_q6_k, Q6_K, in_tiles)
ROWS(ggml_iq2_xxs, IQ2_XXS)
ROWS(ggml_iq3_xxs, IQ3_XXS)
LANES(ggml_iq2_xxs_lanes_early, IQ2_XXS)
LANES(ggml_iq3_xxs_lanes_early, IQ3_XXS)

#if VT_TILES

#define GROUPS(name, TYPE, N, TURNS)                                                                                    \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                                \
        name##_##N##_early(i64 rows, i64 columns, i64 stages, const u8* b, i64 stride, const u8* records, void* out,    \
                           i64 out_stride, i64 kind, i64 slots, i64 grid) {                                             \
        by_groups<TYPE, N, TURNS>({rows, columns, stages, stride, out_stride, b, records, out, (int)kind, (int)slots, (int)grid}); \
    }
#define OF_UNITS(name, TYPE) GROUPS(name, TYPE, 32, false) GROUPS(name, TYPE, 64, false) GROUPS(name, TYPE, 128, false)
#define OF_BLOCKS(name, TYPE)                                                                      \
    GROUPS(name, TYPE, 64, false) GROUPS(name, TYPE, 128, false)                                     \
    GROUPS(name##_turns, TYPE, 16, true) GROUPS(name##_turns, TYPE, 32, true) GROUPS(name##_turns, TYPE, 64, true)
OF_UNITS(ggml_q4_0, Q4_0)
OF_UNITS(ggml_q4_1, Q4_1)
OF_UNITS(ggml_q5_0, Q5_0)
OF_UNITS(ggml_q5_1, Q5_1)
OF_UNITS(ggml_q8_0, Q8_0)
OF_BLOCKS(ggml_q2_k, Q2_K)
OF_BLOCKS(ggml_q3_k, Q3_K)
OF_BLOCKS(ggml_q4_k, Q4_K)
OF_BLOCKS(ggml_q5_k, Q5_K)
OF_BLOCKS(ggml_q6_k, Q6_K)
#endif

// Weights in Q8_K, which no activation meets as integers: an element a thread, one fma a value.
extern "C" __global__ void __launch_bounds__(256)
    ggml_q8_k(i64 count, i64 columns, i64 depth, const void* a, i64 a_stride, i64 a_kind, const u8* b, i64 stride,
              void* out, i64 out_stride, i64 kind) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    const u8* row = b + at % columns * stride;
    float sum[1] = {0.0f};
    for (i64 k = 0; k < depth; ++k) {
        const u8* block = row + k / 256 * 292;
        float x[1];
        load(x, a, at / columns * a_stride + k, (int)a_kind);
        sum[0] = vt_fma(x[0], *(const float*)block * (float)(signed char)block[4 + k % 256], sum[0]);
    }
    store(out, at / columns * out_stride + at % columns, sum, (int)kind);
}
