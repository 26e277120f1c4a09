// Products of FP4 codes in rows on Hopper: the numbers of fp4_product.cuh, chains added up in its order.
//
// The copy engine brings codes as tiles of 64 columns x 256 k beside their scales, and rows of `a`, in the order of
// strided_rows.cuh, 128 k at a time, through two rings of each of LANES teams, which have the same columns and take chains
// in turn. A team is GROUPS groups of four warps, each of 64 columns. A lane has 32 neighbouring k of 128, so that it
// reads 16 bytes of a row of codes and the scales that are theirs. Codes become left operands in registers while the
// products of the 64 k before are under way. BLOCKS of a cluster have the same rows, of which each brings its share for all.
#pragma once
#include "early.cuh"
#include "elected.cuh"
#include "fp4_operands.cuh"
#include "strided_rows.cuh"

#if VT_TILES

#define FP4_SEAM_CHAINS 8  // of K, at most
#define FP4_TILES_STAGES 14      // of rows, of a team, at most

template <int SCALE, int ROWS, int GROUPS, int LANES, int BLOCKS> struct Fp4Tiles {
    static constexpr int HALF = TileScales<SCALE>::BYTES, SCALES_AT = GROUPS * 8192, UNIT = SCALES_AT + 2 * HALF, STAGE = ROWS * 256;
    static constexpr int SUMS = LANES > 1 ? GROUPS * ROWS * 256 : 0, LEAVING = GROUPS * ROWS * 128;
    static constexpr int ROOM = (FP4_TILES_SHARED - FP4_TILES_BARRIERS - 1024 - SUMS - LEAVING) / LANES;
    // As many k of rows as of codes are under way, but for the unit that is being multiplied.
    static constexpr int FITTING = (ROOM + 2 * STAGE) / (UNIT + 2 * STAGE), UNITS = FITTING < 2 ? 2 : FITTING > 5 ? 5 : FITTING;
    static constexpr int LEFT = (ROOM - UNITS * UNIT) / STAGE, STAGES = LEFT < FP4_TILES_STAGES ? LEFT : FP4_TILES_STAGES;
    static_assert(STAGES >= 2 && ROWS / BLOCKS % 8 == 0 && LANES * (2 * STAGES + 2 * UNITS) + LANES * GROUPS <= FP4_TILES_BARRIERS / 8, "");
};

// Which tiles of a result a cluster has, rows beside each other: every so many-th, or, where that would leave many clusters
// idle in the end, a share of all their chains. Between two shares may lie a seam, of which a tile has one at most.
struct TileRun {
    int tiles, chains, clusters;
    bool dealt;

    VT_MEMBER int begin(int cluster) const { return (int)((i64)tiles * chains * cluster / clusters); }
};
// What a cluster has, tile by tile: its chains from `from` to `to`.
struct TileShare {
    int at, end, tile, from, to;

    VT_MEMBER TileShare(const TileRun& run, int cluster)
        : at(run.dealt ? run.begin(cluster) : cluster * run.chains), end(run.dealt ? run.begin(cluster + 1) : run.tiles * run.chains) {}
    VT_MEMBER bool next(const TileRun& run) {
        if (at >= end) return false;
        tile = at / run.chains, from = at - tile * run.chains;
        to = from + end - at < run.chains ? from + end - at : run.chains;
        at += run.dealt ? to - from : run.clusters * run.chains;
        return true;
    }
};

