// Mamba-2's outputs from its chunks, and the whole of it in chunks.
//
// The ladder:
// 1. ssd_chunk_scan: chains of fma in MIRROR's order, so bytes are its own, for every shape and dtype. A block a token and
//    head, whose weights are made once.
// 2. ssd_sums, ssd_walk_*, ssd_outputs_*: 16-bit heads of 64 channels or multiples, states of up to 128, on tensor cores:
//    time steps; then the walk from chunk to chunk, the state in registers; then the outputs, of all chunks at once.
#include "ssd_outputs.cuh"

extern "C" __global__ void __launch_bounds__(128)
    ssd_chunk_scan(const float* CB, const void* x, const float* dt, const float* sums, const void* C, i64 kind,
                   i64 heads, i64 width, i64 groups, i64 length, const void* states, i64 states_kind, const int* cuts,
                   const int* owner, i64 chunks, i64 size, i64 tokens, const float* D, i64 skip_step, const void* z,
                   const void* initial, i64 initial_kind, i64 sequences, void* out) {
    VT_SHARED(shared);
    float* weights = (float*)shared;
    const i64 head = blockIdx.x % heads, own = blockIdx.x / heads % size, chunk = blockIdx.x / heads / size;
    const i64 group = head / (heads / groups), row = (head * chunks + chunk) * size;
    const Cut cut = cut_at(cuts, chunk, size, tokens);
    if (!cut.holds(own)) return;
    const i64 t = cut.first + own;
    const Heads values = {x, heads * width, width}, queries = {C, groups * length, length};
    const Heads gates = {z, heads * width, width};
    const float sum = sums[row + own];
    for (i64 j = threadIdx.x; j < size; j += blockDim.x) {
        const float fade = j <= own ? between(sum, sums[row + j]) : 0.0f;
        const float weight = (CB[((chunk * groups + group) * size + own) * size + j] * fade) * dt[row + j];
        weights[j] = through(weight, (int)kind);
    }
    __syncthreads();
    const bool begins = chunk == 0 || owner[chunk] != owner[chunk - 1];
    const bool known = initial != nullptr && owner[chunk] >= 0 && owner[chunk] < sequences;
    const bool fresh = begins && !known;  // a capture cannot refuse a sequence that does not exist
    const Heads earlier = {begins ? initial : states, width * length, length};
    const i64 place = (begins ? owner[chunk] : chunk - 1) * heads + head;
    const float decay = vt_exp(sum);
    for (i64 p = threadIdx.x; p < width; p += blockDim.x) {
        float old = 0.0f, inside = 0.0f;
        for (i64 n = 0; n < length; ++n) {
            const float S = fresh ? 0.0f : earlier.element(place, (int)p, (int)n, (int)(begins ? initial_kind : states_kind));
            old = vt_fma(queries.element(t, (int)group, (int)n, (int)kind), through(S, (int)kind), old);
        }
        for (i64 j = 0; j < size; ++j) {
            const float value = cut.holds(j) ? values.element(cut.first + j, (int)head, (int)p, (int)kind) : 0.0f;
            inside = vt_fma(weights[j], value, inside);
        }
        float y = old * decay + inside;
        if (D != nullptr)
            y += values.element(t, (int)head, (int)p, (int)kind) * (skip_step ? D[head * skip_step + p] : D[head]);
        if (z != nullptr) y *= vt_silu(gates.element(t, (int)head, (int)p, (int)kind));
        store_one(out, (t * heads + head) * width + p, y, (int)kind);
    }
}
