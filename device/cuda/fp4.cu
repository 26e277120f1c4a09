// NVFP4 quantiser, e2m1 codes and e4m3 scales of blocks of 16 neighbours; their values; scales into tiles.
//
// The ladder of the quantiser:
// 1. fp4_v8: two lanes a block; 16-byte loads and four-byte stores where the addresses allow them.
// 2. fp4_bf16_deep: four vectors of bfloat16 under way a thread, maxima taken of pairs as they lie in memory; each of a
//    block's two lanes finds the scale of one of two blocks, with its division.
// 3. Codes come from the pipe of float32 sums and products, which a memory-bound kernel leaves idle (fp4.cuh): with
//    comparisons and integers, at half their rate, the arithmetic takes longer than the bytes.
#include "fp4.cuh"
#include "fp8_scales.cuh"

#define DEPTH 4                           // vectors a thread of fp4_bf16_deep, device/fp4.py
#define FP4_SIXTH vt_float(0x3e2aaaab)    // float32(1 / 6)
#define FP4_OF_ZERO vt_float(0x322bcc77)  // float32(1e-8)

// Where vectors of 8 and blocks are: `magic` and `shift` divide by a row's blocks.
struct Blocks {
    unsigned rows, blocks, magic;
    int shift;
    i64 stride;

    VT_MEMBER unsigned row(unsigned block) const { return whole_quotient(block, magic, shift); }
    VT_MEMBER i64 in(unsigned vector) const {
        unsigned r = row(vector >> 1);
        return r * stride + ((vector >> 1) - r * blocks) * 16 + (vector & 1) * 8;
    }
    VT_MEMBER void put(unsigned char* scales, unsigned block, unsigned code, bool tiled) const {
        unsigned r = row(block);
        if (tiled) store_scale<true, unsigned>(scales, rows, r, blocks, block - r * blocks, code);
        else scales[block] = (unsigned char)code;
    }
};

// The scale's code of a block that is `top` large, and what its elements are multiplied by.
struct Quantiser {
    float global, back, of_zero;
    bool native;

    VT_MEMBER Quantiser(const float* global_scale, i64 rule) : global(global_scale[0]), native(rule == VLLM_NATIVE) {
        of_zero = native ? FP4_OF_ZERO : 0.0f;
        back = reciprocal(global);
    }
    VT_MEMBER float reciprocal(float x) const { return x == 0.0f ? of_zero : 1.0f / x; }
    VT_MEMBER unsigned code(unsigned top) const { return e4m3_code(global * (vt_float((int)top) * FP4_SIXTH)); }
    VT_MEMBER float factor(unsigned code) const { return reciprocal(e4m3_value(code) * back); }
    template <bool NATIVE> VT_MEMBER unsigned word(float (&v)[8], float factor) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= factor;
        return e2m1_word<NATIVE>(v);
    }
};

#define PARAMETERS                                                                                               \
    i64 rows, i64 width, const void* x, i64 stride, i64 kind, const float* global_scale, unsigned char* out,      \
        unsigned char* scales, i64 rule, i64 tiled, i64 magic, i64 shift

VT_FN void load_eight(float (&v)[8], const void* x, i64 at, int kind, bool aligned) {
    if (aligned) return load(v, x, at, kind);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float one[1];
        load(one, x, at + j, kind);
        v[j] = one[0];
    }
}

VT_FN void put_word(unsigned char* out, unsigned word, bool whole) {
    if (whole) *(unsigned*)out = word;
    else
#pragma unroll
        for (int j = 0; j < 4; ++j) out[j] = (unsigned char)(word >> 8 * j);
}

extern "C" __global__ void __launch_bounds__(256) fp4_v8(PARAMETERS, i64 aligned, i64 words) {
    const Blocks blocks{(unsigned)rows, (unsigned)(width >> 4), (unsigned)magic, (int)shift, stride};
    const Quantiser by(global_scale, rule);
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x, top = 0;
    bool inside = at < (unsigned)(rows * (width >> 3));
    float v[8];
    if (inside) {
        load_eight(v, x, blocks.in(at), (int)kind, aligned != 0);
        top = largest_of(v, by.native);
    }
    top = largest_of_lanes(top, 2);
    if (!inside) return;
    unsigned code = by.code(top);
    float factor = by.factor(code);
    put_word(out + (i64)at * 4, by.native ? by.word<true>(v, factor) : by.word<false>(v, factor), words != 0);
    if ((at & 1) == 0) blocks.put(scales, at >> 1, code, tiled != 0);
}

