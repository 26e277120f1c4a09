// MXFP4, e2m1 codes under a power of two for each block of 32, and the rotations before a quantiser: Hadamard matrices,
// the fast transform, products of short vectors with a matrix that end in MXFP4 or NVFP4.
//
// The ladder of the quantiser:
// 1. mx_v8: four lanes a block; 16-byte loads and four-byte stores where the addresses allow them.
// 2. mx_bf16_deep: four vectors of bfloat16 under way a thread, maxima taken of pairs as they lie in memory; each of a
//    block's four lanes finds the exponent of one of four blocks: 29 us for 8192 x 5120.
// 3. Codes out of float16s (e2m1_halves.cuh): 26 us.
// That of the transform:
// 1. transform_few: a thread a row.
// 2. transform_32, for float32: 32 elements a thread, so that five levels need no other thread, and up to three rounds of
//    those, with shared memory between them: 17, 86 and 127 us for 8192 x 1024, 8192 x 4096 and 1024 x 32768 of bfloat16.
// 3. transform.cuh: rows of 2-byte elements come by cp.async while others are summed up, and leave as 16-byte stores; up to
//    512 elements in the lanes of a warp: 7.9, 37 and 48 us.
// 4. Threads of the first two rounds wait for 32 or 64 alone, eights of 64 in a row lie in all banks: 7.8, 36 and 43 us.
// 5. transform_long.cuh, on Hopper: rows of 32768 with one exchange, 40.4 us, in place of the row before: 37.4 us; results leave
//    in twos, 128 blocks: 36.8 us.
// That of the rotation:
// 1. rotate_by_any: a thread owns 8 x 4 sums; the matrix's part of a chain is in its registers, rows come from shared memory
//    four elements at a time, each for four products. The sums' order is the mirror's, so that tensor cores, which have one
//    of their own, are no help, and the products, not the bytes, take the time: 98 us for 8192 x 4096 by 32, 270 by 128.
// 2. rotation.cuh: where the matrix is Sylvester's, which each block looks up, columns share what their sums have in
//    common: 171 multiply-adds of a chain of 16 for its 16 columns, whatever the size of the matrix, in place of 256 a
//    column and more. What takes the time are instructions, some 27 an element, a third of them for the code.
// 3. Codes of sums out of float16s where none can be a tie, but for QuEST, whose sizes have no bound: 33 to 30 us for
//    8192 x 4096 by 32, 44 to 39 by 128, 37 to 34 for NVFP4 by 16; the next rows come by whole runs.
// 4. rotated_near.cuh, for many rows: tensor cores' sums say nearly every code, and groups of which they do not are summed
//    in the mirror's order: 35.6 to 25.8 us for 8192 x 4096 by 32 (QuEST), 29.7 to 22.7, 39 to 29 by 128, 36 to 25 for NVFP4
//    by 16. One block of a multiprocessor, whose warps draw tiles: several look the matrix up more often, and more than two
//    tiles of a warp under way take longer.
// 5. Rows come as matrices, both halves of a vector are one chain of products, bounds follow from sums that are known, and
//    addresses are made once: 22.8, 22.0, 28.0 and 23.4 us. Without the second value of each sum, which says whether its
//    code is in doubt, it is 21.1, 21.1, 21.9 and 22.1; loads, products and stores alone take 21 to 21.6. By 128 a tile takes
//    some 430 instructions, at half of those that could be issued in that time, with 16 warps as with 20. No better: groups
//    in doubt in a list, which all warps share at the end, 768 threads, warps that wait for each other at each tile (26 to
//    32 us).
// 6. Of vectors of 64 and 128 a lane has whole groups, whose scales need no other lane; of a sum in doubt its byte of codes is
//    made anew by two columns' chains, a lane each, not its group; a thread looks the matrix up by one pattern. 28.2 to 23.5
//    by 128, 33.2 to 26 (QuEST) and 31.7 to 27 (NVFP4); 28 to 26, 27.3 to 24.5 and 24 to 22.8 by 64. Without mending 21.8,
//    23.1 and 24.1. No better: bytes in doubt in a list of each warp, 24.7; rows padded in place of turned, whose copies are
//    beside 128 bytes' bounds: 4 us more by 32; tiles before the matrix is known: 0.3 us less.
// 7. Fewer steps of a tile: QuEST's bound out of the squares that it has, the largest of a sum and a difference by their parts'
//    sizes: 25.9 to 25.4 by 128 (QuEST), 27.4 to 27.0 (NVFP4), 26 to 25.3 and 22.7 to 22.1 by 64. No better: lists of doubts in
//    any form, whose code, hardly ever met, is waited for; two tiles at the start.
// 8. The matrix and first tiles are announced before earlier kernels are over, and what needs neither is made then; a byte in
//    doubt takes fewer steps; QuEST's mean comes of its sums. By 128 25.8 to 24.6 (QuEST) and 26.6 to 25.6 (NVFP4), by 64 25.3
//    to 23.8 and 24.4 to 23.3. Without mending 22.4, 23.4, 21.9 and 22.1, where a copy takes 22.3: a byte in doubt holds its
//    warp up for some 1,900 cycles, and at the end the whole kernel. No better: a warp of its own that mends (36), 512
//    threads, sums of x times 1 for c.
// 9. What takes the time are instructions, also those of a byte in doubt, some 180, which one tile in six by 128 has: a
//    tile's 411 (QuEST) and 415 (NVFP4) by 128 became 376. Each lane counts tiles, since a branch for one takes more; the
//    global scale is asked for early (0.3 to 0.5 us) and its two factors made once; scales of e4m3 need no exact reciprocal,
//    which a byte in doubt makes; maxima go by threes; pieces of two weights are one operand; values beyond QuEST's largest
//    code are brought back among the codes, eight at a time; its squares are taken before sums and differences, its means by
//    tensor cores, its bound of each chain's own roundings. By 128 24.6 to 23.3 (QuEST), 25.5 to 23.4 (NVFP4), 22.7 to 22.2;
//    by 64 24.1 to 22.2 and by 16 22.8 to 21.5 (NVFP4); by 32 22.1 to 21.6 (QuEST). No better: sums of x by +-1, which are
//    exact where no x is too small, so that half as many are in doubt, for 25 instructions more (26.7 by 128, NVFP4, from
//    25.4); two tiles on their way (1 us more), 16 warps (0.6 to 1 more), a block's tiles one after another (up to 1 more),
//    lanes that store by one condition in place of a branch.
#include "early.cuh"
#include "once.cuh"
#include "rotated_near.cuh"
#include "transform.cuh"
#include "transform_long.cuh"

