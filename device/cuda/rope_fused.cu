// Rotation fused with what surrounds it: the norm of each head of q and k in front, the paged cache behind.
//
// The ladder:
// 1. qk_norm_rope_any_v1: a warp a head, any width, stride and address; _any_v8: the same with 16-byte loads, for heads
//    of more than 256 lanes.
// 2. qk_norm_rope_v8: as many lanes a head as it has groups of eight, two heads a thread. A head is read once: the
//    partner of a lane in its pair, another thread's, comes out of the L1 cache as a second load that is under way with
//    the first, not by shuffles behind the norm. Gates and v are copied in the same pass.
// 3. qk_norm_rope_bf16: knowing that everything that moves is bfloat16.
// rope_paged_*: rope.cu's kernels with k's rotation also going to its page, and v with it.
#include "rope.cuh"
#include "tree.cuh"

enum { GEMMA = 32, ROUNDED = 64 };  // device/rope_fused.py

// Heads of one kind: normed and rotated, or copied where there is no weight.
struct Part {
    const void* in;
    i64 token, head;
    void* out;
    i64 out_token;
    const void* weight;
    int count, kind, out_kind;
};

struct Front {
    Part q, k, rest;
    i64 tokens;
    Table table;
    const void* positions;
    i64 wide;
    int width, flags, weight_kind;
    float eps;

    VT_MEMBER int heads() const { return q.count + k.count + rest.count; }

    // By value: a reference to one of three would put them all into memory.
    VT_MEMBER Part whose(int& head) const {
        Part found = q;
        if (head >= q.count) {
            found = k;
            head -= q.count;
            if (head >= k.count) {
                found = rest;
                head -= k.count;
            }
        }
        return found;
    }

    VT_MEMBER i64 row(i64 token) const { return positions == nullptr ? token : id_at(positions, token, wide); }
    VT_MEMBER bool rotates(int lane) const { return lane < 2 * table.half; }

    // The lane that `lane` is paired with; for groups of eight in GPT-J's order it lies in the group itself.
    VT_MEMBER int partner(int lane) const {
        if (flags & GPTJ) return lane ^ 1;
        return lane < table.half ? lane + table.half : lane - table.half;
    }

    // Cosine and sine of each lane's pair, the sine with the sign that its product has.
    template <int V> VT_MEMBER void turn(float (&c)[V], float (&s)[V], i64 row, int lane) const {
        if (flags & GPTJ) {
#pragma unroll
            for (int j = 0; j < V; ++j) {
                float one_c[1], one_s[1];
                table.read(one_c, one_s, row, (lane + j) / 2);
                c[j] = one_c[0];
                s[j] = (lane + j) & 1 ? one_s[0] : -one_s[0];
            }
        } else {
            bool first = lane < table.half;
            table.read(c, s, row, first ? lane : lane - table.half);
#pragma unroll
            for (int j = 0; j < V; ++j) s[j] = first ? -s[j] : s[j];
        }
    }

    template <int V>
    VT_MEMBER void norm(float (&v)[V], const Raw<V>& raw, const Part& part, int lane, float inverse) const {
        float w[V];
        widen(v, raw, part.kind);
        load(w, part.weight, lane, weight_kind);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            v[j] = (v[j] * inverse) * (flags & GEMMA ? w[j] + 1.0f : w[j]);
            if (flags & ROUNDED) v[j] = through(v[j], part.kind);
        }
    }

    // x c - y s is x c + y (-s): the same bits.
    template <int V>
    VT_MEMBER void finish(const Part& part, i64 token, int head, int lane, const Raw<V>& own, const Raw<V>& mate,
                          const float (&c)[V], const float (&s)[V], float inverse) const {
        i64 to = token * part.out_token + (i64)head * width + lane;
        if (part.weight == nullptr && part.kind == part.out_kind) {
            put(part.out, to, own, part.kind);
            return;
        }
        float v[V];
        if (part.weight == nullptr) {
            widen(v, own, part.kind);
        } else {
            norm(v, own, part, lane, inverse);
            if (rotates(lane)) {
                float other[V];
                if (V == 8 && (flags & GPTJ)) {
#pragma unroll
                    for (int j = 0; j < V; ++j) other[j] = v[j ^ 1];
                } else {
                    norm(other, mate, part, partner(lane), inverse);
                }
#pragma unroll
                for (int j = 0; j < V; ++j) v[j] = v[j] * c[j] + other[j] * s[j];
            }
        }
        store(part.out, to, v, part.out_kind);
    }
};

