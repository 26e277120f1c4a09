// Softmax attention over paged or contiguous keys.
//
// The ladder:
// 1. attention_decode: a block a row, key head and up to 4 of its query heads, which share every load of K and V; a warp
//    a chunk of keys. What crosses shared memory's one 128-byte port decides: q stands in registers, 8 lanes a key,
//    and the parts of 32 scores at a time change lanes in three steps, until a lane has all of one; for p . v a lane has
//    dims of its own and all heads. K and V come through a ring of each warp's own by cp.async, which runs on from K to
//    V and into the next chunk, and no barrier of the block interrupts it.
// 2. Each warp leaves (m, l, o) of its chunk in shared memory, and the block merges them in sequence, a chunk a warp.
// 3. Few rows: the chunks of a row are spread over several blocks, whose (m, l, o) go to memory, and attention_join
//    merges them. The merge is the one of step 2, so the bytes are too.
// 4. attention_prefill: a block 16 to 64 pairs of row and query head of one key head; 4 x 4 scores and 4 x 8 values of
//    one chunk in a thread's registers. Chunks that all its rows see whole are spared the masks.
#include "attention_parts.cuh"

// Rows, or with `by_request` requests of one row, are the items; `chunks` partial results each.
#define SPLIT_PARAMETERS \
    float *parts, float *tops, float *totals, i64 chunks, i64 splits, i64 by_request
#define SPLIT_NAMES parts, tops, totals, chunks, splits, by_request

struct Item {
    int row, request;
    Span span;
    bool absent;  // no row of this kernel's
};

// Batches of one row each are tried first: all that must be read of one is asked for at once.
VT_FN Item find_item(const Attention& a, int item, bool by_request) {
    if (a.starts != nullptr && item < a.requests) {
        Request request = a.request(item);
        if (request.start == item && request.count == 1) return {item, item, a.sees(request, 0), false};
    }
    int r = by_request ? item : a.request_of(item);
    Request request = a.request(r);
    int row = by_request ? request.start : item;
    return {row, r, a.sees(request, row - request.start), by_request && request.count != 1};
}

#define LANES 8  // of q . k

// What one step of a warp's ring holds: KEYS keys, LANES lanes each, which send for the 8 TIMES dims that they have of
// q . k. device/attention.py: _decode counts the same bytes.
template <int KIND, int TIMES> struct Steps {
    static constexpr int ITEM = KIND == F32 ? 4 : 2, KEYS = 32 / LANES, WIDTH = LANES * TIMES * 8, ROW = WIDTH * ITEM;
    static constexpr int BYTES = KEYS * ROW, CUTS = CHUNK / KEYS, COUNT = BYTES > 4096 ? 2 : BYTES < 1024 ? 8 : 8192 / BYTES;

    const Attention& a;
    unsigned char* ring;
    const Places* places;  // of two chunks
    const unsigned char* base;  // K or V, from this lane's dims on
    unsigned page, slot;  // strides in 16 bytes
    int kv_head, lane, most, sent = 0;

    VT_MEMBER Steps(const Attention& a, unsigned char* ring, const Places* places, int kv_head, int chunks)
        : a(a), ring(ring), places(places), kv_head(kv_head), lane(threadIdx.x & 31), most(chunks * 2 * CUTS) {}

    VT_MEMBER void send() {
        if (sent < most) {
            int cut = sent & (CUTS - 1), key = cut * KEYS + lane / LANES, own = lane % LANES;
            bool values = (sent & CUTS) != 0;
            const Places& at = places[sent / (2 * CUTS) & 1];
            int here = at.page[key];
            unsigned char* row = ring + (sent & (COUNT - 1)) * BYTES + lane / LANES * ROW;
            if (cut == 0) {
                Rows rows = rows_of<KIND>(a, kv_head, values);
                base = rows.base + own * 8 * ITEM;
                page = (unsigned)((unsigned long long)rows.page * ITEM / 16);
                slot = (unsigned)((unsigned long long)rows.slot * ITEM / 16);
            }
            if (a.wide) {
                unsigned long long begin =
                    (unsigned long long)(unsigned)here * page + (unsigned long long)(unsigned)at.slot[key] * slot;
                const unsigned char* source = base + begin * 16;
#pragma unroll
                for (int i = 0; i < TIMES; ++i)
#pragma unroll
                    for (int n = 0; n < ITEM / 2; ++n)
                        copy_or_zero(row + (own + i * LANES) * 8 * ITEM + n * 16, source + i * LANES * 8 * ITEM + n * 16,
                                     here >= 0 && (own + i * LANES) * 8 < a.padded);
            } else {
                Rows rows = rows_of<KIND>(a, kv_head, values);
                i64 begin = here * rows.page + at.slot[key] * rows.slot;
#pragma unroll 1
                for (int d = own; d < WIDTH; d += LANES) {
                    bool there = here >= 0 && d < a.width;
                    if constexpr (KIND == F32)
                        ((unsigned*)row)[d] = there ? ((const unsigned*)rows.base)[begin + d] : 0u;
                    else
                        ((unsigned short*)row)[d] =
                            there ? ((const unsigned short*)rows.base)[begin + d] : (unsigned short)0;
                }
            }
        }
        ++sent;
        copies_close();
    }

    // The next step's bytes; the one before it has been read by all lanes, and its place is sent for anew.
    VT_MEMBER const unsigned char* take() {
        copies_wait<COUNT - 2>();
        warp_meets();
        send();
        return ring + (sent & (COUNT - 1)) * BYTES;
    }
};

