// Products of 8-bit operands whose tiles the copy engine brings: out[m, n] = sum_k a[m, k] b[n, k].
//
// A cluster's blocks take neighbouring tiles and fetch for each other what they share. Where there are few tokens a block
// is alone, since one that waits for another costs more than what both would read. One thread of the first group asks for
// 128 bytes of k of all rows at a time, as many stages ahead as shared memory has room for; the other groups multiply. Sums
// of int8 are exact and stay on the tensor cores. Those of e4m3 leave them after 128 products, since they keep too few bits
// there, for float32: one group adds up while the other multiplies, and where registers suffice a group multiplies the next
// stage at the same time. Which operand has the 64 rows of an instruction, how wide tiles are and how many blocks and
// groups share them does not show in a sum. Scales for each 128 of k come with their stage too: at few tokens nothing else
// is ahead of its use.
#pragma once
#include "copy_engine.cuh"
#include "fp8_tiles.cuh"

#if VT_TILES

// A kernel's shape. TOKENS, WEIGHTS: rows of a block's tile. GROUPS multiply: the rows of the left operand are dealt out to
// them. TOKENS_LEFT: the tokens are the left operand, whose 64 rows an instruction takes. A cluster has ALIKE blocks of the
// same tokens by APART of the same weights.
template <int TOKENS_, int WEIGHTS_, int GROUPS_, bool TOKENS_LEFT_, int ALIKE_, int APART_> struct Form {
    static constexpr int TOKENS = TOKENS_, WEIGHTS = WEIGHTS_, GROUPS = GROUPS_, ALIKE = ALIKE_, APART = APART_;
    static constexpr bool TOKENS_LEFT = TOKENS_LEFT_;
};

