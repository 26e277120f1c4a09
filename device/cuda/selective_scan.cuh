// Mamba's selective scan: S = exp(dt A) S + dt u B^T, y = (S C + D u) silu(z), along the tokens of each sequence.
//
// The ladder:
// 1. scan_any: eight lanes a channel (strips.cuh), its state in shared memory, any length of it.
// 2. scan_16: states of 16, four lanes a channel with four elements each in registers, 32 channels a block. Tokens come in
//    tiles of 32: what each token has but one of (dt through softplus, dt u, silu(z)) is made by all threads for the
//    whole tile, and the next tile is under way meanwhile. Exponentials, the bulk of the work, have nothing to do with
//    the state and run four tokens ahead of it; where dt A is far from the ends of float32's exponents, which a thread
//    sees by its largest A, the last steps of vt_exp are one addition to the exponent.
#pragma once
#include "strips.cuh"

#define SCAN_TOKENS 32     // of a tile
#define SCAN_CHANNELS 32   // of a block
#define SCAN_PITCH (SCAN_TOKENS + 4)
#define SCAN_STATE 16
#define SCAN_THREADS 128   // device/selective_scan.py

struct Scan {
    void* state;
    const void *u, *delta, *B, *C, *z;
    const float *A, *D, *bias;
    const int *starts, *slots;
    const void* flags;
    void* out;
    i64 dim, tokens, length, groups, rows_of_state;
    int state_kind, kind, flag_size, softplus, lanes;

    // Where the sequence's state lies, -1 for none: null, or one that does not exist.
    VT_MEMBER i64 slot(i64 n) const {
        const i64 found = slots == nullptr ? n : slots[n];
        return found < rows_of_state ? found : -1;
    }
    VT_MEMBER bool begun(i64 n) const {
        if (flags == nullptr) return true;
        return flag_size == 1 ? ((const signed char*)flags)[n] != 0 : ((const int*)flags)[n] != 0;
    }
    VT_MEMBER i64 begin(i64 n) const { return starts[n] < 0 ? 0 : starts[n]; }
    VT_MEMBER i64 end(i64 n) const { return starts[n + 1] < tokens ? starts[n + 1] : tokens; }

    VT_MEMBER float time_step(float x, float own_bias) const {
        if (bias != nullptr) x += own_bias;
        return softplus ? vt_softplus(x) : x;
    }
    VT_MEMBER float result(float y, float x, float own_D, float gate) const {
        if (D != nullptr) y = vt_fma(x, own_D, y);
        return z == nullptr ? y : y * vt_silu(gate);
    }
};

#define SCAN_PARAMETERS                                                                                          \
    i64 channels_a_block, void *state, i64 state_kind, i64 rows_of_state, const void *u, const void *delta, i64 kind, \
        const float *A, const void *B, const void *C, i64 groups, const float *D, const void *z,                 \
        const float *bias, const int *starts, const int *slots, const void *flags, i64 flag_size, void *out,     \
        i64 dim, i64 tokens, i64 length, i64 softplus, i64 lanes
#define SCAN_NAMES                                                                                               \
    state, u, delta, B, C, z, A, D, bias, starts, slots, flags, out, dim, tokens, length, groups, rows_of_state, \
        (int)state_kind, (int)kind, (int)flag_size, (int)softplus, (int)lanes

extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 6) scan_any(SCAN_PARAMETERS) {
    VT_SHARED(shared);
    const Scan s = {SCAN_NAMES};
    const i64 tiles = (dim + channels_a_block - 1) / channels_a_block, n = blockIdx.x / tiles;
    const int row = threadIdx.x / STRIP_LANES, lane = threadIdx.x & (STRIP_LANES - 1);
    i64 channel = blockIdx.x % tiles * channels_a_block + row;
    const bool own = channel < dim;  // the others follow, for shuffles' sake
    if (!own) channel = dim - 1;
    const i64 slot = s.slot(n), begin = s.begin(n), end = s.end(n), group = channel / (dim / groups);
    const float own_bias = bias == nullptr ? 0.0f : bias[channel], own_D = D == nullptr ? 0.0f : D[channel];
    float* S = (float*)shared + row * length;
    const i64 kept = (slot * dim + channel) * length;
    // A lane's elements of the state are its own: nobody waits for anybody.
    const auto elements = [&](auto&& f) {
        for (i64 turn = 4 * lane; turn < length; turn += STRIP_TURN)
            for (i64 i = turn; i < turn + 4 && i < length; ++i) f(i);
    };
    elements([&](i64 i) { S[i] = slot >= 0 && s.begun(n) ? load_one(state, kept + i, s.state_kind) : 0.0f; });
    for (i64 t = begin; t < end; ++t) {
        const i64 at = channel * tokens + t;
        float y = 0.0f;
        if (slot >= 0) {
            const float x = load_one(u, at, s.kind), gate = z == nullptr ? 0.0f : load_one(z, at, s.kind);
            const float dt = s.time_step(load_one(delta, at, s.kind), own_bias), put = dt * x;
            y = s.result(strip_sum((int)length, s.lanes, [&](int i, float partial) {
                const i64 of_group = (group * length + i) * tokens + t;
                S[i] = vt_fma(load_one(B, of_group, s.kind), put, S[i] * vt_exp(dt * A[channel * length + i]));
                return vt_fma(S[i], load_one(C, of_group, s.kind), partial);
            }), x, own_D, gate);
        }
        if (own && lane == 0) store_one(out, at, y, s.kind);
    }
    if (own && slot >= 0 && begin < end) elements([&](i64 i) { store_one(state, kept + i, S[i], s.state_kind); });
}

