// Products of e4m3 operands that lie along k, out[m, n] = sum_k a[k, m] b[k, n], on Hopper's tensor cores.
//
// The tensor cores take 8-bit operands only with k side by side, and keep few bits of their sums. Every e4m3 value is a
// float16 value, though, and of those they take pairs of k and sum to nearly float32's accuracy: codes become float16 on
// their way. A fetch of transposed 8 x 8 matrices of 16-bit elements, here pairs of codes, gives a thread columns 2g and
// 2g + 1 at k = 2t and 2t + 1: four codes, of which each column's two make a register. a's registers are multiplied as they
// are. b's are stored as a tile with k side by side. So of each sixteen columns the even ones come first in a tile, then
// the odd ones, and a thread's sums of a row are of four neighbours.
//
// One warp asks for raw tiles, stages ahead. Seven make b's float16 tiles (three were too slow), which both groups of four
// warps multiply with the 64 columns of a that each has. The groups take turns, so that one multiplies while the other
// scales its sums and makes its next operand. A block goes from tile to tile, and what it fetches runs ahead into the next
// one. Clusters that share a's tiles, integer instructions in place of conversions, and the next operand made while products
// are under way, were no faster.
#pragma once
#include "e4m3_halves.cuh"
#include "elected.cuh"
#include "fp8_exact.cuh"
#include "wgmma_registers.cuh"

#if VT_TILES

#define RAW_STAGES 4
#define MADE_STAGES 2
#define RAW_TILE 16384   // 128 k of 128 columns
#define MADE_TILE 32768  // the same in float16, as two tiles of 64 k
#define HELPING 256      // threads that fetch and make tiles, before those that multiply
#define MAKERS 7         // warps
#define UNITS 5          // sixteen columns at 32 k: so many at most a maker has of a tile's 32

// Codes 0 and 2 of four as float16, then 1 and 3.
VT_FN void halves_of(unsigned& even, unsigned& odd, unsigned codes) {
#ifdef __CUDACC__
    unsigned pairs = __byte_perm(codes, 0u, 0x3120);
#else
    unsigned pairs = (codes & 0xff0000ffu) | (codes & 0xff00u) << 8 | (codes >> 8 & 0xff00u);
#endif
    even = e4m3_halves(pairs), odd = e4m3_halves(pairs >> 16);
}

// Four 8 x 8 matrices into shared memory, as `fetch_matrices` has them out of it.
VT_FN void store_matrices(void* row, const unsigned (&r)[4]) {
#ifdef __CUDACC__
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(shared_address(row)), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
#else
    using namespace emulation;
    int lane = running->number & 31, g = lane >> 2, t = lane & 3;
    const unsigned short* const* rows = addresses.lanes((const unsigned short*)row);
    for (int m = 0; m < 4; ++m) std::memcpy((void*)(rows[8 * m + g] + 2 * t), &r[m], 4);
    addresses.close();
#endif
}

VT_FN void fetch_four(float (&x)[4], const float* from) {
    uint4 bits = *(const uint4*)from;
    x[0] = vt_float((int)bits.x), x[1] = vt_float((int)bits.y), x[2] = vt_float((int)bits.z), x[3] = vt_float((int)bits.w);
}
VT_FN void store_four(float* to, const float (&x)[4]) {
    *(uint4*)to = {(unsigned)vt_bits(x[0]), (unsigned)vt_bits(x[1]), (unsigned)vt_bits(x[2]), (unsigned)vt_bits(x[3])};
}

// The codes of columns 2g and 2g + 1 of the sixteen from 16 v on, at k = 32 q + 8 i + 2t and + 1, of a raw tile.
VT_FN void fetch_codes(unsigned (&codes)[4], const u8* raw, int q, int v, int lane) {
    fetch_transposed(codes, raw + place(32 * q + lane, v));
}

// Where a group's rows begin and end, tile after tile: sizes that lie reach no further than the operands.
struct Stretch {
    const int* sizes;
    i64 depth, group, begin;
    VT_MEMBER Stretch(const int* sizes, i64 depth) : sizes(sizes), depth(depth), group(0), begin(0) {}
    VT_MEMBER int at(i64 next, int& blocks) {  // first block of `next`, no earlier group than the last one
        for (; group < next; ++group) begin += sizes[group];
        i64 end = begin + sizes[group], first = begin;
        if (first < 0 || first % 128 != 0) first = end = 0;
        if (end > depth) end = depth;
        blocks = end > first ? (int)((end - first + 127) >> 7) : 0;
        return (int)(first >> 7);
    }
};

