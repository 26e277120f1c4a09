// Products of e4m3 operands in groups: stretches of K with sums of their own (`stretches`), or a matrix for each head
// (`heads`).
//
// The ladder:
// 1. exact_*: MIRROR's order, on any GPU, for any address: fp8_exact.cuh, and a kernel for operands that lie along K.
// 2. loaded_heads: the tiles of the other products of e4m3 (fp8_loaded.cuh), whose blocks stay with a head each, since its
//    rows of a are not those of a whole matrix. 128 tokens are two tiles of 64 that share their weights.
// 3. loaded_stretches: float16 on its way (fp8_stretches.cuh).
#include "fp8_exact.cuh"
#include "fp8_loaded.cuh"
#include "fp8_stretches.cuh"

#define MOST_HEADS 8  // of a launch on tensor cores: device/fp8_groups.py

// [heads] products of `rows` tokens: row (b, h) of a with matrix h, its scales 1 x 128, theirs 128 x 128. The matrices are
// one of heads * wide columns, and so are the results. On tensor cores a block stays with one head, whose rows of a have a
// tensor map of their own: neighbouring tiles are of neighbouring heads, and a launch has a multiple of `heads` clusters.
struct Heads {
    typedef float SUM;
    static constexpr bool EXACT = false, SCALED = true;
    i64 grid;
    const u8 *a, *b;
    i64 a_stride, a_head, b_stride, rows, columns, depth, heads, wide;
    bool words;
    const void* scale_a;
    i64 scale_row, scale_head, scale_block;
    bool packed;
    const float* scale_b;
    unsigned short* out;
    bool vectors;
    static constexpr i64 width = 128;

    template <int TOKENS, int ROWS> VT_MEMBER Order order() const {
        return {(rows + TOKENS - 1) / TOKENS, (wide + ROWS - 1) / ROWS, TURN / TOKENS};
    }
    template <int TOKENS, int ROWS> VT_MEMBER i64 tiles() const { return heads * order<TOKENS, ROWS>().count(); }
    template <int TOKENS, int ROWS> VT_MEMBER Tile tile(i64 number) const {
        unsigned of_head = (unsigned)number / (unsigned)heads, head = (unsigned)number - of_head * (unsigned)heads;
        i64 down, across;
        order<TOKENS, ROWS>().at(of_head, down, across);
        i64 token = down * TOKENS, first = across * ROWS, column = head * wide + first;
        int tokens = (int)(rows - token < TOKENS ? rows - token : TOKENS), left = (int)(wide - first < ROWS ? wide - first : ROWS);
        return {a + token * a_stride + head * a_head, b + column * b_stride, token, column, tokens, left, tokens, 0};
    }
    // The head of a tile; behind the last one where a cluster's second block has no columns left.
    VT_MEMBER unsigned head_of(const Tile& tile) const {
        unsigned head = (unsigned)tile.column / (unsigned)wide;
        return head < (unsigned)heads ? head : (unsigned)heads - 1;
    }
    VT_MEMBER const unsigned* token_scales(const Tile& tile, int token) const {
        return (const unsigned*)scale_a + head_of(tile) * scale_head + (tile.token + token) * scale_row;
    }
    VT_MEMBER i64 scale_at(int block) const { return (packed ? block >> 2 : block) * scale_block; }
    VT_MEMBER float scale(unsigned word, int block) const {
        if (!packed) return vt_float((int)word);
        unsigned exponent = word >> 8 * (block & 3) & 0xffu;
        return exponent == 0 ? vt_float(0x00400000) : exponent == 255 ? VT_NAN : vt_float((int)(exponent << 23));
    }
    VT_MEMBER const float* weight_scales(const Tile& tile) const {  // a tile lies in one block of columns
        unsigned head = head_of(tile), within = (unsigned)tile.column - head * (unsigned)wide;
        unsigned lines = (unsigned)(wide + 127) >> 7, line = within >> 7;
        return scale_b + (head * lines + (line < lines ? line : 0)) * (depth >> 7);
    }
    VT_MEMBER float join_one(float total, float dot, const Tile& tile, int token, int column, i64 start) const {
        int block = (int)(start >> 7);
        float row = scale(token_scales(tile, token)[scale_at(block)], block);
        return vt_fma(row * vt_load(weight_scales(tile) + block), dot, total);
    }
    struct Ends {};
    struct RowEnd {};
    VT_MEMBER Ends column_ends(const Tile&, int) const { return {}; }
    VT_MEMBER RowEnd row_end(const Tile&, int) const { return {}; }
    VT_MEMBER float end(float sum, const RowEnd&, const Ends&) const { return sum; }
    VT_MEMBER unsigned pair(float x, float y) const { return narrow_bf16(x, y); }
    VT_MEMBER void write(const Tile& tile, const float* sums, int pitch, int across, int thread, int threads) const {
        int pieces = across / 8;
        for (int e = thread; e < tile.rows * pieces; e += threads) {
            int row = e / pieces, piece = e % pieces * 8;
            if (piece >= tile.columns) continue;  // a head has whole eights of columns
            i64 at = (tile.token + row) * columns + tile.column + piece;
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = sums[row * pitch + piece + i];
            if (vectors) {
                store(out, at, x, BF16);
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    float one[1] = {x[i]};
                    store(out, at + i, one, BF16);
                }
            }
        }
    }
};

