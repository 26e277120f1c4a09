// AllSpark's weights of 8 bits in n32k16 order, both ways, and products of 16-bit activations with them.
//
// The ladder:
// 1. Moves: a thread four bytes of the packed weights, or one of the plain ones. Weights are packed once.
// 2. allspark_*: the order is that of tensor cores' operands. 16 bytes of a lane are two tiles of 16 columns x 16 k; a mask and
//    one fma make pairs of codes exact numbers, another the weights, rounded. K is cut into eight chains of whole 64 k
//    whatever the number of rows; a warp has one chain and a ring of copies of its own, and a row its bytes in any batch.
#include "packed_words.cuh"

#define PARTS 8

// Four bytes at `at` of rows of 4 k bytes, each of them eight columns apart: of one column, k, k + 1, k + 8 and k + 9.
extern "C" __global__ void __launch_bounds__(256)
    allspark_pack(i64 count, i64 k, i64 columns, const unsigned char* weights, unsigned* out) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    i64 row = at / k, word = at % k;
    int inside = (int)(word % 16);
    i64 n = row / 8 * 32 + row % 8 + inside / 2 % 2 * 16 + inside % 2 * 8, first = word / 16 * 16 + inside / 4 * 2;
    unsigned codes = 0;
    if (n < columns)
        for (int i = 0; i < 4; ++i) codes |= (unsigned)weights[(first + i % 2 + i / 2 * 8) * columns + n] << 8 * i;
    out[at] = codes;
}
extern "C" __global__ void __launch_bounds__(256)
    allspark_unpack(i64 count, i64 k, i64 columns, const unsigned char* words, unsigned char* out) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    i64 row = at / columns, n = at % columns;
    i64 column = row / 16 * 64 + row % 8 / 2 * 16 + n % 32 / 16 * 8 + n % 16 / 8 * 4 + row % 16 / 8 * 2 + row % 2;
    out[at] = words[(n / 32 * 8 + n % 8) * (4 * k) + column];
}

// Scales of `columns`, or zero points, in the order in which a lane reads its four, and back.
extern "C" __global__ void __launch_bounds__(256)
    allspark_spread(i64 count, i64 columns, const unsigned short* scales, unsigned short* out) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x, n = at / 32 * 32 + at % 4 * 8 + at % 32 / 4;
    if (at < count) out[at] = n < columns ? scales[n] : (unsigned short)0;
}
extern "C" __global__ void __launch_bounds__(256)
    allspark_gather(i64 count, const unsigned short* scales, unsigned short* out) {
    i64 n = (i64)blockIdx.x * 256 + threadIdx.x;
    if (n < count) out[n] = scales[n / 32 * 32 + n % 8 * 4 + n % 32 / 8];
}

// A pair of weights of two codes, the low bytes of `raw`'s halves.
template <int KIND> VT_FN unsigned weights_of(unsigned raw, unsigned scale) {
    typedef Pairs<KIND> N;
    unsigned value;
    if constexpr (KIND == F16) value = fma_pair<KIND>(raw | N::BASE, N::ONE, N::MINUS_BASE + 0x00800080u);
    else value = fma_pair<KIND>((raw & 0x007f007fu) | N::BASE, N::ONE, (raw & 0x00800080u) ^ 0xc380c380u);
    return fma_pair<KIND>(value, scale, N::MINUS_ZERO);
}