// `tiles` of GROUPS times 64 columns and ROWS rows, each in BLOCKS; `length` times 128 k make a chain. Scales lie in tiles
// of 128 columns, `pitch` bytes of them side by side. states: where chains' sums of tiles with a seam are left, for
// `fp4_seams`, or none.
template <int SCALE, int ROWS, int GROUPS, int LANES, int BLOCKS>
VT_FN void fp4_tiles(const TensorMap& rows_map, const TensorMap& words_map, i64 rows, i64 columns, i64 depth,
                     const char* scales, i64 pitch, const float* factor, void* out, i64 kind, i64 length_, i64 vectors, i64 tiles_, i64 blocks,
                     float4* states, u8* memory) {
    typedef Fp4Tiles<SCALE, ROWS, GROUPS, LANES, BLOCKS> F;
    constexpr int IN_CLUSTER = TOGETHER(BLOCKS), TEAMS = GROUPS * LANES, SUMS = ROWS / 2, SHARE = ROWS / BLOCKS;
    constexpr bool DEALS = ROWS < 128 || GROUPS > 1;  // the others are for few tiles
    constexpr int STAGES = F::STAGES, UNITS = F::UNITS;
    int thread = (int)threadIdx.x, rank = IN_CLUSTER == 1 ? 0 : block_of_cluster(), length = (int)length_;
    u64 *full = (u64*)memory, *empty = full + LANES * STAGES, *there = empty + LANES * STAGES, *used = there + LANES * UNITS;
    u64* turns = used + LANES * UNITS;
    u8 *units = memory + FP4_TILES_BARRIERS + (-(u64)(memory + FP4_TILES_BARRIERS) & 1023), *stages = units + LANES * UNITS * F::UNIT;
    float* sums = (float*)(stages + LANES * STAGES * F::STAGE);
    u8* leaving = (u8*)sums + F::SUMS;
    int chunks = (int)(depth / FP4_CHUNK), chains = (chunks + length - 1) / length, down = (int)((rows + ROWS - 1) / ROWS);
    int cluster = (int)blockIdx.x / IN_CLUSTER;
    const TileRun run = {(int)tiles_ * (BLOCKS / IN_CLUSTER), chains, (int)blocks / IN_CLUSTER, states != nullptr};
    auto top_of = [&](int tile) { return tile % down * ROWS; };
    auto left_of = [&](int tile) { return (i64)(tile / down * IN_CLUSTER + rank) * (GROUPS * COLUMNS); };
    auto chunks_of = [&](int chain) { return chain >= chains ? 0 : chain + 1 < chains ? length : chunks - chain * length; };
    if (thread == 0) {
        map_ahead(rows_map);
        map_ahead(words_map);
        for (int s = 0; s < LANES * STAGES; ++s) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, IN_CLUSTER * 4 * GROUPS);
        }
        for (int s = 0; s < LANES * UNITS; ++s) {
            barrier_init(there + s, 1);
            barrier_init(used + s, 4 * GROUPS);
        }
        for (int i = 0; i < TEAMS; ++i) barrier_init(turns + i, 128);
        barriers_ready();
    }
    cluster_meets();
    if (thread < 128) {
        registers_down<TEAMS == 2 ? 56 : 40>();
        int lane = same_in_warp(thread >> 5), stage = 0, parity = 1, unit = 0, unit_parity = 1;
        if (lane < LANES && one_of_warp()) {
            u64 *ready = full + lane * STAGES, *free = empty + lane * STAGES, *brought = there + lane * UNITS, *spent = used + lane * UNITS;
            u8 *my_units = units + lane * UNITS * F::UNIT, *my_stages = stages + lane * STAGES * F::STAGE;
            for (TileShare share(run, cluster); share.next(run);) {
                int top = top_of(share.tile);
                i64 left = left_of(share.tile);
                const char* beside = scales + ((left < columns ? left : columns - 1) >> 7) * pitch;
                for (int chain = share.from + lane; chain < share.to; chain += LANES) {
                    int chunk = chain * length, end = chunk + chunks_of(chain);
#pragma unroll 1
                    for (; chunk < end; chunk += 2) {
                        int bytes = chunk + 1 < end ? 2 * F::HALF : F::HALF;
                        u8* here = my_units + unit * F::UNIT;
                        barrier_wait(spent + unit, unit_parity);
                        barrier_expect(brought + unit, F::SCALES_AT + bytes);
#pragma unroll
                        for (int c = 0; c < GROUPS; ++c)
                            load_tile(here + c * 8192, words_map, brought + unit, chunk * (FP4_CHUNK / 2), (int)left + c * COLUMNS);
                        load_bytes(here + F::SCALES_AT, beside + (i64)chunk * F::HALF, brought + unit, bytes);
                        if (++unit == UNITS) unit = 0, unit_parity ^= 1;
                        int until = chunk + 2 < end ? chunk + 2 : end;
#pragma unroll 1
                        for (int step = chunk; step < until; ++step) {
                            barrier_wait(free + stage, parity);
                            barrier_expect(ready + stage, F::STAGE);
#pragma unroll
                            for (int half = 0; half < 2; ++half)
#pragma unroll
                                for (int i = 0; i < BLOCKS / IN_CLUSTER; ++i) {
                                    int part = (rank + i) * SHARE;
                                    load_tile_for<IN_CLUSTER>(my_stages + stage * F::STAGE + (half * ROWS + part) * 128, rows_map,
                                                              ready + stage, step * 256 + half * 128, top + part, 0, 1);
                                }
                            if (++stage == STAGES) stage = 0, parity ^= 1;
                        }
                    }
                }
            }
        }
    } else {
        if constexpr (TEAMS == 1) registers_up<240>();
        else if constexpr (TEAMS == 2) registers_up<224>();
        else registers_up<TEAMS == 3 ? 152 : 104>();
        int own = thread - 128, team = same_in_warp(own >> 7), group = team % GROUPS, lane_of_chains = team / GROUPS;
        int lane = own & 31, warp = own >> 5 & 3, t = lane & 3;
        int row = column_of_lane(own & 127);
        const SharedPlace ready = place_in(full + lane_of_chains * STAGES), free = place_in(empty + lane_of_chains * STAGES);
        const SharedPlace brought = place_in(there + lane_of_chains * UNITS), spent = place_in(used + lane_of_chains * UNITS);
        const SharedPlace my_units = place_in(units + lane_of_chains * UNITS * F::UNIT);
        const u64 my_stages = tile_in(place_in(stages + lane_of_chains * STAGES * F::STAGE));
        const auto theirs = barriers_of(empty + lane_of_chains * STAGES, lane & IN_CLUSTER - 1);
        const int codes_at = group * 8192 + row * 128 + ((t ^ (row & 7)) << 4);
        int stage = 0, parity = 0, unit = 0, unit_parity = 0, turn = 0, to_do = 0, before = 0, scales_at = 0;
        int arrives = lane < IN_CLUSTER;
        TileScales<SCALE> held;
        held.begin(factor);
        uint4 q[2];
        float part[SUMS], total[LANES > 1 ? 1 : SUMS];
        unsigned even[4][4], odd[4][4];
        // Of 256 k the first or the second 128, which may be the last ones of a chain.
        auto take = [&](auto which, bool last) {
            constexpr int second = decltype(which)::value;
            if (!second) wait_at(brought + 8 * unit, unit_parity);
            SharedPlace here = my_units + unit * F::UNIT;
            q[0] = four_at(here + (codes_at ^ (second ? 64 : 0)));
            q[1] = four_at(here + (codes_at ^ (second ? 64 : 0)) + 1024);
            held.take(here + (scales_at + second * F::HALF));
            if (second || last) {
                lanes_meet();
                arrive_at_if(lane == 0, spent + 8 * unit);
                if (++unit == UNITS) unit = 0, unit_parity ^= 1;
            }
        };
        auto unpack = [&](unsigned(&a)[4][4], int half) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) unpack_word(a, j, h, half ? (j ? q[h].w : q[h].z) : (j ? q[h].y : q[h].x), held, half);
            held.finish(a);
        };
        auto multiply_half = [&](const unsigned(&a)[4][4], u64 tokens, bool adds) {
            products_begin();
#pragma unroll
            for (int s = 0; s < 4; ++s) multiply_registers<BF16>(part, a[s], further(tokens, s), adds || s > 0);
            products_close();
            products_wait<1>();  // those before are over, and their operands free
        };
        auto release = [&](bool there_is) {
            lanes_meet();
            if constexpr (IN_CLUSTER == 1) arrive_at_if(arrives && there_is, free + 8 * before);
            else barrier_arrive_if(arrives && there_is, theirs, before);
        };
