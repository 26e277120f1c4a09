// Around DeepGEMM's grouped products: tokens to the rows of their experts and back, SiLU products as e4m3 between them.
//
// The ladder:
// 1. Places of a stable order: a warp counts 256 choices, 32 at a time, in a table of its own; tables of warps and of
//    blocks are added up before and behind each other. No two runs differ, as they do with atomic places.
// 2. ep_copy_*: a token's bytes are read once and written to all of its rows.
// 3. ep_gather_v8: FLIGHT rows of a token are under way before the first is added.
// 4. silu_columns_deep: two vectors a thread, and each lane finds the scale of one of two groups (fp8_scales.cuh).
// 5. silu_masked_*: as many blocks as the GPU holds share the rows that are real, each thread's next vectors under way
//    while it has the last ones in hand; with bfloat16 the polynomial is for what
//    may be a group's largest or have another code than the fast functions' value (fast.cuh).
#include "fast.cuh"
#include "powers.cuh"
#include "rows.cuh"

#define THREADS 256
#define WARPS 8
#define STEPS 8       // times 32 choices of a warp
#define CHUNK 2048    // choices of a block, device/deep_gemm_moe.py
#define FLIGHT 8
#define LEAST 1e-10f
#define TWICE 0x1p-17f  // twice how far the fast functions' product may be from the polynomial's, relative to it

#ifdef __CUDACC__
VT_FN unsigned lanes_with(int value) { return __match_any_sync(FULL_WARP, value); }
VT_FN int ones(unsigned bits) { return __popc(bits); }
VT_FN void lanes_meet() { __syncwarp(); }
#else
VT_FN unsigned lanes_with(int value) {
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= (unsigned)(__shfl_sync(FULL_WARP, value, lane) == value) << lane;
    return found;
}
VT_FN int ones(unsigned bits) { return __builtin_popcount(bits); }
VT_FN void lanes_meet() { __shfl_xor_sync(FULL_WARP, 0, 0); }
#endif

// The choices of all tokens, and the experts that are here.
struct Choices {
    const void* ids;
    bool wide;  // of 64 bits
    i64 count;
    const int* known;  // number here of an expert, or null
    i64 names;         // how many of them
    int experts;

    VT_MEMBER int expert(i64 number) const {
        if (number >= count) return -1;
        i64 id = wide ? ((const i64*)ids)[number] : (i64)((const int*)ids)[number];
        if (id < 0 || id >= names) return -1;
        int here = known != nullptr ? known[id] : (int)id;
        return here < experts ? here : -1;
    }
};
#define CHOICES const void *ids, i64 wide, i64 count, const int *known, i64 names, i64 experts
#define CHOICES_GIVEN Choices{ids, wide != 0, count, known, names, (int)experts}

// The sums of what came before each of `count` numbers, aligned, in their place, by the first warp; the total behind them.
VT_FN void sums_before(int* numbers, int count, int alignment) {
    if (threadIdx.x >= 32) return;
    int lane = threadIdx.x, carried = 0;
    for (int first = 0; first < count; first += 32) {
        int own = first + lane < count ? (numbers[first + lane] + alignment - 1) / alignment * alignment : 0, sum = own;
        for (int d = 1; d < 32; d *= 2) {
            int other = __shfl_sync(FULL_WARP, sum, lane - d);
            if (lane >= d) sum += other;
        }
        if (first + lane < count) numbers[first + lane] = carried + sum - own;
        carried += __shfl_sync(FULL_WARP, sum, 31);
    }
    if (lane == 0) numbers[count] = carried;
}

VT_FN void nobody(int* m_indices, i64 rows, i64 blocks) {
    for (i64 row = (i64)blockIdx.x * THREADS + threadIdx.x; row < rows; row += blocks * THREADS) m_indices[row] = -1;
}

// How many choices of a chunk each expert has.
extern "C" __global__ void __launch_bounds__(THREADS) ep_count(CHOICES, i64 chunks, int* counts, int* m_indices,
                                                               i64 rows) {
    VT_SHARED(memory);
    int* mine = (int*)memory;
    const Choices choices = CHOICES_GIVEN;
    for (int e = threadIdx.x; e < experts; e += THREADS) mine[e] = 0;
    __syncthreads();
    for (int n = threadIdx.x; n < CHUNK; n += THREADS) {
        int expert = choices.expert((i64)blockIdx.x * CHUNK + n);
        if (expert >= 0) atomicAdd(mine + expert, 1);
    }
    nobody(m_indices, rows, chunks);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) counts[blockIdx.x * experts + e] = mine[e];
}

