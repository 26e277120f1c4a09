// Products of 16-bit activations with Marlin's weights of 4 and 8 bits on Hopper, for more rows than marlin_stream.cuh
// takes, added up in its order. Groups of four warps have 64 columns each, a warp the 16 of one tile: it unpacks them into
// registers as left operands, while the products of the 16 k before are under way. The copy engine brings rows of `a`,
// half of them for both blocks of a cluster, beside words, scales and zero points.
#pragma once
#include "marlin_stream.cuh"

#define LOADED_STAGES 12  // at most

#if VT_TILES

// ROWS of `a` a tile, GROUPS of 64 columns. stages: 64 k each, of which `length` make a chain.
template <int KIND, int BITS, int ROWS, int GROUPS>
VT_FN void marlin_loaded(const TensorMap& rows_map, i64 rows, i64 columns, i64 depth, const void* words, const void* scales,
                         const void* zeros, void* out, i64 group_size, i64 zero, const void* factors, const void* bias,
                         i64 length, i64 vectors, i64 stages_, u8* memory) {
    typedef Pairs<KIND> P;
    constexpr int WORDS = 512 * BITS, OWN = WORDS + 128 + 32, SUMS = ROWS / 2, HALF = ROWS / 2;
    constexpr int STAGE = (ROWS * 128 + GROUPS * OWN + 1023) / 1024 * 1024;
    int stages = (int)stages_, thread = (int)threadIdx.x, rank = block_of_cluster();
    u8 *tiles = memory + (-(u64)memory & 1023), *leaving = tiles + stages * STAGE;
    u64 *full = (u64*)(leaving + GROUPS * ROWS * 128), *empty = full + LOADED_STAGES;
    int down = (int)((rows + ROWS - 1) / ROWS), cluster = (int)blockIdx.x / CLUSTER, across = cluster / down;
    int top = (cluster - across * down) * ROWS, chunks = (int)(depth / CHUNK), chunks_a_group = (int)(group_size / CHUNK);
    i64 left = (i64)(across * CLUSTER + rank) * GROUPS * COLUMNS;
    auto column_of = [&](int group) {  // where there is none, the last ones once more
        i64 n = left + group * COLUMNS;
        return n < columns ? n : columns - COLUMNS;
    };
    if (thread == 0) {
        map_ahead(rows_map);
        for (int s = 0; s < stages; ++s) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, CLUSTER * 4 * GROUPS);
        }
        barriers_ready();
    }
    cluster_meets();
    int stage = 0, parity = 0;
    if (thread < 128) {
        registers_down<40>();
        if (thread < 32) {
            // Lane 4 g + q copies quarter q of group g's words, lane 16 + g its scales, lane 24 + g its zero points.
            int kind = thread >> 4, which = kind ? thread & 7 : thread >> 2;
            bool zeros_lane = kind && (thread & 8);
            bool mine = which < GROUPS && (!kind || (zeros_lane ? zeros != nullptr : scales != nullptr));
            i64 n = column_of(which < GROUPS ? which : 0);
            const char* from = !kind ? (const char*)words + (n + (thread & 3) * columns) * (2 * BITS)
                                     : zeros_lane ? (const char*)zeros + n / 2 : (const char*)scales + n * 2;
            i64 step = !kind ? columns * (8 * BITS) : zeros_lane ? columns / 2 : columns * 2;
            int bytes = !kind ? WORDS / 4 : zeros_lane ? 32 : 128;
            int to = ROWS * 128 + (which < GROUPS ? which : 0) * OWN + (!kind ? (thread & 3) * (WORDS / 4) : zeros_lane ? WORDS + 128 : WORDS);
            int expected = ROWS * 128 + GROUPS * (WORDS + (scales != nullptr ? 128 : 0) + (zeros != nullptr ? 32 : 0));
            for (int chunk = 0, of_group = 0; chunk < chunks; ++chunk) {
                barrier_wait(empty + stage, parity ^ 1);
                u8* here = tiles + stage * STAGE;
                if (thread == 0) {
                    barrier_expect(full + stage, expected);
#pragma unroll
                    for (int i = 0; i < 2 / CLUSTER; ++i) {
                        int first = (rank + i) * HALF;
                        load_tile_for_all(here + first * 128, rows_map, full + stage, chunk * 128, top + first);
                    }
                }
                lanes_meet();
                if (mine) load_bytes(here + to, from, full + stage, bytes);
                if (!kind) {
                    from += step;
                } else if (++of_group == chunks_a_group) {
                    of_group = 0;
                    from += step;
                }
                if (++stage == stages) stage = 0, parity ^= 1;
            }
            // Those who multiply take one stage more than there are, whatever lies in it.
            barrier_wait(empty + stage, parity ^ 1);
            if (thread == 0) barrier_arrive(full + stage);
        }
    } else {
        registers_up<GROUPS == 2 ? 232 : 240>();
        int own = thread - 128, group = own >> 7, lane = own & 31, warp = own >> 5 & 3, g = lane >> 2;
        // The mask is in a register, as long as the compiler cannot know: depth < 2^31.
        constexpr unsigned KEPT = BITS == 4 ? 0x000f000fu : KIND == F16 ? 0x00ff00ffu : 0x007f007fu;
        unsigned mask = KEPT + (unsigned)(depth >> 32), scale[2] = {P::ONE, P::ONE}, minus[2];
        minus[0] = minus[1] = P::MINUS_BASE + (unsigned)zero * 0x10001u;
        float part[SUMS], total[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) total[i] = -0.0f, part[i] = 0.0f;
        unsigned raw[4][BITS / 4], a[2][4];
        // The warp's 16 columns x 16 k as left operands, each weight rounded as `Group::weights` has it.
        auto unpack = [&](int s) {
            unsigned w = raw[s][0], codes[4] = {w, w >> 8, w >> 4, w >> 12};
            if constexpr (BITS == 8) codes[1] = raw[s][1], codes[2] = w >> 8, codes[3] = raw[s][1] >> 8;
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                unsigned less = BITS == 8 && KIND == BF16 ? (codes[r] & 0x00800080u) ^ 0xc380c380u : minus[r & 1];
                a[s & 1][r] = fma_pair<KIND>(fma_pair<KIND>((codes[r] & mask) | P::BASE, P::ONE, less), scale[r & 1], P::MINUS_ZERO);
            }
        };
        // What the next 64 k need, as soon as it is there; the operands of the first 16.
        auto take = [&] {
            barrier_wait(full + stage, parity);
            const char* mine = (const char*)tiles + stage * STAGE + ROWS * 128 + group * OWN;
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                if constexpr (BITS == 4) {
                    raw[s][0] = word_at(mine, s * 512 + lane * 16 + warp * 4);
                } else {
                    const uint2 w = *(const uint2*)(mine + s * 1024 + lane * 32 + warp * 8);
                    raw[s][0] = w.x, raw[s][1] = w.y;
                }
            }
            if (scales != nullptr) {
                unsigned both = word_at(mine, WORDS + g * 16 + warp * 4);
                scale[0] = pick<0x1010>(both, 0), scale[1] = pick<0x3232>(both, 0);
            }
            if (zeros != nullptr) {
                unsigned word = word_at(mine, WORDS + 128 + g * 4);
#pragma unroll
                for (int h = 0; h < 2; ++h) minus[h] = P::MINUS_BASE + ((word >> 4 * (warp + 4 * h) & 15u) + (unsigned)zero) * 0x10001u;
            }
            unpack(0);
        };
        // Operands are made while the products before are under way, none of which is as the loop goes round: the
        // assembler would wait for each of them.
        take();
