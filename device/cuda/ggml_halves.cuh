// Codes of ggml's blocks as the left operand of products of float16 by the group of four warps.
//
// Integers up to 2048 are float16s, their products with codes of eight bits and sums of these below 2^24 are float32s: a
// unit of 32 is two products over 16 k, exactly, and leaves the tensor cores as float32. Any order of k within a unit
// does, as long as activations have it, too (`half_place`).
#pragma once
#include "ggml_fragments.cuh"

// Element k of a unit of 32, or element t, of unit u, of a lane of sums: product k / 16, pairs of neighbours (e, e + 2).
//   half_place: which of the 16 of its product it is, for t = 0 ... 3 and e = 0 ... 3
VT_FN constexpr int half_place(int t, int e) { return 2 * t + e / 2 + 8 * (e % 2); }

// A word as it comes out of shared memory, in halves where it lies at even addresses alone: nothing waits for it yet.
template <int ALIGNED> struct Coming {
    unsigned low, high;
    VT_MEMBER void fetch(const u8* p) {
        if constexpr (ALIGNED == 2) low = half_at(p), high = half_at(p + 2);
        else low = *(const unsigned*)p;
    }
    VT_MEMBER unsigned word() const {
        if constexpr (ALIGNED == 2) return low | high << 16;
        return low;
    }
};

// A row's unit of 32: its scale, its minimum and its codes, on their way and then in pairs for both products, those of
// even places and those of odd ones.
template <int TYPE> struct UnitHalves {
    static constexpr int ALIGNED = Block<TYPE>::ALIGNED;
    static constexpr bool MINIMUM = Block<TYPE>::MINIMUM, FIVE = TYPE == Q5_0 || TYPE == Q5_1;
    Coming<ALIGNED> codes[2], fives;
    unsigned head;

    VT_MEMBER void fetch(const u8* p, int t) {
        head = MINIMUM ? *(const unsigned*)p : half_at(p);
        codes[0].fetch(p + 2 + 2 * MINIMUM + 4 * FIVE + 4 * t);
        if constexpr (TYPE == Q8_0) codes[1].fetch(p + 18 + 4 * t);
        if constexpr (FIVE) fives.fetch(p + 2 + 2 * MINIMUM);
    }
    VT_MEMBER void take_apart(unsigned (&h)[4], float& d, float& m, int t) const {
        d = widen_f16(head & 0xffffu);
        m = MINIMUM ? widen_f16(head >> 16) : 0.0f;
        if constexpr (TYPE == Q8_0) {
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                unsigned w = codes[s].word();
                h[2 * s] = pair_less(bits_against(w, 0x00ff00ffu, 0x64806480u), 0x64806480u);
                h[2 * s + 1] = pair_less(bits_against(w >> 8, 0x00ff00ffu, 0x64806480u), 0x64806480u);
            }
        } else {
            unsigned four = codes[0].word(), rest = four >> 8;
            h[0] = bits_onto(four, 0x000f000fu, THOUSAND);
            h[1] = bits_onto(rest, 0x000f000fu, THOUSAND);
            h[2] = bits_onto(four, 0x00f000f0u, THOUSAND);
            h[3] = bits_onto(rest, 0x00f000f0u, THOUSAND);
            if constexpr (FIVE) {  // on top of the lower codes 16, of the upper ones 256
                unsigned fifth = fives.word() >> 4 * t, low = spread4(fifth), high = spread4(fifth >> 16);
                h[0] += (low & 0x00010001u) << 4, h[2] += (high & 0x00010001u) << 8;
                h[1] += (low >> 8 & 0x00010001u) << 4;
                h[3] += (high >> 8 & 0x00010001u) << 8;
            }
            constexpr unsigned OFFSET = TYPE == Q4_0 ? 0x64086408u : TYPE == Q5_0 ? 0x64106410u : THOUSAND;  // 1024 and that
            constexpr unsigned UPPER = TYPE == Q4_0 ? 0xd480d480u : TYPE == Q5_0 ? 0xd500d500u : 0xd400d400u;  // -64, less it
            h[0] = pair_less(h[0], OFFSET), h[1] = pair_less(h[1], OFFSET);
            h[2] = pair_times_plus(h[2], 0x2c002c00u, UPPER), h[3] = pair_times_plus(h[3], 0x2c002c00u, UPPER);
        }
    }
};
