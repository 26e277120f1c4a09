// Mamba-2 as a loop over tokens: S = exp(dt A) S + dt x B^T, y = (S C + D x) silu(z), in MIRROR's order.
//
// The ladder:
// 1. ssd_recurrent_any: eight lanes a row of the state (strips.cuh), which stays in shared memory, any length of it.
// 2. ssd_recurrent_64, _128: rows of that many elements in registers; the next token is on its way meanwhile.
#include "ssd_steps.cuh"
#include "strips.cuh"

#define LOOP_THREADS 128  // device/ssd_loop.py
#define LOOP_ROWS (LOOP_THREADS / STRIP_LANES)

struct Loop {
    Steps steps;
    const void *x, *B, *C, *z;
    const float *A, *D;
    float* state;
    const int* starts;
    void* out;
    i64 width, groups, length, tokens, skip_step;
    int kind, lanes;

    // Row `row` of the state of `head` in sequence n: where it begins.
    VT_MEMBER i64 kept(i64 n, i64 head, i64 row) const { return ((n * steps.heads + head) * width + row) * length; }
    VT_MEMBER i64 begin(i64 n) const { return starts[n] < 0 ? 0 : starts[n]; }
    VT_MEMBER i64 end(i64 n) const { return starts[n + 1] < tokens ? starts[n + 1] : tokens; }
    VT_MEMBER float skip(i64 head, i64 row) const {
        if (D == nullptr) return 0.0f;
        return skip_step ? D[head * skip_step + row] : D[head];
    }
    VT_MEMBER float result(float y, float own, float factor, float gate) const {
        if (D != nullptr) y = vt_fma(own, factor, y);
        return z == nullptr ? y : y * vt_silu(gate);
    }
};

#define LOOP_PARAMETERS                                                                                          \
    STEPS_PARAMETERS, const void *x, const void *B, const void *C, i64 kind, const float *A, i64 width,          \
        i64 groups, i64 length, float *state, const int *starts, i64 tokens, const float *D, i64 skip_step,      \
        const void *z, void *out, i64 lanes
#define THE_LOOP                                                                                                 \
    Loop{THE_STEPS, x, B, C, z, A, D, state, starts, out, width, groups, length, tokens, skip_step, (int)kind, (int)lanes}

// Which sequence, head and row of its state a thread looks after; rows past the end follow, for the shuffles' sake.
struct Seat {
    i64 n, head, group, row;
    bool own;

    VT_MEMBER Seat(const Loop& l) {
        const i64 tiles = (l.width + LOOP_ROWS - 1) / LOOP_ROWS, unit = blockIdx.x / tiles;
        n = unit / l.steps.heads;
        head = unit % l.steps.heads;
        group = head / (l.steps.heads / l.groups);
        row = blockIdx.x % tiles * LOOP_ROWS + threadIdx.x / STRIP_LANES;
        own = row < l.width;
        if (!own) row = l.width - 1;
    }
};

extern "C" __global__ void __launch_bounds__(LOOP_THREADS) ssd_recurrent_any(LOOP_PARAMETERS) {
    VT_SHARED(shared);
    const Loop l = THE_LOOP;
    const Seat seat(l);
    const int lane = threadIdx.x & (STRIP_LANES - 1);
    float* S = (float*)shared + threadIdx.x / STRIP_LANES * length;
    const i64 kept = l.kept(seat.n, seat.head, seat.row), begin = l.begin(seat.n), end = l.end(seat.n);
    const float fading = A[seat.head], factor = l.skip(seat.head, seat.row);
    // A lane's elements of the state are its own: nobody waits for anybody.
    const auto elements = [&](auto&& f) {
        for (i64 turn = 4 * lane; turn < length; turn += STRIP_TURN)
            for (i64 i = turn; i < turn + 4 && i < length; ++i) f(i);
    };
    elements([&](i64 i) { S[i] = state[kept + i]; });
    for (i64 t = begin; t < end; ++t) {
        const i64 at = (t * heads + seat.head) * width + seat.row, vector = (t * groups + seat.group) * length;
        const float own = load_one(x, at, l.kind), gate = z == nullptr ? 0.0f : load_one(z, at, l.kind);
        const float step = l.steps.at(t, seat.head), put = step * own, fade = vt_exp(step * fading);
        const float y = strip_sum((int)length, l.lanes, [&](int i, float partial) {
            S[i] = vt_fma(load_one(B, vector + i, l.kind), put, S[i] * fade);
            return vt_fma(S[i], load_one(C, vector + i, l.kind), partial);
        });
        if (seat.own && lane == 0) store_one(out, at, l.result(y, own, factor, gate), l.kind);
    }
    if (seat.own && begin < end) elements([&](i64 i) { state[kept + i] = S[i]; });
}

