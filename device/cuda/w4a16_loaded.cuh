// Products of 16-bit activations with weights of 4 bits on Hopper, for more rows than a few: the numbers of w4a16.cuh,
// added up in its order, whatever the format of the words. Tiles and stages: packed_loaded.cuh.
#pragma once
#include "gptq_words.cuh"
#include "packed_loaded.cuh"

#if VT_TILES

// Formats. Of 64 columns x 64 k, thread i of 128 copies 16 bytes, `from` to `to`. ZERO_BYTES: of zero points, of 64 columns
// and a group. `column` is the one of 64 that is row 16 warp + g + 8 h of the left operand. `codes`: registers of the four
// products of a warp, whose masked bits are codes; `scale`: where a scale lies among 64; `zero`: a zero point.
// Words along K, of codes in sequence or, else, as exllama shuffles them.
template <bool SEQUENCE> struct GptqRows {
    static constexpr int ZERO_BYTES = 32;
    static VT_MEMBER i64 from(i64 n, i64 columns, int i) { return (i / 16 * columns + n) * 4 + i % 16 * 16; }
    static VT_MEMBER int to(int i) { return i * 16; }
    static VT_MEMBER int column(int warp, int g, int h, int) { return 16 * warp + 2 * g + h; }
    static VT_MEMBER int scale(int warp, int g, int h, int order) { return column(warp, g, h, order); }
    static VT_MEMBER unsigned pair_of(unsigned w, int t) {
        return SEQUENCE ? SequenceWords::byte_of(w, t) * 0x1001u : w >> 4 * t;
    }
    static VT_MEMBER void codes(unsigned (&raw)[4][4], const char* words, int warp, int lane) {
        const char* mine = words + warp * 64 + (lane >> 2) * 8;
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint2 q = *(const uint2*)(mine + (2 * s + half) * 256);
                raw[s][2 * half] = pair_of(q.x, lane & 3);
                raw[s][2 * half + 1] = pair_of(q.y, lane & 3);
            }
    }
    static VT_MEMBER unsigned zero(const char* zeros, int warp, int g, int h) {
        return word_at(zeros, 8 * warp + (g >> 2) * 4) >> 4 * ((2 * g & 7) + h) & 15u;
    }
};

// Words along N; `order` is 1 for AWQ's interleaved places, 0 for places in sequence.
struct AwqRows {
    static constexpr int ZERO_BYTES = 32;
    static VT_MEMBER int row(int k) { return AwqWords::row(k); }
    static VT_MEMBER i64 from(i64 n, i64 columns, int i) { return (i / 2 * columns + n) / 2 + i % 2 * 16; }
    static VT_MEMBER int to(int i) { return row(i / 2) + i % 2 * 16; }
    static VT_MEMBER int place(int p, int order) { return order ? (p & 3) << 1 | p >> 2 : p; }
    static VT_MEMBER int column(int warp, int g, int h, int order) { return 8 * g + place(2 * warp + h, order); }
    static VT_MEMBER int scale(int warp, int g, int h, int order) { return column(warp, g, h, order); }
    static VT_MEMBER void codes(unsigned (&raw)[4][4], const char* words, int warp, int lane) {
        int k = 2 * (lane & 3), at = lane >> 2 << 2;
        const char *even = words + row(k) + at, *odd = words + row(k + 1) + at;  // eight rows further the same bits count
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned both = joined(word_at(even, (2 * s + half) * 256), word_at(odd, (2 * s + half) * 256), warp);
                raw[s][2 * half] = both;
                raw[s][2 * half + 1] = both >> 4;
            }
    }
    // Byte `which` of each word, in the low bytes of the halves.
    static VT_MEMBER unsigned joined(unsigned low, unsigned high, int which) {
#ifdef __CUDACC__
        return __byte_perm(low, high, 0x0400u + which * 0x0101u);
#else
        return (low >> 8 * which & 0xffu) | (high >> 8 * which & 0xffu) << 16;
#endif
    }
    static VT_MEMBER unsigned zero(const char* zeros, int warp, int g, int h) {
        return word_at(zeros, 4 * g) >> 4 * (2 * warp + h) & 15u;
    }
};

