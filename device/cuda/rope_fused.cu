// Rotation fused with what surrounds it: the norm of each head of q and k in front, the paged cache behind.
//
// The ladder:
// 1. qk_norm_rope_any_v1: a warp a head, any width, stride and address; _any_v8: the same with 16-byte loads, for heads
//    of more than 256 lanes.
// 2. qk_norm_rope_v8: as many lanes a head as it has groups of eight, two heads of one kind a thread, which share
//    weights, cosines and sines in registers. A head is read once; the partner's lane of a pair is another thread's, and
//    comes by shuffles. Gates and v are copied in the same pass, by warps that do nothing else.
// 3. qk_norm_rope_bf16: four heads a thread, knowing that everything that moves is bfloat16 in NeoX's order.
// rope_paged_*: rope.cu's kernels with k's rotation also going to its page, and v with it.
#include "qk_norm.cuh"

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
#define DEAL_PARAMETERS i64 shift, i64 depth, i64 q_teams, i64 k_teams, i64 teams
#define DEAL {(int)shift, (int)depth, (int)q_teams, (int)k_teams, (int)teams}

extern "C" __global__ void __launch_bounds__(128) qk_norm_rope_v8(FRONT_PARAMETERS, DEAL_PARAMETERS) {
    const Front front = FRONT;
    front_rows<2>(front, DEAL);
}

extern "C" __global__ void __launch_bounds__(128) qk_norm_rope_bf16(FRONT_PARAMETERS, DEAL_PARAMETERS) {
    q_kind = k_kind = out_kind = rest_kind = rest_out_kind = BF16;
    flags &= ~(i64)GPTJ;
    const Front front = FRONT;
    front_rows<4>(front, DEAL);
}

extern "C" __global__ void __launch_bounds__(128) qk_norm_rope_any_v8(FRONT_PARAMETERS) {
    const Front front = FRONT;
    front_any<8>(front);
}

extern "C" __global__ void __launch_bounds__(128) qk_norm_rope_any_v1(FRONT_PARAMETERS) {
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
PAGED(bf16_pairs, 8, 3, BF16, GPTJ)
PAGED(v8, 8, 2, kind, flags)
PAGED(v1, 1, 4, kind, flags)

extern "C" __global__ void __launch_bounds__(256) rope_fused_positions(
    i64 count, const void* positions, i64 wide, i64 rows, i64* lowest) {
    note_bad_position(count, positions, wide, rows, lowest);
}

extern "C" __global__ void __launch_bounds__(256) rope_fused_slots(i64 count, const i64* slots, i64 room, i64* lowest) {
    slots_fit(count, slots, room, lowest);
}
