// Reading tokens out of a paged cache by block table into consecutive rows.
//
// A block of threads takes up to MOST_ROWS rows: a thread each finds where its token lies, then all threads move the
// rows' units, DEPTH loads under way at a time. So the chain of reads that leads to a token is paid once a row.
#pragma once
#include "found.cuh"
#include "units.cuh"

#define MOST_ROWS 32  // device/gather.py
#define DEPTH 4

// What is wrong with a request or a token; the lowest comes first, as the oracle checks them (device/gather.py).
enum { BOUNDS, OWNER, EARLY, START, PAGE, BLOCK, NOTHING };

// The pages of all requests. Request b has tokens bounds[b] ... bounds[b + 1] - 1; the first is at starts[b] of it.
struct Requests {
    const int* table;
    i64 table_stride, table_width;
    const int *bounds, *starts, *owners;
    i64 count, blocks, page_size;

    // The request of a token: owners[token], or by bisection of the bounds; -1 past the last.
    VT_MEMBER i64 of(i64 token) const {
        if (owners != nullptr) return owners[token];
        if (token >= bounds[count]) return -1;
        i64 low = 0, high = count;  // bounds[low] <= token < bounds[high]
        while (high - low > 1) {
            i64 middle = (low + high) >> 1;
            if (bounds[middle] <= token) low = middle;
            else high = middle;
        }
        return low;
    }

    // Finds the block and the row in it of a token; NOTHING with block = -1 for one that is left out.
    VT_MEMBER int find(i64 token, i64& block, i64& row) const {
        block = -1;
        i64 request = of(token);
        if (owners == nullptr && request < 0) return NOTHING;
        if (request < 0 || request >= count) return OWNER;
        if (token >= bounds[request + 1]) return NOTHING;
        i64 position = token - bounds[request];
        if (position < 0) return EARLY;
        if (page_size == 0) return PAGE;
        if (starts != nullptr) {
            i64 begin = starts[request];
            if (begin < 0 || begin % page_size) return START;
            position += begin;
        }
        i64 page = quotient(position, page_size);
        if (page >= table_width) return PAGE;
        i64 found = table[request * table_stride + page];
        if (found < 0 || found >= blocks) return BLOCK;
        block = found;
        row = position - page * page_size;
        return NOTHING;
    }
};

// Units of one token: `lanes` in heads of `head_lanes`.
struct Entries {
    i64 lanes, head_lanes;

    VT_MEMBER i64 at(int lane, i64 head_stride) const {
        if (head_lanes == lanes) return lane;
        int head = (int)((unsigned)lane / (unsigned)head_lanes);
        return head * head_stride + (lane - head * head_lanes);
    }
};

template <class U>
VT_FN void gather(i64 rows, i64 rows_each, const Entries& entries, const Pages& src, void* dst, i64 dst_row,
                  i64 dst_head, const Requests& requests) {
    __shared__ i64 from[MOST_ROWS];
    i64 first = (i64)blockIdx.x * rows_each;
    int here = (int)(rows - first < rows_each ? rows - first : rows_each);
    others_may_start();
    after_others();
    if ((int)threadIdx.x < here) {
        i64 block, row;
        int fault = requests.find(first + threadIdx.x, block, row);
        from[threadIdx.x] = fault != NOTHING || block < 0 ? -1 : block * src.block + row * src.row;
    }
    __syncthreads();
    int lanes = (int)entries.lanes, total = here * lanes, step = (int)blockDim.x;
    for (int begin = threadIdx.x; begin < total; begin += DEPTH * step) {
        U held[DEPTH];
        i64 to[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            int at = begin + d * step, row = (int)((unsigned)at / (unsigned)lanes), lane = at - row * lanes;
            to[d] = -1;
            if (at >= total || from[row] < 0) continue;
            held[d] = ((const U*)src.data)[from[row] + entries.at(lane, src.head)];
            to[d] = (first + row) * dst_row + entries.at(lane, dst_head);
        }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (to[d] >= 0) ((U*)dst)[to[d]] = held[d];
    }
}

// Notes the lowest (kind of fault, request or token) as kind << 56 | number; bounds may end at `rows` at most.
VT_FN void check_requests(i64 numbers, i64 rows, const Requests& requests, i64* lowest) {
    i64 number = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= numbers) return;
    int fault = NOTHING;
    if (number <= requests.count) {
        i64 bound = requests.bounds[number];
        bool ascends = number == 0 ? bound == 0 : bound >= requests.bounds[number - 1];
        if (!ascends || (requests.owners == nullptr && bound > rows)) fault = BOUNDS;
        if (fault == NOTHING && number < requests.count && requests.starts != nullptr) {
            i64 begin = requests.starts[number];
            if (begin < 0 || (requests.page_size && begin % requests.page_size)) fault = START;
        }
    }
    if (number < rows && fault == NOTHING) {
        i64 block, row;
        fault = requests.find(number, block, row);
    }
    if (fault != NOTHING) atomicMin(lowest, (i64)fault << 56 | number);
}

#define REQUESTS                                                                                                  \
    const int *table, i64 table_stride, i64 table_width, const int *bounds, const int *starts, const int *owners, \
        i64 count, i64 blocks, i64 page_size
#define THE_REQUESTS Requests{table, table_stride, table_width, bounds, starts, owners, count, blocks, page_size}

#define GATHER_KERNEL(NAME, U)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                       \
        i64 rows, i64 rows_each, i64 lanes, i64 head_lanes, void* src, i64 src_block, i64 src_row, i64 src_head,  \
        void* dst, i64 dst_row, i64 dst_head, REQUESTS) {                                                         \
        gather<U>(rows, rows_each, Entries{lanes, head_lanes}, Pages{src, src_block, src_row, src_head}, dst,     \
                  dst_row, dst_head, THE_REQUESTS);                                                               \
    }
#define CHECK_KERNEL(NAME)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256) NAME(i64 numbers, i64 rows, REQUESTS, i64* lowest) {        \
        check_requests(numbers, rows, THE_REQUESTS, lowest);                                                      \
    }
