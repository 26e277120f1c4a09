// A warp's tile of vectors times Sylvester's matrix: by tensor cores, near the mirror's sums, and by the mirror's own order.
//
// A lane (g = lane / 4, t = lane % 4) has eight sums of each of four rows: an operand's rows of 8 elements lie as they do in
// memory, and the matrix's columns are taken in such an order that a lane's sums are of eight neighbours. Of vectors of up to
// 32 a row is 32 neighbours, the lane's columns 8 t ... 8 t + 7 of them. Of 64 and 128 row q of a vector is its runs of 8
// elements q, q + PIECES, q + 2 PIECES and q + 3 PIECES, which tensor cores sum up, and of the rows sums and differences are
// taken: the lane has columns RUN t ... RUN t + RUN - 1 of the vector, eight of them in a row, so that a group of 16 or 32 is
// its own alone (of 64, in groups of 32, half a group).
//
// How near: of an element of a vector, the mirror's chain rounds 16 - k % 16 sums that it is part of, and joins CHAINS - 1
// more at most (CHAINS / 2 of the second half of chains), 2^-24 of their sizes each; here it is part of one product, or of two
// where the second goes on with the first's sums, and of one sum or two where vectors have several pieces. A tensor core cuts
// products and sum off some bits below float32's last: TENSOR_STEP times 2^-24 of their sizes together. So the distance is at
// most 2^-24 c times the sum of |x[k]| roundings(k), one more column of the product, or, of vectors of up to 32, a share of
// what is known of their sums (rotated_groups.cuh).
#pragma once
#include "near_codes.cuh"

#ifdef __CUDACC__
VT_FN unsigned lanes_where(bool yes) { return __ballot_sync(FULL_WARP, yes); }
VT_FN unsigned first_of(unsigned bits) { return (unsigned)__ffs((int)bits) - 1u; }
VT_FN unsigned last_of(unsigned bits) { return 31u - (unsigned)__clz((int)bits); }  // some number where there is none
#else
static inline unsigned lanes_where(bool yes) {
    unsigned lanes = (yes ? 1u : 0u) << (threadIdx.x & 31);
    for (int m = 16; m >= 1; m >>= 1) lanes |= __shfl_xor_sync(FULL_WARP, lanes, m);
    return lanes;
}
static inline unsigned first_of(unsigned bits) { return (unsigned)__builtin_ctz(bits); }
static inline unsigned last_of(unsigned bits) { return bits ? 31u - (unsigned)__builtin_clz(bits) : ~0u; }
#endif

// Sizes of two bfloat16, by the multiplier, since the adder has much to do.
VT_FN unsigned sizes_of(unsigned pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("abs.bf16x2 %0, %0;" : "+r"(pair));
    return pair;
#else
    return pair & 0x7fff7fffu;
#endif
}

// Of three sizes, or a NaN that a sum has made: by their bits, for which there is one instruction.
VT_FN float largest_of_three(float a, float b, float c) {
#ifdef __CUDACC__
    return vt_float(max(max(vt_bits(a), vt_bits(b)), vt_bits(c)));
#else
    return larger_or_nan(larger_or_nan(a, b), c);
#endif
}

// What the lane `far` lanes on has; of any lane where there is none.
VT_FN float from_above(float x, int far) {
#ifdef __CUDACC__
    return __shfl_down_sync(FULL_WARP, x, far);
#else
    return __shfl_sync(FULL_WARP, x, ((int)threadIdx.x + far) & 31);
#endif
}

