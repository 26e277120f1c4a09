// DeepGEMM's casts: e4m3 in groups of 128 neighbours and in tiles, e2m1 in groups, requantised tiles, scales in columns.
//
// The ladder:
// 1. *_any: groups and tiles of any size, elements one by one, each read twice.
// 2. *_v8: 16-byte loads, a group in 1 to 32 neighbouring lanes; a tile of 128 x 128 waits in the registers of a block.
// 3. *_deep: four vectors of bfloat16 under way a thread, maxima taken of pairs as they lie in memory, and each lane finds
//    the scale of one of its four groups alone, with its division and reciprocal.
// 4. Codes of e2m1 come from sums that round upwards and products that saturate, as in fp4.cuh; where there are many, from
//    float16s (e2m1_halves.cuh) of the float32s just below the quotients, so that ties go down.
#include "e2m1_lower.cuh"
#include "e4m3_halves.cuh"
#include "once.cuh"
#include "powers.cuh"

#define DEPTH 4     // vectors a thread of the _deep kernels, device/fp8_casts.py
#define SIDE 128    // of a tile that stays in registers
#define LEAST 1e-4f

VT_FN float e4m3_cast_scale(unsigned top, int rule) {
    return rounded_up(over_largest(vt_maximum(vt_float((int)top), LEAST)), rule);
}

VT_FN float e2m1_cast_scale(unsigned top, int rule) {
    return rounded_up(vt_maximum(vt_float((int)top), LEAST) / 6.0f, rule);
}

struct E4M3 {
    static constexpr bool NUMBERS = false;  // whether there is another way for numbers alone
    VT_MEMBER float scale(unsigned top, int rule) const { return e4m3_cast_scale(top, rule); }
    template <bool> VT_MEMBER void put(unsigned char* out, i64 at, const float (&q)[8]) const { store_e4m3(out, at, q, 0x7fu); }
};

struct E2M1 {
    static constexpr bool NUMBERS = true;
    VT_MEMBER float scale(unsigned top, int rule) const { return e2m1_cast_scale(top, rule); }
    template <bool NUMBER> VT_MEMBER void put(unsigned char* out, i64 at, const float (&q)[8]) const {
        *(unsigned*)(out + (at >> 1)) = NUMBER ? lower_word_of_numbers(q) : lower_word(q);
    }
};

#define GROUP_PARAMETERS                                                                                               \
    i64 count, const void *x, i64 kind, unsigned char *out, float *scales, i64 rule, i64 lane_shift

// All of x is `count` vectors of 8, contiguous, and a group 1 << lane_shift of them.
template <class TO>
VT_FN void cast_vectors(unsigned count, const void* x, int kind, unsigned char* out, float* scales, int rule, int shift) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x, top = 0;
    bool inside = at < count;
    float v[8], q[8];
    if (inside) {
        load(v, x, (i64)at * 8, kind);
        top = largest_of(v, false);
    }
    top = largest_of_lanes(top, 1 << shift);
    if (!inside) return;
    float scale = TO().scale(top, rule);
    products(q, v, 1.0f / scale);
    TO().template put<false>(out, (i64)at * 8, q);
    if ((threadIdx.x & ((1u << shift) - 1)) == 0) scales[at >> shift] = scale;
}

// Codes and scales of the groups of a thread's vectors; NUMBERS: none is infinite or NaN, or false comes back.
template <class TO, bool NUMBERS>
VT_FN bool cast_groups(const Raw<8> (&raw)[DEPTH], unsigned count, unsigned first, unsigned char* out, float* scales,
                       int rule, int shift) {
    unsigned tops[DEPTH];
    bool numbers = true;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) tops[d] = first + d * 256 < count ? largest_pair<NUMBERS>(raw[d].a) : 0u;
    GroupScales<DEPTH> found;
    found.template join<NUMBERS>(tops, 1 << shift, [&](unsigned top) {
        numbers = top < 0x7f800000u;
        return TO().scale(top, rule);
    });
    if (NUMBERS && __any_sync(FULL_WARP, !numbers)) return false;
    float inverse = 1.0f / found.scale;
    unsigned stored = first + found.own * 256;
    if ((threadIdx.x & ((1u << shift) - 1)) < DEPTH && stored < count) scales[stored >> shift] = found.scale;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        float factor = __shfl_xor_sync(FULL_WARP, inverse, found.own ^ d);
        if (first + d * 256 >= count) continue;
        float v[8], q[8];
        widen(v, raw[d], BF16);
        products(q, v, factor);
        TO().template put<NUMBERS>(out, (i64)(first + d * 256) * 8, q);
    }
    return true;
}

