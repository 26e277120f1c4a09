// MXFP4, e2m1 codes under a power of two for each block of 32, and the rotations before a quantiser: Hadamard matrices,
// the fast transform, products of short vectors with a matrix that end in MXFP4 or NVFP4.
//
// The ladder of the quantiser:
// 1. mx_v8: four lanes a block; 16-byte loads and four-byte stores where the addresses allow them.
// 2. mx_bf16_deep: four vectors of bfloat16 under way a thread, maxima taken of pairs as they lie in memory; each of a
//    block's four lanes finds the exponent of one of four blocks.
// That of the transform:
// 1. transform_few: a thread a row.
// 2. transform_32, for float32: 32 elements a thread, so that five levels need no other thread, and up to three rounds of
//    those, with shared memory between them: 17, 86 and 127 us for 8192 x 1024, 8192 x 4096 and 1024 x 32768 of bfloat16.
// 3. transform.cuh: rows of 2-byte elements come by cp.async while others are summed up, and leave as 16-byte stores; up to
//    512 elements in the lanes of a warp: 7.9, 37 and 48 us.
// That of the rotation:
// 1. rotate_by_any: a thread owns 4 x 4 sums; the matrix's part of a chain is in its registers, rows come from shared memory
//    four elements at a time, each for four products. The sums' order is the mirror's, so that tensor cores, which have one
//    of their own, are no help, and the products, not the bytes, take the time: 98 us for 8192 x 4096 by 32, 270 by 128.
// 2. rotation.cuh: where the matrix is Sylvester's, which each block looks up, columns share what their sums have in
//    common: 171 multiply-adds of a chain of 16 for its 16 columns, whatever the size of the matrix, in place of 256 a
//    column and more. What takes the time are instructions, some 27 an element, a third of them for the code.
#include "e2m1_steps.cuh"
#include "fp4.cuh"
#include "fp8_scales.cuh"
#include "once.cuh"
#include "rotation.cuh"
#include "transform.cuh"

#define DEPTH 4  // vectors a thread of mx_bf16_deep, device/mxfp4.py
#define BLOCK 32
#define TINY vt_float(0x322bcc77)  // float32(1e-8)

// The exponent's byte of a block that is `top` large, at most 253: from 1.75 times a power of two on the next one.
VT_FN unsigned mx_exponent(unsigned top) {
    int byte = (int)((top + 0x200000u) >> 23) - 2;
    return byte < 0 ? 0u : (unsigned)byte;
}

// 2^(127 - byte), for a byte below 254.
VT_FN float mx_factor(unsigned byte) { return vt_float((int)((254u - byte) << 23)); }

VT_FN unsigned mx_word(float (&v)[8], float factor, bool native) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= factor;
    return native ? e2m1_word<true>(v) : e2m1_word<false>(v);
}

VT_FN void put_bytes(unsigned char* out, unsigned word) {
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] = (unsigned char)(word >> 8 * j);
}

#define MX_PARAMETERS                                                                                                  \
    i64 count, const void *x, i64 kind, unsigned char *out, unsigned char *scales, i64 native

// per_row: vectors of a row; aligned: x may be read 16 bytes at a time, words: codes written four at a time.
extern "C" __global__ void __launch_bounds__(256) mx_v8(MX_PARAMETERS, i64 per_row, i64 stride, i64 aligned, i64 words) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    bool inside = at < count;
    float v[8];
    unsigned top = 0;
    if (inside) {
        i64 from = at * 8;
        if (stride != per_row * 8) from += at / per_row * (stride - per_row * 8);
        if (aligned) load(v, x, from, (int)kind);
        else
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float one[1];
                load(one, x, from + j, (int)kind);
                v[j] = one[0];
            }
        top = largest_of(v, false);
    }
    unsigned byte = mx_exponent(largest_of_lanes(top, 4));
    if (!inside) return;
    unsigned word = mx_word(v, mx_factor(byte), native != 0);
    if (words) ((unsigned*)out)[at] = word;
    else put_bytes(out + at * 4, word);
    if ((at & 3) == 0) scales[at >> 2] = (unsigned char)byte;
}

