// The delta rule of one token on a state [Dv, Dk] of a head: S = S decay; S += beta (v - S k) k^T; o = S q.
//
// Rows of the state are independent, so a block takes some of one head's; eight lanes hold a row (strips.cuh). What all
// rows share - q, k, the decay, beta - a block makes once, in shared memory, while its rows are on their way.
#pragma once
#include "strips.cuh"

#define WIDTH 128          // Dk of the kernels that hold rows in registers
#define STEPS (WIDTH / STRIP_TURN)
#define RULE_THREADS 128   // device/delta.py
#define RULE_GROUPS (RULE_THREADS / STRIP_LANES)

// How q and k come: as they are, to be divided by their length, or to be multiplied by its inverse; and whether a and b
// are the projections that decay and beta are made of, or g and beta themselves.
enum { DIVIDED = 1, FACTORED = 2, PROJECTED = 4 };  // device/delta.py

// The operands of every token. Elements of q and k stand `row` apart a token, and of v; a value head has the keys of
// head / share. A_log and dt_bias belong to a and b as projections.
struct Rule {
    const void *q, *k, *v, *a, *b, *A_log, *dt_bias;
    void* out;
    i64 q_row, v_row, a_row, b_row, heads, share, Dk, Dv;
    int kind, a_kind, b_kind, A_kind, dt_kind, flags, lanes;
    float scale;

    VT_MEMBER i64 keys_at(i64 token, i64 head) const { return token * q_row + head / share * Dk; }

    // decay of a head (or of a channel of it, whose g stands at `at`) and beta.
    VT_MEMBER float decay(i64 token, i64 head) const {
        float y = load_one(a, token * a_row + head, a_kind);
        if (!(flags & PROJECTED)) return vt_exp(y);
        float A = load_one(A_log, head, A_kind), bias = load_one(dt_bias, head, dt_kind);
        return vt_exp(-vt_exp(A) * vt_softplus(y + bias));
    }
    VT_MEMBER float strength(i64 token, i64 head) const {
        float y = load_one(b, token * b_row + head, b_kind);
        return flags & PROJECTED ? through(vt_sigmoid(y), b_kind) : y;
    }
    // What q (or k) is multiplied by, or divided by, given its sum of squares.
    VT_MEMBER float norm_of(float total, bool of_q) const {
        float root = sqrtf(total + 1e-6f);
        if (flags & DIVIDED) return root;
        float factor = 1.0f / root;
        return of_q ? factor * scale : factor;
    }
    VT_MEMBER float key(float x, float norm, bool of_q) const {
        if (flags & FACTORED) return x * norm;
        if (flags & DIVIDED) x = x / norm;
        return of_q ? x * scale : x;
    }
};

// Where states lie and which token, or tokens, go against which.
struct States {
    void* state;
    const int *slots, *starts;  // a slot a token; or without, slot n and the tokens starts[n] ... starts[n + 1] - 1
    i64 count, tokens;
    int kind;

    // A negative slot is null; one that does not exist, which a capture cannot refuse, too.
    VT_MEMBER i64 slot(i64 n) const {
        i64 found = slots == nullptr ? n : slots[n];
        return found < count ? found : -1;
    }
    VT_MEMBER i64 begin(i64 n) const { return starts == nullptr ? n : starts[n] < 0 ? 0 : starts[n]; }
    VT_MEMBER i64 end(i64 n) const { return starts == nullptr ? n + 1 : starts[n + 1] < tokens ? starts[n + 1] : tokens; }
};

template <bool CHANNELS> struct alignas(16) Given {
    float q[WIDTH], k[WIDTH], decay[CHANNELS ? WIDTH : 1], beta;
};

