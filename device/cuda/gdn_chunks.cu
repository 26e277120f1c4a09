// The stages before the states of the chunked gated delta rule, each an op of its own: running sums of g, K K^T, the
// triangular inverse, and the factors w and u. Sums are chains of fma in ascending order, so bytes are MIRROR's for
// every shape and dtype; gdn_prepare.cuh does all four at once on tensor cores, where the shape allows it.
//
// The ladder:
// 1. gdn_chunk_cumsum: a thread a token and head sums from its chunk's start; chunks are short, neighbours share the
//    lines.
// 2. gdn_kkt: a thread an element, whose two rows of k its neighbours read too.
// 3. gdn_recompute_w_u: a block a chunk and head, whose decays are taken once.
// 4. gdn_solve_tril: a block a chunk and head in shared memory: the diagonal blocks of 16 by substitution, a thread a
//    column, then the blocks below them row by row, a thread an element.
#include "chunks.cuh"

extern "C" __global__ void __launch_bounds__(128)
    gdn_chunk_cumsum(i64 tokens, i64 heads, const float* g, const int* starts, i64 sequences, i64 size, float* gc) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= tokens * heads) return;
    const Chunks chunks = {starts, nullptr, (int)sequences, (int)size};
    i64 head = at % heads;
    float total = 0.0f;
    for (i64 t = chunks.of_token((int)(at / heads)).first; t <= at / heads; ++t) total += g[t * heads + head];
    gc[at] = total;
}

extern "C" __global__ void __launch_bounds__(128)
    gdn_kkt(i64 tokens, i64 heads, i64 k_heads, i64 width, const void* k, i64 kind, const float* beta,
            const float* gc, const int* starts, i64 sequences, i64 size, float* A) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= tokens * heads * size) return;
    const Chunks chunks = {starts, nullptr, (int)sequences, (int)size};
    const Heads keys = {k, k_heads * width, width};
    int head = (int)(at / size % heads), k_head = head / (int)(heads / k_heads);
    i64 t = at / size / heads, other = chunks.of_token((int)t).first + at % size;
    float y = 0.0f;
    if (other < t) {
        float total = 0.0f, strength = beta[t * heads + head];
        for (int d = 0; d < (int)width; ++d)
            total = vt_fma(keys.element(t, k_head, d, (int)kind) * strength,
                           keys.element(other, k_head, d, (int)kind), total);
        y = total * vt_exp(gc[t * heads + head] - gc[other * heads + head]);
    }
    A[at] = y;
}

#define BLOCK 16
#define MOST 64  // tokens of a chunk that is solved

// sum over k of a[row, k] b[k, column] in a block of 16.
VT_FN float chain(const float* a, int row, const float* b, int column) {
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < BLOCK; ++k) total = vt_fma(a[row * MOST + k], b[k * MOST + column], total);
    return total;
}

extern "C" __global__ void __launch_bounds__(BLOCK * BLOCK)
    gdn_solve_tril(i64 heads, const float* A, const int* starts, i64 sequences, i64 size, void* Ai, i64 kind) {
    __shared__ float a[MOST * MOST], x[MOST * MOST], part[BLOCK * MOST];
    const Chunks chunks = {starts, nullptr, (int)sequences, (int)size};
    const Piece piece = chunks.at((int)(blockIdx.x / heads));
    if (piece.length <= 0) return;
    i64 head = blockIdx.x % heads;
    for (int i = threadIdx.x; i < size * size; i += blockDim.x) {
        int row = i / (int)size, column = i % (int)size;
        a[row * MOST + column] = row < piece.length ? A[((piece.first + row) * heads + head) * size + column] : 0.0f;
        x[row * MOST + column] = 0.0f;
    }
    __syncthreads();
    if (threadIdx.x < size) {
        int column = threadIdx.x, start = column / BLOCK * BLOCK;
        for (int i = 0; i < BLOCK; ++i) {
            float total = 0.0f;
            for (int j = 0; j < i; ++j)
                total = vt_fma(a[(start + i) * MOST + start + j], x[(start + j) * MOST + column], total);
            x[(start + i) * MOST + column] = (start + i == column ? 1.0f : 0.0f) - total;
        }
    }
    int row = threadIdx.x / BLOCK, column = threadIdx.x % BLOCK;
    for (int i = BLOCK; i < size; i += BLOCK)
        for (int j = i - BLOCK; j >= 0; j -= BLOCK) {
            __syncthreads();
            float total = 0.0f;
            for (int l = j; l < i; l += BLOCK) total += chain(a + i * MOST + l, row, x + l * MOST + j, column);
            part[row * MOST + column] = total;
            __syncthreads();
            x[(i + row) * MOST + j + column] = -chain(x + i * MOST + i, row, part, column);
        }
    __syncthreads();
    for (int i = threadIdx.x; i < piece.length * size; i += blockDim.x) {
        int row = i / (int)size, column = i % (int)size;
        store_one(Ai, ((piece.first + row) * heads + head) * size + column, x[row * MOST + column], (int)kind);
    }
}

extern "C" __global__ void __launch_bounds__(128)
    gdn_recompute_w_u(i64 heads, i64 k_heads, i64 k_width, i64 v_width, const void* k, const void* v,
                      i64 kind, const float* beta, const float* gc, const void* Ai, const int* starts,
                      i64 sequences, i64 size, void* w, void* u) {
    VT_SHARED(shared);
    const Chunks chunks = {starts, nullptr, (int)sequences, (int)size};
    const Piece piece = chunks.at((int)(blockIdx.x / heads));
    if (piece.length <= 0) return;
    int head = (int)(blockIdx.x % heads), k_head = head / (int)(heads / k_heads);
    float *strength = (float*)shared, *decay = strength + size;
    for (int j = threadIdx.x; j < size; j += blockDim.x) {
        bool there = j < piece.length;
        strength[j] = there ? beta[(piece.first + j) * heads + head] : 0.0f;
        decay[j] = vt_exp(there ? gc[(piece.first + j) * heads + head] : 0.0f);
    }
    __syncthreads();
    const Heads keys = {k, k_heads * k_width, k_width}, values = {v, heads * v_width, v_width};
    int both = (int)(k_width + v_width);
    for (int at = threadIdx.x; at < piece.length * both; at += blockDim.x) {
        int i = at / both, d = at % both;
        bool of_k = d < k_width;
        if (!of_k) d -= (int)k_width;
        i64 row = (piece.first + i) * heads + head;
        float total = 0.0f;
        for (int j = 0; j < size; ++j) {
            float factor = 0.0f;
            if (j < piece.length) {
                i64 token = piece.first + j;
                factor = of_k ? keys.element(token, k_head, d, (int)kind) * strength[j] * decay[j]
                              : values.element(token, head, d, (int)kind) * strength[j];
            }
            float one[1];
            load(one, Ai, row * size + j, (int)kind);
            total = vt_fma(one[0], through(factor, (int)kind), total);
        }
        store_one(of_k ? w : u, row * (of_k ? k_width : v_width) + d, total, (int)kind);
    }
}
