// Halves of the i-quants' blocks that lanes meet (ggml_lanes.cuh): one permutation makes bytes of four of their values.
#pragma once
#include "ggml_lanes.cuh"
#include "ggml_sign_tables.cuh"

template <int TYPE> struct MetSigns {
    static constexpr int TABLES = TABLE_BYTES, SCALE = 0;
    static constexpr float UNIT = 1.0f;
    Tables tables;
    unsigned entry;
    static VT_MEMBER u8* place(u8* memory) {
#ifdef __CUDACC__
        return memory + ((TABLES_AT - ring_address(memory)) & 0xffff);
#else
        return memory;
#endif
    }
    VT_MEMBER void ask() {
        if (threadIdx.x < 512) entry = entry_of<TYPE>(threadIdx.x);
    }
    VT_MEMBER void fill(u8* at, int warp) { fill_tables<TYPE>(at, warp, MEETERS - 1, entry); }
    VT_MEMBER void begin(u8* at, int blocks) { tables = tables_of(at, blocks); }
    VT_MEMBER int operator()(const u8* p, int half, const Activations& a) const {
        const EvenWords words(p + 2 + 32 * half), beneath = words.further(64 - 16 * half);
        int total = 0;
#pragma unroll
        for (int u = 0; u < 4; ++u) {  // of 32
            unsigned low = words[2 * u], high = words[2 * u + 1], v[8];
            unsigned beside = TYPE == IQ2_XXS ? high : beneath[u];
            if (TYPE == IQ2_XXS) high = low;
            eight_values<TYPE, 0>(v[0], v[1], tables, low, beside);
            eight_values<TYPE, 1>(v[2], v[3], tables, low, beside);
            eight_values<TYPE, 2>(v[4], v[5], tables, high, beside);
            eight_values<TYPE, 3>(v[6], v[7], tables, high, beside);
            int sum = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) sum = dot4(v[i], a.x[8 * u + i], sum);
            total += (int)(beside >> 27 | 1) * sum;
        }
        return total;
    }
};
template <> struct Met<IQ2_XXS> : MetSigns<IQ2_XXS> {};
template <> struct Met<IQ3_XXS> : MetSigns<IQ3_XXS> {};