// From counts of chunks to the first rows of their choices.
extern "C" __global__ void __launch_bounds__(THREADS) ep_starts(i64 experts, i64 chunks, i64 alignment, int* counts) {
    VT_SHARED(memory);
    int* starts = (int*)memory;
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        int total = 0;
#pragma unroll 8
        for (i64 c = 0; c < chunks; ++c) total += counts[c * experts + e];
        starts[e] = total;
    }
    __syncthreads();
    sums_before(starts, (int)experts, (int)alignment);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        int row = starts[e];
#pragma unroll 8
        for (i64 c = 0; c < chunks; ++c) {
            int own = counts[c * experts + e];
            counts[c * experts + e] = row;
            row += own;
        }
    }
}

// The rows of a chunk's choices; without `firsts`, of the only chunk.
extern "C" __global__ void __launch_bounds__(THREADS) ep_place(CHOICES, i64 alignment, const int* firsts, int* inverse,
                                                               int* m_indices, i64 rows) {
    VT_SHARED(memory);
    int *table = (int*)memory, *starts = table + WARPS * experts;
    const Choices choices = CHOICES_GIVEN;
    int lane = threadIdx.x & 31, *mine = table + (threadIdx.x >> 5) * experts, found[STEPS];
    i64 first = (i64)blockIdx.x * CHUNK + (threadIdx.x >> 5) * (32 * STEPS) + lane;
    for (int n = threadIdx.x; n < WARPS * experts; n += THREADS) table[n] = 0;
    if (firsts == nullptr) nobody(m_indices, rows, 1);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        found[step] = choices.expert(first + 32 * step);
        unsigned same = lanes_with(found[step]);
        if (found[step] >= 0 && (same & ((1u << lane) - 1)) == 0) mine[found[step]] += ones(same);
        lanes_meet();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        int before = 0;
        for (int warp = 0; warp < WARPS; ++warp) {
            int own = table[warp * experts + e];
            table[warp * experts + e] = before;
            before += own;
        }
        starts[e] = firsts != nullptr ? firsts[blockIdx.x * experts + e] : before;
    }
    __syncthreads();
    if (firsts == nullptr) {
        sums_before(starts, (int)experts, (int)alignment);
        __syncthreads();
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        int expert = found[step];
        unsigned same = lanes_with(expert), before = same & ((1u << lane) - 1);
        int row = expert >= 0 ? starts[expert] + mine[expert] + ones(before) : -1;
        lanes_meet();
        if (expert >= 0 && before == 0) mine[expert] += ones(same);
        lanes_meet();
        if (first + 32 * step >= count) continue;
        bool there = row >= 0 && row < rows;
        inverse[first + 32 * step] = there ? row : -1;
        if (there) m_indices[row] = expert;
    }
}

// A token's scales, of which each of its rows gets a copy.
struct Floats {
    const float* from;
    i64 row, group;

    VT_MEMBER float of(i64 token, i64 g) const { return from[token * row + g * group]; }
};

// Exponents of `count` groups, four to a word: byte j of word p is group 4 p + j's, 0 past the last.
struct Exponents {
    const unsigned char* from;
    i64 row, group, count;

    VT_MEMBER int of(i64 token, i64 p) const {
        unsigned word = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (4 * p + j < count) word |= (unsigned)from[token * row + (4 * p + j) * group] << 8 * j;
        return (int)word;
    }
};

// A token a block: its bytes, in `units` of U, and its scales to each of its rows.
template <class U, class S, class Scales>
VT_FN void copies(const int* inverse, i64 choices, i64 units, const U* x, i64 stride, U* a, i64 scales,
                  const Scales& given, S* a_scale, i64 a_row, i64 a_group) {
    i64 token = blockIdx.x;
    const int* to = inverse + token * choices;
    for (i64 n = threadIdx.x; n < units; n += blockDim.x) {
        U moved = x[token * stride + n];
        for (i64 r = 0; r < choices; ++r)
            if (to[r] >= 0) a[to[r] * units + n] = moved;
    }
    for (i64 g = threadIdx.x; g < scales; g += blockDim.x) {
        S scale = given.of(token, g);
        for (i64 r = 0; r < choices; ++r)
            if (to[r] >= 0) a_scale[to[r] * a_row + g * a_group] = scale;
    }
}

