// Products of e4m3 or int8 operands with a scale for each stretch of k: activations 1 x W, weights H x W, alone or for the
// tokens of many experts.
//
// The ladder is that of fp8_matmul.cu. On tensor cores a stretch of 128 joins the float32 sums with its scales as soon as
// it leaves them.
#include "fp8_exact.cuh"
#include "fp8_loaded.cuh"

enum { ALONE = 0, CONTIGUOUS = 1, MASKED = 2 };  // device/fp8_blocks.py

struct Blocks {
    typedef float SUM;
    static constexpr bool EXACT = false, SCALED = true;
    i64 grid;
    const u8 *a, *b;
    i64 a_stride, b_stride, rows, columns, depth, width, height;
    bool words;
    const void *scale_a;
    i64 scale_row, scale_block, groups;
    bool packed, first;
    const float* scale_b;
    const int* experts;
    i64 many, high;  // experts, tokens that a tile may have
    int kind;
    void* out;
    int out_kind;
    bool vectors;

    // Tokens a tile: a tile of several experts' tokens has no weights.
    template <int TOKENS> VT_MEMBER i64 step() const { return high < TOKENS ? high : TOKENS; }
    template <int TOKENS> VT_MEMBER unsigned steps() const { return (unsigned)(rows + step<TOKENS>() - 1) / (unsigned)step<TOKENS>(); }
    template <int TOKENS, int ROWS> VT_MEMBER Order order() const {
        unsigned down = steps<TOKENS>();
        return {kind == MASKED ? many * down : down, (columns + ROWS - 1) / ROWS, TURN / TOKENS};
    }
    template <int TOKENS, int ROWS> VT_MEMBER i64 tiles() const { return order<TOKENS, ROWS>().count(); }
    template <int TOKENS, int ROWS> VT_MEMBER Tile tile(i64 number) const {
        i64 down, across;
        order<TOKENS, ROWS>().at(number, down, across);
        int expert = kind == MASKED ? (int)((unsigned)down / steps<TOKENS>()) : 0;
        i64 within = (down - (i64)expert * steps<TOKENS>()) * step<TOKENS>(), token = expert * rows + within, column = across * ROWS;
        int height = (int)(rows - within < step<TOKENS>() ? rows - within : step<TOKENS>()), tokens = height;
        int left = (int)(columns - column < ROWS ? columns - column : ROWS);
        if (kind == CONTIGUOUS) expert = experts[token];
        if (kind == MASKED) {
            i64 real = experts[expert] - within;
            if (real < tokens) tokens = real > 0 ? (int)real : 0;
        }
        const u8* weights = b + ((expert < 0 ? 0 : expert) * columns + column) * b_stride;
        return {a + token * a_stride, weights, token, column, tokens, left, height, tokens ? expert : -1};
    }
    // Scales of a token, one for each block of k, or a word for four.
    VT_MEMBER const unsigned* token_scales(const Tile& tile, int token) const {
        return (const unsigned*)scale_a + (tile.token + token) * scale_row;
    }
    VT_MEMBER i64 scale_at(int block) const { return (packed ? block >> 2 : block) * scale_block; }
    VT_MEMBER float scale(unsigned word, int block) const {
        if (!packed) return vt_float((int)word);
        unsigned exponent = word >> 8 * (block & 3) & 0xffu;
        return exponent == 0 ? vt_float(0x00400000) : exponent == 255 ? VT_NAN : vt_float((int)(exponent << 23));
    }
    // Scales of the weight rows from `column` of the tile on.
    VT_MEMBER const float* weights_of(const Tile& tile, i64 column) const {
        return scale_b + (tile.expert * ((columns + height - 1) / height) + column / height) * groups;
    }
    VT_MEMBER const float* weight_scales(const Tile& tile) const {
        return weights_of(tile, tile.column < columns ? tile.column : columns - 1);
    }
    VT_MEMBER float join_one(float total, float dot, const Tile& tile, int token, int column, i64 start) const {
        i64 block = start / width;
        float row = scale(token_scales(tile, token)[scale_at((int)block)], (int)block);
        float weights = vt_load(weights_of(tile, tile.column + column) + block);
        return first ? vt_fma(row * weights, dot, total) : total + dot * row * weights;
    }
    VT_MEMBER bool real(const Tile& tile, int row) const {
        return row < tile.tokens && tile.expert >= 0 && (kind != CONTIGUOUS || experts[tile.token + row] >= 0);
    }
    struct Ends {};
    typedef bool RowEnd;
    VT_MEMBER Ends column_ends(const Tile&, int) const { return {}; }
    VT_MEMBER bool row_end(const Tile& tile, int row) const { return real(tile, row); }
    VT_MEMBER float end(float sum, bool row, const Ends&) const { return row ? sum : 0.0f; }
    VT_MEMBER unsigned pair(float x, float y) const { return out_kind == F16 ? narrow_f16(x, y) : narrow_bf16(x, y); }
    VT_MEMBER void write(const Tile& tile, const float* sums, int pitch, int across, int thread, int threads) const {
        int pieces = across / 8;
        for (int e = thread; e < tile.rows * pieces; e += threads) {
            int row = e / pieces, piece = e % pieces * 8;
            if (piece >= tile.columns) continue;
            i64 token = tile.token + row, at = token * columns + tile.column + piece;
            bool here = real(tile, row);
            float x[8];
            int count = tile.columns - piece < 8 ? tile.columns - piece : 8;
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = here && i < count ? sums[row * pitch + piece + i] : 0.0f;
            if (vectors && count == 8) {
                store(out, at, x, out_kind);
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    float one[1] = {x[i]};
                    if (i < count) store(out, at + i, one, out_kind);
                }
            }
        }
    }
};