// vt_exp of N numbers, step by step for all of them, so that they hide each other's latency; |x| < 86, where no result is
// a subnormal number: the two last factors of vt_scale are exact, and so is their product. vt_exp_parts' sum with a low
// part of 0 is left out, which moves at most the sign of a zero that is added to more.
template <int N> VT_FN void near_exps(float (&x)[N]) {
    const float c[] = {0.49999994f, 0.16666521f, 0.04166827f, 0.008368679f, 0.0013820437f};
    float t[N], low[N], square[N], one[N];
#pragma unroll
    for (int i = 0; i < N; ++i) t[i] = vt_fma(x[i], 1.442695f, VT_MAGIC);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float n = t[i] - VT_MAGIC, whole = vt_fma(n, -VT_LN2_HI, x[i]);
        x[i] = vt_fma(n, -VT_LN2_LO, whole);
        low[i] = vt_fma(n, -VT_LN2_LO, whole - x[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) square[i] = vt_fma(c[4], x[i], c[3]);
#pragma unroll
    for (int k = 2; k >= 0; --k)
#pragma unroll
        for (int i = 0; i < N; ++i) square[i] = vt_fma(square[i], x[i], c[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        square[i] = (x[i] * x[i]) * square[i];
        one[i] = 1.0f + x[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float p = one[i] + square[i];
        float rest = (x[i] - (one[i] - 1.0f)) + (square[i] - (p - one[i]));
        float y = p + vt_fma(low[i], p, rest);
        x[i] = vt_float((int)((unsigned)vt_bits(y) + ((unsigned)vt_bits(t[i]) << 23)));
    }
}

// What a thread brings of a tile: a channel's token each time, and elements of B and C.
struct ScanTile {
    static constexpr int EACH = SCAN_CHANNELS * SCAN_TOKENS / SCAN_THREADS, OF_B = SCAN_STATE * SCAN_TOKENS / SCAN_THREADS;
    Raw<1> u[EACH], delta[EACH], B[OF_B], C[OF_B];

    VT_MEMBER void send(const Scan& s, i64 channel, i64 group, i64 first, i64 end) {
        const int thread = threadIdx.x;
        i64 t = first + thread % SCAN_TOKENS;
        if (t >= end) t = end - 1;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i64 at = (channel + i * (SCAN_THREADS / SCAN_TOKENS) + thread / SCAN_TOKENS) * s.tokens + t;
            u[i] = fetch<1>(s.u, at, s.kind);
            delta[i] = fetch<1>(s.delta, at, s.kind);
        }
#pragma unroll
        for (int i = 0; i < OF_B; ++i) {
            const i64 at = (group * SCAN_STATE + i * (SCAN_THREADS / SCAN_TOKENS) + thread / SCAN_TOKENS) * s.tokens + t;
            B[i] = fetch<1>(s.B, at, s.kind);
            C[i] = fetch<1>(s.C, at, s.kind);
        }
    }
};

// Four tokens: the state after them, and a lane's part of each S C.
VT_FN void scan_four(float (&S)[4], float (&y)[4], const float (&A)[4], const float (&dt)[4], const float (&put)[4],
                     const float* B, const float* C, bool near_zero) {
    float fade[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) fade[i] = dt[i / 4] * A[i % 4];
    if (near_zero) {
        near_exps(fade);
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) fade[i] = vt_exp(fade[i]);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        float b[4], c[4];
        widen_four(b, fetch_four(B, t * SCAN_STATE, F32), F32);
        widen_four(c, fetch_four(C, t * SCAN_STATE, F32), F32);
        y[t] = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            S[i] = vt_fma(b[i], put[t], S[i] * fade[4 * t + i]);
            y[t] = vt_fma(S[i], c[i], y[t]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(SCAN_THREADS, 2) scan_16(SCAN_PARAMETERS) {
    constexpr int OF_TOKENS = SCAN_CHANNELS * SCAN_PITCH, OF_STATE = SCAN_TOKENS * SCAN_STATE;
    __shared__ uint4 memory[(3 * OF_TOKENS + 2 * OF_STATE) / 4];
    float *dts = (float*)memory, *puts = dts + OF_TOKENS, *ys = puts + OF_TOKENS, *Bs = ys + OF_TOKENS, *Cs = Bs + OF_STATE;
    const Scan s = {SCAN_NAMES};
    const i64 tiles = dim / SCAN_CHANNELS, n = blockIdx.x / tiles, first_channel = blockIdx.x % tiles * SCAN_CHANNELS;
    const i64 slot = s.slot(n), begin = s.begin(n), end = s.end(n), group = first_channel / (dim / groups);
    const int thread = threadIdx.x, row = thread >> 2, lane = thread & 3;
    const int token = thread % SCAN_TOKENS, part = thread / SCAN_TOKENS;
    constexpr int PARTS = SCAN_THREADS / SCAN_TOKENS;
    if (begin >= end) return;
    if (slot < 0) {
        for (i64 t = begin + token; t < end; t += SCAN_TOKENS)
            for (int c = part; c < SCAN_CHANNELS; c += PARTS) store_one(out, (first_channel + c) * tokens + t, 0.0f, s.kind);
        return;
    }
    const i64 channel = first_channel + row, kept = (slot * dim + channel) * SCAN_STATE + 4 * lane;
    float S[4], A4[4], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        S[i] = s.begun(n) ? load_one(state, kept + i, s.state_kind) : 0.0f;
        A4[i] = A[channel * SCAN_STATE + 4 * lane + i];
        largest = vt_maximum(largest, vt_abs(A4[i]));
    }
    float biases[ScanTile::EACH], Ds[ScanTile::EACH];
#pragma unroll
    for (int i = 0; i < ScanTile::EACH; ++i) {
        const i64 of = first_channel + i * PARTS + part;
        biases[i] = bias == nullptr ? 0.0f : bias[of];
        Ds[i] = D == nullptr ? 0.0f : D[of];
    }
    ScanTile tile;
    tile.send(s, first_channel, group, begin, end);
    for (i64 first = begin; first < end; first += SCAN_TOKENS) {
#pragma unroll
        for (int i = 0; i < ScanTile::EACH; ++i) {
            const int c = i * PARTS + part;
            float x[1], dt[1];
            widen(dt, tile.delta[i], s.kind);
            widen(x, tile.u[i], s.kind);
            dt[0] = s.time_step(dt[0], biases[i]);
            dts[c * SCAN_PITCH + token] = dt[0];
            puts[c * SCAN_PITCH + token] = dt[0] * x[0];
        }
#pragma unroll
        for (int i = 0; i < ScanTile::OF_B; ++i) {
            float x[1];
            widen(x, tile.B[i], s.kind);
            Bs[token * SCAN_STATE + i * PARTS + part] = x[0];
            widen(x, tile.C[i], s.kind);
            Cs[token * SCAN_STATE + i * PARTS + part] = x[0];
        }
        __syncthreads();
        const int count = end - first < SCAN_TOKENS ? (int)(end - first) : SCAN_TOKENS;
        // What the results are made with is asked for now, all of it: loads do not pass the stores of results.
        Raw<1> x[ScanTile::EACH], gates[ScanTile::EACH];
        const i64 mine = (first_channel + part) * tokens + first + (token < count ? token : 0);
#pragma unroll
        for (int i = 0; i < ScanTile::EACH; ++i) {
            x[i] = gates[i] = tile.u[i];
            if (z != nullptr) gates[i] = fetch<1>(z, mine + i * PARTS * tokens, s.kind);
        }
        if (first + SCAN_TOKENS < end) tile.send(s, first_channel, group, first + SCAN_TOKENS, end);
        float before[4];
        for (int t = 0; t < count; t += 4) {
            float dt[4], put[4], y[4];
            widen_four(dt, fetch_four(dts, row * SCAN_PITCH + t, F32), F32);
            widen_four(put, fetch_four(puts, row * SCAN_PITCH + t, F32), F32);
            float longest = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) longest = vt_maximum(longest, vt_abs(dt[i]));
            if (t + 4 > count) {  // the last tokens one by one: what comes after them must not touch the state
#pragma unroll
                for (int i = 0; i < 4; ++i) before[i] = S[i];
            }
            const float *B4 = Bs + t * SCAN_STATE + 4 * lane, *C4 = Cs + t * SCAN_STATE + 4 * lane;
            scan_four(S, y, A4, dt, put, B4, C4, longest * largest < 86.0f);
            if (t + 4 > count) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    if (t + k >= count) break;
                    float b[4];
                    widen_four(b, fetch_four(B4, k * SCAN_STATE, F32), F32);
#pragma unroll
                    for (int i = 0; i < 4; ++i) before[i] = vt_fma(b[i], put[k], before[i] * vt_exp(dt[k] * A4[i]));
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) S[i] = before[i];
            }
            // (p0 + p2) + (p1 + p3) over the lanes; lane l ends with token l's.
            float half[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool upper = lane & 2;
                half[i] = (upper ? y[2 + i] : y[i]) + other_lane(upper ? y[i] : y[2 + i], 2);
            }
            const bool odd = lane & 1;
            ys[row * SCAN_PITCH + t + lane] = (odd ? half[1] : half[0]) + other_lane(odd ? half[0] : half[1], 1);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ScanTile::EACH; ++i) {
            float own[1], gate[1];
            widen(own, x[i], s.kind);
            widen(gate, gates[i], s.kind);
            const float y = s.result(ys[(i * PARTS + part) * SCAN_PITCH + token], own[0], Ds[i], gate[0]);
            if (token < count) store_one(out, mine + i * PARTS * tokens, y, s.kind);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) store_one(state, kept + i, S[i], s.state_kind);
}