#define PARAMETERS                                                                                                     \
    const u8 *a, i64 a_stride, i64 a_head, const u8 *b, i64 rows, i64 depth, i64 heads, i64 wide, i64 words,           \
        const void *scale_a, i64 scale_row, i64 scale_head, i64 scale_block, i64 packed, const float *scale_b,         \
        unsigned short *out, i64 columns, i64 vectors, i64 stages
#define JOB(grid)                                                                                                      \
    Heads job = {grid, a, b, a_stride, a_head, depth, rows, columns, depth, heads, wide, words != 0, scale_a,          \
                 scale_row, scale_head, scale_block, packed != 0, scale_b, out, vectors != 0};

extern "C" __global__ void __launch_bounds__(256, 1) exact_heads(i64 grid, PARAMETERS) {
    JOB(grid)
    multiply_exactly<float, float>(job);
}

#if VT_TILES
struct alignas(64) HeadMaps { TensorMap of[MOST_HEADS]; };
#ifdef __CUDACC__
#define VT_MAPS const __grid_constant__ HeadMaps
#else
#define VT_MAPS const HeadMaps
#endif
#define LOADED(name, TOKENS, WEIGHTS, GROUPS, TOKENS_LEFT, ALIKE, APART)                                               \
    extern "C" __global__ void VT_CLUSTER_OF(ALIKE * APART) __launch_bounds__(128 + 128 * GROUPS, 1)                   \
        name(VT_MAPS maps, VT_MAP weights_map, i64 grid, PARAMETERS) {                                                  \
        VT_SHARED(memory);                                                                                             \
        JOB(grid)                                                                                                      \
        const TensorMap& tokens_map = maps.of[blockIdx.x / (TOGETHER(ALIKE) * TOGETHER(APART)) % (unsigned)heads];     \
        multiply_loaded<Form<TOKENS, WEIGHTS, GROUPS, TOKENS_LEFT, ALIKE, APART>>(tokens_map, weights_map, job, (int)stages, memory);\
    }
LOADED(loaded_heads_16, 16, 64, 1, false, 1, 1)
LOADED(loaded_heads_64, 64, 64, 1, true, 2, 1)
LOADED(loaded_heads_64_by_128, 64, 128, 1, true, 1, 2)
LOADED(loaded_heads_128_by_128, 128, 128, 2, true, 1, 2)
LOADED(loaded_heads_256_by_128, 256, 128, 2, true, 1, 2)
#endif

// out[e] (rows x columns) = c[e] + a_e^T b_e, row k of a and of b side by side in memory. A block has 64 x 64 elements of
// one group, a thread 4 x 4; a block of 128 k is eight chains of sixteen.
extern "C" __global__ void __launch_bounds__(256, 1)
    exact_stretches(i64 rows, i64 columns, i64 depth, const u8* a, const float* scale_a, const u8* b, const float* scale_b,
                  const int* sizes, const float* c, float* out) {
    __shared__ float left[PIECE][SIDE], right[PIECE][SIDE];
    i64 across = (columns + SIDE - 1) / SIDE, down = (rows + SIDE - 1) / SIDE, group = blockIdx.x / (across * down);
    i64 within = blockIdx.x - group * across * down, top = within / across * SIDE, first = within % across * SIDE;
    int thread = (int)threadIdx.x, x = thread & 15, y = thread >> 4;
    i64 begin = 0, end;  // sizes that lie reach no further than the operands
    for (i64 e = 0; e < group; ++e) begin += sizes[e];
    end = begin + sizes[group];
    if (begin < 0 || begin % 128 != 0) begin = end = 0;
    if (end > depth) end = depth;
    float total[4][4] = {};
    for (i64 block = begin; block < end; block += 128) {
        float dot[4][4] = {};
#pragma unroll 1
        for (i64 k = block; k < block + 128; k += PIECE) {
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int step = (thread >> 6) + 4 * i, at = thread & 63;
                left[step][at] = top + at < rows ? value_of(a[(k + step) * rows + top + at], 0.0f) : 0.0f;
                right[step][at] = first + at < columns ? value_of(b[(k + step) * columns + first + at], 0.0f) : 0.0f;
            }
            __syncthreads();
            float sum[4][4] = {};
#pragma unroll
            for (int step = 0; step < PIECE; ++step)
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) sum[i][j] = vt_fma(left[step][y + 16 * i], right[step][x + 16 * j], sum[i][j]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) dot[i][j] += sum[i][j];
        }
        const float *row = scale_a + block / 128 * rows + top, *column = scale_b + block / 128 * columns + first;
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (top + y + 16 * i < rows && first + x + 16 * j < columns)
                    total[i][j] = vt_fma(row[y + 16 * i] * column[x + 16 * j], dot[i][j], total[i][j]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            i64 m = top + y + 16 * i, n = first + x + 16 * j, at = (group * rows + m) * columns + n;
            if (m < rows && n < columns) out[at] = c == nullptr ? total[i][j] : c[at] + total[i][j];
        }
}

#if VT_TILES
extern "C" __global__ void __launch_bounds__(512, 1)
    loaded_stretches(VT_MAP a_map, VT_MAP b_map, i64 grid, i64 tiles, i64 rows, i64 columns, i64 depth, const float* scale_a,
                     const float* scale_b, const int* sizes, const float* c, float* out) {
    VT_SHARED(memory);
    multiply_stretches(a_map, b_map, (int)grid, (int)tiles, rows, columns, depth, scale_a, scale_b, sizes, c, out, memory);
}
#endif
