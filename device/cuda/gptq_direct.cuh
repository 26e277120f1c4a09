// Products of very few rows with GPTQ's words: the numbers of w4a16.cuh, in its order. A block has 32 columns or twice as
// many, a warp a chain of them, whose words it sends for into a ring of its own, so that much is under way at all times. The
// four lanes of a group read the same words and take a pair of codes each. What takes time is instructions: so a ring's stages
// are unrolled, and scales and zero points are read once a group. They start early; where a block fills a multiprocessor the
// next kernel's may come as soon as it leaves, while two smaller ones would have to make room for it.
#pragma once
#include "early.cuh"
#include "gptq_words.cuh"

#ifdef __CUDACC__
// Two 8 x 8 matrices: as `fetch_matrices`, of lanes below 16.
VT_FN void fetch_pair(unsigned (&r)[2], const void* row) {
    unsigned from = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(from) : "memory");
}
// Half H of a pair, twice.
template <int H> VT_FN unsigned twice(unsigned pair) {
    unsigned both;
    if constexpr (H) asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};}" : "=r"(both) : "r"(pair));
    else asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};}" : "=r"(both) : "r"(pair));
    return both;
}
#else
static inline void fetch_pair(unsigned (&r)[2], const void* row) {
    unsigned four[4];
    fetch_matrices(four, row);
    r[0] = four[0], r[1] = four[1];
}
template <int H> unsigned twice(unsigned pair) { return (pair >> 16 * H & 0xffffu) * 0x10001u; }
#endif

#define DIRECT_ROWS 4  // at most
#define DIRECT_STAGES 4  // of 64 k, of which a warp sends for all but one ahead
#define DIRECT_BESIDE 80  // bytes of scales and zero points, of a group and 32 columns

// HALVES of 32 columns.
template <int KIND, bool SEQUENCE, int HALVES>
VT_FN void gptq_direct(i64 rows, i64 columns, i64 depth, const void* a, const void* words, const void* scales, const void* zeros,
                       void* out, i64 group_size, i64 zero, i64 length, i64 chains, int room, unsigned char* memory) {
    typedef Pairs<KIND> P;
    constexpr int COLUMNS_HERE = 32 * HALVES, LINE = 128 * HALVES, SLOT = 8 * LINE, BESIDE = DIRECT_BESIDE * HALVES;
    constexpr int ACROSS = 8 * HALVES, DOWN = 32 / ACROSS;  // of a stage's 16 bytes, as a warp's lanes copy them
    // The warp comes from a lane: what hangs on it then takes no registers of each thread.
    int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), g = lane >> 2, t = lane & 3;
    int own = (int)length * CHUNK, first = warp * own;
    int count = (int)depth - first < own ? (int)depth - first : own, pitch = own * 2 + 16, high = (int)rows;
    i64 left = (i64)blockIdx.x * COLUMNS_HERE;
    const char* from = (const char*)words + ((first / 8 + lane / ACROSS) * columns + left + lane % ACROSS * 4) * 4;
    i64 line = columns * (4 * DOWN);
    unsigned char *ring = memory + warp * (DIRECT_STAGES * SLOT), *to = ring + lane * 16;
    auto copy = [&](bool there, int slot) {
        if (!there) return;
#pragma unroll
        for (int i = 0; i < 8 / DOWN; ++i, from += line) copy_async(to + slot * SLOT + i * 512, from);
    };
    if (HALVES > 1) others_may_start();
    after_others();
    copy(true, 0);
    int size = (int)group_size, to_end = 0, next = size - first % size, rows_at = (int)chains * DIRECT_STAGES * SLOT;
    int group = first / size, groups = (first + count - 1) / size - group + 1;
    int beside_at = rows_at + (int)chains * high * pitch + warp * room * BESIDE;
#pragma unroll 1
    for (int m = 0; m < high; ++m)
#pragma unroll 2
        for (int v = lane; v < count / 8; v += 32)
            copy_async(memory + rows_at + (warp * high + m) * pitch + v * 16, (const char*)a + (m * depth + first) * 2 + v * 16);
#pragma unroll 1
    for (int i = lane; i < groups * ACROSS; i += 32) {  // vectors of scales, and a quarter as many of zero points
        int v = i % ACROSS;
        i64 at = (group + i / ACROSS) * columns + left;
        const char* of = v < 4 * HALVES ? (const char*)scales + at * 2 + v * 16 : (const char*)zeros + at / 2 + (v - 4 * HALVES) * 16;
        if (v < 5 * HALVES) copy_async(memory + beside_at + i / ACROSS * BESIDE + v * 16, of);
    }

    // The mask is in a register, as long as the compiler cannot know: depth < 2^31.
    unsigned mask = 0x000f000fu + (unsigned)(depth >> 32), base = P::MINUS_BASE + (unsigned)zero * 0x10001u;
    const unsigned char* x = memory + rows_at + (warp * high + ((lane & 7) < high ? lane & 7 : 0)) * pitch + (lane >> 3 & 1) * 16;
    const unsigned char *beside = memory + beside_at + 8 * g, *mine = ring + g * 16;
    float sum[2 * HALVES][4] = {};
    unsigned scale[2 * HALVES], minus[2 * HALVES];  // of pairs of columns
    copies_close();
