// The stages of Mamba-2 in chunks before its outputs: running sums of dt A, the chunks' own states, states passed on,
// C B^T. Sums are chains of fma in ascending order, so bytes are MIRROR's for every shape and dtype, what lies beyond a
// short chunk included; prompts of 16-bit heads take ssd_walk.cuh and ssd_outputs.cuh instead, where their shape allows.
//
// The ladder:
// 1. ssd_chunk_cumsum: a thread a chunk and head.
// 2. ssd_chunk_state: a block a chunk and head, whose decays are taken once; a thread an element.
// 3. ssd_state_passing: a thread an element of a sequence's state, from its first chunk to its last.
// 4. ssd_bmm_chunk: a thread a pair of tokens.
#include "elements.cuh"
#include "ssd_steps.cuh"

extern "C" __global__ void __launch_bounds__(256)
    ssd_cuts_fit(i64 count, const int* cuts, i64 tokens, i64 size, i64* lowest) {
    const i64 n = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= count) return;
    const bool begun = n > 0 ? cuts[n] - cuts[n - 1] >= 1 && cuts[n] - cuts[n - 1] <= size : cuts[0] == 0;
    if (!begun || (n + 1 == count && cuts[n] != tokens)) atomicMin(lowest, n);
}

// Numbers that never fall, from `least` on and up to `most`; `ends`: the last one is `most`.
extern "C" __global__ void __launch_bounds__(256)
    ssd_ascends(i64 count, const int* numbers, i64 least, i64 most, i64 ends, i64* lowest) {
    const i64 n = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= count) return;
    const bool risen = n > 0 ? numbers[n] >= numbers[n - 1] : numbers[0] >= least;
    if (!risen || numbers[n] > most || (ends && n + 1 == count && numbers[n] != most)) atomicMin(lowest, n);
}

// Where the chunks of sequences stand, a block a sequence: `places` of them, the last ones empty. `last` is the last
// chunk of each sequence, of an empty one that of the sequence before; `owner` the sequence of each chunk.
extern "C" __global__ void __launch_bounds__(128)
    ssd_plan(const int* starts, i64 sequences, i64 size, i64 places, int* cuts, int* last, int* owner) {
    __shared__ int before;
    const int n = blockIdx.x;
    int part = 0;
    const auto count = [&](int m) { return (starts[m + 1] - starts[m] + (int)size - 1) / (int)size; };
    if (threadIdx.x == 0) before = 0;
    __syncthreads();
    for (int m = threadIdx.x; m < n; m += blockDim.x) part += count(m);
    atomicAdd(&before, part);
    __syncthreads();
    const int own = count(n), first = before;
    for (int c = threadIdx.x; c < own && first >= 0 && first + c < places; c += blockDim.x) {
        cuts[first + c] = starts[n] + c * (int)size;
        owner[first + c] = n;
    }
    if (threadIdx.x == 0) last[n] = first + own - 1;
    if (n + 1 < sequences) return;
    for (i64 c = (first + own > 0 ? first + own : 0) + threadIdx.x; c <= places; c += blockDim.x) {
        cuts[c] = starts[sequences];
        if (c < places) owner[c] = n;
    }
}

extern "C" __global__ void __launch_bounds__(128)
    ssd_chunk_cumsum(STEPS_PARAMETERS, const float* A, const int* cuts, i64 chunks, i64 size, i64 tokens, float* sums,
                     float* out) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x, head = at / chunks, chunk = at % chunks;
    if (head >= heads) return;
    const Steps steps = THE_STEPS;
    const Cut cut = cut_at(cuts, chunk, size, tokens);
    const float own = A[head];
    float total = 0.0f;
    for (i64 i = 0; i < size; ++i) {
        const float step = cut.holds(i) ? steps.at(cut.first + i, head) : 0.0f;
        total += step * own;
        sums[at * size + i] = total;
        out[at * size + i] = step;
    }
}

extern "C" __global__ void __launch_bounds__(128)
    ssd_chunk_state(const void* x, const void* B, i64 kind, i64 heads, i64 width, i64 groups, i64 length,
                    const float* dt, const float* sums, const int* cuts, i64 chunks, i64 size, i64 tokens, float* states) {
    VT_SHARED(shared);
    float* weights = (float*)shared;
    const i64 chunk = blockIdx.x / heads, head = blockIdx.x % heads, group = head / (heads / groups);
    const Cut cut = cut_at(cuts, chunk, size, tokens);
    const i64 row = (head * chunks + chunk) * size;
    const float last = sums[row + size - 1];
    for (i64 i = threadIdx.x; i < size; i += blockDim.x)
        weights[i] = (cut.holds(i) ? between(last, sums[row + i]) : 0.0f) * dt[row + i];
    __syncthreads();
    for (i64 at = threadIdx.x; at < width * length; at += blockDim.x) {
        const i64 p = at / length, n = at % length;
        float total = 0.0f;
        for (i64 i = 0; i < size; ++i) {
            const i64 t = cut.first + i;
            float value = 0.0f, key = 0.0f;
            if (cut.holds(i)) {
                value = load_one(x, (t * heads + head) * width + p, (int)kind);
                key = load_one(B, (t * groups + group) * length + n, (int)kind);
            }
            total = vt_fma(value, through(key * weights[i], (int)kind), total);
        }
        states[(i64)blockIdx.x * width * length + at] = total;
    }
}

// `out` is the states after each chunk; `final`, where asked for, those after each sequence.
extern "C" __global__ void __launch_bounds__(128)
    ssd_state_passing(const float* states, const float* sums, const int* last, i64 sequences, i64 chunks, i64 heads,
                      i64 size, i64 elements, const void* initial, i64 initial_kind, void* out, i64 kind, float* final) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x, whole = heads * elements;
    if (at >= sequences * whole) return;
    const i64 n = at / whole, own = at % whole, head = own / elements;
    float S = initial == nullptr ? 0.0f : load_one(initial, at, (int)initial_kind);
    const i64 first = n > 0 && last[n - 1] > -1 ? last[n - 1] + 1 : 0, end = last[n] < chunks ? last[n] + 1 : chunks;
    for (i64 c = first; c < end; ++c) {
        S = S * vt_exp(sums[(head * chunks + c) * size + size - 1]) + states[c * whole + own];
        store_one(out, c * whole + own, S, (int)kind);
    }
    if (final != nullptr) final[at] = S;
}

extern "C" __global__ void __launch_bounds__(128)
    ssd_bmm_chunk(const void* C, const void* B, i64 kind, i64 groups, i64 length, const int* cuts, i64 chunks, i64 size,
                  i64 tokens, float* CB) {
    const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= chunks * groups * size * size) return;
    const i64 j = at % size, i = at / size % size, group = at / size / size % groups, chunk = at / size / size / groups;
    const Cut cut = cut_at(cuts, chunk, size, tokens);
    const i64 row = ((cut.first + i) * groups + group) * length, column = ((cut.first + j) * groups + group) * length;
    float total = 0.0f;
    for (i64 n = 0; n < length; ++n) {
        const float query = cut.holds(i) ? load_one(C, row + n, (int)kind) : 0.0f;
        const float key = cut.holds(j) ? load_one(B, column + n, (int)kind) : 0.0f;
        total = vt_fma(query, key, total);
    }
    CB[at] = total;
}
