// The convolution along sequences of bfloat16, a tile of tokens by 32 groups of V channels a warp.
//
// A warp sends for all of its tile at once, and for the rows before it that its first tokens see; they arrive in stages,
// and while the first is under way the warp reads the filter and looks up whose tokens it has. From shared memory on a
// thread walks along the tokens of V channels, the last K - 1 inputs in registers. Many small tiles of a multiprocessor
// are at different places of this, so that memory never rests.
//
// The fast functions' few undecided results wait, as sums, in rows of the tile that were seen already: a warp that stopped
// for each would do so for every sixth of its tokens.
#pragma once
#include "conv_run.cuh"
#include "mma.cuh"
#include "units.cuh"

// The lanes in which `yes` holds, as bits; all lanes come here.
#ifdef __CUDACC__
VT_FN unsigned lanes_where(bool yes) { return __ballot_sync(0xffffffffu, yes); }
VT_FN int bits_of(unsigned bits) { return __popc(bits); }
#else
VT_FN unsigned lanes_where(bool yes) {
    unsigned bits = yes ? 1u << (threadIdx.x & 31) : 0u;
    for (int m = 16; m >= 1; m >>= 1) bits |= __shfl_xor_sync(0xffffffffu, bits, m);
    return bits;
}
VT_FN int bits_of(unsigned bits) { return __builtin_popcount(bits); }
#endif

// The last sequence that begins at `token` or before. A warp looks at 32 places at once.
VT_FN int sequence_of(const int* starts, int count, int token) {
    int low = 0;
    while (count > 1) {
        const int step = (count + 31) >> 5, at = (threadIdx.x & 31) * step;
        const unsigned before = lanes_where(at < count && starts[low + at] <= token);
        const int skip = before ? (bits_of(before) - 1) * step : 0;
        low += skip;
        count = count - skip < step ? count - skip : step;
    }
    return low;
}

// V neighbouring bfloat16 as they lie in memory.
template <int V> struct alignas(2 * V) Words { unsigned w[V / 2]; };

template <int V> VT_FN void widen_words(float (&x)[V], const Words<V>& raw) {
#pragma unroll
    for (int p = 0; p < V / 2; ++p) {
        x[2 * p] = vt_float((int)(raw.w[p] << 16));
        x[2 * p + 1] = vt_float((int)(raw.w[p] & 0xffff0000u));
    }
}
// The compiler shall not make a value again wherever it is used.
#ifdef __CUDACC__
VT_FN void made_once(float& x) { asm volatile("" : "+f"(x)); }
#else
VT_FN void made_once(float&) {}
#endif
template <int V> VT_FN Words<V> narrow_words(const float (&x)[V]) {
    Words<V> raw;
#pragma unroll
    for (int p = 0; p < V / 2; ++p) raw.w[p] = narrow_bf16(x[2 * p], x[2 * p + 1]);
    return raw;
}

// N elements of any storage dtype, four at a time.
template <int N> VT_FN void load_fours(float (&x)[N], const void* base, i64 at, int kind) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        if (kind == F32) {
            const uint4 raw = *(const uint4*)((const float*)base + at + i);
            x[i] = vt_float((int)raw.x), x[i + 1] = vt_float((int)raw.y);
            x[i + 2] = vt_float((int)raw.z), x[i + 3] = vt_float((int)raw.w);
            continue;
        }
        const uint2 raw = *(const uint2*)((const unsigned short*)base + at + i);
        const unsigned w[2] = {raw.x, raw.y};
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            x[i + 2 * p] = kind == BF16 ? vt_float((int)(w[p] << 16)) : widen_f16(w[p] & 0xffffu);
            x[i + 2 * p + 1] = kind == BF16 ? vt_float((int)(w[p] & 0xffff0000u)) : widen_f16(w[p] >> 16);
        }
    }
}
template <int N> VT_FN void store_fours(void* base, i64 at, const float (&x)[N], int kind) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        if (kind == F32) {
            *(uint4*)((float*)base + at + i) = {(unsigned)vt_bits(x[i]), (unsigned)vt_bits(x[i + 1]),
                                                (unsigned)vt_bits(x[i + 2]), (unsigned)vt_bits(x[i + 3])};
        } else {
            uint2 raw;
            raw.x = kind == BF16 ? narrow_bf16(x[i], x[i + 1]) : narrow_f16(x[i], x[i + 1]);
            raw.y = kind == BF16 ? narrow_bf16(x[i + 2], x[i + 3]) : narrow_f16(x[i + 2], x[i + 3]);
            *(uint2*)((unsigned short*)base + at + i) = raw;
        }
    }
}