// What this thread's warp has to do with a token's shared part: 0 makes q, 1 k, 2 the decay, 3 beta.
template <bool CHANNELS> struct Making {
    Four raw[STEPS];
    float y, A, bias;

    VT_MEMBER void send(const Rule& rule, i64 token, i64 head) {
        const int part = threadIdx.x >> 5, lane = threadIdx.x & 31;
        if (part < 2) {
            const i64 at = rule.keys_at(token, head) + 4 * (lane & 7);
#pragma unroll
            for (int s = 0; s < STEPS; ++s) raw[s] = fetch_four(part ? rule.k : rule.q, at + STRIP_TURN * s, rule.kind);
        } else if (part == 2 && CHANNELS) {
            raw[0] = fetch_four(rule.a, (token * rule.heads + head) * WIDTH + 4 * lane, F32);
        } else if (part == 2) {
            y = load_one(rule.a, token * rule.a_row + head, rule.a_kind);
            if (rule.flags & PROJECTED) {
                A = load_one(rule.A_log, head, rule.A_kind);
                bias = load_one(rule.dt_bias, head, rule.dt_kind);
            }
        } else {
            y = load_one(rule.b, token * rule.b_row + head, rule.b_kind);
        }
    }

    VT_MEMBER void finish(const Rule& rule, Given<CHANNELS>& given) const {
        const int part = threadIdx.x >> 5, lane = threadIdx.x & 31, mine = lane >> 3;
        if (part < 2) {
            float x[4], own[4] = {}, total[1] = {0.0f};
            const bool normed = rule.flags & (DIVIDED | FACTORED);
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                widen_four(x, raw[s], rule.kind);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    total[0] = vt_fma(x[j], x[j], total[0]);
                    if (s == mine) own[j] = x[j];
                }
            }
            float norm = 1.0f;
            if (normed) {
                trees(total, STRIP_LANES);
                norm = rule.norm_of(total[0], part == 0);
            }
            float* to = (part ? given.k : given.q) + STRIP_TURN * mine + 4 * (lane & 7);
#pragma unroll
            for (int j = 0; j < 4; ++j) to[j] = rule.key(own[j], norm, part == 0);
        } else if (part == 2 && CHANNELS) {
            float x[4];
            widen_four(x, raw[0], F32);
#pragma unroll
            for (int j = 0; j < 4; ++j) given.decay[(4 * lane + j) % (CHANNELS ? WIDTH : 1)] = vt_exp(x[j]);
        } else if (part == 2) {
            given.decay[0] = rule.flags & PROJECTED ? vt_exp(-vt_exp(A) * vt_softplus(y + bias)) : vt_exp(y);
        } else {
            given.beta = rule.flags & PROJECTED ? through(vt_sigmoid(y), rule.b_kind) : y;
        }
    }
};

struct alignas(16) Strip { float x[4]; };

VT_FN void strip(float (&x)[4], const float* shared, int s) {
    const Strip four = *(const Strip*)(shared + STRIP_TURN * s + 4 * (threadIdx.x & 7));
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = four.x[j];
}

// One token on R rows in registers.
template <int R, bool CHANNELS>
VT_FN void rule_step(float (&S)[R][STEPS][4], const Given<CHANNELS>& given, const float (&v)[R], float (&o)[R]) {
    float k[STEPS][4], p[R] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        float decay[4];
        strip(k[s], given.k, s);
        if (CHANNELS) strip(decay, given.decay, s);
        else decay[0] = decay[1] = decay[2] = decay[3] = given.decay[0];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int r = 0; r < R; ++r) {
                S[r][s][j] *= decay[j];
                p[r] = vt_fma(S[r][s][j], k[s][j], p[r]);
            }
        }
    }
    trees(p, STRIP_LANES);
#pragma unroll
    for (int r = 0; r < R; ++r) {
        p[r] = (v[r] - p[r]) * given.beta;
        o[r] = 0.0f;
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        float q[4];
        strip(q, given.q, s);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int r = 0; r < R; ++r) {
                S[r][s][j] = vt_fma(p[r], k[s][j], S[r][s][j]);
                o[r] = vt_fma(S[r][s][j], q[j], o[r]);
            }
        }
    }
    trees(o, STRIP_LANES);
}

