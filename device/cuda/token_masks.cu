// Single tokens moved or forbidden: bias, masks, allowed ids, bad words, minimum length.
//
// The ladder:
// 1. Allowed ids: 16-byte loads, eight logits a thread.
// 2. Lists of places: a copy, then a launch with a thread for each listed place. Lists that live on the host (bad words,
//    stop ids) travel as kernel arguments, 32 places a launch: no copy, no wait, and a graph keeps them.
#include "rows.cuh"

#define ROWS i64 rows, i64 width, i64 chunks

template <int V> VT_FN void copy_logits(ROWS, const float* logits, float* out) {
    const Place at = place<V>(rows, width, chunks);
    if (at.inside) put(out, at.row * width + at.column, fetch<V>(logits, at.row * width + at.column, F32), F32);
}

template <int V> VT_FN void allowed(ROWS, const float* logits, const signed char* mask, float* out) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    const i64 first = at.row * width + at.column;
    Raw<V> raw = fetch<V>(logits, first, F32);
    float x[V];
    if constexpr (V == 8) {
        uint2 w = *(const uint2*)(mask + first);
        widen(x, raw, F32);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if ((j < 4 ? w.x : w.y) >> (8 * (j & 3)) & 0xffu) x[j] = -VT_INF;
    } else {
        widen(x, raw, F32);
        if (mask[first]) x[0] = -VT_INF;
    }
    store(out, first, x, F32);
}

VT_FN bool inside(i64 row, i64 column, i64 rows, i64 width) {
    return row >= 0 && row < rows && column >= 0 && column < width;
}

// Pairs outside the logits are left out.
extern "C" __global__ void __launch_bounds__(256) mask_pairs(i64 pairs, i64 rows, i64 width, const int* at_row,
                                                             const int* at_column, float* out) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < pairs && inside(at_row[i], at_column[i], rows, width)) out[at_row[i] * width + at_column[i]] = -VT_INF;
}

// The first of equal pairs adds the bias of all of them, in list order; the others do nothing.
extern "C" __global__ void __launch_bounds__(256) add_bias(i64 pairs, i64 rows, i64 width, const int* at_row,
                                                           const int* at_column, const float* bias, float* out) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    const int row = at_row[i], column = at_column[i];
    if (!inside(row, column, rows, width)) return;
    for (i64 j = 0; j < i; ++j)
        if (at_column[j] == column && at_row[j] == row) return;
    float x = out[row * width + column];
    for (i64 j = i; j < pairs; ++j)
        if (at_column[j] == column && at_row[j] == row) x += bias[j];
    out[row * width + column] = x;
}

#define FOUR(X, N) X(N##0) X(N##1) X(N##2) X(N##3)
#define PLACES(X) FOUR(X, 0) FOUR(X, 1) FOUR(X, 2) FOUR(X, 3) FOUR(X, 4) FOUR(X, 5) FOUR(X, 6) FOUR(X, 7)
#define PARAMETER(N) , i64 p##N
#define TAKE(N) place = (int)threadIdx.x == number++ ? p##N : place;

// out[place] = -inf for the first `count` places, numbers row * width + column; where `generated` is there, in rows
// that have generated less than their minimum only.
extern "C" __global__ void __launch_bounds__(32) mask_places(i64 count, i64 width, const int* generated,
                                                             const int* minimum, float* out PLACES(PARAMETER)) {
    i64 place = 0;
    int number = 0;
    PLACES(TAKE)
    if ((int)threadIdx.x >= count) return;
    i64 row = place / width;
    if (generated == nullptr || generated[row] < minimum[row]) out[place] = -VT_INF;
}

// The lowest pair with an index outside [0, size).
extern "C" __global__ void pair_fault(i64 pairs, const int* index, i64 size, i64* first_bad) {
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < pairs && (index[i] < 0 || index[i] >= size)) atomicMin(first_bad, i);
}

#define TOKEN_MASKS(V)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) copy_logits_v##V(ROWS, const float* logits, float* out) {   \
        copy_logits<V>(rows, width, chunks, logits, out);                                                         \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) allowed_v##V(                                               \
        ROWS, const float* logits, const signed char* mask, float* out) {                                         \
        allowed<V>(rows, width, chunks, logits, mask, out);                                                       \
    }
TOKEN_MASKS(8)
TOKEN_MASKS(1)
