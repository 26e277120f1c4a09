// Products of 8-bit operands for few tokens, or few columns, in tiles so narrow that every multiprocessor has one.
//
// Tokens are the left operand, whose 64 rows an instruction takes: what it reads behind fewer of them becomes sums that nobody
// reads. Weights are the right one, of which it takes any number of eights. Four warps bring stages in turn, since one would
// be slower than what it brings; their lanes go the same way, so that nothing is asked for lane by lane. Blocks that bring each
// other the tokens that they share were slower than blocks alone. As in fp8_loaded.cuh sums of e4m3 leave the tensor cores
// after 128 products, while the next 128 are under way. How wide and deep tiles are does not show in a sum.
#pragma once
#include "copy_engine.cuh"
#include "elected.cuh"
#include "fp8_tiles.cuh"
#include "wgmma_narrow.cuh"

#if VT_TILES

// A kernel's shape. TOKENS by WIDTH weight rows a tile, DEEP times 128 bytes of k a stage.
template <int TOKENS_, int WIDTH_, int DEEP_> struct Narrow {
    static_assert((DEEP_ == 1 || DEEP_ == 2) && WIDTH_ <= 64, "");
    static constexpr int TOKENS = TOKENS_, WIDTH = WIDTH_, DEEP = DEEP_, GROUPS = TOKENS_ > 64 ? 2 : 1;
};

#define BRINGERS 4        // warps that bring stages
#define READ_BEYOND 6144  // bytes behind the last tokens that an instruction may read

