// Products of vectors with a Hadamard matrix in the mirror's order of sums, for a fraction of its multiply-adds.
//
// The order: chains of 16 neighbours, each step one fma, then chain after chain. Where all of h is +-c as Sylvester has
// it, columns that agree on the signs so far have the same sum so far, or the opposite: of a chain's first 1, 2, 4 and 8
// elements there are 1, 2, 4 and 8 different sums, and of all chains 16, since h[k + 16 b, j + 16 g] has the sign of
// h[k, j] times that of h[16 b, 16 g]. So that 171 steps make a chain's 16 sums, and chains are joined by sums that share
// their beginnings likewise: the same roundings in the same order. Zeros may have another sign, which no code shows.
#pragma once
#include "mma.cuh"

#ifdef __CUDACC__
VT_FN unsigned parity_of(unsigned bits) { return (unsigned)__popc((int)bits) & 1u; }
#else
static inline unsigned parity_of(unsigned bits) { return (unsigned)__builtin_parity(bits); }
#endif

// Eight neighbours of Sylvester's matrix from row `row`, column `column` on; unit: the bits of its first element.
VT_FN uint4 sylvester_word(unsigned row, unsigned column, unsigned unit) {
    const unsigned both = 0x80008000u, second = row & 2u ? both : 0u, third = row & 4u ? both : 0u;
    const unsigned first = (unit | unit << 16) ^ (parity_of(row & column) ? both : 0u) ^ row << 31;
    return {first, first ^ second, first ^ third, first ^ second ^ third};
}

// Whether h [R, R] is +-c in Sylvester's signs, to all 128 threads of a block; `votes`: a word of shared memory a warp.
template <int R> VT_FN bool is_sylvester(const uint4* h, unsigned* votes) {
    const unsigned unit = h[0].x & 0xffffu;
    unsigned other = 0;
#pragma unroll 8
    for (int n = (int)threadIdx.x; n < R * R / 8; n += 128) {
        const uint4 found = h[n], want = sylvester_word((unsigned)(n * 8 / R), (unsigned)(n * 8 % R), unit);
        other |= (found.x ^ want.x) | (found.y ^ want.y) | (found.z ^ want.z) | (found.w ^ want.w);
    }
    const bool some = __any_sync(0xffffffffu, other != 0) != 0;
    if (threadIdx.x % 32 == 0) votes[threadIdx.x / 32] = some;
    __syncthreads();
    const bool none = !(votes[0] | votes[1] | votes[2] | votes[3]);
    __syncthreads();
    return none;
}

VT_FN uint4 four_bits(const float* v, int at) {
    return {(unsigned)vt_bits(v[at]), (unsigned)vt_bits(v[at + 1]), (unsigned)vt_bits(v[at + 2]), (unsigned)vt_bits(v[at + 3])};
}
VT_FN void four_floats(float* v, int at, const uint4& bits) {
    v[at] = vt_float((int)bits.x), v[at + 1] = vt_float((int)bits.y);
    v[at + 2] = vt_float((int)bits.z), v[at + 3] = vt_float((int)bits.w);
}

// s[j] = the chain over x in column j, h = +-c.
VT_FN void chain_of(float* s, const float (&x)[16], float c) {
    s[0] = x[0] * c;
#pragma unroll
    for (int k = 1; k < 16; ++k) {
        const int known = k < 2 ? 1 : k < 4 ? 2 : k < 8 ? 4 : 8, doubles = k == known;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (j < known) {
                const float up = s[j], beside = doubles ? up : s[j + known];
                s[j] = vt_fma(parity_of((unsigned)(k & j)) ? -x[k] : x[k], c, up);
                s[j + known] = vt_fma(parity_of((unsigned)(k & (j + known))) ? -x[k] : x[k], c, beside);
            }
    }
}

// The chain over 16 elements in two pieces.
VT_FN void chain_of_pieces(float* s, const uint4& low, const uint4& high, float c) {
    const unsigned w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float x[16];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        x[2 * j] = vt_float((int)(w[j] << 16));
        x[2 * j + 1] = vt_float((int)(w[j] & 0xffff0000u));
    }
    chain_of(s, x, c);
}

// z[b * SLICE + s], chain b's sum in column s, becomes the sum of all chains in column s + 16 b.
template <int CHAINS, int SLICE> VT_FN void join_chains(float (&z)[CHAINS * SLICE]) {
#pragma unroll
    for (int s = 0; s < SLICE; ++s) {
        float total[CHAINS];
        total[0] = z[s];
#pragma unroll
        for (int b = 1; b < CHAINS; ++b) {
            const int known = b < 2 ? 1 : b < 4 ? 2 : 4, doubles = b == known;
            const float own = z[b * SLICE + s];
#pragma unroll
            for (int g = 0; g < CHAINS / 2; ++g)
                if (g < known) {
                    const float up = total[g], beside = doubles ? up : total[g + known];
                    total[g] = parity_of((unsigned)(b & g)) ? up - own : up + own;
                    total[g + known] = parity_of((unsigned)(b & (g + known))) ? beside - own : beside + own;
                }
        }
#pragma unroll
        for (int g = 0; g < CHAINS; ++g) z[g * SLICE + s] = total[g];
    }
}

// The sums of a lane's 32 elements' columns, where its chains are in y: R / 32 lanes of a vector exchange them, so that each
// joins all chains in its share of the 16 columns, and exchange them back. between: 36 words a lane.
template <int R> VT_FN void join_lanes(float (&y)[32], uint4* between) {
    if constexpr (R == 32) {
        join_chains<2, 16>(y);
    } else {
        constexpr int LANES = R / 32, CHAINS = R / 16, FOURS = 4 / LANES;
        const int lane = (int)threadIdx.x & 31, within = lane % LANES;
        uint4 *own = between + lane * 9, *share = between + (lane - within) * 9 + within * FOURS;
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i] = four_bits(y, 4 * i);
        warp_meets();
        float z[32];
#pragma unroll
        for (int b = 0; b < CHAINS; ++b)
#pragma unroll
            for (int f = 0; f < FOURS; ++f) four_floats(z, (b * FOURS + f) * 4, share[(b >> 1) * 9 + (b & 1) * 4 + f]);
        join_chains<CHAINS, 4 * FOURS>(z);
#pragma unroll
        for (int b = 0; b < CHAINS; ++b)
#pragma unroll
            for (int f = 0; f < FOURS; ++f) share[(b >> 1) * 9 + (b & 1) * 4 + f] = four_bits(z, (b * FOURS + f) * 4);
        warp_meets();
#pragma unroll
        for (int i = 0; i < 8; ++i) four_floats(y, 4 * i, own[i]);
    }
}

// Where 16-byte piece n of a warp's runs of P pieces lies, so that eight lanes find theirs in different banks.
template <int P> VT_FN int place_of_piece(int n) {
    constexpr int DOWN = P > 8 ? 4 : 3;
    return n ^ (n >> DOWN & ((P < 8 ? P : 8) - 1));
}

// Runs of HELD elements of a warp on their way into its shared memory; `left`: of its runs.
template <int HELD> VT_FN void send_for_runs(uint4* mine, const uint4* x, i64 left) {
    constexpr int P = HELD / 8;
    const int lane = (int)threadIdx.x & 31;
    if (left >= 32) {
#pragma unroll
        for (int i = 0; i < P; ++i) copy_async(mine + place_of_piece<P>(i * 32 + lane), x + i * 32 + lane);
    } else {
#pragma unroll 1
        for (int n = lane; n < (int)left * P; n += 32) copy_async(mine + place_of_piece<P>(n), x + n);
    }
}
