// Draws: the exponential race over probabilities and the Gumbel arg-max over logits.
//
// The ladder: a row over many blocks, each column's random number from its own index (no state, no order), the best of
// each chunk, then of the row: two launches. The time goes into the generators and logarithms, so that columns which
// cannot win skip them: a probability of 0 in the race, whose score is known, a row without temperature in the other.
#include "vocab.cuh"

VT_FN u64 splitmix64(u64 x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

struct Words {
    unsigned w0, w1;
};

// The first two words of Philox4x32-10: key = seed, counter = (offset, 0, 0).
VT_FN Words philox(u64 seed, u64 offset) {
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
    unsigned c0 = (unsigned)offset, c1 = (unsigned)(offset >> 32), c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        u64 a = (u64)0xD2511F53u * c0, b = (u64)0xCD9E8D57u * c2;
        c0 = (unsigned)(b >> 32) ^ c1 ^ k0;
        c1 = (unsigned)b;
        c2 = (unsigned)(a >> 32) ^ c3 ^ k1;
        c3 = (unsigned)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {c0, c1};
}

// A score as an integer that ascends with it, NaN as -inf, and the complement of its column: of equal scores the lower
// column wins.
struct Best {
    u64 code, place;
};

VT_FN u64 code_of_score(double score) {
    if (score != score) score = -(double)VT_INF;
    score += 0.0;  // -0 is +0
    u64 bits;
    memcpy(&bits, &score, sizeof bits);
    return bits >> 63 ? ~bits : bits | 0x8000000000000000ull;
}

VT_FN Best better(Best a, Best b) {
    bool second = b.code > a.code || (b.code == a.code && b.place > a.place);
    return second ? b : a;
}

VT_FN Best best_of_block(Best mine) {
    __shared__ u64 codes[32], places[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll
        for (int m = 16; m >= 1; m >>= 1)
            mine = better(mine, {__shfl_xor_sync(VOCAB_LANES, mine.code, m), __shfl_xor_sync(VOCAB_LANES, mine.place, m)});
        if (pass == 1) break;
        if (lane == 0) {
            codes[warp] = mine.code;
            places[warp] = mine.place;
        }
        __syncthreads();
        bool there = lane < (int)(blockDim.x >> 5);
        mine.code = there ? codes[lane] : 0;
        mine.place = there ? places[lane] : 0;
    }
    return mine;
}

// The best of this block's chunk, score(x, column) being the score of each.
template <int V, class Score>
VT_FN void best_of_chunk(i64 width, const Chunk& part, const float* values, Best* bests, Score&& score) {
    Best best = {0, 0};
    each_logit<V>(values + part.row * width, part.begin, part.end,
                  [&](float x, i64 at) { best = better(best, {score(x, at), ~(u64)at}); });
    best = best_of_block(best);
    if (threadIdx.x == 0) bests[blockIdx.x] = best;
}

extern "C" __global__ void __launch_bounds__(256) best_of_rows(i64 chunks, const Best* bests, i64* ids) {
    Best best = {0, 0};
    for (i64 i = threadIdx.x; i < chunks; i += blockDim.x) best = better(best, bests[(i64)blockIdx.x * chunks + i]);
    best = best_of_block(best);
    if (threadIdx.x == 0) ids[blockIdx.x] = (i64)~best.place;
}

template <int V>
VT_FN void race(i64 width, i64 chunks, i64 per, const float* probs, const i64* seeds, Best* bests) {
    const Chunk part = chunk_of(width, chunks, per);
    const u64 key = splitmix64((u64)seeds[part.row] + 0x9E3779B97F4A7C15ull * (u64)part.row);
    best_of_chunk<V>(width, part, probs, bests, [&](float p, i64 at) {
        u64 n = (splitmix64(key + (u64)at) >> 11) + 1;
        if (p == 0.0f) return code_of_score(n >> 53 ? (double)VT_NAN : 0.0);
        float q = (float)-log((double)n * 0x1p-53);
        return code_of_score((double)(p / q));
    });
}

// float32 noise of one column: the uniform is that of Triton, at least its step.
VT_FN float gumbel(u64 stream, i64 column) {
    const float step = 4.6566127342e-10f;
    int word = (int)philox(stream, (u64)column).w0;
    float u = (float)(word < 0 ? ~word : word) * step;
    u = u > step ? u : step;
    return -vt_log(-vt_log1p(-u));
}

VT_FN double gumbel_f64(u64 stream, i64 column) {
    Words words = philox(stream, (u64)column);
    double u = (double)((u64)words.w1 << 32 | words.w0) * 0x1p-64;
    return -log(-log(u > 0x1p-1022 ? u : 0x1p-1022));
}

template <int V>
VT_FN void gumbel_chunks(i64 width, i64 chunks, i64 per, i64 requests, const float* logits, const int* req_idx,
                         const float* temperatures, const i64* seeds, const i64* positions, i64 divide, i64 fp64,
                         Best* bests) {
    const Chunk part = chunk_of(width, chunks, per);
    const i64 request = req_idx[part.row];
    const float t = request >= 0 && request < requests ? temperatures[request] : 0.0f;
    const bool random = t != 0.0f;
    const u64 stream = random ? philox((u64)seeds[request], (u64)positions[part.row]).w0 : 0;
    // A NaN in column 0 stays the best: its code is above all others.
    auto first = [](double score, i64 at) { return at == 0 && score != score ? ~(u64)0 : code_of_score(score); };
    if (!random) {
        best_of_chunk<V>(width, part, logits, bests, [&](float x, i64 at) { return first((double)x, at); });
    } else if (fp64) {
        best_of_chunk<V>(width, part, logits, bests, [&](float x, i64 at) {
            return first((double)(divide ? x / t : x) + gumbel_f64(stream, at), at);
        });
    } else {
        best_of_chunk<V>(width, part, logits, bests, [&](float x, i64 at) {
            return first((double)((divide ? x / t : x) + gumbel(stream, at)), at);
        });
    }
}

// The lowest row whose request is beyond the temperatures; negative ones mark padding.
extern "C" __global__ void request_fault(i64 rows, const int* req_idx, i64 requests, i64* first_bad) {
    i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    i64 request = req_idx[row] > 0 ? req_idx[row] : 0;
    if (request >= requests) atomicMin(first_bad, row);
}

#define DRAWS(V)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2) race_v##V(                                                  \
        i64 width, i64 chunks, i64 per, const float* probs, const i64* seeds, Best* bests) {                      \
        race<V>(width, chunks, per, probs, seeds, bests);                                                         \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256, 2) gumbel_v##V(                                                \
        i64 width, i64 chunks, i64 per, i64 requests, const float* logits, const int* req_idx,                    \
        const float* temperatures, const i64* seeds, const i64* positions, i64 divide, i64 fp64, Best* bests) {   \
        gumbel_chunks<V>(width, chunks, per, requests, logits, req_idx, temperatures, seeds, positions, divide,   \
                         fp64, bests);                                                                            \
    }
DRAWS(4)
DRAWS(1)
