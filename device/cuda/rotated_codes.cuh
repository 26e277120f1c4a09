// Vectors times a matrix, in the mirror's order of sums, and what becomes of the sums: MXFP4 or NVFP4.
#pragma once
#include "e2m1_halves.cuh"
#include "e2m1_steps.cuh"
#include "fp4.cuh"
#include "fp8_scales.cuh"
#include "rotation.cuh"

#define BLOCK 32
#define TINY vt_float(0x322bcc77)  // float32(1e-8)
#define ROTATED 4096  // sums of 128 threads by any matrix
#define CHAIN 16      // products of a chain of the mirror's order
#define HALF 4        // of them whose factors wait in registers
#define PITCH 36      // between blocks of 32 sums in shared memory: eight lanes that read four each are in different banks

VT_FN void put_bytes(unsigned char* out, unsigned word) {
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] = (unsigned char)(word >> 8 * j);
}

enum { QUEST = 0, ABS_MAX = 1 };

VT_FN float quest_statistic(float sum, float squares) {
    const float mean = sum / 32.0f, variance = squares / 32.0f - mean * mean;
    const float deviation = variance < 0.0f ? 1.0f : sqrtf(variance);
    return deviation * vt_float(0x3ef96285)  /* float32(2.92247856 / 6) */ + TINY;
}

// The byte of a block's scale out of its 32 sums.
template <int METHOD> VT_FN unsigned mx_scale(const float (&y)[BLOCK]) {
    float statistic;
    if (METHOD == ABS_MAX) {
        float size[4];  // of every fourth: a chain of 32 takes its time
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) size[j & 3] = j < 4 ? vt_abs(y[j]) : larger_or_nan(size[j & 3], vt_abs(y[j]));
        statistic = larger_or_nan(larger_or_nan(size[0], size[1]), larger_or_nan(size[2], size[3])) + TINY;
    } else {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) {
            sum += y[j];
            squares += y[j] * y[j];
        }
        statistic = quest_statistic(sum, squares);
    }
    return (unsigned)vt_bits(statistic) >> 23 & 0xffu;
}

VT_FN void put_words(unsigned char* out, const unsigned* w, int count, bool wide) {
    if (wide && count == 4) *(uint4*)out = {w[0], w[1], w[2], w[3]};
    else if (wide) *(uint2*)out = {w[0], w[1]};
    else
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < count) put_bytes(out + 4 * i, w[i]);
}

// 32 sums as MXFP4, those of element `at` and the next. A product with 3 is at most 6 times the scale, and no scale is
// below 1e-8 / 2.
// QUICK: sums of bfloat16 times the matrix's number seldom are ties; of a power of two many are.
template <int METHOD, bool QUICK> struct ToMx {
    static constexpr int GROUP = BLOCK;
    static constexpr bool BOUNDED = METHOD == ABS_MAX;  // by 7, what codes are made of
    unsigned char *out, *scales;
    bool wide;

    VT_MEMBER void fetch() {}
    VT_MEMBER void begin() {}
    VT_MEMBER void put_run(i64 at, const float (&y)[BLOCK], int) const {
        const unsigned byte = mx_scale<METHOD>(y);
        unsigned w[4];
        scales[at / BLOCK] = (unsigned char)byte;
        if (!quick(w, y, byte)) steps(w, y, byte);
        put_words(out + at / 2, w, 4, wide);
    }
    VT_MEMBER bool quick(unsigned (&w)[4], const float (&y)[BLOCK], unsigned byte) const {
        if constexpr (QUICK && METHOD == ABS_MAX && SUMS_BY_HALVES) {
            if (byte >= 240u) return false;
            const float factor = vt_float((int)((241u - byte) << 23 | 0x400000u));  // 3 2^(113 - byte)
            LastBits last;
#pragma unroll
            for (int i = 0; i < 4; ++i) w[i] = e2m1_of_sums(y, 8 * i, factor, last);
            return !last.zeros();
        }
        return false;
    }
    VT_MEMBER void steps(unsigned (&w)[4], const float (&y)[BLOCK], unsigned byte) const {
        float one = vt_float((int)(byte << 23)), z[BLOCK];
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) z[j] = METHOD == ABS_MAX ? y[j] * 3.0f : y[j];
        if (byte >= 253u) {  // where a product with 3 may be infinite, and a power of two of its own
            one = vt_float((int)(byte - 8u << 23));
#pragma unroll
            for (int j = 0; j < BLOCK; ++j) z[j] = fmaxf(fminf(z[j] * 0x1p-8f, 6.0f * one), -6.0f * one);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = z[8 * i + j];
            w[i] = e2m1_steps<METHOD == ABS_MAX>(v, one);
            if (byte == 255u) w[i] = 0x77777777u;
        }
    }
};

