// Softmax attention over paged or contiguous keys.
//
// The ladder:
// 1. attention_decode: a block a row, key head and up to 8 of its query heads, which share every load of K and V. Tiles
//    go through four buffers of shared memory by cp.async, V's under way while q . k is summed. One thread a key for
//    q . k, so that nothing crosses lanes; one thread one to four dims for p . v. Two tiles at a time for q . k: with
//    one, each key's conversion to float32 would serve half as many heads.
// 2. Few rows: the chunks of a row are spread over several blocks, which leave (m, l, o) of each chunk behind, and
//    attention_join merges them. The merge is the one of step 1, so the bytes are too.
// 3. attention_prefill: a block 16 to 64 pairs of row and query head of one key head; 4 x 2 scores and 4 x 8 values of
//    one chunk in a thread's registers. Chunks that all its rows see whole are spared the masks.
#include "attention_parts.cuh"

#define DECODE_THREADS 128

// Rows, or with `by_request` requests of one row, are the items; `chunks` partial results each.
#define SPLIT_PARAMETERS \
    float *parts, float *tops, float *totals, i64 chunks, i64 splits, i64 by_request
#define SPLIT_NAMES parts, tops, totals, chunks, splits, by_request

struct Item {
    int row, request;
    Span span;
    bool absent;  // no row of this kernel's
};

VT_FN Item find_item(const Attention& a, int item, bool by_request) {
    int r = by_request ? item : a.request_of(item);
    Request request = a.request(r);
    int row = by_request ? request.start : item;
    return {row, r, a.sees(request, row - request.start), by_request && request.count != 1};
}

