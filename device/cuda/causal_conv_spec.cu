// The short causal convolution of drafted tokens against the state of their row's slot; or of one token, in any form.
//
// The ladder:
// 1. conv_rows_v1: a channel a thread, any number of taps and tokens. A state's channels lie side by side, so neighbouring
//    threads' accesses fill whole lines.
#include "conv.cuh"
#include "rows.cuh"

#define ROWS_PARAMETERS                                                                                           \
    i64 rows, i64 width, i64 chunks, const void *x, i64 x_row, i64 x_kind, const void *weight, i64 weight_kind,   \
        const void *bias, i64 bias_kind, void *state, i64 state_kind, i64 slots, const int *state_idx, i64 taps,  \
        i64 held, i64 count, const int *accepted, i64 flags, void *out

// A slot holds `held` = taps + count - 1 inputs. What was accepted of the step before says where the history begins.
extern "C" __global__ void __launch_bounds__(256, 1) conv_rows_v1(ROWS_PARAMETERS) {
    const Place at = place<1>(rows, width, chunks);
    if (!at.inside) return;
    const Taps cache{state, state_idx, slots, width, held, (int)state_kind};
    const i64 slot = cache.slot(at.row), base = cache.at(slot, at.column);
    const int K = (int)taps + 1, kind = (int)x_kind, tokens = (int)count;
    const i64 first = at.row * x_row + at.column, to = at.row * tokens * width + at.column;
    int begin = accepted == nullptr ? 0 : accepted[at.row] - 1;
    begin = begin < 0 ? 0 : begin >= tokens ? tokens - 1 : begin;
    // line[i], i < K - 1, is the history; then the tokens
    auto line = [&](int i) {
        return i < K - 1 ? load_one(state, base + begin + i, (int)state_kind)
                         : load_one(x, first + (i - (K - 1)) * width, kind);
    };
    for (int m = 0; m < tokens; ++m) {
        float y[1] = {0.0f}, total[1] = {bias == nullptr ? 0.0f : load_one(bias, at.column, (int)bias_kind)};
        if (slot >= 0) {
            for (int j = 0; j < K; ++j)
                add_tap<EITHER>(total[0], load_one(weight, at.column * K + j, (int)weight_kind), line(m + j),
                               (int)flags, kind);
            activate<EITHER>(y, total, (int)flags, kind);
        }
        store(out, to + m * width, y, kind);
    }
    if (slot < 0) return;
    for (int i = 0; i < held; ++i) store_one(state, base + i, line(i + 1), (int)state_kind);  // towards the front
}
