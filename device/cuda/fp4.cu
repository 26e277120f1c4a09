// NVFP4 quantiser, e2m1 codes and e4m3 scales of blocks of 16 neighbours; their values; scales into tiles.
//
// The ladder of the quantiser:
// 1. fp4_v8: two lanes a block; 16-byte loads and four-byte stores where the addresses allow them.
// 2. fp4_few: where there are few, four lanes a block and little code.
// 3. fp4_stream_*: a block of 16 a thread, maxima of pairs as they lie in memory, so that nothing passes between lanes, and
//    the next one under way while it has the last one in hand. Among tiles a warp's scales are a whole sector.
// 4. Codes come from the pipe of float32 sums and products, which a memory-bound kernel leaves idle (fp4.cuh): with
//    comparisons and integers, at half their rate, the arithmetic takes longer than the bytes.
#include "fp4.cuh"
#include "fp8_scales.cuh"

#define VALUES_DEEP 2                     // words of codes a thread of fp4_values_deep, device/fp4.py
#define FP4_SIXTH vt_float(0x3e2aaaab)    // float32(1 / 6)
#define FP4_OF_ZERO vt_float(0x322bcc77)  // float32(1e-8)

// Where vectors of 8 and blocks are: `magic` and `shift` divide by a row's blocks.
struct Blocks {
    unsigned rows, blocks, magic;
    int shift;
    i64 stride;

    VT_MEMBER unsigned row(unsigned block) const { return whole_quotient(block, magic, shift); }
    VT_MEMBER i64 in(unsigned vector) const { return start(vector >> 1) + (vector & 1) * 8; }
    VT_MEMBER i64 start(unsigned block) const {
        unsigned r = row(block);
        return r * stride + (block - r * blocks) * 16;
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

extern "C" __global__ void __launch_bounds__(256) fp4_v8(PARAMETERS, i64 aligned, i64 words, i64 threads) {
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
    if (tiled) fill_tiles(scales, rows, blocks.blocks, at, threads);
    if (!inside) return;
    unsigned code = by.code(top);
    float factor = by.factor(code);
    put_word(out + (i64)at * 4, by.native ? by.word<true>(v, factor) : by.word<false>(v, factor), words != 0);
    if ((at & 1) == 0) blocks.put(scales, at >> 1, code, tiled != 0);
}

// Where there are few: bfloat16 under the rule "vt", four lanes a block, and little code.
extern "C" __global__ void __launch_bounds__(64) fp4_few(PARAMETERS, i64 threads) {
    const Blocks blocks{(unsigned)rows, (unsigned)(width >> 4), (unsigned)magic, (int)shift, stride};
    const unsigned at = blockIdx.x * 64 + threadIdx.x, block = at >> 2;
    const bool inside = at < (unsigned)(rows * (width >> 2));
    uint2 raw = {0u, 0u};
    if (inside) raw = ((const uint2*)x)[(blocks.start(block) >> 2) + (at & 3)];
    const Quantiser by(global_scale, rule);
    if (tiled) fill_tiles(scales, rows, blocks.blocks, at, threads);
    unsigned pair = larger_pair<false>(larger_pair<false>(0u, raw.x & 0x7fff7fffu), raw.y & 0x7fff7fffu);
    pair = larger_pair<false>(pair, __shfl_xor_sync(FULL_WARP, pair, 1));
    pair = larger_pair<false>(pair, __shfl_xor_sync(FULL_WARP, pair, 2));
    if (!inside) return;
    unsigned code = by.code(larger(pair << 16, pair & 0xffff0000u));
    float factor = by.factor(code);
    const float v[4] = {widen_bf16(raw.x & 0xffffu) * factor, vt_float((int)(raw.x & 0xffff0000u)) * factor,
                        widen_bf16(raw.y & 0xffffu) * factor, vt_float((int)(raw.y & 0xffff0000u)) * factor};
    ((unsigned short*)out)[at] = (unsigned short)e2m1_four(v);
    if ((at & 3) == 0) blocks.put(scales, block, code, tiled != 0);
}

// The largest of 16 bfloat16, as a float32's bits.
VT_FN unsigned largest_of_sixteen(const uint4& a, const uint4& b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    const unsigned w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    unsigned top[4];  // without signs, which are of no meaning here
#pragma unroll
    for (int i = 0; i < 4; ++i) asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(top[i]) : "r"(w[i]), "r"(w[i + 4]));
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(top[0]) : "r"(top[0]), "r"(top[2]));
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(top[1]) : "r"(top[1]), "r"(top[3]));
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(top[0]) : "r"(top[0]), "r"(top[1]));
    const unsigned pair = larger_pair<false>(0u, top[0] & 0x7fff7fffu);
#else
    const unsigned pair = larger_pair<false>(largest_pair<false>(a), largest_pair<false>(b));
#endif
    return larger(pair << 16, pair & 0xffff0000u);
}

// A block of bfloat16 by the rule "vt": its codes, and the code of its scale.
VT_FN uint2 codes_of_block(const uint4 (&raw)[2], const Quantiser& by, unsigned& code) {
    code = by.code(largest_of_sixteen(raw[0], raw[1]));
    const float factor = by.factor(code);
    float v[8];
    uint2 words;
    widen(v, Raw<8>{raw[0], raw[0]}, BF16);
    words.x = by.word<false>(v, factor);
    widen(v, Raw<8>{raw[1], raw[1]}, BF16);
    words.y = by.word<false>(v, factor);
    return words;
}