template <int KIND, int GT, int DT> VT_FN void decode(ATTENTION_PARAMETERS, SPLIT_PARAMETERS) {
    constexpr int WARPS = DECODE_THREADS / 32, OWN = (GT + WARPS - 1) / WARPS;
    constexpr int TILE = KIND == F32 ? (DT == 1 ? 32 : 16) : 64 / DT, STAGES = KIND == F32 && DT == 4 ? 2 : 4;
    constexpr int CUTS = CHUNK / TILE, PAIR = 2 * TILE, STRIDE = DECODE_THREADS / PAIR;  // device/attention.py: _decode
    VT_SHARED(shared);
    const Attention a(ATTENTION_NAMES);
    unsigned char* ring = shared;
    Places* places = (Places*)(ring + STAGES * TILE * a.pitch);
    float* queries = (float*)(places + 2);
    float* scores = queries + GT * a.padded;
    float* factors = scores + GT * CHUNK;

    int group = a.heads / a.kv_heads, blocks = (group + GT - 1) / GT;
    int at = blockIdx.x, split = at % (int)splits;
    at /= (int)splits;
    int part_of_group = at % blocks;
    at /= blocks;
    int kv_head = at % a.kv_heads, number = at / a.kv_heads;
    int head = kv_head * group + part_of_group * GT, count = group - part_of_group * GT;
    if (count > GT) count = GT;

    Item item = find_item(a, number, by_request != 0);
    if (item.absent) return;
    Span span = item.span;
    int begin = span.first / CHUNK, end = span.last < span.first ? begin : span.last / CHUNK + 1, origin = begin;
    int share = (end - begin + (int)splits - 1) / (int)splits;
    begin += split * share;
    if (begin + share < end) end = begin + share;
    bool whole = splits == 1;
    if (begin >= end && !whole) return;

    int thread = threadIdx.x, warp = thread >> 5;
    int next_chunk = begin, next_cut = 0, sent = 0, used = 0;
    auto buffer = [&](int number) { return ring + (number & (STAGES - 1)) * TILE * a.pitch; };
    auto send_next = [&] {
        if (next_chunk < end) {
            bool values = next_cut >= CUTS;
            int first = (values ? next_cut - CUTS : next_cut) * TILE;
            send_tile<KIND, TILE, 4>(a, buffer(sent), rows_of<KIND>(a, kv_head, values), places[next_chunk & 1], first);
            if (++next_cut == 2 * CUTS) {
                next_cut = 0;
                ++next_chunk;
            }
        }
        ++sent;
        copies_close();
    };

    int page, slot;
    find_place(a, item.request, span, begin * CHUNK + thread, page, slot);
    places[begin & 1].page[thread] = page;
    places[begin & 1].slot[thread] = slot;
    __syncthreads();
    for (int i = 0; i < STAGES; ++i) send_next();
    for (int i = count * CHUNK + thread; i < GT * CHUNK; i += DECODE_THREADS) scores[i] = 0.0f;
    for (int i = thread; i < GT * a.padded; i += DECODE_THREADS) {
        int h = i / a.padded;
        queries[i] = h < count ? query_element(a, item.row, head + h, i - h * a.padded) : 0.0f;
    }

    int key_here = thread & (PAIR - 1), part = STRIDE == 1 ? 0 : thread / PAIR;
    int d = thread * DT;
    float mixed[GT][DT] = {};
    State state[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) state[i] = {-VT_INF, 0.0f};

    for (int chunk = begin; chunk < end; ++chunk) {
        if (chunk + 1 < end) find_place(a, item.request, span, (chunk + 1) * CHUNK + thread, page, slot);
        for (int cut = 0; cut < CUTS; cut += 2) {
            copies_wait<STAGES - 2>();
            __syncthreads();
            const unsigned char* row = buffer(used + key_here / TILE) + key_here % TILE * a.pitch;
            float sums[GT] = {};
#pragma unroll 2
            for (int e = 0; e < a.padded; e += 8) {
                float x[8];
                load8<KIND>(x, row, e);
#pragma unroll
                for (int i = 0; i < GT; ++i) {
                    int h = part + i * STRIDE;
                    if (h >= GT) continue;
                    float y[8];
                    load_floats(y, queries + h * a.padded + e);
#pragma unroll
                    for (int j = 0; j < 8; ++j) sums[i] = vt_fma(y[j], x[j], sums[i]);
                }
            }
            int key = chunk * CHUNK + cut * TILE + key_here;
            bool visible = key >= span.first && key <= span.last;
#pragma unroll
            for (int i = 0; i < GT; ++i) {
                int h = part + i * STRIDE;
                if (h >= count) continue;
                float slope = a.slopes != nullptr ? a.slopes[head + h] : 0.0f;
                scores[h * CHUNK + cut * TILE + key_here] =
                    visible ? a.score(sums[i], slope, key - span.position) : -VT_INF;
            }
            if (cut == 0 && chunk + 1 < end) {  // a send may be a chunk ahead
                places[(chunk + 1) & 1].page[thread] = page;
                places[(chunk + 1) & 1].slot[thread] = slot;
            }
            __syncthreads();
            used += 2;
            send_next();
            send_next();
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            int h = warp + i * WARPS;
            if (h >= count) continue;
            State found = chunk_softmax(scores + h * CHUNK, a.p_kind);
            if (whole) {
                Factors f = merge_chunk(state[i], found);
                if ((thread & 31) == 0) {
                    factors[2 * h] = f.old;
                    factors[2 * h + 1] = f.added;
                }
            } else if ((thread & 31) == 0) {
                i64 to = ((i64)number * a.heads + head + h) * chunks + chunk - origin;
                tops[to] = found.top;
                totals[to] = found.total;
            }
        }
        float sums[GT][DT] = {};
        for (int cut = 0; cut < CUTS; ++cut) {
            copies_wait<STAGES - 1>();
            __syncthreads();
            const unsigned char* rows = buffer(used);
            int base = chunk * CHUNK + cut * TILE;
            int low = span.first > base ? (span.first - base) & ~3 : 0;
            int high = span.last + 1 - base < TILE ? span.last + 1 - base : TILE;
            if (d < a.padded) {
                for (int j = low; j < high; j += 4) {
                    float p[GT][4];
#pragma unroll
                    for (int h = 0; h < GT; ++h) load_floats(p[h], scores + h * CHUNK + cut * TILE + j);
#pragma unroll
                    for (int u = 0; u < 4; ++u) {
                        float x[DT];
                        load_few<KIND, DT>(x, rows + (j + u) * a.pitch, d);
#pragma unroll
                        for (int h = 0; h < GT; ++h)
#pragma unroll
                            for (int n = 0; n < DT; ++n) sums[h][n] = vt_fma(p[h][u], x[n], sums[h][n]);
                    }
                }
            }
            __syncthreads();
            ++used;
            send_next();
        }
#pragma unroll
        for (int h = 0; h < GT; ++h) {
            if (h >= count) continue;
            if (whole) {
#pragma unroll
                for (int n = 0; n < DT; ++n)
                    mixed[h][n] = vt_fma(mixed[h][n], factors[2 * h], sums[h][n] * factors[2 * h + 1]);
            } else {
                i64 to = (((i64)number * a.heads + head + h) * chunks + chunk - origin) * a.width + d;
#pragma unroll
                for (int n = 0; n < DT; ++n)
                    if (d + n < a.width) parts[to + n] = sums[h][n];
            }
        }
    }
    copies_wait<0>();
    if (!whole) return;
    __syncthreads();
    bool seen = span.first <= span.last;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        int h = warp + i * WARPS;
        if (h >= count || (thread & 31)) continue;
        Ending ending = end_row(a, state[i], head + h);
        factors[2 * h] = ending.sink;
        factors[2 * h + 1] = ending.inverse;
        a.write_lse(item.row, head + h, seen ? ending.lse : -VT_INF);
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < GT; ++h)
#pragma unroll
        for (int n = 0; n < DT; ++n)
            if (h < count && d + n < a.width)
                a.write_out(item.row, head + h, d + n,
                            seen ? end_value(mixed[h][n], factors[2 * h], factors[2 * h + 1]) : 0.0f);
}

