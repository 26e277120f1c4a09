// Experts' products with weights in Marlin's layouts, of 4 and 8 bits: moe_ring.cuh, operands as w4a16.cuh has them.
#include "moe_marlin_loaded.cuh"
#include "moe_ring.cuh"

// Rows of x in the order of their experts' rows, one for each pair: out[p, k] = x[row of p, perm[k]], eight a thread.
extern "C" __global__ void __launch_bounds__(256)
    moe_marlin_rows(i64 count, i64 choices, i64 experts, i64 depth, const unsigned short* x, const int* ids, const int* perms, uint4* out) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    i64 pair = at / (depth / 8), k = (at - pair * (depth / 8)) * 8;
    int expert = ids[pair];
    if (expert < 0 || expert >= experts) return;
    const unsigned short* row = x + pair / choices * depth;
    const int* from = perms + expert * depth + k;
    unsigned both[4];
    auto element = [&](int j) {  // an index that there is not is the first
        int i = from[j];
        return (unsigned)row[(unsigned)i < (unsigned)depth ? i : 0];
    };
#pragma unroll
    for (int j = 0; j < 4; ++j) both[j] = element(2 * j) | element(2 * j + 1) << 16;
    out[at] = {both[0], both[1], both[2], both[3]};
}

template <int KIND, int BITS> struct Marlin {
    typedef MarlinWords<BITS> W;
    static constexpr int ACROSS = COLUMNS, DEEP = CHUNK, STEPS = 2, HALVES = BITS / 4, BESIDE = 128 + 32;
    static constexpr bool WHOLE = true;
    i64 columns, depth, group, bias_of_type;
    const char *words, *scales, *zeros;
    const unsigned short *single_scales, *biases;

    const char *word, *factor;  // this lane's of the expert, of the turn that is sent for next
    i64 factor_step;
    int lane, groups, turn_ahead;  // groups of a turn
    Quotient turns_a_group;
    uint4 codes[2][HALVES];
    Group<KIND, W> of;

    VT_MEMBER void open(int expert, i64 first, int lane_, int warp) {
        lane = lane_, groups = group < CHUNK ? CHUNK / (int)group : 1, turn_ahead = warp;
        turns_a_group.set(group < CHUNK ? 1u : (unsigned)(group / CHUNK));
        i64 place = (i64)expert * ((unsigned)depth / (unsigned)group) * columns + first;
        bool at_zeros = lane >= 8, there = at_zeros ? zeros != nullptr && lane < 10 : scales != nullptr;
        word = words + (i64)expert * (depth * columns * BITS / 8) + W::from(first, columns, lane) + warp * 4ll * W::quarter(columns);
        factor = !there ? nullptr : at_zeros ? zeros + place / 2 + (lane - 8) * 16 : scales + place * 2 + lane * 16;
        factor_step = at_zeros ? columns / 2 : columns * 2;
        of.clear((int)bias_of_type);
        of.mask += (unsigned)(depth >> 32);  // in a register, as long as the compiler cannot know: depth < 2^31
    }
    VT_MEMBER int own() const { return W::BYTES + groups * BESIDE; }
    static VT_MEMBER int place(int row, int vector) { return vector ^ (row & 7); }
    VT_MEMBER bool small() const { return groups > 1; }
    VT_MEMBER void send(char* mine) {
        i64 quarter = W::quarter(columns);
        const char* from = word;
#pragma unroll
        for (int s = 0; s < 4; ++s, from += quarter)
#pragma unroll
            for (int h = 0; h < HALVES; ++h) copy_async(mine + (s * HALVES + h) * 512 + lane * 16, from + h * 16);
        if (factor != nullptr) {
            const char* beside = factor + turns_a_group.of(turn_ahead) * groups * factor_step;
            copy_async(mine + W::BYTES + lane * 16, beside);
#pragma unroll 1
            for (int each = 1; each < groups; ++each)
                copy_async(mine + W::BYTES + each * BESIDE + lane * 16, beside += factor_step);
        }
        word += TEAM * 4 * quarter, turn_ahead += TEAM;
    }
    VT_MEMBER void take(const char* mine, int which) {
        const char* from = mine + W::BYTES + which * BESIDE;
        of.take(from, from + 128, scales != nullptr, zeros != nullptr, (int)bias_of_type, 0, lane);
    }
    template <bool SMALL> VT_MEMBER void begin(const char* mine, int) {
        if (!SMALL) take(mine, 0);
    }
    template <bool SMALL> VT_MEMBER void step(const char* mine, int s) {
        if (SMALL && groups == 2) take(mine, s);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int h = 0; h < HALVES; ++h) codes[i][h] = words_at(mine, ((2 * s + i) * HALVES + h) * 512 + lane * 16);
    }
    template <bool SMALL> VT_MEMBER void left(unsigned (&a)[2][4], const char* mine, int t, int s) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (SMALL && groups == 4) take(mine, 2 * s + i);
            const uint4& q = codes[i][t * HALVES / 4];
            unsigned raw[4];
            if constexpr (BITS == 4) {
                unsigned w = t == 0 ? q.x : t == 1 ? q.y : t == 2 ? q.z : q.w;
                raw[0] = w, raw[2] = w >> 4, raw[1] = w >> 8, raw[3] = w >> 12;
            } else {
                unsigned low = t & 1 ? q.z : q.x, high = t & 1 ? q.w : q.y;
                raw[0] = low, raw[2] = low >> 8, raw[1] = high, raw[3] = high >> 8;
            }
