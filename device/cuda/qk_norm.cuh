// RMSNorm of every head of q and k and its rotation in float32, beside heads that are copied.
#pragma once
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

// Which group of `lanes` threads this is: the launcher sees to it that there are less than 2^32.
VT_FN unsigned group_of(int lanes) { return (unsigned)(((i64)blockIdx.x * blockDim.x + threadIdx.x) / lanes); }

// `lanes` lanes a head of at most 8 * lanes, `step` groups of them a token, a group for heads g, g + step, ...
template <int HEADS> VT_FN void front_rows(const Front& front, int lanes, int step) {
    unsigned group = group_of(lanes);
    i64 token = group / (unsigned)step;
    int first = (int)(group - (unsigned)token * (unsigned)step), lane = (int)(threadIdx.x & (lanes - 1)) * 8;
    const bool inside = token < front.tokens && lane < front.width;  // the others still take part in the sums
    const bool turned = inside && front.rotates(lane);
    i64 row = turned ? front.row(token) : 0;
    Raw<8> own[HEADS], mate[HEADS];
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
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
    for (int j = 0; j < HEADS; ++j) {
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
