// Products of 8-bit operands whose tiles the copy engine brings: out[m, n] = sum_k a[m, k] b[n, k].
//
// Clusters of two blocks take tiles of the same tokens and neighbouring weights: each fetches half of the tokens for both,
// and its own weights. One thread of the first group asks for 128 bytes of k of all rows at a time, as many stages ahead
// as shared memory has room for; the other groups multiply. Sums of int8 are exact and stay on the tensor cores. Those of
// e4m3 leave them after 128 products, since they keep too few bits there, for float32: one group adds up while the other
// multiplies, and where registers suffice a group multiplies the next stage at the same time. Which operand has the 64 rows
// of an instruction, how wide tiles are and how many groups share them does not show in a sum. Scales for each 128 of k come
// with their stage too: at few tokens nothing else is ahead of its use.
#pragma once
#include "copy_engine.cuh"
#include "fp8_tiles.cuh"

#if VT_TILES

// TOKENS, WEIGHTS: rows of a tile. GROUPS multiply: the rows of the left operand are dealt out to them or, where BESIDE,
// those of the right one. TOKENS_LEFT: the tokens are the left operand, whose 64 rows an instruction takes. JOB: what the
// tiles are and what becomes of their sums, of type SUM and EXACT or not: grid, tiles(), tile(number), depth, where there
// are scales for each 128 of k (SCALED) token_scales(), weight_scales(), scale_at(block), scale(word, block), and in the end
// write() or, where TOKENS_LEFT, column_ends(), row_end(), end(), pair(), columns, vectors, out.
template <int TOKENS, int WEIGHTS, int GROUPS, bool TOKENS_LEFT, bool BESIDE, class JOB>
VT_FN void multiply_loaded(const TensorMap& tokens_map, const TensorMap& weights_map, const JOB& job, int stages, u8* memory) {
    constexpr int LEFT = TOKENS_LEFT ? TOKENS : WEIGHTS, RIGHT = TOKENS_LEFT ? WEIGHTS : TOKENS;
    constexpr int N = BESIDE ? RIGHT / GROUPS : RIGHT, WAVES = BESIDE ? LEFT / 64 : LEFT / (64 * GROUPS), SUMS = N / 2;
    constexpr int STAGE = (TOKENS + WEIGHTS) * K_TILE, HALF = TOKENS / 2, PITCH = WEIGHTS + 4;
    constexpr int LEAVING = TOKENS_LEFT ? GROUPS * 64 * 128 : TOKENS * PITCH * 4;
    constexpr int SCALERS = TOKENS > 64 ? 64 : 32;  // threads that fetch scales
    typedef typename JOB::SUM SUM;
    static_assert(WAVES == 1 || !BESIDE, "");
    u8 *tiles = memory + (-(u64)memory & 1023), *leaving = tiles + stages * STAGE;
    u64 *full = (u64*)(leaving + LEAVING), *empty = full + MOST_STAGES;
    unsigned *weight_words = (unsigned*)(empty + MOST_STAGES), *words = weight_words + MOST_STAGES;  // scales: one, TOKENS a stage
    int thread = (int)threadIdx.x, rank = block_of_cluster();
    if (thread == 0) {
        map_ahead(tokens_map);
        map_ahead(weights_map);
        for (int s = 0; s < stages; ++s) {
            barrier_init(full + s, JOB::SCALED ? 2 + SCALERS : 1);
            barrier_init(empty + s, CLUSTER * 4 * GROUPS);
        }
        barriers_ready();
    }
    cluster_meets();
    int blocks = (int)((job.depth + 127) / K_TILE), stage = 0, parity = 0;
    i64 all = job.template tiles<TOKENS, WEIGHTS * CLUSTER>(), step = job.grid / CLUSTER;
    auto tile_at = [&](i64 number) {
        Tile tile = job.template tile<TOKENS, WEIGHTS * CLUSTER>(number);
        tile.column += rank * WEIGHTS;
        tile.columns -= rank * WEIGHTS;
        if (tile.columns > WEIGHTS) tile.columns = WEIGHTS;
        return tile;
    };
    if (thread < FETCHING) {
        registers_down<56>();
        if (thread == 0) {
            for (i64 number = blockIdx.x / CLUSTER; number < all; number += step) {
                Tile tile = tile_at(number);
                if (tile.expert < 0) continue;
                int weight_row = (int)(tile.expert * job.columns + tile.column);
                for (int block = 0; block < blocks; ++block) {
                    barrier_wait(empty + stage, parity ^ 1);
                    u8* to = tiles + stage * STAGE;
                    barrier_expect(full + stage, STAGE);
                    load_tile(to + TOKENS * K_TILE, weights_map, full + stage, block * K_TILE, weight_row);
#pragma unroll
                    for (int i = 0; i < 2 / CLUSTER; ++i) {
                        int first = (rank + i) * HALF;
                        load_tile_for_all(to + first * K_TILE, tokens_map, full + stage, block * K_TILE, (int)tile.token + first);
                    }
                    if (++stage == stages) stage = 0, parity ^= 1;
                }
            }
        } else if (JOB::SCALED && thread >= 32 && thread < 32 + SCALERS) {
            if constexpr (JOB::SCALED) {
                constexpr int EACH = (TOKENS + SCALERS - 1) / SCALERS;
                for (i64 number = blockIdx.x / CLUSTER; number < all; number += step) {
                    Tile tile = tile_at(number);
                    if (tile.expert < 0) continue;
                    const unsigned* scales = job.token_scales(tile, 0);
                    unsigned from[EACH];
#pragma unroll
                    for (int i = 0; i < EACH; ++i) {
                        int token = thread - 32 + SCALERS * i;
                        from[i] = (unsigned)(token < tile.tokens ? token : 0) * (unsigned)job.scale_row;
                    }
                    for (int block = 0; block < blocks; ++block) {
                        barrier_wait(empty + stage, parity ^ 1);
                        const unsigned* here = scales + job.scale_at(block);
#pragma unroll
                        for (int i = 0; i < EACH; ++i)
                            if (TOKENS >= SCALERS || thread - 32 < TOKENS) copy_word(words + stage * TOKENS + thread - 32 + SCALERS * i, here + from[i]);
                        barrier_arrive_with_copies(full + stage);
                        if (++stage == stages) stage = 0, parity ^= 1;
                    }
                }
                copies_arrive();
            }
        } else if (JOB::SCALED && thread == 96) {
            if constexpr (JOB::SCALED) {
                for (i64 number = blockIdx.x / CLUSTER; number < all; number += step) {
                    Tile tile = tile_at(number);
                    if (tile.expert < 0) continue;
                    const float* weights = job.weight_scales(tile);
                    for (int block = 0; block < blocks; ++block) {
                        barrier_wait(empty + stage, parity ^ 1);
                        copy_word(weight_words + stage, weights + block);
                        barrier_arrive_with_copies(full + stage);
                        if (++stage == stages) stage = 0, parity ^= 1;
                    }
                }
                copies_arrive();
            }
        }
    } else {
        registers_up<GROUPS == 2 ? 224 : 240>();
        int own = thread - FETCHING, group = own >> 7, lane = own & 127;
        SUM total[WAVES][SUMS];
        for (i64 number = blockIdx.x / CLUSTER; number < all; number += step) {
            Tile tile = tile_at(number);
#pragma unroll
            for (int w = 0; w < WAVES; ++w)
#pragma unroll
                for (int i = 0; i < SUMS; ++i) total[w][i] = 0;
            if (tile.expert >= 0 && blocks > 0) {
                auto arrived = [&] {
                    barrier_wait(full + stage, parity);
                    int here = stage;
                    if (++stage == stages) stage = 0, parity ^= 1;
                    return here;
                };
                auto multiply = [&](SUM(&part)[SUMS], int from, int wave, bool add) {
                    const u8* here = tiles + from * STAGE;
                    u64 left = tile_of(here + (TOKENS_LEFT ? 0 : TOKENS * K_TILE) + (BESIDE ? 0 : group * WAVES + wave) * 64 * K_TILE);
                    u64 right = tile_of(here + (TOKENS_LEFT ? TOKENS * K_TILE : 0) + (BESIDE ? group * N * K_TILE : 0));
                    products_begin();
#pragma unroll
                    for (int s = 0; s < K_TILE / 32; ++s) multiply_tile(part, further(left, s), further(right, s), add || s > 0);
                    products_close();
                };
                auto release = [&](int from) {
                    lanes_meet();
                    if ((lane & 31) < CLUSTER) barrier_arrive_at(empty + from, lane & 31);
                };
                auto join = [&](const SUM(&part)[SUMS], int from, int wave, int block) {
                    if constexpr (!JOB::SCALED) {
                        if (wave == WAVES - 1) release(from);
#pragma unroll
                        for (int i = 0; i < SUMS; ++i) total[wave][i] += part[i];
                    } else if constexpr (TOKENS_LEFT) {
                        const unsigned* mine = words + from * TOKENS + (group * WAVES + wave) * 64 + 16 * (lane >> 5) + (lane & 31) / 4;
                        unsigned high = mine[0], low = mine[8];
                        float weight = vt_float((int)weight_words[from]);
                        if (wave == WAVES - 1) release(from);
                        float upper = job.scale(high, block) * weight, lower = job.scale(low, block) * weight;
#pragma unroll
                        for (int i = 0; i < SUMS; ++i) total[wave][i] = vt_fma(i & 2 ? lower : upper, part[i], total[wave][i]);
                    } else {
                        const unsigned* mine = words + from * TOKENS + (BESIDE ? group * N : 0) + 2 * (lane & 3);
                        float weight = vt_float((int)weight_words[from]);
#pragma unroll
                        for (int i = 0; i < SUMS; i += 4) {
                            float even = job.scale(mine[2 * i], block) * weight, odd = job.scale(mine[2 * i + 1], block) * weight;
                            total[wave][i] = vt_fma(even, part[i], total[wave][i]);
                            total[wave][i + 1] = vt_fma(odd, part[i + 1], total[wave][i + 1]);
                            total[wave][i + 2] = vt_fma(even, part[i + 2], total[wave][i + 2]);
                            total[wave][i + 3] = vt_fma(odd, part[i + 3], total[wave][i + 3]);
                        }
                        release(from);
                    }
                };
                if constexpr (JOB::EXACT) {
                    int before = 0;
                    for (int block = 0; block < blocks; ++block) {
                        int here = arrived();
#pragma unroll
                        for (int w = 0; w < WAVES; ++w) multiply(total[w], here, w, block > 0);
                        products_wait<WAVES>();
                        if (block > 0) release(before);
                        before = here;
                    }
                    products_wait<0>();
                    release(before);
                } else if constexpr (WAVES == 1) {
                    SUM one[SUMS], other[SUMS];
                    int here = arrived(), there, block = 0;
                    multiply(one, here, 0, false);
                    for (; block + 2 < blocks; block += 2) {
                        there = arrived();
                        multiply(other, there, 0, false);
                        products_wait<1>();
                        join(one, here, 0, block);
                        here = arrived();
                        multiply(one, here, 0, false);
                        products_wait<1>();
                        join(other, there, 0, block + 1);
                    }
                    if (block + 1 < blocks) {
                        there = arrived();
                        multiply(other, there, 0, false);
                        products_wait<1>();
                        join(one, here, 0, block);
                        products_wait<0>();
                        join(other, there, 0, block + 1);
                    } else {
                        products_wait<0>();
                        join(one, here, 0, block);
                    }
                } else {
                    for (int block = 0; block < blocks; ++block) {
                        SUM part[SUMS];
                        int here = arrived();
#pragma unroll
                        for (int w = 0; w < WAVES; ++w) {
                            multiply(part, here, w, false);
                            products_wait<0>();
                            join(part, here, w, block);
                        }
                    }
                }
            }
            if constexpr (TOKENS_LEFT) {
                u8* mine = leaving + group * 64 * 128;
#pragma unroll
                for (int c = 0; c < N / 64; ++c) {  // 64 columns of 64 tokens leave at a time, 128 bytes a row
                    typename JOB::Ends ends[16];
#pragma unroll
                    for (int i = 0; i < 16; ++i) ends[i] = job.column_ends(tile, 64 * c + 8 * (i >> 1) + 2 * (lane & 3) + (i & 1));
#pragma unroll
                    for (int w = 0; w < WAVES; ++w) {
                        int top = (group * WAVES + w) * 64;
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            int row = 16 * (lane >> 5) + 8 * h + (lane & 31) / 4;
                            auto end = job.row_end(tile, top + row);
#pragma unroll
                            for (int j = 0; j < 8; ++j) {
                                const SUM* sums = total[w] + 32 * c + 4 * j + 2 * h;
                                *(unsigned*)(mine + place(row, j) + 4 * (lane & 3)) =
                                    job.pair(job.end(sums[0], end, ends[2 * j]), job.end(sums[1], end, ends[2 * j + 1]));
                            }
                        }
                        group_meets(group);
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            int row = (lane >> 3) + 16 * i, v = lane & 7, column = 64 * c + 8 * v;
                            uint4 q = *(const uint4*)(mine + place(row, v));
                            if (top + row < tile.rows && column < tile.columns) {
                                unsigned short* to = (unsigned short*)job.out + (tile.token + top + row) * job.columns + tile.column + column;
                                if (job.vectors && column + 8 <= tile.columns) {
                                    *(uint4*)to = q;
                                } else {
                                    const unsigned pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                                    for (int e = 0; e < 8; ++e)
                                        if (column + e < tile.columns) to[e] = (unsigned short)(pairs[e >> 1] >> 16 * (e & 1));
                                }
                            }
                        }
                        group_meets(group);
                    }
                }
            } else {
                SUM* results = (SUM*)leaving;
#pragma unroll
                for (int w = 0; w < WAVES; ++w)
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) {
                        int row = (BESIDE ? 0 : group * WAVES + w) * 64 + 16 * (lane >> 5) + 8 * (i >> 1 & 1) + (lane & 31) / 4;
                        int token = (BESIDE ? group * N : 0) + 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
                        results[token * PITCH + row] = total[w][i];
                    }
                some_meet(128 * GROUPS);
                job.write(tile, results, PITCH, WEIGHTS, own, 128 * GROUPS);
                some_meet(128 * GROUPS);
            }
        }
    }
    cluster_meets();  // the other block may still bring tiles here, or announce that it needs no more
}

#endif
