// Experts' products with bytes of codes of 4 bits along K on Hopper, for experts of many pairs: the numbers of moe_ring.cuh,
// added up in its order. Tiles and stages: moe_loaded.cuh.
//
// A lane has 32 neighbouring k of 128, as in moe_wna16.cu, so rows of x are put in the order of its instructions first.
#pragma once
#include "moe_loaded.cuh"
#include "strided_rows.cuh"

extern "C" __global__ void __launch_bounds__(256) moe_wna16_rows(i64 count, const uint4* x, uint4* out) {
    strided_rows(count, x, out);
}

#if VT_TILES

#ifdef __CUDACC__
// Eight bytes on their way, as `copy_async`.
VT_FN void copy_eight(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
#else
static inline void copy_eight(void* shared, const void* global) { std::memcpy(shared, global, 8); }
#endif

// Stages are halves of 128 k: steps 2 c and 2 c + 1 of all lanes. Scales and zero points come from memory a turn ahead.
template <int KIND> struct MoeBytesJob {
    typedef Pairs<KIND> P;
    static constexpr int OWN = 2048, RUN = 2;
    const char *all_words, *words;  // of all experts, and of one
    const unsigned short *all_scales, *scales;
    const unsigned char *all_zeros, *zeros;
    i64 columns, depth;
    int group, groups, turns;
    unsigned mask;
    // Of this lane's columns.
    i64 at_scale[2], at_zero[2];
    int turn, half, odd;
    unsigned scale[2], zero[2], scale_ahead[2], zero_ahead[2];

    template <int GROUPS> struct Sender {
        const char* line[GROUPS];
        i64 apart;
        int to;
        VT_MEMBER int bytes() const { return 0; }
        VT_MEMBER void send(u8* here, int chunk) const {
            int along = (chunk >> 1) * 64 + (chunk & 1) * 8;
#pragma unroll
            for (int c = 0; c < GROUPS; ++c) {
                copy_eight(here + c * OWN + to, line[c] + along);
                copy_eight(here + c * OWN + to + 1024, line[c] + apart + along);
            }
        }
    };
    template <int GROUPS, class C> VT_MEMBER Sender<GROUPS> sender(int thread, C column_of) const {
        Sender<GROUPS> s;
        s.to = thread * 8, s.apart = 32 * (depth / 2);
#pragma unroll
        for (int c = 0; c < GROUPS; ++c) s.line[c] = words + (column_of(c) + thread / 4) * (depth / 2) + thread % 4 * 16;
        return s;
    }
    VT_MEMBER void take(int expert) {
        words = all_words + expert * (columns * depth / 2), scales = all_scales + expert * columns * groups;
        zeros = all_zeros == nullptr ? nullptr : all_zeros + expert * (columns / 2) * groups;
    }
    VT_MEMBER int column(int warp, int g, int h) const { return 16 * warp + 8 * h + g; }
    VT_MEMBER void fetch() {
        int g = turn * 128 / group;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            scale_ahead[h] = scales[at_scale[h] + g];
            zero_ahead[h] = zeros != nullptr ? zeros[at_zero[h] + g] : 0u;
        }
    }
    VT_MEMBER void begin(i64 left, int warp, int lane) {
        odd = lane >> 2 & 1, turn = 0, half = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            i64 n = left + column(warp, lane >> 2, h);
            at_scale[h] = n * groups, at_zero[h] = n / 2 * groups;
        }
        fetch();
    }
    VT_MEMBER void unpack(unsigned (&a)[4][4], const char* mine, int warp, int lane) {
        if (half == 0) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                unsigned z = zeros == nullptr ? 8u : zero_ahead[h] >> 4 * odd & 15u;
                scale[h] = scale_ahead[h] * 0x10001u, zero[h] = P::MINUS_BASE + z * 0x10001u;
            }
            turn = turn + TEAM < turns ? turn + TEAM : turn % TEAM + 1;  // chain after chain
            if (turn < turns) fetch();
        }
        half ^= 1;
        uint2 q[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) q[h] = *(const uint2*)(mine + column(warp, lane >> 2, h) * 32 + (lane & 3) * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                unsigned w = i & 2 ? q[r & 1].y : q[r & 1].x;
                unsigned raw = w >> (8 * (i & 1) + 4 * (r >> 1));
                a[i][r] = fma_pair<KIND>(fma_pair<KIND>((raw & mask) | P::BASE, P::ONE, zero[r & 1]), scale[r & 1], P::MINUS_ZERO);
            }
    }
    VT_MEMBER unsigned short end(float x, bool weighted, float factor, int) const {
        return (unsigned short)pair<KIND>(weighted ? x * factor : x, 0.0f);
    }
};

template <int KIND, int ROWS, int GROUPS>
VT_FN void moe_wna16_loaded(MOE_PARAMETERS, i64 group, const unsigned char* words, const unsigned short* scales,
                            const unsigned char* zeros, i64 whole, i64 stages, i64 blocks, u8* memory) {
    MoeBytesJob<KIND> job;
    job.all_words = (const char*)words, job.all_scales = scales, job.all_zeros = zeros;
    job.columns = columns, job.depth = depth, job.group = (int)group, job.groups = (int)((unsigned)depth / (unsigned)group);
    job.turns = (int)(depth / 128);
    job.mask = 0x000f000fu + (unsigned)(depth >> 32);  // as w4a16_loaded.cuh has it
    moe_loaded<MoeBytesJob<KIND>, KIND, ROWS, GROUPS>(job, MOE_NAMES, whole, stages, blocks, memory);
}

#define MOE_WNA16_LOADED(NAME, KIND, ROWS, GROUPS)                                                                         \
    extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS, 1)                                                   \
        NAME(MOE_PARAMETERS, i64 group, const unsigned char* words, const unsigned short* scales,                         \
             const unsigned char* zeros, i64 whole, i64 stages, i64 blocks) {                                                         \
        VT_SHARED(memory);                                                                                                \
        moe_wna16_loaded<KIND, ROWS, GROUPS>(MOE_NAMES, group, words, scales, zeros, whole, stages, blocks, memory);              \
    }
#endif