// JOB: what the tiles are and what becomes of their sums, of type SUM and EXACT or not: grid, tiles(), tile(number), depth,
// where there are scales for each 128 of k (SCALED) token_scales(), weight_scales(), scale_at(block), scale(word, block),
// and in the end write() or, where TOKENS_LEFT, column_ends(), row_end(), end(), pair(), columns, vectors, out.
template <class FORM, class JOB>
VT_FN void multiply_loaded(const TensorMap& tokens_map, const TensorMap& weights_map, const JOB& job, int stages, u8* memory) {
    constexpr int TOKENS = FORM::TOKENS, WEIGHTS = FORM::WEIGHTS, GROUPS = FORM::GROUPS;
    constexpr bool TOKENS_LEFT = FORM::TOKENS_LEFT;
    constexpr int ALIKE = TOGETHER(FORM::ALIKE), APART = TOGETHER(FORM::APART), BLOCKS = ALIKE * APART;
    constexpr int LEFT = TOKENS_LEFT ? TOKENS : WEIGHTS, RIGHT = TOKENS_LEFT ? WEIGHTS : TOKENS;
    constexpr int N = RIGHT, WAVES = LEFT / (64 * GROUPS), SUMS = N / 2;
    constexpr int STAGE = (TOKENS + WEIGHTS) * K_TILE, PITCH = WEIGHTS + 4;
    constexpr int TOKEN_PIECE = TOKENS / FORM::ALIKE, WEIGHT_PIECE = WEIGHTS / FORM::APART;
    constexpr int LEAVING = TOKENS_LEFT ? GROUPS * 64 * 128 : TOKENS * PITCH * 4;
    constexpr int SCALERS = TOKENS > 64 ? 64 : 32;  // threads that fetch scales
    // Registers of a thread that fetches, or multiplies: a block has no more of them than it was started with, and who asks
    // for more waits for ever.
    constexpr int STARTED = GROUPS == 1 ? 240 : 168, LITTLE = 40, MUCH = GROUPS == 1 ? 240 : 232;
    static_assert(LITTLE + GROUPS * MUCH <= (1 + GROUPS) * STARTED && GROUPS <= 2, "");
    typedef typename JOB::SUM SUM;
    u8 *tiles = memory + (-(u64)memory & 1023), *leaving = tiles + stages * STAGE;
    u64 *full = (u64*)(leaving + LEAVING), *empty = full + MOST_STAGES;
    unsigned *weight_words = (unsigned*)(empty + MOST_STAGES), *words = weight_words + MOST_STAGES;  // scales: one, TOKENS a stage
    int thread = (int)threadIdx.x, rank = block_of_cluster(), across = rank % ALIKE, down = rank / ALIKE;
    int blocks = (int)((job.depth + 127) / K_TILE), stage = 0, parity = 0, ahead = 0;
    int all = (int)job.template tiles<TOKENS * APART, WEIGHTS * ALIKE>(), step = (int)job.grid / BLOCKS, first_number = (int)blockIdx.x / BLOCKS;
    auto tile_at = [&](int number) {
        Tile tile = job.template tile<TOKENS * APART, WEIGHTS * ALIKE>(number);
        tile.column += across * WEIGHTS;
        tile.columns -= across * WEIGHTS;
        if (tile.columns > WEIGHTS) tile.columns = WEIGHTS;
        if (APART > 1) {
            tile.token += down * TOKENS;
            tile.tokens -= down * TOKENS, tile.rows -= down * TOKENS;
            if (tile.tokens > TOKENS) tile.tokens = TOKENS;
            if (tile.rows > TOKENS) tile.rows = TOKENS;
            if (tile.rows <= 0) tile.token -= down * TOKENS, tile.tokens = tile.rows = 0;  // nothing is left for this block
        }
        return tile;
    };
    auto bring_weights = [&](const Tile& tile, int block) {
        u8* to = tiles + stage * STAGE + TOKENS * K_TILE;
        int row = (int)(tile.expert * job.columns + tile.column);
        barrier_expect(full + stage, STAGE);
#pragma unroll
        for (int i = 0; i < FORM::APART / APART; ++i) {
            int first = (down + i) * WEIGHT_PIECE;
            load_tile_for<APART>(to + first * K_TILE, weights_map, full + stage, block * K_TILE, row + first, across, ALIKE);
        }
    };
    auto bring_tokens = [&](const Tile& tile, int block) {
        u8* to = tiles + stage * STAGE;
#pragma unroll
        for (int i = 0; i < FORM::ALIKE / ALIKE; ++i) {
            int first = (across + i) * TOKEN_PIECE;
            load_tile_for<ALIKE>(to + first * K_TILE, tokens_map, full + stage, block * K_TILE, (int)tile.token + first, down * ALIKE, 1);
        }
    };
    auto go_on = [&] {
        if (++stage == stages) stage = 0, parity ^= 1;
    };
    if (thread == 0) {
        map_ahead(tokens_map);
        map_ahead(weights_map);
        for (int s = 0; s < stages; ++s) {
            barrier_init(full + s, JOB::SCALED ? 2 + SCALERS : 1);
            barrier_init(empty + s, (ALIKE + APART - 1) * 4 * GROUPS);
        }
        barriers_ready();
        if (APART == 1 && first_number < all) {  // what only this block needs does not wait for the others
            Tile tile = tile_at(first_number);
            if (tile.expert >= 0)
#pragma unroll 1
                for (ahead = stages < blocks ? stages : blocks; stage < ahead; ++stage) bring_weights(tile, stage);
            stage = 0;
        }
    }
    cluster_in_step();
    if (thread < FETCHING) {
        registers_down<LITTLE>();
        if (thread == 0) {
            for (int number = first_number; number < all; number += step) {
                Tile tile = tile_at(number);
                if (tile.expert < 0) continue;
#pragma unroll 1
                for (int block = 0; block < blocks; ++block) {
                    if (--ahead < 0) {
                        barrier_wait(empty + stage, parity ^ 1);
                        bring_weights(tile, block);
                    }
                    bring_tokens(tile, block);
                    go_on();
                }
            }
        } else if (JOB::SCALED && thread >= 32 && thread < 32 + SCALERS) {
            if constexpr (JOB::SCALED) {
                constexpr int EACH = (TOKENS + SCALERS - 1) / SCALERS;
                for (int number = first_number; number < all; number += step) {
                    Tile tile = tile_at(number);
                    if (tile.expert < 0) continue;
                    const unsigned* scales = job.token_scales(tile, 0);
                    unsigned from[EACH];
#pragma unroll
                    for (int i = 0; i < EACH; ++i) {
                        int token = thread - 32 + SCALERS * i;
                        from[i] = (unsigned)(token < tile.tokens ? token : 0) * (unsigned)job.scale_row;
                    }
#pragma unroll 1
                    for (int block = 0; block < blocks; ++block) {
                        barrier_wait(empty + stage, parity ^ 1);
                        const unsigned* here = scales + job.scale_at(block);
#pragma unroll
                        for (int i = 0; i < EACH; ++i)
                            if (TOKENS >= SCALERS || thread - 32 < TOKENS) copy_word(words + stage * TOKENS + thread - 32 + SCALERS * i, here + from[i]);
                        barrier_arrive_with_copies(full + stage);
                        go_on();
                    }
                }
                copies_arrive();
            }
        } else if (JOB::SCALED && thread == 96) {
            if constexpr (JOB::SCALED) {
                for (int number = first_number; number < all; number += step) {
                    Tile tile = tile_at(number);
                    if (tile.expert < 0) continue;
                    const float* weights = job.weight_scales(tile);
#pragma unroll 1
                    for (int block = 0; block < blocks; ++block) {
                        barrier_wait(empty + stage, parity ^ 1);
                        copy_word(weight_words + stage, weights + block);
                        barrier_arrive_with_copies(full + stage);
                        go_on();
                    }
                }
                copies_arrive();
            }
        }
    } else {
        registers_up<MUCH>();
        int own = thread - FETCHING, group = same_in_warp(own >> 7), lane = own & 127;
        int mate = lane & 31;  // a block that shares this one's tokens or weights hears of what is read
        bool tells = mate < BLOCKS && (mate % ALIKE == across || mate / ALIKE == down);
        auto mates_empty = barriers_of(empty, tells ? mate : rank);
        u64 left = tile_of(tiles + (TOKENS_LEFT ? 0 : TOKENS * K_TILE) + group * WAVES * 64 * K_TILE);
        u64 right = tile_of(tiles + (TOKENS_LEFT ? TOKENS * K_TILE : 0));
        SUM total[WAVES][SUMS];
        for (int number = first_number; number < all; number += step) {
            Tile tile = tile_at(number);
#pragma unroll
            for (int w = 0; w < WAVES; ++w)
#pragma unroll
                for (int i = 0; i < SUMS; ++i) total[w][i] = 0;
            if (tile.expert >= 0 && blocks > 0) {
                auto arrived = [&] {
                    barrier_wait(full + stage, parity);
                    int here = stage;
                    go_on();
                    return here;
                };
                auto multiply = [&](SUM(&part)[SUMS], int from, int wave, bool add) {
                    u64 a = beyond(left, from * STAGE + wave * 64 * K_TILE), b = beyond(right, from * STAGE);
                    products_begin();
#pragma unroll
                    for (int s = 0; s < K_TILE / 32; ++s) multiply_tile(part, further(a, s), further(b, s), add || s > 0);
                    products_close();
                };
                auto release = [&](int from) {
                    lanes_meet();
                    barrier_arrive_if(tells, mates_empty, from);
                };
                // `part` joins the sums as soon as all products, or all but the last stage's, are done. Scales are read before.
                auto join = [&](bool last, SUM(&part)[SUMS], int from, int wave, int block) {
                    auto done = [&] {
                        if (last) products_wait<0>();
                        else products_wait<1>();
                        products_there(part);
                    };
                    if constexpr (!JOB::SCALED) {
                        done();
                        if (wave == WAVES - 1) release(from);
#pragma unroll
                        for (int i = 0; i < SUMS; ++i) total[wave][i] += part[i];
                    } else if constexpr (TOKENS_LEFT) {
                        const unsigned* mine = words + from * TOKENS + (group * WAVES + wave) * 64 + 16 * (lane >> 5) + (lane & 31) / 4;
                        float weight = vt_float((int)weight_words[from]);
                        float upper = job.scale(mine[0], block) * weight, lower = job.scale(mine[8], block) * weight;
                        done();
                        if (wave == WAVES - 1) release(from);
#pragma unroll
                        for (int i = 0; i < SUMS; ++i) total[wave][i] = vt_fma(i & 2 ? lower : upper, part[i], total[wave][i]);
                    } else {
                        const unsigned* mine = words + from * TOKENS + 2 * (lane & 3);
                        float weight = vt_float((int)weight_words[from]), even[N / 8], odd[N / 8];
#pragma unroll
                        for (int i = 0; i < N / 8; ++i) {
                            even[i] = job.scale(mine[8 * i], block) * weight;
                            odd[i] = job.scale(mine[8 * i + 1], block) * weight;
                        }
                        done();
                        release(from);
#pragma unroll
                        for (int i = 0; i < SUMS; ++i) total[wave][i] = vt_fma(i & 1 ? odd[i / 4] : even[i / 4], part[i], total[wave][i]);
                    }
                    products_there(total[wave]);
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
                        join(false, one, here, 0, block);
                        here = arrived();
                        multiply(one, here, 0, false);
                        join(false, other, there, 0, block + 1);
                    }
                    if (block + 1 < blocks) {
                        there = arrived();
                        multiply(other, there, 0, false);
                        join(false, one, here, 0, block);
                        join(true, other, there, 0, block + 1);
                    } else {
                        join(true, one, here, 0, block);
                    }
                } else {
                    for (int block = 0; block < blocks; ++block) {
                        SUM part[SUMS];
                        int here = arrived();
#pragma unroll
                        for (int w = 0; w < WAVES; ++w) {
                            multiply(part, here, w, false);
                            join(true, part, here, w, block);
                        }
                    }
                }
            }
            lane = thread_from_here() & 127;
            if constexpr (TOKENS_LEFT) {
                u8* mine = leaving + group * 64 * 128;
                typename JOB::RowEnd rows[WAVES][2];
#pragma unroll
                for (int i = 0; i < 2 * WAVES; ++i)
                    rows[i >> 1][i & 1] = job.row_end(tile, (group * WAVES + (i >> 1)) * 64 + 16 * (lane >> 5) + 8 * (i & 1) + (lane & 31) / 4);
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
#pragma unroll
                            for (int j = 0; j < 8; ++j) {
                                const SUM* sums = total[w] + 32 * c + 4 * j + 2 * h;
                                *(unsigned*)(mine + place(row, j) + 4 * (lane & 3)) =
                                    job.pair(job.end(sums[0], rows[w][h], ends[2 * j]), job.end(sums[1], rows[w][h], ends[2 * j + 1]));
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
                        int row = (group * WAVES + w) * 64 + 16 * (lane >> 5) + 8 * (i >> 1 & 1) + (lane & 31) / 4;
                        int token = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
                        results[token * PITCH + row] = total[w][i];
                    }
                some_meet(128 * GROUPS);
                job.write(tile, results, PITCH, WEIGHTS, own, 128 * GROUPS);
                some_meet(128 * GROUPS);
            }
        }
    }
    cluster_in_step();  // the other block may still bring tiles here, or announce that it needs no more
}

#endif