// Dims of a lane in p . v: the n-th of DT.
template <int DT> VT_FN int dim_of(int lane, int n) {
    constexpr int TOGETHER = DT < 8 ? DT : 8;
    return n / TOGETHER * 32 * TOGETHER + lane * TOGETHER + n % TOGETHER;
}

// LANES sums, each in parts in LANES neighbouring lanes: a lane gets all parts of one, in order, and adds them up.
VT_FN float add_parts(float (&s)[LANES], int lane) {
#pragma unroll
    for (int m = 1; m < LANES; m <<= 1) {
        bool upper = (lane & m) != 0;
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            if (i & m) continue;
            float got = any_lane(upper ? s[i] : s[i | m], m);
            if (upper) s[i] = got;
            else s[i | m] = got;
        }
    }
    float sum = s[0];
#pragma unroll
    for (int i = 1; i < LANES; ++i) sum += s[i];
    return sum;
}

template <int KIND, int GT, int TIMES> VT_FN void decode(ATTENTION_PARAMETERS, SPLIT_PARAMETERS) {
    using Ring = Steps<KIND, TIMES>;
    constexpr int BATCH = LANES / GT, WIDTH = Ring::WIDTH, DT = WIDTH / 32;
    constexpr int OWN = GT * (WIDTH > CHUNK ? WIDTH : CHUNK);
    VT_SHARED(shared);
    const Attention a(ATTENTION_NAMES);
    int warps = blockDim.x / 32, thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    unsigned char* ring = shared + warp * (Ring::COUNT * Ring::BYTES);
    Places* places = (Places*)(shared + warps * (Ring::COUNT * Ring::BYTES)) + 2 * warp;
    float* all = (float*)((Places*)(shared + warps * (Ring::COUNT * Ring::BYTES)) + 2 * warps);
    float* own = all + warp * OWN;  // scores of a key's heads, then the chunk's values
    float* queries = all + warps * OWN;
    float* mixed = queries + GT * WIDTH;
    State* found = (State*)(mixed + GT * WIDTH);  // of each warp's chunk
    Factors* factors = (Factors*)(found + warps * GT);
    State* before = (State*)(factors + warps * GT);  // before this round and, in turn, after it

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

    int page[CHUNK / 32], slot[CHUNK / 32];
    auto find_places = [&](int chunk) {
#pragma unroll
        for (int i = 0; i < CHUNK / 32; ++i)
            find_place(a, item.request, span, chunk * CHUNK + lane + 32 * i, page[i], slot[i]);
    };
    auto put_places = [&](int turn) {
#pragma unroll
        for (int i = 0; i < CHUNK / 32; ++i) {
            places[turn & 1].page[lane + 32 * i] = page[i];
            places[turn & 1].slot[lane + 32 * i] = slot[i];
        }
        warp_meets();
    };
    int mine = end - begin > warp ? (end - begin - warp + warps - 1) / warps : 0;
    Ring steps(a, ring, places, kv_head, mine);
    if (mine) find_places(begin + warp);
#pragma unroll 8
    for (int i = thread; i < GT * WIDTH; i += blockDim.x) {
        int h = i / WIDTH;
        queries[i] = h < count ? query_element(a, item.row, head + h, i % WIDTH) : 0.0f;
        mixed[i] = 0.0f;
    }
    if (thread < 2 * GT) before[thread] = {-VT_INF, 0.0f};
    if (mine) {
        put_places(0);
#pragma unroll 1
        for (int i = 0; i < Ring::COUNT - 1; ++i) steps.send();
    }
    __syncthreads();

    int rounds = (end - begin + warps - 1) / warps;
    for (int turn = 0; turn < rounds; ++turn) {
        int chunk = begin + turn * warps + warp;
        if (turn < mine) {
            float y[GT][TIMES][8];
#pragma unroll
            for (int h = 0; h < GT; ++h)
#pragma unroll
                for (int i = 0; i < TIMES; ++i)
                    load_floats(y[h][i], queries + h * WIDTH + (i * LANES + lane % LANES) * 8);
#pragma unroll 1
            for (int batch = 0; batch < Ring::CUTS / BATCH; ++batch) {
                float s[LANES] = {};
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    const unsigned char* row = steps.take() + lane / LANES * Ring::ROW;
#pragma unroll
                    for (int i = 0; i < TIMES; ++i) {
                        float x[8];
                        load8<KIND>(x, row, (i * LANES + lane % LANES) * 8);
#pragma unroll
                        for (int j = 0; j < 8; ++j)
#pragma unroll
                            for (int h = 0; h < GT; ++h)
                                s[b * GT + h] = vt_fma(y[h][i][j], x[j], s[b * GT + h]);
                    }
                }
                float sum = add_parts(s, lane);
                int which = lane % LANES, h = which % GT;
                int here = (batch * BATCH + which / GT) * Ring::KEYS + lane / LANES, key = chunk * CHUNK + here;
                bool visible = key >= span.first && key <= span.last;
                float slope = a.slopes != nullptr && h < count ? a.slopes[head + h] : 0.0f;
                own[here * GT + h] = visible ? a.score(sum, slope, key - span.position) : -VT_INF;
            }
            if (turn + 1 < mine) find_places(chunk + warps);
            warp_meets();

            float p[GT][CHUNK / 32];
#pragma unroll
            for (int i = 0; i < CHUNK / 32; ++i) {
                float x[GT];
                load_own<GT>(x, own + (lane + 32 * i) * GT);
#pragma unroll
                for (int h = 0; h < GT; ++h) p[h][i] = x[h];
            }
            int h_here;
            State state = chunk_softmax<GT>(p, a.p_kind, h_here);
#pragma unroll
            for (int i = 0; i < CHUNK / 32; ++i)
#pragma unroll
                for (int h = 0; h < GT; ++h) own[(lane + 32 * i) * GT + h] = p[h][i];
            if (lane % (32 / GT) == 0 && h_here < count) {
                if (whole) {
                    found[warp * GT + h_here] = state;
                } else {
                    i64 to = ((i64)number * a.heads + head + h_here) * chunks + chunk - origin;
                    tops[to] = state.top;
                    totals[to] = state.total;
                }
            }
            if (turn + 1 < mine) put_places(turn + 1);
            else warp_meets();
            float sums[GT][DT] = {};
#pragma unroll 1
            for (int cut = 0; cut < Ring::CUTS; ++cut) {
                const unsigned char* row = steps.take();
#pragma unroll
                for (int k = 0; k < Ring::KEYS; ++k) {
                    float x[DT], weights[GT];
                    load_dims<KIND>(x, row + k * Ring::ROW, lane);
                    load_own<GT>(weights, own + (cut * Ring::KEYS + k) * GT);
#pragma unroll
                    for (int h = 0; h < GT; ++h)
#pragma unroll
                        for (int n = 0; n < DT; ++n) sums[h][n] = vt_fma(weights[h], x[n], sums[h][n]);
                }
            }
            warp_meets();
#pragma unroll
            for (int h = 0; h < GT; ++h) {
                if (h >= count) continue;
                i64 to = (((i64)number * a.heads + head + h) * chunks + chunk - origin) * a.width;
#pragma unroll
                for (int n = 0; n < DT; ++n) {
                    int d = dim_of<DT>(lane, n);
                    if (whole) own[h * WIDTH + d] = sums[h][n];
                    else if (d < a.width) parts[to + d] = sums[h][n];
                }
            }
            warp_meets();
        }
        if (!whole) continue;
        int here = end - begin - turn * warps;
        if (here > warps) here = warps;
        State *last = before + (turn & 1) * GT, *next = before + (~turn & 1) * GT;
        __syncthreads();
        if (thread < here * GT && thread % GT < count) {
            int h = thread % GT;
            State state = {last[h].top, 0.0f};
            for (int w = 0; w < thread / GT; ++w) state.top = vt_maximum(state.top, found[w * GT + h].top);
            factors[thread] = merge_chunk(state, {found[thread].top, 0.0f});
            if (thread / GT == here - 1) next[h].top = state.top;
        }
        __syncthreads();
        if (thread < count) {
            float total = last[thread].total;
            for (int w = 0; w < here; ++w) {
                Factors f = factors[w * GT + thread];
                total = vt_fma(total, f.old, found[w * GT + thread].total * f.added);
            }
            next[thread].total = total;
        }
        for (int i = thread; i < count * WIDTH; i += blockDim.x) {
            float x = mixed[i];
#pragma unroll 4
            for (int w = 0; w < here; ++w) {
                Factors f = factors[w * GT + i / WIDTH];
                x = vt_fma(x, f.old, all[w * OWN + i] * f.added);
            }
            mixed[i] = x;
        }
        __syncthreads();
    }
    copies_wait<0>();
    if (!whole) return;
    bool seen = span.first <= span.last;
    if (thread < count) {
        Ending ending = end_row(a, before[(rounds & 1) * GT + thread], head + thread);
        factors[thread] = {ending.sink, ending.inverse};
        a.write_lse(item.row, head + thread, seen ? ending.lse : -VT_INF);
    }
    __syncthreads();
    for (int i = thread; i < count * WIDTH; i += blockDim.x) {
        int h = i / WIDTH, d = i % WIDTH;
        if (d < a.width)
            a.write_out(item.row, head + h, d, seen ? end_value(mixed[i], factors[h].old, factors[h].added) : 0.0f);
    }
}