#define DECODE(NAME, KIND, GT, DT)                                                                                 \
    extern "C" __global__ void __launch_bounds__(DECODE_THREADS, 3)                                                \
        attention_decode_##NAME##_##GT##x##DT(ATTENTION_PARAMETERS, SPLIT_PARAMETERS) {                            \
        decode<KIND, GT, DT>(ATTENTION_NAMES, SPLIT_NAMES);                                                        \
    }
DECODE(bf16, BF16, 1, 1)
DECODE(bf16, BF16, 2, 1)
DECODE(bf16, BF16, 4, 1)
DECODE(bf16, BF16, 8, 1)
DECODE(bf16, BF16, 1, 2)
DECODE(bf16, BF16, 4, 2)
DECODE(bf16, BF16, 8, 2)
DECODE(bf16, BF16, 4, 4)
DECODE(f16, F16, 4, 1)
DECODE(f16, F16, 4, 2)
DECODE(f16, F16, 4, 4)
DECODE(f32, F32, 4, 1)
DECODE(f32, F32, 4, 2)
DECODE(f32, F32, 4, 4)

// A block one item, query head and 128 dims: the chunks' partial results, merged in sequence. The maxima so far are found
// first, by one thread a chunk, so that the exponentials of 128 chunks are evaluated at once.
extern "C" __global__ void __launch_bounds__(128) attention_join(ATTENTION_PARAMETERS, SPLIT_PARAMETERS) {
    __shared__ float tops_here[128], old[128], added[128], sums[128], last_top;
    const Attention a(ATTENTION_NAMES);
    int slices = (a.width + 127) / 128, at = blockIdx.x / slices, thread = threadIdx.x;
    int number = at / a.heads, head = at % a.heads, d = blockIdx.x % slices * 128 + thread;
    Item item = find_item(a, number, by_request != 0);
    if (item.absent) return;
    Span span = item.span;
    bool seen = span.first <= span.last, mine = d < a.width;
    int count = seen ? span.last / CHUNK - span.first / CHUNK + 1 : 0;
    i64 from = ((i64)number * a.heads + head) * chunks;
    State state = {-VT_INF, 0.0f};
    float mixed = 0.0f;
    for (int first = 0; first < count; first += 128) {
        int here = count - first < 128 ? count - first : 128;
        if (thread < here) {
            tops_here[thread] = tops[from + first + thread];
            sums[thread] = totals[from + first + thread];
        }
        __syncthreads();
        if (thread < here) {
            float before = state.top;
#pragma unroll 8
            for (int i = 0; i < thread; ++i) before = vt_maximum(before, tops_here[i]);
            State own = {before, 0.0f};
            Factors f = merge_chunk(own, {tops_here[thread], 0.0f});
            old[thread] = f.old;
            added[thread] = f.added;
            if (thread == here - 1) last_top = own.top;
        }
        __syncthreads();
        state.top = last_top;
        const float* values = parts + (from + first) * a.width + (mine ? d : 0);
#pragma unroll 8
        for (int i = 0; i < here; ++i) {
            float keep = old[i], take = added[i];
            state.total = vt_fma(state.total, keep, sums[i] * take);
            mixed = vt_fma(mixed, keep, values[(i64)i * a.width] * take);
        }
        __syncthreads();
    }
    Ending ending = end_row(a, state, head);
    if (d == 0) a.write_lse(item.row, head, seen ? ending.lse : -VT_INF);
    if (mine) a.write_out(item.row, head, d, seen ? end_value(mixed, ending.sink, ending.inverse) : 0.0f);
}