// The same for bfloat16 in groups of at least DEPTH lanes.
template <class TO>
VT_FN void cast_deep(unsigned count, const void* x, unsigned char* out, float* scales, int rule, int shift) {
    unsigned first = blockIdx.x * (256 * DEPTH) + threadIdx.x;
    Raw<8> raw[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (first + d * 256 < count) raw[d] = fetch<8>(x, (i64)(first + d * 256) * 8, BF16);
    if (TO::NUMBERS && cast_groups<TO, true>(raw, count, first, out, scales, rule, shift)) return;
    cast_groups<TO, false>(raw, count, first, out, scales, rule, shift);
}

#define CASTS(NAME, TO)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) NAME##_v8(GROUP_PARAMETERS) {                                    \
        cast_vectors<TO>((unsigned)count, x, (int)kind, out, scales, (int)rule, (int)lane_shift);                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) NAME##_deep(GROUP_PARAMETERS) {                                  \
        cast_deep<TO>((unsigned)count, x, out, scales, (int)rule, (int)lane_shift);                                    \
    }
CASTS(cast_e4m3, E4M3)
CASTS(cast_e2m1, E2M1)

// A warp for each group of any even size, of rows of any stride; FP4: bytes of two codes.
template <bool FP4>
VT_FN void cast_any(i64 rows, i64 width, const void* x, i64 stride, int kind, i64 size, unsigned char* out,
                    float* scales, int rule) {
    unsigned groups = ((unsigned)width + (unsigned)size - 1) / (unsigned)size;
    unsigned number = blockIdx.x * 8 + (threadIdx.x >> 5), top = 0;
    if (number >= (unsigned)rows * groups) return;
    i64 row = number / groups, begin = (number - row * groups) * size, end = begin + size < width ? begin + size : width;
    int lane = threadIdx.x & 31;
    float v[1];
    for (i64 at = begin + lane; at < end; at += 32) {
        load(v, x, row * stride + at, kind);
        top = larger(top, largest_of(v, false));
    }
    top = largest_of_warp(top);
    float scale = FP4 ? e2m1_cast_scale(top, rule) : e4m3_cast_scale(top, rule), inverse = 1.0f / scale;
    if (lane == 0) scales[number] = scale;
    if (FP4) {
        for (i64 at = begin + 2 * lane; at < end; at += 64) {
            float pair[8] = {};
            load(v, x, row * stride + at, kind);
            pair[0] = v[0] * inverse;
            load(v, x, row * stride + at + 1, kind);
            pair[1] = v[0] * inverse;
            out[(row * width + at) >> 1] = (unsigned char)lower_word(pair);
        }
        return;
    }
    for (i64 at = begin + lane; at < end; at += 32) {
        load(v, x, row * stride + at, kind);
        v[0] *= inverse;
        store_e4m3(out, row * width + at, v, 0x7fu);
    }
}

#define CAST_ANY(NAME, FP4)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                            \
        i64 rows, i64 width, const void* x, i64 stride, i64 kind, i64 size, unsigned char* out, float* scales,         \
        i64 rule) {                                                                                                    \
        cast_any<FP4>(rows, width, x, stride, (int)kind, size, out, scales, (int)rule);                                \
    }
CAST_ANY(cast_e4m3_any, false)
CAST_ANY(cast_e2m1_any, true)

