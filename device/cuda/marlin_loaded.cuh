// Products of 16-bit activations with weights in Marlin's tiles on Hopper, for more rows than marlin_stream.cuh takes, added
// up in its order. Groups of four warps have 64 columns each, a warp the 16 of one tile: it unpacks 64 k of them into
// registers as left operands, while the products of the 64 k before are under way. The copy engine brings rows of `a`, half
// of them for both blocks of a cluster, beside words, scales and zero points.
//
// Tiles that would begin when most others are done are cut into parts of K, which a block has each and *_join adds up.
#pragma once
#include "marlin_formats.cuh"

#define MARLIN_LOADED_STAGES 12  // at most
#define LOADED_PARTS 8  // of K, at most

#if VT_TILES

#define MARLIN_LOADED_PARAMETERS                                                                                      \
    VT_MAP rows_map, i64 rows, i64 columns, i64 depth, const void *words, const void *scales, const void *zeros,     \
        void *out, i64 group_size, i64 zero, const void *factors, const void *bias, i64 length, i64 vectors, i64 stages,        \
        i64 whole, float4 *states
#define MARLIN_LOADED_NAMES                                                                                           \
    rows_map, rows, columns, depth, words, scales, zeros, out, group_size, zero, factors, bias, length, vectors, stages, \
        whole, states

// Where cluster `number`'s tiles are: the first row, and the first column of its block `rank`.
struct Corner { int top; i64 left; };
template <int ROWS, int GROUPS> VT_FN Corner corner_of(int number, int rank, i64 rows) {
    int down = (int)((rows + ROWS - 1) / ROWS), across = number / down;
    return {(number - across * down) * ROWS, (i64)(across * CLUSTER + rank) * GROUPS * COLUMNS};
}

