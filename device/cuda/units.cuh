// Moving bytes, whatever they mean: in units of 1 to 16 bytes, as large as every address, stride and size allows
// (device/units.py). Strides and offsets count units.
#pragma once
#include "storage.cuh"

typedef unsigned long long u64;

#define FOR_UNITS_FROM_2(KERNEL) KERNEL(2, unsigned short) KERNEL(4, unsigned) KERNEL(8, u64) KERNEL(16, uint4)
#define FOR_UNITS(KERNEL) KERNEL(1, unsigned char) FOR_UNITS_FROM_2(KERNEL)

// What was loaded before stays before: loads do not wait for the decision whether to store them.
#ifdef __CUDACC__
VT_FN void loads_are_under_way() { asm volatile("" ::: "memory"); }
#else
VT_FN void loads_are_under_way() {}
#endif

// a / b for a >= 0, b > 0. Most are small, and 32 bits divide several times faster than 64.
VT_FN i64 quotient(i64 a, i64 b) {
    if (((a | b) >> 32) == 0) return (i64)((unsigned)a / (unsigned)b);
    return a / b;
}

// Where this thread works in a grid of blocks of (lanes across, rows down), `chunks` of them to the lanes of a row.
struct Spot {
    i64 row;
    int lane;
};

VT_FN Spot spot(i64 chunks) {
    unsigned down = blockIdx.x, chunk = 0;
    if (chunks > 1) {
        down = blockIdx.x / (unsigned)chunks;
        chunk = blockIdx.x - down * (unsigned)chunks;
    }
    return {(i64)down * blockDim.y + threadIdx.y, (int)(chunk * blockDim.x + threadIdx.x)};
}

// A paged cache: block b, row o of its page, head h and unit d of it lie at b * block + o * row + h * head + d.
struct Pages {
    void* data;
    i64 block, row, head;

    VT_MEMBER i64 at(i64 slot, i64 size) const {
        i64 b = quotient(slot, size);
        return b * block + (slot - b * size) * row;
    }
};

// The lowest token whose slot lies beyond the cache, negative ones aside.
VT_FN void slots_fit(i64 tokens, const i64* slots, i64 room, i64* first_bad) {
    i64 token = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (token < tokens && slots[token] >= room) atomicMin(first_bad, token);
}
