// Products of up to 16 rows of 16-bit activations with weights in Marlin's tiles on Hopper. A warp has TILES of the four
// tiles of 64 columns and one of the chains that K is cut into: it sends for 64 k after 64 k of them, some stages ahead, and
// multiplies by itself. A team of SIDES warps has tiles side by side and one chain, and shares the rows of `a`. PARTS blocks
// of a cluster have columns alike and other chains. Chain sums meet in shared memory, of all those blocks, and are added in
// float32 from the first on.
#pragma once
#include "marlin_formats.cuh"

#if VT_TILES

#define FEW_CHAINS 8  // of K, at most
#define FEW_PITCH 68  // between rows of a warp's sums: writers meet in no bank

#ifdef __CUDACC__
// The threads of a team meet.
template <int THREADS> VT_FN void team_meets(int team) { asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(THREADS) : "memory"); }
// What block `part` of the cluster has where this one has `here`.
VT_FN float sum_of_block(const float* here, int part) {
    unsigned there;
    float x;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(part));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(there) : "memory");
    return x;
}
// All sums of a cluster are there. A block adds up its share of the columns, from this one on.
template <int PARTS> VT_FN int sums_of_cluster(int part, int wide) {
    cluster_meets();
    return wide / PARTS * part;
}
#else
namespace emulation {
inline Meeting teams[16];
inline unsigned char parts[2][SHARED];
inline int parts_there;
}  // namespace emulation
template <int THREADS> void team_meets(int team) {
    emulation::teams[team].size = THREADS;
    emulation::wait_for(emulation::teams[team]);
}
static inline float sum_of_block(const float* here, int part) {
    return *(const float*)(emulation::parts[part] + ((const unsigned char*)here - emulation::shared));
}
// Blocks run one after the other: all of them leave their sums, and have a share when those of all are there.
template <int PARTS> int sums_of_cluster(int part, int wide) {
    static int first;
    __syncthreads();
    if (threadIdx.x == 0) {
        std::memcpy(emulation::parts[part], emulation::shared, emulation::SHARED);
        emulation::parts_there = emulation::parts_there % PARTS + 1;
        first = emulation::parts_there < PARTS ? wide : 0;
    }
    __syncthreads();
    return first;
}
#endif

#define FEW_PARAMETERS                                                                                                \
    i64 rows, i64 columns, i64 depth, const void *a, const void *words, const void *scales, const void *zeros,       \
        void *out, i64 group_size, i64 zero, const void *factors, const void *bias, i64 length
#define FEW_NAMES rows, columns, depth, a, words, scales, zeros, out, group_size, zero, factors, bias, length

