// NVFP4 quantiser, e2m1 codes and e4m3 scales of blocks of 16 neighbours; their values; scales into tiles.
//
// The ladder of the quantiser:
// 1. fp4_v8: two lanes a block; 16-byte loads and four-byte stores where the addresses allow them.
// 2. fp4_few: where there are few, four lanes a block and little code.
// 3. fp4_stream_*: a block of 16 a thread, maxima of pairs as they lie in memory, so that nothing passes between lanes, and
//    the next one under way while it has the last one in hand. Among tiles a warp's scales are a whole sector.
// 4. With comparisons and integers, at half the rate of float32 sums and products, codes took longer than the bytes; as
//    sums and products alone (fp4.cuh) they still took twelve instructions an element: 31 us for 8192 x 5120 in rows, 37
//    among tiles. Out of float16s (e2m1_halves.cuh) they take four, a block's factor is known by its scale's code, and
//    tiles are walked by sums: 27.5 and 28 us, what loads and stores alone take.
// 5. Where there are few, the global scale is not looked at before all loads are under way.
// 6. *_early: started while the kernel before ends (early.cuh), which takes half a microsecond off. Where there are few,
//    the next one may start at once, else when all loads are under way: its blocks would be in the way.
#include "e2m1_halves.cuh"
#include "found.cuh"
#include "fp4.cuh"
#include "fp8_scales.cuh"
#include "units.cuh"

// Blocks of a multiprocessor that take turns, device/fp4.py. Maxima of pairs without an instruction take more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 860
#define STREAM_RESIDENT 5
#else
#define STREAM_RESIDENT 6
#endif
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

    VT_MEMBER Quantiser(float global_scale, i64 rule) : global(global_scale), native(rule == VLLM_NATIVE) {
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
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x, top = 0;
    bool inside = at < (unsigned)(rows * (width >> 3));
    float v[8];
    if (inside) load_eight(v, x, blocks.in(at), (int)kind, aligned != 0);
    const float global = global_scale[0];
    loads_are_under_way();
    const Quantiser by(global, rule);
    if (inside) top = largest_of(v, by.native);
    top = largest_of_lanes(top, 2);
    if (tiled) fill_tiles(scales, rows, blocks.blocks, at, threads);
    if (!inside) return;
    unsigned code = by.code(top);
    float factor = by.factor(code);
    put_word(out + (i64)at * 4, by.native ? by.word<true>(v, factor) : by.word<false>(v, factor), words != 0);
    if ((at & 1) == 0) blocks.put(scales, at >> 1, code, tiled != 0);
}

// Where there are few: bfloat16 under the rule "vt", four lanes a block, and little code. From thread `own` on, whole
// blocks of the grid fill tiles.
extern "C" __global__ void __launch_bounds__(64) fp4_few_early(PARAMETERS, i64 own, i64 threads) {
    const Blocks blocks{(unsigned)rows, (unsigned)(width >> 4), (unsigned)magic, (int)shift, stride};
    const unsigned at = blockIdx.x * 64 + threadIdx.x, block = at >> 2;
    const bool inside = at < (unsigned)(rows * (width >> 2));
    uint2 raw = {0u, 0u};
    const uint2* from = (const uint2*)x + ((blocks.start(block) >> 2) + (at & 3));
    found(from);
    others_may_start();
    after_others();
    if (inside) raw = *from;
    const float global = global_scale[0];
    loads_are_under_way();
    if (at >= (unsigned)own) return fill_tiles(scales, rows, blocks.blocks, at - own, threads - own);
    const Quantiser by(global, rule);
    unsigned pair = larger_pair<false>(larger_pair<false>(0u, raw.x & 0x7fff7fffu), raw.y & 0x7fff7fffu);
    pair = larger_pair<false>(pair, __shfl_xor_sync(FULL_WARP, pair, 1));
    pair = larger_pair<false>(pair, __shfl_xor_sync(FULL_WARP, pair, 2));
    if (!inside) return;
    const unsigned code = by.code(larger(pair << 16, pair & 0xffff0000u));
    float v[4] = {widen_bf16(raw.x & 0xffffu), vt_float((int)(raw.x & 0xffff0000u)), widen_bf16(raw.y & 0xffffu),
                  vt_float((int)(raw.y & 0xffff0000u))};
    // The quick way is gone before one knows whether it may be: here it is waiting that takes the time.
    const float scale = normal_e4m3(code), step = scale * by.back, quick = middling_reciprocal(step) * TO_HALVES;
    const unsigned bytes = upper_bytes(cut_to_halves(v[0] * quick, v[1] * quick), cut_to_halves(v[2] * quick, v[3] * quick));
    unsigned four;
    if (__builtin_expect(is_middling(step, scale) & !may_tie(step) & ((bytes & 0x70707070u) == 0), 1)) {  // no NaN either
        four = e2m1_of_bytes(bytes);
    } else {
        const float factor = by.factor(code);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] *= factor;
        four = e2m1_four(v);
    }
    ((unsigned short*)out)[at] = (unsigned short)four;
    if ((at & 3) == 0) blocks.put(scales, block, code, tiled != 0);
}