#define DEPTH 4  // vectors a thread of mx_bf16_deep, device/mxfp4.py

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

// The exponent's byte of one of four blocks that four lanes have vectors of: number threadIdx.x % 4.
template <bool KEEP> VT_FN unsigned exponent_of_lanes(const uint4 (&raw)[DEPTH], int left) {
    unsigned tops[DEPTH], pairs[DEPTH / 2];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) tops[d] = d * 256 < left ? largest_pair<KEEP>(raw[d]) : 0u;
#pragma unroll
    for (int p = 0; p < DEPTH / 2; ++p) {
        const unsigned a = tops[2 * p], b = tops[2 * p + 1];
        pairs[p] = larger_pair<KEEP>((a & 0xffffu) | b << 16, a >> 16 | (b & 0xffff0000u));
        pairs[p] = larger_pair<KEEP>(pairs[p], __shfl_xor_sync(FULL_WARP, pairs[p], 2));
        pairs[p] = larger_pair<KEEP>(pairs[p], __shfl_xor_sync(FULL_WARP, pairs[p], 1));
    }
    const unsigned pair = threadIdx.x & 2 ? pairs[1] : pairs[0];
    return mx_exponent(threadIdx.x & 1 ? pair & 0xffff0000u : pair << 16);
}

// Contiguous bfloat16, no code of -0. A warp with a NaN, an infinity or another number of 2^114 and more takes its time.
extern "C" __global__ void __launch_bounds__(256) mx_bf16_deep(MX_PARAMETERS) {
    unsigned first = blockIdx.x * (256 * DEPTH) + threadIdx.x;
    int left = first < (unsigned)count ? (int)((unsigned)count - first) : 0;  // this one is inside where d * 256 < left
    const uint4* vectors = (const uint4*)x + first;
    unsigned* words = (unsigned*)out + first;
    uint4 raw[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
        if (d * 256 < left) raw[d] = load_once(vectors + d * 256);
    unsigned byte = exponent_of_lanes<true>(raw, left);
    const bool slow = __any_sync(FULL_WARP, byte >= 240u) != 0;
    if (slow) byte = exponent_of_lanes<false>(raw, left);
    int own = threadIdx.x & 3;
    if (own * 256 < left) scales[(first + own * 256) >> 2] = (unsigned char)byte;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
        unsigned found = __shfl_xor_sync(FULL_WARP, byte, own ^ d);
        if (d * 256 >= left) continue;
        if (slow) {
            float v[8];
            widen(v, Raw<8>{raw[d], raw[d]}, BF16);
            words[d * 256] = mx_word(v, mx_factor(found), false);
        } else {
            words[d * 256] = e2m1_of_exact(raw[d], mx_factor(found + 14u));
        }
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
#define RESIDENT_32 3  // blocks of a multiprocessor: so few registers suffice there, elsewhere they spill
#else
#define RESIDENT_32 1
#endif

#define TRANSFORM(NAME, ASSUMED)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256, RESIDENT_32) NAME(i64 rows, i64 log2n, i64 threads, const void* x,  \
                                                                     i64 kind, void* out, float factor) {              \
        VT_SHARED(memory);                                                                                             \
        VT_ASSUME(ASSUMED);                                                                                            \
        transform(rows, (int)log2n, (int)threads, x, (int)kind, out, factor, (float*)memory);                          \
    }
TRANSFORM(transform_32, (int)kind == F32)

// Blocks of a multiprocessor, device/mxfp4.py.
#define RESIDENT_ROWS(LOG, PART) ((LOG) < 12 ? 8 : (PART) == 5 ? 5 : (LOG) < 14 ? 4 : (LOG) == 14 ? 2 : 1)
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

#if VT_TILES
#define LONG_TRANSFORM(KIND)                                                                                           \
    VT_SHARED(memory);                                                                                                 \
    LongTransform<KIND>::run(rows, blocks, x, vt_float((int)factor), comes, leaves, memory);
#else
#define LONG_TRANSFORM(KIND)  // never launched (device/mxfp4.py)
#endif
// factor: the bits of a float32.
#define TRANSFORM_LONG(NAME, KIND)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 1) transform_long_##NAME##_early(                                \
        i64 rows, i64 blocks, const unsigned char* x, i64 factor, VT_MAP comes, VT_WARP_MAPS leaves) {                 \
        LONG_TRANSFORM(KIND)                                                                                           \
    }
