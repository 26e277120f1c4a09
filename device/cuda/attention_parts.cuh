// What the attention kernels share: who sees which keys, tiles of K and V on their way into shared memory, the softmax
// of one chunk of keys, and what ends a row. The order of every sum is that of oracle.attention: q . k by fma in 8 lanes
// of 8 neighbouring dims, added in sequence; in a chunk of 64 keys at fixed positions l in 32 lanes and a butterfly, p . v by fma
// over ascending j; chunks merged in sequence. So prefill and decode give a row the same bytes, however its keys are spread over blocks.
#pragma once
#include "storage.cuh"

#define CHUNK 64
#define ALL_LANES 0xffffffffu

#ifdef __CUDACC__
VT_FN void copies_close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> VT_FN void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
// 16 bytes, or zeros without a look at `global`.
VT_FN void copy_or_zero(void* shared, const void* global, bool there) {
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    int size = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(size) : "memory");
}
VT_FN void warp_meets() { __syncwarp(); }
#else
VT_FN void warp_meets() { __shfl_xor_sync(ALL_LANES, 0.0f, 1); }
static const unsigned char no_bytes[16] = {};
VT_FN void copy_or_zero(void* shared, const void* global, bool there) { copy_async(shared, there ? global : no_bytes); }
#endif

#define ATTENTION_PARAMETERS                                                                                     \
    const void *q, i64 q_kind, const void *k, const void *v, i64 k_page, i64 k_slot, i64 k_head, i64 v_page,     \
        i64 v_slot, i64 v_head, i64 wide, const int *table, i64 pages, i64 page_size, const int *seq_lens,       \
        const int *starts, i64 requests, i64 tokens, i64 keys, i64 heads, i64 kv_heads, i64 width, float scale,  \
        float softcap, const float *sinks, const float *slopes, const unsigned char *causal_of, i64 causal,      \
        i64 left, i64 right, i64 p_kind, i64 count_sink, void *out, float *lse, i64 pitch
#define ATTENTION_NAMES                                                                                          \
    q, q_kind, k, v, k_page, k_slot, k_head, v_page, v_slot, v_head, wide, table, pages, page_size, seq_lens,    \
        starts, requests, tokens, keys, heads, kv_heads, width, scale, softcap, sinks, slopes, causal_of,        \
        causal, left, right, p_kind, count_sink, out, lse, pitch

struct No { static constexpr bool value = false; };
struct Yes { static constexpr bool value = true; };

// One request's rows and keys; request `requests` is what lies behind the last: rows without keys.
struct Request {
    int number, start, count, total;
    bool causal;
};

struct Span {
    int first, last, position;  // keys first ... last, none where last < first
};

struct Attention {
    const void *q, *k, *v;
    const int *table, *seq_lens, *starts;
    const float *sinks, *slopes;
    const unsigned char* causal_of;
    void* out;
    float* lse;
    i64 k_page, k_slot, k_head, v_page, v_slot, v_head, pages;
    int q_kind, page_size, requests, tokens, keys, heads, kv_heads, width, padded, left, right, p_kind, pitch;
    float scale, softcap;
    bool wide, causal, count_sink;

    VT_MEMBER Attention(ATTENTION_PARAMETERS)
        : q(q), k(k), v(v), table(table), seq_lens(seq_lens), starts(starts), sinks(sinks), slopes(slopes),
          causal_of(causal_of), out(out), lse(lse), k_page(k_page), k_slot(k_slot), k_head(k_head), v_page(v_page),
          v_slot(v_slot), v_head(v_head), pages(pages), q_kind((int)q_kind), page_size((int)page_size),
          requests((int)requests), tokens((int)tokens), keys((int)keys), heads((int)heads), kv_heads((int)kv_heads),
          width((int)width), padded(((int)width + 7) & ~7), left((int)left), right((int)right), p_kind((int)p_kind),
          pitch((int)pitch), scale(scale), softcap(softcap), wide(wide != 0), causal(causal != 0),
          count_sink(count_sink != 0) {}

    VT_MEMBER Request request(int r) const {
        if (starts == nullptr) return {r, r ? tokens : 0, r ? 0 : tokens, r ? 0 : keys, causal};
        int start = starts[r];
        if (r == requests) return {r, start, tokens - start, 0, false};
        return {r, start, starts[r + 1] - start, seq_lens[r], causal_of ? causal_of[r] != 0 : causal};
    }

    // The last request that starts at or before the row.
    VT_MEMBER int request_of(int row) const {
        if (starts == nullptr) return 0;
        int low = 0, high = requests;
        while (low < high) {
            int middle = (low + high + 1) >> 1;
            if (starts[middle] <= row) low = middle;
            else high = middle - 1;
        }
        return low;
    }

    VT_MEMBER Span sees(const Request& r, int i) const {
        int position = r.total - r.count + i;
        int first = position - left, last = position + right;
        if (r.causal && position < last) last = position;
        if (r.total - 1 < last) last = r.total - 1;
        if (r.number == requests) last = -1;
        return {first > 0 ? first : 0, last, position};
    }