// A block has 32 WIDE columns and 8 EIGHTS rows; columns beyond `real` are not written, those beyond `padded` not there.
template <int KIND, int EIGHTS, int WIDE, int STAGES> VT_FN void allspark(
    i64 rows, i64 real, i64 padded, i64 depth, const void* a, const unsigned char* words, const unsigned short* scales,
    void* out, i64 vectors) {
    VT_SHARED(memory);
    constexpr int ROWS = 8 * EIGHTS, ACROSS = 32 * WIDE, WIDTH = ACROSS + 4, WORDS_AT = ROWS * 128;
    constexpr int STAGE = WORDS_AT + WIDE * 2048;
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, team = threadIdx.x >> 5, teams = blockDim.x >> 5;
    float* total = (float*)memory;
    char* ring = (char*)memory + ROWS * WIDTH * 4 + team * STAGES * STAGE;
    i64 down = (rows + ROWS - 1) / ROWS, top = blockIdx.x % down * ROWS, left = blockIdx.x / down * ACROSS;
    int held = (int)(rows - top < ROWS ? rows - top : ROWS), chunks = (int)((depth + CHUNK - 1) / CHUNK);
    int length = (chunks + PARTS - 1) / PARTS;
    unsigned scale[WIDE][4];
#pragma unroll
    for (int w = 0; w < WIDE; ++w) {
        uint2 q = {0, 0};
        if (left + 32 * w < padded) q = *(const uint2*)(scales + left + 32 * w + 4 * g);
        scale[w][0] = pick<0x1010>(q.x, 0), scale[w][1] = pick<0x3232>(q.x, 0);
        scale[w][2] = pick<0x1010>(q.y, 0), scale[w][3] = pick<0x3232>(q.y, 0);
    }
    auto send = [&](int chunk, int slot) {
        char* to = ring + slot * STAGE;
        int row = lane / 8, v = lane & 7;
        bool inside = (i64)chunk * CHUNK + 8 * v < depth;
        const char* from = (const char*)a + ((top + row) * depth + (i64)chunk * CHUNK + 8 * v) * 2;
#pragma unroll 2
        for (int i = 0; i < 2 * EIGHTS; ++i, row += 4, from += 8 * depth)
            copy_or_zero(to + swizzled<8>(row, v), from, inside && row < held);
        int u = lane & 15;  // of a row's sixteen vectors, four for each 16 k
        bool there = (i64)chunk * CHUNK + u / 4 * 16 < depth;
#pragma unroll
        for (int i = 0; i < 4 * WIDE; ++i) {
            int line = lane / 16 + 2 * i;
            const unsigned char* own = words + (left / 4 + line) * (4 * depth) + (i64)chunk * 256 + u * 16;
            copy_or_zero(to + WORDS_AT + line * 256 + (u ^ (line & 1) << 2) * 16, own, there && left + line / 8 * 32 < padded);
        }
    };
    for (int part = team; part < PARTS; part += teams) {
        float sum[2 * WIDE][EIGHTS][4] = {};
        int begin = part * length, end = begin + length < chunks ? begin + length : chunks, count = end - begin;
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) {
            if (s < count) send(begin + s, s);
            copies_close();
        }
        for (int i = 0; i < count; ++i) {
            copies_wait<STAGES - 2>();
            warp_meets();
            if (i + STAGES - 1 < count) send(begin + i + STAGES - 1, (i + STAGES - 1) % STAGES);
            copies_close();
            const char* here = ring + i % STAGES * STAGE;
#pragma unroll 1
            for (int s = 0; s < 4; s += 2) {
                unsigned right[EIGHTS][4];
#pragma unroll
                for (int e = 0; e < EIGHTS; ++e)
                    fetch_matrices(right[e], here + swizzled<8>(8 * e + (lane & 7), 2 * s + (lane >> 3)));
#pragma unroll
                for (int w = 0; w < WIDE; ++w)
#pragma unroll
                    for (int one = 0; one < 2; ++one) {
                        uint4 q = words_at(here, WORDS_AT + (8 * w + g) * 256 + ((4 * (s + one) + t) ^ (g & 1) << 2) * 16);
                        const unsigned codes[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                        for (int j = 0; j < 2; ++j) {
                            const unsigned weights[4] = {
                                weights_of<KIND>(pick<0x4140>(codes[2 * j], 0), scale[w][2 * j]),
                                weights_of<KIND>(pick<0x4140>(codes[2 * j + 1], 0), scale[w][2 * j + 1]),
                                weights_of<KIND>(pick<0x4342>(codes[2 * j], 0), scale[w][2 * j]),
                                weights_of<KIND>(pick<0x4342>(codes[2 * j + 1], 0), scale[w][2 * j + 1])};
#pragma unroll
                            for (int e = 0; e < EIGHTS; ++e)
                                multiply<KIND>(sum[2 * w + j][e], weights, right[e][2 * one], right[e][2 * one + 1]);
                        }
                    }
            }
        }
        copies_wait<0>();
        warp_meets();
        for (int turn = 0; turn < teams; ++turn) {  // parts are added up from the first one on
            if (turn == team)
#pragma unroll
                for (int j = 0; j < 2 * WIDE; ++j)
#pragma unroll
                    for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float* at = total + (8 * e + 2 * t + (i & 1)) * WIDTH + 16 * j + g + 8 * (i >> 1);
                            *at = part ? *at + sum[j][e][i] : sum[j][e][i];
                        }
            __syncthreads();
        }
    }
    for (int at = threadIdx.x; at < held * (ACROSS / 8); at += blockDim.x) {
        int m = at / (ACROSS / 8), c = at % (ACROSS / 8) * 8;
        const float* from = total + m * WIDTH + c;
        i64 to = (top + m) * real + left + c;
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = from[i];
        if (vectors && left + c < real) {
            store(out, to, x, KIND);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float one[1] = {x[i]};
                if (left + c + i < real) store(out, to + i, one, KIND);
            }
        }
    }
}

#define ALLSPARK(NAME, KIND, EIGHTS, WIDE, STAGES, BLOCKS)                                                            \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) allspark_##NAME##_##EIGHTS(                             \
        i64 rows, i64 real, i64 padded, i64 depth, const void* a, const unsigned char* words,                         \
        const unsigned short* scales, void* out, i64 vectors) {                                                       \
        allspark<KIND, EIGHTS, WIDE, STAGES>(rows, real, padded, depth, a, words, scales, out, vectors);              \
    }
ALLSPARK(bf16, BF16, 1, 1, 4, 2)
ALLSPARK(bf16, BF16, 2, 1, 3, 2)
ALLSPARK(bf16, BF16, 4, 2, 3, 1)
ALLSPARK(f16, F16, 1, 1, 4, 2)
ALLSPARK(f16, F16, 2, 1, 3, 2)
ALLSPARK(f16, F16, 4, 2, 3, 1)
