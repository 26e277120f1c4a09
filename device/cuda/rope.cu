// Rotary position embedding of q and k, out of a cache or straight from positions, and the rows of such a cache.
//
// The ladder:
// 1. *_v1: a pair of lanes a thread; any width, stride and address.
// 2. *_v8: eight pairs a thread as two 16-byte loads, of two heads at a time; lanes outside of the rotation are copied
//    in the same pass.
// 3. *_bf16*: four heads at a time (three of GPT-J's pairs, whose order takes registers), knowing that q and k are
//    bfloat16 with one cache row a token: the branches on dtypes are gone, and a cache row is read once for four heads.
// rope_angles_* make the cosines and sines of a token once a block, in float64, while q and k are on their way.
#include "angles.cuh"
#include "rope.cuh"

#define ROPE_PARAMETERS                                                                                           \
    i64 tokens, i64 lanes, i64 splits, i64 chunks, const void *q, i64 q_token, i64 q_head, void *q_out,           \
        i64 q_heads, const void *k, i64 k_token, i64 k_head, void *k_out, i64 k_heads, i64 width, i64 half,       \
        i64 offset, i64 kind, i64 flags, i64 product, const void *positions, i64 wide
#define ROPE_NAMES                                                                                                \
    tokens, lanes, splits, chunks, q, q_token, q_head, q_out, q_heads, k, k_token, k_head, k_out, k_heads, width, \
        half, offset, kind, flags, product, positions, wide
#define ROPE_ARGUMENTS                                                                                            \
    {{q, q_token, q_head, q_out, q_heads, nullptr, 0}, {k, k_token, k_head, k_out, k_heads, nullptr, 0}, {},      \
     tokens, (int)width, (int)half, (int)offset, (int)kind, (int)flags, (int)product, (int)lanes, (int)splits,    \
     (int)chunks}

// Which row of the positions pair i reads: time, height or width. The bounds are where time and height end, or three
// times the counts of height and width.
VT_FN int axis_of(int i, int flags, int first_bound, int second_bound) {
    if (flags & INTERLEAVED) {
        int turn = i % 3;
        return turn == 1 && i <= first_bound ? 1 : turn == 2 && i <= second_bound ? 2 : 0;
    }
    return i < first_bound ? 0 : i < second_bound ? 1 : 2;
}

template <int V, int HEADS>
VT_FN void rope_cached(ROPE_PARAMETERS, const void* cache, i64 cache_kind, i64 rows, i64 first_bound,
                       i64 second_bound) {
    const Rope rope = ROPE_ARGUMENTS;
    const Post at = rope.post();
    if (at.token >= tokens || at.unit >= rope.units<V>()) return;
    const Table table = {cache, rows, (int)half, (int)cache_kind};
    const Unit u = rope.unit<V>(at.unit);
    i64 row = id_at(positions, at.token, wide);
    Span<V, HEADS, false> span;
    span.read(rope, at, u);
    float c[V], s[V];
    if (u.rotates) {
        table.read(c, s, row, u.pair);
        if (flags & AXES) {
            for (int axis = 1; axis < 3; ++axis) {
                float other_c[V], other_s[V];
                table.read(other_c, other_s, id_at(positions, axis * tokens + at.token, wide), u.pair);
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    if (axis_of(u.pair + j, (int)flags, (int)first_bound, (int)second_bound) != axis) continue;
                    c[j] = other_c[j];
                    s[j] = other_s[j];
                }
            }
        }
        if (flags & INVERSE) {
#pragma unroll
            for (int j = 0; j < V; ++j) s[j] = -s[j];
        }
    }
    span.write(rope, at, u, c, s);
}