// Contiguous bfloat16, no code of -0.
extern "C" __global__ void __launch_bounds__(256) mx_bf16_deep(MX_PARAMETERS) {
    unsigned first = blockIdx.x * (256 * DEPTH) + threadIdx.x;
    int left = first < (unsigned)count ? (int)((unsigned)count - first) : 0;  // this one is inside where d * 256 < left
    const uint4* vectors = (const uint4*)x + first;
    unsigned* words = (unsigned*)out + first;
    uint4 raw[DEPTH];
    unsigned tops[DEPTH], pairs[DEPTH / 2];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (d * 256 < left) raw[d] = load_once(vectors + d * 256);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) tops[d] = d * 256 < left ? largest_pair<false>(raw[d]) : 0u;
#pragma unroll
    for (int p = 0; p < DEPTH / 2; ++p) {
        unsigned a = tops[2 * p], b = tops[2 * p + 1];
        pairs[p] = larger_pair<false>((a & 0xffffu) | b << 16, a >> 16 | (b & 0xffff0000u));
        pairs[p] = larger_pair<false>(pairs[p], __shfl_xor_sync(FULL_WARP, pairs[p], 2));
        pairs[p] = larger_pair<false>(pairs[p], __shfl_xor_sync(FULL_WARP, pairs[p], 1));
    }
    int own = threadIdx.x & 3;
    unsigned pair = own & 2 ? pairs[1] : pairs[0], byte = mx_exponent(own & 1 ? pair & 0xffff0000u : pair << 16);
    if (own * 256 < left) scales[(first + own * 256) >> 2] = (unsigned char)byte;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        unsigned found = __shfl_xor_sync(FULL_WARP, byte, own ^ d);
        if (d * 256 >= left) continue;
        float v[8];
        widen(v, Raw<8>{raw[d], raw[d]}, BF16);
        words[d * 256] = mx_word(v, mx_factor(found), false);
    }
}

// Sylvester's matrix of 1 << log2n columns, eight elements a thread (fewer where a row has fewer); unit: the bits of
// n^-0.5 in bfloat16; wide: 16-byte stores.
extern "C" __global__ void __launch_bounds__(256) hadamard_matrix(i64 log2n, i64 count, i64 unit, unsigned short* out,
                                                                  i64 wide) {
    i64 first = ((i64)blockIdx.x * 256 + threadIdx.x) * 8;
    if (first >= count) return;
    if (!wide) {
        for (i64 at = first; at < first + 8 && at < count; ++at) {
            unsigned row = (unsigned)(at >> log2n), column = (unsigned)(at & ((1ll << log2n) - 1));
            out[at] = (unsigned short)((unsigned)unit | parity_of(row & column) << 15);
        }
        return;
    }
    unsigned row = (unsigned)(first >> log2n), column = (unsigned)(first & ((1ll << log2n) - 1));
    *(uint4*)(out + first) = sylvester_word(row, column, (unsigned)unit);
}

// Rows of 1 to 16 elements, one a thread.
extern "C" __global__ void __launch_bounds__(256) transform_few(i64 rows, i64 width, const void* x, i64 kind, void* out,
                                                                float factor) {
    i64 row = (i64)blockIdx.x * 256 + threadIdx.x;
    if (row >= rows) return;
    float v[16], one[1];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        v[j] = 0.0f;
        if (j < width) {
            load(one, x, row * width + j, (int)kind);
            v[j] = one[0];
        }
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
        if (step < width)
#pragma unroll
            for (int j = 0; j < 16; ++j)
                if (!(j & step)) {
                    float low = v[j], high = v[j + step];
                    v[j] = low + high;
                    v[j + step] = low - high;
                }
#pragma unroll
    for (int j = 0; j < 16; ++j)
        if (j < width) {
            one[0] = v[j] * factor;
            store(out, row * width + j, one, (int)kind);
        }
}