// As NVFP4, in halves of 16 of which the second may be missing.
struct ToNv {
    static constexpr int GROUP = 16;
    static constexpr bool BOUNDED = true;
    unsigned char *out, *scales;
    bool wide;
    const float* global_scale;
    float global = 0.0f, back = 0.0f;

    VT_MEMBER void fetch() { global = global_scale[0]; }
    // Once the first loads are under way.
    VT_MEMBER void begin() {
        fetch();
        back = global == 0.0f ? 0.0f : 1.0f / global;
    }
    template <int FIRST, bool KEEP, int N> VT_MEMBER unsigned scale(const float (&y)[N]) const {
        float size[2] = {};
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float one = vt_abs(y[FIRST + j]);
            size[j & 1] = KEEP ? larger_or_nan(size[j & 1], one) : fmaxf(size[j & 1], one);
        }
        const float top = KEEP ? larger_or_nan(size[0], size[1]) : fmaxf(size[0], size[1]);
        return e4m3_code(global * (top * vt_float(0x3e2aaaab)));
    }
    template <int FIRST, int N> VT_MEMBER void sixteen(unsigned* w, i64 at, const float (&y)[N]) const {
        unsigned code = scale<FIRST, true>(y);
        if (!quick<FIRST>(w, y, code)) code = steps<FIRST>(w, y);
        scales[at / 16] = (unsigned char)code;
    }
    template <int FIRST, int N> VT_MEMBER bool quick(unsigned* w, const float (&y)[N], unsigned code) const {
        if constexpr (SUMS_BY_HALVES) {
            const float step = normal_e4m3(code) * back;
            if (!is_middling(step, normal_e4m3(code))) return false;
            const float factor = middling_reciprocal(step) * TO_HALVES;
            LastBits last;
#pragma unroll
            for (int i = 0; i < 2; ++i) w[i] = e2m1_of_sums(y, FIRST + 8 * i, factor, last);
            return !last.zeros();
        }
        return false;
    }
    template <int FIRST, int N> VT_MEMBER unsigned steps(unsigned* w, const float (&y)[N]) const {
        const unsigned code = scale<FIRST, false>(y);
        const float step = e4m3_value(code) * back, factor = step == 0.0f ? 0.0f : 1.0f / step;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = a_number(y[FIRST + 8 * i + j] * factor);
            w[i] = e2m1_steps<false>(v, 1.0f);
        }
        return code;
    }
    template <int N> VT_MEMBER void put_run(i64 at, const float (&y)[N], int left) const {
        unsigned w[4];
        sixteen<0>(w, at, y);
        if constexpr (N > 16)
            if (left > 16) sixteen<16>(w + 2, at + 16, y);
        put_words(out + at / 2, w, N > 16 && left > 16 ? 4 : 2, wide);
    }
};