#define EP_COPY(U, TYPE)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256) ep_copy_##U(                                                     \
        const int* inverse, i64 choices, i64 units, const TYPE* x, i64 stride, TYPE* a, i64 groups,                    \
        const float* x_scale, i64 x_row, i64 x_group, float* a_scale, i64 a_row, i64 a_group) {                        \
        copies(inverse, choices, units, x, stride, a, groups, Floats{x_scale, x_row, x_group}, a_scale, a_row,         \
               a_group);                                                                                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) ep_copy_packed_##U(                                              \
        const int* inverse, i64 choices, i64 units, const TYPE* x, i64 stride, TYPE* a, i64 groups,                    \
        const unsigned char* x_scale, i64 x_row, i64 x_group, int* a_scale, i64 a_row, i64 a_group) {                  \
        copies(inverse, choices, units, x, stride, a, (groups + 3) / 4, Exponents{x_scale, x_row, x_group, groups},    \
               a_scale, a_row, a_group);                                                                               \
    }
EP_COPY(16, uint4)
EP_COPY(1, unsigned char)

template <int V>
VT_FN void gather(i64 tokens, i64 width, i64 chunks, i64 choices, const void* a, i64 rows, i64 stride, int kind,
                  const float* weights, const int* inverse, void* out) {
    const Place at = place<V>(tokens, width, chunks);
    if (!at.inside) return;
    float total[V] = {}, v[V];
    for (i64 first = 0; first < choices; first += FLIGHT) {
        Raw<V> raw[FLIGHT];
        int row[FLIGHT];
#pragma unroll
        for (int r = 0; r < FLIGHT; ++r) {
            row[r] = first + r < choices ? inverse[at.row * choices + first + r] : -1;
            if (row[r] >= rows) row[r] = -1;
            if (row[r] >= 0) raw[r] = fetch<V>(a, row[r] * stride + at.column, kind);
        }
#pragma unroll
        for (int r = 0; r < FLIGHT; ++r) {
            if (row[r] < 0) continue;
            float weight = weights[at.row * choices + first + r];
            widen(v, raw[r], kind);
#pragma unroll
            for (int j = 0; j < V; ++j) total[j] += v[j] * weight;
        }
    }
    store(out, at.row * width + at.column, total, kind);
}

#define EP_GATHER(NAME, V, ASSUMED)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) ep_gather_##NAME(                                                \
        i64 tokens, i64 width, i64 chunks, i64 choices, const void* a, i64 rows, i64 stride, i64 kind,                 \
        const float* weights, const int* inverse, void* out) {                                                         \
        VT_ASSUME(ASSUMED);                                                                                            \
        gather<V>(tokens, width, chunks, choices, a, rows, stride, (int)kind, weights, inverse, out);                  \
    }
EP_GATHER(v8, 8, (int)kind != F32)
EP_GATHER(f32_v8, 8, (int)kind == F32)
EP_GATHER(v1, 1, true)

VT_FN float scale_of(unsigned top, bool ue8m0) {
    return rounded_up(vt_maximum(vt_float((int)top), LEAST) * E4M3_RECIPROCAL, ue8m0 ? BY_LOG2 : AS_IT_IS);
}

VT_FN void put_codes(unsigned char* out, i64 at, const float (&q)[8], bool whole) {
    if (whole) return store_e4m3(out, at, q, 0x7fu);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float one[1] = {q[j]};
        store_e4m3(out, at + j, one, 0x7fu);
    }
}

// A gated product that is rounded to x's dtype after each step.
struct Act {
    int kind;
    bool clamps;
    float limit, alpha, beta;

    VT_MEMBER void values(float (&y)[8], const Raw<8>& gate, const Raw<8>& up) const {
        float g[8], u[8];
        widen(g, gate, kind);
        widen(u, up, kind);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (clamps) {
                g[j] = through(vt_minimum(g[j], limit), kind);
                u[j] = through(vt_minimum(vt_maximum(u[j], -limit), limit), kind);
            }
            u[j] = through(u[j] + beta, kind);
        }
        if (alpha == 1.0f) gate_products<true>(y, g, u, kind, kind);
        else
#pragma unroll
            for (int j = 0; j < 8; ++j) y[j] = through(g[j] * vt_sigmoid(g[j] * alpha), kind) * u[j];
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = through(y[j], kind);
    }
};

