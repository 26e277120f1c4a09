// The convolution along sequences, a run of tokens a thread.
//
// A thread has the tokens first ... first + run - 1, but those that see the state their sequence began with, its first
// K - 1, all belong to the thread that has the first of them: it alone reads that state, so it may write the new one.
#pragma once
#include "conv.cuh"
#include "units.cuh"

#define RUN_THREADS 64  // device/causal_conv.py

struct alignas(16) Quarter { float x[4]; };

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

// A tap of V channels, and what it adds to their sums; `w` is a filter [V, K] in registers.
template <int V, int HOW> struct Tap {
    float x[V];

    VT_MEMBER void take(const float (&y)[V]) {
#pragma unroll
        for (int v = 0; v < V; ++v) x[v] = y[v];
    }
    template <int K> static VT_MEMBER void prepare(float (&)[V * K]) {}
    template <int K> VT_MEMBER void add(float (&total)[V], const float (&w)[V * K], int j) const {
#pragma unroll
        for (int v = 0; v < V; ++v) total[v] = vt_fma(w[v * K + j], x[v], total[v]);
    }
};

// Pairs of bfloat16, whose products come in pairs. The filter becomes [K, 4] pairs, as bits, in its own first half.
template <> struct Tap<8, ROUNDED> {
    unsigned pairs[4];

    VT_MEMBER void take(const float (&y)[8]) {
#pragma unroll
        for (int p = 0; p < 4; ++p) pairs[p] = narrow_bf16(y[2 * p], y[2 * p + 1]);
    }
    template <int K> static VT_MEMBER void prepare(float (&w)[8 * K]) {
        float pairs[4 * K];
#pragma unroll
        for (int j = 0; j < K; ++j)
#pragma unroll
            for (int p = 0; p < 4; ++p) pairs[4 * j + p] = vt_float((int)narrow_bf16(w[2 * p * K + j], w[(2 * p + 1) * K + j]));
#pragma unroll
        for (int i = 0; i < 4 * K; ++i) w[i] = pairs[i];
    }
    template <int K> VT_MEMBER void add(float (&total)[8], const float (&w)[8 * K], int j) const {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const unsigned products = brain_products((unsigned)vt_bits(w[4 * j + p]), pairs[p]);
            total[2 * p] += vt_float((int)(products << 16));
            total[2 * p + 1] += vt_float((int)(products & 0xffff0000u));
        }
    }
};

