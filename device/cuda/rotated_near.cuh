// Many vectors times Sylvester's matrix as MXFP4 and NVFP4, by tensor cores, whose sums are near the mirror's: where all
// sums as near have one scale and one code those are the mirror's, and elsewhere its own sums are made.
//
// A lane (g = lane / 4, t = lane % 4) has the columns 8 t ... 8 t + 7 of four rows of 32: a row's elements are operands as
// they lie in memory, and the matrix's columns are taken in such an order that a lane's sums are of eight neighbours.
//
// How near: of an element of a vector, the mirror's chain rounds 16 - k % 16 sums that it is part of, and joins CHAINS - 1
// more at most, 2^-24 of their sizes each; here it is part of one product, or of two where the second goes on with the
// first's sums, and of one sum or two where vectors have several pieces. A tensor core cuts products and sum off some bits
// below float32's last: TENSOR_STEP times 2^-24 of their sizes together. So the distance is at most 2^-24 c times the sum of
// |x[k]| roundings(k), one more column of the product, or, of vectors of up to 32, a share of what is known of their sums
// (near_codes.cuh).
#pragma once
#include "near_codes.cuh"

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

// A counter in shared memory, and one more in it.
VT_FN unsigned one_more(unsigned* counter) {
#ifdef __CUDACC__
    unsigned before;
    asm volatile("atom.shared.inc.u32 %0, [%1], 0x7fffffff;"
                 : "=r"(before)
                 : "r"((unsigned)__cvta_generic_to_shared(counter))
                 : "memory");
    return before;
#else
    return atomicAdd(counter, 1u);
#endif
}

#define STAGES 2  // tiles of a warp in shared memory, device/mxfp4.py

// What follows is made once: by a move that no compiler repeats for each tile.
template <class T> VT_FN void kept(T& v) {
    if constexpr (sizeof(T) == 4) v = __shfl_sync(FULL_WARP, v, (int)threadIdx.x & 31);
#ifdef __CUDACC__
    else asm volatile("" : "+l"(v));
#endif
}

VT_FN void store_word(unsigned char* out, unsigned word) {
#ifdef __CUDACC__
    asm volatile("st.global.u32 [%0], %1;" ::"l"(out), "r"(word) : "memory");
#else
    *(unsigned*)out = word;
#endif
}
VT_FN void store_byte(unsigned char* out, unsigned byte) {
#ifdef __CUDACC__
    asm volatile("st.global.u8 [%0], %1;" ::"l"(out), "r"(byte) : "memory");
#else
    *out = (unsigned char)byte;
#endif
}