// ROWS of `a` a tile, GROUPS of 64 columns. stages: 64 k each, of which `length` make a chain. Blocks from `whole` on have
// one chain and leave their sums in `states`.
template <class W, int ROWS, int GROUPS>
VT_FN void marlin_loaded(const TensorMap& rows_map, i64 rows, i64 columns, i64 depth, const void* words, const void* scales,
                         const void* zeros, void* out, i64 group_size, i64 zero, const void* factors, const void* bias,
                         i64 length_, i64 vectors, i64 stages_, i64 whole, float4* states) {
    VT_SHARED(memory);
    typedef Stage<W, ROWS, GROUPS> S;
    constexpr int KIND = W::KIND, SUMS = ROWS / 2, HALF = ROWS / 2, HERE = GROUPS * COLUMNS;
    int stages = (int)stages_, length = (int)length_, thread = (int)threadIdx.x, rank = block_of_cluster();
    u8 *tiles = memory + (-(u64)memory & 1023), *leaving = tiles + stages * S::BYTES;
    u64 *full = (u64*)(leaving + GROUPS * ROWS * 128), *empty = full + MARLIN_LOADED_STAGES;
    int chunks = (int)(depth / CHUNK), parts = (chunks + length - 1) / length, beyond_whole = (int)blockIdx.x - (int)whole;
    bool parted = beyond_whole >= 0;
    int cluster = parted ? beyond_whole / CLUSTER : (int)blockIdx.x / CLUSTER, begin = 0, end = chunks;
    if (parted) {
        begin = cluster % parts * length, end = begin + length < chunks ? begin + length : chunks;
        cluster = (int)whole / CLUSTER + cluster / parts;
    }
    Corner corner = corner_of<ROWS, GROUPS>(cluster, rank, rows);
    int top = corner.top;
    i64 left = corner.left;
    bool there = left < columns;
    int wide = columns < HERE ? (int)columns : HERE;
    if (left + wide > columns) left = columns - wide;  // the last ones once more
    if (thread == 0) {
        map_ahead(rows_map);
        for (int s = 0; s < stages; ++s) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, CLUSTER * 4 * GROUPS);
        }
        barriers_ready();
    }
    if constexpr (W::SCALE_ROWS == 1)
        for (int s = 0; scales == nullptr && s < stages; ++s)
            for (int at = thread; at < S::SCALE_ROW / 4; at += (int)blockDim.x)
                ((unsigned*)(tiles + s * S::BYTES + S::SCALES))[at] = W::NO_SCALE;
    cluster_meets();
    int stage = 0, parity = 0;
    if (thread < 128) {
        registers_down<40>();
        int lane = thread & 31, turn = thread >> 5;
        Sender<W, S> sender(lane, wide, columns, group_size, words, scales, zeros);
        sender.begin(left, begin);
#pragma unroll 1
        for (int chunk = begin; chunk < end; ++chunk, --turn) {
            if (turn == 0) {
                turn = SENDERS;
                barrier_wait(empty + stage, parity ^ 1);
                u8* here = tiles + stage * S::BYTES;
                if (lane == 0) {
                    barrier_expect(full + stage, ROWS * 128 + sender.expected);
#pragma unroll
                    for (int i = 0; i < 2 / CLUSTER; ++i) {
                        int first = (rank + i) * HALF;
                        load_tile_for_all(here + first * 128, rows_map, full + stage, chunk * 128, top + first);
                    }
                }
                lanes_meet();
                sender.send(here, full + stage);
            }
            sender.onward();
            if (++stage == stages) stage = 0, parity ^= 1;
        }
    } else {
        registers_up<GROUPS == 2 ? 232 : 240>();
        int own = thread - 128, group = own >> 7, lane = own & 31, warp = own >> 5 & 3, g = lane >> 2;
        float part[SUMS], total[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) total[i] = -0.0f;
        typename W::template Held<1> held;
        held.begin(depth, zero);
        unsigned even[4][4], odd[4][4];
        int before = -1, left_to_take = end - begin;
        // The warp's 16 columns x 64 k, as soon as they are there.
        auto take = [&](unsigned(&a)[4][4]) {
            barrier_wait(full + stage, parity);
            const char* mine = (const char*)tiles + stage * S::BYTES;
            unsigned raw[4][W::TILE / 4];
#pragma unroll
            for (int s = 0; s < 4; ++s)
                take_words(raw[s], mine + S::WORDS + (s * GROUPS + group) * S::UNIT + lane * (4 * W::TILE) + warp * W::TILE);
            held.take(mine + S::SCALES + group * W::SCALE_BYTES, S::SCALE_ROW, mine + S::ZEROS + group * W::ZERO_BYTES, warp, g, zero);
#pragma unroll
            for (int s = 0; s < 4; ++s) held.operands(a[s], raw[s], s, 0, warp);
        };
        auto release = [&](int from) {
            lanes_meet();
            if (lane < CLUSTER) barrier_arrive_at(empty + from, lane);
        };
        auto step = [&](unsigned(&a)[4][4], unsigned(&next)[4][4]) {
            u64 tokens = tile_of(tiles + stage * S::BYTES);
            products_begin();
#pragma unroll
            for (int s = 0; s < 4; ++s) multiply_registers<KIND>(part, a[s], further(tokens, s), 1);
            products_close();
            products_wait<1>();
            if (before >= 0) release(before);
            before = stage;
            if (++stage == stages) stage = 0, parity ^= 1;
            if (--left_to_take > 0) take(next);
        };
        take(even);
#pragma unroll 1
        for (int chunk = begin; chunk < end; chunk += length) {
            int here = chunk + length < end ? length : end - chunk;
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
#pragma unroll
            for (int i = 0; i < SUMS; ++i) total[i] += part[i];
        }

        if (parted) {
            float4* to = states + ((i64)beyond_whole * GROUPS + group) * (SUMS / 4 * 128) + (own & 127);
#pragma unroll
            for (int i = 0; i < SUMS; i += 4) to[i * 32] = {total[i], total[i + 1], total[i + 2], total[i + 3]};
        } else {
            u8* mine = leaving + group * ROWS * 128;
            int column = group * COLUMNS;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                i64 n = left + column + 16 * warp + 8 * h + g;
                n = n < columns ? n : columns - 1;
#pragma unroll
                for (int i = 0; i < SUMS; i += 4)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        int row = 2 * i + 2 * (lane & 3) + e;
                        unsigned both = pair<KIND>(W::last(total[i + 2 * h + e], n, factors, bias), 0.0f);
                        *(unsigned short*)(mine + place(row, 2 * warp + h) + 2 * g) = (unsigned short)both;
                    }
            }
            group_meets(group);
            if (there && column < wide)
