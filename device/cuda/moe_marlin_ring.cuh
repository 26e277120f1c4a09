// Experts' products with Marlin's weights for few pairs an expert: the numbers of moe_packed.cuh, added up in its order.
//
// A warp has a ring of its own in shared memory, into which it sends for words, what stands beside them and rows of x many
// turns ahead, so that neither registers nor the latency of memory bound what is under way.
#pragma once
#include "moe_packed.cuh"
#include "w4a16.cuh"

// STAGES of a ring; what a stage holds: HIGH rows of x, words, scales and zero points.
template <int BITS, int EIGHTS> struct RingStage {
    static constexpr int ROWS = EIGHTS * 8 * CHUNK * 2, BESIDE = ROWS + MarlinWords<BITS>::BYTES, SIZE = BESIDE + 128 + 32;
};

template <int KIND, int BITS, int EIGHTS, int STAGES, class END>
VT_FN void moe_marlin_ring(const END& finished, MOE_PARAMETERS, i64 group, i64 bias_of_type, const char* words,
                           const char* scales, const char* zeros) {
    VT_SHARED(memory);
    typedef RingStage<BITS, EIGHTS> Stage;
    typedef MarlinWords<BITS> W;
    constexpr int HIGH = 8 * EIGHTS, HALVES = BITS / 4, PIECES = HIGH / 4;
    __shared__ int pairs[HIGH];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#if MOE_COLUMNS_FIRST
    unsigned across = (unsigned)(columns / COLUMNS), number = blockIdx.x / across, beside = blockIdx.x - number * across;
#else
    unsigned beside = blockIdx.x / (unsigned)count, number = blockIdx.x - beside * (unsigned)count;
#endif
    i64 first = (i64)beside * COLUMNS;
    const Tile tile = tile_of(number, ids, order, tiles);
    if (tile.rows == 0) return;
    if (tile.expert < 0 || tile.expert >= experts) {  // rows without an expert, or of one that there is not
        for (int at = threadIdx.x; at < tile.rows * COLUMNS; at += TEAM * 32)
            store_one(out, tile.pair(at / COLUMNS) * columns + first + at % COLUMNS,
                      tile.expert == NO_EXPERT ? 0.0f : VT_NAN, KIND);
        return;
    }
    if ((int)threadIdx.x < tile.rows) pairs[threadIdx.x] = tile.pair(threadIdx.x);

    const char* line[PIECES];  // what this lane copies of rows: 16 bytes of each fourth
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        int row = 4 * i + (lane >> 3);
        line[i] = (const char*)x + (tile.pair(row < tile.rows ? row : 0) / choices * depth + (lane & 7) * 8) * 2;
    }
    i64 groups = depth / group, quarter = W::quarter(columns);
    const char* word = words + (i64)tile.expert * (depth * columns * BITS / 8) + W::from(first, columns, lane);
    bool scaled = scales != nullptr, zeroed = zeros != nullptr, at_zeros = lane >= 8;
    bool has_beside = at_zeros ? zeroed && lane < 10 : scaled;
    const char* factor = at_zeros ? zeros + ((i64)tile.expert * groups * columns + first) / 2 + (lane - 8) * 16
                                  : scales + ((i64)tile.expert * groups * columns + first) * 2 + lane * 16;
    i64 factor_bytes = at_zeros ? columns / 2 : columns * 2;
    char* ring = (char*)memory + warp * (STAGES * Stage::SIZE);
    int turns = (int)(depth / CHUNK), to_line = swizzled<8>(lane >> 3, lane & 7), ahead = warp, stage_ahead = 0;
    auto send = [&] {
        if (ahead < turns) {
            char* stage = ring + stage_ahead;
            const char* from = word + ahead * 4ll * quarter;
#pragma unroll
            for (int s = 0; s < 4; ++s)
#pragma unroll
                for (int h = 0; h < HALVES; ++h)
                    copy_async(stage + Stage::ROWS + (s * HALVES + h) * 512 + lane * 16, from + s * quarter + h * 16);
            if (has_beside)
                copy_async(stage + Stage::BESIDE + lane * 16, factor + (unsigned)ahead * CHUNK / (unsigned)group * factor_bytes);
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
                if (4 * i + (lane >> 3) < tile.rows)
                    copy_async(stage + ((i * 512 + to_line) ^ (i & 1) << 6), line[i] + ahead * (CHUNK * 2ll));
        }
        ahead += TEAM;
        stage_ahead = stage_ahead == (STAGES - 1) * Stage::SIZE ? 0 : stage_ahead + Stage::SIZE;
        copies_close();
    };
    float sum[4][EIGHTS][4] = {};
    Group<KIND, W> of;
    of.clear((int)bias_of_type);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) send();
    int stage_here = 0, row = lane & 7, which = lane >> 3;
    for (int turn = warp; turn < turns; turn += TEAM) {
        copies_wait<STAGES - 2>();
        warp_meets();
        send();
        const char *stage = ring + stage_here, *mine = stage + Stage::ROWS;
        of.take(stage + Stage::BESIDE, stage + Stage::BESIDE + 128, scaled, zeroed, (int)bias_of_type, 0, lane);
        unsigned b[EIGHTS == 1 ? 1 : EIGHTS / 2][4];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            if constexpr (EIGHTS == 1) {  // of two steps
                if (s % 2 == 0) fetch_matrices(b[0], stage + swizzled<8>(row, 2 * s + which));
            } else {
#pragma unroll
                for (int e = 0; e < EIGHTS / 2; ++e)
                    fetch_matrices(b[e], stage + swizzled<8>(16 * e + row + (which >> 1) * 8, 2 * s + (which & 1)));
            }
            unsigned raw[4][4];
            W::codes(raw, mine, s, lane, 0);
#pragma unroll
            for (int t = 0; t < 4; ++t) {
#pragma unroll
                for (int r = 0; r < 4; ++r) raw[t][r] = of.weights(raw[t][r], 2 * t + (r & 1), (int)bias_of_type);
                if constexpr (EIGHTS == 1) {
                    multiply<KIND>(sum[t][0], raw[t], b[0][2 * (s & 1)], b[0][2 * (s & 1) + 1]);
                } else {
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e)
                        multiply_if<KIND>(e == 0 || tile.rows > 8 * e, sum[t][e], raw[t], b[e / 2][2 * (e & 1)], b[e / 2][2 * (e & 1) + 1]);
                }
            }
        }
        stage_here = stage_here == (STAGES - 1) * Stage::SIZE ? 0 : stage_here + Stage::SIZE;
    }
    copies_wait<0>();
    __syncthreads();  // sums lie where rings were
    float* sums = (float*)memory;
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[(warp * HIGH + 8 * e + 2 * (lane & 3) + (i & 1)) * PITCH + 16 * t + 8 * (i >> 1) + (lane >> 2)] = sum[t][e][i];
    __syncthreads();
    for (int at = threadIdx.x; at < tile.rows * COLUMNS; at += TEAM * 32) {
        int m = at / COLUMNS, inside = at % COLUMNS, pair = pairs[m];
        i64 column = first + inside;
        float total = sums[m * PITCH + inside];
#pragma unroll
        for (int other = 1; other < TEAM; ++other) total += sums[(other * HIGH + m) * PITCH + inside];
        store_one(out, pair * columns + column, finished.end(total, tile.expert, column, factors, pair), KIND);
    }
}