    // What a key weighs before the softmax, from q . k.
    VT_MEMBER float score(float s, float slope, int distance) const {
        s *= scale;
        if (softcap > 0.0f) s = softcap * vt_tanh(s / softcap);
        if (slopes != nullptr) s += slope * (float)distance;
        return s;
    }

    VT_MEMBER void write_out(i64 row, int head, int d, float x) const {
        float one[1] = {x};
        store(out, (row * heads + head) * width + d, one, q_kind);
    }

    VT_MEMBER void write_lse(i64 row, int head, float x) const {
        if (lse != nullptr) lse[(i64)head * tokens + row] = x;
    }
};

// Where the keys of a chunk lie, by page and place in it; page -1 for a key that nobody sees. One thread a key.
struct Places {
    int page[CHUNK], slot[CHUNK];
};

VT_FN void find_place(const Attention& a, int request, Span span, int key, int& page, int& slot) {
    page = -1;
    slot = key;
    if (key < span.first || key > span.last) return;
    page = 0;
    if (a.table == nullptr) return;
    int at = (int)((unsigned)key / (unsigned)a.page_size);
    page = a.table[request * a.pages + at];
    slot = key - at * a.page_size;
}

// K or V of one head.
struct Rows {
    const unsigned char* base;
    i64 page, slot;  // strides in elements
};

template <int KIND> VT_FN Rows rows_of(const Attention& a, int kv_head, bool values) {
    constexpr int ITEM = KIND == F32 ? 4 : 2;
    const unsigned char* base = (const unsigned char*)(values ? a.v : a.k);
    return {base + kv_head * (values ? a.v_head : a.k_head) * ITEM, values ? a.v_page : a.k_page,
            values ? a.v_slot : a.k_slot};
}

// Send for TILE keys of a chunk from its key `first`; rows that nobody sees become zeros, for 0 * NaN is not 0.
template <int KIND, int TILE, int UNROLL>
VT_FN void send_tile(const Attention& a, unsigned char* to, const Rows& from, const Places& at, int first) {
    constexpr int ITEM = KIND == F32 ? 4 : 2;
    if (a.wide) {
        int vectors = a.padded * ITEM / 16, shift = 0;
        while ((1 << shift) < vectors) ++shift;
#pragma unroll UNROLL
        for (int i = threadIdx.x; i < TILE << shift; i += blockDim.x) {
            int row = i >> shift, vector = i & ((1 << shift) - 1), page = at.page[first + row];
            if (vector >= vectors) continue;
            i64 begin = page * from.page + at.slot[first + row] * from.slot;
            copy_or_zero(to + row * a.pitch + vector * 16, from.base + begin * ITEM + vector * 16, page >= 0);
        }
        return;
    }
    for (int i = threadIdx.x; i < TILE * a.padded; i += blockDim.x) {
        int row = i / a.padded, d = i - row * a.padded, page = at.page[first + row];
        i64 begin = page * from.page + at.slot[first + row] * from.slot + d;
        bool there = page >= 0 && d < a.width;
        if constexpr (KIND == F32)
            ((unsigned*)(to + row * a.pitch))[d] = there ? ((const unsigned*)from.base)[begin] : 0u;
        else
            ((unsigned short*)(to + row * a.pitch))[d] =
                there ? ((const unsigned short*)from.base)[begin] : (unsigned short)0;
    }
}

template <int KIND> VT_FN float widen_one(unsigned bits) {
    if constexpr (KIND == F32) return vt_float((int)bits);
    else if constexpr (KIND == BF16) return widen_bf16(bits);
    else return widen_f16(bits);
}

// Elements d ... d + 7 of a row in shared memory; d a multiple of 8.
template <int KIND> VT_FN void load8(float (&x)[8], const unsigned char* row, int d) {
    load(x, row, d, KIND);
}

template <int N> VT_FN void load_floats(float (&x)[N], const float* from) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        uint4 raw = *(const uint4*)(from + i);
        x[i] = vt_float((int)raw.x);
        x[i + 1] = vt_float((int)raw.y);
        x[i + 2] = vt_float((int)raw.z);
        x[i + 3] = vt_float((int)raw.w);
    }
}

template <int N> VT_FN void load_own(float (&x)[N], const float* from) {
    if constexpr (N % 4 == 0) {
        load_floats(x, from);
    } else if constexpr (N == 2) {
        unsigned long long pair = *(const unsigned long long*)from;
        x[0] = vt_float((int)(unsigned)pair);
        x[1] = vt_float((int)(unsigned)(pair >> 32));
    } else {
        x[0] = from[0];
    }
}

