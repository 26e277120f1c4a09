// Many vectors times Sylvester's matrix as MXFP4 and NVFP4, by tensor cores, whose sums are near the mirror's: where all
// sums as near have one scale and one code those are the mirror's, and elsewhere its own sums are made.
//
// A lane (g = lane / 4, t = lane % 4) has the eight elements and columns 8 t ... 8 t + 7 of four rows of 32. The 16 bytes of
// a row's eight are the operand of one product: its even words as row g, its odd ones as row g + 8. As the matrix has it,
// sums and differences of the two are the sums of the columns, and the matrix itself is two words of a lane.
//
// How near: of an element of a vector, the mirror's chain rounds 16 - k % 16 sums that it is part of, and joins CHAINS - 1
// more at most, 2^-24 of their sizes each; here it is part of one product and of one sum or up to three. A tensor core cuts
// products and sum off some bits below float32's last: TENSOR_STEP times 2^-24 together. So the distance is at most 2^-24 c
// times the sum of |x[k]| roundings(k), one more column of the product.
#pragma once
#include "near_codes.cuh"

// 16 numbers cut off two bits below float32's last and then their sum, on Hopper, where 8.3 was the most seen; one bit
// below, by eights, before.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define TENSOR_STEP 12
#else
#define TENSOR_STEP 24
#endif

#ifdef __CUDACC__
VT_FN unsigned lanes_where(bool yes) { return __ballot_sync(FULL_WARP, yes); }
VT_FN unsigned first_of(unsigned bits) { return (unsigned)__ffs((int)bits) - 1u; }
#else
static inline unsigned lanes_where(bool yes) {
    unsigned lanes = (yes ? 1u : 0u) << (threadIdx.x & 31);
    for (int m = 16; m >= 1; m >>= 1) lanes |= __shfl_xor_sync(FULL_WARP, lanes, m);
    return lanes;
}
static inline unsigned first_of(unsigned bits) { return (unsigned)__builtin_ctz(bits); }
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

// v[i] without an address.
template <class T, int N> VT_FN T picked(const T (&v)[N], int i) {
    T one = v[0];
#pragma unroll
    for (int n = 1; n < N; ++n) one = n == i ? v[n] : one;
    return one;
}

// 16 bytes of shared memory by one load.
VT_FN uint4 at_once(const uint4* p) {
#ifdef __CUDACC__
    uint4 all;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(all.x), "=r"(all.y), "=r"(all.z), "=r"(all.w)
                 : "r"((unsigned)__cvta_generic_to_shared(p)));
    return all;
#else
    return *p;
#endif
}

#define STAGES 2  // tiles of a warp in shared memory, device/mxfp4.py

// A warp's tile of 1024 elements is rows (q, g), q = 0 ... 3: of vectors of 64 and 128 the pieces follow each other in q.
template <int R> struct NearSums {
    static constexpr int PIECES = R < 32 ? 1 : R / 32, CHAINS = R / 16, TILE = 1024;
    static constexpr int WORDS = R * R / 8, EARLY = WORDS <= 128 ? 1 : 4;

    static VT_MEMBER int row_of(int q, int g) {
        return R <= 32 ? (8 * q + g) * 32 : q / PIECES * (8 * R) + g * R + q % PIECES * 32;
    }
    static VT_MEMBER float roundings(int k) {
        const int chain = k % 16 ? 16 - k % 16 : 15, sums = PIECES > 2 ? 3 : PIECES;
        return (float)(chain + CHAINS - 1 + sums + TENSOR_STEP);
    }
    // The mirror's sum of a vector's products with column `column`.
    static VT_MEMBER float sum_at(const uint4* vector, int column, float c) {
        const unsigned signs = (column & 1 ? 0xaaaau : 0u) ^ (column & 2 ? 0xccccu : 0u) ^ (column & 4 ? 0xf0f0u : 0u) ^
                               (column & 8 ? 0xff00u : 0u);  // of rows k % 16
        float sums[CHAINS] = {}, total = 0.0f;
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            uint4 raw[CHAINS];
#pragma unroll
            for (int b = 0; b < CHAINS; ++b) raw[b] = vector[2 * b + i];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float by = signs >> (8 * i + j) & 1u ? -c : c;
#pragma unroll
                for (int b = 0; b < CHAINS; ++b) {
                    const unsigned w = j < 2 ? raw[b].x : j < 4 ? raw[b].y : j < 6 ? raw[b].z : raw[b].w;
                    sums[b] = vt_fma(vt_float((int)(j & 1 ? w & 0xffff0000u : w << 16)), by, sums[b]);
                }
            }
        }