// x [rows, 2 width] in vectors, per_row = width / 8 of them to a half; a group is 16 of them.
#define COLUMN_PARAMETERS                                                                                              \
    i64 rows, i64 per_row, const void *x, i64 kind, unsigned char *out, i64 whole, float *scales, i64 row_step,        \
        i64 group_step, i64 ue8m0, i64 clamps, float limit, float alpha, float beta, i64 magic, i64 shift
#define ACT Act{(int)kind, clamps != 0, limit, alpha, beta}

// D vectors a thread, blockDim.x apart.
template <int D> struct Halves {
    Raw<8> gate[D], up[D];
    unsigned row[D], first, count;

    VT_MEMBER Halves(const void* x, int kind, i64 rows, unsigned per_row, unsigned magic, int shift)
        : first(blockIdx.x * (blockDim.x * D) + threadIdx.x), count((unsigned)rows * per_row) {
#pragma unroll
        for (int d = 0; d < D; ++d) {
            row[d] = whole_quotient(number(d), magic, shift);
            i64 at = (i64)number(d) + (i64)row[d] * per_row;
            if (!inside(d)) continue;
            gate[d] = fetch<8>(x, at * 8, kind);
            up[d] = fetch<8>(x, (at + per_row) * 8, kind);
        }
    }
    VT_MEMBER unsigned number(int d) const { return first + d * blockDim.x; }
    VT_MEMBER bool inside(int d) const { return number(d) < count; }
};

extern "C" __global__ void __launch_bounds__(256) silu_columns(COLUMN_PARAMETERS) {
    const Halves<1> raw(x, (int)kind, rows, (unsigned)per_row, (unsigned)magic, (int)shift);
    float y[8] = {}, q[8];
    if (raw.inside(0)) ACT.values(y, raw.gate[0], raw.up[0]);
    unsigned top = largest_of_lanes(largest_of(y, false), 16);
    if (!raw.inside(0)) return;
    Divisor by(scale_of(top, ue8m0 != 0), top, false);
    by.divide(q, y);
    put_codes(out, (i64)raw.number(0) * 8, q, whole != 0);
    unsigned group = (raw.number(0) - raw.row[0] * (unsigned)per_row) >> 4;
    if ((threadIdx.x & 15) == 0) scales[raw.row[0] * row_step + group * group_step] = by.scale;
}

// Of bfloat16, alpha 1.
extern "C" __global__ void __launch_bounds__(64) silu_columns_deep(COLUMN_PARAMETERS) {
    VT_ASSUME((int)kind == BF16 && alpha == 1.0f);
    const Halves<2> raw(x, BF16, rows, (unsigned)per_row, (unsigned)magic, (int)shift);
    Raw<8> made[2];
    unsigned tops[2];
    float y[8], q[8];
#pragma unroll
    for (int d = 0; d < 2; ++d) {
        tops[d] = 0;
        if (!raw.inside(d)) continue;
        Act{BF16, clamps != 0, limit, 1.0f, beta}.values(y, raw.gate[d], raw.up[d]);
        made[d] = narrow(y, BF16);
        tops[d] = largest_pair<false>(made[d].a);
    }
    GroupScales<2> found;
    found.join<false>(tops, 16, [&](unsigned top) { return scale_of(top, ue8m0 != 0); });
    unsigned row = found.own ? raw.row[1] : raw.row[0], stored = raw.number(found.own);
    if ((threadIdx.x & 15) < 2 && stored < raw.count)
        scales[row * row_step + ((stored - row * (unsigned)per_row) >> 4) * group_step] = found.scale;
#pragma unroll
    for (int d = 0; d < 2; ++d) {
        Divisor by = found.of(d);
        if (!raw.inside(d)) continue;
        widen(y, made[d], BF16);
        by.divide(q, y);
        put_codes(out, (i64)raw.number(d) * 8, q, whole != 0);
    }
}