// `levels` of butterflies over neighbours 1, 2, 4 ... of v.
VT_FN void butterflies(float (&v)[32], int levels) {
#pragma unroll
    for (int level = 0; level < 5; ++level)
        if (level < levels)
#pragma unroll
            for (int j = 0; j < 32; ++j)
                if (!(j >> level & 1)) {
                    float low = v[j], high = v[j + (1 << level)];
                    v[j] = low + high;
                    v[j + (1 << level)] = low - high;
                }
}

// Element q of a thread that holds `levels` levels of a row: neighbours of those levels are `step` apart, and parts that
// know nothing of each other `part`.
VT_FN int apart(int q, int levels, int step, int part) { return (q & ((1 << levels) - 1)) * step + (q >> levels) * part; }

// Rows of 1 << log2n >= 32 elements, of 32 each that a thread takes at a time, in as many rounds of up to five levels as
// they have. Between rounds element n of a row is at n + n / 32 in shared memory, where a warp's are in different banks.
VT_FN void transform(i64 rows, int log2n, int threads, const void* x, int kind, void* out, float factor, float* memory) {
    int size = 1 << log2n, pieces = size >> 5, within = (int)threadIdx.x / threads;
    int first = (int)threadIdx.x - within * threads;
    i64 row = (i64)blockIdx.x * ((int)blockDim.x / threads) + within;
    float* values = memory + within * (33 * pieces);
    bool inside = row < rows;
    for (int from = 0; from < log2n; from += 5) {
        int levels = log2n - from < 5 ? log2n - from : 5, below = (1 << from) - 1;
        bool last = from + 5 >= log2n;
        int step = from ? 33 << (from - 5) : 1, part = pieces < 32 ? pieces : (pieces >> 5) * 33;
#pragma unroll 1
        for (int t = first; t < pieces; t += threads) {
            float v[32];
            int start = (t & ~below) << levels | (t & below);
            float* at = values + start + (start >> 5);
            i64 there = row * size + start;
            if (from) {
#pragma unroll
                for (int q = 0; q < 32; ++q) v[q] = at[apart(q, levels, step, part)];
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float eight[8] = {};
                    if (inside) load(eight, x, there + 8 * i, kind);
#pragma unroll
                    for (int j = 0; j < 8; ++j) v[8 * i + j] = eight[j];
                }
            }
            butterflies(v, levels);
            if (!last) {
#pragma unroll
                for (int q = 0; q < 32; ++q) at[apart(q, levels, step, part)] = v[q];
            } else if (inside) {
#pragma unroll
                for (int q = 0; q < 32; ++q) {
                    const float one[1] = {v[q] * factor};
                    store(out, there + apart(q, levels, 1 << from, pieces), one, kind);
                }
            }
        }
        if (!last) __syncthreads();
    }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define TOGETHER 3  // blocks of a multiprocessor: so few registers suffice there, elsewhere they spill
#else
#define TOGETHER 1
#endif

#define TRANSFORM(NAME, ASSUMED)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256, TOGETHER) NAME(i64 rows, i64 log2n, i64 threads, const void* x,  \
                                                                     i64 kind, void* out, float factor) {              \
        VT_SHARED(memory);                                                                                             \
        VT_ASSUME(ASSUMED);                                                                                            \
        transform(rows, (int)log2n, (int)threads, x, (int)kind, out, factor, (float*)memory);                          \
    }
TRANSFORM(transform_32, (int)kind == F32)

