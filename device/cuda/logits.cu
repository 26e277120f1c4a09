// Logits before a draw: temperature, penalties, min-p, top-k and top-p.
//
// The ladder:
// 1. temperature, penalties: 16-byte loads, eight elements a thread, one pass.
// 2. min-p: three launches (maximum, sum, result), each row over many blocks; a row stays in the L2 cache between them.
// 3. top-k and top-p without a sort, four launches whatever is asked for: the row's maximum; a histogram of how many
//    logits, and how much of the sum of exponentials, lie in each of 2048 bins of 1/64 below the maximum; one block a
//    row that picks the bin, gathers the few logits in it and narrows it down to one; and the pass that masks. Sums are
//    integers, so that bins may be filled in any order, and one histogram answers both k and p. Rows that ask for
//    nothing (k out of range, p >= 1) skip the second and third.
// A bin that holds more than 4096 logits (ties, mostly) is narrowed down by reading its row again and again: right, but
// a block on its own takes some 10 us for each of up to eight levels.
#include "rows.cuh"
#include "selection.cuh"

#define ROWS i64 rows, i64 width, i64 chunks

template <int V> VT_FN void temperature(ROWS, const float* logits, const float* temperatures, i64 all_random, float* out) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    float t = temperatures[at.row], x[V];
    if (!all_random && t < 1e-5f) t = 1.0f;
    load(x, logits, at.row * width + at.column, F32);
#pragma unroll
    for (int j = 0; j < V; ++j) x[j] = x[j] / t;
    store(out, at.row * width + at.column, x, F32);
}

// V bytes of a mask.
template <int V> VT_FN void load_mask(unsigned (&seen)[V], const signed char* at) {
    if constexpr (V == 8) {
        uint2 w = *(const uint2*)at;
#pragma unroll
        for (int j = 0; j < 8; ++j) seen[j] = (j < 4 ? w.x : w.y) >> (8 * (j & 3)) & 0xffu;
    } else {
        seen[0] = (unsigned char)*at;
    }
}

template <int V>
VT_FN void penalties(ROWS, const float* logits, const signed char* prompt_mask, const int* output_counts,
                     const signed char* output_mask, const float* frequency, const float* presence,
                     const float* repetition, float* out) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    const i64 first = at.row * width + at.column;
    Raw<V> raw = fetch<V>(logits, first, F32), counted = fetch<V>(output_counts, first, F32);
    unsigned prompt[V], output[V];
    load_mask(prompt, prompt_mask + first);
    load_mask(output, output_mask + first);
    float f = frequency[at.row], p = presence[at.row], r = repetition[at.row], x[V], count[V];
    widen(x, raw, F32);
    widen(count, counted, F32);
#pragma unroll
    for (int j = 0; j < V; ++j) {
        if (prompt[j] | output[j]) x[j] = x[j] > 0.0f ? x[j] / r : x[j] * r;
        x[j] -= f * (float)vt_bits(count[j]);
        x[j] -= p * (output[j] ? 1.0f : 0.0f);
    }
    store(out, first, x, F32);
}

template <int V>
VT_FN void min_p(i64 width, i64 chunks, i64 per, const float* logits, const float* minima, const unsigned* maxima,
                 const u64* sums, float* out) {
    const Chunk part = chunk_of(width, chunks, per);
    const Softmax row = row_softmax(maxima + part.row * chunks, sums + part.row * chunks, chunks);
    // The largest probability is that of the maximum, whose weight is 1.
    const float threshold = minima[part.row] * (1.0f / row.sum);
    map_logits<V>(logits + part.row * width, out + part.row * width, part.begin, part.end, [&](float x, i64) {
        return vt_exp(x - row.peak) / row.sum < threshold ? -VT_INF : x;
    });
}

// Bins of 1/64 below the maximum, ascending with the value: the last holds the maximum, the first all from 32 below it.
#define BINS 2048
#define BINS_PER_UNIT 64.0f

struct Bins {
    unsigned top;
    float peak;

    // Without a finite maximum the bins hang from the largest float, infinities and NaN in the last.
    VT_MEMBER explicit Bins(unsigned maximum)
        : top(is_finite(maximum) ? maximum : CODE_LARGEST), peak(value_of(top)) {}

