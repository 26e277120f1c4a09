// The convolution along sequences, a channel of a run of tokens a thread: any filter, any dtype.
//
// A thread has the tokens first ... first + run - 1, but those that see the state their sequence began with, its first
// K - 1, all belong to the thread that has the first of them: it alone reads that state, so it may write the new one.
#pragma once
#include "conv.cuh"

#define RUN_THREADS 64  // device/causal_conv.py

struct Sequences {
    const int* starts;
    const void* flags;
    int count, tokens, flag_size;

    // The last sequence that begins at `token` or before.
    VT_MEMBER int of(int token) const {
        int low = 0, high = count;
        while (high - low > 1) {
            int middle = (low + high) >> 1;
            if (starts[middle] <= token) low = middle;
            else high = middle;
        }
        return low;
    }
    VT_MEMBER int begin(int n) const { return starts[n] < 0 ? 0 : starts[n]; }
    VT_MEMBER int end(int n) const { return starts[n + 1] < tokens ? starts[n + 1] : tokens; }
    VT_MEMBER bool begun(int n) const {
        return flag_size == 1 ? ((const signed char*)flags)[n] != 0 : ((const int*)flags)[n] != 0;
    }
};

// GATED: x lies between two gates as [B | C | x].
template <bool GATED, int HOW> struct Conv {
    const void *x, *weight, *bias;
    void* out;
    i64 x_row, width;
    int channel;
    int x_kind, weight_kind, bias_kind, flags;
    Taps taps;
    Sequences sequences;

    VT_MEMBER int count() const { return (int)taps.taps + 1; }
    VT_MEMBER float input(i64 token) const {
        const i64 at = token * x_row + channel;
        if (!GATED) return load_one(x, at, x_kind);
        return through(load_one(x, at, x_kind) * load_one(x, at + 2 * width, x_kind), x_kind);
    }
    // What stands at `place` < 0, before a sequence.
    VT_MEMBER float past(int slot, bool begun, int place) const {
        return begun ? load_one(taps.state, taps.at(slot, channel) + taps.taps + place, taps.kind) : 0.0f;
    }
    VT_MEMBER void put_out(i64 token, float y) const { store_one(out, token * width + channel, y, x_kind); }

    VT_MEMBER void token(int token, int start, int slot, bool begun) const {
        const int K = count();
        float total[1] = {bias == nullptr ? 0.0f : load_one(bias, channel, bias_kind)}, y[1];
        for (int j = 0; j < K; ++j) {
            const int place = token - start - (K - 1) + j;
            const float tap = place >= 0 ? input(start + place) : past(slot, begun, place);
            add_tap<HOW>(total[0], load_one(weight, (i64)channel * K + j, weight_kind), tap, flags, x_kind);
        }
        activate<HOW>(y, total, flags, x_kind);
        if (GATED) y[0] = load_one(x, token * x_row + width + channel, x_kind) * through(y[0], x_kind);
        put_out(token, y[0]);
    }

    // The last K - 1 of [the state before, the inputs]; entries move towards the front, so ascending is safe.
    VT_MEMBER void keep(int start, int stop, int slot, bool begun) const {
        const int K = count();
        for (int j = 0; j + 1 < K; ++j) {
            const int place = stop - start - (K - 1) + j;
            const float y = place >= 0 ? input(start + place) : past(slot, begun, place);
            store_one(taps.state, taps.at(slot, channel) + j, y, taps.kind);
        }
    }

    // What of sequence n's tokens belongs to begin ... end - 1.
    VT_MEMBER void outputs(int n, int begin, int end) const {
        const int start = sequences.begin(n), stop = sequences.end(n), heads = start + count() - 1;
        const bool mine = start >= begin;
        int now = mine ? start : heads > begin ? heads : begin, last = stop < end ? stop : end;
        if (mine && last < heads) last = stop < heads ? stop : heads;
        const int slot = (int)taps.slot(n);
        const bool begun = mine && sequences.begun(n);
        for (; now < last; ++now) {
            if (slot < 0) put_out(now, 0.0f);
            else token(now, start, slot, begun);
        }
        if (mine && start < stop && slot >= 0) keep(start, stop, slot, begun);
    }
    VT_MEMBER void work(int begin, int end) const {
        for (int n = sequences.of(begin); n < sequences.count && sequences.starts[n] < end; ++n) outputs(n, begin, end);
    }
};

#define CONV_PARAMETERS                                                                                           \
    i64 split, i64 run, const void *x, i64 x_row, i64 x_kind, const void *weight, i64 weight_kind,                 \
        const void *bias, i64 bias_kind, void *state, i64 state_kind, i64 slots, const int *state_idx, i64 width, \
        i64 taps, const int *starts, i64 count, i64 tokens, const void *flags, i64 flag_size, i64 rounding,       \
        void *out

#define CONV_KERNEL(NAME, GATED, HOW)                                                                             \
    extern "C" __global__ void __launch_bounds__(RUN_THREADS, 1) NAME(CONV_PARAMETERS) {                             \
        const Part part = part_of(split);                                                                         \
        const int channel = (int)(part.rest * RUN_THREADS + threadIdx.x);                                       \
        const int length = (int)run, begin = (int)part.whole * length, all = (int)tokens;                           \
        if (channel >= width) return;                                                                             \
        const Conv<GATED, HOW> conv{x, weight, bias, out, x_row, width, channel, (int)x_kind, (int)weight_kind,   \
                                    (int)bias_kind, (int)rounding,                                                \
                                    {state, state_idx, slots, width, taps, (int)state_kind},                      \
                                    {starts, flags, (int)count, all, (int)flag_size}};                            \
        conv.work(begin, length < all - begin ? begin + length : all);                                            \
    }
