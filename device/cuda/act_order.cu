// Activation order: rows sorted by their group, the activations' columns with them, exllama's words.
#include "moves.cuh"

MOVE_CODES(act_order_codes)
MOVE_OF_WORDS(down_to_shuffled, into_words, DOWN, SHUFFLED)
MOVE_OF_WORDS(shuffled_to_down, into_words, SHUFFLED, DOWN)

// out[m, j] = x[m, perm[j]], or x[m, j] without a perm, elements of 2 or 4 bytes; an index out of range reads column 0.
extern "C" __global__ void __launch_bounds__(256)
    columns(i64 count, i64 width, const void* x, const int* perm, void* out, i64 item) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    i64 j = at % width, from = at - j;
    if (perm != nullptr) j = (unsigned long long)perm[j] < (unsigned long long)width ? perm[j] : 0;
    from += j;
    if (item == 2) ((unsigned short*)out)[at] = ((const unsigned short*)x)[from];
    else ((unsigned*)out)[at] = ((const unsigned*)x)[from];
}

// The same for whole rows of pieces of 16 bytes: a block has a row in shared memory at a time; `blocks`: of the grid.
template <class T>
VT_FN void columns_of_rows(i64 rows, i64 width, i64 blocks, const uint4* x, const uint4* perm, uint4* out, unsigned char* memory) {
    constexpr int EACH = 16 / sizeof(T), WORDS = EACH / 4;
    const T* row = (const T*)memory;
    const int pieces = (int)(width / EACH);
    for (i64 r = blockIdx.x; r < rows; r += blocks) {
        for (int n = (int)threadIdx.x; n < pieces; n += 256) copy_async(memory + 16 * n, x + r * pieces + n);
        copies_arrive();
        __syncthreads();
        for (int n = (int)threadIdx.x; n < pieces; n += 256) {
            unsigned made[4] = {};
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                const uint4 four = perm[n * WORDS + w];
                const unsigned from[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const unsigned found = row[from[j] < (unsigned)width ? from[j] : 0], at = 4 * w + j;
                    made[at * sizeof(T) / 4] |= found << at * sizeof(T) % 4 * 8;
                }
            }
            out[r * pieces + n] = {made[0], made[1], made[2], made[3]};
        }
        __syncthreads();
    }
}

#define COLUMNS_OF_ROWS(NAME, T)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        NAME(i64 rows, i64 width, i64 blocks, const uint4* x, const uint4* perm, uint4* out) {                         \
        VT_SHARED(memory);                                                                                             \
        columns_of_rows<T>(rows, width, blocks, x, perm, out, memory);                                                 \
    }
COLUMNS_OF_ROWS(columns_of_rows_2, unsigned short)
COLUMNS_OF_ROWS(columns_of_rows_4, unsigned)

// out[perm[i]] = i; an index out of range is passed over.
extern "C" __global__ void __launch_bounds__(256) inverse_order(i64 count, const int* perm, int* out) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at < count && (unsigned long long)perm[at] < (unsigned long long)count) out[perm[at]] = (int)at;
}

// Row k's place is the number of rows of lower groups and of earlier rows of its own, which a block counts together.
extern "C" __global__ void __launch_bounds__(256) sort_rows(i64 count, const int* groups, int* sorted, int* perm) {
    __shared__ int before[256];
    i64 row = blockIdx.x;
    int own = groups[row], found = 0;
    for (i64 other = threadIdx.x; other < count; other += 256)
        found += groups[other] < own || (groups[other] == own && other < row);
    before[threadIdx.x] = found;
    for (int half = 128; half; half >>= 1) {
        __syncthreads();
        if ((int)threadIdx.x < half) before[threadIdx.x] += before[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sorted[before[0]] = own, perm[before[0]] = (int)row;
}