// A tile of 128 x 128 results of a group.
struct Square {
    i64 group;
    int top, first;
    VT_MEMBER Square(int number, i64 rows, i64 columns) {
        unsigned across = (unsigned)(columns + 127) >> 7, down = (unsigned)(rows + 127) >> 7;
        unsigned of_group = (unsigned)number / (across * down), within = (unsigned)number - of_group * across * down;
        group = of_group;
        top = (int)(within / across) << 7;
        first = (int)(within % across) << 7;
    }
};

VT_FN void multiply_stretches(const TensorMap& a_map, const TensorMap& b_map, int grid, int tiles, i64 rows, i64 columns, i64 depth,
                              const float* scale_a, const float* scale_b, const int* sizes, const float* c, float* out, u8* memory) {
    u8 *raw = memory + (-(u64)memory & 1023), *made = raw + RAW_STAGES * 2 * RAW_TILE;
    float* scales = (float*)(made + MADE_STAGES * MADE_TILE);  // 128 of rows, 128 of columns a stage
    u64 *full = (u64*)(scales + RAW_STAGES * 256), *empty = full + RAW_STAGES, *ready = empty + RAW_STAGES;
    u64 *used = ready + MADE_STAGES, *turn = used + MADE_STAGES;
    int thread = (int)threadIdx.x, warp = same_in_warp(thread >> 5), lane = thread & 31;
    if (thread == 0) {
        map_ahead(a_map);
        map_ahead(b_map);
        for (int s = 0; s < RAW_STAGES; ++s) barrier_init(full + s, 33), barrier_init(empty + s, MAKERS + 8);
        for (int s = 0; s < MADE_STAGES; ++s) barrier_init(ready + s, MAKERS), barrier_init(used + s, 8);
        for (int s = 0; s < 2; ++s) barrier_init(turn + s, 4);
        barriers_ready();
    }
    __syncthreads();
    Stretch stretch(sizes, depth);
    int stage = 0, parity = 0, place_made = 0, parity_made = 0, blocks;
    auto go_on = [&] {
        if (++stage == RAW_STAGES) stage = 0, parity ^= 1;
    };
    auto go_on_made = [&] {
        if (++place_made == MADE_STAGES) place_made = 0, parity_made ^= 1;
    };
    if (thread < HELPING) {
        registers_down<56>();
        if (warp == 0) {
            for (int number = (int)blockIdx.x; number < tiles; number += grid) {
                Square tile(number, rows, columns);
                int block = stretch.at(tile.group, blocks), last = block + blocks;
#pragma unroll 1
                for (; block < last; ++block) {
                    barrier_wait(empty + stage, parity ^ 1);
                    lanes_meet();
                    if (lane == 0) {
                        u8* to = raw + stage * 2 * RAW_TILE;
                        barrier_expect(full + stage, 2 * RAW_TILE);
                        load_tile(to, a_map, full + stage, tile.top, block * 128);
                        load_tile(to + RAW_TILE, b_map, full + stage, tile.first, block * 128);
                    }
                    float* to = scales + stage * 256 + 4 * lane;
                    i64 row = tile.top + 4 * lane, column = tile.first + 4 * lane;
                    vector_or_zero(to, row < rows ? scale_a + block * rows + row : scale_a, row < rows);
                    vector_or_zero(to + 128, column < columns ? scale_b + block * columns + column : scale_b, column < columns);
                    barrier_arrive_with_copies(full + stage);
                    go_on();
                }
            }
            copies_arrive();
        } else {
            int maker = warp - 1;
            for (int number = (int)blockIdx.x; number < tiles; number += grid) {
                Square tile(number, rows, columns);
                stretch.at(tile.group, blocks);
#pragma unroll 1
                for (int block = 0; block < blocks; ++block) {
                    barrier_wait(full + stage, parity);
                    const u8* from = raw + stage * 2 * RAW_TILE + RAW_TILE;
                    unsigned codes[UNITS][4];
#pragma unroll
                    for (int u = 0; u < UNITS; ++u) {
                        int unit = maker + MAKERS * u;
                        if (unit < 32) fetch_codes(codes[u], from, unit & 3, unit >> 2, lane);
                    }
                    barrier_wait(used + place_made, parity_made ^ 1);
                    u8* to = made + place_made * MADE_TILE;
#pragma unroll
                    for (int u = 0; u < UNITS; ++u) {
                        int unit = maker + MAKERS * u, q = unit & 3, row = 16 * (unit >> 2) + (lane & 7);
                        if (unit >= 32) continue;
                        unsigned even[4], odd[4];
#pragma unroll
                        for (int i = 0; i < 4; ++i) halves_of(even[i], odd[i], codes[u][i]);
                        u8* half = to + (q >> 1) * (MADE_TILE / 2) + place(row, 4 * (q & 1) + (lane >> 3));
                        store_matrices(half, even);
                        store_matrices(half + 8 * 128, odd);
                    }
                    stores_to_products();
                    lanes_meet();
                    if (lane == 0) {
                        barrier_arrive(ready + place_made);
                        barrier_arrive(empty + stage);
                    }
                    go_on();
                    go_on_made();
                }
            }
        }
    } else {
        registers_up<200>();
        int group = (warp - HELPING / 32) >> 2, top = 64 * group + 16 * (warp & 3), g = lane >> 2, t = lane & 3, parity_turn = 0;
        auto empties = barriers_of(empty, 0), useds = barriers_of(used, 0), turns = barriers_of(turn, 0);
        for (int number = (int)blockIdx.x; number < tiles; number += grid) {
            Square tile(number, rows, columns);
            stretch.at(tile.group, blocks);
            float total[64];
#pragma unroll
            for (int i = 0; i < 64; ++i) total[i] = 0.0f;
            unsigned codes[4][4];
            auto fetch = [&](int from) {
#pragma unroll
                for (int q = 0; q < 4; ++q) fetch_codes(codes[q], raw + from * 2 * RAW_TILE, q, top >> 4, lane);
            };
            if (blocks > 0) barrier_wait(full + stage, parity), fetch(stage);
#pragma unroll 1
            for (int block = 0; block < blocks; ++block) {
                float dot[64];
                unsigned a[8][4];
#pragma unroll
                for (int q = 0; q < 4; ++q)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        unsigned(&pair)[4] = a[2 * q + (i >> 1)];
                        halves_of(pair[2 * (i & 1)], pair[2 * (i & 1) + 1], codes[q][i]);
                    }
                barrier_wait(ready + place_made, parity_made);
                barrier_wait(turn + group, parity_turn ^ group ^ 1);  // the first group's first turn is there from the start
                parity_turn ^= 1;
                u64 b = tile_of(made + place_made * MADE_TILE);
                products_begin();
#pragma unroll
                for (int s = 0; s < 8; ++s)
                    multiply_registers<F16>(dot, a[s], further(beyond(b, (s >> 2) * (MADE_TILE / 2)), s & 3), s > 0);
                products_close();
                lanes_meet();
                barrier_arrive_if(lane == 0, turns, group ^ 1);
                const float *of_row = scales + stage * 256 + top + 2 * g, *of_column = scales + stage * 256 + 128 + 4 * t;
                const float row[2] = {of_row[0], of_row[1]};
                if (block + 1 < blocks) {
                    int next = stage + 1 == RAW_STAGES ? 0 : stage + 1;
                    barrier_wait(full + next, next ? parity : parity ^ 1);
                    fetch(next);
                }
                products_wait<0>();
                products_there(dot);
                lanes_meet();
                barrier_arrive_if(lane == 0, useds, place_made);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    float column[4];
                    fetch_four(column, of_column + 16 * j);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        float both = row[i >> 1 & 1] * column[2 * (i & 1) + (i >> 2)];
                        total[8 * j + i] = vt_fma(both, dot[8 * j + i], total[8 * j + i]);
                    }
                }
                lanes_meet();
                barrier_arrive_if(lane == 0, empties, stage);
                go_on();
                go_on_made();
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                i64 m = tile.top + top + 2 * g + h;
                if (m >= rows) continue;
                i64 at = (tile.group * rows + m) * columns + tile.first + 4 * t;
                int room = (int)columns - tile.first - 4 * t;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    if (16 * j >= room) continue;
                    const float* sums = total + 8 * j + 2 * h;
                    float four[4] = {sums[0], sums[4], sums[1], sums[5]};
                    if (c) {
                        float more[4];
                        fetch_four(more, c + at + 16 * j);
#pragma unroll
                        for (int i = 0; i < 4; ++i) four[i] = more[i] + four[i];
                    }
                    store_four(out + at + 16 * j, four);
                }
            }
        }
    }
}

#endif
