// The gated delta rule in chunks: where chunks stand, the states between them, the outputs, and the whole of it.
//
// The ladder:
// 1. gdn_delta_h_any, gdn_chunk_o_any: chains of fma in MIRROR's order, so bytes are its own, for every shape and
//    dtype. Rows of S have nothing to do with each other, so a block takes one of them through its sequence, in shared
//    memory; a block of the outputs takes one token and head.
// 2. gdn_prepare, gdn_delta_h_bf16, gdn_chunk_o_bf16: bfloat16 heads of 128 in chunks of 64 on tensor cores. What no
//    state is needed for is one kernel over all chunks; then the walk from chunk to chunk, S in registers; then the
//    outputs, of all chunks again.
#include "gdn_chunk_o.cuh"
#include "gdn_delta_h.cuh"
#include "gdn_prepare.cuh"

// A block a sequence. Without `first` only `before` is written.
extern "C" __global__ void __launch_bounds__(128)
    gdn_chunk_layout(const int* starts, i64 sequences, i64 size, int* first, int* length, int* before, int* chunk) {
    __shared__ int total;
    const Chunks chunks = {starts, nullptr, (int)sequences, (int)size};
    int n = blockIdx.x, part = 0;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    for (int m = threadIdx.x; m < n; m += blockDim.x) part += chunks.count(m);
    atomicAdd(&total, part);
    __syncthreads();
    if (threadIdx.x == 0) before[n] = total;
    if (first == nullptr) return;
    for (int c = threadIdx.x; c < chunks.count(n); c += blockDim.x) {
        const Piece piece = chunks.part(n, c);
        i64 at = total + c;
        first[at] = piece.first;
        length[at] = piece.length;
        chunk[2 * at] = n;
        chunk[2 * at + 1] = c;
    }
}

extern "C" __global__ void __launch_bounds__(128)
    gdn_delta_h_any(i64 heads, i64 k_heads, i64 k_width, i64 v_width, const void* k, i64 kind, const void* w,
                    const void* u, const float* gc, float* state, const int* starts, const int* before, i64 sequences,
                    i64 size, void* h, void* v_new) {
    VT_SHARED(shared);
    const Chunks chunks = {starts, before, (int)sequences, (int)size};
    int d_of_v = (int)(blockIdx.x % v_width), head = (int)(blockIdx.x / v_width % heads);
    int n = (int)(blockIdx.x / v_width / heads), k_head = head / (int)(heads / k_heads);
    float *S = (float*)shared, *rounded = S + k_width, *written = rounded + k_width;
    const Heads keys = {k, k_heads * k_width, k_width}, factors = {w, heads * k_width, k_width};
    const Heads values = {u, heads * v_width, v_width};
    float* kept = state + (((i64)n * heads + head) * v_width + d_of_v) * k_width;
    for (int d = threadIdx.x; d < k_width; d += blockDim.x) S[d] = kept[d];
    for (int c = 0; c < chunks.count(n); ++c) {
        const Piece piece = chunks.part(n, c);
        i64 place = (((i64)(chunks.place(n) + c) * heads + head) * v_width + d_of_v) * k_width;
        for (int d = threadIdx.x; d < k_width; d += blockDim.x) {
            rounded[d] = through(S[d], (int)kind);
            store_one(h, place + d, S[d], (int)kind);
        }
        __syncthreads();
        float last = gc[(i64)(piece.first + piece.length - 1) * heads + head];
        for (int i = threadIdx.x; i < size; i += blockDim.x) {
            bool there = i < piece.length;
            i64 token = piece.first + i;
            float total = 0.0f;
            for (int d = 0; d < k_width; ++d)
                total = vt_fma(there ? factors.element(token, head, d, (int)kind) : 0.0f, rounded[d], total);
            float change = (there ? values.element(token, head, d_of_v, (int)kind) : 0.0f) - total;
            float fade = there ? vt_exp(last - gc[token * heads + head]) : 0.0f;
            if (there) store_one(v_new, (token * heads + head) * v_width + d_of_v, change, (int)kind);
            written[i] = through(change * fade, (int)kind);
        }
        __syncthreads();
        float keep = vt_exp(last);
        for (int d = threadIdx.x; d < k_width; d += blockDim.x) {
            float total = 0.0f;
            for (int i = 0; i < size; ++i) {
                float key = i < piece.length ? keys.element(piece.first + i, k_head, d, (int)kind) : 0.0f;
                total = vt_fma(written[i], key, total);
            }
            S[d] = S[d] * keep + total;
        }
    }
    for (int d = threadIdx.x; d < k_width; d += blockDim.x) kept[d] = S[d];
}

extern "C" __global__ void __launch_bounds__(128)
    gdn_chunk_o_any(i64 heads, i64 k_heads, i64 k_width, i64 v_width, const void* q, const void* k,
                    i64 kind, const void* v_new, const void* h, const float* gc, const int* starts, const int* before,
                    i64 sequences, i64 size, float scale, void* out) {
    VT_SHARED(shared);
    float* weights = (float*)shared;
    const Chunks chunks = {starts, before, (int)sequences, (int)size};
    int t = (int)(blockIdx.x / heads), head = (int)(blockIdx.x % heads), k_head = head / (int)(heads / k_heads);
    const Piece piece = chunks.of_token(t);
    int own = t - piece.first, local = (piece.first - chunks.begin(piece.sequence)) / (int)size;
    const Heads queries = {q, k_heads * k_width, k_width}, keys = {k, k_heads * k_width, k_width};
    const Heads values = {v_new, heads * v_width, v_width};
    float sum = gc[(i64)t * heads + head];
    for (int j = threadIdx.x; j < size; j += blockDim.x) {
        float y = 0.0f;
        if (j <= own) {
            i64 token = piece.first + j;
            for (int d = 0; d < k_width; ++d)
                y = vt_fma(queries.element(t, k_head, d, (int)kind), keys.element(token, k_head, d, (int)kind), y);
            y = through(y * vt_exp(sum - gc[token * heads + head]), (int)kind);
        }
        weights[j] = y;
    }
    __syncthreads();
    const Heads states = {h, k_width, k_width};
    i64 place = ((i64)(chunks.place(piece.sequence) + local) * heads + head) * v_width;
    float decay = vt_exp(sum);
    for (int d = threadIdx.x; d < v_width; d += blockDim.x) {
        float before_it = 0.0f, inside = 0.0f;
        for (int i = 0; i < k_width; ++i) {
            float query = queries.element(t, k_head, i, (int)kind);
            before_it = vt_fma(query, states.element(place + d, 0, i, (int)kind), before_it);
        }
        for (int j = 0; j < size; ++j) {
            float value = j < piece.length ? values.element(piece.first + j, head, d, (int)kind) : 0.0f;
            inside = vt_fma(weights[j], value, inside);
        }
        store_one(out, ((i64)t * heads + head) * v_width + d, before_it * decay * scale + inside * scale, (int)kind);
    }
}