// Blocks of bfloat16 by the rule "vt": the codes of one, and the code of its scale. What has a NaN, or no middling scale,
// or may have ties, takes the long way. quick(code): factor_to_halves.
template <class F> VT_FN uint2 codes_of_block(const uint4 (&raw)[2], const Quantiser& by, F&& quick, unsigned& code) {
    code = by.code(largest_of_sixteen<true>(raw[0], raw[1]));
    const float found = quick(code);
    if (found != 0.0f) return {e2m1_of_bf16(raw[0], found), e2m1_of_bf16(raw[1], found)};
    code = by.code(largest_of_sixteen<false>(raw[0], raw[1]));
    const float factor = by.factor(code);
    float v[8];
    uint2 words;
    widen(v, Raw<8>{raw[0], raw[0]}, BF16);
    words.x = by.word<false>(v, factor);
    widen(v, Raw<8>{raw[1], raw[1]}, BF16);
    words.y = by.word<false>(v, factor);
    return words;
}

// Threads of a grid take turns at pieces, each of which may be a block; the next one is under way while a thread has the
// last one in hand. walk.here(): whether there is a piece; walk.find(block, at): whether it is a block, which, and its
// first vector; walk.place(): where its scale is; walk.go(): to the next.
template <class W>
VT_FN void stream(W walk, const uint4* vectors, const float* global_scale, i64 rule, unsigned char* out, unsigned char* scales) {
    __shared__ float factors[256];
    unsigned block = 0;
    uint4 raw[2] = {}, next[2] = {};
    bool coming = false;
    auto fetch_block = [&] {
        i64 at;
        coming = walk.here() && walk.find(block, at);
        if (coming) next[0] = vectors[at], next[1] = vectors[at + 1];
    };
    after_others();
    fetch_block();
    const float global = global_scale[0];
    loads_are_under_way();
    others_may_start();
    const Quantiser by(global, rule);
    factors[threadIdx.x] = factor_to_halves(normal_e4m3(threadIdx.x) * by.back, normal_e4m3(threadIdx.x));
    __syncthreads();
#pragma unroll 1
    while (walk.here()) {
        const unsigned now = block, place = walk.place();
        const bool real = coming;
        unsigned code = 0;
        raw[0] = next[0], raw[1] = next[1];
        walk.go();
        fetch_block();
        if (real) ((uint2*)out)[now] = codes_of_block(raw, by, [&](unsigned c) { return factors[c]; }, code);
        scales[place] = (unsigned char)code;
    }
}

#define STREAM_PARAMETERS                                                                                         \
    i64 rows, i64 width, const void *x, i64 stride, const float *global_scale, unsigned char *out,                \
        unsigned char *scales, i64 rule, i64 magic, i64 shift

struct RowWalk {
    const Blocks& blocks;
    unsigned piece, count, threads;
    bool whole;
    VT_MEMBER bool here() const { return piece < count; }
    VT_MEMBER bool find(unsigned& block, i64& at) const {
        block = piece;
        at = whole ? 2ll * piece : blocks.start(piece) >> 3;
        return true;
    }
    VT_MEMBER unsigned place() const { return piece; }
    VT_MEMBER void go() { piece += threads; }
};

