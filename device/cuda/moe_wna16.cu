// Experts' products with bytes of codes along K, of 4 and 8 bits: moe_ring.cuh.
//
// Lane l has, of columns g and g + 8 of each sixteen (g = l / 4), 32 neighbouring k of the turn's 128, from 32 (l % 4) on.
// Instructions take their k in another order than memory has them, rows of x in the same: of eight k, pair i is k = i and
// i + 4, which a mask takes out of a word of 4 bits, and one permutation out of two words of 8.
#include "moe_ring.cuh"
#include "moe_wna16_loaded.cuh"

template <int KIND, int BITS> struct Bytes {
    static constexpr int ACROSS = 32, DEEP = 128, STEPS = 4, HALVES = BITS / 4, OWN = 32;
    static constexpr bool WHOLE = false;
    i64 columns, depth, group;
    const unsigned char *words, *zeros;
    const unsigned short* scales;

    // Of each of this lane's columns: where they lie, codes of two steps, factors of the turn and of the next one.
    const unsigned char *line[4], *zeros_of;
    const unsigned short* scales_of;
    unsigned at_scale[4], at_zero[4];
    int lane, odd, left_ahead;  // k from this lane's of the turn that is sent for next on
    unsigned mask;
    Quotient owns_a_group;
    uint2 codes[4];
    unsigned scale[4], zero[4], scale_ahead[4], zero_ahead[4];

    VT_MEMBER void open(int expert, i64 first, int lane_, int warp) {
        lane = lane_, odd = lane >> 2 & 1, left_ahead = (int)depth - warp * DEEP - OWN * (lane & 3);
        i64 groups = (unsigned)depth / (unsigned)group;
        owns_a_group.set((unsigned)(group / OWN));
        mask = (BITS == 4 ? 0x000f000fu : 0x00ff00ffu) + (unsigned)(depth >> 32);  // in a register: depth < 2^31, whatever the compiler knows
        scales_of = scales + expert * columns * groups, zeros_of = zeros + expert * (columns * BITS / 8) * groups;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            i64 n = first + 8 * c + (lane >> 2);
            if (n >= columns) n = columns - 1;
            line[c] = words + (expert * columns + n) * (depth * BITS / 8) + (warp * DEEP + OWN * (lane & 3)) * BITS / 8;
            at_scale[c] = (unsigned)n * (unsigned)groups;
            at_zero[c] = (unsigned)(BITS == 4 ? n / 2 : n) * (unsigned)groups;
        }
        fetch(warp);
    }
    static VT_MEMBER int own() { return 4 * HALVES * 512; }
    static VT_MEMBER int place(int row, int vector) { return vector ^ vector >> 3 ^ (row & 1) << 1; }  // eight lanes meet in no bank
    static VT_MEMBER bool small() { return false; }
    // A lane without k has weights of zero.
    VT_MEMBER void fetch(int turn) {
        int own = turn * (DEEP / OWN) + (lane & 3);
        bool there = own < (int)depth / OWN;
        unsigned g = there ? owns_a_group.of(own) : 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            scale_ahead[c] = there ? scales_of[at_scale[c] + g] : 0u;
            zero_ahead[c] = there && zeros != nullptr ? zeros_of[at_zero[c] + g] : 0u;
        }
    }
    VT_MEMBER void send(char* mine) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
                copy_or_zero(mine + (c * HALVES + h) * 512 + lane * 16, line[c] + 16 * h, left_ahead > 0);
            line[c] += TEAM * DEEP * BITS / 8;
        }
        left_ahead -= TEAM * DEEP;
    }
    template <bool> VT_MEMBER void begin(const char*, int turn) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            scale[c] = scale_ahead[c] * 0x10001u;
            int z = zeros == nullptr ? 1 << (BITS - 1) : BITS == 4 ? (int)(zero_ahead[c] >> 4 * odd & 15u) : (int)zero_ahead[c];
            if constexpr (BITS == 8 && KIND == BF16) zero[c] = pair<KIND>((float)(128 - z), (float)(128 - z));
            else zero[c] = Pairs<KIND>::MINUS_BASE + (unsigned)z * 0x10001u;
        }
        fetch(turn + TEAM);
    }
    template <bool> VT_MEMBER void step(const char* mine, int s) {
        if (BITS == 4 && s % 2) return;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const char* own_codes = mine + c * HALVES * 512 + lane * 16;
            codes[c] = *(const uint2*)(own_codes + (BITS == 4 ? 4 * s : s / 2 * 512 + s % 2 * 8));
        }
    }
    // Pair i of the eight k of step s: k = i and i + 4.
    VT_MEMBER unsigned raw(int c, int s, int i) const {
        const uint2& q = codes[c];
        if constexpr (BITS == 4) {
            unsigned w = s & 1 ? q.y : q.x;
            return w >> 4 * i & mask;
        } else {
            return (i == 0 ? pick<0x0400>(q.x, q.y) : i == 1 ? pick<0x0501>(q.x, q.y)
                    : i == 2 ? pick<0x0602>(q.x, q.y) : pick<0x0703>(q.x, q.y)) & mask;
        }
    }
    VT_MEMBER unsigned weight(int c, int s, int i) const {
        typedef Pairs<KIND> N;
        unsigned q = raw(c, s, i), value;
        if constexpr (BITS == 8 && KIND == BF16) {  // seven bits of the code fit: less 128 or, where the eighth is not set, 256
            value = fma_pair<KIND>((q & 0x007f007fu) | N::BASE, N::ONE, (q & 0x00800080u) ^ 0xc380c380u);
            value = fma_pair<KIND>(value, N::ONE, zero[c]);
        } else {
            value = fma_pair<KIND>(q | N::BASE, N::ONE, zero[c]);
        }
        return fma_pair<KIND>(value, scale[c], N::MINUS_ZERO);
    }
    template <bool> VT_MEMBER void left(unsigned (&a)[2][4], const char*, int t, int s) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[i][0] = weight(2 * t, s, 2 * i), a[i][1] = weight(2 * t + 1, s, 2 * i);
            a[i][2] = weight(2 * t, s, 2 * i + 1), a[i][3] = weight(2 * t + 1, s, 2 * i + 1);
        }
    }
    VT_MEMBER void right(unsigned (&b)[4], const char* rows, int e, int s) const {
        int row = 8 * e + (lane >> 2);
        uint4 y = words_at(rows, row * (DEEP * 2) + place(row, 4 * (lane & 3) + s) * 16);
        b[0] = pick<0x5410>(y.x, y.z), b[1] = pick<0x7632>(y.x, y.z);
        b[2] = pick<0x5410>(y.y, y.w), b[3] = pick<0x7632>(y.y, y.w);
    }
    VT_MEMBER float end(float total, int, i64, const float* factors, int pair) const {
        return factors == nullptr ? total : total * factors[pair];
    }
};