// A warp's tile of 1024 elements is rows (q, g), q = 0 ... 3: of vectors of 64 and 128 the pieces follow each other in q.
template <int R> struct NearSums {
    static constexpr int PIECES = R < 32 ? 1 : R / 32, CHAINS = R / 16, TILE = 1024;
    static constexpr int WORDS = R * R / 8, EARLY = WORDS <= 128 ? 1 : 4;
    // From a row to the other one of a product, and to the next two.
    static constexpr int NEXT = R == 64 ? 2 : 1, STEP = R == 64 ? 1 : 2;

    static VT_MEMBER int row_of(int q, int g) {
        return R <= 32 ? (8 * q + g) * 32 : q / PIECES * (8 * R) + g * R + q % PIECES * 32;
    }
    // Where 16-byte piece n of a tile lies, so that a piece of each of eight rows is in other banks.
    static VT_MEMBER int placed(int n) { return n ^ (n >> (R == 128 ? 4 : 3) & (R <= 32 ? 3 : 7)); }
    static VT_MEMBER float roundings(int k) {
        const int chain = k % 16 ? 16 - k % 16 : 15, sums = PIECES > 2 ? 2 : PIECES - 1;
        return (float)(chain + CHAINS - 1 + sums) + TENSOR_STEP * (k % 32 < 16 ? 2.0f : 1.0f);
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
            for (int b = 0; b < OWN; ++b) raw[b] = tile[placed(vector + 2 * (2 * b + upper) + i)];
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
    // Sums y[q][2 j + e] of column 8 t + 2 j + e of row q; weighted sizes, where SIZES are asked for. a[2 n + i]: elements
    // 16 i ... 16 i + 15 of two rows, b[j]: columns 2 j and 2 j + 1 of each lane's eight.
    template <bool SIZES>
    static VT_MEMBER void sums_of(float (&y)[4][8], float (&bound)[4], const unsigned (&a)[4][4], const unsigned (&b)[4][4],
                                  const unsigned (&weight)[2][2]) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int q = n * STEP, r = q + NEXT;
            bound[q] = bound[r] = 0.0f;
            if (SIZES) {
                float sums[4] = {};
                unsigned sizes[2][4];
#pragma unroll
                for (int i = 0; i < 4; ++i) sizes[0][i] = sizes_of(a[2 * n][i]), sizes[1][i] = sizes_of(a[2 * n + 1][i]);
                multiply<BF16>(sums, sizes[0], weight[0][0], weight[0][1]);
                multiply<BF16>(sums, sizes[1], weight[1][0], weight[1][1]);
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
#pragma unroll
        for (int step = 1; step < PIECES; step *= 2)
#pragma unroll
            for (int q = 0; q < 4; ++q)
                if (!(q & step))
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        const float low = y[q][j], high = y[q + step][j];
                        y[q][j] = low + high, y[q + step][j] = low - high;
                    }
    }

    // Whether h is Sylvester's, and so all is done. `words`: 32 of shared memory, for the warps' votes and the next tile;
    // tiles go to the warps that are ready, since those with sums in doubt take longer.
    template <class TO>
    static VT_MEMBER bool run(i64 count, const unsigned short* x, const uint4* h, i64 blocks, TO& to, unsigned* words,
                              unsigned char* memory) {
        constexpr int GROUP = TO::GROUP, LANES = GROUP / 8, OWN = 4 / LANES;
        constexpr bool SIZES = R > 32, MEAN = R == 32 && !TO::BOUNDED;
        const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
        const int g = lane >> 2, t = lane & 3;
        const int whole = (int)(count / TILE), rest = (int)(count % TILE), tiles = whole + (rest != 0);
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
        // Where a lane's pieces come from and go to, and its rows of matrices: rows 0-7 and 8-15 of two q, pieces 2 i, 2 i + 1.
        const unsigned short* own = x + 8 * lane;
        kept(own);
        constexpr int PLACES = R <= 32 ? 1 : R == 64 ? 2 : 4;
        unsigned place[PLACES], rows[R <= 32 ? 2 : 4];
#pragma unroll
        for (int i = 0; i < PLACES; ++i) {
            place[i] = (unsigned)(warp * (STAGES * 128) + placed(lane + 32 * i) - 32 * i) * 16u;
            if (!(SIZES && OWN == 2)) kept(place[i]);
        }
        const int piece = placed((row_of((lane >> 3 & 1) * NEXT, lane & 7) >> 3) + (lane >> 4));
#pragma unroll
        for (int i = 0; i < (R <= 32 ? 2 : 4); ++i) {
            rows[i] = (unsigned)(warp * (STAGES * 2048) + (piece * 16 ^ (i & 1) * 32 ^ (i >> 1) * R));
            kept(rows[i]);
        }
        unsigned first = (unsigned)(warp * (STAGES * 2048) + placed(row_of(t, g) >> 3) * 16);  // of row t
        if (MEAN) kept(first);
        auto send = [&](int n, int stage) {
            const unsigned short* from = own + (unsigned long long)n * TILE;
            unsigned char* at = memory + stage * 2048;
            if (n < whole) {
#pragma unroll
                for (int i = 0; i < 4; ++i) copy_async(at + place[i % PLACES] + 512 * i, from + 256 * i);
            } else if (n < tiles) {
#pragma unroll 1
                for (int i = 0; 8 * lane + 256 * i < rest; ++i)
                    copy_async(at + warp * (STAGES * 2048) + placed(lane + 32 * i) * 16, from + 256 * i);
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
        // The matrix: +-c by the bits that an element and its column have in common. Column g of block j is 8 (g / 2) + 2 j +
        // g % 2, so that a lane's sums are of eight neighbours.
        const float c = widen_bf16(unit), least = fmaxf(vt_abs(c), 0x1p-100f) * (1.02f * 0x1p-24f);
        unsigned b[4][4], weight[2][2];  // of pieces
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool within = R > 16 || i >> 1 == g >> 2;
                const unsigned alike = (unsigned)((t & j) ^ ((R == 16 ? i & 1 & g >> 1 : i & g >> 1) << 2));
                const unsigned sign = parity_of(alike) * 0x80008000u ^ (g & 1) * 0x80000000u;
                b[j][i] = within ? (unit | unit << 16) ^ sign : 0u;
                kept(b[j][i]);
            }
        if (SIZES)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                weight[i >> 1][i & 1] = narrow_bf16(roundings(8 * i + 2 * t), roundings(8 * i + 2 * t + 1));
                kept(weight[i >> 1][i & 1]);
            }
        // Row t's scale is this lane's, or those of rows t % 2 and t % 2 + 2 in its half of 32.
        const int of_half = t / LANES * GROUP;
        unsigned char* codes_at = to.out + (row_of(0, g) + 8 * t) / 2;
        unsigned char* scales_at = to.scales + (row_of(t % LANES, g) + of_half) / GROUP;
        kept(codes_at), kept(scales_at);
        if (lane == 0) claimed = (int)one_more(words + 31);
#pragma unroll 1
        while (n < tiles) {
            copies_wait<0>();
            warp_meets();
            const unsigned char* tile = memory + stage * 2048;
            unsigned a[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                fetch_matrices(a[i], tile + (R <= 32 ? rows[i & 1] + (i >> 1) * 1024 : rows[i]));
            const float mean = MEAN ? widen_bf16(*(const unsigned short*)(tile + first)) * c : 0.0f;
            const int now = n;
            n = tile_of(__shfl_sync(FULL_WARP, claimed, 0)), stage ^= 1;
            if (lane == 0) claimed = (int)one_more(words + 31);
            send(n, stage);
            float y[4][8], bound[4], bounds[OWN];
            sums_of<SIZES>(y, bound, a, b, weight);
            if (PIECES > 1) {
#pragma unroll
                for (int q = 0; q < 4; q += 2) bound[q] = bound[q + 1] = bound[q] + bound[q + 1];
            }
            if (PIECES > 2) bound[0] = bound[1] = bound[2] = bound[3] = bound[0] + bound[2];
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                bounds[i] = (t & 1 ? bound[LANES * i + 1] : bound[LANES * i]) * least;
                if (LANES == 4 && t & 2) bounds[i] = (t & 1 ? bound[3] : bound[2]) * least;
            }
            Near near[OWN];
            near_of<R>(near, y, bounds, mean, to);
            unsigned word[4], unsure[4], trouble = 0;
            auto of_row = [&](int q, float& factor, float& within) {
                const int from = (lane & -LANES) + q % LANES;
                factor = __shfl_sync(FULL_WARP, near[q / LANES].factor, from);
                within = __shfl_sync(FULL_WARP, near[q / LANES].near, from);
            };
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                float factor, within;
                of_row(q, factor, within);
                word[q] = codes_near<TO::BOUNDED>(y[q], factor, within, unsure[q]);
                trouble |= unsure[q];
            }
            trouble &= TO::BOUNDED ? UNSURE : CROSSED;
#pragma unroll
            for (int i = 0; i < OWN; ++i) trouble |= near[i].sure ? 0u : 1u;
            unsigned char* codes = codes_at + (unsigned long long)now * (TILE / 2);
            unsigned char* scales = scales_at + (unsigned long long)now * (TILE / GROUP);
            const int left = now < whole ? TILE : rest;
            if (left == TILE) {
#pragma unroll
                for (int q = 0; q < 4; ++q) store_word(codes + row_of(q, 0) / 2, word[q]);
#pragma unroll
                for (int i = 0; i < OWN; ++i) store_byte(scales + row_of(LANES * i, 0) / GROUP, near[i].code);
            } else {
#pragma unroll
                for (int q = 0; q < 4; ++q)
                    if (row_of(q, g) + 8 * t < left) store_word(codes + row_of(q, 0) / 2, word[q]);
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    if (row_of(LANES * i + t % LANES, g) + of_half < left)
                        store_byte(scales + row_of(LANES * i, 0) / GROUP, near[i].code);
            }
            if (!__any_sync(FULL_WARP, trouble != 0)) continue;
            if (!TO::BOUNDED)
#pragma unroll
                for (int q = 0; q < 4; ++q)
                    if (__any_sync(FULL_WARP, (unsure[q] & CROSSED) != 0)) {
                        float factor, within;
                        of_row(q, factor, within);
                        unsure[q] = which_unsure(y[q], factor, within);
                    } else {
                        unsure[q] = 0;
                    }
            // Of a group's lanes, which of four rows are in doubt, a bit each.
            unsigned doubts = 0;
#pragma unroll
            for (int q = 0; q < 4; ++q) doubts |= unsure[q] & UNSURE ? 1u << q : 0u;
#pragma unroll
            for (int i = 0; i < OWN; ++i) {  // a negative code of a scale is none
                doubts |= near[i].sure ? 0u : 1u << LANES * i << t % LANES;
                near[i].code |= near[i].sure ? 0u : 0x80000000u;
            }
#pragma unroll
            for (int m = 1; m < LANES; m *= 2) doubts |= __shfl_xor_sync(FULL_WARP, doubts, m);
            warp_meets();  // what follows is written after what was written above
            unsigned groups = lanes_where(doubts != 0) & (LANES == 4 ? 0x11111111u : 0x55555555u);
#pragma unroll 1
            for (; groups; groups &= groups - 1) {
                const int lead = (int)first_of(groups);
#pragma unroll 1
                for (unsigned rows_of = __shfl_sync(FULL_WARP, doubts, lead); rows_of; rows_of &= rows_of - 1) {
                    const int q = (int)first_of(rows_of), at = row_of(q, lead >> 2) + (lead & 3) / LANES * GROUP;
                    const unsigned own_code = OWN > 1 && q > 1 ? near[OWN - 1].code : near[0].code;
                    const int code = (int)__shfl_sync(FULL_WARP, own_code, (lead & -LANES) + q % LANES);
                    if (at >= left) continue;
                    const uint4* raw = (const uint4*)(tile + warp * (STAGES * 2048));
                    const float sum = sum_at(raw, at / R * (R / 8), at % R + lane % GROUP, c);
                    put_by_lanes((i64)now * TILE + at, sum, code, to);
                }
            }
        }
        return true;
    }
};