// ROWS of `a` at most. length: 64 k of a chain, in such steps; there is a team for each chain.
template <class W, int ROWS, int STAGES, int TILES, int SIDES, int PARTS>
VT_FN void marlin_few(i64 rows_, i64 columns, i64 depth, const void* a, const void* words, const void* scales, const void* zeros,
                      void* out, i64 group_size, i64 zero, const void* factors, const void* bias, i64 length_) {
    VT_SHARED(memory);
    // What 64 columns have of a stage is laid out as a Stage without rows.
    typedef Stage<W, 0, 1> S;
    constexpr int KIND = W::KIND, OWN = (S::ZEROS + W::ZERO_BYTES + 127) / 128 * 128, ALIKE = 4 / TILES, UNITS = SIDES / ALIKE;
    constexpr int STAGE = ROWS * 128 + UNITS * OWN, WIDE = UNITS * COLUMNS;
    static_assert(UNITS * ROWS * FEW_PITCH * 4 <= STAGES * STAGE, "sums of a chain fit where its stages were");
    constexpr int VECTORS = W::SCALE_BYTES / 16, SCALE = W::SCALE_BYTES / COLUMNS;
    int thread = (int)threadIdx.x, lane = thread & 31, side = (thread >> 5) % SIDES, team = (thread >> 5) / SIDES;
    int teams = (int)blockDim.x / (32 * SIDES), member = side * 32 + lane, g = lane >> 2, rows = (int)rows_, length = (int)length_;
    int unit = side / ALIKE, alike = side % ALIKE, tiles = alike * TILES;
    int tile = (int)blockIdx.x / PARTS, part = (int)blockIdx.x - tile * PARTS, chunks = (int)(depth / CHUNK);
    i64 left = (i64)tile * WIDE, n = left + unit * COLUMNS;
    if (n >= columns) n = columns - COLUMNS;  // where there are none, the last ones once more
    int begin = (part * teams + team) * length, end = begin + length < chunks ? begin + length : chunks;
    u8* ring = memory + team * (STAGES * STAGE);

    // What a lane copies: 16 bytes of every 512 of words, of every 4 SIDES-th row, and of scales or zero points.
    i64 sixteen_k = columns * (2 * W::TILE);
    const char* word = (const char*)words + n * (2 * W::TILE) + ((i64)begin * 4 + alike) * sixteen_k + lane * 16;
    int words_to = alike * S::UNIT + lane * 16;
    const char* line = (const char*)a + ((member >> 3) * depth + (i64)begin * CHUNK + (lane & 7) * 8) * 2;
    bool of_scales = alike == 0 && lane < VECTORS * W::SCALE_ROWS && scales != nullptr;
    bool of_zeros = alike == 0 && W::ZERO_BYTES && lane >= 16 && lane < 16 + W::ZERO_BYTES / 16;
    int pace = W::SCALE_ROWS > 1 ? 1 : (int)(group_size / CHUNK), number = begin / pace, at = begin - number * pace;
    i64 beside_row = of_zeros ? columns / 2 : columns * SCALE;
    const char* beside = of_zeros ? (const char*)zeros + n / 2 + (lane - 16) * 16
                                  : (const char*)scales + n * SCALE + lane / VECTORS * beside_row + lane % VECTORS * 16;
    beside += (i64)number * W::SCALE_ROWS * beside_row;
    int beside_to = of_zeros ? S::ZEROS + (lane - 16) * 16 : S::SCALES + lane * 16;
    if constexpr (W::SCALE_ROWS == 1)
        for (int s = 0; scales == nullptr && s < STAGES; ++s)
            ((unsigned*)(ring + s * STAGE + ROWS * 128 + unit * OWN + S::SCALES))[lane] = W::NO_SCALE;
    int ahead = begin, stage_ahead = 0;
    auto send = [&] {
        if (ahead < end) {
            u8 *stage = ring + stage_ahead, *mine = stage + ROWS * 128 + unit * OWN;
#pragma unroll
            for (int i = 0; i < W::TILE / ALIKE; ++i) {
                int q = i / (W::TILE / 4) * ALIKE, h = i % (W::TILE / 4) * 512;
                copy_async(mine + S::WORDS + q * S::UNIT + h + words_to, word + q * sixteen_k + h);
            }
#pragma unroll
            for (int i = 0; i < (ROWS + 4 * SIDES - 1) / (4 * SIDES); ++i) {
                int row = (member >> 3) + 4 * SIDES * i;
                if (row < rows) copy_async(stage + place(row, lane & 7), line + i * (8 * SIDES) * depth);
            }
            if (of_scales || of_zeros) copy_async(mine + beside_to, beside);
            word += 4 * sixteen_k, line += CHUNK * 2;
            if (++at == pace) at = 0, beside += W::SCALE_ROWS * beside_row;
        }
        ++ahead;
        stage_ahead = stage_ahead == (STAGES - 1) * STAGE ? 0 : stage_ahead + STAGE;
        copies_close();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) send();
    float sum[TILES][ROWS / 2];
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) sum[j][i] = 0.0f;
    typename W::template Held<TILES> held;
    held.begin(depth, zero);
    int row_at = ROWS > 8 ? (lane & 7) + (lane >> 4) * 8 : lane & 7, vector = ROWS > 8 ? lane >> 3 & 1 : lane >> 3, stage_here = 0;