#define FRONT_PARAMETERS                                                                                          \
    i64 tokens, const void *q, i64 q_token, i64 q_head, i64 q_kind, void *q_out, i64 q_out_token, i64 q_heads,    \
        const void *k, i64 k_token, i64 k_head, i64 k_kind, void *k_out, i64 k_out_token, i64 k_heads,            \
        i64 out_kind, const void *rest, i64 rest_token, i64 rest_head, i64 rest_kind, void *rest_out,             \
        i64 rest_out_token, i64 rest_heads, i64 rest_out_kind, const void *q_weight, const void *k_weight,        \
        i64 weight_kind, const void *table, i64 table_kind, i64 rows, const void *positions, i64 wide, i64 width, \
        i64 half, i64 flags, float eps
#define FRONT                                                                                                     \
    {{q, q_token, q_head, q_out, q_out_token, q_weight, (int)q_heads, (int)q_kind, (int)out_kind},                \
     {k, k_token, k_head, k_out, k_out_token, k_weight, (int)k_heads, (int)k_kind, (int)out_kind},                \
     {rest, rest_token, rest_head, rest_out, rest_out_token, nullptr, (int)rest_heads, (int)rest_kind,            \
      (int)rest_out_kind},                                                                                        \
     tokens, {table, rows, (int)half, (int)table_kind}, positions, wide, (int)width, (int)flags,                  \
     (int)weight_kind, eps}

// Which group of `lanes` threads this is: the launcher sees to it that there are less than 2^32.
VT_FN unsigned group_of(int lanes) { return (unsigned)(((i64)blockIdx.x * blockDim.x + threadIdx.x) / lanes); }

// `lanes` lanes a head of at most 8 * lanes, `step` groups of them a token, a group for heads g and g + step.
VT_FN void front_rows(const Front& front, int lanes, int step) {
    unsigned group = group_of(lanes);
    i64 token = group / (unsigned)step;
    int first = (int)(group - (unsigned)token * (unsigned)step), lane = (int)(threadIdx.x & (lanes - 1)) * 8;
    const bool inside = token < front.tokens && lane < front.width;  // the others still take part in the sums
    const bool turned = inside && front.rotates(lane);
    i64 row = turned ? front.row(token) : 0;
    Raw<8> own[2], mate[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        int head = first + j * step;
        own[j] = mate[j] = {};
        if (!inside || head >= front.heads()) continue;
        const Part part = front.whose(head);
        i64 begin = token * part.token + head * part.head;
        own[j] = fetch<8>(part.in, begin + lane, part.kind);
        if (turned && part.weight != nullptr && !(front.flags & GPTJ))
            mate[j] = fetch<8>(part.in, begin + front.partner(lane), part.kind);
    }
    float c[8], s[8];
    if (turned) front.turn(c, s, row, lane);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        int head = first + j * step;
        const bool there = inside && head < front.heads();
        const Part part = front.whose(head);
        float v[8], partial = 0.0f;
        widen(v, own[j], part.kind);
        add_squares(partial, v);
        float inverse = inverse_root(tree_of_lanes(partial, lanes), (float)front.width, front.eps);
        if (there) front.finish(part, token, head, lane, own[j], mate[j], c, s, inverse);
    }
}

extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_v8(FRONT_PARAMETERS, i64 lanes, i64 step) {
    const Front front = FRONT;
    front_rows(front, (int)lanes, (int)step);
}

extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_bf16(FRONT_PARAMETERS, i64 lanes, i64 step) {
    q_kind = k_kind = out_kind = rest_kind = rest_out_kind = BF16;
    flags &= ~(i64)GPTJ;
    const Front front = FRONT;
    front_rows(front, (int)lanes, (int)step);
}

// A warp a head.
template <int V> VT_FN void front_any(const Front& front) {
    const unsigned warp = group_of(32);
    const i64 token = warp / (unsigned)front.heads();
    if (token >= front.tokens) return;  // a whole warp
    int head = (int)(warp - (unsigned)token * (unsigned)front.heads()), thread = threadIdx.x & 31;
    const Part part = front.whose(head);
    const i64 begin = token * part.token + head * part.head;
    float p[8] = {};
    for (int base = 0; part.weight != nullptr && base < front.width; base += TREE_SPAN) {
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            int lane = base + (32 * w + thread) * 8;
            float x[8] = {};
            if (V == 8) {
                if (lane < front.width) load(x, part.in, begin + lane, part.kind);
            } else {
                for (int j = 0; j < 8 && lane + j < front.width; ++j) {
                    float one[1];
                    load(one, part.in, begin + lane + j, part.kind);
                    x[j] = one[0];
                }
            }
            add_squares(p[w], x);
        }
    }
    float inverse = inverse_root(tree_of_warp(p), (float)front.width, front.eps);
    i64 row = part.weight != nullptr ? front.row(token) : 0;
    for (int lane = thread * V; lane < front.width; lane += 32 * V) {
        Raw<V> own = fetch<V>(part.in, begin + lane, part.kind), mate = own;
        float c[V], s[V];
        if (part.weight != nullptr && front.rotates(lane)) {
            if (V == 1 || !(front.flags & GPTJ)) mate = fetch<V>(part.in, begin + front.partner(lane), part.kind);
            front.turn(c, s, row, lane);
        }
        front.finish(part, token, head, lane, own, mate, c, s, inverse);
    }
}

extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_any_v8(FRONT_PARAMETERS) {
    const Front front = FRONT;
    front_any<8>(front);
}

extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_any_v1(FRONT_PARAMETERS) {
    const Front front = FRONT;
    front_any<1>(front);
}

#define PAGED_PARAMETERS                                                                                          \
    i64 tokens, i64 lanes, i64 splits, i64 chunks, const void *q, i64 q_token, i64 q_head, void *q_out,           \
        i64 q_heads, const void *k, i64 k_token, i64 k_head, void *k_out, i64 k_heads, const void *v,             \
        i64 v_token, i64 v_head, i64 width, i64 half, i64 kind, i64 flags, const void *positions, i64 wide,       \
        const void *cache, i64 cache_kind, i64 rows, void *k_pages, i64 k_block, i64 k_row, i64 k_page_head,      \
        void *v_pages, i64 v_block, i64 v_row, i64 v_page_head, const i64 *slots, i64 stored, i64 size, i64 room
#define PAGED_NAMES                                                                                               \
    tokens, lanes, splits, chunks, q, q_token, q_head, q_out, q_heads, k, k_token, k_head, k_out, k_heads, v,     \
        v_token, v_head, width, half, kind, flags, positions, wide, cache, cache_kind, rows, k_pages, k_block,    \
        k_row, k_page_head, v_pages, v_block, v_row, v_page_head, slots, stored, size, room

template <int V, int HEADS> VT_FN void rope_paged(PAGED_PARAMETERS) {
    const Rope rope = {{q, q_token, q_head, q_out, q_heads, nullptr, 0},
                       {k, k_token, k_head, k_out, k_heads, k_pages, k_page_head},
                       {v, v_token, v_head, nullptr, k_heads, v_pages, v_page_head},
                       tokens, (int)width, (int)half, 0, (int)kind, (int)flags, F32, (int)lanes, (int)splits,
                       (int)chunks};
    const Post at = rope.post();
    if (at.token >= tokens || at.unit >= rope.units<V>()) return;
    const Unit u = rope.unit<V>(at.unit);
    i64 row = id_at(positions, at.token, wide);
    i64 slot = at.token < stored ? slots[at.token] : -1, k_page = -1, v_page = -1;
    Span<V, HEADS, true> span;
    span.read(rope, at, u);
    float c[V], s[V];
    if (u.rotates) {
        const Table table = {cache, rows, (int)half, (int)cache_kind};
        table.read(c, s, row, u.pair);
    }
    if (slot >= 0 && slot < room) {
        i64 block = quotient(slot, size), within = slot - block * size;
        k_page = block * k_block + within * k_row;
        v_page = block * v_block + within * v_row;
    }
    span.write(rope, at, u, c, s, k_page, v_page);
}

#define PAGED(NAME, V, HEADS, KIND, FLAGS)                                                                        \
    extern "C" __global__ void __launch_bounds__(256) rope_paged_##NAME(PAGED_PARAMETERS) {                       \
        kind = KIND;                                                                                              \
        flags = FLAGS;                                                                                            \
        rope_paged<V, HEADS>(PAGED_NAMES);                                                                        \
    }
PAGED(bf16, 8, 4, BF16, 0)
PAGED(bf16_pairs, 8, 4, BF16, GPTJ)
PAGED(v8, 8, 2, kind, flags)
PAGED(v1, 1, 4, kind, flags)

extern "C" __global__ void __launch_bounds__(256) rope_fused_positions(
    i64 count, const void* positions, i64 wide, i64 rows, i64* lowest) {
    note_bad_position(count, positions, wide, rows, lowest);
}

extern "C" __global__ void __launch_bounds__(256) rope_fused_slots(i64 count, const i64* slots, i64 room, i64* lowest) {
    slots_fit(count, slots, room, lowest);
}