#pragma unroll 1
        for (int chunk = 0; chunk < chunks;) {
            int stop = chunk + (int)length < chunks ? chunk + (int)length : chunks;
            bool fresh = true;
#pragma unroll 1
            for (; chunk < stop; ++chunk) {
                u64 tokens = tile_of(tiles + stage * STAGE);
                int before = stage;
                if (++stage == stages) stage = 0, parity ^= 1;
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    products_begin();
                    multiply_registers<KIND>(part, a[s & 1], further(tokens, s), s > 0 || !fresh);
                    products_close();
                    products_wait<1>();
                    if (s < 3) unpack(s + 1);
                    else take();
                }
                products_wait<0>();
                lanes_meet();
                if (lane < CLUSTER) barrier_arrive_at(empty + before, lane);
                fresh = false;
            }
#pragma unroll
            for (int i = 0; i < SUMS; ++i) total[i] += part[i];
        }

        u8* mine = leaving + group * ROWS * 128;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            i64 n = column_of(group) + 16 * warp + 8 * h + g;
#pragma unroll
            for (int i = 0; i < SUMS; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    int row = 2 * i + 2 * (lane & 3) + e;
                    unsigned both = pair<KIND>(finished<KIND, BITS>(total[i + 2 * h + e], n, factors, bias), 0.0f);
                    *(unsigned short*)(mine + place(row, 2 * warp + h) + 2 * g) = (unsigned short)both;
                }
        }
        group_meets(group);
        i64 n = left + group * COLUMNS;
        if (n < columns)
#pragma unroll
            for (int i = 0; i < ROWS / 16; ++i) {
                int row = ((own & 127) >> 3) + 16 * i, v = own & 7;
                if (top + row < rows) {
                    uint4 q = *(const uint4*)(mine + place(row, v));
                    unsigned short* to = (unsigned short*)out + (top + row) * columns + n + 8 * v;
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
    cluster_meets();
}

#define MARLIN_LOADED(NAME, KIND, BITS, ROWS, GROUPS)                                                                 \
    extern "C" __global__ void VT_CLUSTER __launch_bounds__(128 + 128 * GROUPS, 1)                                    \
        NAME(VT_MAP rows_map, i64 rows, i64 columns, i64 depth, const void* words, const void* scales,                \
             const void* zeros, void* out, i64 group, i64 zero, const void* factors, const void* bias, i64 length,    \
             i64 vectors, i64 stages) {                                                                               \
        VT_SHARED(memory);                                                                                            \
        marlin_loaded<KIND, BITS, ROWS, GROUPS>(rows_map, rows, columns, depth, words, scales, zeros, out, group, zero,   \
                                                factors, bias, length, vectors, stages, memory);                      \
    }
#endif