// JOB as for `multiply_loaded`, with tokens as the left operand.
template <class FORM, class JOB>
VT_FN void multiply_narrow(const TensorMap& tokens_map, const TensorMap& weights_map, const JOB& job, int stages, u8* memory) {
    constexpr int TOKENS = FORM::TOKENS, WIDTH = FORM::WIDTH, DEEP = FORM::DEEP, GROUPS = FORM::GROUPS, SUMS = WIDTH / 2;
    constexpr int PART = (TOKENS + WIDTH) * K_TILE, STAGE = DEEP * PART;
    typedef typename JOB::SUM SUM;
    u8* tiles = memory + (-(u64)memory & 1023);
    u64 *full = (u64*)(tiles + stages * STAGE + READ_BEYOND), *empty = full + MOST_STAGES;
    auto ends = (typename JOB::Ends*)(empty + MOST_STAGES);  // of a group's columns, then of its rows
    auto row_ends = (typename JOB::RowEnd*)(ends + GROUPS * WIDTH);
    int thread = (int)threadIdx.x, warp = same_in_warp(thread >> 5);
    int down = (int)((unsigned)(job.rows + TOKENS - 1) / TOKENS), steps = (int)((unsigned)(job.depth + DEEP * K_TILE - 1) / (DEEP * K_TILE));
    int all = down * (int)((unsigned)(job.columns + WIDTH - 1) / WIDTH);
    int brought = DEEP * K_TILE * (WIDTH + (job.rows < TOKENS ? (int)job.rows : TOKENS));  // no rows that do not exist
    auto tile_at = [&](int number) {
        int beside = number, below = 0;
        if (down > 1) beside = (int)((unsigned)number / (unsigned)down), below = number - beside * down;
        int token = below * TOKENS, column = beside * WIDTH;
        // Rows that do not exist are slow to bring: the last tile has some of the one before, whose results are the same there.
        if (down > 1 && token > (int)job.rows - TOKENS) token = (int)job.rows - TOKENS;
        int tokens = (int)job.rows - token, left = (int)job.columns - column;
        return Tile{nullptr, nullptr, token, column, tokens < TOKENS ? tokens : TOKENS, left < WIDTH ? left : WIDTH, 0, 0};
    };
    bool one = one_of_warp();
    if (one) {
        if (warp == 0) map_ahead(weights_map);
        if (warp == 1) map_ahead(tokens_map);
        for (int s = warp; s < stages; s += BRINGERS + 4 * GROUPS) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, 4 * GROUPS);
        }
        barriers_ready();
    }
    __syncthreads();
    if (warp < BRINGERS) {
        int stage = warp, parity = 1, step = warp;
        for (int number = (int)blockIdx.x; number < all; number += (int)job.grid) {
            Tile tile = tile_at(number);
#pragma unroll 1
            for (; step < steps; step += BRINGERS) {
                u8* to = tiles + stage * STAGE;
                barrier_wait(empty + stage, parity);
                lanes_meet();
                if (one) {
                    barrier_expect(full + stage, brought);
#pragma unroll
                    for (int d = 0; d < DEEP; ++d) {
                        int k = (step * DEEP + d) * K_TILE;
                        load_tile(to + d * PART + TOKENS * K_TILE, weights_map, full + stage, k, (int)tile.column);
                        load_tile(to + d * PART, tokens_map, full + stage, k, (int)tile.token);
                    }
                }
                stage += BRINGERS;
                if (stage >= stages) stage -= stages, parity ^= 1;
            }
            step -= steps;
        }
    } else {
        int group = (warp - BRINGERS) >> 2, lane = thread & 31, own = thread & 127, stage = 0, parity = 0;
        int top = group * 64 + 16 * (warp & 3);
        auto empties = barriers_of(empty, 0);
        u64 left = tile_of(tiles + group * 64 * K_TILE), right = tile_of(tiles + TOKENS * K_TILE);
        for (int number = (int)blockIdx.x; number < all; number += (int)job.grid) {
            Tile tile = tile_at(number);
            if (own < WIDTH) ends[group * WIDTH + own] = job.column_ends(tile, own);
            if (own >= 64) row_ends[group * 64 + own - 64] = job.row_end(tile, group * 64 + own - 64);
            auto multiply = [&](SUM(&part)[SUMS], int d, bool add) {
                u64 a = beyond(left, stage * STAGE + d * PART), b = beyond(right, stage * STAGE + d * PART);
#pragma unroll
                for (int s = 0; s < K_TILE / 32; ++s) multiply_tile(part, further(a, s), further(b, s), add || s > 0);
            };
            auto arrives = [&] { barrier_wait(full + stage, parity); };
            auto release = [&](int from) {  // without a branch, which products under way would not outlive
                lanes_meet();
                barrier_arrive_if(lane == 0 && from >= 0, empties, from);
            };
            SUM total[SUMS];
#pragma unroll
            for (int i = 0; i < SUMS; ++i) total[i] = 0;
            int before = -1;
            if constexpr (JOB::EXACT) {
#pragma unroll 1
                for (int step = 0; step < steps; ++step) {
                    arrives();
                    products_begin();
#pragma unroll
                    for (int d = 0; d < DEEP; ++d) multiply(total, d, true);
                    products_close();
                    products_wait<1>();
                    release(before);
                    before = stage;
                    if (++stage == stages) stage = 0, parity ^= 1;
                }
                products_wait<0>();
            } else {
                SUM even[SUMS], odd[SUMS];
                int blocks = (int)((job.depth + K_TILE - 1) / K_TILE), block = 0;
                auto begin = [&](SUM(&part)[SUMS], int d) {
                    products_begin();
                    multiply(part, d, false);
                    products_close();
                };
                auto join = [&](bool last, SUM(&part)[SUMS]) {  // as soon as all products, or all but the last ones, are done
                    if (last) products_wait<0>();
                    else products_wait<1>();
                    products_there(part);
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) total[i] += part[i];
                    products_there(total);
                };
                auto go_on = [&] {
                    before = stage;
                    if (++stage == stages) stage = 0, parity ^= 1;
                    arrives();
                };
                arrives();
                begin(even, 0);
#pragma unroll 1
                for (; block + 2 < blocks; block += 2) {
                    if constexpr (DEEP == 1) go_on();
                    begin(odd, DEEP - 1);
                    join(false, even);
                    if constexpr (DEEP == 1) release(before);
                    go_on();
                    begin(even, 0);
                    join(false, odd);
                    release(before);
                }
                if (block + 1 < blocks) {
                    if constexpr (DEEP == 1) go_on();
                    begin(odd, DEEP - 1);
                    join(false, even);
                    if constexpr (DEEP == 1) release(before);
                    join(true, odd);
                } else {
                    join(true, even);
                }
                before = stage;
                if (++stage == stages) stage = 0, parity ^= 1;
            }
            products_there(total);
            release(before);
            group_meets(group);
            if (top < tile.tokens) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int row = top + 8 * h + (lane >> 2);
                    if (row >= tile.tokens) continue;
                    unsigned short* to = (unsigned short*)job.out + (tile.token + row) * job.columns + tile.column + 2 * (lane & 3);
                    const typename JOB::RowEnd row_end = row_ends[row];
#pragma unroll
                    for (int j = 0; j < WIDTH / 8; ++j) {
                        const SUM* sums = total + 4 * j + 2 * h;
                        const typename JOB::Ends* end = ends + group * WIDTH + 8 * j + 2 * (lane & 3);
                        unsigned pair = job.pair(job.end(sums[0], row_end, end[0]), job.end(sums[1], row_end, end[1]));
                        int room = tile.columns - 8 * j - 2 * (lane & 3);
                        if (job.vectors) {
                            if (room > 0) *(unsigned*)(to + 8 * j) = pair;
                        } else {
                            if (room > 0) to[8 * j] = (unsigned short)pair;
                            if (room > 1) to[8 * j + 1] = (unsigned short)(pair >> 16);
                        }
                    }
                }
            }
            if (number + (int)job.grid < all) group_meets(group);  // before `ends` are the next tile's
        }
    }
}

#endif