#define PREFILL_THREADS 256

// `tiles` tiles of `group_rows` query heads times 16 RT / group_rows rows for each key head; where `skip_single`,
// requests of one row are left to attention_decode.
template <int KIND, int RT, int DV, int KT>
VT_FN void prefill(ATTENTION_PARAMETERS, i64 tiles, i64 group_rows, i64 skip_single, i64 stages) {
    constexpr int ROWS = 16 * RT, SCORES = CHUNK + 4, TILE = 16 * KT, CUTS = CHUNK / TILE;
    VT_SHARED(shared);
    const Attention a(ATTENTION_NAMES);
    const int query_pitch = a.padded + 4;
    unsigned char* ring = shared;
    Places* places = (Places*)(ring + (int)stages * TILE * a.pitch);
    float* queries = (float*)(places + 2);
    float* scores = queries + ROWS * query_pitch;
    float* factors = scores + ROWS * SCORES;

    int group = a.heads / a.kv_heads, together = (int)group_rows, blocks = (group + together - 1) / together;
    int rows_each = ROWS / together;
    int at = blockIdx.x, kv_head = at % a.kv_heads;
    at /= a.kv_heads;
    int head = kv_head * group + at % blocks * together, head_end = (kv_head + 1) * group;
    int tile_number = (int)tiles - 1 - at / blocks;  // later rows see more keys: begin with them

    int low = 0, first_tile = 0;
    if (a.starts != nullptr) {
        int high = a.requests;
        while (low < high) {
            int middle = (low + high + 1) >> 1;
            if (a.starts[middle] / rows_each + middle <= tile_number) low = middle;
            else high = middle - 1;
        }
        first_tile = a.starts[low] / rows_each + low;
    }
    Request request = a.request(low);
    int row_first = (tile_number - first_tile) * rows_each;
    if (row_first >= request.count || (skip_single && low < a.requests && request.count == 1)) return;
    int row_last = row_first + rows_each < request.count ? row_first + rows_each - 1 : request.count - 1;

    int thread = threadIdx.x, across = thread & 15, down = thread >> 4, warp = thread >> 5;
    Span front = a.sees(request, row_first), back = a.sees(request, row_last);
    Span span = {front.first, back.last, 0};
    int begin = span.first / CHUNK, end = span.last < span.first ? begin : span.last / CHUNK + 1;

    int next_chunk = begin, next_cut = 0, sent = 0, used = 0;
    auto buffer = [&](int number) { return ring + (stages == 2 ? number & 1 : 0) * TILE * a.pitch; };
    auto send_next = [&] {
        if (next_chunk < end) {
            bool values = next_cut >= CUTS;
            int first = (values ? next_cut - CUTS : next_cut) * TILE;
            send_tile<KIND, TILE, 1>(a, buffer(sent), rows_of<KIND>(a, kv_head, values), places[next_chunk & 1], first);
            if (++next_cut == 2 * CUTS) {
                next_cut = 0;
                ++next_chunk;
            }
        }
        ++sent;
        copies_close();
    };
    auto arrive = [&] {
        if (stages == 2) copies_wait<1>();
        else copies_wait<0>();
        __syncthreads();
    };
    auto place = [&](int chunk) {
        if (thread >= CHUNK) return;
        Places& there = places[chunk & 1];
        find_place(a, request.number, span, chunk * CHUNK + thread, there.page[thread], there.slot[thread]);
    };

    place(begin);
    __syncthreads();
    for (int i = 0; i < (int)stages; ++i) send_next();
    for (int i = thread; i < ROWS * a.padded; i += PREFILL_THREADS) {
        int m = i / a.padded, d = i - m * a.padded, row = row_first + m / together, h = head + m % together;
        bool there = m < rows_each * together && row <= row_last && h < head_end;
        queries[m * query_pitch + d] = there ? query_element(a, request.start + row, h, d) : 0.0f;
    }

    State* states = (State*)(factors + 2 * ROWS);
    Span* spans = (Span*)(states + ROWS);  // none for pairs beyond the block's rows
    if (thread < ROWS) {
        int row = row_first + thread / together, h = head + thread % together;
        bool there = thread < rows_each * together && row <= row_last && h < head_end;
        spans[thread] = there ? a.sees(request, row) : Span{1, 0, 0};
        states[thread] = {-VT_INF, 0.0f};
    }
    float mixed[RT][DV][8] = {};

    for (int chunk = begin; chunk < end; ++chunk) {
        bool full = back.first <= chunk * CHUNK && front.last >= chunk * CHUNK + CHUNK - 1;
#pragma unroll 1
        for (int cut = 0; cut < CUTS; ++cut) {
            arrive();
            const unsigned char* keys_here = buffer(used) + across * a.pitch;
            const float* queries_here = queries + down * query_pitch;
            float sums[RT][KT] = {};
            int base = chunk * CHUNK + cut * TILE;
            if (base <= span.last && base + TILE > span.first) {
#pragma unroll 1
                for (int e = 0; e < a.padded; e += 8) {
                    float x[KT][8];
#pragma unroll
                    for (int n = 0; n < KT; ++n) load8<KIND>(x[n], keys_here + n * 16 * a.pitch, e);
#pragma unroll
                    for (int i = 0; i < RT; ++i) {
                        float y[8];
                        load_floats(y, queries_here + i * 16 * query_pitch + e);
#pragma unroll
                        for (int j = 0; j < 8; ++j)
#pragma unroll
                            for (int n = 0; n < KT; ++n) sums[i][n] = vt_fma(y[j], x[n][j], sums[i][n]);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < RT; ++i)
#pragma unroll
                for (int n = 0; n < KT; ++n) {
                    int m = down + 16 * i, key = base + across + 16 * n, distance = 0;
                    Span own = spans[m];
                    bool visible = key >= own.first && key <= own.last;
                    float slope = 0.0f;
                    if (a.slopes != nullptr && visible) {
                        slope = a.slopes[head + m % together];
                        distance = key - own.position;
                    }
                    scores[m * SCORES + cut * TILE + across + 16 * n] =
                        visible ? a.score(sums[i][n], slope, distance) : -VT_INF;
                }
            __syncthreads();
            ++used;
            send_next();
        }
#pragma unroll
        for (int i = 0; i < 2 * RT; ++i) {
            int m = 2 * warp + (i & 1) + 16 * (i >> 1);
            State state = {-VT_INF, 0.0f};  // only the first lane's counts: it alone may touch `states`
            if ((thread & 31) == 0) state = states[m];
            Factors f = merge_chunk(state, chunk_softmax(scores + m * SCORES, a.p_kind));
            if ((thread & 31) == 0) {
                states[m] = state;
                factors[2 * m] = f.old;
                factors[2 * m + 1] = f.added;
            }
        }
        if (chunk + 1 < end) place(chunk + 1);
        float sums[RT][DV][8] = {};
#pragma unroll 1
        for (int cut = 0; cut < CUTS; ++cut) {
            arrive();
            const unsigned char* rows = buffer(used);
            int base = chunk * CHUNK + cut * TILE;
            int from = span.first > base ? (span.first - base) & ~3 : 0;
            int to = span.last + 1 - base < TILE ? span.last + 1 - base : TILE;
            auto weigh = [&](auto masked) {
#pragma unroll 1
                for (int j = from; j < to; j += 4) {
                    float p[RT][4];
#pragma unroll
                    for (int i = 0; i < RT; ++i) load_floats(p[i], scores + (down + 16 * i) * SCORES + cut * TILE + j);
#pragma unroll
                    for (int u = 0; u < 4; ++u)
#pragma unroll
                        for (int g = 0; g < DV; ++g) {
                            int d = across * 8 + 128 * g;
                            if (d >= a.padded) continue;
                            float x[8];
                            load8<KIND>(x, rows + (j + u) * a.pitch, d);
#pragma unroll
                            for (int i = 0; i < RT; ++i) {
                                if (masked.value) {
                                    Span own = spans[down + 16 * i];
                                    if (base + j + u < own.first || base + j + u > own.last) continue;
                                }
#pragma unroll
                                for (int n = 0; n < 8; ++n) sums[i][g][n] = vt_fma(p[i][u], x[n], sums[i][g][n]);
                            }
                        }
                }
            };
            if (full) weigh(No{});
            else weigh(Yes{});
            __syncthreads();
            ++used;
            send_next();
        }
#pragma unroll
        for (int i = 0; i < RT; ++i) {
            float old = factors[2 * (down + 16 * i)], added = factors[2 * (down + 16 * i) + 1];
#pragma unroll
            for (int g = 0; g < DV; ++g)
#pragma unroll
                for (int n = 0; n < 8; ++n) mixed[i][g][n] = vt_fma(mixed[i][g][n], old, sums[i][g][n] * added);
        }
    }
    copies_wait<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * RT; ++i) {
        int m = 2 * warp + (i & 1) + 16 * (i >> 1), row = row_first + m / together, h = head + m % together;
        if ((thread & 31) || m >= rows_each * together || row > row_last || h >= head_end) continue;
        Ending ending = end_row(a, states[m], h);
        factors[2 * m] = ending.sink;
        factors[2 * m + 1] = ending.inverse;
        a.write_lse(request.start + row, h, spans[m].first <= spans[m].last ? ending.lse : -VT_INF);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < RT; ++i) {
        int m = down + 16 * i, row = row_first + m / together, h = head + m % together;
        if (m >= rows_each * together || row > row_last || h >= head_end) continue;
        bool seen = spans[m].first <= spans[m].last;
#pragma unroll
        for (int g = 0; g < DV; ++g) {
            int d = across * 8 + 128 * g;
            float x[8];
#pragma unroll
            for (int n = 0; n < 8; ++n)
                x[n] = seen ? end_value(mixed[i][g][n], factors[2 * m], factors[2 * m + 1]) : 0.0f;
            if (a.width == a.padded) {
                if (d < a.width) store(a.out, ((i64)(request.start + row) * a.heads + h) * a.width + d, x, a.q_kind);
            } else {
#pragma unroll
                for (int n = 0; n < 8; ++n)
                    if (d + n < a.width) a.write_out(request.start + row, h, d + n, x[n]);
            }
        }
    }
}

#define PREFILL(NAME, KIND, WIDTH, RT, DV, KT)                                                                     \
    extern "C" __global__ void __launch_bounds__(PREFILL_THREADS, RT > 1 ? 2 : 1)                                  \
        attention_prefill_##NAME##_##WIDTH(ATTENTION_PARAMETERS, i64 tiles, i64 group_rows, i64 skip_single,       \
                                           i64 stages) {                                                           \
        prefill<KIND, RT, DV, KT>(ATTENTION_NAMES, tiles, group_rows, skip_single, stages);                        \
    }
PREFILL(bf16, BF16, 128, 4, 1, 2)
PREFILL(bf16, BF16, 256, 2, 2, 2)
PREFILL(bf16, BF16, 512, 1, 4, 1)
PREFILL(f16, F16, 128, 4, 1, 2)
PREFILL(f16, F16, 256, 2, 2, 2)
PREFILL(f16, F16, 512, 1, 4, 1)
PREFILL(f32, F32, 128, 4, 1, 1)
PREFILL(f32, F32, 256, 2, 2, 1)
PREFILL(f32, F32, 512, 1, 4, 1)