#pragma unroll 1
    for (int chunk = begin; chunk < end; ++chunk) {
        copies_wait<STAGES - 2>();
        if constexpr (SIDES == 1) lanes_meet();
        else team_meets<32 * SIDES>(team);
        send();
        const char *stage = (const char*)ring + stage_here, *mine = stage + ROWS * 128 + unit * OWN;
        held.take(mine + S::SCALES, S::SCALE_ROW, mine + S::ZEROS, tiles, g, zero);
        unsigned b[4];
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            unsigned raw[TILES * W::TILE / 4];
            take_words(raw, mine + S::WORDS + s * S::UNIT + lane * (4 * W::TILE) + tiles * W::TILE);
            if (ROWS > 8 || s % 2 == 0) fetch_matrices(b, stage + place(row_at, 2 * s + vector));
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                unsigned w[4];
                held.operands(w, raw + j * (W::TILE / 4), s, j, tiles);
#pragma unroll
                for (int e = 0; e < ROWS / 8; ++e) {
                    int first = ROWS > 8 ? 2 * e : s % 2 * 2;
                    multiply<KIND>(*(float(*)[4])&sum[j][4 * e], w, b[first], b[first + 1]);
                }
            }
        }
        stage_here = stage_here == (STAGES - 1) * STAGE ? 0 : stage_here + STAGE;
    }
    copies_wait<0>();
    if constexpr (SIDES > 1) team_meets<32 * SIDES>(team);
    else lanes_meet();
    // Sums take the place of their own team's stages: a team waits for no other, which may have no chain or a longer one.
    float* sums = (float*)ring;
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i)
            sums[(unit * ROWS + 8 * (i / 4) + 2 * (lane & 3) + (i & 1)) * FEW_PITCH + 16 * (tiles + j) + 8 * (i >> 1 & 1) + g] =
                sum[j][i];
    int chains = (chunks + length - 1) / length, first = 0;
    if constexpr (PARTS > 1) first = sums_of_cluster<PARTS>(part, WIDE);
    else __syncthreads();
    int wide = first < WIDE ? WIDE / TOGETHER(PARTS) : 0;
    for (int number = thread; number < rows * wide; number += (int)blockDim.x) {
        int m = number / wide, c = first + number - m * wide;
        const float* from = (const float*)memory + (c / COLUMNS * ROWS + m) * FEW_PITCH + c % COLUMNS;
        float x = -0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            int here = chains - p * teams < teams ? chains - p * teams : teams;
            float y[FEW_CHAINS / PARTS];  // all under way at once
#pragma unroll
            for (int chain = 0; chain < FEW_CHAINS / PARTS; ++chain) {
                const float* its = from + chain * (STAGES * STAGE / 4);
                if (chain < here) y[chain] = PARTS > 1 ? sum_of_block(its, p) : *its;
            }
#pragma unroll
            for (int chain = 0; chain < FEW_CHAINS / PARTS; ++chain)
                if (chain < here) x += y[chain];
        }
        if (left + c < columns)
            ((unsigned short*)out)[m * columns + left + c] =
                (unsigned short)pair<KIND>(W::last(x, left + c, factors, bias), 0.0f);
    }
    if constexpr (PARTS > 1) cluster_meets();  // a block stays as long as others read its sums
}

// One block of a warp a chain, or two where columns are few: device/marlin_few.py.
#define MARLIN_FEW(NAME, FORMAT, ROWS)                                                                                \
    extern "C" __global__ void __launch_bounds__(256, 2) NAME##_few_##ROWS(FEW_PARAMETERS) {                          \
        marlin_few<FORMAT, ROWS, 3, 4, 1, 1>(FEW_NAMES);                                                              \
    }                                                                                                                 \
    extern "C" __global__ void VT_CLUSTER_OF(2) __launch_bounds__(256, 2) NAME##_few_##ROWS##_of_two(FEW_PARAMETERS) { \
        marlin_few<FORMAT, ROWS, 3, 2, 2, 2>(FEW_NAMES);                                                              \
    }
#endif
