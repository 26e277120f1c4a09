// The stages before the states of chunked Kimi delta attention, each an op of its own: running sums of its gates, K K^T
// and Q K^T under their decays, and the factors w, u and kg. Sums are chains of fma in ascending order, so bytes are
// MIRROR's for every shape and dtype; kda_prepare.cuh does all of them at once on tensor cores, where the shape allows
// it. The triangular inverse is the gated delta rule's.
//
// The ladder:
// 1. kda_gate_cumsum: a thread a chunk and channel walks along the tokens, whose neighbours share the lines.
// 2. kda_kkt: a thread an element of both matrices, whose decays it makes once for the two.
// 3. kda_recompute_w_u: a block a chunk, head and 128 columns of [k | v]; a thread keeps its column's rounded factors.
#include "chunks.cuh"
#include "kda_decay.cuh"

#define BLOCK 16
#define MOST 64  // tokens of a chunk whose factors are kept
#define COLUMNS 128

extern "C" __global__ void __launch_bounds__(128)
    kda_gate_cumsum(i64 heads, i64 width, const void* g1, i64 kind, const float* A_log, const float* dt_bias,
                    const int* starts, i64 sequences, i64 size, float slope, float threshold, float* gc) {
    const Chunks chunks = {starts, nullptr, (int)sequences, (int)size};
    i64 across = (heads * width + blockDim.x - 1) / blockDim.x;
    const Piece piece = chunks.at((int)(blockIdx.x / across));
    i64 channel = blockIdx.x % across * blockDim.x + threadIdx.x;
    if (piece.length <= 0 || channel >= heads * width) return;
    float fade = -vt_exp(A_log[channel / width]), bias = dt_bias != nullptr ? dt_bias[channel] : 0.0f, total = 0.0f;
    for (int i = 0; i < piece.length; ++i) {
        i64 at = (i64)(piece.first + i) * heads * width + channel;
        float one[1];
        load(one, g1, at, (int)kind);
        float y = dt_bias != nullptr ? one[0] + bias : one[0], scaled = y * slope;
        if (!(scaled > threshold)) y = vt_softplus(scaled) / slope;
        total += fade * y;
        gc[at] = total * 1.4426950408889634f;
    }
}

extern "C" __global__ void __launch_bounds__(128)
    kda_kkt(i64 tokens, i64 heads, i64 width, const void* q, const void* k, i64 kind, const float* gc,
            const float* beta, const int* starts, i64 sequences, i64 size, float scale, float* Akk, float* Aqk) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= tokens * heads * size) return;
    const Chunks chunks = {starts, nullptr, (int)sequences, (int)size};
    i64 t = at / size / heads;
    int head = (int)(at / size % heads), j = (int)(at % size);
    const int first = chunks.of_token((int)t).first, i = (int)t - first;
    const i64 step = heads * width;
    const Heads queries = {q, step, width}, keys = {k, step, width}, sums = {gc, step, width};
    float of_k = 0.0f, of_q = 0.0f;
    if (j <= i) {
        i64 between = first + i / BLOCK * BLOCK, other = first + j;
        bool apart = other < between;
        for (int d = 0; d < (int)width; ++d) {
            float own = sums.element(t, head, d, F32), its = sums.element(other, head, d, F32);
            float left = keys.element(t, head, d, (int)kind), query = queries.element(t, head, d, (int)kind);
            float right = keys.element(other, head, d, (int)kind);
            if (apart) {
                float middle = sums.element(between, head, d, F32), fade = exp2_of(own - middle);
                left *= fade;
                query *= fade;
                right *= exp2_of(middle - its);
            } else {
                right *= exp2_of(vt_minimum(own - its, 0.0f));
            }
            of_k = vt_fma(left, right, of_k);
            of_q = vt_fma(query, right, of_q);
        }
        of_k = j < i ? of_k * beta[t * heads + head] : 0.0f;
        of_q *= scale;
    }
    Akk[at] = of_k;
    Aqk[at] = of_q;
}

extern "C" __global__ void __launch_bounds__(COLUMNS)
    kda_recompute_w_u(i64 heads, i64 k_width, i64 v_width, const void* k, const void* v, i64 kind, const float* beta,
                      const float* gc, const void* Ai, const int* starts, i64 sequences, i64 size, void* w, void* u,
                      void* kg) {
    __shared__ float factors[MOST * COLUMNS];
    const Chunks chunks = {starts, nullptr, (int)sequences, (int)size};
    i64 across = (k_width + v_width + COLUMNS - 1) / COLUMNS;
    const Piece piece = chunks.at((int)(blockIdx.x / across / heads));
    int head = (int)(blockIdx.x / across % heads);
    i64 d = blockIdx.x % across * COLUMNS + threadIdx.x;
    if (piece.length <= 0 || d >= k_width + v_width) return;
    bool of_k = d < k_width;
    if (!of_k) d -= k_width;
    i64 width = of_k ? k_width : v_width;
    const Heads rows = {of_k ? k : v, heads * width, width}, sums = {gc, heads * width, width};
    float* own = factors + threadIdx.x;
    i64 row = (i64)piece.first * heads + head;
    float last = of_k ? sums.element(piece.first + piece.length - 1, head, (int)d, F32) : 0.0f;
    for (int j = 0; j < (int)size; ++j) {
        bool there = j < piece.length;
        float x = there ? rows.element(piece.first + j, head, (int)d, (int)kind) : 0.0f;
        float factor = x * (there ? beta[row + j * heads] : 0.0f);
        if (of_k) {
            float sum = there ? sums.element(piece.first + j, head, (int)d, F32) : last;
            factor *= exp2_of(sum);
            if (there) store_one(kg, (row + j * heads) * k_width + d, x * exp2_of(last - sum), (int)kind);
        }
        own[j * COLUMNS] = through(factor, (int)kind);
    }
    for (int i = 0; i < piece.length; ++i) {
        float total = 0.0f;
        for (int j = 0; j < (int)size; ++j) {
            float one[1];
            load(one, Ai, (row + i * heads) * size + j, (int)kind);
            total = vt_fma(one[0], own[j * COLUMNS], total);
        }
        store_one(of_k ? w : u, (row + i * heads) * width + d, total, (int)kind);
    }
}