// What a tile is made of: floats, or codes under the tile's own scale.
struct Floats {
    const void* x;
    i64 stride;
    int kind;
    static constexpr int WIDTH = 8;
    typedef Raw<8> Piece;
    VT_MEMBER void begin(i64) {}
    VT_MEMBER Piece piece(i64 row, i64 column) const { return fetch<8>(x, row * stride + column, kind); }
    VT_MEMBER void values(float (&v)[8], const Piece& raw) const { widen(v, raw, kind); }
    VT_MEMBER unsigned largest(const Piece& raw) const {
        float v[8];
        widen(v, raw, kind);
        return largest_of(v, false);
    }
    VT_MEMBER unsigned size(unsigned top) const { return top; }
    VT_MEMBER void value(float (&v)[1], i64 row, i64 column) const { load(v, x, row * stride + column, kind); }
};

struct Brains {
    const uint4* x;
    i64 stride;
    static constexpr int WIDTH = 8;
    typedef uint4 Piece;
    VT_MEMBER void begin(i64) {}
    VT_MEMBER Piece piece(i64 row, i64 column) const { return x[(row * stride + column) >> 3]; }
    VT_MEMBER void values(float (&v)[8], const Piece& raw) const { widen(v, Raw<8>{raw, raw}, BF16); }
    VT_MEMBER unsigned largest(const Piece& raw) const { return largest_of_bf16(Raw<8>{raw, raw}, false); }
    VT_MEMBER unsigned size(unsigned top) const { return top; }
};

// In either half of a word, the largest of two of its four codes without signs; a NaN is passed over.
VT_FN unsigned largest_codes(unsigned codes) {
    codes &= ~((nans_of(codes) >> 7) * 0xffu);
    return larger_pair<false>(codes & 0x007f007fu, codes >> 8 & 0x007f007fu);
}

VT_FN void words_of(unsigned (&w)[2], const uint2& raw) { w[0] = raw.x, w[1] = raw.y; }
VT_FN void words_of(unsigned (&w)[4], const uint4& raw) { w[0] = raw.x, w[1] = raw.y, w[2] = raw.z, w[3] = raw.w; }

template <int W> struct Vector { typedef uint2 type; };
template <> struct Vector<16> { typedef uint4 type; };

// Pieces of W codes.
template <int W> struct Codes {
    const unsigned char* codes;
    i64 stride;
    const float* scales;
    float scale;
    static constexpr int WIDTH = W;
    typedef typename Vector<W>::type Piece;
    VT_MEMBER void begin(i64 tile) { scale = scales[tile]; }
    VT_MEMBER Piece piece(i64 row, i64 column) const { return load_once((const Piece*)(codes + row * stride + column)); }
    VT_MEMBER void values(float (&v)[W], const Piece& raw) const {
        unsigned words[W / 4];
        words_of(words, raw);
#pragma unroll
        for (int i = 0; i < W / 4; ++i) e4m3_values(v + 4 * i, words[i]);
#pragma unroll
        for (int j = 0; j < W; ++j) v[j] *= scale;
    }
    VT_MEMBER unsigned largest(const Piece& raw) const {
        unsigned words[W / 4];
        words_of(words, raw);
        unsigned pair = largest_codes(words[0]);
#pragma unroll
        for (int i = 1; i < W / 4; ++i) pair = larger_pair<false>(pair, largest_codes(words[i]));
        return larger(pair & 0xffffu, pair >> 16);
    }
    VT_MEMBER unsigned size(unsigned top) const { return (unsigned)vt_bits(vt_abs(through_scale(top))); }
    VT_MEMBER void value(float (&v)[1], i64 row, i64 column) const { v[0] = through_scale(codes[row * stride + column]); }
    VT_MEMBER float through_scale(unsigned code) const { return e4m3_value(code) * scale; }
};

VT_FN void put_codes(unsigned char* out, i64 at, const float (&v)[8], float inverse) {
    float q[8];
    products(q, v, inverse);
    store_e4m3(out, at, q, 0x7fu);
}

