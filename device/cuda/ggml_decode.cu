// One row of activations by weights that stay in ggml's blocks: a block a multiprocessor, weights streamed by warps.
#include "ggml_blocks.cuh"
#include "ggml_codes.cuh"
#include "ggml_ring.cuh"

#ifndef GGML_WARPS
#define GGML_WARPS 16
#endif
#ifndef GGML_RING
#define GGML_RING 11520
#endif
#ifndef GGML_DEPTH
#define GGML_DEPTH 8
#endif
#ifndef GGML_CHUNK
#define GGML_CHUNK 2
#endif
constexpr int WARPS = GGML_WARPS, THREADS = 32 * WARPS, TILE = 8;

struct Row {
    i64 columns, depth;
    const void* a;
    i64 a_kind;
    const u8* b;
    i64 stride;
    void* out;
    i64 kind;
};

// Bounds of part `i` of `parts` of [first, last).
VT_FN int cut(int first, int last, int i, int parts) { return first + (int)((i64)(last - first) * i / parts); }

#include "ggml_pairs.cuh"
#include "ggml_meet.cuh"
#include "ggml_tiles.cuh"

#define DECODE(name, FORM, TYPE)                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                                          \
        name(i64 columns, i64 depth, const void* a, i64 a_kind, const u8* b, i64 stride, void* out, i64 kind,         \
             i64 blocks, i64 team) {                                                                                            \
        FORM<TYPE>({columns, depth, a, a_kind, b, stride, out, kind}, (int)blocks, (int)team);                                   \
    }

#ifndef GGML_ONLY
#define GGML_ONLY 255
#endif
#if GGML_ONLY & 1
DECODE(ggml_one_q4_0, in_pairs, Q4_0)
#endif
#if GGML_ONLY & 2
DECODE(ggml_one_q8_0, in_pairs, Q8_0)
#endif
#if GGML_ONLY & 4
DECODE(ggml_one_q4_k, in_tiles, Q4_K)
#endif
#if GGML_ONLY & 8
DECODE(ggml_one_q6_k, in_tiles, Q6_K)
#endif
#if GGML_ONLY & 16
DECODE(ggml_one_q4_1, in_pairs, Q4_1)
DECODE(ggml_one_q5_0, in_pairs, Q5_0)
DECODE(ggml_one_q5_1, in_pairs, Q5_1)
#endif
#if GGML_ONLY & 32
DECODE(ggml_one_q5_k, in_tiles, Q5_K)
DECODE(ggml_one_q3_k, in_tiles, Q3_K)
DECODE(ggml_one_q2_k, in_tiles, Q2_K)
#endif
#if GGML_ONLY & 64
DECODE(ggml_one_iq2_xxs, in_tiles, IQ2_XXS)
DECODE(ggml_one_iq3_xxs, in_tiles, IQ3_XXS)
#endif
