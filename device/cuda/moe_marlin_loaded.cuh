// Experts' products with Marlin's weights of 4 bits on Hopper, for experts of many pairs: the numbers of moe_ring.cuh, added
// up in its order. Tiles and stages: packed_loaded.cuh; rows of x are brought one by one, from where their pairs have them.
#pragma once
#include "moe_loaded.cuh"
#include "w4a16.cuh"
#include "w4a16_loaded.cuh"

#if VT_TILES

// Marlin's words, scales and zero points, as a format of w4a16_loaded.cuh.
struct MarlinTiles {
    static constexpr int ZERO_BYTES = 32;
    static VT_MEMBER i64 from(i64 n, i64 columns, int i) { return n * 8 + i / 32 * columns * 8 + i % 32 * 16; }
    static VT_MEMBER int to(int i) { return i * 16; }
    static VT_MEMBER int column(int warp, int g, int h, int) { return 16 * warp + 8 * h + g; }
    static VT_MEMBER int scale(int warp, int g, int h, int) { return 8 * g + 2 * warp + h; }
    static VT_MEMBER void codes(unsigned (&raw)[4][4], const char* words, int warp, int lane) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            unsigned w = word_at(words, s * 512 + lane * 16 + warp * 4);
            raw[s][0] = w, raw[s][1] = w >> 8, raw[s][2] = w >> 4, raw[s][3] = w >> 12;
        }
    }
    static VT_MEMBER unsigned zero(const char* zeros, int warp, int g, int h) {
        return word_at(zeros, 4 * g) >> 4 * (warp + 4 * h) & 15u;
    }
};

template <int KIND> struct MoeMarlinJob : W4a16Job<KIND, MarlinTiles> {
    static constexpr int STRIDED = TEAM;
    static constexpr bool GATHERED = true;
    const char* rows;
    Pairing own;
    const unsigned short* biases;  // of the expert
    const float* factors;
    float bias[2];

    VT_MEMBER i64 line(int row) const { return own.line(row); }
    VT_MEMBER i64 place_of(int row) const { return own.pairs[row]; }
    VT_MEMBER void begin(i64 left, int warp, int lane) {
        W4a16Job<KIND, MarlinTiles>::begin(left, warp, lane);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float y[1] = {0.0f};
            if (biases != nullptr) load(y, biases, single(left + this->column(warp, lane >> 2, h)), KIND);
            bias[h] = y[0];
        }
    }
    VT_MEMBER unsigned short end(float x, int row, bool there, i64, int h) const {
        if (biases != nullptr) x = through(x, KIND) + bias[h];
        if (factors != nullptr) x = through(x, KIND) * through(there ? factors[own.pairs[row]] : 0.0f, KIND);
        return (unsigned short)pair<KIND>(x, 0.0f);
    }
};

template <int KIND, int ROWS, int GROUPS, int LANES>
VT_FN void moe_marlin_loaded(MOE_PARAMETERS, i64 group, i64 zero, const void* words, const void* scales, const void* zeros,
                             const unsigned short* biases, i64 whole, i64 stages, u8* memory) {
    constexpr int ACROSS = GROUPS * COLUMNS;
    unsigned beside = blockIdx.x / (unsigned)count;
    i64 first = (i64)beside * ACROSS;
    const Tile tile = tile_of(blockIdx.x - beside * (unsigned)count, ids, order, tiles);
    if (left_out<KIND, ACROSS>(tile, experts, first, columns, out)) return;
    i64 groups = (unsigned)depth / (unsigned)group;
    MoeMarlinJob<KIND> job;
    job.words = (const char*)words + tile.expert * (depth * columns / 2);
    job.scales = (const char*)scales + tile.expert * groups * columns * 2;
    job.zeros = zeros == nullptr ? nullptr : (const char*)zeros + tile.expert * groups * columns / 2;
    job.columns = columns, job.chunks_a_group = (int)(group / CHUNK), job.zero = (int)zero, job.order = 0;
    job.mask = 0x000f000fu + (unsigned)(depth >> 32);  // as w4a16_loaded.cuh has it
    job.rows = (const char*)x, job.own = pairing(tile, choices, depth, memory), job.factors = factors;
    job.biases = biases == nullptr ? nullptr : biases + tile.expert * columns;
    LoadedWork work = tile_work<ROWS, 1>(tile, columns, first, depth, stages, whole);
    TensorMap none;
    packed_loaded<MoeMarlinJob<KIND>, ROWS, GROUPS, LANES, 1>(job, work, none, (unsigned short*)out, memory + ROWS * 4);
}

#define MOE_MARLIN_LOADED(NAME, KIND, ROWS, GROUPS, LANES)                                                                 \
    extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS * LANES, 1)                                           \
        NAME(MOE_PARAMETERS, i64 group, i64 zero, const void* words, const void* scales, const void* zeros,               \
             const unsigned short* biases, i64 whole, i64 stages) {                                                       \
        VT_SHARED(memory);                                                                                                \
        moe_marlin_loaded<KIND, ROWS, GROUPS, LANES>(MOE_NAMES, group, zero, words, scales, zeros, biases, whole, stages,  \
                                                     memory);                                                             \
    }
#endif