#pragma unroll
        for (int b = 0; b < CHAINS; ++b) total += parity_of((unsigned)(b & column >> 4)) ? -sums[b] : sums[b];
        return total;
    }
    // The pieces of vectors put together, the halves alike.
    static VT_MEMBER void levels_of_pieces(float (&half)[4][8]) {
#pragma unroll
        for (int step = 1; step < PIECES; step *= 2)
#pragma unroll
            for (int q = 0; q < 4; ++q)
                if (!(q & step))
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        const float low = half[q][j], high = half[q + step][j];
                        half[q][j] = low + high, half[q + step][j] = low - high;
                    }
    }

    // Whether h is Sylvester's, and so all is done. `words`: 32 of shared memory, for the warps' votes and the next tile;
    // tiles go to the warps that are ready, since those with sums in doubt take longer.
    template <class TO>
    static VT_MEMBER bool run(i64 count, const unsigned short* x, const uint4* h, i64 blocks, TO& to, unsigned* words,
                              unsigned char* memory) {
        constexpr int GROUP = TO::GROUP, LANES = GROUP / 8, OWN = 4 / LANES;
        const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
        const int g = lane >> 2, t = lane & 3;
        const int whole = (int)(count / TILE), rest = (int)(count % TILE), tiles = whole + (rest != 0);
        uint4* mine = (uint4*)memory + warp * (STAGES * 128);
        // h before much else is asked for: all wait for it.
        const unsigned unit = h[0].x & 0xffffu;
        uint4 early[EARLY];
#pragma unroll
        for (int i = 0; i < EARLY; ++i) {
            const int at = (int)threadIdx.x + i * (int)blockDim.x;
            if (at < WORDS) early[i] = h[at];
        }
        if (threadIdx.x == 0) words[31] = (unsigned)warps;
        auto tile_of = [&](int i) { return i * (int)blocks + (int)blockIdx.x; };
        const unsigned short* own = x + 8 * lane;
        auto send = [&](int n, int stage) {
            const unsigned short* from = own + (i64)n * TILE;
            uint4* at = mine + stage * 128 + lane;
            if (n < whole) {
#pragma unroll
                for (int i = 0; i < 4; ++i) copy_async(at + 32 * i, from + 256 * i);
            } else if (n < tiles) {
#pragma unroll 1
                for (int i = 0; 8 * lane + 256 * i < rest; ++i) copy_async(at + 32 * i, from + 256 * i);
            }
            copies_close();
        };
        int n = tile_of(warp), stage = 0, claimed = 0;
        send(n, 0);
        unsigned other = 0;
        auto look = [&](int at, const uint4& found) {
            const uint4 want = sylvester_word((unsigned)(at * 8 / R), (unsigned)(at * 8 % R), unit);
            other |= (found.x ^ want.x) | (found.y ^ want.y) | (found.z ^ want.z) | (found.w ^ want.w);
        };
#pragma unroll
        for (int i = 0; i < EARLY; ++i) {
            const int at = (int)threadIdx.x + i * (int)blockDim.x;
            if (at < WORDS) look(at, early[i]);
        }
        if (EARLY > 1)
#pragma unroll 4
            for (int at = (int)threadIdx.x + EARLY * (int)blockDim.x; at < WORDS; at += (int)blockDim.x) look(at, h[at]);
        const bool some = __any_sync(FULL_WARP, other != 0) != 0;
        if (lane == 0) words[warp] = some;
        __syncthreads();
        if (__any_sync(FULL_WARP, words[lane < warps ? lane : 0] != 0)) {
            copies_arrive();
            __syncthreads();
            return false;
        }
        to.begin();
        // The matrix: +-c by the bits that a lane's elements and its column have in common, and the other sign.
        const float c = widen_bf16(unit), largest = fmaxf(vt_abs(c), 0x1p-100f) * (1.02f * 0x1p-24f);
        const bool within = R > 16 || t >> 1 == g >> 2;
        const unsigned alike = (unsigned)(R == 16 ? t & 1 & g >> 1 : t & g >> 1);
        const unsigned sign = parity_of(alike) * 0x80008000u ^ (g & 1) * 0x80000000u;
        unsigned by = within ? (unit | unit << 16) ^ sign : 0u, turned = within ? by ^ 0x80008000u : 0u, weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            weight[i] = within ? narrow_bf16(roundings(8 * t + 4 * i), roundings(8 * t + 4 * i + 1)) : 0u;
        // By a move that no compiler repeats for each tile.
        by = __shfl_sync(FULL_WARP, by, lane), turned = __shfl_sync(FULL_WARP, turned, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) weight[i] = __shfl_sync(FULL_WARP, weight[i], lane);
        // Row t's scale is this lane's, or those of rows t % 2 and t % 2 + 2 in its half of 32.
        const int of_half = t / LANES * GROUP;
        const int of_codes = (row_of(0, g) + 8 * t) / 2, of_scales = (row_of(t % LANES, g) + of_half) / GROUP;
        if (lane == 0) claimed = (int)atomicAdd(words + 31, 1u);
#pragma unroll 1
        while (n < tiles) {
            copies_wait<0>();
            warp_meets();
            const uint4* tile = mine + stage * 128;
            unsigned a[4][4];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const uint4 raw = at_once(tile + (row_of(q, g) >> 3) + t);
                a[q][0] = raw.x, a[q][1] = raw.y, a[q][2] = raw.z, a[q][3] = raw.w;
            }
            const int now = n;
            n = tile_of(__shfl_sync(FULL_WARP, claimed, 0)), stage ^= 1;
            if (lane == 0) claimed = (int)atomicAdd(words + 31, 1u);
            send(n, stage);
            float half[4][8], bound[4];  // of columns 8 t + 0, 1, 4, 5: of even words, then of odd ones
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                float sums[4] = {}, low[4] = {}, high[4] = {};
                unsigned sizes[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) sizes[i] = sizes_of(a[q][i]);
                multiply<BF16>(sums, sizes, weight[0], weight[1]);
                multiply<BF16>(low, a[q], by, by);
                multiply<BF16>(high, a[q], by, turned);
                bound[q] = sums[0] + sums[2];
#pragma unroll
                for (int i = 0; i < 4; ++i) half[q][i] = low[i], half[q][4 + i] = high[i];
            }
            levels_of_pieces(half);
            if (PIECES > 1) {
#pragma unroll
                for (int q = 0; q < 4; q += 2) bound[q] = bound[q + 1] = bound[q] + bound[q + 1];
            }
            if (PIECES > 2) bound[0] = bound[1] = bound[2] = bound[3] = bound[0] + bound[2];
            float bounds[OWN];
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                bounds[i] = (t & 1 ? bound[LANES * i + 1] : bound[LANES * i]) * largest;
                if (LANES == 4 && t & 2) bounds[i] = (t & 1 ? bound[3] : bound[2]) * largest;
            }
            Near near[OWN];
            near_of(near, half, bounds, to);
            unsigned word[4], unsure[4], trouble = 0;
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                const int from = (lane & -LANES) + q % LANES;
                const float factor = __shfl_sync(FULL_WARP, near[q / LANES].factor, from);
                const float within = __shfl_sync(FULL_WARP, near[q / LANES].near, from);
                word[q] = codes_near<TO::BOUNDED>(half[q], factor, within, unsure[q]);
                trouble |= unsure[q];
            }
