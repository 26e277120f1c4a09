// Products of codes in rows on Hopper, for more rows than a few: the numbers of fp4_product.cuh, added up in its order.
// Tiles and stages: packed_loaded.cuh.
//
// A lane has 32 neighbouring k of 128, as CodesInRows has them, so rows of `a` are put in the order of its instructions
// first. Stages are halves of 128 k.
#pragma once
#include "fp4_product.cuh"
#include "packed_loaded.cuh"
#include "strided_rows.cuh"

#if VT_TILES

#ifdef __CUDACC__
template <int BYTES> VT_FN void copy_some(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)), "l"(global), "n"(BYTES) : "memory");
}
#else
template <int BYTES> static inline void copy_some(void* shared, const void* global) { std::memcpy(shared, global, BYTES); }
#endif

template <int SCALE> struct Fp4Job {
    static constexpr int KIND = BF16, GROUP = SCALE == E8M0 ? 32 : 16, WORDS = FP4_CHUNK / GROUP / 4;
    static constexpr int OWN = FP4_CODES / 2 + COLUMNS * 4 * WORDS;
    const char *words, *scales;
    const float* factor;
    i64 columns, depth, pitch, step;
    int kind, half;
    float of_all;

    template <int GROUPS> struct Sender {
        const char *line[GROUPS], *beside[GROUPS];
        i64 apart, step;
        int to, beside_to;
        VT_MEMBER int bytes() const { return 0; }
        VT_MEMBER void send(u8* here, int chunk) const {
            int whole = chunk >> 1, along = whole * (FP4_CHUNK / 2) + (chunk & 1) * 8;
#pragma unroll
            for (int c = 0; c < GROUPS; ++c) {
                copy_some<8>(here + c * OWN + to, line[c] + along);
                copy_some<8>(here + c * OWN + to + 1024, line[c] + apart + along);
                if (beside_to >= 0) copy_some<4>(here + c * OWN + beside_to, beside[c] + whole * WORDS * step);
            }
        }
    };
    template <int GROUPS, class C> VT_MEMBER Sender<GROUPS> sender(int thread, C column_of) const {
        Sender<GROUPS> s;
        int column = thread / WORDS, word = thread % WORDS;
        s.to = thread * 8, s.apart = 32 * (depth / 2), s.step = step;
        s.beside_to = column < COLUMNS ? FP4_CODES / 2 + thread * 4 : -1;
#pragma unroll
        for (int c = 0; c < GROUPS; ++c) {
            s.line[c] = words + (column_of(c) + thread / 4) * (depth / 2) + thread % 4 * 16;
            i64 n = column_of(c) + (column < COLUMNS ? column : 0);
            s.beside[c] = scales + word * step + (step == 512 ? (n >> 7) * pitch + (n & 31) * 16 + (n >> 5 & 3) * 4 : n * pitch);
        }
        return s;
    }
    VT_MEMBER int column(int warp, int g, int h) const { return 16 * warp + 8 * h + g; }
    VT_MEMBER void begin(i64, int, int) {
        half = 0;
        of_all = SCALE == E4M3_ROUNDED ? factor[0] : 1.0f;
    }
    VT_MEMBER void unpack(unsigned (&a)[4][4], const char* mine, int warp, int lane) {
        uint2 q[2];
        unsigned two[4] = {}, at = GROUP == 16 ? 2 * (lane & 3) + half : lane & 3;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int n = column(warp, lane >> 2, h);
            q[h] = *(const uint2*)(mine + n * 32 + (lane & 3) * 8);
            two[0] |= (unsigned)*(const unsigned char*)(mine + FP4_CODES / 2 + n * 4 * WORDS + at) << 16 * h;
        }
        half ^= 1;
        Scales<KIND, SCALE> here;
        here.take(two, of_all);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                unsigned w = i & 2 ? q[r & 1].y : q[r & 1].x;
                a[i][r] = here.weights(small_pair<KIND>(w, 8 * (i & 1) + 4 * (r >> 1)), r & 1);
            }
    }
    template <int SUMS> VT_MEMBER void multiply(float (&sums)[SUMS], const unsigned (&a)[4], u64 rows) const {
        multiply_registers<KIND>(sums, a, rows, 1);
    }
    VT_MEMBER unsigned short end(float x, i64 n) const {
        x = fp4_finished<KIND, SCALE>(x, n, factor, nullptr);
        return (unsigned short)(kind == BF16 ? pair<BF16>(x, 0.0f) : pair<F16>(x, 0.0f));
    }
};

template <int SCALE, int ROWS, int GROUPS, int LANES, int BLOCKS>
VT_FN void fp4_loaded(const TensorMap& rows_map, i64 rows, i64 columns, i64 depth, const char* words, const char* scales,
                      i64 pitch, i64 step, const float* factor, void* out, i64 kind, i64 length, i64 vectors, i64 stages,
                      u8* memory) {
    Fp4Job<SCALE> job;
    job.words = words, job.scales = scales, job.factor = factor, job.columns = columns, job.depth = depth;
    job.pitch = pitch, job.step = step, job.kind = (int)kind;
    constexpr int IN_CLUSTER = cluster_of(BLOCKS);
    int down = (int)((rows + ROWS - 1) / ROWS), cluster = (int)blockIdx.x / IN_CLUSTER, across = cluster / down;
    int rank = IN_CLUSTER == 1 ? 0 : block_of_cluster();
    LoadedWork work;
    work.first = 0, work.rows = (int)rows, work.top = (cluster - across * down) * ROWS, work.apart = down * ROWS;
    work.columns = columns, work.left = (i64)(across * IN_CLUSTER + rank) * GROUPS * COLUMNS;
    work.chunks = (int)(depth / CHUNK), work.length = (int)length, work.stages = (int)stages, work.vectors = (int)vectors;
    packed_loaded<Fp4Job<SCALE>, ROWS, GROUPS, LANES, BLOCKS>(job, work, rows_map, (unsigned short*)out, memory);
}

#define FP4_LOADED(NAME, SCALE, ROWS, GROUPS, LANES, BLOCKS)                                                              \
    extern "C" __global__ void CLUSTER_DIMS(BLOCKS) __launch_bounds__(128 + 128 * GROUPS * LANES, 1)                      \
        NAME(VT_MAP rows_map, i64 rows, i64 columns, i64 depth, const char* words, const char* scales, i64 pitch,         \
             i64 step, const float* factor, void* out, i64 kind, i64 length, i64 vectors, i64 stages) {                   \
        VT_SHARED(memory);                                                                                                \
        fp4_loaded<SCALE, ROWS, GROUPS, LANES, BLOCKS>(rows_map, rows, columns, depth, words, scales, pitch, step,        \
                                                       factor, out, kind, length, vectors, stages, memory);               \
    }

// In the forms of device/packed_loaded.py.
#define FP4_LOADED_KERNELS(NAME, SCALE)            \
    FP4_LOADED(NAME##_64_1_2_2, SCALE, 64, 1, 2, 2)    \
    FP4_LOADED(NAME##_128_1_2_2, SCALE, 128, 1, 2, 2)  \
    FP4_LOADED(NAME##_128_2_1_2, SCALE, 128, 2, 1, 2)
#endif
