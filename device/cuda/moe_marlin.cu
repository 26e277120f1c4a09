// Experts' products with weights in Marlin's layouts, of 4 and 8 bits: moe_packed.cuh, operands as w4a16.cuh has them.
#include "moe_marlin_loaded.cuh"
#include "moe_marlin_ring.cuh"

template <int KIND_, int BITS> struct Marlin {
    static constexpr int KIND = KIND_, ACROSS = 64, DEEP = 64, STEPS = 4, EACH = 1, HALVES = BITS / 4;
    i64 columns, depth, group, bias_of_type;
    const char *words, *scales, *zeros;
    const unsigned short *single_scales, *biases;
    const int* perms;

    const char *word, *scale, *zero;  // this lane's of the expert
    const int* perm;
    int lane, own_k;
    uint4 codes[4][HALVES], ahead[4][HALVES];
    Group<KIND, MarlinWords<BITS>> own;

    VT_MEMBER void open(int expert, i64 first, int lane_) {
        lane = lane_, own_k = 2 * (lane & 3);
        i64 groups = depth / group;
        word = words + (i64)expert * (depth * columns * BITS / 8) + MarlinWords<BITS>::from(first, columns, lane);
        scale = scales + ((i64)expert * groups * columns + first) * 2;
        zero = zeros + ((i64)expert * groups * columns + first) / 2;
        perm = perms == nullptr ? nullptr : perms + expert * depth;
        own.clear((int)bias_of_type);
    }
    VT_MEMBER void fetch(int turn) {
        bool there = (i64)turn * DEEP < depth;
        i64 quarter = MarlinWords<BITS>::quarter(columns);
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
                ahead[s][h] = there ? *(const uint4*)(word + (turn * 4ll + s) * quarter + h * 16) : uint4{0u, 0u, 0u, 0u};
    }
    VT_MEMBER void take() {
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int h = 0; h < HALVES; ++h) codes[s][h] = ahead[s][h];
    }
    // The group's scales and zero points, where another one begins.
    VT_MEMBER void step(int turn, int s) {
        unsigned k = (unsigned)(turn * DEEP + 16 * s), size = (unsigned)group;
        if (s != 0 && k % size != 0) return;
        i64 g = k / size * columns;
        own.take(scale + g * 2, zero + g / 2, scales != nullptr, zeros != nullptr, (int)bias_of_type, 0, lane);
    }
    VT_MEMBER void left(unsigned (&a)[1][4], int t, int s) const {
        unsigned raw[4];
        if constexpr (BITS == 4) {
            const uint4& q = codes[s][0];
            unsigned w = t == 0 ? q.x : t == 1 ? q.y : t == 2 ? q.z : q.w;
            raw[0] = w, raw[2] = w >> 4, raw[1] = w >> 8, raw[3] = w >> 12;
        } else {
            const uint4& q = codes[s][t / 2];
            unsigned low = t & 1 ? q.z : q.x, high = t & 1 ? q.w : q.y;
            raw[0] = low, raw[2] = low >> 8, raw[1] = high, raw[3] = high >> 8;
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) a[0][r] = own.weights(raw[r], 2 * t + (r & 1), (int)bias_of_type);
    }
    VT_MEMBER unsigned element(const char* row, i64 k) const {
        int from = perm[k];  // an index that there is not is the first
        return *(const unsigned short*)(row + 2ll * ((unsigned)from < (unsigned)depth ? from : 0));
    }
    VT_MEMBER void right(unsigned (&b)[2], const char* row, int turn, int s) const {
        i64 k = (i64)turn * DEEP + 16 * s + own_k;
#pragma unroll
        for (int h = 0; h < 2; ++h, k += 8)
            b[h] = perm == nullptr ? *(const unsigned*)(row + k * 2) : element(row, k) | element(row, k + 1) << 16;
    }
    VT_MEMBER float end(float x, int expert, i64 n, const float* factors, int pair) const {
        float y[1];
        if (single_scales != nullptr) {
            load(y, single_scales, expert * columns + single(n), KIND);
            x = (BITS == 4 ? through(x, KIND) : x) * y[0];
        }
        if (biases != nullptr) {
            load(y, biases, expert * columns + single(n), KIND);
            x = through(x, KIND) + y[0];
        }
        return factors == nullptr ? x : through(x, KIND) * through(factors[pair], KIND);
    }
};

