// Stages of 256 k of rows of the weight and of activations on their way into shared memory, for products with several rows
// (ggml_rows.cuh): as they lie, whatever their alignment, while earlier ones are at work.
#pragma once
#include "ggml_fragments.cuh"
#include "ggml_ring.cuh"

// What stands together of eight rows of activations and 256 k: codes, sums that minimums meet, scales.
template <int TYPE> struct Record {
    using B = Block<TYPE>;
    static constexpr int CODES = 2048, SUMS = B::MINIMUM ? 256 : 0, SCALES = B::LARGE ? 32 : 256;
    static constexpr int BYTES = CODES + SUMS + SCALES;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr bool SPARING = true;  // other architectures' code has more in registers
#else
constexpr bool SPARING = false;
#endif

struct Product {
    i64 rows, columns, units, stride, out_stride;
    const u8 *b, *records;
    void* out;
    int kind, shares, slots, bulk;  // bulk: the copy engine can bring whole stages of rows
};

template <int TYPE, int TILES> struct Staged {
    using B = Block<TYPE>;
    using R = Record<TYPE>;
    // Blocks of 32 and few rows: two warps take turns, so that there are warps enough; a stage has 256 k for each.
    static constexpr bool TURNS = !B::LARGE && TILES == 2;
    static constexpr int DEEP = TILES == 2 ? 2 : 1, CHAINS = TURNS ? 8 * 32 * 16 * TILES : 0, BARRIERS = 64;
    static constexpr int CHUNK = B::BYTES * (B::LARGE ? 1 : 8) * DEEP;  // bytes of a row of a stage
    static constexpr int PIECES = (CHUNK + 14) / 16 + 1;                // of 16 bytes, wherever it begins
    static constexpr int PITCH = 16 * (PIECES | 1);                     // rows meet in no bank
    static constexpr int ABREAST = PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : PIECES <= 32 ? 32 : 64;  // threads that send a row's
    // Warps that have sixteen rows together.
    static constexpr int TEAM = TURNS ? 2 : 1;
    static constexpr int CHECKED = TILES < 4 || SPARING ? 1 : 2;  // eights of rows that are there or not together
    static constexpr int GRID = TYPE == IQ2_XXS || TYPE == IQ3_XXS ? 1024 : 0;

    const Product& p;
    int lane, warp, g, t, stages, tiles, rows;  // tiles: of eight rows of activations; rows: of the weight
    i64 top;                                     // the first of the weight's
    const u8* records;
    u8 *ring, *memory;
    u64* barriers;
    int slot_bytes, span;

    VT_MEMBER Staged(const Product& given, u8* shared) : p(given) {
        lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
        stages = (int)((p.units + 8 * DEEP - 1) / (8 * DEEP));
        memory = shared;
        barriers = (u64*)(shared + GRID + CHAINS);
        ring = shared + GRID + CHAINS + BARRIERS;
        span = (int)blockDim.x / 32 / TEAM * 16;
        slot_bytes = span * PITCH + TILES * DEEP * R::BYTES;
    }
    VT_MEMBER bool engine() const { return p.bulk != 0; }  // whether rows come by Hopper's copy engine
    VT_MEMBER const u8* row(int i) const { return p.b + (top + i) * p.stride; }

    // Nothing past the end of a row is touched, and of what is before it, its sixteen bytes alone.
    VT_MEMBER void send(int stage, int slot) const {
        // A thread sends one piece of rows `sent`, `sent` + `step`, ...
        int piece = (int)threadIdx.x % ABREAST, sent = (int)threadIdx.x / ABREAST, step = (int)blockDim.x / ABREAST;
        bool even = (((unsigned long long)p.b | (unsigned long long)p.stride) & 15) == 0;  // rows begin at 16 bytes
        u8* to = ring + slot * slot_bytes + sent * PITCH + 16 * piece;
        int end = (int)(p.units / (B::LARGE ? 8 : 1)) * B::BYTES - stage * CHUNK;
        const u8* from = row(sent) + (i64)stage * CHUNK;
        i64 leap = step * p.stride;
        int at = 16 * piece - (CHUNK % 16 ? stage * CHUNK & 15 : 0);
        if (even && at < CHUNK && at + 16 <= end) {
            from += at;
#pragma unroll 4
            for (int r = sent; r < rows; r += step, from += leap, to += step * PITCH) copy_async(to, from);
        } else if (piece < PIECES) {
#pragma unroll 1
            for (int r = sent; r < rows; r += step, from += leap, to += step * PITCH) send_piece(to, from, end, piece);
        }
    }
    static VT_MEMBER void send_piece(u8* to, const u8* from, int end, int piece) {
        int at = 16 * piece - (int)((unsigned long long)from & 15);
        if (at >= CHUNK) return;
        if (at + 16 <= end) {
            copy_async(to, from + at);
        } else {
            for (int b = at < 0 ? -at : 0; b < 16; b += 2) {
                *(unsigned short*)(to + b) = at + b < end ? *(const unsigned short*)(from + at + b) : 0;
            }
        }
    }
    VT_MEMBER void send_records(int stage, int slot) const {
        u8* to = ring + slot * slot_bytes + span * PITCH;
        const u8* from = records + stage * ((p.rows + 7) / 8 * DEEP * R::BYTES);
        int all = tiles * DEEP * R::BYTES;
#pragma unroll 4
        for (int i = 16 * (int)threadIdx.x; i < all; i += 16 * (int)blockDim.x) copy_async(to + i, from + i);
    }

    // The same by Hopper's copy engine, a row a thread; a slot's barrier waits for all of these threads.
    VT_MEMBER void stretch_rows(int stage, int slot) const {
        int skew = CHUNK % 16 ? stage * CHUNK & 15 : 0, r = (int)threadIdx.x;
        if (r >= rows) return;
        stretch(ring + slot * slot_bytes + r * PITCH, row(r) + (i64)stage * CHUNK - skew, skew + CHUNK + 15 & ~15, barriers + slot);
    }
    VT_MEMBER void stretch_records(int stage, int slot) const {
        if ((int)threadIdx.x >= span) return;
        if (threadIdx.x == 0) {
            const u8* from = records + stage * ((p.rows + 7) / 8 * DEEP * R::BYTES);
            stretch(ring + slot * slot_bytes + span * PITCH, from, tiles * DEEP * R::BYTES, barriers + slot);
        }
        arrive(barriers + slot);
    }

    VT_MEMBER void locate(const u8* (&mine)[2], const u8* slot, int first, int stage) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int i = first + g + 8 * r;
            mine[r] = slot + i * PITCH + ((int)(unsigned long long)row(i) + stage * CHUNK & 15);
        }
    }
};
