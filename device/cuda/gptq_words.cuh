// GPTQ's words as operands of w4a16.cuh: in sequence and as exllama shuffles them, each with as few instructions as it takes.
#pragma once
#include "packed_words.cuh"

// A code's neighbour along K lies 16 bits further, so one shift brings a lane its pair.
struct ShuffledWords : GptqWords {
    static VT_MEMBER void codes(unsigned (&raw)[4][4], const char* shared, int s, int lane, int) {
        int shift = 4 * (lane & 3);
        const char* mine = shared + (lane >> 2) * 32 + s * 512;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int t = 0; t < 4; t += 2) {
                uint4 q = words_at(mine, half * 256 + t * 8);
                const unsigned w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (int p = 0; p < 4; ++p) raw[t + p / 2][2 * half + p % 2] = w[p] >> shift;
            }
    }
};

// A lane's pair is a byte, whose upper code a product moves to bit 16.
struct SequenceWords : GptqWords {
    static VT_MEMBER unsigned byte_of(unsigned w, unsigned which) {
#ifdef __CUDACC__
        return __byte_perm(w, 0u, 0x4440u | which);
#else
        return w >> 8 * which & 0xffu;
#endif
    }
    static VT_MEMBER void codes(unsigned (&raw)[4][4], const char* shared, int s, int lane, int) {
        unsigned which = lane & 3;
        const char* mine = shared + (lane >> 2) * 32 + s * 512;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int t = 0; t < 4; t += 2) {
                uint4 q = words_at(mine, half * 256 + t * 8);
                const unsigned w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (int p = 0; p < 4; ++p) raw[t + p / 2][2 * half + p % 2] = byte_of(w[p], which) * 0x1001u;
            }
    }
};