// What a token brings to a row.
template <int TURNS> struct Brought {
    Four B[TURNS], C[TURNS];
    Raw<1> x, dt, z;

    VT_MEMBER void send(const Loop& l, const Seat& seat, i64 t, int lane) {
        const i64 at = (t * l.steps.heads + seat.head) * l.width + seat.row;
        const i64 vector = (t * l.groups + seat.group) * l.length + 4 * lane;
        dt = fetch<1>(l.steps.dt, t * l.steps.heads + seat.head, l.kind);
        x = fetch<1>(l.x, at, l.kind);
        z = x;
        if (l.z != nullptr) z = fetch<1>(l.z, at, l.kind);
#pragma unroll
        for (int s = 0; s < TURNS; ++s) {
            B[s] = fetch_four(l.B, vector + STRIP_TURN * s, l.kind);
            C[s] = fetch_four(l.C, vector + STRIP_TURN * s, l.kind);
        }
    }
};

template <int TURNS> VT_FN void loop_rows(const Loop& l) {
    const Seat seat(l);
    const int lane = threadIdx.x & (STRIP_LANES - 1);
    const i64 kept = l.kept(seat.n, seat.head, seat.row) + 4 * lane, begin = l.begin(seat.n), end = l.end(seat.n);
    if (begin >= end) return;
    const float fading = l.A[seat.head], factor = l.skip(seat.head, seat.row);
    float S[TURNS][4];
#pragma unroll
    for (int s = 0; s < TURNS; ++s) widen_four(S[s], fetch_four(l.state, kept + STRIP_TURN * s, F32), F32);
    Brought<TURNS> next;
    next.send(l, seat, begin, lane);
    for (i64 t = begin; t < end; ++t) {
        const Brought<TURNS> now = next;
        if (t + 1 < end) next.send(l, seat, t + 1, lane);
        float own[1], gate[1], dt[1], y[1] = {0.0f};
        widen(own, now.x, l.kind);
        widen(gate, now.z, l.kind);
        widen(dt, now.dt, l.kind);
        const float step = l.steps.of(dt[0], seat.head), put = step * own[0], fade = vt_exp(step * fading);
#pragma unroll
        for (int s = 0; s < TURNS; ++s) {
            float b[4], c[4];
            widen_four(b, now.B[s], l.kind);
            widen_four(c, now.C[s], l.kind);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                S[s][j] = vt_fma(b[j], put, S[s][j] * fade);
                y[0] = vt_fma(S[s][j], c[j], y[0]);
            }
        }
        trees(y, STRIP_LANES);
        const i64 at = (t * l.steps.heads + seat.head) * l.width + seat.row;
        if (seat.own && lane == 0) store_one(l.out, at, l.result(y[0], own[0], factor, gate[0]), l.kind);
    }
#pragma unroll
    for (int s = 0; s < TURNS; ++s)
        if (seat.own) store_four(l.state, kept + STRIP_TURN * s, S[s], F32);
}

extern "C" __global__ void __launch_bounds__(LOOP_THREADS, 4) ssd_recurrent_64(LOOP_PARAMETERS) { loop_rows<2>(THE_LOOP); }
extern "C" __global__ void __launch_bounds__(LOOP_THREADS, 4) ssd_recurrent_128(LOOP_PARAMETERS) { loop_rows<4>(THE_LOOP); }
