// Kimi delta attention in chunks: the states between them, the outputs, and the whole of it.
//
// The ladder:
// 1. kda_delta_h_any, kda_chunk_o_any: chains of fma in MIRROR's order, as the gated delta rule's, for every shape and
//    dtype.
// 2. kda_prepare, kda_delta_h_bf16, kda_chunk_o_bf16: bfloat16 heads of 128 in chunks of 64 on tensor cores. Decays
//    have their place in the first of them; the others read its factors, and the sums of a chunk's last token. For
//    kda_chunk_o alone kda_chunk_weights makes these factors, with MIRROR's powers.
#include "kda_prepare.cuh"
#include "kda_chunk_o.cuh"
#include "kda_delta_h.cuh"

extern "C" __global__ void __launch_bounds__(128)
    kda_delta_h_any(i64 heads, i64 k_width, i64 v_width, const void* kg, i64 kind, const void* w, const void* u,
                    const float* gc, float* state, const int* starts, const int* before, i64 sequences, i64 size,
                    void* h, void* v_new) {
    VT_SHARED(shared);
    const Chunks chunks = {starts, before, (int)sequences, (int)size};
    int d_of_v = (int)(blockIdx.x % v_width), head = (int)(blockIdx.x / v_width % heads);
    int n = (int)(blockIdx.x / v_width / heads);
    float *S = (float*)shared, *rounded = S + k_width, *written = rounded + k_width;
    const Heads keys = {kg, heads * k_width, k_width}, factors = {w, heads * k_width, k_width};
    const Heads values = {u, heads * v_width, v_width}, sums = {gc, heads * k_width, k_width};
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
        for (int i = threadIdx.x; i < size; i += blockDim.x) {
            bool there = i < piece.length;
            i64 token = piece.first + i;
            float total = 0.0f;
            for (int d = 0; d < k_width; ++d)
                total = vt_fma(there ? factors.element(token, head, d, (int)kind) : 0.0f, rounded[d], total);
            float change = (there ? values.element(token, head, d_of_v, (int)kind) : 0.0f) - total;
            if (there) store_one(v_new, (token * heads + head) * v_width + d_of_v, change, (int)kind);
            written[i] = through(change, (int)kind);
        }
        __syncthreads();
        for (int d = threadIdx.x; d < k_width; d += blockDim.x) {
            float total = 0.0f;
            for (int i = 0; i < size; ++i) {
                float key = i < piece.length ? keys.element(piece.first + i, head, d, (int)kind) : 0.0f;
                total = vt_fma(written[i], key, total);
            }
            S[d] = S[d] * exp2_of(sums.element(piece.first + piece.length - 1, head, d, F32)) + total;
        }
    }
    for (int d = threadIdx.x; d < k_width; d += blockDim.x) kept[d] = S[d];
}

extern "C" __global__ void __launch_bounds__(128)
    kda_chunk_o_any(i64 heads, i64 k_width, i64 v_width, const void* q, i64 kind, const void* v_new, const void* h,
                    const float* gc, const float* Aqk, const int* starts, const int* before, i64 sequences, i64 size,
                    float scale, void* out) {
    VT_SHARED(shared);
    float *weights = (float*)shared, *query = weights + size;
    const Chunks chunks = {starts, before, (int)sequences, (int)size};
    int t = (int)(blockIdx.x / heads), head = (int)(blockIdx.x % heads);
    const Piece piece = chunks.of_token(t);
    int own = t - piece.first, local = (piece.first - chunks.begin(piece.sequence)) / (int)size;
    const Heads queries = {q, heads * k_width, k_width}, sums = {gc, heads * k_width, k_width};
    const Heads values = {v_new, heads * v_width, v_width}, states = {h, k_width, k_width};
    for (int j = threadIdx.x; j < size; j += blockDim.x)
        weights[j] = j <= own ? through(Aqk[((i64)t * heads + head) * size + j], (int)kind) : 0.0f;
    for (int d = threadIdx.x; d < k_width; d += blockDim.x) {
        float scaled = through(queries.element(t, head, d, (int)kind) * scale, (int)kind);
        query[d] = through(scaled * exp2_of(sums.element(t, head, d, F32)), (int)kind);
    }
    __syncthreads();
    i64 place = ((i64)(chunks.place(piece.sequence) + local) * heads + head) * v_width;
    for (int d = threadIdx.x; d < v_width; d += blockDim.x) {
        float before_it = 0.0f, inside = 0.0f;
        for (int i = 0; i < k_width; ++i)
            before_it = vt_fma(query[i], states.element(place + d, 0, i, (int)kind), before_it);
        for (int j = 0; j < size; ++j) {
            float value = j < piece.length ? values.element(piece.first + j, head, d, (int)kind) : 0.0f;
            inside = vt_fma(weights[j], value, inside);
        }
        store_one(out, ((i64)t * heads + head) * v_width + d, before_it + inside, (int)kind);
    }
}