#define MOE_MARLIN(NAME, KIND, BITS, EIGHTS)                                                                          \
    extern "C" __global__ void __launch_bounds__(TEAM * 32, 2)                                                        \
        NAME(MOE_PARAMETERS, i64 group, i64 bias_of_type, const char* words, const char* scales, const char* zeros,   \
             const unsigned short* single_scales, const unsigned short* biases, const int* perms) {                  \
        Marlin<KIND, BITS> weights;                                                                                  \
        weights.columns = columns, weights.depth = depth, weights.group = group, weights.bias_of_type = bias_of_type; \
        weights.words = words, weights.scales = scales, weights.zeros = zeros;                                       \
        weights.single_scales = single_scales, weights.biases = biases, weights.perms = perms;                       \
        moe_packed<KIND, EIGHTS>(weights, MOE_NAMES);                                                                \
    }
// Without an order of rows, in groups of whole turns or one group.
#define MOE_MARLIN_RING(NAME, KIND, BITS, EIGHTS, STAGES, BLOCKS)                                                    \
    extern "C" __global__ void __launch_bounds__(TEAM * 32, BLOCKS)                                                   \
        NAME(MOE_PARAMETERS, i64 group, i64 bias_of_type, const char* words, const char* scales, const char* zeros,   \
             const unsigned short* single_scales, const unsigned short* biases) {                                    \
        Marlin<KIND, BITS> weights;                                                                                  \
        weights.columns = columns, weights.single_scales = single_scales, weights.biases = biases;                   \
        moe_marlin_ring<KIND, BITS, EIGHTS, STAGES>(weights, MOE_NAMES, group, bias_of_type, words, scales, zeros);   \
    }
#define MOE_MARLIN_RINGS(NAME, KIND, BITS)                     \
    MOE_MARLIN_RING(NAME##_ring_8, KIND, BITS, 1, 4, 4)        \
    MOE_MARLIN_RING(NAME##_ring_16, KIND, BITS, 2, 4, 3)       \
    MOE_MARLIN_RING(NAME##_ring_32, KIND, BITS, 4, 3, 2)
MOE_MARLIN_RINGS(moe_marlin_4_bf16, BF16, 4)
MOE_MARLIN_RINGS(moe_marlin_4_f16, F16, 4)
MOE_MARLIN_RINGS(moe_marlin_8_bf16, BF16, 8)
MOE_MARLIN_RINGS(moe_marlin_8_f16, F16, 8)
MOE_MARLIN(moe_marlin_4_bf16_16, BF16, 4, 2)
MOE_MARLIN(moe_marlin_4_bf16_32, BF16, 4, 4)
MOE_MARLIN(moe_marlin_4_f16_16, F16, 4, 2)
MOE_MARLIN(moe_marlin_4_f16_32, F16, 4, 4)
MOE_MARLIN(moe_marlin_8_bf16_16, BF16, 8, 2)
MOE_MARLIN(moe_marlin_8_bf16_32, BF16, 8, 4)
MOE_MARLIN(moe_marlin_8_f16_16, F16, 8, 2)
MOE_MARLIN(moe_marlin_8_f16_32, F16, 8, 4)

#if VT_TILES
MOE_MARLIN_LOADED(moe_marlin_4_bf16_loaded_64_2_1_1, BF16, 64, 2, 1)
MOE_MARLIN_LOADED(moe_marlin_4_bf16_loaded_128_2_1_1, BF16, 128, 2, 1)
MOE_MARLIN_LOADED(moe_marlin_4_f16_loaded_64_2_1_1, F16, 64, 2, 1)
MOE_MARLIN_LOADED(moe_marlin_4_f16_loaded_128_2_1_1, F16, 128, 2, 1)
#endif