// Bfloat16 under the rule "vt". A piece is a block.
extern "C" __global__ void __launch_bounds__(256, STREAM_RESIDENT) fp4_stream_rows_early(STREAM_PARAMETERS, i64 threads) {
    const Blocks blocks{(unsigned)rows, (unsigned)(width >> 4), (unsigned)magic, (int)shift, stride};
    const unsigned first = blockIdx.x * 256 + threadIdx.x, count = (unsigned)(rows * (width >> 4));
    const RowWalk walk{blocks, first, count, (unsigned)threads, stride == width};
    stream(walk, (const uint4*)x, global_scale, rule, out, scales);
}

// A piece is a byte of the tiles, whether a block has it or not, so that a warp stores all 32 bytes of a sector: four
// blocks of eight rows, 16 times as many to a tile. A warp's next ones are `down` times eight rows and `right` tiles on.
struct TileWalk {
    unsigned rows, wide, across, eights, eight, column, down, right;
    i64 stride;
    VT_MEMBER bool here() const { return eight < eights; }
    VT_MEMBER bool find(unsigned& block, i64& at) const {
        const unsigned n = threadIdx.x & 31, row = (eight >> 4) * 128 + (eight & 15) * 2 + ((n >> 2 & 3) * 32 + (n >> 4));
        const unsigned inner = column * 4 + (n & 3);
        block = row * wide + inner;
        at = row * stride + 2 * inner;
        return row < rows && inner < wide;
    }
    VT_MEMBER unsigned place() const {
        return ((eight >> 4) * across + column) * 512 + (eight & 15) * 32 + (threadIdx.x & 31);
    }
    VT_MEMBER void go() {
        eight += down;
        column += right;
        if (column >= across) column -= across, ++eight;
    }
};

// `magic` and `shift` divide by the tiles across.
extern "C" __global__ void __launch_bounds__(256, STREAM_RESIDENT) fp4_stream_tiles_early(STREAM_PARAMETERS, i64 down, i64 right) {
    const unsigned wide = (unsigned)(width >> 4), across = (wide + 3) >> 2, eights = ((unsigned)(rows + 127) >> 7) * 16;
    const unsigned warp = blockIdx.x * 8 + (threadIdx.x >> 5), eight = whole_quotient(warp, (unsigned)magic, (int)shift);
    const TileWalk walk{(unsigned)rows, wide,           across,          eights,     eight, warp - eight * across,
                        (unsigned)down, (unsigned)right, stride >> 3};
    stream(walk, (const uint4*)x, global_scale, rule, out, scales);
}

// Eight values of a block, from a word of codes.
extern "C" __global__ void __launch_bounds__(256) fp4_values_early(
    i64 rows, i64 width, const unsigned char* packed, const unsigned char* scales, const float* global_scale, void* out,
    i64 kind, i64 tiled, i64 magic, i64 shift, i64 aligned, i64 words) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x, block = at >> 1;
    unsigned word = 0, place = block;
    if (tiled) {
        unsigned blocks = (unsigned)(width >> 4), row = whole_quotient(block, (unsigned)magic, (int)shift);
        place = tiled_place<unsigned>(row, block - row * blocks, (blocks + 3) >> 2);
    }
    found(place);
    others_may_start();
    after_others();
    if (at >= (unsigned)(rows * (width >> 3))) return;
    if (words) word = ((const unsigned*)packed)[at];
    else
#pragma unroll
        for (int j = 0; j < 4; ++j) word |= (unsigned)packed[(i64)at * 4 + j] << 8 * j;
    const unsigned code = scales[place];
    const float global = global_scale[0];
    float factor = e4m3_value(code) * global, v[8];
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
extern "C" __global__ void __launch_bounds__(256) fp4_values_deep_early(
    i64 rows, i64 width, const unsigned char* packed, const unsigned char* scales, const float* global_scale, void* out,
    i64 kind, i64 tiled, i64 magic, i64 shift, i64 aligned, i64 words) {
    VT_ASSUME((int)kind == BF16);
    unsigned first = blockIdx.x * (256 * VALUES_DEEP) + threadIdx.x, count = (unsigned)(rows * (width >> 3));
    unsigned word[VALUES_DEEP], code[VALUES_DEEP];
    after_others();
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
    others_may_start();
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