VT_FN void put_codes(unsigned char* out, i64 at, const float (&v)[16], float inverse) {
    float q[16];
    products(q, v, inverse);
    unsigned w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = e4m3_pair(q[4 * i], q[4 * i + 1]) | e4m3_pair(q[4 * i + 2], q[4 * i + 3]) << 16;
    *(uint4*)(out + at) = {w[0], w[1], w[2], w[3]};
}

#define TILE_SIZES i64 rows, i64 width, i64 high, i64 wide
#define TILE_RESULTS unsigned char *out, float *scales, i64 rule

// A tile of SIDE x SIDE in the registers of 256 threads, a piece of WIDTH neighbours each in every step; rows are of whole
// pieces.
template <class SOURCE> VT_FN void cast_tile(SOURCE source, TILE_SIZES, TILE_RESULTS) {
    constexpr int WIDTH = SOURCE::WIDTH, LANES = SIDE / WIDTH, APART = 256 / LANES, STEPS = SIDE / APART;
    __shared__ unsigned tops[8];
    i64 across = (width + SIDE - 1) / SIDE, down = blockIdx.x / across, tile = blockIdx.x;
    i64 row = down * SIDE + threadIdx.x / LANES, column = (tile - down * across) * SIDE + threadIdx.x % LANES * WIDTH;
    int left = column < width && row < rows ? (int)(rows - row < SIDE ? rows - row : SIDE) : 0;  // rows from mine on
    typename SOURCE::Piece raw[STEPS];
    source.begin(tile);
#pragma unroll
    for (int d = 0; d < STEPS; ++d)
        if (APART * d < left) raw[d] = source.piece(row + APART * d, column);
    unsigned top = 0;
#pragma unroll
    for (int d = 0; d < STEPS; ++d)
        if (APART * d < left) top = larger(top, source.largest(raw[d]));
    float scale = e4m3_cast_scale(source.size(largest_of_block(top, tops)), (int)rule), inverse = 1.0f / scale;
    if (threadIdx.x == 0) scales[tile] = scale;
#pragma unroll
    for (int d = 0; d < STEPS; ++d) {
        if (APART * d >= left) continue;
        float v[WIDTH];
        source.values(v, raw[d]);
        put_codes(out, (row + APART * d) * width + column, v, inverse);
    }
}

// A tile of high x wide by eight warps, a row each at a time.
template <class SOURCE> VT_FN void cast_tile_any(SOURCE source, TILE_SIZES, TILE_RESULTS) {
    __shared__ unsigned tops[8];
    i64 across = (width + wide - 1) / wide, down = blockIdx.x / across, tile = blockIdx.x;
    i64 row = down * high, column = (tile - down * across) * wide;
    i64 some = rows - row < high ? rows - row : high, beside = width - column < wide ? width - column : wide;
    source.begin(tile);
    float v[1];
    unsigned top = 0;
    for (i64 r = threadIdx.x >> 5; r < some; r += 8)
        for (i64 c = threadIdx.x & 31; c < beside; c += 32) {
            source.value(v, row + r, column + c);
            top = larger(top, largest_of(v, false));
        }
    float scale = e4m3_cast_scale(largest_of_block(top, tops), (int)rule), inverse = 1.0f / scale;
    if (threadIdx.x == 0) scales[tile] = scale;
    for (i64 r = threadIdx.x >> 5; r < some; r += 8)
        for (i64 c = threadIdx.x & 31; c < beside; c += 32) {
            source.value(v, row + r, column + c);
            v[0] *= inverse;
            store_e4m3(out, (row + r) * width + column + c, v, 0x7fu);
        }
}

#define TILE_ARGUMENTS rows, width, high, wide, out, scales, rule
#define TILE_OF_FLOATS(NAME, CAST, SOURCE)                                                                             \
    extern "C" __global__ void __launch_bounds__(256) NAME(TILE_SIZES, const void* x, i64 stride, i64 kind,            \
                                                           TILE_RESULTS) {                                             \
        CAST(SOURCE, TILE_ARGUMENTS);                                                                                  \
    }