    VT_MEMBER int of(float x, unsigned code) const {
        if (code >= top) return BINS - 1;
        float down = (peak - x) * BINS_PER_UNIT;
        return down < (float)(BINS - 1) ? BINS - 1 - (int)down : 0;
    }
};

// What a row asks for.
struct Wish {
    i64 rank;          // ascending rank of the k-th largest
    float limit;       // 1 - p
    bool by_k, by_p;   // whether there is something to select
    bool positive;     // p = 1: drop probabilities that are 0

    VT_MEMBER Wish(i64 row, i64 width, const int* ks, const float* ps, unsigned maximum) {
        i64 k = ks != nullptr ? ks[row] : 0;
        by_k = k >= 1 && k < width && maximum != CODE_MINUS_INF;
        rank = width - k;
        limit = ps != nullptr ? 1.0f - ps[row] : -1.0f;
        by_p = is_finite(maximum) && limit > 0.0f;
        positive = is_finite(maximum) && limit == 0.0f;
    }
};

// The chunks' maxima; and histograms of nothing, for the next launch to add to.
template <int V>
VT_FN void truncate_maximum(i64 width, i64 chunks, i64 per, const float* logits, unsigned* maxima, unsigned* counts,
                            u64* masses) {
    const i64 row = chunk_of(width, chunks, per).row, number = blockIdx.x - row * chunks;
    for (i64 i = number * blockDim.x + threadIdx.x; i < BINS; i += chunks * blockDim.x) {
        counts[row * BINS + i] = 0;
        masses[row * BINS + i] = 0;
    }
    chunk_maximum<V>(width, chunks, per, logits, maxima);
}

template <int V>
VT_FN void truncate_bins(i64 width, i64 chunks, i64 per, i64 maxima_of_row, const float* logits, const int* ks,
                         const float* ps, const unsigned* maxima, unsigned* counts, u64* masses) {
    __shared__ unsigned count[BINS], low[BINS], high[BINS];
    const Chunk part = chunk_of(width, chunks, per);
    const unsigned maximum = row_maximum(maxima + part.row * maxima_of_row, maxima_of_row);
    const Wish wish(part.row, width, ks, ps, maximum);
    if (!wish.by_k && !wish.by_p) return;
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) count[i] = low[i] = high[i] = 0;
    __syncthreads();
    const Bins bins(maximum);
    unsigned rest = 0;  // of the first bin, where masked logits pile up
    u64 rest_mass = 0;
    each_logit<V>(logits + part.row * width, part.begin, part.end, [&](float x, i64) {
        int at = bins.of(x, code_of(x));
        u64 n = wish.by_p ? units(vt_exp(x - bins.peak)) : 0;
        if (at == 0) {
            ++rest;
            rest_mass += n;
        } else {
            if (wish.by_k) atomicAdd(&count[at], 1u);
            if (wish.by_p) add_units(&low[at], &high[at], n);
        }
    });
    if (rest) atomicAdd(&count[0], rest);
    if (rest_mass) add_units(&low[0], &high[0], rest_mass);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) {
        u64 mass = (u64)high[i] << 32 | low[i];
        if (count[i]) atomicAdd(&counts[part.row * BINS + i], count[i]);
        if (mass) atomicAdd(&masses[part.row * BINS + i], mass);
    }
}

// The least that stays: everything of a higher code, and of this code the columns from `column` on.
struct Threshold {
    unsigned code, column;
};

#define SELECTORS 512  // threads of a selecting block
#define BINS_EACH (BINS / SELECTORS)

// The bin at which `past` starts to hold; `below` and `count` as in `narrow`. A thread has some neighbouring bins.
template <class Past>
VT_FN int pick_bin(Selection& s, const Below (&mine)[BINS_EACH], Below first, Below& below, Past&& past) {
#pragma unroll
    for (int j = 0; j < BINS_EACH; ++j) {
        Below next = first + mine[j];
        if (!past(first) && past(next)) {
            s.chosen = BINS_EACH * threadIdx.x + j;
            s.before = first;
        }
        first = next;
    }
    __syncthreads();
    int bin = (int)s.chosen;
    below = s.before;
    __syncthreads();
    return bin;
}