#pragma unroll 1
        for (TileShare share(run, cluster); share.next(run);) {
            i64 left = left_of(share.tile) + group * COLUMNS;
            int top = top_of(share.tile), first = share.from + lane_of_chains;
            bool whole = !DEALS || share.from == 0 && share.to == chains;
            float4* seam = states + ((i64)((share.to < chains ? cluster : cluster - 1) * IN_CLUSTER + rank) * GROUPS + group) * chains * (SUMS * 32) + (own & 127);
            scales_at = F::SCALES_AT + (row & 31) * 16 + ((int)(left >> 5 & 3) + (warp >> 1)) * 4 + TileScales<SCALE>::place(t);
            for (int chain = first; chain < share.to; chain += LANES) to_do += chunks_of(chain);
            if constexpr (LANES == 1)
#pragma unroll
                for (int i = 0; i < SUMS; ++i) total[i] = -0.0f;
            if (to_do > 0) {
                take(Number<0>(), chunks_of(first) == 1);
                unpack(even, 0);
            }
#pragma unroll 1
            for (int chain = first; chain < share.to; chain += LANES) {
                int count = chunks_of(chain);
                to_do -= count;
                auto products = [&](bool adds) {
                    wait_at(ready + 8 * stage, parity);
                    u64 tokens = beyond(my_stages, stage * F::STAGE);
                    multiply_half(even, tokens, adds);
                    release(adds);
                    unpack(odd, 1);
                    multiply_half(odd, beyond(tokens, ROWS * 128), true);
                    before = stage;
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                };
#pragma unroll 1
                for (int left = count; left > 0; left -= 2) {
                    products(left < count);
                    if (left > 1) {
                        take(Number<1>(), left == 2);
                        unpack(even, 0);
                        products(true);
                    }
                    int more = left > 2 ? left - 2 : to_do > 0 ? chunks_of(chain + LANES) : 0;  // of the next chain too
                    if (more > 0) {
                        take(Number<0>(), more == 1);
                        unpack(even, 0);
                    }
                }
                products_wait<0>();
                products_there(part);
                release(true);
                if (!whole) {
#pragma unroll
                    for (int i = 0; i < SUMS; i += 4) seam[(i64)chain * (SUMS * 32) + i * 32] = {part[i], part[i + 1], part[i + 2], part[i + 3]};
                } else if constexpr (LANES == 1) {
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
            if (whole && lane_of_chains == (chains - 1) % LANES) {
                u8* mine = leaving + group * ROWS * 128;
                if constexpr (LANES == 1) sums_leave<ROWS>(mine, total, held, factor, group, out, kind, rows, columns, top, left, vectors);
                else sums_leave<ROWS>(mine, part, held, factor, group, out, kind, rows, columns, top, left, vectors);
            }
            some_meet(128 * TEAMS);  // before sums and results of the next tile take their places
        }
    }
    cluster_meets();
}