// A tap of V channels, and what it adds to their sums.
template <int V, int K, int HOW> struct Line;
template <int V, int K> struct Line<V, K, PLAIN> {
    struct Filter { float w[V * K]; };
    float x[V];

    static VT_MEMBER Filter filter(const float (&w)[V * K]) {
        Filter f;
#pragma unroll
        for (int i = 0; i < V * K; ++i) f.w[i] = w[i];
        return f;
    }
    VT_MEMBER void take(const Words<V>& raw) {
        widen_words(x, raw);
#pragma unroll
        for (int v = 0; v < V; ++v) made_once(x[v]);
    }
    VT_MEMBER void take(const float (&y)[V]) {
#pragma unroll
        for (int v = 0; v < V; ++v) x[v] = y[v];
    }
    VT_MEMBER void add(float (&total)[V], const Filter& f, int j) const {
#pragma unroll
        for (int v = 0; v < V; ++v) total[v] = vt_fma(f.w[v * K + j], x[v], total[v]);
    }
};

// Pairs of bfloat16, whose products come in pairs.
template <int V, int K> struct Line<V, K, ROUNDED> {
    struct Filter { unsigned w[V / 2 * K]; };
    Words<V> x;

    static VT_MEMBER Filter filter(const float (&w)[V * K]) {
        Filter f;
#pragma unroll
        for (int p = 0; p < V / 2; ++p)
#pragma unroll
            for (int j = 0; j < K; ++j) f.w[p * K + j] = narrow_bf16(w[2 * p * K + j], w[(2 * p + 1) * K + j]);
        return f;
    }
    VT_MEMBER void take(const Words<V>& raw) { x = raw; }
    VT_MEMBER void take(const float (&y)[V]) { x = narrow_words(y); }
    VT_MEMBER void add(float (&total)[V], const Filter& f, int j) const {
#pragma unroll
        for (int p = 0; p < V / 2; ++p) {
            const unsigned products = brain_products(f.w[p * K + j], x.w[p]);
            total[2 * p] += vt_float((int)(products << 16));
            total[2 * p + 1] += vt_float((int)(products & 0xffff0000u));
        }
    }
};

#define TILE_TURN 6  // device/causal_conv.py has these, and ROOM
#define TILE_STAGES 5
#define TILE_GATED_STAGES 3