// The logits of the bins from `first` to `last`, as a list where there are no more than ROOM.
template <int V> VT_FN Source gather(Selection& s, const float* row, i64 width, const Bins& bins, int first, int last) {
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    each_logit<V, 8>(row, 0, width, [&](float x, i64 at) {  // a block on its own waits for memory most
        unsigned code = code_of(x);
        int bin = bins.of(x, code);
        if (bin < first || bin > last) return;
        unsigned slot = atomicAdd(&s.listed, 1u);
        if (slot < ROOM) s.list[slot] = (u64)code << 32 | (unsigned)at;
    });
    __syncthreads();
    return {s.list, s.listed <= ROOM ? (int)s.listed : -1, row, width};
}

template <int V>
VT_FN Threshold threshold_of(Selection& s, const float* row, i64 width, unsigned maximum, const Wish& wish,
                             const unsigned* counts, const u64* masses) {
    const Bins bins(maximum);
    Below mine[BINS_EACH], own = {0, 0}, total, below, below_k = {0, 0};
#pragma unroll
    for (int j = 0; j < BINS_EACH; ++j) {
        mine[j] = {counts[BINS_EACH * threadIdx.x + j], masses[BINS_EACH * threadIdx.x + j]};
        own = own + mine[j];
    }
    const Below first = block_before(own, s.warps, total);
    __syncthreads();
    Threshold found = {0, 0};
    Source from = {s.list, 0, row, width};
    int from_bin = BINS, to_bin = -1;  // that `from` has
    unsigned count;
    auto code_in = [](unsigned code, unsigned) { return code; };
    auto column_in = [](unsigned, unsigned column) { return column; };
    auto weight = [&](unsigned code) { return units(vt_exp(value_of(code) - bins.peak)); };
    auto every = [](unsigned, unsigned) { return true; };

    if (wish.by_k) {
        auto past = [&](Below b) { return (i64)b.count > wish.rank; };
        from_bin = pick_bin(s, mine, first, below, past);
        bool all = wish.by_p && total.count - below.count <= ROOM;  // then p needs no look at the row of its own
        to_bin = all ? BINS - 1 : from_bin;
        from = gather<V>(s, row, width, bins, from_bin, to_bin);
        auto in_bin = [&](unsigned code, unsigned) { return bins.of(value_of(code), code) == from_bin; };
        Extent codes = extent(from, code_in, in_bin);
        count = codes.count;
        found.code = narrow(s, from, codes.least, codes.most, below, count, wish.by_p, code_in, every, weight, past);
        if (found.code == CODE_NAN) found.code = 0;  // nothing is less than NaN
        below_k = below;
        __syncthreads();
    }
    if (wish.by_p) {
        const float whole = (float)(total.mass - below_k.mass);
        auto past = [&](Below b) {
            if (b.mass <= below_k.mass) return false;
            return b.mass == total.mass || !((float)(b.mass - below_k.mass) / whole <= wish.limit);
        };
        int bin = pick_bin(s, mine, first, below, past);
        if (bin < from_bin || bin > to_bin) from = gather<V>(s, row, width, bins, bin, bin);
        auto in_bin = [&](unsigned code, unsigned) { return bins.of(value_of(code), code) == bin; };
        Extent codes = extent(from, code_in, in_bin);
        count = codes.count;
        found.code = narrow(s, from, codes.least, codes.most, below, count, true, code_in, every, weight, past);
        // Of equal logits those of lower column go first: as many as may, the (dropped + 1)-th stays.
        const u64 each = weight(found.code);
        unsigned dropped = 0;
        for (unsigned more = count ? count - 1 : 0; dropped < more;) {
            unsigned middle = dropped + (more - dropped + 1) / 2;
            if (past({0, below.mass + each * middle})) more = middle - 1;
            else dropped = middle;
        }
        if (dropped) {
            auto tied = [&](unsigned code, unsigned) { return code == found.code; };
            auto past_dropped = [&](Below b) { return b.count > dropped; };
            __syncthreads();
            Extent columns = extent(from, column_in, tied);
            below = {0, 0};
            found.column = narrow(s, from, columns.least, columns.most, below, count, false, column_in, tied, weight,
                                  past_dropped);
        }
    }
    return found;
}