// Up to WARPS warps a block: with 16 a thread has 128 registers.
#define DECODE(NAME, KIND, GT, TIMES, WARPS)                                                                       \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)                                                    \
        attention_decode_##NAME##_##GT##x##TIMES(ATTENTION_PARAMETERS, SPLIT_PARAMETERS) {                         \
        decode<KIND, GT, TIMES>(ATTENTION_NAMES, SPLIT_NAMES);                                                     \
    }
DECODE(bf16, BF16, 1, 2, 16)
DECODE(bf16, BF16, 2, 2, 8)
DECODE(bf16, BF16, 4, 2, 16)
DECODE(bf16, BF16, 4, 1, 16)
DECODE(bf16, BF16, 1, 4, 8)
DECODE(bf16, BF16, 4, 4, 8)
DECODE(bf16, BF16, 2, 8, 8)
DECODE(f16, F16, 4, 2, 8)
DECODE(f16, F16, 4, 4, 8)
DECODE(f16, F16, 2, 8, 8)
DECODE(f32, F32, 4, 2, 8)
DECODE(f32, F32, 4, 4, 8)
DECODE(f32, F32, 2, 8, 8)

// A block one item, query head and 128 dims: the chunks' partial results, merged in sequence. The maxima so far are found
// first, by one thread a chunk, so that the exponentials of 64 chunks are evaluated at once.
extern "C" __global__ void __launch_bounds__(128) attention_join(ATTENTION_PARAMETERS, SPLIT_PARAMETERS) {
    constexpr int TOGETHER = 64;
    __shared__ float tops_here[TOGETHER], old[TOGETHER], added[TOGETHER], sums[TOGETHER], last_top;
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
    for (int first = 0; first < count; first += TOGETHER) {
        int here = count - first < TOGETHER ? count - first : TOGETHER;
        const float* from_here = parts + (from + first) * a.width + (mine ? d : 0);
        float values[TOGETHER];  // all under way at once
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) values[i] = i < here ? from_here[(i64)i * a.width] : 0.0f;
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
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (i >= here) continue;
            float keep = old[i], take = added[i];
            state.total = vt_fma(state.total, keep, sums[i] * take);
            mixed = vt_fma(mixed, keep, values[i] * take);
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
        if (chunk + 1 < end) place(chunk + 1);
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
                for (int part = 0; part < LANES; ++part) {
                    float own[RT][KT] = {};
#pragma unroll 1
                    for (int e = 8 * part; e < a.padded; e += 8 * LANES) {
                        Raw<8> raw[KT];
#pragma unroll
                        for (int n = 0; n < KT; ++n) raw[n] = fetch<8>(keys_here + n * 16 * a.pitch, e, KIND);
#pragma unroll
                        for (int f = 0; f < 8; f += 4) {
                            float y[RT][4];
#pragma unroll
                            for (int i = 0; i < RT; ++i) load_floats(y[i], queries_here + i * 16 * query_pitch + e + f);
#pragma unroll
                            for (int n = 0; n < KT; ++n) {
                                float x[8];
                                widen(x, raw[n], KIND);
#pragma unroll
                                for (int j = 0; j < 4; ++j)
#pragma unroll
                                    for (int i = 0; i < RT; ++i) own[i][n] = vt_fma(y[i][j], x[f + j], own[i][n]);
                            }
                        }
                    }
#pragma unroll
                    for (int i = 0; i < RT; ++i)
#pragma unroll
                        for (int n = 0; n < KT; ++n) sums[i][n] += own[i][n];
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
        auto row_of_warp = [&](int i) { return 2 * warp + (i & 1) + 16 * (i >> 1); };
        float p[2 * RT][CHUNK / 32];
#pragma unroll
        for (int i = 0; i < 2 * RT; ++i)
#pragma unroll
            for (int n = 0; n < CHUNK / 32; ++n) p[i][n] = scores[row_of_warp(i) * SCORES + (thread & 31) + 32 * n];
        int i_here;
        State added = chunk_softmax<2 * RT>(p, a.p_kind, i_here);
#pragma unroll
        for (int i = 0; i < 2 * RT; ++i)
#pragma unroll
            for (int n = 0; n < CHUNK / 32; ++n) scores[row_of_warp(i) * SCORES + (thread & 31) + 32 * n] = p[i][n];
        if ((thread & 31) % (16 / RT) == 0) {
            int m = row_of_warp(i_here);
            State state = states[m];
            Factors f = merge_chunk(state, added);
            states[m] = state;
            factors[2 * m] = f.old;
            factors[2 * m + 1] = f.added;
        }
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
    extern "C" __global__ void __launch_bounds__(PREFILL_THREADS, KT > 1 ? 2 : 1)                                  \
        attention_prefill_##NAME##_##WIDTH(ATTENTION_PARAMETERS, i64 tiles, i64 group_rows, i64 skip_single,       \
                                           i64 stages) {                                                           \
        prefill<KIND, RT, DV, KT>(ATTENTION_NAMES, tiles, group_rows, skip_single, stages);                        \
    }
PREFILL(bf16, BF16, 128, 4, 1, 4)
PREFILL(bf16, BF16, 256, 2, 2, 2)
PREFILL(bf16, BF16, 512, 1, 4, 1)
PREFILL(f16, F16, 128, 4, 1, 4)
PREFILL(f16, F16, 256, 2, 2, 2)
PREFILL(f16, F16, 512, 1, 4, 1)
PREFILL(f32, F32, 128, 4, 1, 1)
PREFILL(f32, F32, 256, 2, 2, 1)
PREFILL(f32, F32, 512, 1, 4, 1)
