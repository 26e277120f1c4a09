// The short causal convolution: sequences, LFM2's form between two gates, and one token a row.
//
// The ladder:
// 1. conv_any, short_conv_any: a channel a thread, along a run of tokens, each tap read again.
// 2. conv_4, short_conv_3: tiles of bfloat16 that are all under way at once and arrive in stages, through shared memory;
//    four channels a thread, the filter and the last K - 1 inputs in registers (conv_tile.cuh).
// 2a. conv_4_rounded: the same with vLLM's rounded products.
// 2b. SiLU by fast functions without a branch on what these leave undecided (conv_silu.cuh): an eighth to a fifth less.
// 3. conv_rows_v8: one token a row, eight channels a thread, filters of four taps: everything moves in 16-byte accesses
//    that are all under way together.
// 3a. the state of a row's 256 channels comes and goes as it lies, through shared memory: a thread's own 48 bytes are
//    pieces of sectors, of which each store moved twice as many.
// 3b. conv_rows_plain_v8, conv_rows_rounded_v8: the same, knowing that everything is bfloat16: branches on dtypes took a
//    third of the time.
// 3c. conv_rows_plain_early, conv_rows_rounded_early: up to some hundred rows are over sooner in the hands of more
//    threads (conv_rows.cuh).
// 4. ..._early: these kernels are started while the one before them ends (early.cuh): a quarter less for few rows.
#include "conv_rows.cuh"
#include "conv_tile.cuh"
#include "rows.cuh"

CONV_TILE(conv_4_early, 4, 4, false, PLAIN, 64, 10)
CONV_TILE(conv_4_rounded_early, 4, 4, false, ROUNDED, 64, 10)
CONV_TILE(short_conv_3_early, 4, 3, true, PLAIN, 64, 10)
CONV_KERNEL(conv_any, false, EITHER)
CONV_KERNEL(short_conv_any, true, PLAIN)

CONV_FEW(conv_rows_plain_early, PLAIN)
CONV_FEW(conv_rows_rounded_early, ROUNDED)

#define ROW_LANES 32  // device/causal_conv.py: a warp has neighbouring channels of one row
#define MOST_DOWN 2

// The vectors of a warp's states, which lie one after the other, between memory and the threads that own three each.
struct Row {
    uint4* moved;
    int vectors;

    template <class F> VT_MEMBER void each(F&& f) const {
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const int v = i * ROW_LANES + threadIdx.x;
            if (v < vectors) f(v);
        }
    }
    VT_MEMBER void send(const uint4* from) const {
        each([&](int v) { copy_async(moved + v, from + v); });
    }
    VT_MEMBER void write(uint4* to) const {
        warp_meets();
        each([&](int v) { to[v] = moved[v]; });
    }
};

template <int HOW, bool BRAIN> VT_FN void conv_rows(ROWS_PARAMETERS) {
    constexpr int K = 4;
    __shared__ uint4 moved[BRAIN ? MOST_DOWN : 1][BRAIN ? 3 * ROW_LANES : 1];
    const Place at = place<8>(rows, width, chunks);
    if (BRAIN ? at.row >= rows : !at.inside) return;
    const int kind = BRAIN ? BF16 : (int)x_kind, tap_kind = BRAIN ? BF16 : (int)weight_kind;
    const int held_kind = BRAIN ? BF16 : (int)state_kind;
    const Taps cache{state, state_idx, slots, width, K - 1, held_kind};
    const i64 column = at.inside ? at.column : 0;  // the others help to move what lies beside theirs
    const i64 slot = cache.slot(at.row), base = cache.at(slot, column), begin = at.column - 8 * threadIdx.x;
    const int left = (int)(width - begin) / 8;
    const Row row = {moved[BRAIN ? threadIdx.y : 0], 3 * (left < ROW_LANES ? left : ROW_LANES)};
    Raw<8> own = fetch<8>(x, at.row * x_row + column, kind), filter[K], offset, history[K - 1];
#pragma unroll
    for (int i = 0; i < K; ++i) filter[i] = fetch<8>(weight, column * K + 8 * i, tap_kind);
    if (bias != nullptr) offset = fetch<8>(bias, column, (int)bias_kind);
    float y[8] = {};
    if (slot < 0) {
        if (at.inside) store(out, at.row * width + column, y, kind);
        return;
    }
    uint4* const held_vectors = (uint4*)((char*)state + cache.at(slot, begin) * 2);
    if (BRAIN) {
        row.send(held_vectors);
        copies_arrive();
        warp_meets();
    }
#pragma unroll
    for (int i = 0; i < K - 1; ++i) {
        if (BRAIN) history[i].a = history[i].b = row.moved[3 * threadIdx.x + i];
        else history[i] = fetch<8>(state, base + 8 * i, held_kind);
    }
    if (BRAIN) warp_meets();
    float token[8], total[8] = {}, past[8 * (K - 1)], part[8], w[8 * K];
#pragma unroll
    for (int i = 0; i < K; ++i) {
        widen(part, filter[i], tap_kind);
#pragma unroll
        for (int v = 0; v < 8; ++v) w[8 * i + v] = part[v];
    }
    if (bias != nullptr) widen(total, offset, (int)bias_kind);
    widen(token, own, kind);
#pragma unroll
    for (int i = 0; i < K - 1; ++i) {
        widen(part, history[i], held_kind);
#pragma unroll
        for (int v = 0; v < 8; ++v) past[8 * i + v] = part[v];
    }
#pragma unroll
    for (int i = 0; i < K - 1; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const int v = (8 * i + e) / (K - 1), j = (8 * i + e) % (K - 1);
            part[e] = j + 2 < K ? past[v * (K - 1) + (j + 1) % (K - 1)] : token[v];
        }
        if (BRAIN) row.moved[3 * threadIdx.x + i] = narrow(part, BF16).a;
        else store(state, base + 8 * i, part, held_kind);
    }
    if (BRAIN) row.write(held_vectors);
#pragma unroll
    for (int v = 0; v < 8; ++v)
#pragma unroll
        for (int j = 0; j < K; ++j)
            add_tap<HOW>(total[v], w[v * K + j], j < K - 1 ? past[v * (K - 1) + j] : token[v], (int)flags, kind);
    if (BRAIN) {
#pragma unroll
        for (int v = 0; v < 8; ++v) y[v] = total[v];
        if (flags & ACTIVATED) brain_silu(y);
    } else {
        activate<HOW>(y, total, (int)flags, kind);
    }
    if (at.inside) store(out, at.row * width + column, y, kind);
}

#define CONV_ROWS(NAME, HOW, BRAIN)                                                                               \
    extern "C" __global__ void __launch_bounds__(256) NAME(ROWS_PARAMETERS) {                                     \
        conv_rows<HOW, BRAIN>(rows, width, chunks, x, x_row, x_kind, weight, weight_kind, bias, bias_kind, state, \
                              state_kind, slots, state_idx, taps, held, count, accepted, flags, out);             \
    }
CONV_ROWS(conv_rows_v8, EITHER, false)
CONV_ROWS(conv_rows_plain_v8, PLAIN, true)
CONV_ROWS(conv_rows_rounded_v8, ROUNDED, true)