// Blocks of a multiprocessor, device/mxfp4.py.
#define RESIDENT_ROWS(LOG, PART) ((LOG) < 12 ? 8 : (PART) == 5 ? 6 : (LOG) < 14 ? 4 : (LOG) == 14 ? 2 : 1)
#define TRANSFORM_ROWS(LOG, PART, NAME, KIND)                                                                          \
    extern "C" __global__ void __launch_bounds__(Transform<LOG, PART, KIND>::THREADS, RESIDENT_ROWS(LOG, PART))        \
        transform_##NAME##_##LOG(i64 rows, i64 blocks, const uint4* x, uint4* out, float factor, i64 little) {         \
        VT_SHARED(memory);                                                                                             \
        Transform<LOG, PART, KIND>::run(rows, blocks, x, out, factor, little != 0, memory);                            \
    }
#define TRANSFORMS_ROWS(LOG, PART)                                                                                     \
    TRANSFORM_ROWS(LOG, PART, bf16, BF16)                                                                              \
    TRANSFORM_ROWS(LOG, PART, f16, F16)
TRANSFORMS_ROWS(10, 5)
TRANSFORMS_ROWS(11, 5)
TRANSFORMS_ROWS(12, 5)
TRANSFORMS_ROWS(13, 6)
TRANSFORMS_ROWS(14, 6)
TRANSFORMS_ROWS(15, 6)

#define TRANSFORM_LANES(NAME, KIND)                                                                                    \
    extern "C" __global__ void __launch_bounds__(128, 8) transform_##NAME##_lanes(                                     \
        i64 count, i64 log2n, i64 blocks, const uint4* x, uint4* out, float factor) {                                  \
        __shared__ uint4 memory[512];                                                                                  \
        transform_in_lanes<KIND>(count, (int)log2n, blocks, x, out, factor, memory);                                   \
    }
TRANSFORM_LANES(bf16, BF16)
TRANSFORM_LANES(f16, F16)

#define ROTATED 2048  // sums of 128 threads by any matrix
#define CHAIN 16      // products of a chain of the mirror's order
#define HALF 4        // of them whose factors wait in registers
#define PITCH 36      // between blocks of 32 sums in shared memory: eight lanes that read four each are in different banks

enum { QUEST = 0, ABS_MAX = 1 };

// The byte of a block's scale out of its 32 sums.
template <int METHOD> VT_FN unsigned mx_scale(const float (&y)[BLOCK]) {
    float statistic;
    if (METHOD == ABS_MAX) {
        unsigned top = 0;
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) top = larger(top, (unsigned)vt_bits(y[j]) & 0x7fffffffu);
        statistic = vt_float((int)top) + TINY;
    } else {
        float sum = 0.0f, squares = 0.0f;
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) {
            sum += y[j];
            squares += y[j] * y[j];
        }
        float mean = sum / 32.0f, variance = squares / 32.0f - mean * mean;
        float deviation = variance < 0.0f ? 1.0f : sqrtf(variance);
        statistic = deviation * vt_float(0x3ef96285)  /* float32(2.92247856 / 6) */ + TINY;
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
template <int METHOD> struct ToMx {
    unsigned char *out, *scales;
    bool wide;

    VT_MEMBER void put_run(i64 at, const float (&y)[BLOCK], int) const {
        const unsigned byte = mx_scale<METHOD>(y);
        float one = vt_float((int)(byte << 23)), z[BLOCK];
        unsigned w[4];
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
        scales[at / BLOCK] = (unsigned char)byte;
        put_words(out + at / 2, w, 4, wide);
    }
};

// As NVFP4, in halves of 16 of which the second may be missing.
struct ToNv {
    unsigned char *out, *scales;
    bool wide;
    float global, back;