// V channels from `channel` on. KNOWN taps, or 0: as many as the state says. GATED: x lies between two gates as
// [B | C | x]. BRAIN: x and the result are bfloat16.
template <int V, int KNOWN, bool GATED, int HOW, bool BRAIN> struct Conv {
    static constexpr int HELD = KNOWN ? KNOWN : 1;
    const void *x, *weight, *bias;
    void* out;
    i64 x_row, width;
    int channel;
    int x_kind, weight_kind, bias_kind, flags;
    Taps taps;
    Sequences sequences;
    Quarter (*offsets)[RUN_THREADS];  // the bias, in shared memory: registers are scarce
    float w[V * HELD];

    VT_MEMBER int kind() const { return BRAIN ? BF16 : x_kind; }
    VT_MEMBER int count() const { return KNOWN ? KNOWN : (int)taps.taps + 1; }

    VT_MEMBER void load_filter() {
        if (KNOWN) {
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                float part[V];
                load(part, weight, (i64)channel * HELD + i * V, weight_kind);
#pragma unroll
                for (int v = 0; v < V; ++v) w[i * V + v] = part[v];
            }
            Tap<V, HOW>::template prepare<HELD>(w);
        }
        float offset[V] = {};
        if (bias != nullptr) load(offset, bias, channel, bias_kind);
#pragma unroll
        for (int v = 0; v < V; ++v) offsets[v / 4][threadIdx.x].x[v % 4] = offset[v];
    }
    VT_MEMBER void begin_sums(float (&total)[V]) const {
        loads_are_under_way();  // and this one is made for every token
        if constexpr (V == 8) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Quarter part = offsets[half][threadIdx.x];
#pragma unroll
                for (int v = 0; v < 4; ++v) total[4 * half + v] = part.x[v];
            }
        } else {
            total[0] = offsets[0][threadIdx.x].x[0];
        }
    }

    // Where this thread's channels of a token lie: of the input (behind its gates) and of the result.
    VT_MEMBER const char* from(i64 token) const { return (const char*)x + (token * x_row + channel) * item_size(kind()); }
    VT_MEMBER char* to(i64 token) const { return (char*)out + (token * width + channel) * item_size(kind()); }

    struct Input { Raw<V> x, gate; };
    VT_MEMBER Input send(const char* at) const {
        Input raw;
        raw.x = fetch<V>(at, GATED ? 2 * width : 0, kind());
        raw.gate = raw.x;
        if (GATED) raw.gate = fetch<V>(at, 0, kind());
        return raw;
    }
    VT_MEMBER void value(float (&y)[V], const Input& raw) const {
        widen(y, raw.x, kind());
        if (!GATED) return;
        float gate[V];
        widen(gate, raw.gate, kind());
#pragma unroll
        for (int v = 0; v < V; ++v) y[v] = through(gate[v] * y[v], kind());
    }
    VT_MEMBER void finish(const char* at, char* result, float (&total)[V]) const {
        float y[V];
        activate<V, HOW, BRAIN>(y, total, flags, kind());
        if (GATED) {
            float gate[V];
            load(gate, at, width, kind());
#pragma unroll
            for (int v = 0; v < V; ++v) y[v] = gate[v] * through(y[v], kind());
        }
        store(result, 0, y, kind());
    }

    // What stands at `place` < 0, before a sequence.
    VT_MEMBER void past(float (&y)[V], int slot, bool begun, int place) const {
#pragma unroll
        for (int v = 0; v < V; ++v)
            y[v] = begun ? load_one(taps.state, taps.at(slot, channel + v) + taps.taps + place, taps.kind) : 0.0f;
    }

    // One token, whose taps may lie before its sequence.
    VT_MEMBER void token(int token, int begin, int slot, bool begun) const {
        const int K = count();
        const int place = token - begin;
        float total[V], tap[V];
        begin_sums(total);
#pragma unroll
        for (int j = 0; j < K; ++j) {
            const int back = K - 1 - j;
            if (place >= back) {
                value(tap, send(from(token - back)));
            } else {
                past(tap, slot, begun, place - back);
            }
#pragma unroll
            for (int v = 0; v < V; ++v) add_tap<HOW>(total[v], load_one(weight, (i64)(channel + v) * K + j, weight_kind), tap[v], flags, kind());
        }
        finish(from(token), to(token), total);
    }

    // Tokens begin ... end - 1 of the sequence that began at `start`; only its first K - 1 see the state. The window turns:
    // the i-th token has its tap j in place i + j, and itself takes the oldest one's place.
    VT_MEMBER void run(int begin, int end, int start, int slot, bool begun) const {
        if (begin >= end) return;
        constexpr int RING = HELD > 1 ? HELD - 1 : 1, AHEAD = RING;  // AHEAD tokens are on their way
        Tap<V, HOW> window[RING];
        float tap[V];
        Input raw[AHEAD];
        const unsigned step = (unsigned)x_row * item_size(kind()), step_out = (unsigned)width * item_size(kind());
        const char *here = from(begin), *ahead = here;
        char* result = to(begin);
        int left = end - begin;
#pragma unroll
        for (int j = 0; j < RING; ++j) {
            const int place = begin - start - RING + j;
            if (place >= 0) value(tap, send(from(start + place)));
            else past(tap, slot, begun, place);
            window[j].take(tap);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (i < left) raw[i] = send(ahead);
            ahead += step;
        }
        for (; left > 0; left -= AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (i >= left) break;
                float total[V];
                begin_sums(total);
#pragma unroll
                for (int j = 0; j < RING; ++j) window[(i + j) % RING].template add<HELD>(total, w, j);
                value(tap, raw[i]);
                window[i % RING].take(tap);
                if (AHEAD + i < left) raw[i] = send(ahead);
                window[i % RING].template add<HELD>(total, w, HELD - 1);
                finish(here, result, total);
                ahead += step;
                if (GATED) here += step;
                result += step_out;
            }
        }
    }

    // The last K - 1 of [the state before, the inputs]; entries move towards the front, so ascending is safe.
    VT_MEMBER void keep(int begin, int end, int slot, bool begun) const {
        const int K = count();
        for (int j = 0; j + 1 < K; ++j) {
            const int place = end - begin - (K - 1) + j;
            float y[V];
            if (place >= 0) {
                value(y, send(from(begin + place)));
            } else {
                past(y, slot, begun, place);
            }
#pragma unroll
            for (int v = 0; v < V; ++v) store_one(taps.state, taps.at(slot, channel + v) + j, y[v], taps.kind);
        }
    }

    // What of sequence n's tokens belongs to begin ... end - 1.
    VT_MEMBER void outputs(int n, int begin, int end) const {
        const int start = sequences.begin(n), stop = sequences.end(n), heads = start + count() - 1;
        const bool mine = start >= begin;
        int now = mine ? start : heads > begin ? heads : begin, last = stop < end ? stop : end;
        if (mine && last < heads) last = stop < heads ? stop : heads;
        const int slot = (int)taps.slot(n);
        if (slot < 0) {
            float zeros[V] = {};
            for (; now < last; ++now) store(to(now), 0, zeros, kind());
            return;
        }
        const bool begun = mine && sequences.begun(n);
        if (KNOWN) run(now, last, start, slot, begun);
        else
            for (; now < last; ++now) token(now, start, slot, begun);
    }

    // Facts of a sequence are read again for its state: registers are scarce in between.
    VT_MEMBER void work(int begin, int end) const {
        for (int n = sequences.of(begin); n < sequences.count && sequences.starts[n] < end; ++n) {
            outputs(n, begin, end);
            const int start = sequences.begin(n), stop = sequences.end(n), slot = (int)taps.slot(n);
            if (start >= begin && start < stop && slot >= 0) keep(start, stop, slot, sequences.begun(n));
        }
    }
};