TRANSFORM_LONG(bf16, BF16)
TRANSFORM_LONG(f16, F16)

#define TRANSFORM_LANES(NAME, KIND)                                                                                    \
    extern "C" __global__ void __launch_bounds__(128, 8) transform_##NAME##_lanes(                                     \
        i64 count, i64 log2n, i64 blocks, const uint4* x, uint4* out, float factor) {                                  \
        __shared__ uint4 memory[512];                                                                                  \
        transform_in_lanes<KIND>(count, (int)log2n, blocks, x, out, factor, memory);                                   \
    }
TRANSFORM_LANES(bf16, BF16)
TRANSFORM_LANES(f16, F16)

#define ROTATE_PARAMETERS                                                                                              \
    i64 count, const unsigned short *x, const uint2 *h, unsigned char *out, unsigned char *scales, i64 aligned,        \
        i64 wide, i64 blocks
#define ROTATE_MX(NAME, METHOD, R)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128, RESIDENT) NAME##_##R(ROTATE_PARAMETERS) {                     \
        rotate<R>(count, x, h, aligned, blocks, ToMx<METHOD, R != 64>{out, scales, wide != 0});                                 \
    }
#define ROTATE_NV(R)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(128, RESIDENT) rotate_nv_##R(ROTATE_PARAMETERS,                    \
                                                                                 const float* global) {                \
        rotate<R>(count, x, h, aligned, blocks, ToNv{out, scales, wide != 0, global});                                 \
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

// Many vectors, in blocks of up to MANY_THREADS threads; by another matrix than Sylvester's 128 of them at a time.
template <int R, class TO>
VT_FN void rotate_many(i64 count, const unsigned short* x, const uint2* h, i64 blocks, TO to, unsigned char* memory) {
    __shared__ unsigned words[64];
    others_may_start();
    const unsigned first = ((threadIdx.x >> 5) * (unsigned)blocks + blockIdx.x) * 1024u;  // of a warp's first tile
    if (threadIdx.x == 0) read_soon(h, 2 * R * R);
    if (threadIdx.x % 32 == 0 && first + 1024u <= count) read_soon(x + first, 2048);
    if (R <= 32) after_others();  // others have more to do before
    if (NearSums<R>::run(count, x, (const uint4*)h, blocks, to, words, memory)) return;
    constexpr int ANY = (ROTATED / R * (R + 4) > 128 * PITCH ? ROTATED / R * (R + 4) : 128 * PITCH) / 4;
    to.begin();
    const int group = (int)threadIdx.x >> 7, groups = (int)blockDim.x >> 7;
    for (i64 base = (i64)blockIdx.x * groups * ROTATED; base < count; base += blocks * groups * ROTATED)
        rotate_by_any<R, 2>((uint4*)memory + group * ANY, base + group * ROTATED, count, x, h, 1, to);
}

// At most, device/mxfp4.py: elsewhere more spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define MANY_THREADS 640
#else
#define MANY_THREADS 512
#endif
#define MANY_PARAMETERS                                                                                                \
    i64 count, const unsigned short *x, const uint2 *h, unsigned char *out, unsigned char *scales, i64 blocks
#define ROTATE_MANY_MX(NAME, METHOD, R)                                                                                \
    extern "C" __global__ void __launch_bounds__(MANY_THREADS, 1) NAME##_##R##_early(MANY_PARAMETERS) {             \
        VT_SHARED(memory);                                                                                             \
        rotate_many<R>(count, x, h, blocks, ToMx<METHOD, R != 64>{out, scales, true}, memory);                         \
    }
#define ROTATE_MANY_NV(R)                                                                                              \
    extern "C" __global__ void __launch_bounds__(MANY_THREADS, 1) rotate_many_nv_##R##_early(MANY_PARAMETERS,          \
                                                                                         const float* global) {        \
        VT_SHARED(memory);                                                                                             \
        rotate_many<R>(count, x, h, blocks, ToNv{out, scales, true, global}, memory);                                  \
    }
ROTATE_MANY_MX(rotate_many_quest, QUEST, 32)
ROTATE_MANY_MX(rotate_many_quest, QUEST, 64)
ROTATE_MANY_MX(rotate_many_quest, QUEST, 128)
ROTATE_MANY_MX(rotate_many_abs_max, ABS_MAX, 32)
ROTATE_MANY_MX(rotate_many_abs_max, ABS_MAX, 64)
ROTATE_MANY_MX(rotate_many_abs_max, ABS_MAX, 128)
ROTATE_MANY_NV(16)
ROTATE_MANY_NV(32)
ROTATE_MANY_NV(64)
ROTATE_MANY_NV(128)