// ROTATED elements of x from `base` on, contiguous, as vectors of R: each times h, whatever it holds. Thread (q, g) has
// columns 4 q ... 4 q + 3 of vectors g, g + groups, and so on: a warp's vectors are neighbours, whose starts are in
// different banks.
template <int R, int ABREAST = 4, class TO>
VT_FN void rotate_by_any(uint4* words, i64 base, i64 count, const unsigned short* x, const uint2* h, i64 aligned, const TO& to) {
    constexpr int QUADS = R / 4, GROUPS = 128 / QUADS, STEP = R + 4, VECTORS = ROTATED / R, OWN = VECTORS / GROUPS;
    constexpr int SOME = R == 16 ? 2 : ABREAST;  // vectors whose chains a thread has under way: more need more registers
    const int left = count - base < ROTATED ? count > base ? (int)(count - base) : 0 : ROTATED;
    const int thread = (int)threadIdx.x & 127;
    for (int n = thread; n < ROTATED / 8; n += 128) {
        float v[8] = {};
        if (n * 8 < left) {
            if (aligned) load(v, x, base + n * 8, BF16);
            else
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = widen_bf16(x[base + n * 8 + j]);
        }
        put(words, n * 8 / R * STEP + n * 8 % R, narrow(v, F32), F32);
    }
    __syncthreads();
    int quad = thread % QUADS, group = thread / QUADS;
    float total[OWN][4] = {};
#pragma unroll
    for (int some = 0; some < OWN; some += SOME) {
        float sum[SOME][4];
#pragma unroll 1
        for (int k = 0; k < R; k += HALF) {
            if (k % CHAIN == 0)
#pragma unroll
                for (int m = 0; m < SOME; ++m)
#pragma unroll
                    for (int c = 0; c < 4; ++c) sum[m][c] = 0.0f;
            float by[HALF][4];
#pragma unroll
            for (int i = 0; i < HALF; ++i) {
                const uint2 four = h[(k + i) * QUADS + quad];
                by[i][0] = widen_bf16(four.x & 0xffffu), by[i][1] = widen_bf16(four.x >> 16);
                by[i][2] = widen_bf16(four.y & 0xffffu), by[i][3] = widen_bf16(four.y >> 16);
            }
#pragma unroll
            for (int m = 0; m < SOME; ++m) {
                const uint4* row = words + (((some + m) * GROUPS + group) * STEP + k) / 4;
#pragma unroll
                for (int i = 0; i < HALF; i += 4) {
                    float four[4];
                    four_floats(four, 0, row[i / 4]);
#pragma unroll
                    for (int j = 0; j < 4; ++j)
#pragma unroll
                        for (int c = 0; c < 4; ++c) sum[m][c] = vt_fma(four[j], by[i + j][c], sum[m][c]);
                }
                if (k % CHAIN + HALF == CHAIN)
#pragma unroll
                    for (int c = 0; c < 4; ++c) total[some + m][c] += sum[m][c];
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
        int at = (m * GROUPS + group) * R + 4 * quad;
        words[((at >> 5) * PITCH + (at & 31)) / 4] = four_bits(total[m], 0);
    }
    __syncthreads();
    if (thread * 32 < left) {
        float y[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK / 4; ++i) four_floats(y, 4 * i, words[thread * (PITCH / 4) + i]);
        to.put_run(base + thread * 32, y, left - thread * 32);
    }
    __syncthreads();
}

#define RESIDENT 5  // blocks of a multiprocessor, device/mxfp4.py

// Runs of 32 elements of all of x (16, where R is), 32 of them a warp at a time, one a lane; `blocks`: of the grid.
template <int R, class TO>
VT_FN void rotate(i64 count, const unsigned short* x, const uint2* h, i64 aligned, i64 blocks, TO to) {
    constexpr int HELD = R == 16 ? 16 : 32, P = HELD / 8, STEP = R + 4, SEEN = R > 32 ? 32 * 9 : 0;
    constexpr int ANY = (ROTATED / R * STEP > 128 * PITCH ? ROTATED / R * STEP : 128 * PITCH) / 4;
    constexpr int OWN = R == 16 ? 0 : 32 * P + SEEN;  // of a warp
    __shared__ uint4 memory[4 * OWN > ANY ? 4 * OWN : ANY];
    __shared__ unsigned votes[4];
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    const uint4* pieces = (const uint4*)x;
    const i64 runs = count / HELD, next = blocks * 128;
    uint4 *mine = memory + warp * OWN, *between = mine + 32 * P, low = {}, high = {};
    i64 first = ((i64)blockIdx.x * 4 + warp) * 32;
    // Runs on their way while others are made codes of: into shared memory, so that loads are of neighbours, or two pieces
    // into registers.
    auto send = [&](i64 from) {
        if constexpr (R == 16) {
            if (from + lane < runs) low = pieces[(from + lane) * 2], high = pieces[(from + lane) * 2 + 1];
        } else if (from < runs) {
            send_for_runs<HELD>(mine, pieces + from * P, runs - from);
        }
    };
    const bool whole = aligned && to.wide;
    if (whole) send(first);
    const bool known = whole && is_sylvester<R>((const uint4*)h, votes);
    to.begin();
    if (!known) {
        if constexpr (R > 16) copies_arrive();
        __syncthreads();
        for (i64 base = (i64)blockIdx.x * ROTATED; base < count; base += blocks * ROTATED)
            rotate_by_any<R>(memory, base, count, x, h, aligned, to);
        return;
    }
    const float c = widen_bf16(h[0].x & 0xffffu);
    for (; first < runs; first += next) {
        float y[HELD];
        if constexpr (R == 16) {
            chain_of_pieces(y, low, high, c);
        } else {
            copies_arrive();
            warp_meets();
#pragma unroll
            for (int b = 0; b < 2; ++b)
                chain_of_pieces(y + 16 * b, mine[place_of_piece<P>(lane * P + 2 * b)],
                                mine[place_of_piece<P>(lane * P + 2 * b + 1)], c);
            warp_meets();
        }
        send(first + next);
        if constexpr (R > 16) join_lanes<R>(y, between);
        if (first + lane < runs) to.put_run((first + lane) * HELD, y, HELD);
    }
}
