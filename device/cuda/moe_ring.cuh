// Products of rows of 16 bits with the packed matrix of the expert that each goes to: out[p, n] = sum_k x[row of p, k]
// W_e[n, k] for the pairs (choices of tokens) of each expert, as `moe_sort` of moe.cu has put them in order and cut them
// into tiles. Weights are the left operand. A block has a tile of pairs and the columns of a warp; each of its TEAM warps
// has a chain of K: every TEAM-th turn from its own number on. Chain sums meet in shared memory and are added from the
// first on. So K is cut in one way, whatever the number of pairs, and a pair has the same bytes in any batch.
//
// A warp has a ring of its own in shared memory, into which it sends for codes, what stands beside them and rows of x some
// turns ahead: what is under way is bound neither by registers nor by the time that memory takes.
#pragma once
#include "moe_tiles.cuh"

// W, the weights of one format: ACROSS (columns of a warp), DEEP (k of a turn), STEPS (of a turn, of two instructions),
// WHOLE (K is whole turns); open(expert, first column, lane, warp); own() bytes of a stage beside rows of x, for which
// send(mine) sends, the warp's next turn; place(row, v): where vector v of a row of x lies; small(): whether a turn has
// several groups; begin<SMALL>(mine, turn), step<SMALL>(mine, s), left<SMALL>(a, mine, t, s), right(b, rows, e, s): operands
// of tile t of 16 columns, and of eight rows; end(total, expert, column, pair): the element as it is stored.
template <int KIND, int EIGHTS, int STAGES, class W> VT_FN void moe_ring(W& weights, MOE_PARAMETERS) {
    VT_SHARED(memory);
    constexpr int HIGH = 8 * EIGHTS, ACROSS = W::ACROSS, SIXTEENS = ACROSS / 16, APART = ACROSS + 4;
    constexpr int VECTORS = W::DEEP / 8, ONCE = 32 / VECTORS, PIECES = HIGH / ONCE, LINE = W::DEEP * 2;
    int* pairs = (int*)memory;
    char* rings = (char*)memory + HIGH * 4;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    unsigned beside = blockIdx.x / (unsigned)count;
    i64 first = (i64)beside * ACROSS;
    const Tile tile = tile_of(blockIdx.x - beside * (unsigned)count, ids, order, tiles);
    if (left_out<KIND, ACROSS>(tile, experts, first, columns, out)) return;
    if ((int)threadIdx.x < tile.rows) pairs[threadIdx.x] = tile.pair(threadIdx.x);

    int vector = lane % VECTORS, own_row = lane / VECTORS;
    const char* line[PIECES];  // what this lane copies of rows of x: 16 bytes of every ONCE-th
    int to[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        int row = ONCE * i + own_row;
        line[i] = (const char*)x + (row_of(tile.pair(row < tile.rows ? row : 0), choices) * depth + warp * W::DEEP + vector * 8) * 2;
        to[i] = row * LINE + W::place(row, vector) * 16;
    }
    weights.open(tile.expert, first, lane, warp);
    int size = HIGH * LINE + weights.own(), stage_ahead = 0, turns = (int)((depth + W::DEEP - 1) / W::DEEP), ahead = warp;
    int left = (int)depth - warp * W::DEEP - vector * 8;  // k from this lane's of the turn that is sent for on
    char* ring = rings + warp * STAGES * size;
    auto send = [&] {
        if (ahead < turns) {
            char* stage = ring + stage_ahead;
            weights.send(stage + HIGH * LINE);
#pragma unroll
            for (int i = 0; i < PIECES; ++i)
                if (ONCE * i + own_row < tile.rows) {
                    if constexpr (W::WHOLE) copy_async(stage + to[i], line[i]);
                    else copy_or_zero(stage + to[i], line[i], left > 0);
                }
        }
#pragma unroll
        for (int i = 0; i < PIECES; ++i) line[i] += TEAM * W::DEEP * 2;
        ahead += TEAM, left -= TEAM * W::DEEP;
        stage_ahead = stage_ahead == (STAGES - 1) * size ? 0 : stage_ahead + size;
        copies_close();
    };
    float sum[SIXTEENS][EIGHTS][4] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) send();
    int stage_here = 0;
    auto products = [&](auto several) {
        constexpr bool SMALL = decltype(several)::value != 0;
#pragma unroll 1
        for (int turn = warp; turn < turns; turn += TEAM) {
            copies_wait<STAGES - 2>();
            warp_meets();
            send();
            const char *stage = ring + stage_here, *mine = stage + HIGH * LINE;
            weights.template begin<SMALL>(mine, turn);
#pragma unroll
            for (int s = 0; s < W::STEPS; ++s) {
                unsigned b[EIGHTS][4];
                weights.template step<SMALL>(mine, s);
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e) weights.right(b[e], stage, e, s);
#pragma unroll
                for (int t = 0; t < SIXTEENS; ++t) {
                    unsigned a[2][4];
                    weights.template left<SMALL>(a, mine, t, s);
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            if (e == 0) multiply<KIND>(sum[t][e], a[i], b[e][2 * i], b[e][2 * i + 1]);
                            else multiply_if<KIND>(tile.rows > 8 * e, sum[t][e], a[i], b[e][2 * i], b[e][2 * i + 1]);
                        }
                }
            }
            stage_here = stage_here == (STAGES - 1) * size ? 0 : stage_here + size;
        }
    };
    if (weights.small()) products(Number<1>());
    else products(Number<0>());
    copies_wait<0>();
    __syncthreads();  // sums lie where rings were
    float* sums = (float*)rings;
#pragma unroll
    for (int t = 0; t < SIXTEENS; ++t)
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[(warp * HIGH + 8 * e + 2 * (lane & 3) + (i & 1)) * APART + 16 * t + 8 * (i >> 1) + (lane >> 2)] = sum[t][e][i];
    __syncthreads();
    for (int at = threadIdx.x; at < tile.rows * ACROSS; at += TEAM * 32) {
        int row = at / ACROSS, inside = at % ACROSS, pair = pairs[row];
        i64 column = first + inside;
        if (column >= columns) continue;
        float total = sums[row * APART + inside];
#pragma unroll
        for (int other = 1; other < TEAM; ++other) total += sums[(other * HIGH + row) * APART + inside];
        store_one(out, pair * columns + column, weights.end(total, tile.expert, column, factors, pair), KIND);
    }
}

// How often whole numbers below 2^22 go into others: a product.
struct Quotient {
    unsigned by, reciprocal;
    VT_MEMBER void set(unsigned d) { by = d, reciprocal = d > 1 ? 0xffffffffu / d + 1 : 0; }
    VT_MEMBER int of(int n) const { return by > 1 ? (int)((unsigned long long)reciprocal * (unsigned)n >> 32) : n; }
};