// A lane's dims of a row in shared memory: 32 lanes have N neighbours each, or 8 and then 8 further on.
template <int KIND, int N> VT_FN void load_dims(float (&x)[N], const unsigned char* row, int lane) {
    if constexpr (N >= 8) {
#pragma unroll
        for (int g = 0; g < N / 8; ++g) {
            float y[8];
            load8<KIND>(y, row, g * 256 + lane * 8);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[g * 8 + i] = y[i];
        }
    } else if constexpr (KIND == F32) {
        load_own<N>(x, (const float*)row + lane * N);
    } else {
        unsigned pairs[N / 2];
        if constexpr (N == 4) {
            unsigned long long both = *(const unsigned long long*)(row + lane * 8);
            pairs[0] = (unsigned)both;
            pairs[1] = (unsigned)(both >> 32);
        } else {
            pairs[0] = *(const unsigned*)(row + lane * 4);
        }
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            x[i] = widen_one<KIND>(pairs[i / 2] & 0xffffu);
            x[i + 1] = KIND == BF16 ? vt_float((int)(pairs[i / 2] & 0xffff0000u)) : widen_one<KIND>(pairs[i / 2] >> 16);
        }
    }
}

// A row of q as float32, zeros behind its end.
VT_FN float query_element(const Attention& a, i64 row, int head, int d) {
    if (d >= a.width) return 0.0f;
    float one[1];
    load(one, a.q, (row * a.heads + head) * a.width + d, a.q_kind);
    return one[0];
}

// exp of scores minus `top`: against 0 where there is no score, for exp(-inf - 0) = 0.
VT_FN float finite(float top) { return top == -VT_INF ? 0.0f : top; }

struct State {
    float top, total;
};

VT_FN float any_lane(float x, int distance) { return __shfl_xor_sync(ALL_LANES, x, distance); }

struct Larger {
    VT_MEMBER float operator()(float a, float b) const { return vt_maximum(a, b); }
};
struct Sum {
    VT_MEMBER float operator()(float a, float b) const { return a + b; }
};

// N values joined over lanes DISTANCE, DISTANCE / 2 ... 1 apart: at each step a lane keeps one half of its values and
// gives the other to its partner; the last one both have. Returns which of the N s[0] is now.
template <int DISTANCE, int HALF, int N, class Join> VT_FN int join_lanes(float (&s)[N], int lane, Join join) {
    if constexpr (DISTANCE == 0) {
        return 0;
    } else if constexpr (HALF == 0) {
        s[0] = join(s[0], any_lane(s[0], DISTANCE));
        return join_lanes<DISTANCE / 2, 0>(s, lane, join);
    } else {
        bool upper = (lane & DISTANCE) != 0;
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            float keep = upper ? s[HALF + i] : s[i], give = upper ? s[i] : s[HALF + i];
            s[i] = join(keep, any_lane(give, DISTANCE));
        }
        return (upper ? HALF : 0) + join_lanes<DISTANCE / 2, HALF / 2>(s, lane, join);
    }
}

// A warp turns N rows' scores of a chunk, lane l those of keys l, l + 32 ..., into p. Returns the maximum and the sum
// of p of row `row`, of which 32 / N neighbouring lanes have the same.
template <int N> VT_FN State chunk_softmax(float (&s)[N][CHUNK / 32], int p_kind, int& row) {
    int lane = threadIdx.x & 31;
    float tops[N], totals[N];
#pragma unroll
    for (int h = 0; h < N; ++h) {
        tops[h] = s[h][0];
#pragma unroll
        for (int i = 1; i < CHUNK / 32; ++i) tops[h] = vt_maximum(tops[h], s[h][i]);
    }
    row = join_lanes<16, N / 2>(tops, lane, Larger());
    float top = tops[0];
#pragma unroll
    for (int h = 0; h < N; ++h) {
        float base = finite(__shfl_sync(ALL_LANES, top, h * (32 / N)));
        totals[h] = 0.0f;
#pragma unroll
        for (int i = 0; i < CHUNK / 32; ++i) {
            float p = vt_exp(s[h][i] - base);
            totals[h] += p;
            s[h][i] = through(p, p_kind);
        }
    }
    join_lanes<16, N / 2>(totals, lane, Sum());
    return {top, totals[0]};
}

struct Factors {
    float old, added;  // what the values so far and a chunk's values are multiplied with
};

// Take a chunk into the running maximum and sum.
VT_FN Factors merge_chunk(State& state, State chunk) {
    float larger = vt_maximum(state.top, chunk.top), base = finite(larger);
    Factors f = {vt_exp(state.top - base), vt_exp(chunk.top - base)};
    state = {larger, vt_fma(state.total, f.old, chunk.total * f.added)};
    return f;
}

// What ends a row: its lse, and the factors of its values, the sink's and 1 / l.
struct Ending {
    float lse, sink, inverse;
};

VT_FN Ending end_row(const Attention& a, State state, int head) {
    float lse = finite(state.top) + vt_log(state.total), old = 1.0f;
    if (a.sinks != nullptr) {
        float sink = a.sinks[head], larger = vt_maximum(state.top, sink), base = finite(larger);
        old = vt_exp(state.top - base);
        state = {larger, vt_fma(state.total, old, vt_exp(sink - base))};
        if (a.count_sink) lse = finite(state.top) + vt_log(state.total);
    }
    return {lse, old, 1.0f / (state.total == 0.0f ? 1.0f : state.total)};
}

VT_FN float end_value(float x, float sink, float inverse) { return (x * sink) * inverse + 0.0f; }