// Channels channel ... channel + V - 1 of the tokens begin ... end - 1. GATED: x lies between two gates as [B | C | x].
template <int V, int K, bool GATED, int HOW> struct Tile {
    static constexpr int RING = K - 1, WIDE = 32 * V, PITCH = WIDE * 2 * (GATED ? 3 : 1);
    // Tokens of a stage, and of a turn of the window; those whose sums are activated together.
    static constexpr int TURN = TILE_TURN / RING * RING, GROUP = GATED ? 1 : 2;
    static constexpr int STAGES = GATED ? TILE_GATED_STAGES : TILE_STAGES;
    // A row holds an undecided result a thread; there is room for those of the first tokens.
    static constexpr int ROOM = GATED ? 0 : GROUP * (V - 1) - RING;
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
    int later;  // undecided results
    typename Tap::Filter filter;
    float offset[V];

    static VT_MEMBER int lane() { return threadIdx.x & 31; }

    VT_MEMBER unsigned char* row(int token) const { return tile + (token - begin + RING + ROOM) * PITCH; }

    // Everything, the rows of a stage closed as a group. A row's vectors of 16 bytes lie in fewer than 32 lanes.
    VT_MEMBER void send() const {
        constexpr int ACROSS = WIDE / 8, DOWN = 32 / ACROSS;
        const int own = lane() % ACROSS, column = base + 8 * own;
        int token = begin - RING + lane() / ACROSS;
        const char* from = (const char*)x + (token * x_row + column) * 2;
        unsigned char* at = row(token) + 16 * own;
        const i64 step = x_row * (2 * DOWN);
        const int last = column < width ? end : 0;
#pragma unroll
        for (int stage = 1; stage <= STAGES; ++stage) {
#pragma unroll
            for (int i = 0; i < TURN + (stage == 1 ? RING : 0) + DOWN - 1; i += DOWN) {
                if (token >= begin + stage * TURN) break;
                if (token >= 0 && token < last) {
#pragma unroll
                    for (int part = 0; part < PITCH; part += WIDE * 2) copy_async(at + part, from + part / WIDE * width);
                }
                token += DOWN;
                from += step;
                at += DOWN * PITCH;
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
    VT_MEMBER unsigned step_out() const { return (unsigned)width * 2; }
    VT_MEMBER char* to(int token) const { return (char*)out + ((i64)token * width + channel) * 2; }

    template <bool ACT> VT_MEMBER void finish(char* result, float (&total)[V], const Words<V>& gate) const {
        if constexpr (ACT) brain_silu(total);
        Words<V> y = narrow_words(total);
        if constexpr (GATED) y = gated(gate, y);
        if (inside) *(Words<V>*)result = y;
    }

    // What stands before a sequence, as [V, K - 1].
    VT_MEMBER void past(float (&held)[V * RING], int slot, bool begun) const {
#pragma unroll
        for (int i = 0; i < V * RING; ++i) held[i] = 0.0f;
        if (begun) load_fours(held, taps.state, taps.at(slot, channel), taps.kind);
    }
    // The K - 1 inputs [V, K - 1] before a token, one further on.
    VT_MEMBER void shift(float (&held)[V * RING], int token) const {
        float entry[V];
        widen_words(entry, far_input(token));
#pragma unroll
        for (int v = 0; v < V; ++v) {
#pragma unroll
            for (int j = 0; j + 1 < RING; ++j) held[v * RING + j] = held[v * RING + j + 1];
            held[v * RING + RING - 1] = entry[v];
        }
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
    // The tokens start ... last - 1, K - 1 at most, as far as they lie beyond the tile.
    template <bool ACT> VT_MEMBER void beyond(float (&held)[V * RING], int start, int last) const {
        for (int token = start; token < last; ++token) {
            float total[V];
            Tap window[RING], own;
            Words<V> gate = {};
            taps_of(window, held);
#pragma unroll
            for (int v = 0; v < V; ++v) total[v] = offset[v];
#pragma unroll
            for (int j = 0; j < RING; ++j) window[j].add(total, filter, j);
            own.take(far_input(token));
            own.add(total, filter, RING);
            if constexpr (GATED) gate = far_part(token, 1);
            if (token >= end) finish<ACT>(to(token), total, gate);
            shift(held, token);
        }
    }
    // The last K - 1 of [what stood before, the inputs].
    VT_MEMBER void keep(float (&held)[V * RING], int slot, int start, int stop) const {
        if (stop - start >= RING) {
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
        } else {
            for (int token = start; token < stop; ++token) shift(held, token);
        }
        if (inside) store_fours(taps.state, taps.at(slot, channel), held, taps.kind);
    }

    // What the fast functions left, once the results beside it are stored.
    VT_MEMBER void decide_left() {
        for (int n = 0; n < later; ++n) {
            const uint2 left = *(const uint2*)own(tile + n * PITCH);
            const float y = vt_silu(vt_float((int)left.x));
            unsigned short* const result = (unsigned short*)to(begin + (int)(left.y / V)) + left.y % V;
            if (inside) *result = (unsigned short)narrow_bf16(y, y);
        }
        later = 0;
    }
    // SiLU of the sums of COUNT tokens from `token` on, for which their rows and those before make room.
    template <int COUNT> VT_MEMBER void act(float (&y)[COUNT * V], const float (&total)[COUNT * V], int token) {
        if (!quick_silu(y, total)) return;
        if (later + COUNT * V > token - begin + COUNT + RING + ROOM) decide_left();
#pragma unroll
        for (int v = 0; v < COUNT * V; ++v) {
            if (!undecided(y[v], total[v])) continue;
            const unsigned place = (unsigned)((token - begin) * V + v);
            *(uint2*)own(tile + later++ * PITCH) = {(unsigned)vt_bits(total[v]), place};
        }
    }

    // COUNT tokens, the first of them the i-th of its turn.
    template <bool ACT, int COUNT>
    VT_MEMBER void some(Tap (&window)[RING], int i, int token, const unsigned char* at, char* result) {
        float total[COUNT * V], y[COUNT * V];
#pragma unroll
        for (int g = 0; g < COUNT; ++g) {
            float sum[V];
#pragma unroll
            for (int v = 0; v < V; ++v) sum[v] = offset[v];
#pragma unroll
            for (int j = 0; j < RING; ++j) window[(i + g + j) % RING].add(sum, filter, j);
            window[(i + g) % RING].take(input(at + g * PITCH));
            window[(i + g) % RING].add(sum, filter, RING);
#pragma unroll
            for (int v = 0; v < V; ++v) total[g * V + v] = y[g * V + v] = sum[v];
        }
        if constexpr (ACT && !GATED) act<COUNT>(y, total, token);
#pragma unroll
        for (int g = 0; g < COUNT; ++g) {
            float mine[V];
#pragma unroll
            for (int v = 0; v < V; ++v) mine[v] = y[g * V + v];
            Words<V> raw = narrow_words(mine);
            if constexpr (GATED) raw = gated(part<1>(at + g * PITCH), raw);
            if (inside) *(Words<V>*)(result + (u64)step_out() * (unsigned)g) = raw;
        }
    }
    // `left` tokens from `now` on. The window turns: the i-th token has its tap j in place i + j, and itself takes the
    // oldest one's place.
    template <bool ACT> VT_MEMBER void run(Tap (&window)[RING], int now, int left) {
        const unsigned char* at = own(row(now));
        char* result = to(now);
        for (; left >= TURN; left -= TURN) {
            arrive(now + TURN);
#pragma unroll
            for (int i = 0; i < TURN; i += GROUP)
                some<ACT, GROUP>(window, i, now + i, at + i * PITCH, result + (u64)step_out() * (unsigned)i);
            now += TURN;
            at += TURN * PITCH;
            result += (u64)step_out() * (unsigned)TURN;
        }
#pragma unroll 1
        for (; left > 0; --left) {
            arrive(now + 1);
            some<ACT, 1>(window, 0, now, at, result);
            const Tap newest = window[0];
#pragma unroll
            for (int j = 0; j + 1 < RING; ++j) window[j] = window[j + 1];
            window[RING - 1] = newest;
            ++now;
            at += PITCH;
            result += step_out();
        }
    }

    // What of sequence n's tokens belongs to this tile; only its first K - 1 see the state, and they belong to the tile
    // that has the first of them: it alone reads that state, so it may write the new one.
    template <bool ACT> VT_MEMBER void outputs(int n) {
        const int start = sequences.begin(n), stop = sequences.end(n), heads = start + RING;
        const bool mine = start >= begin;
        const int now = mine ? start : heads > begin ? heads : begin;
        int last = stop < end ? stop : end;
        if (mine && last < heads) last = stop < heads ? stop : heads;
        if (now >= last) return;
        const int slot = (int)taps.slot(n);
        if (slot < 0) {
            for (int token = now; token < last && inside; ++token) *(Words<V>*)to(token) = {};
            return;
        }
        Tap window[RING];
        if (mine) {
            const bool begun = sequences.begun(n);
            float held[V * RING];
            if (last > end) {
                past(held, slot, begun);
                beyond<ACT>(held, start, last);
            }
            past(held, slot, begun);
            taps_of(window, held);
            keep(held, slot, start, stop);
        } else {
            arrive(now + 1);  // and what it sees
#pragma unroll
            for (int j = 0; j < RING; ++j) window[j].take(input(own(row(now - RING + j))));
        }
        run<ACT>(window, now, (last < end ? last : end) - now);
    }
    template <bool ACT> VT_MEMBER void work(int n) {
        for (; n < sequences.count && sequences.starts[n] < end; ++n) outputs<ACT>(n);
        decide_left();
        copies_arrive();  // of sequences that are skipped
    }
};

// Tiles of `run` tokens by groups of channels; `blocks` of threads lie across a row.
#define CONV_TILE(NAME, V, K, GATED, HOW, THREADS, LEAST)                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, LEAST) NAME(CONV_PARAMETERS) {                          \
        VT_SHARED(memory);                                                                                        \
        const unsigned blocks = (unsigned)((width + V * THREADS - 1) / (V * THREADS)), at = blockIdx.x / blocks;  \
        const int channel = (int)((blockIdx.x - at * blocks) * THREADS + threadIdx.x) * V, length = (int)run;     \
        const int begin = (int)at * length, all = (int)tokens, end = length < all - begin ? begin + length : all; \
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
        conv.send();                                                                                              \
        conv.load_filter();                                                                                       \
        const int first = sequence_of(starts, (int)count, begin);                                                 \
        if (rounding & ACTIVATED) conv.template work<true>(first);                                                \
        else conv.template work<false>(first);                                                                    \
    }
