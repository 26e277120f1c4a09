// Experts' products on Hopper's tensor cores, both operands from shared memory: a tile has all pairs of an expert, up to
// HIGH, so that its weights come from memory once.
//
// Weights are the left operand: a group of four warps has WAVES times 64 columns, and as many rows of x are the right one's
// width as the tile has pairs, in steps of 32. As many blocks as there are multiprocessors go through tiles by strips of
// columns, strips of a tile after one another. Four more warps send for stages of 64 k: one thread asks the copy engine for
// weights, all copy rows of x from where their pairs have them, across the end of one tile into the next. Copies arrive by
// themselves, so that every stage is under way that nobody multiplies. Sums stay on the tensor cores from the first k to
// the last, as those of the other kernels do.
#pragma once
#include "wgmma_codes.cuh"
#include "wgmma_shared.cuh"

#if VT_TILES

#define WIDE_ROOM (227 << 10)
#define LEAVING 32  // pairs whose 64 columns leave at a time
template <int N> struct Number { static constexpr int value = N; };

// f with the least multiple of 32, up to N, that is not below `rows`.
template <int N, class F> VT_FN void by_width(int rows, F&& f) {
    if constexpr (N > 32)
        if (rows <= N - 32) return by_width<N - 32>(rows, f);
    f(Number<N>());
}

