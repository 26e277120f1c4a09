// Mamba's state update of one token a row: S = exp(dt A) S + dt x B^T; y = (S C + D x) silu(z).
//
// The ladder:
// 1. update_any: eight lanes a row of the state (strips.cuh), of any length and alignment.
// 2. update_16, update_128: rows of that many elements, all of a thread's loads under way together, 16 bytes each. What a
//    row has but one of - dt through softplus, dt x, silu(z) - one of its lanes makes for it.
// 2a. update_16_few: one row for each four lanes, where there are not enough rows for all multiprocessors. Exponentials of
//    what is no less than -80 and no more than 80 are scaled by one product instead of two, and need not be clipped.
// 3. tied: rows of 128 whose A is one number (Mamba-2's heads): its exponential too is made once a row. One row for each
//    eight threads: two and four rows a thread were 1 to 4 % slower.
// 3a. tied_narrow: the same for states of 16 bits, two rows a thread.
#include "fast.cuh"
#include "selective_scan.cuh"
#include "strips.cuh"

#define UPDATE_THREADS 128  // device/ssm.py

struct Update {
    void* state;
    const void *x, *dt, *B, *C, *z;
    const float *A, *D, *dt_bias;
    const int *source, *target;
    void* out;
    float* fresh;  // where new states go for lack of a target, a row each
    i64 heads, dim, length, slots, groups, A_head, A_dim, A_step;
    int state_kind, kind, softplus, lanes;

    // A row without a state of its own, which a capture cannot refuse for a slot that does not exist, begins with zeros.
    VT_MEMBER i64 slot(i64 row) const {
        const i64 found = source == nullptr ? row : source[row];
        return found < slots ? found : -1;
    }
    VT_MEMBER i64 group_at(i64 row, i64 head) const {
        return (row * groups + (unsigned)head / ((unsigned)heads / (unsigned)groups)) * length;
    }
};

// What a row of the state has but one of.
struct Own {
    Raw<1> x, dt, z;
    float D, bias;

    VT_MEMBER void send(const Update& u, i64 at, i64 channel) {
        x = fetch<1>(u.x, at, u.kind);
        dt = fetch<1>(u.dt, at, u.kind);
        z = x;
        if (u.z != nullptr) z = fetch<1>(u.z, at, u.kind);
        D = u.D != nullptr ? u.D[channel] : 0.0f;
        bias = u.dt_bias != nullptr ? u.dt_bias[channel] : 0.0f;
    }
    VT_MEMBER float time_step(const Update& u) const {
        float y[1];
        widen(y, dt, u.kind);
        if (u.dt_bias != nullptr) y[0] += bias;
        return u.softplus ? vt_softplus(y[0]) : y[0];
    }
    VT_MEMBER float token(const Update& u) const {
        float y[1];
        widen(y, x, u.kind);
        return y[0];
    }
    VT_MEMBER float result(const Update& u, float y) const {
        if (u.D != nullptr) y = vt_fma(token(u), D, y);
        if (u.z == nullptr) return y;
        float gate[1];
        widen(gate, z, u.kind);
        return y * vt_silu(gate[0]);
    }
};

#define NEAR_EXP 80.0f

// vt_exp of x[j] = dt A[j]; within NEAR_EXP the power of two is a normal number, and the product with it exact.
VT_FN void decays(float (&fade)[4], float dt, const float (&A)[4]) {
    float x[4];
    unsigned far = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        x[j] = dt * A[j];
        const vt_scaled g = vt_exp_parts(x[j], 0.0f);
        fade[j] = (g.hi + g.lo) * vt_float((int)(((unsigned)vt_bits(g.t) << 23) + 0x3f800000u));
        far |= vt_abs(x[j]) < NEAR_EXP ? 0u : 1u << j;
    }
    decide(fade, far, x, x, [](float at, float) { return vt_exp(at); });
}

