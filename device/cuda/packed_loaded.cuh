// Products with packed weights on Hopper, for formats and operands of several kinds: w4a16_loaded.cuh.
//
// A group of four warps unpacks 64 columns of weights into registers, as left operands of the products by the warp group,
// while those of the stage before are under way. The copy engine brings rows of `a`, 128 bytes of each a stage, each block
// of a cluster its share of them for all; four more warps send for words and what stands beside them. A block has GROUPS
// times 64 columns. Where rows are few, LANES groups have the same columns and take chains in turn; sums then wait in
// shared memory. Chain sums are added in float32 from the first on, each summed by tensor cores from its first k to its
// last, whatever the tile.
#pragma once
#include "wgmma_registers.cuh"

#define LOADED_STAGES 24  // at most
#define LOADED_TEAMS 8    // at most

#if VT_TILES

#ifdef __CUDACC__
#define CLUSTER_DIMS(BLOCKS) __cluster_dims__(BLOCKS, 1, 1)
constexpr VT_FN int cluster_of(int blocks) { return blocks; }
// `load_tile_for_all` for clusters of so many blocks.
template <int BLOCKS> VT_FN void load_tile_for(void* to, const TensorMap& map, u64* barrier, int x, int y) {
    if constexpr (BLOCKS == 1)
        load_tile(to, map, barrier, x, y);
    else
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1, {%4, %5}], [%2], %3;"
                     ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)),
                       "h"((unsigned short)((1 << BLOCKS) - 1)), "r"(x), "r"(y) : "memory");
}
#else
#define CLUSTER_DIMS(BLOCKS)
constexpr int cluster_of(int) { return 1; }
template <int> void load_tile_for(void* to, const TensorMap& map, u64* barrier, int x, int y) { load_tile(to, map, barrier, x, y); }
#endif

// What a block is to do: `rows` rows of `a` from `first` on, of which it takes every `apart`-th tile from `top` on; stages of
// 128 bytes, of which at most `length` make a chain; columns from `left` on.
struct LoadedWork {
    i64 first, columns, left;
    int rows, top, apart, chunks, length, stages, vectors;
};

