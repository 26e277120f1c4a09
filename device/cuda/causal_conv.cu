// The short causal convolution: sequences, LFM2's form between two gates, and one token a row.
//
// The ladder:
// 1. conv_any, short_conv_any: a channel a thread, along a run of tokens, each tap read again.
// 2. conv_4, short_conv_3: tiles of bfloat16 that are all under way at once and arrive in stages, through shared memory;
//    four channels a thread, the filter and the last K - 1 inputs in registers (conv_tile.cuh).
// 2a. conv_4_rounded: the same with vLLM's rounded products.
// 2b. SiLU by fast functions without a branch on what these leave undecided (conv_silu.cuh): a tenth to a seventh less.
// 3. conv_rows_v8: one token a row, eight channels a thread, filters of four taps: everything moves in 16-byte accesses
//    that are all under way together.
// 3a. conv_rows_plain, conv_rows_rounded: two channels a thread, knowing that everything is bfloat16 (conv_rows.cuh).
// 4. ..._early: these kernels are started while the one before them ends (early.cuh): a third less for few rows.
#include "conv_rows.cuh"
#include "conv_tile.cuh"
#include "rows.cuh"

CONV_TILE(conv_4_early, 4, 4, false, PLAIN, 64, 10)
CONV_TILE(conv_4_rounded_early, 4, 4, false, ROUNDED, 64, 12)
CONV_TILE(short_conv_3_early, 4, 3, true, PLAIN, 64, 12)
CONV_KERNEL(conv_any, false, EITHER)
CONV_KERNEL(short_conv_any, true, PLAIN)

CONV_FEW(conv_rows_plain_early, PLAIN)
CONV_FEW(conv_rows_rounded_early, ROUNDED)

// Eight channels of any storage dtype.
extern "C" __global__ void __launch_bounds__(256) conv_rows_v8(ROWS_PARAMETERS) {
    constexpr int K = 4;
    const Place at = place<8>(rows, width, chunks);
    if (!at.inside) return;
    const int kind = (int)x_kind, tap_kind = (int)weight_kind, held_kind = (int)state_kind;
    const Taps cache{state, state_idx, slots, width, K - 1, held_kind};
    const i64 slot = cache.slot(at.row), base = cache.at(slot, at.column);
    Raw<8> own = fetch<8>(x, at.row * x_row + at.column, kind), filter[K], offset, history[K - 1];
#pragma unroll
    for (int i = 0; i < K; ++i) filter[i] = fetch<8>(weight, at.column * K + 8 * i, tap_kind);
    if (bias != nullptr) offset = fetch<8>(bias, at.column, (int)bias_kind);
    float y[8] = {};
    if (slot < 0) {
        store(out, at.row * width + at.column, y, kind);
        return;
    }
#pragma unroll
    for (int i = 0; i < K - 1; ++i) history[i] = fetch<8>(state, base + 8 * i, held_kind);
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
        store(state, base + 8 * i, part, held_kind);
    }
#pragma unroll
    for (int v = 0; v < 8; ++v)
#pragma unroll
        for (int j = 0; j < K; ++j)
            add_tap<EITHER>(total[v], w[v * K + j], j < K - 1 ? past[v * (K - 1) + j] : token[v], (int)flags, kind);
    activate<EITHER>(y, total, (int)flags, kind);
    store(out, at.row * width + at.column, y, kind);
}