    template <int FIRST, int N> VT_MEMBER void sixteen(unsigned* w, i64 at, const float (&y)[N]) const {
        float size = 0.0f;
#pragma unroll
        for (int j = 0; j < 16; ++j) size = fmaxf(size, vt_abs(y[FIRST + j]));
        const unsigned code = e4m3_code(global * (size * vt_float(0x3e2aaaab)));
        const float step = e4m3_value(code) * back, factor = step == 0.0f ? 0.0f : 1.0f / step;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = a_number(y[FIRST + 8 * i + j] * factor);
            w[i] = e2m1_steps<false>(v, 1.0f);
        }
        scales[at / 16] = (unsigned char)code;
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
template <int R, class TO>
VT_FN void rotate_by_any(uint4* words, i64 base, i64 count, const unsigned short* x, const uint2* h, i64 aligned, const TO& to) {
    constexpr int QUADS = R / 4, GROUPS = 128 / QUADS, STEP = R + 4, VECTORS = ROTATED / R, OWN = VECTORS / GROUPS;
    int left = count - base < ROTATED ? (int)(count - base) : ROTATED, thread = (int)threadIdx.x;
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
    float total[OWN][4] = {}, sum[OWN][4];
#pragma unroll 1
    for (int k = 0; k < R; k += HALF) {
        if (k % CHAIN == 0)
#pragma unroll
            for (int m = 0; m < OWN; ++m)
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
        for (int m = 0; m < OWN; ++m) {
            const uint4* row = words + ((m * GROUPS + group) * STEP + k) / 4;
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
                for (int c = 0; c < 4; ++c) total[m][c] += sum[m][c];
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

#define RESIDENT 6  // blocks of a multiprocessor, device/mxfp4.py

VT_FN i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// Runs of 32 elements of all of x (16, where R is), 32 of them a warp at a time, one a lane; `blocks`: of the grid.
template <int R, class TO>
VT_FN void rotate(i64 count, const unsigned short* x, const uint2* h, i64 aligned, i64 blocks, const TO& to) {
    constexpr int HELD = R == 16 ? 16 : 32, P = HELD / 8, STEP = R + 4, SEEN = R > 32 ? 32 * 9 : 0;
    constexpr int ANY = (ROTATED / R * STEP > 64 * PITCH ? ROTATED / R * STEP : 64 * PITCH) / 4;
    constexpr int OWN = R == 16 ? 0 : 32 * P + SEEN;  // of a warp
    __shared__ uint4 memory[4 * OWN > ANY ? 4 * OWN : ANY];
    if (!aligned || !to.wide || !is_sylvester<R>((const uint4*)h, (unsigned*)memory)) {
        for (i64 base = (i64)blockIdx.x * ROTATED; base < count; base += blocks * ROTATED)
            rotate_by_any<R>(memory, base, count, x, h, aligned, to);
        return;
    }
    const float c = widen_bf16(h[0].x & 0xffffu);
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
            send_for_runs<HELD>(mine, pieces + from * P, (int)smaller(runs - from, 32));
        }
    };
    send(first);
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

#define ROTATE_PARAMETERS                                                                                              \
    i64 count, const unsigned short *x, const uint2 *h, unsigned char *out, unsigned char *scales, i64 aligned,        \
        i64 wide, i64 blocks
#define ROTATE_MX(NAME, METHOD, R)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128, RESIDENT) NAME##_##R(ROTATE_PARAMETERS) {                     \
        rotate<R>(count, x, h, aligned, blocks, ToMx<METHOD>{out, scales, wide != 0});                                 \
    }
#define ROTATE_NV(R)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(128, RESIDENT) rotate_nv_##R(ROTATE_PARAMETERS,                    \
                                                                                 const float* global) {                \
        const float factor = global[0];                                                                                \
        rotate<R>(count, x, h, aligned, blocks,                                                                        \
                  ToNv{out, scales, wide != 0, factor, factor == 0.0f ? 0.0f : 1.0f / factor});                        \
    }
ROTATE_MX(rotate_quest, QUEST, 32)
ROTATE_MX(rotate_quest, QUEST, 64)
ROTATE_MX(rotate_quest, QUEST, 128)
ROTATE_MX(rotate_abs_max, ABS_MAX, 32)
ROTATE_MX(rotate_abs_max, ABS_MAX, 64)
ROTATE_MX(rotate_abs_max, ABS_MAX, 128)
ROTATE_NV(16)
ROTATE_NV(32)
ROTATE_NV(64)
ROTATE_NV(128)