// A warp's 1024 elements are rows (q, g), q = 0 ... 3.
template <int R> struct RotatedTile {
    static constexpr int PIECES = R < 32 ? 1 : R / 32, CHAINS = R / 16, TILE = 1024;
    // From a row to the other one of a product, and to the next two; from one run of 8 elements of a row to the next.
    static constexpr int NEXT = R > 32 ? 2 : 1, STEP = R > 32 ? 1 : 2, RUN = R > 32 ? R / 4 : 8;

    static VT_MEMBER int row_of(int q, int g) {
        return R <= 32 ? (8 * q + g) * 32 : q / PIECES * (8 * R) + g * R + q % PIECES * 8;
    }
    // Where 16-byte piece n of a tile lies, so that a piece of each of eight rows is in other banks; within 128 bytes, since
    // copies to elsewhere take longer. A tile's bytes.
    static VT_MEMBER int placed(int n) { return n ^ (n >> (R == 128 ? 4 : 3) & (R <= 32 ? 3 : 7)); }
    static constexpr int HELD = 2048;
    // Of vectors of 128 what a byte of codes is made anew of is read from global memory: a tile's place is the next one's as
    // soon as it is in registers, and its addresses stay the same.
    static constexpr int STAGES = R == 128 ? 1 : 2;
    // Where piece n lies in what mends read.
    static VT_MEMBER int kept_at(int n) { return STAGES > 1 ? placed(n) : n; }
    static VT_MEMBER float roundings(int k) {
        const int chain = k % 16 ? 16 - k % 16 : 15, sums = PIECES > 2 ? 2 : PIECES - 1;
        return k < R / 2 ? (float)(chain + CHAINS - 1 + sums) + 2.0f * TENSOR_STEP
                         : (float)(chain + CHAINS / 2 + sums) + TENSOR_STEP;
    }
    // The mirror's sum of a vector's products with column `column`, of which lane % 16 are the last bits: a lane has one
    // column of every other chain's 16, or of all chains where there is one.
    static VT_MEMBER float sum_at(const uint4* tile, int vector, int column, float c) {
        constexpr int OWN = CHAINS > 1 ? CHAINS / 2 : 1;
        const unsigned signs = (column & 1 ? 0xaaaau : 0u) ^ (column & 2 ? 0xccccu : 0u) ^ (column & 4 ? 0xf0f0u : 0u) ^
                               (column & 8 ? 0xff00u : 0u);  // of rows k % 16
        const int upper = CHAINS > 1 ? (int)threadIdx.x >> 4 & 1 : 0;
        float sums[OWN] = {}, total = 0.0f;
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            uint4 raw[OWN];
#pragma unroll
            for (int b = 0; b < OWN; ++b) raw[b] = tile[kept_at(vector + 2 * (2 * b + upper) + i)];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float by = vt_float(vt_bits(c) ^ (int)(signs << (31 - 8 * i - j) & 0x80000000u));
#pragma unroll
                for (int b = 0; b < OWN; ++b) {
                    const unsigned w = j < 2 ? raw[b].x : j < 4 ? raw[b].y : j < 6 ? raw[b].z : raw[b].w;
                    sums[b] = vt_fma(vt_float((int)(j & 1 ? w & 0xffff0000u : w << 16)), by, sums[b]);
                }
            }
        }
        if constexpr (CHAINS == 1) {
            return sums[0];
        } else {
#pragma unroll
            for (int b = 0; b < CHAINS; b += 2) {
                const float other = __shfl_xor_sync(FULL_WARP, sums[b / 2], 16);
                const float even = upper ? other : sums[b / 2], odd = upper ? sums[b / 2] : other;
                total += parity_of((unsigned)(b & column >> 4)) ? -even : even;
                total += parity_of((unsigned)((b + 1) & column >> 4)) ? -odd : odd;
            }
            return total;
        }
    }
    // The same of one column, a chain a lane: chain (lane / 2) % CHAINS of the column of lane % 2; for lanes 0 and 1.
    static VT_MEMBER float sum_of_chains(const uint4* tile, int vector, int column, float c) {
        const int lane = (int)threadIdx.x & 31, chain = (lane >> 1) % CHAINS, piece = kept_at(vector + 2 * chain);
        const uint4 low = tile[piece], high = tile[piece ^ 1];
        const unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, top = 0x80000000u;
        unsigned by[16];  // of a row's signs
        by[0] = (unsigned)vt_bits(c);
#pragma unroll
        for (int k = 1; k < 16; ++k) {
            const int known = k < 2 ? 1 : k < 4 ? 2 : k < 8 ? 4 : 8, bit = k < 2 ? 31 : k < 4 ? 30 : k < 8 ? 29 : 28;
            by[k] = by[k - known] ^ ((unsigned)column << bit & top);
        }
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < 16; ++k)
            sum = vt_fma(vt_float((int)(k & 1 ? w[k / 2] & 0xffff0000u : w[k / 2] << 16)), vt_float((int)by[k]), sum);
        if constexpr (CHAINS > 1) {
            const float own = parity_of((unsigned)(chain & column >> 4)) ? -sum : sum;
            sum = 0.0f;
#pragma unroll
            for (int b = 0; b < CHAINS; ++b) sum += from_above(own, 2 * b);
        }
        return sum;
    }
    // Sums y[q][2 j + e] of column 8 t + 2 j + e of row q; weighted sizes, where SIZES are asked for. a[2 n + i]: elements
    // 16 i ... 16 i + 15 of two rows, b[j]: columns 2 j and 2 j + 1 of each lane's eight.
    // tops: of vectors of 64 and more the largest sizes of rows 0 and 1 and of 2 and 3, or NaN: of a + b and a - b that is
    // |a| + |b|. Where no SIZES are, of a lane's sums of a vector: means, that of the rows that all of its sums have in one
    // sign, of which `weight` is the matrix; squares of what sums and differences are taken of, whose own are PIECES times as
    // many, so that what is made of them is waited for while the others are.
    template <bool SIZES>
    static VT_MEMBER void sums_of(float (&y)[4][8], float (&bound)[4], const unsigned (&a)[4][4], const unsigned (&b)[4][4],
                                  const unsigned (&weight)[2][2], float (&tops)[2], float (&means)[2],
                                  float (&squares)[2]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int q = n * STEP, r = q + NEXT;
            bound[q] = bound[r] = 0.0f;
            if (SIZES) {
                float sums[4] = {};
                unsigned sizes[2][4];
#pragma unroll
                for (int i = 0; i < 8; ++i)  // pieces of two weights together: one would have to lie twice in registers
                    sizes[i / 2 & 1][i / 4 * 2 + i % 2] = sizes_of(a[2 * n + i / 4][i % 4]);
                multiply<BF16>(sums, sizes[0], weight[n][0], weight[n][1]);
                multiply<BF16>(sums, sizes[1], weight[n][0], weight[n][1]);
                bound[q] = sums[0], bound[r] = sums[2];
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float c[4] = {};
                multiply<BF16>(c, a[2 * n], b[j][0], b[j][1]);
                multiply<BF16>(c, a[2 * n + 1], b[j][2], b[j][3]);
                y[q][2 * j] = c[0], y[q][2 * j + 1] = c[1], y[r][2 * j] = c[2], y[r][2 * j + 1] = c[3];
            }
        }
        if (PIECES > 1 && !SIZES) {
            float sums[4] = {};
            multiply<BF16>(sums, a[0], weight[0][0], weight[0][1]);
            multiply<BF16>(sums, a[1], weight[1][0], weight[1][1]);
#pragma unroll
            for (int i = 0; i < 4; i += PIECES) {
                means[i / 2] = sums[i];
                float square[2];
#pragma unroll
                for (int j = 0; j < 8 * PIECES; ++j) {
                    const float one = y[i + j / 8][j % 8];
                    square[j & 1] = j < 2 ? one * one : vt_fma(one, one, square[j & 1]);
                }
                squares[i / 2] = square[0] + square[1];
            }
        }
#pragma unroll
        for (int step = PIECES / 2; step >= 1; step /= 2)
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                if (q & step) continue;
                float most = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    float sizes[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float low = y[q][j + e], high = y[q + step][j + e];
                        sizes[e] = vt_abs(low) + vt_abs(high);
                        y[q][j + e] = low + high, y[q + step][j + e] = low - high;
                    }
                    most = largest_of_three(most, sizes[0], sizes[1]);
                }
                if (step == 1) tops[q / 2] = most;
            }
    }
};