// R rows of 4 * LANES * STEPS elements a thread, of one head; TIED: a row's A is one number; STATE: float32, or 16 bits.
template <int LANES, int STEPS, int R, bool TIED, int STATE> VT_FN void update_rows(const Update& u) {
    constexpr int GROUPS = UPDATE_THREADS / LANES, LENGTH = 4 * LANES * STEPS;
    const int held_kind = STATE == F32 ? F32 : u.state_kind;
    const int lane = threadIdx.x & (LANES - 1), tiles = (int)u.dim / (R * GROUPS), own = lane < R ? lane : 0;
    const unsigned unit = blockIdx.x / (unsigned)tiles, tile = blockIdx.x - unit * (unsigned)tiles;
    const i64 row = unit / (unsigned)u.heads, head = unit - row * (unsigned)u.heads;
    const int first = (int)tile * R * GROUPS + threadIdx.x / LANES;
    const i64 slot = u.slot(row), vectors = u.group_at(row, head) + 4 * lane;
    const int mine = first + own * GROUPS;  // the row of the state that this lane looks after
    const i64 at = (row * u.heads + head) * u.dim;
    Own scalars;
    scalars.send(u, at + mine, head * u.dim + mine);
    const float A_own = u.A[head * u.A_head + mine * u.A_dim];
    Four raw[R][STEPS], raw_A[TIED ? 1 : R][STEPS], raw_B[STEPS], raw_C[STEPS];
    const i64 base = (slot * u.heads + head) * u.dim * LENGTH + 4 * lane;
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int place = first + r * GROUPS, step = 4 * LANES * s;
            raw[r][s] = {};
            if (slot >= 0) raw[r][s] = fetch_four(u.state, base + place * LENGTH + step, held_kind);
            if (!TIED) raw_A[TIED ? 0 : r][s] = fetch_four(u.A, head * u.A_head + place * u.A_dim + 4 * lane + step, F32);
        }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        raw_B[s] = fetch_four(u.B, vectors + 4 * LANES * s, u.kind);
        raw_C[s] = fetch_four(u.C, vectors + 4 * LANES * s, u.kind);
    }
    const i64 target = slot < 0 ? -1 : u.target == nullptr ? slot : u.target[row];
    const float dt = scalars.time_step(u), put = dt * scalars.token(u), fade = TIED ? vt_exp(dt * A_own) : 0.0f;
    const int begin = (threadIdx.x & 31) - lane;
    float dts[R], puts[R], fades[R], y[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
        if (!TIED) dts[r] = __shfl_sync(VT_ALL_LANES, dt, begin + r);
        if (TIED) fades[r] = __shfl_sync(VT_ALL_LANES, fade, begin + r);
        puts[r] = __shfl_sync(VT_ALL_LANES, put, begin + r);
    }
    const i64 to = u.fresh != nullptr ? row : target;
    const i64 kept = (to * u.heads + head) * u.dim * LENGTH + 4 * lane;
    void* states = u.fresh != nullptr ? (void*)u.fresh : u.state;
    const int kind = u.fresh != nullptr ? F32 : held_kind;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        float B[4], C[4];
        widen_four(B, raw_B[s], u.kind);
        widen_four(C, raw_C[s], u.kind);
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float S[4], A[4] = {}, fade[4];
            widen_four(S, raw[r][s], held_kind);
            if (!TIED) {
                widen_four(A, raw_A[TIED ? 0 : r][s], F32);
                if (LENGTH == 16) decays(fade, dts[r], A);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                S[j] = vt_fma(B[j], puts[r], S[j] * (TIED ? fades[r] : LENGTH == 16 ? fade[j] : vt_exp(dts[r] * A[j])));
                y[r] = vt_fma(S[j], C[j], y[r]);
            }
            if (target >= 0) store_four(states, kept + (first + r * GROUPS) * LENGTH + 4 * LANES * s, S, kind);
        }
    }
    trees(y, LANES);
    float sum = y[0];
#pragma unroll
    for (int r = 1; r < R; ++r)
        if (lane == r) sum = y[r];
    if (lane < R) store_one(u.out, at + mine, scalars.result(u, sum), u.kind);
}

VT_FN void update_row(const Update& u, i64 rows) {
    const int lane = threadIdx.x & 7;
    const i64 number = (i64)blockIdx.x * (UPDATE_THREADS / STRIP_LANES) + (threadIdx.x >> 3);
    const bool inside = number < rows * u.heads * u.dim;  // the others still take part in the exchanges
    const i64 place = inside ? number : 0, channel = place % (u.heads * u.dim), row = place / (u.heads * u.dim);
    const i64 head = channel / u.dim, slot = u.slot(row), vectors = u.group_at(row, head);
    const i64 target = slot < 0 || !inside ? -1 : u.target == nullptr ? slot : u.target[row];
    const i64 base = (slot * u.heads * u.dim + channel) * u.length;
    const i64 kept = ((u.fresh != nullptr ? row : target) * u.heads * u.dim + channel) * u.length;
    const i64 A_at = head * u.A_head + (channel - head * u.dim) * u.A_dim;
    Own scalars;
    scalars.send(u, place, channel);
    const float dt = scalars.time_step(u), put = dt * scalars.token(u);
    float y = strip_sum(inside ? (int)u.length : 0, u.lanes, [&](int at, float sum) {
        float S = slot < 0 ? 0.0f : load_one(u.state, base + at, u.state_kind);
        S = vt_fma(load_one(u.B, vectors + at, u.kind), put, S * vt_exp(dt * u.A[A_at + at * u.A_step]));
        if (target >= 0) {
            if (u.fresh != nullptr) u.fresh[kept + at] = S;
            else store_one(u.state, kept + at, S, u.state_kind);
        }
        return vt_fma(S, load_one(u.C, vectors + at, u.kind), sum);
    });
    if (inside && lane == 0) store_one(u.out, place, scalars.result(u, y), u.kind);
}

#define UPDATE_PARAMETERS                                                                                         \
    i64 rows, void *state, i64 state_kind, i64 slots, const void *x, const void *dt, i64 kind, const float *A,    \
        i64 A_head, i64 A_dim, i64 A_step, const void *B, const void *C, i64 groups, const float *D,              \
        const void *z, const float *dt_bias, const int *source, const int *target, void *out, float *fresh,       \
        i64 heads, i64 dim, i64 length, i64 softplus, i64 lanes
#define THE_UPDATE                                                                                                \
    Update{state, x, dt, B, C, z, A, D, dt_bias, source, target, out, fresh, heads, dim, length, slots, groups,   \
           A_head, A_dim, A_step, (int)state_kind, (int)kind, (int)softplus, (int)lanes}
#define UPDATE_ROWS(NAME, BLOCKS, LANES, STEPS, R, TIED, STATE)                                                   \
    extern "C" __global__ void __launch_bounds__(UPDATE_THREADS, BLOCKS) NAME(UPDATE_PARAMETERS) {                \
        update_rows<LANES, STEPS, R, TIED, STATE>(THE_UPDATE);                                                    \
    }
extern "C" __global__ void __launch_bounds__(UPDATE_THREADS, 4) update_any(UPDATE_PARAMETERS) {
    update_row(THE_UPDATE, rows);
}
UPDATE_ROWS(update_16, 4, 4, 1, 4, false, BF16)
UPDATE_ROWS(update_16_few, 4, 4, 1, 1, false, BF16)
UPDATE_ROWS(update_128, 4, 8, 4, 2, false, F32)
UPDATE_ROWS(tied, 6, 8, 4, 1, true, F32)
UPDATE_ROWS(tied_narrow, 5, 8, 4, 2, true, BF16)
