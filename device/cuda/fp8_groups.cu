// Products of e4m3 operands in groups: stretches of K with sums of their own (`stretches`), or a matrix for each head
// (`heads`), both in the order of fp8_exact.cuh: the mirror's bytes.
#include "fp8_exact.cuh"

// [heads] products of `rows` tokens: row (b, h) of a with matrix h, its scales 1 x 128, theirs 128 x 128.
struct Heads {
    typedef float SUM;
    static constexpr bool EXACT = false, SCALED = true;
    i64 grid;
    const u8 *a, *b;
    i64 a_stride, a_head, b_stride, rows, columns, depth, heads;
    bool words;
    const void* scale_a;
    i64 scale_row, scale_head, scale_block;
    bool packed;
    const float* scale_b;
    unsigned short* out;
    static constexpr i64 width = 128;

    template <int TOKENS, int ROWS> VT_MEMBER i64 tiles() const {
        return heads * ((rows + TOKENS - 1) / TOKENS) * ((columns + ROWS - 1) / ROWS);
    }
    template <int TOKENS, int ROWS> VT_MEMBER Tile tile(i64 number) const {
        i64 across = (columns + ROWS - 1) / ROWS, down = (rows + TOKENS - 1) / TOKENS, head = number / (across * down);
        i64 within = number - head * across * down, token = within / across * TOKENS, column = within % across * ROWS;
        int tokens = (int)(rows - token < TOKENS ? rows - token : TOKENS);
        int left = (int)(columns - column < ROWS ? columns - column : ROWS);
        return {a + token * a_stride + head * a_head, b + (head * columns + column) * b_stride, token, column, tokens, left, tokens, (int)head};
    }
    VT_MEMBER float join_one(float total, float dot, const Tile& tile, int token, int column, i64 start) const {
        int block = (int)(start >> 7);
        const unsigned* scales = (const unsigned*)scale_a + (tile.expert * scale_head + tile.token * scale_row + (packed ? block >> 2 : block) * scale_block);
        unsigned word = scales[token * (int)scale_row];
        unsigned exponent = word >> 8 * (block & 3) & 0xffu;
        float row = !packed ? vt_float((int)word) : exponent == 0 ? vt_float(0x00400000)
                  : exponent == 255 ? VT_NAN : vt_float((int)(exponent << 23));
        int line = (int)((columns + 127) >> 7) * tile.expert + (int)(tile.column >> 7);  // a tile lies in one block of columns
        return vt_fma(row * vt_load(scale_b + line * (depth >> 7) + block), dot, total);
    }
    VT_MEMBER void write(const Tile& tile, const float* sums, int pitch, int across, int thread, int threads) const {
        for (int e = thread; e < tile.rows * across; e += threads) {
            int row = e / across, column = e % across;
            if (column >= tile.columns) continue;
            float one[1] = {sums[row * pitch + column]};
            store(out, ((tile.token + row) * heads + tile.expert) * columns + tile.column + column, one, BF16);
        }
    }
};

extern "C" __global__ void __launch_bounds__(256, 1)
    fp8_heads(i64 grid, const u8* a, i64 a_stride, i64 a_head, const u8* b, i64 rows, i64 columns, i64 depth, i64 heads,
              i64 words, const void* scale_a, i64 scale_row, i64 scale_head, i64 scale_block, i64 packed,
              const float* scale_b, unsigned short* out) {
    Heads job = {grid, a, b, a_stride, a_head, depth, rows, columns, depth, heads, words != 0, scale_a, scale_row, scale_head,
                 scale_block, packed != 0, scale_b, out};
    multiply_exactly<float, float>(job);
}

// out[e] (rows x columns) = c[e] + a_e^T b_e, row k of a and of b side by side in memory. A block has 64 x 64 elements of
// one group, a thread 4 x 4; a block of 128 k is eight chains of sixteen.
extern "C" __global__ void __launch_bounds__(256, 1)
    fp8_stretches(i64 rows, i64 columns, i64 depth, const u8* a, const float* scale_a, const u8* b, const float* scale_b,
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