// Words of a format F, scales and zero points, of groups of whole stages of 64 k.
template <int KIND, class F> struct W4a16Job {
    typedef Pairs<KIND> P;
    static constexpr int OWN = 2048 + 128 + F::ZERO_BYTES;
    const char *words, *scales, *zeros;
    i64 columns;
    int chunks_a_group, zero, order;
    unsigned mask, scale[2], minus[2];

    // A thread has 16 bytes of the words of each group of columns, and 16 of scales or zero points of one.
    template <int GROUPS> struct Sender {
        const char *line[GROUPS], *beside;
        i64 step, beside_step;
        int to, beside_to, chunks_a_group;
        unsigned reciprocal;
        VT_MEMBER void send(u8* here, int chunk) const {
#pragma unroll
            for (int c = 0; c < GROUPS; ++c) copy_async(here + c * OWN + to, line[c] + chunk * step);
            if (beside != nullptr) {  // a chunk's group, exact for K < 2^22: see w4a16.cuh
                int group = chunks_a_group > 1 ? (int)((u64)reciprocal * (unsigned)chunk >> 32) : chunk;
                copy_async(here + beside_to, beside + group * beside_step);
            }
        }
    };
    template <int GROUPS, class C> VT_MEMBER Sender<GROUPS> sender(int thread, C column_of) const {
        Sender<GROUPS> s;
        s.step = columns * (CHUNK / 2), s.to = F::to(thread), s.chunks_a_group = chunks_a_group;
        s.reciprocal = chunks_a_group > 1 ? 0xffffffffu / (unsigned)chunks_a_group + 1 : 0;
        s.beside = nullptr, s.beside_step = 0;
#pragma unroll
        for (int c = 0; c < GROUPS; ++c) s.line[c] = words + F::from(column_of(c), columns, thread);
        int group = thread >> 4, vector = thread & 15;
        if (group < GROUPS) {  // eight vectors of scales, as many as there are of zero points
            if (vector < 8) {
                s.beside = scales + column_of(group) * 2 + vector * 16;
                s.beside_step = columns * 2;
            } else if (vector < 8 + F::ZERO_BYTES / 16 && zeros != nullptr) {
                s.beside = zeros + column_of(group) * F::ZERO_BYTES / COLUMNS + (vector - 8) * 16;
                s.beside_step = columns * F::ZERO_BYTES / COLUMNS;
            }
        }
        s.beside_to = group * OWN + 2048 + vector * 16;
        return s;
    }
    VT_MEMBER void begin(i64, int, int) {
        minus[0] = minus[1] = P::MINUS_BASE + (unsigned)zero * 0x10001u;
    }
    // The warp's 16 columns x 64 k, each weight rounded as w4a16.cuh has it.
    VT_MEMBER void unpack(unsigned (&a)[4][4], const char* mine, int warp, int lane) {
        F::codes(a, mine, warp, lane);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            scale[h] = *(const unsigned short*)(mine + 2048 + 2 * F::scale(warp, lane >> 2, h, order)) * 0x10001u;
            if (zeros != nullptr)
                minus[h] = P::MINUS_BASE + (F::zero(mine + 2048 + 128, warp, lane >> 2, h) + (unsigned)zero) * 0x10001u;
        }
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                a[s][r] = fma_pair<KIND>(fma_pair<KIND>((a[s][r] & mask) | P::BASE, P::ONE, minus[r & 1]), scale[r & 1], P::MINUS_ZERO);
    }
    template <int SUMS> VT_MEMBER void multiply(float (&sums)[SUMS], const unsigned (&a)[4], u64 rows) const {
        multiply_registers<KIND>(sums, a, rows, 1);
    }
    VT_MEMBER int column(int warp, int g, int h) const { return F::column(warp, g, h, order); }
    VT_MEMBER unsigned short end(float x, i64) const { return (unsigned short)pair<KIND>(x, 0.0f); }
};

template <class F, int KIND, int ROWS, int GROUPS, int LANES, int BLOCKS>
VT_FN void w4a16_loaded(const TensorMap& rows_map, i64 rows, i64 columns, i64 depth, const void* words, const void* scales,
                        const void* zeros, void* out, i64 group, i64 zero, i64 order, i64 length, i64 vectors, i64 stages,
                        u8* memory) {
    W4a16Job<KIND, F> job;
    job.words = (const char*)words, job.scales = (const char*)scales, job.zeros = (const char*)zeros;
    job.columns = columns, job.chunks_a_group = (int)(group / CHUNK), job.zero = (int)zero, job.order = (int)order;
    job.mask = 0x000f000fu + (unsigned)(depth >> 32);  // in a register, as long as the compiler cannot know: depth < 2^31
    constexpr int IN_CLUSTER = cluster_of(BLOCKS);
    int down = (int)((rows + ROWS - 1) / ROWS), cluster = (int)blockIdx.x / IN_CLUSTER, across = cluster / down;
    int rank = IN_CLUSTER == 1 ? 0 : block_of_cluster();
    LoadedWork work;
    work.first = 0, work.rows = (int)rows, work.top = (cluster - across * down) * ROWS, work.apart = down * ROWS;
    work.columns = columns, work.left = (i64)(across * IN_CLUSTER + rank) * GROUPS * COLUMNS;
    work.chunks = (int)(depth / CHUNK), work.length = (int)length, work.stages = (int)stages, work.vectors = (int)vectors;
    packed_loaded<W4a16Job<KIND, F>, ROWS, GROUPS, LANES, BLOCKS>(job, work, rows_map, (unsigned short*)out, memory);
}

// Kernels of a format in the forms of device/packed_loaded.py.
#define W4A16_LOADED_KERNELS(NAME, FORMAT, KIND)                \
    W4A16_LOADED(NAME##_64_1_1_1, FORMAT, KIND, 64, 1, 1, 1)    \
    W4A16_LOADED(NAME##_128_1_1_1, FORMAT, KIND, 128, 1, 1, 1)  \
    W4A16_LOADED(NAME##_128_2_1_1, FORMAT, KIND, 128, 2, 1, 1)

#define W4A16_LOADED(NAME, FORMAT, KIND, ROWS, GROUPS, LANES, BLOCKS)                                                     \
    extern "C" __global__ void CLUSTER_DIMS(BLOCKS) __launch_bounds__(128 + 128 * GROUPS * LANES, 1)                      \
        NAME(VT_MAP rows_map, i64 rows, i64 columns, i64 depth, const void* words, const void* scales,                    \
             const void* zeros, void* out, i64 group, i64 zero, i64 order, i64 length, i64 vectors, i64 stages) {         \
        VT_SHARED(memory);                                                                                                \
        w4a16_loaded<FORMAT, KIND, ROWS, GROUPS, LANES, BLOCKS>(rows_map, rows, columns, depth, words, scales,            \
                                                                zeros, out, group, zero, order, length, vectors,          \
                                                                stages, memory);                                          \
    }
#endif