#pragma unroll
                for (int i = 0; i < ROWS / 16; ++i) {
                    int row = ((own & 127) >> 3) + 16 * i, v = own & 7;
                    if (top + row < rows) {
                        uint4 q = *(const uint4*)(mine + place(row, v));
                        unsigned short* to = (unsigned short*)out + (top + row) * columns + left + column + 8 * v;
                        if (vectors) {
                            *(uint4*)to = q;
                        } else {
                            const unsigned pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                            for (int e = 0; e < 8; ++e) to[e] = (unsigned short)(pairs[e >> 1] >> 16 * (e & 1));
                        }
                    }
                }
        }
    }
    cluster_meets();
}

// Adds up parts of tiles; a block is a vector of each thread's sums of a group.
template <class W, int ROWS, int GROUPS>
VT_FN void marlin_loaded_join(i64 rows, i64 columns, i64 parts_, i64 whole, const float4* states, const void* factors,
                              const void* bias, void* out) {
    constexpr int VECTORS = ROWS / 8;
    int thread = (int)threadIdx.x, lane = thread & 31, parts = (int)parts_, number = (int)blockIdx.x;
    int v = number % VECTORS, group = number / VECTORS % GROUPS, block = number / (VECTORS * GROUPS);
    int rank = block % CLUSTER, cluster = block / CLUSTER, wide = GROUPS * COLUMNS;
    Corner corner = corner_of<ROWS, GROUPS>((int)whole / CLUSTER + cluster, rank, rows);
    if (corner.left >= columns) return;
    if (corner.left + wide > columns) corner.left = columns - wide;
    const float4* from = states + (((i64)cluster * parts * CLUSTER + rank) * GROUPS + group) * (VECTORS * 128) + v * 128 + thread;
    float4 x[LOADED_PARTS];
#pragma unroll
    for (int p = 0; p < LOADED_PARTS; ++p)
        if (p < parts) x[p] = from[(i64)p * (CLUSTER * GROUPS * VECTORS * 128)];
#pragma unroll
    for (int p = 1; p < LOADED_PARTS; ++p)
        if (p < parts) x[0].x += x[p].x, x[0].y += x[p].y, x[0].z += x[p].z, x[0].w += x[p].w;
    const float sums[4] = {x[0].x, x[0].y, x[0].z, x[0].w};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        i64 n = corner.left + group * COLUMNS + (thread >> 5) * 16 + 8 * h + (lane >> 2);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            i64 row = corner.top + 8 * v + 2 * (lane & 3) + i;
            if (row < rows)
                ((unsigned short*)out)[row * columns + n] = (unsigned short)pair<W::KIND>(W::last(sums[2 * h + i], n, factors, bias), 0.0f);
        }
    }
}

#define MARLIN_LOADED(NAME, FORMAT, ROWS, GROUPS)                                                                     \
    extern "C" __global__ void VT_CLUSTER __launch_bounds__(128 + 128 * GROUPS, 1) NAME(MARLIN_LOADED_PARAMETERS) {   \
        marlin_loaded<FORMAT, ROWS, GROUPS>(MARLIN_LOADED_NAMES);                                                     \
    }
#define MARLIN_LOADED_FORMS(NAME, FORMAT)                                                                             \
    MARLIN_LOADED(NAME##_loaded_128_by_64, FORMAT, 128, 1)                                                            \
    MARLIN_LOADED(NAME##_loaded_128_by_128, FORMAT, 128, 2)                                                           \
    extern "C" __global__ void __launch_bounds__(128)                                                                 \
        NAME##_loaded_join(i64 rows, i64 columns, i64 parts, i64 whole, const float4* states, const void* factors,    \
                           const void* bias, void* out) {                                                             \
        marlin_loaded_join<FORMAT, 128, 2>(rows, columns, parts, whole, states, factors, bias, out);                  \
    }
#endif
