// Rotary embedding: cache rows, the rotation of pairs, and how heads are cut into units for threads.
//
// A unit is two groups of V lanes of a head: the first and the second members of V pairs, or two groups that are
// copied. A thread takes one unit of up to HEADS heads of a token, so that it reads cosines and sines once; all loads
// of all its heads are under way before the first is looked at.
#pragma once
#include "units.cuh"

enum { GPTJ = 1, INVERSE = 2, FUSED = 4, AXES = 8, INTERLEAVED = 16 };  // device/rope.py

VT_FN i64 id_at(const void* ids, i64 at, i64 wide) { return wide ? ((const i64*)ids)[at] : (i64)((const int*)ids)[at]; }

// The lowest number of a position outside of [0, rows), or of a negative one where rows < 0.
VT_FN void note_bad_position(i64 count, const void* positions, i64 wide, i64 rows, i64* lowest) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    i64 position = id_at(positions, at, wide);
    if (position < 0 || (rows >= 0 && position >= rows)) atomicMin(lowest, at);
}

// Rows [cos of all pairs | sin of all pairs]. A row outside of the table is NaN.
struct Table {
    const void* base;
    i64 rows;
    int half, kind;

    template <int V> VT_MEMBER void read(float (&c)[V], float (&s)[V], i64 row, int pair) const {
        if (row < 0 || row >= rows) {
#pragma unroll
            for (int j = 0; j < V; ++j) c[j] = s[j] = VT_NAN;
            return;
        }
        Raw<V> cos = fetch<V>(base, row * 2 * half + pair, kind), sin = fetch<V>(base, row * 2 * half + half + pair, kind);
        widen(c, cos, kind);
        widen(s, sin, kind);
    }
};

// (x, y) becomes (x c - y s, y c + x s); `product` is the dtype that the products round to.
template <int V>
VT_FN void turn_pairs(float (&x)[V], float (&y)[V], const float (&c)[V], const float (&s)[V], int flags, int product) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
        float ahead, behind;
        if (flags & FUSED) {
            ahead = vt_fma(x[j], c[j], -(y[j] * s[j]));
            behind = vt_fma(x[j], s[j], y[j] * c[j]);
        } else if (product != F32) {
            ahead = through(x[j] * c[j], product) - through(y[j] * s[j], product);
            behind = through(y[j] * c[j], product) + through(x[j] * s[j], product);
        } else {
            ahead = x[j] * c[j] - y[j] * s[j];
            behind = y[j] * c[j] + x[j] * s[j];
        }
        x[j] = ahead;
        y[j] = behind;
    }
}

// Two groups of neighbours x0 y0 x1 y1 ... into all x and all y, and back.
VT_FN void part_pairs(float (&a)[8], float (&b)[8]) {
    float x[8], y[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        x[j] = a[2 * j];
        y[j] = a[2 * j + 1];
        x[j + 4] = b[2 * j];
        y[j + 4] = b[2 * j + 1];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        a[j] = x[j];
        b[j] = y[j];
    }
}
VT_FN void join_pairs(float (&x)[8], float (&y)[8]) {
    float a[8], b[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        a[2 * j] = x[j];
        a[2 * j + 1] = y[j];
        b[2 * j] = x[j + 4];
        b[2 * j + 1] = y[j + 4];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        x[j] = a[j];
        y[j] = b[j];
    }
}
VT_FN void part_pairs(float (&)[1], float (&)[1]) {}
VT_FN void join_pairs(float (&)[1], float (&)[1]) {}

// Heads of a tensor [T, count, width]: where they are, where their rotation goes and, paged, where else.
struct Heads {
    const void* in;
    i64 token, head;
    void* out;
    i64 count;
    void* pages;
    i64 page_head;
};

struct Unit {
    int first, second, pair;
    bool rotates, both;
};

// Where a thread works: one unit of the heads `lane`, `lane + step`, ... of a token.
struct Post {
    i64 token;
    int unit, lane, step, local;
};

struct Rope {
    Heads q, k, v;  // v is copied into its pages and nowhere else
    i64 tokens;
    int width, half, offset, kind, flags, product;
    int lanes, splits, chunks;  // heads at a time of a block; blocks to the heads and to the units of a token

