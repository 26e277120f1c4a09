// 8-bit products with one scale a tensor, a row or a column.
//
// The ladder:
// 1. exact_*: MIRROR's order, on any GPU, for any width, stride and address (fp8_exact.cuh).
// 2. Hopper's tensor cores, for rows at multiples of 16 bytes, fed by threads (gone since): 64 weight rows by 16, 64 or 128
//    tokens a block where weights are what is read; 128 by 128 from two token tiles on.
// 3. loaded_*: the copy engine brings the tiles (fp8_loaded.cuh): what a block reads no longer costs its threads
//    instructions, and two blocks share what they both read. 256 tokens by 128 weight rows where there are enough of both.
// 4. Blocks that share weights rather than tokens; none share where one tile has all tokens. Tokens have the instruction's
//    64 rows, so that a thread needs two of their scales and not sixteen.
// 5. narrow_*: up to 128 tokens, and some more, tiles of 16 to 64 weight rows, so that every multiprocessor has one
//    (fp8_narrow.cuh). Before, one thread asked for all that a block reads, and 5120 rows kept 80 of 132 busy.
#include "fp8_exact.cuh"
#include "fp8_loaded.cuh"
#include "fp8_narrow.cuh"

template <class SUM_> struct Scaled {
    typedef SUM_ SUM;
    static constexpr bool EXACT = (SUM)0.5f == (SUM)0, SCALED = false;  // EXACT: int8
    i64 grid;
    const u8 *a, *b;
    i64 a_stride, b_stride, rows, columns, depth, width;
    bool words;
    const float *scale_a, *scale_b, *alpha;
    bool by_row, by_column;
    const int *azp, *azp_adj;
    const void *bias;
    void* out;
    int bias_kind, out_kind;
    bool through_bf16, vectors;

    template <int TOKENS, int ROWS> VT_MEMBER Order order() const { return {(rows + TOKENS - 1) / TOKENS, (columns + ROWS - 1) / ROWS, TURN / TOKENS}; }
    template <int TOKENS, int ROWS> VT_MEMBER i64 tiles() const { return order<TOKENS, ROWS>().count(); }
    template <int TOKENS, int ROWS> VT_MEMBER Tile tile(i64 number) const {
        i64 down, across;
        order<TOKENS, ROWS>().at(number, down, across);
        i64 token = down * TOKENS, column = across * ROWS;
        int tokens = (int)(rows - token < TOKENS ? rows - token : TOKENS), left = (int)(columns - column < ROWS ? columns - column : ROWS);
        return {a + token * a_stride, b + column * b_stride, token, column, tokens, left, tokens, 0};
    }
    VT_MEMBER SUM join_one(SUM total, SUM dot, const Tile&, int, int, i64) const { return dot; }

    // A result from what its column has, what its row has, and its sum.
    struct Ends { float scale, addend; int adj; };
    struct RowEnd { float scale; int azp; };
    VT_MEMBER Ends ends_of(i64 column) const {
        float addend[1] = {0.0f};
        if (bias) load(addend, bias, column, bias_kind);
        return {alpha ? alpha[0] : scale_b[by_column ? column : 0], addend[0], EXACT && azp_adj ? azp_adj[column] : 0};
    }
    VT_MEMBER RowEnd row_of(i64 token) const { return {alpha ? 1.0f : scale_a[by_row ? token : 0], EXACT && azp ? azp[token] : 1}; }
    VT_MEMBER float end(SUM sum, const RowEnd& row, const Ends& ends) const {
        float total = (float)sum;
        if constexpr (EXACT)
            if (azp_adj) total = (float)((i64)sum - (i64)ends.adj * row.azp);
        float scaled = ends.scale * total;
        if (alpha) return through_bf16 ? through(scaled, BF16) : scaled;
        return bias ? vt_fma(row.scale, scaled, ends.addend) : row.scale * scaled;
    }
    VT_MEMBER unsigned pair(float x, float y) const { return out_kind == F16 ? narrow_f16(x, y) : narrow_bf16(x, y); }
    VT_MEMBER Ends column_ends(const Tile& tile, int column) const { return ends_of(column < tile.columns ? tile.column + column : 0); }
    VT_MEMBER RowEnd row_end(const Tile& tile, int row) const { return row_of(row < tile.tokens ? tile.token + row : 0); }

    VT_MEMBER void write(const Tile& tile, const SUM* sums, int pitch, int across, int thread, int threads) const {
        int groups = across / 8;
        for (int e = thread; e < tile.rows * groups; e += threads) {
            int row = e / groups, first = e % groups * 8;
            if (first >= tile.columns) continue;
            i64 token = tile.token + row, column = tile.column + first, at = token * columns + column;
            float x[8];
            int count = tile.columns - first < 8 ? tile.columns - first : 8;
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = i < count ? end(sums[row * pitch + first + i], row_of(token), ends_of(column + i)) : 0.0f;
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
    i64 grid, const u8 *a, i64 a_stride, const u8 *b, i64 b_stride, i64 rows, i64 columns, i64 depth, i64 words,       \
        const float *scale_a, i64 by_row, const float *scale_b, i64 by_column, const float *alpha, i64 through_bf16,   \
        const int *azp, const int *azp_adj, const void *bias, i64 bias_kind, void *out, i64 out_kind, i64 vectors, i64 stages
#define JOB(SUM)                                                                                                       \
    Scaled<SUM> job = {grid, a, b, a_stride, b_stride, rows, columns, depth, depth ? depth : 1, words != 0, scale_a,   \
                       scale_b, alpha, by_row != 0, by_column != 0, azp, azp_adj, bias, out, (int)bias_kind,           \
                       (int)out_kind, through_bf16 != 0, vectors != 0};

extern "C" __global__ void __launch_bounds__(256, 2) exact_e4m3(PARAMETERS) { JOB(float) multiply_exactly<float, float>(job); }
extern "C" __global__ void __launch_bounds__(256, 2) exact_s8(PARAMETERS) { JOB(int) multiply_exactly<int, int>(job); }

#if VT_TILES
#define LOADED(SUM, name, TOKENS, WEIGHTS, GROUPS, TOKENS_LEFT, ALIKE, APART)                                          \
    extern "C" __global__ void VT_CLUSTER_OF(ALIKE * APART) __launch_bounds__(128 + 128 * GROUPS, 1)                   \
        name(VT_MAP tokens_map, VT_MAP weights_map, PARAMETERS) {                                                      \
        VT_SHARED(memory);                                                                                             \
        JOB(SUM)                                                                                                       \
        multiply_loaded<Form<TOKENS, WEIGHTS, GROUPS, TOKENS_LEFT, ALIKE, APART>>(tokens_map, weights_map, job, (int)stages, memory);\
    }
LOADED(float, loaded_e4m3_128_by_128, 128, 128, 2, true, 1, 2)
LOADED(float, loaded_e4m3_128_by_128_alike, 128, 128, 2, true, 2, 1)
LOADED(float, loaded_e4m3_256_by_128, 256, 128, 2, true, 1, 2)
LOADED(int, loaded_s8_128_by_128, 128, 128, 2, true, 1, 2)
LOADED(int, loaded_s8_128_by_128_alike, 128, 128, 2, true, 2, 1)
LOADED(int, loaded_s8_256_by_128, 256, 128, 2, true, 1, 2)

#define NARROW(SUM, name, TOKENS, WIDTH, DEEP)                                                                         \
    extern "C" __global__ void __launch_bounds__(TOKENS > 64 ? 384 : 256, 1)                                           \
        name##_##TOKENS##_##WIDTH(VT_MAP tokens_map, VT_MAP weights_map, PARAMETERS) {                                 \
        VT_SHARED(memory);                                                                                             \
        JOB(SUM)                                                                                                       \
        multiply_narrow<Narrow<TOKENS, WIDTH, DEEP>>(tokens_map, weights_map, job, (int)stages, memory);               \
    }
#define NARROW_OF_FEW(SUM, name, WIDTH) NARROW(SUM, name, 16, WIDTH, 2) NARROW(SUM, name, 64, WIDTH, 2)
#define NARROW_OF_ANY(SUM, name, WIDTH) NARROW_OF_FEW(SUM, name, WIDTH) NARROW(SUM, name, 128, WIDTH, 1)
NARROW_OF_FEW(float, narrow_e4m3, 16)  // more tokens take two tiles of 64 sooner than one as narrow
NARROW_OF_ANY(float, narrow_e4m3, 32)
NARROW_OF_ANY(float, narrow_e4m3, 40)
NARROW_OF_ANY(float, narrow_e4m3, 48)
NARROW_OF_ANY(float, narrow_e4m3, 56)
NARROW_OF_ANY(float, narrow_e4m3, 64)
NARROW_OF_FEW(int, narrow_s8, 16)
NARROW_OF_ANY(int, narrow_s8, 32)
NARROW_OF_ANY(int, narrow_s8, 48)
NARROW_OF_ANY(int, narrow_s8, 64)
#endif