// A block has R * RULE_GROUPS rows of one head, Dk = WIDTH, Dv a multiple of that. ONE: a token for each state.
template <int R, int STATE, bool CHANNELS, bool ONE> VT_FN void rule_tile(const Rule& rule, const States& states) {
    __shared__ Given<CHANNELS> given[ONE ? 1 : 2];
    const int tiles = (int)rule.Dv / (R * RULE_GROUPS);
    const unsigned unit = blockIdx.x / (unsigned)tiles, tile = blockIdx.x - unit * (unsigned)tiles;
    const i64 n = unit / (unsigned)rule.heads, head = unit - n * (unsigned)rule.heads;
    const int lane = threadIdx.x & 7, first = (int)tile * R * RULE_GROUPS + (threadIdx.x >> 3);
    const int kind = STATE == F32 ? F32 : states.kind;
    i64 token = ONE ? n : states.begin(n);
    const i64 end = ONE ? n + 1 : states.end(n);
    if (token >= end) return;
    Making<CHANNELS> making;
    making.send(rule, token, head);
    Raw<1> raw_v[R];
#pragma unroll
    for (int r = 0; r < R; ++r)
        raw_v[r] = fetch<1>(rule.v, token * rule.v_row + head * rule.Dv + first + r * RULE_GROUPS, rule.kind);
    const i64 slot = states.slot(n);
    if (slot < 0) {
        if (lane == 0)
            for (int r = 0; r < R; ++r)
                store_one(rule.out, (n * rule.heads + head) * rule.Dv + first + r * RULE_GROUPS, 0.0f, rule.kind);
        return;
    }
    const i64 base = ((slot * rule.heads + head) * rule.Dv + first) * WIDTH + 4 * lane;
    float S[R][STEPS][4];
    {
        Four raw[R][STEPS];
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int s = 0; s < STEPS; ++s)
                raw[r][s] = fetch_four(states.state, base + r * RULE_GROUPS * WIDTH + STRIP_TURN * s, kind);
        making.finish(rule, given[0]);
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int s = 0; s < STEPS; ++s) widen_four(S[r][s], raw[r][s], kind);
    }
    for (int turn = 0;; turn ^= 1) {
        __syncthreads();
        float v[R], o[R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float x[1];
            widen(x, raw_v[r], rule.kind);
            v[r] = x[0];
        }
        const i64 now = token++;
        if (!ONE && token < end) {
            making.send(rule, token, head);
#pragma unroll
            for (int r = 0; r < R; ++r)
                raw_v[r] = fetch<1>(rule.v, token * rule.v_row + head * rule.Dv + first + r * RULE_GROUPS, rule.kind);
        }
        rule_step<R, CHANNELS>(S, given[turn], v, o);
        if (lane == 0) {
#pragma unroll
            for (int r = 0; r < R; ++r)
                store_one(rule.out, (now * rule.heads + head) * rule.Dv + first + r * RULE_GROUPS, o[r], rule.kind);
        }
        if (ONE || token >= end) break;
        making.finish(rule, given[ONE ? 0 : turn ^ 1]);
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
            store_four(states.state, base + r * RULE_GROUPS * WIDTH + STRIP_TURN * s, S[r][s], kind);
}