// Under the rule "vt" alone. Vectors and words are 256 apart, so that one address of each serves for all.
extern "C" __global__ void __launch_bounds__(256) fp4_bf16_deep(PARAMETERS) {
    const Blocks blocks{(unsigned)rows, (unsigned)(width >> 4), (unsigned)magic, (int)shift, stride};
    unsigned count = (unsigned)(rows * (width >> 3)), first = blockIdx.x * (256 * DEPTH) + threadIdx.x;
    int left = first < count ? (int)(count - first) : 0;  // this one is inside where d * 256 < left
    const uint4* vectors = (const uint4*)x + first;
    unsigned* words = (unsigned*)out + first;
    uint4 raw[DEPTH];
    if (stride == width) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (d * 256 < left) raw[d] = vectors[d * 256];
    } else {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (d * 256 < left) raw[d] = fetch<8>(x, blocks.in(first + d * 256), BF16).a;
    }
    const Quantiser by(global_scale, rule);
    int own = threadIdx.x & 1;
#pragma unroll
    for (int d = 0; d < DEPTH; d += 2) {
        bool inside[2] = {d * 256 < left, d * 256 + 256 < left};
        unsigned a = inside[0] ? largest_pair<false>(raw[d]) : 0u, b = inside[1] ? largest_pair<false>(raw[d + 1]) : 0u;
        unsigned top = larger_pair<false>((a & 0xffffu) | b << 16, a >> 16 | (b & 0xffff0000u));
        top = larger_pair<false>(top, __shfl_xor_sync(FULL_WARP, top, 1));
        unsigned code = by.code(own ? top & 0xffff0000u : top << 16);
        float factor = by.factor(code), other = __shfl_xor_sync(FULL_WARP, factor, 1);
        if ((d + own) * 256 < left) blocks.put(scales, (first >> 1) + (d + own) * 128, code, tiled != 0);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (!inside[i]) continue;
            float v[8];
            widen(v, Raw<8>{raw[d + i], raw[d + i]}, BF16);
            words[(d + i) * 256] = by.word<false>(v, own == i ? factor : other);
        }
    }
}

// Eight values of a block, from a word of codes.
extern "C" __global__ void __launch_bounds__(256) fp4_values(
    i64 rows, i64 width, const unsigned char* packed, const unsigned char* scales, const float* global_scale, void* out,
    i64 kind, i64 tiled, i64 magic, i64 shift, i64 aligned, i64 words) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x, block = at >> 1;
    if (at >= (unsigned)(rows * (width >> 3))) return;
    unsigned word = 0, place = block;
    if (words) word = ((const unsigned*)packed)[at];
    else
#pragma unroll
        for (int j = 0; j < 4; ++j) word |= (unsigned)packed[(i64)at * 4 + j] << 8 * j;
    if (tiled) {
        unsigned blocks = (unsigned)(width >> 4), row = whole_quotient(block, (unsigned)magic, (int)shift);
        place = tiled_place<unsigned>(row, block - row * blocks, (blocks + 3) >> 2);
    }
    float factor = e4m3_value(scales[place]) * global_scale[0], v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = e2m1_value(word >> 4 * j & 15u) * factor;
    if (aligned) return store(out, (i64)at * 8, v, (int)kind);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float one[1] = {v[j]};
        store(out, (i64)at * 8 + j, one, (int)kind);
    }
}

// Four scales of a tile a thread, of `rows` x `columns` in each of several matrices.
extern "C" __global__ void __launch_bounds__(256) fp4_tiles(
    i64 count, i64 rows, i64 columns, const unsigned char* scales, unsigned* out) {
    i64 number = (i64)blockIdx.x * 256 + threadIdx.x, across = (columns + 3) >> 2, down = (rows + 127) >> 7;
    if (number >= count) return;
    i64 tile = number >> 7, matrix = tile / (across * down);
    tile -= matrix * across * down;
    i64 row = tile / across * 128 + (number & 3) * 32 + (number >> 2 & 31), column = tile % across * 4;
    unsigned word = 0;
    if (row < rows)
        for (i64 c = column; c < column + 4 && c < columns; ++c)
            word |= (unsigned)scales[(matrix * rows + row) * columns + c] << 8 * (c - column);
    out[number] = word;
}
