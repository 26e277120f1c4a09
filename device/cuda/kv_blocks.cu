// Moving whole blocks of a paged cache, byte ranges of buffers, and gathering tokens by block table.
//
// The ladder:
// 1. In order: a thread takes the same units of every block and goes through the list. That is what the list says
//    whatever it says, since no thread reads what another one writes; but the copies follow each other.
// 2. move_blocks_1 ... _16: pairs side by side, unless a small kernel found two that touch the same block; only then
//    one row of blocks of threads walks the list in order. 16 bytes a thread, four of them under way.
// 3. move_ranges: the same for ranges of any size and place, 16 bytes at a time where both ends allow it.
// 4. gather_pages_1 ... _16: gather.cuh.
// 5. *_early: started while the kernel before ends (early.cuh): half a microsecond less a kernel.
#include "gather.cuh"

#define MOST_COPIES 1024  // in one launch, device/kv_blocks.py
#define UNITS_EACH 4

template <class U>
VT_FN void move_blocks(i64 pairs, i64 chunks, i64 workers, const i64* ids, const Entries& entries, i64 head_stride,
                       const void* src, i64 src_block, i64 src_blocks, void* dst, i64 dst_block, i64 dst_blocks,
                       const i64* in_order) {
    unsigned worker = blockIdx.x / (unsigned)chunks, chunk = blockIdx.x - worker * (unsigned)chunks;
    others_may_start();
    after_others();
    i64 from = ids[2 * worker], to = ids[2 * worker + 1];  // sent for together with the verdict
    const bool ordered = in_order != nullptr && *in_order != 0;
    if (ordered && worker != 0) return;
    i64 within[UNITS_EACH];
    bool there[UNITS_EACH];
#pragma unroll
    for (int d = 0; d < UNITS_EACH; ++d) {
        int lane = (int)(chunk * UNITS_EACH + d) * (int)blockDim.x + (int)threadIdx.x;
        there[d] = lane < entries.lanes;
        within[d] = there[d] ? entries.at(lane, head_stride) : 0;
    }
    for (i64 pair = worker; pair < pairs; pair += ordered ? 1 : workers) {
        if (pair != worker) from = ids[2 * pair], to = ids[2 * pair + 1];
        if (from < 0 || from >= src_blocks || to < 0 || to >= dst_blocks) continue;
        U held[UNITS_EACH];
#pragma unroll
        for (int d = 0; d < UNITS_EACH; ++d)
            if (there[d]) held[d] = ((const U*)src)[from * src_block + within[d]];
#pragma unroll
        for (int d = 0; d < UNITS_EACH; ++d)
            if (there[d]) ((U*)dst)[to * dst_block + within[d]] = held[d];
    }
}

#define MOVE_BLOCKS(BYTES, U)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) move_blocks_##BYTES##_early(                                        \
        i64 pairs, i64 chunks, i64 workers, const i64* ids, i64 lanes, i64 head_lanes, i64 head_stride,           \
        const void* src, i64 src_block, i64 src_blocks, void* dst, i64 dst_block, i64 dst_blocks,                 \
        const i64* in_order) {                                                                                    \
        move_blocks<U>(pairs, chunks, workers, ids, Entries{lanes, head_lanes}, head_stride, src, src_block,      \
                       src_blocks, dst, dst_block, dst_blocks, in_order);                                         \
    }
FOR_UNITS(MOVE_BLOCKS)

#define PLACES (2 * MOST_COPIES)
#define FREE (~0ull)

VT_FN int hashed(i64 value) { return (int)((u64)value * 0x9e3779b97f4a7c15ull >> 53); }

// Lowers *found to this thread's number where its target is another thread's or, with `same`, its source is another's
// target. The targets go into a hash table of PLACES in shared memory; all threads of the block call this.
VT_FN void find_meetings(bool there, i64 source, i64 target, bool same, u64* table, i64* found) {
    for (int i = threadIdx.x; i < PLACES; i += blockDim.x) table[i] = FREE;
    __syncthreads();
    bool meets = false;
    if (there) {
        u64 old;
        for (int at = hashed(target); (old = atomicCAS(table + at, FREE, (u64)target)) != FREE; at = (at + 1) % PLACES) {
            meets = old == (u64)target;
            if (meets) break;
        }
    }
    __syncthreads();
    if (there && same && source != target)
        for (int at = hashed(source); table[at] != FREE; at = (at + 1) % PLACES) meets |= table[at] == (u64)source;
    if (meets) atomicMin(found, (i64)threadIdx.x);
}