// Rows of any length, at any address: read twice a token, elements one by one.
template <bool CHANNELS> VT_FN void rule_any(const Rule& rule, const States& states) {
    const i64 tiles = (rule.Dv + RULE_GROUPS - 1) / RULE_GROUPS;
    const i64 unit = blockIdx.x / tiles, tile = blockIdx.x - unit * tiles;
    const i64 n = unit / rule.heads, head = unit - n * rule.heads;
    const int lane = threadIdx.x & 7, Dk = (int)rule.Dk;
    const i64 row = tile * RULE_GROUPS + (threadIdx.x >> 3);
    const bool inside = row < rule.Dv;  // the others still take part in the exchanges
    const int length = inside ? Dk : 0;
    const i64 slot = states.slot(n), base = ((slot * rule.heads + head) * rule.Dv + row) * Dk;
    const i64 end = states.end(n);
    for (i64 token = states.begin(n); token < end; ++token) {
        const i64 to = (token * rule.heads + head) * rule.Dv + row;
        if (slot < 0) {
            if (inside && lane == 0) store_one(rule.out, to, 0.0f, rule.kind);
            continue;
        }
        const i64 keys = rule.keys_at(token, head), channels = (token * rule.heads + head) * Dk;
        float norms[2] = {1.0f, 1.0f};
        if (rule.flags & (DIVIDED | FACTORED)) {
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const void* x = part ? rule.k : rule.q;
                float total = strip_sum(length, rule.lanes, [&](int at, float sum) {
                    float one = load_one(x, keys + at, rule.kind);
                    return vt_fma(one, one, sum);
                });
                norms[part] = rule.norm_of(total, part == 0);
            }
        }
        auto key = [&](int at) { return rule.key(load_one(rule.k, keys + at, rule.kind), norms[1], false); };
        float shared = CHANNELS ? 0.0f : rule.decay(token, head), beta = rule.strength(token, head);
        auto faded = [&](int at) {
            float decay = CHANNELS ? vt_exp(((const float*)rule.a)[channels + at]) : shared;
            return load_one(states.state, base + at, states.kind) * decay;
        };
        float seen = strip_sum(length, rule.lanes, [&](int at, float sum) { return vt_fma(faded(at), key(at), sum); });
        float v = inside ? load_one(rule.v, token * rule.v_row + head * rule.Dv + row, rule.kind) : 0.0f;
        float change = (v - seen) * beta;
        float o = strip_sum(length, rule.lanes, [&](int at, float sum) {
            float S = vt_fma(change, key(at), faded(at));
            store_one(states.state, base + at, S, states.kind);
            return vt_fma(S, rule.key(load_one(rule.q, keys + at, rule.kind), norms[0], true), sum);
        });
        if (inside && lane == 0) store_one(rule.out, to, o, rule.kind);
    }
}

#define RULE_PARAMETERS                                                                                           \
    const void *q, const void *k, i64 q_row, const void *v, i64 v_row, i64 kind, const void *a, i64 a_row,        \
        i64 a_kind, const void *b, i64 b_row, i64 b_kind, const void *A_log, i64 A_kind, const void *dt_bias,     \
        i64 dt_kind, void *out, i64 heads, i64 share, i64 Dk, i64 Dv, i64 flags, i64 lanes, float scale,          \
        void *state, i64 state_kind, i64 count, const int *slots, const int *starts, i64 tokens
#define THE_RULE                                                                                                  \
    Rule{q, k, v, a, b, A_log, dt_bias, out, q_row, v_row, a_row, b_row, heads, share, Dk, Dv, (int)kind,         \
         (int)a_kind, (int)b_kind, (int)A_kind, (int)dt_kind, (int)flags, (int)lanes, scale},                     \
        States { state, slots, starts, count, tokens, (int)state_kind }
#define RULE_TILE(NAME, R, BLOCKS, STATE, CHANNELS, ONE)                                                          \
    extern "C" __global__ void __launch_bounds__(RULE_THREADS, BLOCKS) NAME(RULE_PARAMETERS) {                    \
        rule_tile<R, STATE, CHANNELS, ONE>(THE_RULE);                                                             \
    }
#define RULE_ANY(NAME, CHANNELS)                                                                                  \
    extern "C" __global__ void __launch_bounds__(RULE_THREADS, 4) NAME(RULE_PARAMETERS) { rule_any<CHANNELS>(THE_RULE); }