#define CONV_PARAMETERS                                                                                           \
    i64 runs, i64 run, const void *x, i64 x_row, i64 x_kind, const void *weight, i64 weight_kind,                 \
        const void *bias, i64 bias_kind, void *state, i64 state_kind, i64 slots, const int *state_idx, i64 width, \
        i64 taps, const int *starts, i64 count, i64 tokens, const void *flags, i64 flag_size, i64 rounding,       \
        void *out

// Runs of tokens by groups of channels; `blocks` of threads lie across a run's groups.
#define CONV_KERNEL(NAME, V, K, GATED, HOW, BRAIN)                                                                \
    extern "C" __global__ void __launch_bounds__(RUN_THREADS, 8) NAME(CONV_PARAMETERS) {                          \
        __shared__ Quarter offsets[V == 8 ? 2 : 1][RUN_THREADS];                                                  \
        const unsigned blocks = (unsigned)((width / V + RUN_THREADS - 1) / RUN_THREADS);                          \
        const unsigned at = blockIdx.x / blocks;                                                                  \
        const int channel = (int)((blockIdx.x - at * blocks) * RUN_THREADS + threadIdx.x) * V;                    \
        const int length = (int)run, begin = (int)at * length, all = (int)tokens;                                 \
        if (channel >= width) return;                                                                             \
        Conv<V, K, GATED, HOW, BRAIN> conv{x, weight, bias, out, x_row, width, channel, (int)x_kind,              \
                                           (int)weight_kind, (int)bias_kind, (int)rounding,                       \
                                           {state, state_idx, slots, width, taps, (int)state_kind},               \
                                           {starts, flags, (int)count, all, (int)flag_size}, offsets};            \
        conv.load_filter();                                                                                       \
        conv.work(begin, length < all - begin ? begin + length : all);                                            \
    }