#pragma unroll
            for (int i = 0; i < OWN; ++i) trouble |= near[i].sure ? 0u : UNSURE;
            unsigned char* codes = to.out + (i64)now * (TILE / 2) + of_codes;
            unsigned char* scales = to.scales + (i64)now * (TILE / GROUP) + of_scales;
            const int left = now < whole ? TILE : rest;
            if (left == TILE) {
#pragma unroll
                for (int q = 0; q < 4; ++q) *(unsigned*)(codes + row_of(q, 0) / 2) = word[q];
#pragma unroll
                for (int i = 0; i < OWN; ++i) scales[row_of(LANES * i, 0) / GROUP] = (unsigned char)near[i].code;
            } else {
#pragma unroll
                for (int q = 0; q < 4; ++q)
                    if (row_of(q, g) + 8 * t < left) *(unsigned*)(codes + row_of(q, 0) / 2) = word[q];
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    if (row_of(LANES * i + t % LANES, g) + of_half < left)
                        scales[row_of(LANES * i, 0) / GROUP] = (unsigned char)near[i].code;
            }
            if (!__any_sync(FULL_WARP, (trouble & UNSURE) != 0)) continue;
            unsigned unsettled[OWN];
            int codes_of[OWN];  // of scales, or none
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                unsettled[i] = lanes_where(!near[i].sure);
                codes_of[i] = near[i].sure ? (int)near[i].code : -1;
            }
            warp_meets();
#pragma unroll 1
            for (int q = 0; q < 4; ++q) {
                unsigned some = lanes_where((picked(unsure, q) & UNSURE) != 0);
                some |= some >> 1;
                if (LANES == 4) some |= some >> 2;
                some = (some | picked(unsettled, q / LANES) >> q % LANES) & (LANES == 4 ? 0x11111111u : 0x55555555u);
#pragma unroll 1
                for (; some; some &= some - 1) {
                    const int lead = (int)first_of(some), at = row_of(q, lead >> 2) + (lead & 3) / LANES * GROUP;
                    const int code = __shfl_sync(FULL_WARP, picked(codes_of, q / LANES), (lead & -LANES) + q % LANES);
                    if (at >= left) continue;
                    const float sum = sum_at(tile + at / R * (R / 8), at % R + lane % GROUP, c);
                    put_by_lanes((i64)now * TILE + at, sum, code, to);
                }
            }
        }
        return true;
    }
};
