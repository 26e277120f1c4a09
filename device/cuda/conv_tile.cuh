// The convolution along sequences of bfloat16, a tile of tokens by 32 groups of V channels a warp.
//
// A warp sends for all of its tile at once, and for the rows before it that its first tokens see; they arrive in stages,
// and while the first is under way the warp reads the filter and looks up whose tokens it has. From shared memory on a
// thread walks along the tokens of V channels, the last K - 1 inputs in registers. Many small tiles of a multiprocessor
// are at different places of this, so that memory never rests.
//
// The walk has no branch on results. A thread notes the pairs of tokens of which the fast functions left some
// undecided; once all are stored, the warp shares these out among its lanes and computes them again from the rows, which
// are still there.
#pragma once
#include "conv_run.cuh"
#include "conv_silu.cuh"
#include "conv_words.cuh"
#include "early.cuh"
#include "units.cuh"

#define TILE_TURN 6  // device/causal_conv.py has these
#define TILE_STAGES 4
#define TILE_GATED_STAGES 2

// Channels channel ... channel + V - 1 of the tokens begin ... end - 1, 63 at most. GATED: x lies between two gates as
// [B | C | x], and nothing is activated.
template <int V, int K, bool GATED, int HOW> struct Tile {
    static constexpr int RING = K - 1, WIDE = 32 * V, PITCH = WIDE * 2 * (GATED ? 3 : 1);
    // Tokens of a stage, and of a turn of the window.
    static constexpr int TURN = TILE_TURN / RING * RING, STAGES = GATED ? TILE_GATED_STAGES : TILE_STAGES;
    // Tokens of which only their first is noted, and how a turn of them is.
    static constexpr int PAIR = 2;
    static constexpr unsigned EVERY_PAIR = 0x55555555u & ((1u << TURN) - 1);
    static_assert(TURN % PAIR == 0, "whole pairs");
    // A row before the others, for what lanes tell each other.
    static constexpr int ROOM = GATED ? 0 : 1;
    using Tap = Line<V, K, HOW>;
    const void *x, *weight, *bias;
    void* out;
    i64 x_row, width;
    int channel, weight_kind, bias_kind, flags, begin, end;
    Taps taps;
    Sequences sequences;
    unsigned char* tile;
    int ready;  // tokens before it have arrived
    int base;  // the warp's first channel
    bool inside;  // the others help to move rows
    u64 later;  // undecided pairs of tokens, from `begin` on
    typename Tap::Filter filter;
    float offset[V];

    static VT_MEMBER int lane() { return threadIdx.x & 31; }

    VT_MEMBER unsigned char* row(int token) const { return tile + (token - begin + RING + ROOM) * PITCH; }

    // Everything, the rows of a stage closed as a group. A row's vectors of 16 bytes lie in fewer than 32 lanes; the
    // first stage brings the rows that the first tokens see as well, and one that nobody needs where these are odd.
    VT_MEMBER void send() const {
        constexpr int ACROSS = WIDE / 8, DOWN = 32 / ACROSS, AHEAD = (RING + DOWN - 1) / DOWN * DOWN;
        static_assert(TURN % DOWN == 0 && AHEAD <= RING + ROOM, "whole steps, in the tile");
        const int own = lane() % ACROSS, column = base + 8 * own, first = begin - AHEAD;
        const unsigned last = column < width ? end : 0;
        const bool whole = first >= 0 && base + WIDE <= width;
        int token = first + lane() / ACROSS;
        const char* from = (const char*)x + (token * x_row + column) * 2;
        unsigned char* const at = row(token) + 16 * own;
        const i64 step = x_row * (2 * DOWN);
        auto send_row = [&](int i) {
#pragma unroll
            for (int part = 0; part < PITCH; part += WIDE * 2)
                copy_async(at + i * PITCH + part, from + part / WIDE * width);
        };
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            const int low = stage == 0 ? 0 : AHEAD + stage * TURN, high = AHEAD + (stage + 1) * TURN;
            if (whole && first + high <= end) {
#pragma unroll
                for (int i = low; i < high; i += DOWN, from += step) send_row(i);
            } else {
#pragma unroll 1
                for (int i = low; first + i < end && i < high; i += DOWN, from += step)
                    if ((unsigned)(token + i) < last) send_row(i);
            }
            copies_close();
        }
    }
    // The tokens before `token` are there. As many groups are closed as were at first, so that the oldest is waited for.
    VT_MEMBER void arrive(int token) {
        while (ready < token) {
            copies_wait<STAGES - 1>();
            copies_close();
            warp_meets();
            ready += TURN;
        }
    }
    VT_MEMBER void load_filter() {
        float w[V * K];
        load_fours(w, weight, (i64)channel * K, weight_kind);
        filter = Tap::filter(w);
#pragma unroll
        for (int v = 0; v < V; ++v) offset[v] = 0.0f;
        if (bias != nullptr) load_fours(offset, bias, channel, bias_kind);
    }

    // What a token brings: from this thread's place in a row of the tile, or from where it came.
    VT_MEMBER unsigned char* own(unsigned char* row) const { return row + 2 * V * lane(); }
    template <int PART> static VT_MEMBER Words<V> part(const unsigned char* at) {
        return *(const Words<V>*)(at + PART * WIDE * 2);
    }
    static VT_MEMBER Words<V> gated(const Words<V>& gate, const Words<V>& raw) {
        float a[V], b[V];
        widen_words(a, gate);
        widen_words(b, raw);
#pragma unroll
        for (int v = 0; v < V; ++v) b[v] *= a[v];
        return narrow_words(b);
    }
    static VT_MEMBER Words<V> input(const unsigned char* at) {
        if constexpr (GATED) return gated(part<0>(at), part<2>(at));
        else return part<0>(at);
    }
    VT_MEMBER Words<V> far_part(int token, int part) const {
        return *(const Words<V>*)((const char*)x + (token * x_row + part * width + channel) * 2);
    }
    VT_MEMBER Words<V> far_input(int token) const {
        if constexpr (GATED) return gated(far_part(token, 0), far_part(token, 2));
        else return far_part(token, 0);
    }
    VT_MEMBER char* to(int token) const { return (char*)out + ((i64)token * width + channel) * 2; }

    // What stands before a sequence, as [V, K - 1].
    VT_MEMBER void past(float (&held)[V * RING], int slot, bool begun) const {
#pragma unroll
        for (int i = 0; i < V * RING; ++i) held[i] = 0.0f;
        if (begun) load_fours(held, taps.state, taps.at(slot, channel), taps.kind);
    }
    static VT_MEMBER void taps_of(Tap (&window)[RING], const float (&held)[V * RING]) {
#pragma unroll
        for (int j = 0; j < RING; ++j) {
            float tap[V];
#pragma unroll
            for (int v = 0; v < V; ++v) tap[v] = held[v * RING + j];
            window[j].take(tap);
        }
    }
    // A sequence's first tokens start ... last - 1, K - 1 at most, in this tile or not; held: the inputs before each.
    template <bool ACT> VT_MEMBER void heads(float (&held)[V * RING], int start, int last) const {
#pragma unroll 1
        for (int token = start; token < last; ++token) {
            const Words<V> raw = far_input(token);
            float total[V], entry[V];
            Tap window[RING], newest;
            taps_of(window, held);
            newest.take(raw);
#pragma unroll
            for (int v = 0; v < V; ++v) total[v] = offset[v];
#pragma unroll
            for (int j = 0; j < RING; ++j) window[j].add(total, filter, j);
            newest.add(total, filter, RING);
            if constexpr (ACT) brain_silu(total);
            Words<V> y = narrow_words(total);
            if constexpr (GATED) y = gated(far_part(token, 1), y);
            if (inside) *(Words<V>*)to(token) = y;
            widen_words(entry, raw);
#pragma unroll
            for (int v = 0; v < V; ++v) {
#pragma unroll
                for (int j = 0; j + 1 < RING; ++j) held[v * RING + j] = held[v * RING + j + 1];
                held[v * RING + RING - 1] = entry[v];
            }
        }
    }
    // The last K - 1 of a sequence's inputs, where it has so many; what stood before it has moved along with fewer.
    VT_MEMBER void keep(float (&held)[V * RING], int slot, int start, int stop) const {
        if (stop - start > RING) {
            Words<V> late[RING];
#pragma unroll
            for (int j = 0; j < RING; ++j) late[j] = far_input(stop - RING + j);
#pragma unroll
            for (int j = 0; j < RING; ++j) {
                float entry[V];
                widen_words(entry, late[j]);
#pragma unroll
                for (int v = 0; v < V; ++v) held[v * RING + j] = entry[v];
            }
        }
        if (inside) store_fours(taps.state, taps.at(slot, channel), held, taps.kind);
    }

    // The i-th token of a turn, of V channels.
    VT_MEMBER void sum(float (&total)[V], Tap (&window)[RING], int i, const unsigned char* at) const {
#pragma unroll
        for (int v = 0; v < V; ++v) total[v] = offset[v];
#pragma unroll
        for (int j = 0; j < RING; ++j) window[(i + j) % RING].add(total, filter, j);
        window[i % RING].take(input(at));
        window[i % RING].add(total, filter, RING);
    }
    VT_MEMBER void put(char* result, const float (&y)[V], const unsigned char* at) const {
        Words<V> raw = narrow_words(y);
        if constexpr (GATED) raw = gated(part<1>(at), raw);
        if (inside) *(Words<V>*)result = raw;
    }
    // `left` tokens from `now` on. The window turns: the i-th token has its tap j in place i + j, and itself takes the
    // oldest one's place.
    template <bool ACT> VT_MEMBER void run(Tap (&window)[RING], int now, int left) {
        const unsigned char* at = own(row(now));
        char* result = to(now);
        const i64 step = width * 2;
        for (; left >= TURN; left -= TURN) {
            unsigned marks = 0;
            Doubt doubt;
            arrive(now + TURN);
#pragma unroll
            for (int i = 0; i < TURN; ++i) {
                float total[V], y[V];
                sum(total, window, i, at + i * PITCH);
                if constexpr (ACT) {
                    quick_silu(y, total, doubt);
                    if (i % PAIR == PAIR - 1) {
                        if (near_middle(doubt.nearest)) marks |= 1u << (i - PAIR + 1);
                        doubt.nearest = 0xffffffffu;
                    }
                    put(result, y, at + i * PITCH);
                } else {
                    put(result, total, at + i * PITCH);
                }
                result += step;
            }
            if constexpr (ACT) later |= (u64)(doubt.beyond() ? EVERY_PAIR : marks) << (now - begin);
            now += TURN;
            at += TURN * PITCH;
        }
#pragma unroll 1
        for (; left > 0; --left) {
            float total[V];
            arrive(now + 1);
            sum(total, window, 0, at);
            if constexpr (ACT) brain_silu(total);
            put(result, total, at);
            const Tap newest = window[0];
#pragma unroll
            for (int j = 0; j + 1 < RING; ++j) window[j] = window[j + 1];
            window[RING - 1] = newest;
            ++now;
            at += PITCH;
            result += step;
        }
    }

    // The undecided pairs again, the next one of every lane that has some: PAIR * V lanes compute one's results.
    VT_MEMBER void settle() {
        constexpr int LANES = PAIR * V;
        unsigned* const list = (unsigned*)tile;
        if (!inside) later = 0;
        for (unsigned lanes; (lanes = lanes_where(later != 0)) != 0;) {
            if (later != 0) {
                const int offset = lowest_bit(later);
                list[bits_of(lanes & ((1u << lane()) - 1))] = (unsigned)(offset << 5 | lane());
                later &= later - 1;
            }
            warp_meets();
            for (int i = lane() / LANES; i < bits_of(lanes); i += 32 / LANES) {
                const int place = (int)(list[i] & 31u) * V + lane() % V, mine = base + place;
                const int token = begin + (int)(list[i] >> 5) + lane() % LANES / V;
                float w[K], total = bias == nullptr ? 0.0f : load_one(bias, mine, bias_kind);
                load_fours(w, weight, (i64)mine * K, weight_kind);
#pragma unroll
                for (int j = 0; j < K; ++j) {
                    const float tap = widen_bf16(((const unsigned short*)row(token - RING + j))[place]);
                    add_tap<HOW>(total, w[j], tap, flags, BF16);
                }
                const float y = exact_silu(total);
                ((unsigned short*)out)[(i64)token * width + mine] = (unsigned short)narrow_bf16(y, y);
            }
            warp_meets();
        }
    }

    // What of sequence n's tokens belongs to this tile; only its first K - 1 see the state, and they belong to the tile
    // that has the first of them: it alone reads that state, so it may write the new one.
    template <bool ACT> VT_MEMBER void outputs(int n) {
        const int start = sequences.begin(n), stop = sequences.end(n), seen = start + RING;
        const int heads_end = stop < seen ? stop : seen, last = stop < end ? stop : end;
        const bool mine = start >= begin;
        const int now = mine || begin < heads_end ? heads_end : begin;
        const int slot = (int)taps.slot(n);
        if (slot < 0) {
            const int until = mine && last < heads_end ? heads_end : last;
            for (int token = mine ? start : now; token < until && inside; ++token) *(Words<V>*)to(token) = {};
            return;
        }
        Tap window[RING];
        if (mine) {
            if (start >= stop) return;
            float held[V * RING];
            past(held, slot, sequences.begun(n));
            heads<ACT>(held, start, heads_end);
            taps_of(window, held);
            keep(held, slot, start, stop);
        }
        if (now >= last) return;
        if (!mine) {
            arrive(now + 1);  // and what it sees
#pragma unroll
            for (int j = 0; j < RING; ++j) window[j].take(input(own(row(now - RING + j))));
        }
        run<ACT>(window, now, last - now);
    }
    template <bool ACT> VT_MEMBER void work(int n) {
        for (; n < sequences.count && sequences.starts[n] < end; ++n) outputs<ACT>(n);
        if constexpr (ACT) settle();
        copies_arrive();  // of sequences that are skipped
    }
};