#pragma unroll
            for (int r = 0; r < 4; ++r) a[i][r] = of.weights(raw[r], 2 * t + (r & 1), (int)bias_of_type);
        }
    }
    VT_MEMBER void right(unsigned (&b)[4], const char* rows, int e, int s) const {
        fetch_matrices(b, rows + swizzled<8>(8 * e + (lane & 7), 4 * s + (lane >> 3)));
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

#define MOE_MARLIN(NAME, KIND, BITS, EIGHTS, STAGES, BLOCKS)                                                         \
    extern "C" __global__ void __launch_bounds__(TEAM * 32, BLOCKS)                                                   \
        NAME(MOE_PARAMETERS, i64 group, i64 bias_of_type, const char* words, const char* scales, const char* zeros,   \
             const unsigned short* single_scales, const unsigned short* biases) {                                    \
        Marlin<KIND, BITS> weights;                                                                                  \
        weights.columns = columns, weights.depth = depth, weights.group = group, weights.bias_of_type = bias_of_type; \
        weights.words = words, weights.scales = scales, weights.zeros = zeros;                                       \
        weights.single_scales = single_scales, weights.biases = biases;                                              \
        moe_ring<KIND, EIGHTS, STAGES>(weights, MOE_NAMES);                                                          \
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define TALL_BLOCKS 2  // with three there a register is wanting
#else
#define TALL_BLOCKS 3
#endif
#define MOE_MARLIN_RINGS(NAME, KIND, BITS)                      \
    MOE_MARLIN(NAME##_8, KIND, BITS, 1, 2, BITS == 4 ? 5 : 4)   \
    MOE_MARLIN(NAME##_16, KIND, BITS, 2, 2, BITS == 4 ? 4 : 3)  \
    MOE_MARLIN(NAME##_32, KIND, BITS, 4, 2, BITS == 4 ? TALL_BLOCKS : 2)
MOE_MARLIN_RINGS(moe_marlin_4_bf16, BF16, 4)
MOE_MARLIN_RINGS(moe_marlin_4_f16, F16, 4)
MOE_MARLIN_RINGS(moe_marlin_8_bf16, BF16, 8)
MOE_MARLIN_RINGS(moe_marlin_8_f16, F16, 8)

#if VT_TILES
MOE_MARLIN_LOADED(moe_marlin_4_bf16_loaded_64_3, BF16, 64, 3)
MOE_MARLIN_LOADED(moe_marlin_4_f16_loaded_64_3, F16, 64, 3)
MOE_MARLIN_LOADED(moe_marlin_4_bf16_loaded_128_2, BF16, 128, 2)
MOE_MARLIN_LOADED(moe_marlin_4_f16_loaded_128_2, F16, 128, 2)
#endif