// The codes and the scale of a group in 16 lanes, of products that stay float32. Values under 2^-60 have code 0 and decide
// over no scale.
VT_FN float kept_codes(float (&q)[8], const Raw<8>& gate, const Raw<8>& up, bool inside, bool ue8m0, int kind) {
    float g[8] = {}, u[8] = {}, y[8];
    auto exact = [](float gate, float up) { return vt_silu(gate) * up; };
    unsigned some = 0, others = 0;
    if (inside) {
        widen(g, gate, kind);
        widen(u, up, kind);
    }
    if (kind != BF16) {
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = exact(g[j], u[j]);
        unsigned top = largest_of_lanes(largest_of(y, false), 16);
        Divisor by(scale_of(top, ue8m0), top, false);
        by.divide(q, y);
        return by.scale;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        y[j] = fast_act<true>(g[j]) * u[j];
        if (!(vt_abs(g[j]) < FAST_LIMIT)) some |= 1u << j;
    }
    decide(y, some, g, u, exact);
    unsigned top = largest_of_lanes(largest_of(y, false), 16);
    float least = fmaxf(vt_float((int)top) * (1.0f - TWICE), 0x1p-60f);
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (vt_abs(y[j]) >= least) others |= 1u << j;
    others &= ~some;
    decide(y, others, g, u, exact);
    some |= others;
    top = largest_of_lanes(largest_of(y, false), 16);
    Divisor by(scale_of(top, ue8m0), top, false);
    by.divide(q, y);
    others = 0;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        unsigned below = e4m3_pair(q[j] * (1.0f - TWICE / 2), q[j + 1] * (1.0f - TWICE / 2));
        unsigned above = e4m3_pair(q[j] * (1.0f + TWICE / 2), q[j + 1] * (1.0f + TWICE / 2));
        if ((below ^ above) & 0xffu) others |= 1u << j;
        if ((below ^ above) >> 8) others |= 2u << j;
    }
    decide(q, others & ~some, g, u, [&](float gate, float up) { return exact(gate, up) / by.scale; });
    return by.scale;
}

// The real rows of `experts` x tokens: 16 lanes have a group of 128.
VT_FN void silu_masked(i64 experts, i64 tokens, i64 width, i64 blocks, const void* x, int kind, const int* counts,
                       unsigned char* codes, bool whole, float* scales, i64 expert_step, i64 token_step, i64 group_step,
                       bool ue8m0, unsigned magic, int shift, int* before) {
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        int count = counts[e];
        before[e] = count < 0 ? 0 : count > tokens ? (int)tokens : count;
    }
    __syncthreads();
    sums_before(before, (int)experts, 1);
    __syncthreads();
    unsigned groups = (unsigned)(width >> 7), total = (unsigned)before[experts] * groups;
    int lane = threadIdx.x & 15;
    // A group, and its vectors on their way.
    struct Given {
        i64 line, column, scale;
        Raw<8> gate, up;
        bool inside;
    };
    auto given = [&](unsigned number) {
        Given it;
        it.inside = number < total;
        if (!it.inside) return it;
        int row = (int)whole_quotient(number, magic, shift), low = 0, high = (int)experts;
        while (high - low > 1) {
            int middle = (low + high) >> 1;
            if (before[middle] <= row) low = middle;
            else high = middle;
        }
        i64 token = row - before[low], group = number - (unsigned)row * groups;
        it.line = low * tokens + token;
        it.column = group * 128 + lane * 8;
        it.scale = low * expert_step + token * token_step + group * group_step;
        it.gate = fetch<8>(x, it.line * 2 * width + it.column, kind);
        it.up = fetch<8>(x, it.line * 2 * width + width + it.column, kind);
        return it;
    };
    unsigned step = (unsigned)blocks * 16, first = blockIdx.x * 16;
    Given next = given(first + (threadIdx.x >> 4));
    for (; first < total; first += step) {
        const Given now = next;
        next = given(first + step + (threadIdx.x >> 4));
        float q[8], scale = kept_codes(q, now.gate, now.up, now.inside, ue8m0, kind);
        if (!now.inside) continue;
        put_codes(codes, now.line * width + now.column, q, whole);
        if (lane == 0) scales[now.scale] = scale;
    }
}

#define SILU_MASKED(NAME, ASSUMED)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) silu_masked_##NAME(                                          \
        i64 experts, i64 tokens, i64 width, i64 blocks, const void* x, i64 kind, const int* counts,                    \
        unsigned char* codes, i64 whole, float* scales, i64 expert_step, i64 token_step, i64 group_step, i64 ue8m0,    \
        i64 magic, i64 shift) {                                                                                        \
        VT_SHARED(memory);                                                                                             \
        VT_ASSUME(ASSUMED);                                                                                            \
        silu_masked(experts, tokens, width, blocks, x, (int)kind, counts, codes, whole != 0, scales, expert_step,      \
                    token_step, group_step, ue8m0 != 0, (unsigned)magic, (int)shift, (int*)memory);                    \
    }
SILU_MASKED(bf16, (int)kind == BF16)
SILU_MASKED(any, (int)kind != BF16)