// *in_order = whether some block is written twice or, where source and target are the same memory, written and read.
extern "C" __global__ void __launch_bounds__(MOST_COPIES) pairs_need_order_early(i64 pairs, const i64* ids, i64 same,
                                                                           i64* in_order) {
    __shared__ u64 table[PLACES];
    __shared__ i64 found;
    int pair = threadIdx.x;
    others_may_start();
    after_others();
    if (pair == 0) found = pairs;
    i64 source = pair < pairs ? ids[2 * pair] : -1, target = pair < pairs ? ids[2 * pair + 1] : -1;
    find_meetings(source >= 0 && target >= 0, source, target, same, table, &found);
    __syncthreads();
    if (pair == 0) *in_order = found < pairs;
}

// The lowest number whose block lies outside; sources and targets take turns.
extern "C" __global__ void __launch_bounds__(256) block_ids_fit(i64 numbers, const i64* ids, i64 src_blocks,
                                                                i64 dst_blocks, i64* lowest) {
    i64 number = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= numbers) return;
    i64 id = ids[number];
    if (id < 0 || id >= (number & 1 ? dst_blocks : src_blocks)) atomicMin(lowest, number);
}

// Ranges of bytes: range i is `sizes[i]` bytes from `from[i]` of the source to `to[i]` of the target.
struct Range {
    i64 source, target, size;
    int fault;
};
struct Ranges {
    i64 count;
    const i64 *from, *to, *sizes;
    i64 src_room, dst_room;

    enum { SIZE, SOURCE, TARGET, FINE };

    // All three numbers are sent for before one is looked at.
    VT_MEMBER Range at(i64 i) const {
        const i64 source = from[i], target = to[i], size = sizes[i];
        const bool from_outside = (source < 0) | (size > src_room) | (source > src_room - size);
        const bool to_outside = (target < 0) | (size > dst_room) | (target > dst_room - size);
        return {source, target, size, size < 0 ? SIZE : from_outside ? SOURCE : to_outside ? TARGET : FINE};
    }
};

// `size` bytes by `threads` threads, of which this is number `first`; U where source and target agree modulo it. WHOLE:
// they begin and end with whole ones.
template <class U, bool WHOLE = false> VT_FN void move_as(const char* src, char* dst, i64 size, i64 first, i64 threads) {
    i64 head = WHOLE ? 0 : (i64)(-(u64)dst & (sizeof(U) - 1));
    head = head < size ? head : size;
    i64 body = (size - head) / (i64)sizeof(U), tail = head + body * (i64)sizeof(U);
    for (i64 begin = first; begin < body; begin += UNITS_EACH * threads) {
        U held[UNITS_EACH];
#pragma unroll
        for (int d = 0; d < UNITS_EACH; ++d)
            if (begin + d * threads < body) held[d] = ((const U*)(src + head))[begin + d * threads];
#pragma unroll
        for (int d = 0; d < UNITS_EACH; ++d)
            if (begin + d * threads < body) ((U*)(dst + head))[begin + d * threads] = held[d];
    }
    if (WHOLE) return;
    if (first < head) dst[first] = src[first];
    if (first < size - tail) dst[tail + first] = src[tail + first];
}

// The same by one block of threads where the two may overlap: all of a stretch is read before any of it is written.
template <class U> VT_FN void move_overlapping(const char* src, char* dst, i64 size) {
    i64 units = size / (i64)sizeof(U), stretch = (i64)UNITS_EACH * blockDim.x;
    i64 stretches = (units + stretch - 1) / stretch;
    bool upwards = (u64)dst <= (u64)src;
    for (i64 number = 0; number < stretches; ++number) {
        i64 begin = (upwards ? number : stretches - 1 - number) * stretch + threadIdx.x;
        U held[UNITS_EACH];
#pragma unroll
        for (int d = 0; d < UNITS_EACH; ++d)
            if (begin + d * blockDim.x < units) held[d] = ((const U*)src)[begin + d * blockDim.x];
        __syncthreads();
#pragma unroll
        for (int d = 0; d < UNITS_EACH; ++d)
            if (begin + d * blockDim.x < units) ((U*)dst)[begin + d * blockDim.x] = held[d];
        __syncthreads();
    }
}