// Adds up chains' sums of tiles with a seam; of a block of such a tile and a group, 128 threads have eight rows.
template <int SCALE, int ROWS, int GROUPS, int BLOCKS>
VT_FN void fp4_seams(i64 rows, i64 columns, i64 chains_, i64 tiles_, i64 blocks, const float4* states, const float* factor, void* out, i64 kind) {
    constexpr int IN_CLUSTER = TOGETHER(BLOCKS), EIGHTS = ROWS / 8;
    after_others();
    int chains = (int)chains_, thread = (int)threadIdx.x, lane = thread & 31;
    int v = (int)blockIdx.x % EIGHTS, group = (int)blockIdx.x / EIGHTS % GROUPS, block = (int)blockIdx.x / (EIGHTS * GROUPS);
    int cluster = block / IN_CLUSTER, rank = block - cluster * IN_CLUSTER, down = (int)((rows + ROWS - 1) / ROWS);
    const TileRun run = {(int)tiles_ * (BLOCKS / IN_CLUSTER), chains, (int)blocks / IN_CLUSTER, true};
    int seam = run.begin(cluster + 1), tile = seam / chains, row = tile % down * ROWS + 8 * v + 2 * (lane & 3);
    if (cluster + 1 >= run.clusters || seam == tile * chains) return;
    i64 n = (i64)((tile / down * IN_CLUSTER + rank) * GROUPS + group) * COLUMNS + column_of_lane(thread);
    const float4* from = states + ((i64)block * GROUPS + group) * chains * (EIGHTS * 128) + v * 128 + thread;
    float4 x[FP4_SEAM_CHAINS];  // all under way at once
#pragma unroll
    for (int c = 0; c < FP4_SEAM_CHAINS; ++c)
        if (c < chains) x[c] = from[(i64)c * (EIGHTS * 128)];
#pragma unroll
    for (int c = 1; c < FP4_SEAM_CHAINS; ++c)
        if (c < chains) x[0].x += x[c].x, x[0].y += x[c].y, x[0].z += x[c].z, x[0].w += x[c].w;
    const float sums[4] = {x[0].x, x[0].y, x[0].z, x[0].w};
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (row + e < rows && n + 8 * h < columns) {
                const float one[1] = {TileScales<SCALE>::last(sums[2 * h + e], factor)};
                store(out, (row + e) * columns + n + 8 * h, one, (int)kind);
            }
}