#ifndef REQUANT_BLOCKS
#define REQUANT_BLOCKS 6
#endif
#define TILE_OF_CODES(NAME, CAST, W, BLOCKS)                                                                           \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) NAME(TILE_SIZES, const unsigned char* codes,             \
                                                                   const float* before, TILE_RESULTS) {                \
        CAST((Codes<W>{codes, width, before, 0.0f}), TILE_ARGUMENTS);                                                  \
    }
TILE_OF_FLOATS(cast_tile_bf16, cast_tile, (Brains{(const uint4*)x, stride}))
TILE_OF_FLOATS(cast_tile_v8, cast_tile, (Floats{x, stride, (int)kind}))
TILE_OF_FLOATS(cast_tile_any_floats, cast_tile_any, (Floats{x, stride, (int)kind}))
TILE_OF_CODES(requant_tile_v16, cast_tile, 16, REQUANT_BLOCKS)
TILE_OF_CODES(requant_tile_v8, cast_tile, 8, 5)
TILE_OF_CODES(requant_tile_any, cast_tile_any, 8, 5)

// Scales [M, G] turned, in tiles of 32 rows x 8 columns: element (m, c) of the result is at m * row_step + c * column_step;
// rows up to `padded` are 0. Packed, an element is the exponents of four groups, read at once where `wide`.
extern "C" __global__ void __launch_bounds__(256) scale_columns(
    i64 rows, i64 groups, i64 columns, const float* scales, i64 stride, unsigned* out, i64 row_step, i64 column_step,
    i64 padded, i64 packed, i64 wide) {
    __shared__ unsigned turned[8 * 36];  // a warp's four rows of eight columns are in different banks
    const unsigned across = ((unsigned)columns + 7) >> 3, down = blockIdx.x / across;
    const i64 row = (i64)down << 5, column = (i64)(blockIdx.x - down * across) << 3;
    int x = threadIdx.x & 7, y = threadIdx.x >> 3;
    unsigned word = 0;
    if (row + y < rows && column + x < columns) {
        const unsigned* from = (const unsigned*)scales + (row + y) * stride;
        if (!packed) {
            word = from[column + x];
        } else if (wide) {
            const uint4 four = ((const uint4*)from)[column + x];
            word = (four.x >> 23 & 0xffu) | (four.y >> 23 & 0xffu) << 8 | (four.z >> 23 & 0xffu) << 16 |
                   (four.w >> 23 & 0xffu) << 24;
        } else {
            for (int j = 0; j < 4 && (column + x) * 4 + j < groups; ++j)
                word |= (from[(column + x) * 4 + j] >> 23 & 0xffu) << 8 * j;
        }
    }
    turned[x * 36 + y] = word;
    __syncthreads();
    x = threadIdx.x & 31, y = threadIdx.x >> 5;
    if (row + x < padded && column + y < columns)
        out[(row + x) * row_step + (column + y) * column_step] = turned[y * 36 + x];
}

// The same for floats whose rows are of whole fours, into columns at multiples of 16 bytes: tiles of 32 x 32, four neighbours
// a thread and then four rows.
extern "C" __global__ void __launch_bounds__(256) scale_columns_v4(
    i64 rows, i64 groups, const uint4* scales, i64 stride, uint4* out, i64 column_step) {
    __shared__ unsigned turned[32 * 33];
    const unsigned across = ((unsigned)groups + 31) >> 5, down = blockIdx.x / across;
    const i64 row = (i64)down << 5, column = (i64)(blockIdx.x - down * across) << 5;
    const int x = threadIdx.x & 7, y = threadIdx.x >> 3;
    uint4 four = {};
    if (row + y < rows && column + 4 * x < groups) four = scales[((row + y) * stride + column) / 4 + x];
    unsigned* to = turned + 4 * x * 33 + y;
    to[0] = four.x, to[33] = four.y, to[66] = four.z, to[99] = four.w;
    __syncthreads();
    const unsigned* from = turned + y * 33 + 4 * x;
    if (column + y < groups && row + 4 * x < rows)
        out[((column + y) * column_step + row) / 4 + x] = {from[0], from[1], from[2], from[3]};
}