#define PARAMETERS                                                                                                     \
    i64 grid, const u8 *a, i64 a_stride, const u8 *b, i64 b_stride, i64 rows, i64 columns, i64 depth, i64 width,       \
        i64 height, i64 words, const void *scale_a, i64 scale_row, i64 scale_block, i64 packed, const float *scale_b,  \
        i64 groups, i64 first, i64 kind, const int *experts, i64 many, i64 high, void *out, i64 out_kind, i64 vectors, \
        i64 stages
#define JOB                                                                                                            \
    Blocks job = {grid, a, b, a_stride, b_stride, rows, columns, depth, width, height, words != 0, scale_a, scale_row, \
                  scale_block, groups, packed != 0, first != 0, scale_b, experts, many, high, (int)kind, out,          \
                  (int)out_kind, vectors != 0};

extern "C" __global__ void __launch_bounds__(256, 2) exact_e4m3_blocks(PARAMETERS) { JOB multiply_exactly<float, float>(job); }
extern "C" __global__ void __launch_bounds__(256, 2) exact_s8_blocks(PARAMETERS) { JOB multiply_exactly<int, float>(job); }

#if VT_TILES
#define LOADED(name, TOKENS, WEIGHTS, GROUPS, TOKENS_LEFT, ALIKE, APART)                                               \
    extern "C" __global__ void VT_CLUSTER_OF(ALIKE * APART) __launch_bounds__(128 + 128 * GROUPS, 1)                   \
        name(VT_MAP tokens_map, VT_MAP weights_map, PARAMETERS) {                                                      \
        VT_SHARED(memory);                                                                                             \
        JOB                                                                                                            \
        multiply_loaded<Form<TOKENS, WEIGHTS, GROUPS, TOKENS_LEFT, ALIKE, APART>>(tokens_map, weights_map, job, (int)stages, memory);\
    }
LOADED(loaded_blocks_16, 16, 64, 1, false, 1, 1)
LOADED(loaded_blocks_64, 64, 64, 1, true, 1, 1)
LOADED(loaded_blocks_128, 128, 64, 2, true, 1, 1)
LOADED(loaded_blocks_128_by_128, 128, 128, 2, true, 1, 2)
LOADED(loaded_blocks_128_by_128_alike, 128, 128, 2, true, 2, 1)
LOADED(loaded_blocks_256_by_128, 256, 128, 2, true, 1, 2)
#endif