// KIND, FLAGS, PRODUCT: what is known of the arguments, as constants. BLOCKS: how many a multiprocessor must have room
// for.
#define CACHED(NAME, V, HEADS, BLOCKS, KIND, FLAGS, PRODUCT)                                                      \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) rope_cached_##NAME(                                 \
        ROPE_PARAMETERS, const void* cache, i64 cache_kind, i64 rows, i64 first_bound, i64 second_bound) {        \
        kind = KIND;                                                                                              \
        flags = FLAGS;                                                                                            \
        product = PRODUCT;                                                                                        \
        rope_cached<V, HEADS>(ROPE_NAMES, cache, cache_kind, rows, first_bound, second_bound);                    \
    }
CACHED(bf16, 8, 4, 3, BF16, flags & INVERSE, F32)
CACHED(bf16_fused, 8, 4, 3, BF16, (flags & INVERSE) | FUSED, F32)
CACHED(bf16_pairs, 8, 3, 3, BF16, (flags & (INVERSE | FUSED)) | GPTJ, F32)
CACHED(v8, 8, 2, 2, kind, flags, product)
CACHED(v1, 1, 4, 4, kind, flags, product)

// Cosine and sine of position * inv as float32; NaN for a negative position.
VT_FN void angle_of(i64 position, double inv, float& c, float& s) {
    if (position < 0) {
        c = s = VT_NAN;
        return;
    }
    double cos, sin;
    cos_sin((double)position * inv, cos, sin);
    c = (float)cos;
    s = (float)sin;
}

template <int V, int HEADS> VT_FN void rope_angles(ROPE_PARAMETERS, const double* inv) {
    VT_SHARED(shared);
    float* turned = (float*)shared;
    const Rope rope = ROPE_ARGUMENTS;
    const Post at = rope.post();
    const bool inside = at.token < tokens && at.unit < rope.units<V>();
    const Unit u = rope.unit<V>(at.unit);
    Span<V, HEADS, false> span;
    if (inside) span.read(rope, at, u);
    const int count = (int)(blockDim.y / (unsigned)rope.lanes) * rope.half;
    for (int i = (int)(threadIdx.y * blockDim.x + threadIdx.x); i < count; i += (int)(blockDim.x * blockDim.y)) {
        int local = i / rope.half, pair = i - local * rope.half;
        i64 token = at.token - at.local + local;
        if (token >= tokens) break;
        float* row = turned + local * 2 * rope.half;
        angle_of(id_at(positions, token, wide), inv[pair], row[pair], row[rope.half + pair]);
    }
    __syncthreads();
    if (!inside) return;
    float c[V], s[V];
    if (u.rotates) {
        const float* row = turned + at.local * 2 * rope.half;
        load(c, row, u.pair, F32);
        load(s, row, rope.half + u.pair, F32);
    }
    span.write(rope, at, u, c, s);
}

#define ANGLES(NAME, V, HEADS, KIND)                                                                              \
    extern "C" __global__ void __launch_bounds__(256) rope_angles_##NAME(ROPE_PARAMETERS, const double* inv) {    \
        kind = KIND;                                                                                              \
        flags = offset = 0;                                                                                       \
        product = F32;                                                                                            \
        rope_angles<V, HEADS>(ROPE_NAMES, inv);                                                                   \
    }
ANGLES(bf16, 8, 4, BF16)
ANGLES(v8, 8, 2, kind)
ANGLES(v1, 1, 4, kind)

// The rows that a step needs: a (token, pair) a thread.
extern "C" __global__ void __launch_bounds__(256) cos_sin_rows(
    i64 tokens, i64 half, const void* positions, i64 wide, const double* inv, float* out) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= tokens * half) return;
    i64 token = quotient(at, half), pair = at - token * half;
    float* row = out + token * 2 * half;
    angle_of(id_at(positions, token, wide), inv[pair], row[pair], row[half + pair]);
}

extern "C" __global__ void __launch_bounds__(256) rope_positions(
    i64 count, const void* positions, i64 wide, i64 rows, i64* lowest) {
    note_bad_position(count, positions, wide, rows, lowest);
}
