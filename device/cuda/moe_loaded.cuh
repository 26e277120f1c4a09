// Experts' products with packed weights on Hopper, for experts of many pairs, for the formats of moe_marlin_loaded.cuh and
// moe_wna16_loaded.cuh: left operands from registers as in packed_loaded.cuh, rows of x copied one by one, from where their
// pairs have them.
//
// As many blocks as there are multiprocessors go through tiles of pairs by strips of columns, strips of a tile after one
// another: four warps copy for the next while the groups of four that multiply are at the last. A tile of few pairs takes
// narrower products. Each of TEAM chains of K is summed by tensor cores from its first k to its last, whatever the tile,
// and chains are added in float32 from the first on.
#pragma once
#include "moe_tiles.cuh"
#include "wgmma_registers.cuh"

#define LOADED_STAGES 24  // at most

#if VT_TILES

// JOB has OWN bytes of each 64 columns in a stage, chains of every TEAM-th RUN stages, and
//   take(expert);  sender<GROUPS>(thread, column_of): whose send(here, chunk) copies them, a thread of 128 its part;
//   begin(group's first column, warp, lane): what the unpacking group keeps;  unpack(a, mine, warp, lane);
//   column(warp, g, h): the one of 64 that is row 16 warp + g + 8 h of the left operand;
//   end(sum, factor, h): the element of its column, weighted where there are factors.
template <class JOB, int KIND, int ROWS, int GROUPS>
VT_FN void moe_loaded(JOB& job, MOE_PARAMETERS, i64 whole, i64 stages_given, i64 blocks, u8* memory) {
    constexpr int SUMS = ROWS / 2, ACROSS = GROUPS * COLUMNS, PIECES = ROWS / 16, RUN = JOB::RUN;
    constexpr int STAGE = (ROWS * 128 + GROUPS * JOB::OWN + 1023) / 1024 * 1024;
    int stages = (int)stages_given, thread = (int)threadIdx.x;
    u8 *places = memory + (-(u64)memory & 1023), *leaving = places + stages * STAGE;
    u64 *full = (u64*)(leaving + GROUPS * ROWS * 128), *empty = full + LOADED_STAGES;
    int* held = (int*)(empty + LOADED_STAGES);  // of each group two tiles' pairs and factors
    unsigned strips = (unsigned)((columns + ACROSS - 1) / ACROSS), items = (unsigned)count * strips;
    int turns = (int)(depth / CHUNK) / RUN, chains = turns < TEAM ? turns : TEAM;
    auto chunks_of = [&](int chain) { return (turns - chain + TEAM - 1) / TEAM * RUN; };
    auto works = [&](const Tile& tile) { return tile.rows > 0 && tile.expert >= 0 && tile.expert < experts; };
    if (thread == 0) {
        for (int s = 0; s < stages; ++s) {
            barrier_init(full + s, 128);
            barrier_init(empty + s, 4 * GROUPS);
        }
        barriers_ready();
    }
    __syncthreads();
    if (thread < 128) {
        registers_down<56>();
        constexpr int AHEAD = ROWS >= 128 ? 4 : 8;  // stages whose copies are under way, fewer than there are
        int stage = 0, parity = 0, sent = 0, behind = 0;
        auto announce = [&] {  // what was sent for AHEAD stages before is there
            stores_to_products();
            barrier_arrive(full + behind);
            if (++behind == stages) behind = 0;
        };
        for (unsigned item = blockIdx.x; item < items; item += (unsigned)blocks) {
            unsigned number = item / strips;
            const Tile tile = tile_of(number, ids, order, tiles);
            if (!works(tile)) continue;
            i64 left = (i64)(item - number * strips) * ACROSS;
            unsigned lines[PIECES];  // in vectors: 2^36 bytes of rows at most
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                int row = (thread >> 3) + 16 * i;
                lines[i] = row < tile.rows ? row_of(tile.pair(row), choices) * (unsigned)(depth / 8) + (thread & 7) : 0;
            }
            job.take(tile.expert);
            auto sender = job.template sender<GROUPS>(thread, [&](int group) {  // where there is none, the last ones once more
                i64 n = left + group * COLUMNS;
                return n < columns ? n : columns - COLUMNS;
            });
            for (int chain = 0; chain < chains; ++chain)
                for (int at = 0, here = chunks_of(chain); at < here; ++at) {
                    int chunk = (chain + at / RUN * TEAM) * RUN + at % RUN;
                    barrier_wait(empty + stage, parity ^ 1);
                    u8* to = places + stage * STAGE;
#pragma unroll
                    for (int i = 0; i < PIECES; ++i)
                        if ((thread >> 3) + 16 * i < tile.rows)
                            copy_async(to + i * 2048 + place(thread >> 3, thread & 7), (const char*)x + (i64)(lines[i] + chunk * 8u) * 16);
                    sender.send(to + ROWS * 128, chunk);
                    copies_close();
                    if (++sent > AHEAD) {
                        copies_wait<AHEAD>();
                        announce();
                    }
                    if (++stage == stages) stage = 0, parity ^= 1;
                }
        }
        copies_wait<0>();
        for (int rest = sent < AHEAD ? sent : AHEAD; rest > 0; --rest) announce();
    } else {
        if constexpr (GROUPS == 1) registers_up<240>();
        else if constexpr (GROUPS == 2) registers_up<224>();
        else registers_up<GROUPS == 3 ? 152 : 104>();
        int own = thread & 127, group = (thread >> 7) - 1, lane = own & 31, warp = own >> 5, g = lane >> 2;
        int stage = 0, parity = 0, kept = 0;
        u8* mine = leaving + group * ROWS * 128;
        float part[SUMS], total[SUMS];
        unsigned even[4][4], odd[4][4];
        auto release = [&](int from) {
            lanes_meet();
            if (lane == 0) barrier_arrive(empty + from);
        };
        auto unpack = [&](unsigned(&a)[4][4]) {
            barrier_wait(full + stage, parity);
            job.unpack(a, (const char*)places + stage * STAGE + ROWS * 128 + group * JOB::OWN, warp, lane);
        };
        for (unsigned item = blockIdx.x; item < items; item += (unsigned)blocks) {
            unsigned number = item / strips;
            const Tile tile = tile_of(number, ids, order, tiles);
            i64 left = (i64)(item - number * strips) * ACROSS, n = left + group * COLUMNS;
            if (!works(tile)) {
                fill_out<KIND, ACROSS>(tile, left, columns, out, thread - 128, 128 * GROUPS);
                continue;
            }
            int pair_here = 0;
            float factor_here = 0.0f;
            if (own < tile.rows) {
                pair_here = tile.pair(own);
                if (factors != nullptr) factor_here = factors[pair_here];
            }
            job.take(tile.expert);
            job.begin(n < columns ? n : columns - COLUMNS, warp, lane);
#pragma unroll
            for (int i = 0; i < SUMS; ++i) total[i] = -0.0f;
            int to_do = turns * RUN, before = -1;
            auto go = [&](auto some) {  // products of so many sums of a thread
                constexpr int WIDTH = decltype(some)::value;
                float(&sums)[WIDTH] = *(float(*)[WIDTH])part;
                auto step = [&](unsigned(&a)[4][4], unsigned(&next)[4][4]) {
                    u64 tokens = tile_of(places + stage * STAGE);
                    products_begin();
#pragma unroll
                    for (int s = 0; s < 4; ++s) multiply_registers<KIND>(sums, a[s], further(tokens, s), 1);
                    products_close();
                    products_wait<1>();
                    if (before >= 0) release(before);
                    before = stage;
                    if (++stage == stages) stage = 0, parity ^= 1;
                    if (--to_do > 0) unpack(next);
                };
                unpack(even);
#pragma unroll 1
                for (int chain = 0; chain < chains; ++chain) {
                    int here = chunks_of(chain);
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) part[i] = 0.0f;
#pragma unroll 1
                    for (int i = 1; i < here; i += 2) {
                        step(even, odd);
                        step(odd, even);
                    }
                    if (here & 1) step(even, odd);
                    products_wait<0>();
                    if (here & 1) {  // only now are operands free
#pragma unroll
                        for (int s = 0; s < 4; ++s)
#pragma unroll
                            for (int r = 0; r < 4; ++r) even[s][r] = odd[s][r];
                    }
#pragma unroll
                    for (int i = 0; i < WIDTH; ++i) total[i] += part[i];
                }
            };
            if (tile.rows > ROWS / 2) go(Number<SUMS>());
            else if (tile.rows > ROWS / 4) go(Number<SUMS / 2>());
            else go(Number<SUMS / 4>());
            release(before);
            int* pairs = held + (2 * group + kept) * 2 * ROWS;
            float* by = (float*)(pairs + ROWS);
            kept ^= 1;
            if (own < ROWS) pairs[own] = pair_here, by[own] = factor_here;
            group_meets(group);  // the tile before has left, too
#pragma unroll
            for (int i = 0; i < SUMS; i += 4)
                if (2 * i < tile.rows) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        int row = 2 * i + 2 * (lane & 3) + e;
                        float factor = by[row];
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            int column = job.column(warp, g, h);
                            *(unsigned short*)(mine + place(row, column >> 3) + 2 * (column & 7)) = job.end(total[i + 2 * h + e], factors != nullptr, factor, h);
                        }
                    }
                }
            group_meets(group);
            if (n < columns)
#pragma unroll
                for (int i = 0; i < PIECES; ++i) {
                    int row = (own >> 3) + 16 * i, v = own & 7;
                    if (row < tile.rows) {
                        uint4 q = *(const uint4*)(mine + place(row, v));
                        unsigned short* to = (unsigned short*)out + pairs[row] * columns + n + 8 * v;
                        if (whole) {
                            *(uint4*)to = q;
                        } else {
                            const unsigned twos[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                            for (int e = 0; e < 8; ++e) to[e] = (unsigned short)(twos[e >> 1] >> 16 * (e & 1));
                        }
                    }
                }
        }
    }
}
#endif
