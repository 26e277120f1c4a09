// RMSNorm of every head of q and k and its rotation in float32, beside heads that are copied.
#pragma once
#include "rope.cuh"
#include "teams.cuh"

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

    template <int V> VT_MEMBER void weights(float (&w)[V], const Part& part, int lane) const {
        load(w, part.weight, lane, weight_kind);
#pragma unroll
        for (int j = 0; j < V; ++j) w[j] = flags & GEMMA ? w[j] + 1.0f : w[j];
    }

    template <int V> VT_MEMBER void scale(float (&v)[V], const float (&w)[V], float inverse, int kind) const {
#pragma unroll
        for (int j = 0; j < V; ++j) v[j] = (v[j] * inverse) * w[j];
        if (flags & ROUNDED) widen(v, narrow(v, kind), kind);
    }

    template <int V>
    VT_MEMBER void norm(float (&v)[V], const Raw<V>& raw, const Part& part, int lane, float inverse) const {
        float w[V];
        widen(v, raw, part.kind);
        weights(w, part, lane);
        scale(v, w, inverse, part.kind);
    }

    template <int V> VT_MEMBER void copy(const Part& part, i64 to, const Raw<V>& raw) const {
        if (part.kind == part.out_kind) {
            put(part.out, to, raw, part.kind);
        } else {
            float v[V];
            widen(v, raw, part.kind);
            store(part.out, to, v, part.out_kind);
        }
    }

    // x c - y s is x c + y (-s): the same bits.
    template <int V>
    VT_MEMBER void finish(const Part& part, i64 token, int head, int lane, const Raw<V>& own, const Raw<V>& mate,
                          const float (&c)[V], const float (&s)[V], float inverse) const {
        i64 to = token * part.out_token + (i64)head * width + lane;
        if (part.weight == nullptr) return copy(part, to, own);
        float v[V];
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
        store(part.out, to, v, part.out_kind);
    }
};

// How a token's heads are dealt out to teams of 2^shift lanes: every team has up to `depth` heads of one part, `q` teams
// are q's, then `k` are k's, of `all`.
struct Deal {
    int shift, depth, q, k, all;
};

// Heads of at most 8 * lanes elements. A team has all that its heads share, addresses to weights, worked out once.
template <int HEADS> VT_FN void front_rows(const Front& front, const Deal& deal) {
    const Team team(deal.shift);
    const unsigned number = team_number(blockIdx.x, deal.shift), token = number / (unsigned)deal.all;
    int first = (int)(number - token * (unsigned)deal.all), step = deal.q;
    Part part = front.q;
    if (first >= deal.q) {
        first -= deal.q;
        step = deal.k;
        part = front.k;
        if (first >= deal.k) {
            first -= deal.k;
            step = deal.all - deal.q - deal.k;
            part = front.rest;
        }
    }
    const int lane = team.place * 8, own_lane = (int)threadIdx.x & 31;
    const bool inside = token < front.tokens && lane < front.width;  // the others still take part in the exchanges
    const bool normed = part.weight != nullptr, turned = inside && normed && front.rotates(lane);
    const i64 from = token * part.token + first * part.head + lane;
    const i64 to = token * part.out_token + (i64)first * front.width + lane;
    Raw<8> own[HEADS];
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
        own[j] = {};
        if (inside && first + j * step < part.count) own[j] = fetch<8>(part.in, from + j * step * part.head, part.kind);
    }
    if (!__any_sync(VT_ALL_LANES, normed)) {
#pragma unroll
        for (int j = 0; j < HEADS; ++j)
            if (inside && first + j * step < part.count) front.copy(part, to + (i64)j * step * front.width, own[j]);
        return;
    }
    float c[8], s[8], w[8] = {}, partial[HEADS];
    if (turned) front.turn(c, s, front.row(token), lane);
    if (inside && normed) front.weights(w, part, lane);
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
        float v[8];
        widen(v, own[j], part.kind);
        partial[j] = 0.0f;
        add_squares(partial[j], v);
    }
    const float roots = team.roots(partial, (float)front.width, front.eps);
    const int mate = turned ? own_lane + (front.partner(lane) - lane) / 8 : own_lane;
#pragma unroll
    for (int j = 0; j < HEADS; ++j) {
        if (j >= deal.depth) break;  // all of them
        float v[8], other[8];
        widen(v, own[j], part.kind);
        front.scale(v, w, team.root_of(roots, j), part.kind);
#pragma unroll
        for (int i = 0; i < 8; ++i) other[i] = front.flags & GPTJ ? v[i ^ 1] : from_lane(v[i], mate);
        if (!inside || first + j * step >= part.count) continue;
        const i64 at = to + (i64)j * step * front.width;
        if (!normed) {
            front.copy(part, at, own[j]);
            continue;
        }
        if (turned) {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = v[i] * c[i] + other[i] * s[i];
        }
        store(part.out, at, v, part.out_kind);
    }
}

// A warp a head.
template <int V> VT_FN void front_any(const Front& front) {
    const unsigned warp = team_number(blockIdx.x, 5);
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