#define FP4_TILES(NAME, SCALE, ROWS, GROUPS, LANES, BLOCKS)                                                             \
    extern "C" __global__ void VT_CLUSTER_OF(BLOCKS) __launch_bounds__(128 + 128 * GROUPS * LANES, 1)                   \
        NAME##_tiles_##ROWS##_##GROUPS##_##LANES##_##BLOCKS(                                                            \
            VT_MAP rows_map, VT_MAP words_map, i64 rows, i64 columns, i64 depth, const char* scales, i64 pitch,         \
            const float* factor, void* out, i64 kind, i64 length, i64 vectors, i64 tiles, i64 blocks, float4* states) { \
        VT_SHARED(memory);                                                                                              \
        fp4_tiles<SCALE, ROWS, GROUPS, LANES, BLOCKS>(rows_map, words_map, rows, columns, depth, scales, pitch, factor, \
                                                      out, kind, length, vectors, tiles, blocks, states, memory);       \
    }
#define FP4_SEAMS_PARAMETERS                                                                                            \
    i64 rows, i64 columns, i64 chains, i64 tiles, i64 blocks, const float4 *states, const float *factor, void *out, i64 kind
#define FP4_SEAMS_NAMES rows, columns, chains, tiles, blocks, states, factor, out, kind
#define FP4_SEAMS(NAME, SCALE, ROWS, GROUPS, BLOCKS)                                                                    \
    extern "C" __global__ void __launch_bounds__(128, 1) NAME##_seams_##ROWS##_early(FP4_SEAMS_PARAMETERS) {                       \
        fp4_seams<SCALE, ROWS, GROUPS, BLOCKS>(FP4_SEAMS_NAMES);                                                 \
    }
// In the forms of device/fp4_tiles.py.
#define FP4_TILES_FORMS(NAME, SCALE)       \
    FP4_TILES(NAME, SCALE, 8, 1, 4, 1)     \
    FP4_TILES(NAME, SCALE, 16, 1, 4, 1)    \
    FP4_TILES(NAME, SCALE, 32, 1, 4, 1)    \
    FP4_TILES(NAME, SCALE, 64, 1, 2, 1)    \
    FP4_TILES(NAME, SCALE, 128, 1, 2, 2)   \
    FP4_TILES(NAME, SCALE, 128, 2, 1, 1)   \
    FP4_SEAMS(NAME, SCALE, 8, 1, 1)        \
    FP4_SEAMS(NAME, SCALE, 16, 1, 1)       \
    FP4_SEAMS(NAME, SCALE, 32, 1, 1)       \
    FP4_SEAMS(NAME, SCALE, 64, 1, 1)       \
    FP4_SEAMS(NAME, SCALE, 128, 2, 1)
#endif