// Tiles of `run` tokens by groups of channels.
#define CONV_TILE(NAME, V, K, GATED, HOW, THREADS, LEAST)                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, LEAST) NAME(CONV_PARAMETERS) {                          \
        VT_SHARED(memory);                                                                                        \
        others_may_start();                                                                                       \
        const Part part = part_of(split);                                                                         \
        const int channel = (int)(part.rest * THREADS + threadIdx.x) * V, length = (int)run;                    \
        const int begin = (int)part.whole * length, all = (int)tokens;                                              \
        const int end = length < all - begin ? begin + length : all;                                              \
        using Warp = Tile<V, K, GATED, HOW>;                                                                      \
        const int base = channel - V * (int)(threadIdx.x & 31);                                                   \
        if (base >= width) return;                                                                                \
        const bool inside = channel < width;                                                                      \
        Warp conv{x, weight, bias, out, x_row, width, inside ? channel : (int)width - V, (int)weight_kind,        \
                  (int)bias_kind, (int)rounding, begin, end,                                                      \
                  {state, state_idx, slots, width, taps, (int)state_kind},                                        \
                  {starts, flags, (int)count, all, (int)flag_size},                                               \
                  memory + (threadIdx.x >> 5) * ((length + Warp::RING + Warp::ROOM) * Warp::PITCH), begin, base,  \
                  inside, 0};                                                                                      \
        after_others();                                                                                           \
        conv.send();                                                                                              \
        conv.load_filter();                                                                                       \
        const int first = sequence_of(starts, (int)count, begin);                                                 \
        if (!(GATED) && (rounding & ACTIVATED)) conv.template work<!(GATED)>(first);                              \
        else conv.template work<false>(first);                                                                    \
    }