#define RANGES                                                                                                    \
    i64 count, const i64 *from, const i64 *to, const i64 *sizes, i64 src_room, i64 dst_room
#define THE_RANGES Ranges{count, from, to, sizes, src_room, dst_room}

extern "C" __global__ void __launch_bounds__(256) move_ranges_early(RANGES, i64 workers, const char* src, char* dst,
                                                              const i64* in_order) {
    const Ranges ranges = THE_RANGES;
    others_may_start();
    after_others();
    const i64 i = count > 1 ? blockIdx.x / (unsigned)workers : 0, worker = blockIdx.x - i * workers;
    const Range own = ranges.at(i);
    if (in_order != nullptr && *in_order != 0) {
        if (blockIdx.x != 0) return;
        for (i64 each = 0; each < count; ++each) {
            const Range range = ranges.at(each);
            if (range.fault != Ranges::FINE) continue;
            const u64 places = (u64)(src + range.source) | (u64)(dst + range.target) | (u64)range.size;
            if (places % 16 == 0) move_overlapping<uint4>(src + range.source, dst + range.target, range.size);
            else move_overlapping<char>(src + range.source, dst + range.target, range.size);
        }
        return;
    }
    if (own.fault != Ranges::FINE) return;
    const i64 first = worker * blockDim.x + threadIdx.x, threads = workers * blockDim.x;
    const char* source = src + own.source;
    char* target = dst + own.target;
    const u64 apart = (u64)source ^ (u64)target;
    if (((u64)source | (u64)target | (u64)own.size) % 16 == 0) move_as<uint4, true>(source, target, own.size, first, threads);
    else if (apart % 16 == 0) move_as<uint4>(source, target, own.size, first, threads);
    else if (apart % 4 == 0) move_as<unsigned>(source, target, own.size, first, threads);
    else move_as<char>(source, target, own.size, first, threads);
}

VT_FN bool meet(i64 a, i64 b, i64 size_a, i64 size_b) { return size_a && size_b && a < b + size_b && b < a + size_a; }

// *in_order = whether a byte is written twice or, where source and target are the same memory, written and read.
// Ranges of one size at multiples of it are blocks; others are compared each with each.
extern "C" __global__ void __launch_bounds__(MOST_COPIES) ranges_need_order_early(RANGES, i64 same, i64* in_order) {
    __shared__ u64 table[PLACES];
    __shared__ i64 found, odd;
    const Ranges ranges = THE_RANGES;
    int i = threadIdx.x;
    others_may_start();
    after_others();
    if (i == 0) found = odd = count;
    Range own = {0, 0, 0, Ranges::FINE};
    if (i < count) own = ranges.at(i);
    const bool fine = own.fault == Ranges::FINE;
    const i64 source = fine ? own.source : 0, target = fine ? own.target : 0, size = fine ? own.size : 0;
    __syncthreads();
    if (size && (size != sizes[0] || source % size || target % size)) atomicMin(&odd, (i64)i);
    __syncthreads();
    if (odd == count) {
        find_meetings(size > 0, source, target, same, table, &found);
    } else {
        i64 *targets = (i64*)table, *lengths = (i64*)table + MOST_COPIES;
        if (i < count) {
            targets[i] = target;
            lengths[i] = size;
        }
        __syncthreads();
        bool touch = false;
        for (int j = 0; size && j < count; ++j) {
            touch |= j != i && meet(target, targets[j], size, lengths[j]);
            touch |= same && (j != i || source != target) && meet(source, targets[j], size, lengths[j]);
        }
        if (touch) atomicMin(&found, (i64)i);
    }
    __syncthreads();
    if (i == 0) *in_order = found < count;
}

// The lowest (kind of fault, range) as kind << 56 | number.
extern "C" __global__ void __launch_bounds__(256) ranges_fit(RANGES, i64* lowest) {
    const Ranges ranges = THE_RANGES;
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const int fault = ranges.at(i).fault;
    if (fault != Ranges::FINE) atomicMin(lowest, (i64)fault << 56 | i);
}

#define GATHER_PAGES(BYTES, U) GATHER_KERNEL(gather_pages_##BYTES##_early, U)
FOR_UNITS(GATHER_PAGES)
CHECK_KERNEL(check_gather_pages)