    VT_MEMBER Post post() const {
        unsigned block = blockIdx.x, chunk = 0, split = 0;
        if (chunks > 1) {
            chunk = block % (unsigned)chunks;
            block /= (unsigned)chunks;
        }
        if (splits > 1) {
            split = block % (unsigned)splits;
            block /= (unsigned)splits;
        }
        unsigned local = threadIdx.y / (unsigned)lanes;
        Post at;
        at.local = (int)local;
        at.token = (i64)block * (blockDim.y / (unsigned)lanes) + local;
        at.unit = (int)(chunk * blockDim.x + threadIdx.x);
        at.lane = (int)(split * lanes + threadIdx.y - local * lanes);
        at.step = lanes * splits;
        return at;
    }

    template <int V> VT_MEMBER int copied() const { return (width - 2 * half) / V; }
    template <int V> VT_MEMBER int units() const { return half / V + (copied<V>() + 1) / 2; }
    template <int V> VT_MEMBER int copied_lane(int group) const {
        int lane = group * V;
        return lane < offset ? lane : lane + 2 * half;
    }

    template <int V> VT_MEMBER Unit unit(int number) const {
        Unit u;
        u.rotates = u.both = number < half / V;
        u.pair = number * V;
        if (u.rotates) {
            u.first = offset + (flags & GPTJ ? 2 : 1) * u.pair;
            u.second = u.first + (flags & GPTJ ? V : half);
        } else {
            int group = number - half / V, other = group + (copied<V>() + 1) / 2;
            u.both = other < copied<V>();
            u.first = copied_lane<V>(group);
            u.second = copied_lane<V>(other);
        }
        return u;
    }
};

// A unit of each of HEADS heads.
template <int V, int HEADS, bool PAGED> struct Span {
    Raw<V> a[HEADS], b[HEADS];

    // By value: a reference to one of three would put them all into memory.
    VT_MEMBER static Heads whose(const Rope& rope, int& head) {
        const bool k = head >= (int)rope.q.count;
        Heads found = k ? rope.k : rope.q;
        head -= k ? (int)rope.q.count : 0;
        if (PAGED && k && head >= (int)rope.k.count) {
            found = rope.v;
            head -= (int)rope.k.count;
        }
        return found;
    }

    VT_MEMBER static int count(const Rope& rope) {
        return (int)(rope.q.count + rope.k.count + (PAGED ? rope.v.count : 0));
    }

    VT_MEMBER void read(const Rope& rope, const Post& at, const Unit& u) {
#pragma unroll
        for (int j = 0; j < HEADS; ++j) {
            int head = at.lane + j * at.step;
            if (head >= count(rope)) continue;
            const Heads from = whose(rope, head);
            i64 begin = at.token * from.token + head * from.head;
            a[j] = fetch<V>(from.in, begin + u.first, rope.kind);
            if (u.both) b[j] = fetch<V>(from.in, begin + u.second, rope.kind);
        }
    }

    // k_page, v_page: where the token's page rows begin, negative where it has none.
    VT_MEMBER void write(const Rope& rope, const Post& at, const Unit& u, const float (&c)[V], const float (&s)[V],
                         i64 k_page = -1, i64 v_page = -1) {
#pragma unroll
        for (int j = 0; j < HEADS; ++j) {
            int head = at.lane + j * at.step;
            if (head >= count(rope)) continue;
            const Heads to = whose(rope, head);
            bool moved = PAGED && to.out == nullptr;
            if (u.rotates && !moved) {
                float x[V], y[V];
                widen(x, a[j], rope.kind);
                widen(y, b[j], rope.kind);
                if (rope.flags & GPTJ) part_pairs(x, y);
                turn_pairs(x, y, c, s, rope.flags, rope.product);
                if (rope.flags & GPTJ) join_pairs(x, y);
                a[j] = narrow(x, rope.kind);
                b[j] = narrow(y, rope.kind);
            }
            if (!moved) {
                i64 begin = (at.token * to.count + head) * rope.width;
                put(to.out, begin + u.first, a[j], rope.kind);
                if (u.both) put(to.out, begin + u.second, b[j], rope.kind);
            }
            i64 page = moved ? v_page : k_page;
            if (PAGED && to.pages != nullptr && page >= 0) {
                i64 begin = page + head * to.page_head;
                put(to.pages, begin + u.first, a[j], rope.kind);
                if (u.both) put(to.pages, begin + u.second, b[j], rope.kind);
            }
        }
    }
};
