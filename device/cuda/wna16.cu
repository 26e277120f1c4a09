// Codes a word and codes packed along K or N, both ways: moves.cuh, codes.cuh. The reference quantiser of weights.
//
// The ladder of the quantiser: a block has a group's rows of 64 columns, as vectors of 8 where addresses allow it, else of
// 32 columns one by one. It reads them twice, the second time from the first-level cache: what is written, codes of four
// bytes and the values that they stand for, is most of the bytes.
#include "moves.cuh"

MOVE_CODES(wna16_codes)
MOVE_OF_WORDS(plain_to_down, into_words, PLAIN, DOWN)
QUICK_MOVE(down_to_plain_4, out_of_words<4>((unsigned)units, (unsigned)n, words, out))
QUICK_MOVE(down_to_plain_8, out_of_words<8>((unsigned)units, (unsigned)n, words, out))
MOVE_OF_ROWS(plain_to_rows, into_rows)
MOVE_OF_ROWS(rows_to_plain, out_of_rows)

#define THREADS 256

// A type of codes: values from `low` to `high`; high is what scales are made of, biased types have no zero points.
struct Quantiser {
    int low, high, kind;
    bool biased, split;

    VT_MEMBER float point(float x) const { return through(x, kind); }
    VT_MEMBER void scale_of(float highest, float lowest, float& scale, int& zero) const {
        zero = 0;
        if (biased) {
            scale = fmaxf(vt_abs(point(highest / (float)high)), vt_abs(point(lowest / (float)low)));
            return;
        }
        scale = point(fmaxf(point(highest - lowest), point(1e-5f)) / (float)high);
        zero = (int)fminf(rintf(vt_abs(point(lowest / scale))), (float)high);
    }
    VT_MEMBER int code(float x, float scale, int zero) const {
        float steps = scale == 0.0f ? -1024.0f : fmaxf(fminf(rintf(point(x / scale)), 1024.0f), -1024.0f);
        int q = (int)steps + zero;
        return q < low ? low : q > high ? high : q;
    }
    VT_MEMBER float value(int q, float scale, int zero) const {
        if (split) return point((float)q * scale) - point((float)zero * scale);
        return (float)(q - zero) * scale;
    }
};

template <int V>
VT_FN void quantise(i64 rows, i64 columns, const void* w, const Quantiser& codes, int bias, void* w_ref, int* q,
                    void* scales, int* zeros) {
    constexpr int ACROSS = V == 8 ? 8 : 32, DOWN = THREADS / ACROSS;  // threads each way
    __shared__ float tops[THREADS * V], bottoms[THREADS * V];
    i64 wide = (columns + ACROSS * V - 1) / (ACROSS * V), group = blockIdx.x / wide;
    int x = threadIdx.x % ACROSS, y = threadIdx.x / ACROSS;
    i64 column = ((blockIdx.x - group * wide) * ACROSS + x) * V, first = group * rows * columns + column;
    bool inside = column < columns;
    float v[V], top[V], bottom[V];
#pragma unroll
    for (int j = 0; j < V; ++j) top[j] = -VT_INF, bottom[j] = VT_INF;
    for (i64 row = y; inside && row < rows; row += DOWN) {
        load(v, w, first + row * columns, codes.kind);
#pragma unroll
        for (int j = 0; j < V; ++j) top[j] = fmaxf(top[j], v[j]), bottom[j] = fminf(bottom[j], v[j]);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
        tops[j * THREADS + threadIdx.x] = top[j];
        bottoms[j * THREADS + threadIdx.x] = bottom[j];
    }
    for (int half = DOWN / 2; half; half /= 2) {
        __syncthreads();
        if (y < half)
#pragma unroll
            for (int j = 0; j < V; ++j) {
                int mine = j * THREADS + threadIdx.x, other = mine + half * ACROSS;
                tops[mine] = fmaxf(tops[mine], tops[other]), bottoms[mine] = fminf(bottoms[mine], bottoms[other]);
            }
    }
    __syncthreads();
    if (!inside) return;
    float scale[V];
    int zero[V];
#pragma unroll
    for (int j = 0; j < V; ++j) codes.scale_of(tops[j * THREADS + x], bottoms[j * THREADS + x], scale[j], zero[j]);
    if (y == 0) {
        store(scales, group * columns + column, scale, codes.kind);
        if (zeros != nullptr)
#pragma unroll
            for (int j = 0; j < V; ++j) zeros[group * columns + column + j] = zero[j];
    }
    for (i64 row = y; row < rows; row += DOWN) {
        i64 at = first + row * columns;
        int made[V];
        load(v, w, at, codes.kind);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            int code = codes.code(v[j], scale[j], zero[j]);
            made[j] = code + bias;
            v[j] = codes.value(code, scale[j], zero[j]);
        }
        store(w_ref, at, v, codes.kind);
        if constexpr (V == 8) {
            ((uint4*)(q + at))[0] = {(unsigned)made[0], (unsigned)made[1], (unsigned)made[2], (unsigned)made[3]};
            ((uint4*)(q + at))[1] = {(unsigned)made[4], (unsigned)made[5], (unsigned)made[6], (unsigned)made[7]};
        } else {
            q[at] = made[0];
        }
    }
}

// `rows` of a group of w [K, columns]; high: of unbiased values.
#define QUANTISE(V)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS) quantize_weights_v##V(                                       \
        i64 rows, i64 columns, const void* w, i64 kind, i64 low, i64 high, i64 bias, i64 split, void* w_ref, int* q,   \
        void* scales, int* zeros) {                                                                                    \
        const Quantiser codes{(int)low, (int)high, (int)kind, bias != 0, split != 0};                                      \
        quantise<V>(rows, columns, w, codes, (int)bias, w_ref, q, scales, zeros);                                      \
    }
QUANTISE(8)
QUANTISE(1)