#pragma unroll
    for (int i = 1; i < DIRECT_STAGES - 1; ++i) {
        copy(count > i * CHUNK, i);
        copies_close();
    }
    auto take = [&] {
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            uint2 two = *(const uint2*)(beside + h * 64);
            unsigned z = *(const unsigned short*)(beside + HALVES * 64 + h * 16 - 6 * g);
            scale[2 * h] = two.x, scale[2 * h + 1] = two.y;
            minus[2 * h] = base + ((z & 0xfu) | (z << 12 & 0xf0000u)), minus[2 * h + 1] = base + ((z >> 8 & 0xfu) | (z << 4 & 0xf0000u));
        }
        beside += BESIDE;
    };
    auto multiply_slot = [&](const unsigned char* words_of, const unsigned char* x) {
#pragma unroll
        for (int s = 0; s < CHUNK / 16; ++s, words_of += 2 * LINE) {
            unsigned b[2];
            fetch_pair(b, x + 32 * s);
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const uint4 low = *(const uint4*)(words_of + h * 128), up = *(const uint4*)(words_of + h * 128 + LINE);
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    const unsigned w[4] = {tile ? low.z : low.x, tile ? low.w : low.y, tile ? up.z : up.x, tile ? up.w : up.y};
                    unsigned left_operand[4];
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        unsigned codes = SEQUENCE ? SequenceWords::byte_of(w[r], t) * 0x1001u : w[r] >> 4 * t;
                        unsigned less = r & 1 ? twice<1>(minus[2 * h + tile]) : twice<0>(minus[2 * h + tile]);
                        unsigned by = r & 1 ? twice<1>(scale[2 * h + tile]) : twice<0>(scale[2 * h + tile]);
                        left_operand[r] = fma_pair<KIND>(fma_pair<KIND>((codes & mask) | P::BASE, P::ONE, less), by, P::MINUS_ZERO);
                    }
                    multiply<KIND>(sum[2 * h + tile], left_operand, b[0], b[1]);
                }
            }
        }
    };
#pragma unroll 1
    for (int to_do = count; to_do > 0;) {
#pragma unroll
        for (int slot = 0; slot < DIRECT_STAGES; ++slot) {
            if (to_do <= 0) break;
            copies_wait<DIRECT_STAGES - 2>();
            warp_meets();
            copy(to_do > (DIRECT_STAGES - 1) * CHUNK, (slot + DIRECT_STAGES - 1) % DIRECT_STAGES);
            copies_close();
            if (to_end == 0) take(), to_end = next, next = size;
            to_end -= CHUNK;
            multiply_slot(mine + slot * SLOT, x);
            to_do -= CHUNK, x += 2 * CHUNK;
        }
    }

    copies_wait<0>();
    // Chain sums from the first on; they lie where rows of `a` were, when no warp reads those.
    __syncthreads();
    float* sums = (float*)memory;
#pragma unroll
    for (int tile = 0; tile < 2 * HALVES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int m = 2 * t + (i & 1);
            if (m < DIRECT_ROWS) sums[(warp * DIRECT_ROWS + m) * COLUMNS_HERE + tile / 2 * 32 + 4 * g + 2 * (tile & 1) + (i >> 1)] = sum[tile][i];
        }
    __syncthreads();
    for (int at = threadIdx.x; at < (int)rows * COLUMNS_HERE; at += blockDim.x) {
        int m = at / COLUMNS_HERE, n = at % COLUMNS_HERE;
        float total = sums[at];
#pragma unroll 5
        for (int chain = 1; chain < (int)chains; ++chain) total += sums[chain * DIRECT_ROWS * COLUMNS_HERE + at];
        float one[1] = {total};
        store(out, m * columns + left + n, one, KIND);
    }
}

#define GPTQ_DIRECT_OF(NAME, KIND, SEQUENCE, HALVES)                                                                      \
    extern "C" __global__ void __launch_bounds__(512, 2 / HALVES)                                                         \
        NAME(i64 rows, i64 columns, i64 depth, const void* a, const void* words, const void* scales, const void* zeros,   \
             void* out, i64 group, i64 zero, i64 length, i64 chains, i64 room) {                                          \
        VT_SHARED(memory);                                                                                                \
        gptq_direct<KIND, SEQUENCE, HALVES>(rows, columns, depth, a, words, scales, zeros, out, group, zero, length,      \
                                            chains, (int)room, memory);                                                   \
    }
#define GPTQ_DIRECT(NAME, KIND, SEQUENCE)              \
    GPTQ_DIRECT_OF(NAME##_32_early, KIND, SEQUENCE, 1) \
    GPTQ_DIRECT_OF(NAME##_64_early, KIND, SEQUENCE, 2)