template <int KIND, int HIGH, int WAVES, int GROUPS>
VT_FN void wide(const TensorMap& weights_map, MOE_PARAMETERS, i64 blocks, u8* memory) {
    constexpr int OWN = WAVES * 64, ACROSS = GROUPS * OWN, STAGE = (ACROSS + HIGH) * 128, PIECES = HIGH / 16;
    constexpr int BESIDE = 1024 + GROUPS * (LEAVING * 128 + 2 * HIGH * 8) + 256, STAGES = (WIDE_ROOM - BESIDE) / STAGE;
    int thread = (int)threadIdx.x;
    u8 *places = memory + (-(u64)memory & 1023), *leaving = places + STAGES * STAGE;
    int* held = (int*)(leaving + GROUPS * LEAVING * 128);  // of each group two tiles' pairs and factors
    u64 *full = (u64*)(held + GROUPS * 4 * HIGH), *empty = full + STAGES;
    unsigned strips = (unsigned)((columns + ACROSS - 1) / ACROSS), items = (unsigned)count * strips;
    int chunks = (int)((depth + 63) / 64), stage = 0, parity = 0;
    auto works = [&](const Tile& tile) { return tile.expert >= 0 && tile.expert < experts; };
    if (thread == 0) {
        map_ahead(weights_map);
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + s, 128 + 1);
            barrier_init(empty + s, 4 * GROUPS);
        }
        barriers_ready();
    }
    __syncthreads();
    if (thread < 128) {
        registers_down<56>();
        thread = thread_from_here();
        int vectors = (int)(depth / 8);
        for (unsigned item = blockIdx.x; item < items; item += (unsigned)blocks) {
            unsigned number = item / strips;
            const Tile tile = tile_of(number, ids, order, tiles);
            if (tile.rows == 0) break;
            if (!works(tile)) continue;
            int weights_row = (int)(tile.expert * columns) + (int)(item - number * strips) * ACROSS;
            unsigned lines[PIECES];  // in vectors: 2^36 bytes of rows at most
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                int row = (thread >> 3) + 16 * i;
                lines[i] = row < tile.rows ? (unsigned)tile.pair(row) / (unsigned)choices * (unsigned)vectors + (thread & 7) : 0;
            }
#pragma unroll 1
            for (int chunk = 0; chunk < chunks; ++chunk) {
                barrier_wait(empty + stage, parity ^ 1);
                u8* to = places + stage * STAGE;
                if (thread == 0) {
                    barrier_expect(full + stage, ACROSS * 128);
                    load_tile(to, weights_map, full + stage, chunk * 128, weights_row);
                }
                bool there = chunk * 8 + (thread & 7) < vectors;
#pragma unroll
                for (int i = 0; i < PIECES; ++i)
                    if ((thread >> 3) + 16 * i < tile.rows)
                        vector_or_zero(to + (ACROSS + 16 * i) * 128 + place(thread >> 3, thread & 7),
                                       (const char*)x + (there ? (i64)(lines[i] + chunk * 8u) * 16 : 0), there);
                barrier_arrive_with_copies(full + stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        copies_arrive();
    } else {
        registers_up<224>();
        thread = thread_from_here();
        int own = thread & 127, group = same_in_warp((thread >> 7) - 1), lane = own & 31, warp = own >> 5, kept = 0;
        bool whole = columns % 8 == 0 && ((u64)out & 15) == 0;
        u8* mine = leaving + group * LEAVING * 128;
        float total[WAVES][HIGH / 2];
        auto release = [&](int from) {
            lanes_meet();
            if (lane == 0) barrier_arrive(empty + from);
        };
        for (unsigned item = blockIdx.x; item < items; item += (unsigned)blocks) {
            unsigned number = item / strips;
            const Tile tile = tile_of(number, ids, order, tiles);
            if (tile.rows == 0) break;
            i64 first = (i64)(item - number * strips) * ACROSS;
            if (!works(tile)) {
                for (int at = thread - 128; at < tile.rows * ACROSS; at += 128 * GROUPS) {
                    i64 column = first + at % ACROSS;
                    if (column < columns)
                        store_one(out, tile.pair(at / ACROSS) * columns + column, tile.expert == NO_EXPERT ? 0.0f : VT_NAN, KIND);
                }
                continue;
            }
            int* pairs = held + (2 * group + kept) * 2 * HIGH;
            float* by = (float*)(pairs + HIGH);
            kept ^= 1;
            for (int row = own; row < HIGH; row += 128) {
                int pair = row < tile.rows ? tile.pair(row) : 0;
                pairs[row] = pair, by[row] = factors == nullptr ? 1.0f : factors[pair];
            }
            group_meets(group);  // also with those who still read what the tile before the last one had here
            by_width<HIGH>(tile.rows, [&](auto some) {
                constexpr int SUMS = decltype(some)::value / 2;
#pragma unroll
                for (int w = 0; w < WAVES; ++w)
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) total[w][i] = 0.0f;
                int before = -1;
#pragma unroll 1
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    u64 left = tile_of(places + stage * STAGE + group * OWN * 128), right = tile_of(places + stage * STAGE + ACROSS * 128);
                    barrier_wait(full + stage, parity);
                    stores_to_products();  // what other threads copied
                    products_begin();
#pragma unroll
                    for (int s = 0; s < 4; ++s)
#pragma unroll
                        for (int w = 0; w < WAVES; ++w)
                            multiply_shared<KIND>(*(float(*)[SUMS])total[w], further(beyond(left, w * 64 * 128), s), further(right, s));
                    products_close();
                    products_wait<1>();
                    if (before >= 0) release(before);
                    before = stage;
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
                products_wait<0>();
#pragma unroll
                for (int w = 0; w < WAVES; ++w) products_there(total[w]);
                release(before);
            });
            i64 n = first + group * OWN;
#pragma unroll
            for (int w = 0; w < WAVES; ++w)
#pragma unroll
                for (int top = 0; top < HIGH; top += LEAVING) {
                    if (top >= tile.rows || n + 64 * w >= columns) break;
                    group_meets(group);  // what left before has left
#pragma unroll
                    for (int j = 0; j < LEAVING / 8; j += 2) {
                        unsigned r[4];
#pragma unroll
                        for (int m = 0; m < 4; ++m) {
                            const float* sums = total[w] + (top / 8 + j + (m >> 1)) * 4 + 2 * (m & 1);
                            const float* factor = by + top + 8 * (j + (m >> 1)) + 2 * (lane & 3);
                            r[m] = pair<KIND>(sums[0] * factor[0], sums[1] * factor[1]);
                        }
                        leave_transposed(mine + place(8 * (j + (lane >> 4)) + (lane & 7), 2 * warp + (lane >> 3 & 1)), r);
                    }
                    group_meets(group);
#pragma unroll
                    for (int i = 0; i < LEAVING / 16; ++i) {
                        int row = (own >> 3) + 16 * i, v = own & 7;
                        i64 column = n + 64 * w + 8 * v;
                        if (top + row >= tile.rows || column >= columns) continue;
                        uint4 q = *(const uint4*)(mine + place(row, v));
                        unsigned short* to = (unsigned short*)out + pairs[top + row] * columns + column;
                        if (whole) {
                            *(uint4*)to = q;
                        } else {
                            const unsigned twos[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                            for (int e = 0; e < 8; ++e)
                                if (column + e < columns) to[e] = (unsigned short)(twos[e >> 1] >> 16 * (e & 1));
                        }
                    }
                }
        }
    }
}

#define WIDE(NAME, KIND, HIGH, WAVES, GROUPS)                                                                          \
    extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS, 1)                                                \
        NAME(VT_MAP weights_map, MOE_PARAMETERS, i64 blocks) {                                                         \
        VT_SHARED(memory);                                                                                             \
        wide<KIND, HIGH, WAVES, GROUPS>(weights_map, MOE_NAMES, blocks, (u8*)memory);                                  \
    }
#endif
