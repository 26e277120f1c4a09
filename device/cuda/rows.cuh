// A grid over rows x groups of V elements: a block takes a rectangle of them (device/launch.py: map_rows).
#pragma once
#include "storage.cuh"

// Where this thread works: `row`, the first `column` of its group, and whether there is such a place.
struct Place {
    i64 row, column;
    bool inside;
};

// The thread's `number`-th group of `depth`; neighbouring threads have neighbouring groups. `chunks` blocks lie across
// a row; its upper half is (2^32 - 1) / chunks, for the quotient: a division would take longer than small work.
template <int V> VT_FN Place place(i64 rows, i64 width, i64 chunks, int depth = 1, int number = 0) {
    unsigned down = blockIdx.x, chunk = 0, across = (unsigned)chunks;
    if (across > 1) {
        down = (unsigned)((unsigned long long)blockIdx.x * (unsigned)(chunks >> 32) >> 32);  // right, or one too few
        if (blockIdx.x - down * across >= across) ++down;
        chunk = blockIdx.x - down * across;
    }
    i64 row = (i64)down * blockDim.y + threadIdx.y;
    i64 column = (((i64)chunk * depth + number) * blockDim.x + threadIdx.x) * V;
    return {row, column, row < rows && column < width};
}