// thresholds[row] = the least that stays of each row; a block of SELECTORS threads a row.
template <int V>
VT_FN void truncate_select(i64 width, i64 chunks, const float* logits, const int* ks, const float* ps,
                           const unsigned* maxima, const unsigned* counts, const u64* masses, Threshold* thresholds) {
    __shared__ Selection s;
    const i64 row = blockIdx.x;
    const unsigned maximum = row_maximum(maxima + row * chunks, chunks);
    const Wish wish(row, width, ks, ps, maximum);
    Threshold found = {0, 0};
    if (wish.by_k || wish.by_p)
        found = threshold_of<V>(s, logits + row * width, width, maximum, wish, counts + row * BINS, masses + row * BINS);
    if (threadIdx.x == 0) thresholds[row] = found;
}

template <int V>
VT_FN void truncate_mask(i64 width, i64 chunks, i64 per, const float* logits, const int* ks, const float* ps,
                         const unsigned* maxima, const Threshold* thresholds, float* out) {
    const Chunk part = chunk_of(width, chunks, per);
    const unsigned maximum = row_maximum(maxima + part.row * chunks, chunks);
    const Wish wish(part.row, width, ks, ps, maximum);
    const Threshold least = thresholds[part.row];
    const float peak = value_of(maximum);
    map_logits<V>(logits + part.row * width, out + part.row * width, part.begin, part.end, [&](float x, i64 at) {
        unsigned code = code_of(x);
        bool stays = code > least.code || (code == least.code && (unsigned)at >= least.column);
        if (wish.positive && x - peak < -100.0f && !(vt_exp(x - peak) > 0.0f)) stays = false;
        return stays ? x : -VT_INF;
    });
}

#define LOGITS_ROWS(V)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) temperature_v##V(                                           \
        ROWS, const float* logits, const float* temperatures, i64 all_random, float* out) {                       \
        temperature<V>(rows, width, chunks, logits, temperatures, all_random, out);                               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) penalties_v##V(                                             \
        ROWS, const float* logits, const signed char* prompt_mask, const int* output_counts,                      \
        const signed char* output_mask, const float* frequency, const float* presence, const float* repetition,   \
        float* out) {                                                                                             \
        penalties<V>(rows, width, chunks, logits, prompt_mask, output_counts, output_mask, frequency, presence,   \
                     repetition, out);                                                                            \
    }
LOGITS_ROWS(8)
LOGITS_ROWS(1)

#define LOGITS_CHUNKS(V)                                                                                          \
    SOFTMAX_KERNELS(logits, V)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) min_p_v##V(                                                 \
        i64 width, i64 chunks, i64 per, const float* logits, const float* minima, const unsigned* maxima,         \
        const u64* sums, float* out) {                                                                            \
        min_p<V>(width, chunks, per, logits, minima, maxima, sums, out);                                          \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) truncate_maximum_v##V(                                      \
        i64 width, i64 chunks, i64 per, const float* logits, unsigned* maxima, unsigned* counts, u64* masses) {   \
        truncate_maximum<V>(width, chunks, per, logits, maxima, counts, masses);                                  \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) truncate_bins_v##V(                                         \
        i64 width, i64 chunks, i64 per, i64 maxima_of_row, const float* logits, const int* ks, const float* ps,   \
        const unsigned* maxima, unsigned* counts, u64* masses) {                                                  \
        truncate_bins<V>(width, chunks, per, maxima_of_row, logits, ks, ps, maxima, counts, masses);              \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(SELECTORS, 1) truncate_select_v##V(                                  \
        i64 width, i64 chunks, const float* logits, const int* ks, const float* ps, const unsigned* maxima,       \
        const unsigned* counts, const u64* masses, Threshold* thresholds) {                                       \
        truncate_select<V>(width, chunks, logits, ks, ps, maxima, counts, masses, thresholds);                    \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) truncate_mask_v##V(                                         \
        i64 width, i64 chunks, i64 per, const float* logits, const int* ks, const float* ps,                      \
        const unsigned* maxima, const Threshold* thresholds, float* out) {                                        \
        truncate_mask<V>(width, chunks, per, logits, ks, ps, maxima, thresholds, out);                            \
    }
LOGITS_CHUNKS(4)
LOGITS_CHUNKS(1)