// JOB has OWN bytes of each 64 columns in a stage, and
//   sender<GROUPS>(thread, column_of): whose send(here, chunk) copies them, a thread of 128 its part;
//   begin(group's first column): what the unpacking group keeps;  unpack(a, mine, warp, lane);  multiply(sums, a, rows);
//   column(warp, g, h): the one of 64 that is row 16 warp + g + 8 h of the left operand;
//   end(sum, column): the result's bits.
template <class JOB, int ROWS, int GROUPS, int LANES, int BLOCKS>
VT_FN void packed_loaded(JOB& job, const LoadedWork& work, const TensorMap& rows_map, unsigned short* out, u8* memory) {
    constexpr int SUMS = ROWS / 2, SHARE = ROWS / BLOCKS, TEAMS = GROUPS * LANES, IN_CLUSTER = cluster_of(BLOCKS);
    constexpr int STAGE = (ROWS * 128 + GROUPS * JOB::OWN + 1023) / 1024 * 1024;
    int stages = work.stages, thread = (int)threadIdx.x, rank = IN_CLUSTER == 1 ? 0 : block_of_cluster();
    u8 *tiles = memory + (-(u64)memory & 1023), *leaving = tiles + stages * STAGE;
    float* sums = (float*)(leaving + GROUPS * ROWS * 128);
    u64 *full = (u64*)(sums + (LANES > 1 ? GROUPS * SUMS * 128 : 0)), *empty = full + LOADED_STAGES, *turns = empty + LOADED_STAGES;
    u64* words = turns + LOADED_TEAMS;  // what threads bring has barriers that count no bytes
    int length = work.length, chunks = work.chunks, chains = (chunks + length - 1) / length;
    auto column_of = [&](int group) {  // where there is none, the last ones once more
        i64 n = work.left + group * 64;
        return n < work.columns ? n : work.columns - 64;
    };
    // Chunks of a chain: the last one may have fewer.
    auto chunks_of = [&](int chain) {
        return chain >= chains ? 0 : chain + 1 < chains ? length : chunks - chain * length;
    };
    if (thread == 0) {
        map_ahead(rows_map);
        for (int s = 0; s < stages; ++s) {
            barrier_init(words + s, 128);
            barrier_init(full + s, 1);
            barrier_init(empty + s, IN_CLUSTER * 4 * GROUPS);
        }
        for (int each = 0; each < TEAMS; ++each) barrier_init(turns + each, 128);
        barriers_ready();
    }
    cluster_meets();
    if (thread < 128) {
        registers_down<40>();
        auto sender = job.template sender<GROUPS>(thread, column_of);
        constexpr int AHEAD = ROWS >= 128 ? 4 : 8;  // stages whose copies are under way, fewer than there are
        int stage = 0, parity = 0, sent = 0, behind = 0;
        auto announce = [&] {  // what was sent for AHEAD stages before is there
            barrier_arrive(words + behind);
            if (++behind == stages) behind = 0;
        };
        for (int top = work.top; top < work.rows; top += work.apart)
            for (int first = 0; first < chains; first += LANES)
                for (int at = 0; at < length; ++at)
#pragma unroll 1
                    for (int lane = 0; lane < LANES; ++lane) {  // a stage is a lane's, used or not
                        int chunk = (first + lane) * length + at;
                        bool used = at < chunks_of(first + lane);
                        if (LANES == 1 && !used) continue;
                        barrier_wait(empty + stage, parity ^ 1);
                        u8* here = tiles + stage * STAGE;
                        if (thread == 0) {
                            if (used) {
                                barrier_expect(full + stage, ROWS * 128);
#pragma unroll
                                for (int i = 0; i < BLOCKS / IN_CLUSTER; ++i) {
                                    int part = (rank + i) * SHARE;
                                    load_tile_for<IN_CLUSTER>(here + part * 128, rows_map, full + stage, chunk * 128,
                                                              (int)work.first + top + part);
                                }
                            } else {
                                barrier_arrive(full + stage);
                            }
                        }
                        if (used) sender.send(here + ROWS * 128, chunk);
                        copies_close();
                        if (++sent > AHEAD) {
                            copies_wait<AHEAD>();
                            announce();
                        }
                        if (++stage == stages) stage = 0, parity ^= 1;
                    }
        copies_wait<0>();
        for (int left = sent < AHEAD ? sent : AHEAD; left > 0; --left) announce();
    } else {
        if constexpr (TEAMS == 1) registers_up<240>();
        else if constexpr (TEAMS == 2) registers_up<232>();
        else registers_up<TEAMS == 3 ? 152 : 104>();
        int own = thread - 128, team = own >> 7, group = team % GROUPS, lane_of_chains = team / GROUPS;
        int lane = own & 31, warp = own >> 5 & 3, g = lane >> 2, stage = lane_of_chains, parity = 0, turn = 0;
        job.begin(column_of(group), warp, lane);
        float part[SUMS], total[SUMS];
        auto release = [&](int from) {
            lanes_meet();
            if (lane < IN_CLUSTER) barrier_arrive_at(empty + from, lane);
        };
        auto onward = [&] {
            stage += LANES;
            if (stage >= stages) stage = lane_of_chains, parity ^= 1;
        };
        unsigned even[4][4], odd[4][4];
        int to_do = 0, before = -1;
        auto unpack = [&](unsigned(&a)[4][4]) {
            barrier_wait(words + stage, parity);
            job.unpack(a, (const char*)tiles + stage * STAGE + ROWS * 128 + group * JOB::OWN, warp, lane);
        };
        auto step = [&](unsigned(&a)[4][4], unsigned(&next)[4][4]) {
            u64 tokens = tile_of(tiles + stage * STAGE);
            barrier_wait(full + stage, parity);
            products_begin();
#pragma unroll
            for (int s = 0; s < 4; ++s) job.multiply(part, a[s], further(tokens, s));
            products_close();
            products_wait<1>();
            if (before >= 0) release(before);
            before = stage;
            onward();
            if (--to_do > 0) unpack(next);
        };
        for (int top = work.top; top < work.rows; top += work.apart) {
#pragma unroll
            for (int i = 0; i < SUMS; ++i) total[i] = -0.0f;
            for (int chain = lane_of_chains; chain < chains; chain += LANES) to_do += chunks_of(chain);
            if (to_do > 0) unpack(even);
#pragma unroll 1
            for (int chain = lane_of_chains; chain < chains; chain += LANES) {
                int here = chunks_of(chain);
#pragma unroll
                for (int i = 0; i < SUMS; ++i) part[i] = 0.0f;
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
                if constexpr (LANES == 1) {
#pragma unroll
                    for (int i = 0; i < SUMS; ++i) total[i] += part[i];
                } else {  // sums go from lane to lane
                    float* mine = sums + group * SUMS * 128 + (own & 127);
                    if (chain > 0) {
                        barrier_wait(turns + team, turn);
                        turn ^= 1;
#pragma unroll
                        for (int i = 0; i < SUMS; ++i) part[i] = mine[i * 128] + part[i];
                    }
                    if (chain + 1 < chains) {
#pragma unroll
                        for (int i = 0; i < SUMS; ++i) mine[i * 128] = part[i];
                        barrier_arrive(turns + (team + GROUPS) % TEAMS);
                    }
                }
            }
            if (before >= 0) release(before);
            before = -1;
            if constexpr (LANES > 1) {  // stages that the last chains leave to this lane
                int used = 0, all = (chains + LANES - 1) / LANES * length;
                for (int chain = lane_of_chains; chain < chains; chain += LANES) used += chunks_of(chain);
                for (; used < all; ++used) {
                    barrier_wait(words + stage, parity);
                    barrier_wait(full + stage, parity);
                    release(stage);
                    onward();
                }
            }
            if (lane_of_chains == (chains - 1) % LANES) {
                u8* mine = leaving + group * ROWS * 128;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int column = job.column(warp, g, h);
#pragma unroll
                    for (int i = 0; i < SUMS; i += 4)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            int row = 2 * i + 2 * (lane & 3) + e;
                            float x = LANES == 1 ? total[i + 2 * h + e] : part[i + 2 * h + e];
                            unsigned short bits = job.end(x, column_of(group) + column);
                            *(unsigned short*)(mine + place(row, column >> 3) + 2 * (column & 7)) = bits;
                        }
                }
                group_meets(group);
                i64 n = work.left + group * 64;
                if (n < work.columns)
#pragma unroll
                    for (int i = 0; i < (ROWS + 15) / 16; ++i) {
                        int row = ((own & 127) >> 3) + 16 * i, v = own & 7;
                        if (row < ROWS && top + row < work.rows) {
                            uint4 q = *(const uint4*)(mine + place(row, v));
                            unsigned short* to = out + (i64)(top + row) * work.columns + n + 8 * v;
                            if (work.vectors) {
                                *(uint4*)to = q;
                            } else {
                                const unsigned pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                                for (int e = 0; e < 8; ++e) to[e] = (unsigned short)(pairs[e >> 1] >> 16 * (e & 1));
                            }
                        }
                    }
            }
            some_meet(128 * TEAMS);  // before sums and results of the next tile take their places
        }
    }
    cluster_meets();
}
#endif
