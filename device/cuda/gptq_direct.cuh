// Products of very few rows with GPTQ's words: the numbers of w4a16.cuh, in its order. A block has 32 columns, a warp a chain
// of them, whose words it sends for into a ring of its own, so that much is under way at all times. The four lanes of a group
// read the same words and take a pair of codes each.
#pragma once
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

#define DIRECT_COLUMNS 32
#define DIRECT_ROWS 4  // at most
#define DIRECT_STAGES 4  // of 64 k, of which a warp sends for all but one ahead
#define DIRECT_BESIDE 80  // bytes of scales and zero points, of a group

template <int KIND, bool SEQUENCE>
VT_FN void gptq_direct(i64 rows, i64 columns, i64 depth, const void* a, const void* words, const void* scales, const void* zeros,
                       void* out, i64 group_size, i64 zero, i64 length, i64 chains, int room, unsigned char* memory) {
    typedef Pairs<KIND> P;
    // The warp comes from a lane: what hangs on it then takes no registers of each thread.
    int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), g = lane >> 2, t = lane & 3;
    int own = (int)length * CHUNK, first = warp * own;
    int count = (int)depth - first < own ? (int)depth - first : own, pitch = own * 2 + 16, high = (int)rows;
    i64 left = (i64)blockIdx.x * DIRECT_COLUMNS;
    // Of a stage, eight rows of 128 bytes, a lane copies 16 bytes of a row and of the fourth one after it.
    const char* from = (const char*)words + ((first / 8 + (lane >> 3)) * columns + left + (lane & 7) * 4) * 4;
    i64 line = columns * 16;
    int ring = warp * DIRECT_STAGES * 1024, stage = ring;
    auto copy = [&](bool there, int to) {
        if (!there) return;
        copy_async(memory + to + lane * 16, from);
        copy_async(memory + to + lane * 16 + 512, from + line);
        from += 2 * line;
    };
    copy(true, ring);
    int size = (int)group_size, to_end = size - first % size, rows_at = (int)chains * DIRECT_STAGES * 1024;
    int group = first / size, groups = (first + count - 1) / size - group + 1;
    int beside = rows_at + (int)chains * high * pitch + warp * room * DIRECT_BESIDE;
#pragma unroll 1
    for (int m = 0; m < high; ++m)
#pragma unroll 2
        for (int v = lane; v < count / 8; v += 32)
            copy_async(memory + rows_at + (warp * high + m) * pitch + v * 16, (const char*)a + (m * depth + first) * 2 + v * 16);
#pragma unroll 1
    for (int i = lane; i < groups * 8; i += 32) {  // four vectors of scales, one of zero points
        int v = i & 7;
        i64 at = (group + (i >> 3)) * columns + left;
        const char* of = v < 4 ? (const char*)scales + at * 2 + v * 16 : (const char*)zeros + at / 2;
        if (v <= 4) copy_async(memory + beside + (i >> 3) * DIRECT_BESIDE + v * 16, of);
    }

    // The mask is in a register, as long as the compiler cannot know: depth < 2^31.
    unsigned mask = 0x000f000fu + (unsigned)(depth >> 32), base = P::MINUS_BASE + (unsigned)zero * 0x10001u;
    int x = rows_at + (warp * high + ((lane & 7) < high ? lane & 7 : 0)) * pitch + (lane >> 3 & 1) * 16;
    float sum[2][4] = {};
    copies_close();
#pragma unroll
    for (int i = 1; i < DIRECT_STAGES - 1; ++i) {
        copy(count > i * CHUNK, ring + i * 1024);
        copies_close();
    }
#pragma unroll 1
    for (int to_do = count; to_do > 0; to_do -= CHUNK, x += 2 * CHUNK) {
        copies_wait<DIRECT_STAGES - 2>();
        warp_meets();
        copy(to_do > (DIRECT_STAGES - 1) * CHUNK, stage + (stage == ring ? (DIRECT_STAGES - 1) * 1024 : -1024));
        copies_close();
        if (to_end == 0) to_end = size, beside += DIRECT_BESIDE;
        to_end -= CHUNK;
        uint2 scale = *(const uint2*)(memory + beside + 8 * g);
        unsigned z = *(const unsigned short*)(memory + beside + 64 + 2 * g);
        const unsigned scale_of[2] = {scale.x, scale.y};
        const unsigned minus[2] = {base + ((z & 0xfu) | (z << 12 & 0xf0000u)), base + ((z >> 8 & 0xfu) | (z << 4 & 0xf0000u))};
#pragma unroll
        for (int s = 0; s < CHUNK / 16; ++s) {
            unsigned b[2];
            fetch_pair(b, memory + x + 32 * s);
            const unsigned char* words_of = memory + stage + s * 256 + g * 16;
            const uint4 low = *(const uint4*)words_of, high_words = *(const uint4*)(words_of + 128);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const unsigned w[4] = {tile ? low.z : low.x, tile ? low.w : low.y, tile ? high_words.z : high_words.x,
                                       tile ? high_words.w : high_words.y};
                unsigned left_operand[4];
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    unsigned codes = SEQUENCE ? SequenceWords::byte_of(w[r], t) * 0x1001u : w[r] >> 4 * t;
                    unsigned less = r & 1 ? twice<1>(minus[tile]) : twice<0>(minus[tile]);
                    unsigned by = r & 1 ? twice<1>(scale_of[tile]) : twice<0>(scale_of[tile]);
                    left_operand[r] = fma_pair<KIND>(fma_pair<KIND>((codes & mask) | P::BASE, P::ONE, less), by, P::MINUS_ZERO);
                }
                multiply<KIND>(sum[tile], left_operand, b[0], b[1]);
            }
        }
        stage = stage == ring + (DIRECT_STAGES - 1) * 1024 ? ring : stage + 1024;
    }

    copies_wait<0>();
    // Chain sums from the first on; they lie where rows of `a` were, when no warp reads those.
    __syncthreads();
    float* sums = (float*)memory;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int m = 2 * t + (i & 1);
            if (m < DIRECT_ROWS) sums[(warp * DIRECT_ROWS + m) * DIRECT_COLUMNS + 4 * g + 2 * tile + (i >> 1)] = sum[tile][i];
        }
    __syncthreads();
    for (int at = threadIdx.x; at < (int)rows * DIRECT_COLUMNS; at += blockDim.x) {
        int m = at / DIRECT_COLUMNS, n = at % DIRECT_COLUMNS;
        float total = sums[at];
        for (int chain = 1; chain < (int)chains; ++chain) total += sums[chain * DIRECT_ROWS * DIRECT_COLUMNS + at];
        float one[1] = {total};
        store(out, m * columns + left + n, one, KIND);
    }
}

#define GPTQ_DIRECT(NAME, KIND, SEQUENCE)                                                                                 \
    extern "C" __global__ void __launch_bounds__(512, 2)                                                                  \
        NAME(i64 rows, i64 columns, i64 depth, const void* a, const void* words, const void* scales, const void* zeros,   \
             void* out, i64 group, i64 zero, i64 length, i64 chains, i64 room) {                                                  \
        VT_SHARED(memory);                                                                                                \
        gptq_direct<KIND, SEQUENCE>(rows, columns, depth, a, words, scales, zeros, out, group, zero, length, chains,      \
                                    (int)room, memory);                                                                   \
    }