#define MOE_WNA16(NAME, KIND, BITS, EIGHTS, STAGES, BLOCKS)                                                              \
    extern "C" __global__ void __launch_bounds__(TEAM * 32, BLOCKS) NAME(MOE_PARAMETERS, i64 group, const unsigned char* words, \
                                                                 const unsigned short* scales, const unsigned char* zeros) { \
        Bytes<KIND, BITS> weights;                                                                               \
        weights.columns = columns, weights.depth = depth, weights.group = group;                                 \
        weights.words = words, weights.scales = scales, weights.zeros = zeros;                                   \
        moe_ring<KIND, EIGHTS, STAGES>(weights, MOE_NAMES);                                                      \
    }
#define MOE_WNA16_RINGS(NAME, KIND, BITS)             \
    MOE_WNA16(NAME##_8, KIND, BITS, 1, 2, 4)          \
    MOE_WNA16(NAME##_16, KIND, BITS, 2, 2, 3)         \
    MOE_WNA16(NAME##_32, KIND, BITS, 4, 2, 2)
MOE_WNA16_RINGS(moe_wna16_4_bf16, BF16, 4)
MOE_WNA16_RINGS(moe_wna16_4_f16, F16, 4)
MOE_WNA16_RINGS(moe_wna16_8_bf16, BF16, 8)
MOE_WNA16_RINGS(moe_wna16_8_f16, F16, 8)

#if VT_TILES
MOE_WNA16_LOADED(moe_wna16_4_bf16_loaded_64_3, BF16, 64, 3)
MOE_WNA16_LOADED(moe_wna16_4_bf16_loaded_128_2, BF16, 128, 2)
MOE_WNA16_LOADED(moe_wna16_4_f16_loaded_64_3, F16, 64, 3)
MOE_WNA16_LOADED(moe_wna16_4_f16_loaded_128_2, F16, 128, 2)
#endif
