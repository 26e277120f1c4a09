// Experts' products with Marlin's weights of 4 bits on Hopper, for experts of many pairs: the numbers of moe_ring.cuh, added
// up in its order. Tiles and stages: moe_loaded.cuh.
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
    static constexpr int RUN = 1;
    // Of all experts: bytes of words, of scales and of zero points from one to the next.
    const char *all_words, *all_scales, *all_zeros;
    i64 words_apart, scales_apart, zeros_apart;
    const unsigned short* all_biases;
    int expert;
    float bias[2];

    VT_MEMBER void take(int which) {
        expert = which;
        this->words = all_words + which * words_apart, this->scales = all_scales + which * scales_apart;
        this->zeros = all_zeros == nullptr ? nullptr : all_zeros + which * zeros_apart;
    }
    VT_MEMBER void begin(i64 left, int warp, int lane) {
        W4a16Job<KIND, MarlinTiles>::begin(left, warp, lane);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float y[1] = {0.0f};
            if (all_biases != nullptr)
                load(y, all_biases, single(expert * this->columns + left + this->column(warp, lane >> 2, h)), KIND);
            bias[h] = y[0];
        }
    }
    VT_MEMBER unsigned short end(float x, bool weighted, float factor, int h) const {
        if (all_biases != nullptr) x = through(x, KIND) + bias[h];
        if (weighted) x = through(x, KIND) * through(factor, KIND);
        return (unsigned short)pair<KIND>(x, 0.0f);
    }
};

template <int KIND, int ROWS, int GROUPS>
VT_FN void moe_marlin_loaded(MOE_PARAMETERS, i64 group, i64 zero, const void* words, const void* scales, const void* zeros,
                             const unsigned short* biases, i64 whole, i64 stages, i64 blocks, u8* memory) {
    i64 groups = (unsigned)depth / (unsigned)group;
    MoeMarlinJob<KIND> job;
    job.all_words = (const char*)words, job.words_apart = depth * columns / 2;
    job.all_scales = (const char*)scales, job.scales_apart = groups * columns * 2;
    job.all_zeros = (const char*)zeros, job.zeros_apart = groups * columns / 2;
    job.all_biases = biases;
    job.columns = columns, job.chunks_a_group = (int)(group / CHUNK), job.zero = (int)zero, job.order = 0;
    job.mask = 0x000f000fu + (unsigned)(depth >> 32);  // as w4a16_loaded.cuh has it
    moe_loaded<MoeMarlinJob<KIND>, KIND, ROWS, GROUPS>(job, MOE_NAMES, whole, stages, blocks, memory);
}

#define MOE_MARLIN_LOADED(NAME, KIND, ROWS, GROUPS)                                                                        \
    extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS, 1)                                                   \
        NAME(MOE_PARAMETERS, i64 group, i64 zero, const void* words, const void* scales, const void* zeros,               \
             const unsigned short* biases, i64 whole, i64 stages, i64 blocks) {                                                       \
        VT_SHARED(memory);                                                                                                \
        moe_marlin_loaded<KIND, ROWS, GROUPS>(MOE_NAMES, group, zero, words, scales, zeros, biases, whole, stages, blocks, memory); \
    }
#endif