// `threads` of a grid take turns at `count` pieces: at(n, block) says whether piece n is a block, and which; each
// thread's next block is under way while it has the last one in hand. put(n, real, code) stores a scale.
template <class A, class P>
VT_FN void stream(unsigned count, unsigned threads, const uint4* vectors, const Blocks& blocks, bool whole,
                  const float* global_scale, i64 rule, unsigned char* out, A&& at, P&& put) {
    unsigned number = blockIdx.x * 256 + threadIdx.x, block = 0, following = 0;
    uint4 raw[2] = {}, next[2] = {};
    bool real, coming = false;
    auto fetch_block = [&](unsigned n) {
        coming = n < count && at(n, following);
        if (!coming) return;
        const uint4* from = vectors + (whole ? 2ll * following : blocks.start(following) >> 3);
        next[0] = from[0];
        next[1] = from[1];
    };
    fetch_block(number);
    const Quantiser by(global_scale, rule);
#pragma unroll 1
    for (; number < count; number += threads) {
        unsigned code = 0;
        raw[0] = next[0], raw[1] = next[1];
        real = coming, block = following;
        fetch_block(number + threads < number ? count : number + threads);
        if (real) ((uint2*)out)[block] = codes_of_block(raw, by, code);
        put(number, code);
    }
}

#define STREAM_PARAMETERS                                                                                         \
    i64 rows, i64 width, const void *x, i64 stride, const float *global_scale, unsigned char *out,                \
        unsigned char *scales, i64 rule, i64 magic, i64 shift, i64 threads

// Bfloat16 under the rule "vt". A piece is a block.
extern "C" __global__ void __launch_bounds__(256, 6) fp4_stream_rows(STREAM_PARAMETERS) {
    const Blocks blocks{(unsigned)rows, (unsigned)(width >> 4), (unsigned)magic, (int)shift, stride};
    stream((unsigned)(rows * (width >> 4)), (unsigned)threads, (const uint4*)x, blocks, stride == width, global_scale,
           rule, out,
           [&](unsigned n, unsigned& block) {
               block = n;
               return true;
           },
           [&](unsigned n, unsigned code) { scales[n] = (unsigned char)code; });
}

// A piece is a byte of the tiles, whether a block has it or not, so that a warp stores all 32 bytes of a sector: four
// blocks of eight rows. `magic` and `shift` divide by the tiles across.
extern "C" __global__ void __launch_bounds__(256, 6) fp4_stream_tiles(STREAM_PARAMETERS, i64 row_magic, i64 row_shift) {
    const unsigned wide = (unsigned)(width >> 4), across = (wide + 3) >> 2;
    const Blocks blocks{(unsigned)rows, wide, (unsigned)row_magic, (int)row_shift, stride};
    auto place = [&](unsigned n, unsigned& pair, unsigned& column) {
        const unsigned warp = n >> 5, rest = whole_quotient(warp, (unsigned)magic, (int)shift);
        column = warp - rest * across;
        pair = rest;  // of rows: 16 to a tile
    };
    stream((unsigned)((rows + 127) >> 7) * across * 512u, (unsigned)threads, (const uint4*)x, blocks, stride == width,
           global_scale, rule, out,
           [&](unsigned n, unsigned& block) {
               unsigned pair, column;
               place(n, pair, column);
               const unsigned row = (pair >> 4) * 128 + (n >> 2 & 3) * 32 + (pair & 15) * 2 + (n >> 4 & 1);
               const unsigned inner = column * 4 + (n & 3);
               block = row * wide + inner;
               return row < (unsigned)rows && inner < wide;
           },
           [&](unsigned n, unsigned code) {
               unsigned pair, column;
               place(n, pair, column);
               scales[((pair >> 4) * across + column) * 512 + (pair & 15) * 32 + (n & 31)] = (unsigned char)code;
           });
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

// Bfloat16, words and vectors where they may be.
extern "C" __global__ void __launch_bounds__(256) fp4_values_deep(
    i64 rows, i64 width, const unsigned char* packed, const unsigned char* scales, const float* global_scale, void* out,
    i64 kind, i64 tiled, i64 magic, i64 shift, i64 aligned, i64 words) {
    VT_ASSUME((int)kind == BF16);
    unsigned first = blockIdx.x * (256 * VALUES_DEEP) + threadIdx.x, count = (unsigned)(rows * (width >> 3));
    unsigned word[VALUES_DEEP], code[VALUES_DEEP];
#pragma unroll
    for (int d = 0; d < VALUES_DEEP; ++d) {
        unsigned at = first + d * 256, place = at >> 1;
        if (at >= count) continue;
        word[d] = ((const unsigned*)packed)[at];
        if (tiled) {
            unsigned blocks = (unsigned)(width >> 4), row = whole_quotient(place, (unsigned)magic, (int)shift);
            place = tiled_place<unsigned>(row, place - row * blocks, (blocks + 3) >> 2);
        }
        code[d] = scales[place];
    }
    float global = global_scale[0], v[8];
#pragma unroll
    for (int d = 0; d < VALUES_DEEP; ++d) {
        if (first + d * 256 >= count) continue;
        float factor = e4m3_value(code[d]) * global;
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = e2m1_value(word[d] >> 4 * j & 15u) * factor;
        store(out, (i64)(first + d * 256) * 8, v, BF16);
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
