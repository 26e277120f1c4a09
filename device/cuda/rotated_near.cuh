// Many vectors times Sylvester's matrix as MXFP4 and NVFP4, by tensor cores, whose sums are near the mirror's: where all
// sums as near have one scale and one code those are the mirror's, and elsewhere its own sums are made: of two columns for
// a byte of codes, of all of a group for a scale.
#pragma once
#include "rotated_groups.cuh"
#include "rotated_mend.cuh"
#include "rotated_moves.cuh"
#include "rotated_tile.cuh"

template <int R> struct NearSums : RotatedTile<R> {
    using Tile = RotatedTile<R>;
    using Tile::HELD, Tile::NEXT, Tile::PIECES, Tile::RUN, Tile::STAGES, Tile::TILE;
    using Tile::placed, Tile::roundings, Tile::row_of, Tile::sum_at, Tile::sum_of_chains;
    static constexpr int WORDS = R * R / 8, EARLY = WORDS <= 512 ? 1 : 4;

    // Whether h is Sylvester's, and so all is done. `words`: 64 of shared memory, for the warps' votes, and for the next tile,
    // which each lane counts, since a branch for one takes longer; tiles go to the warps that are ready, since those with sums
    // in doubt take longer.
    template <class TO>
    static VT_MEMBER bool run(i64 count, const unsigned short* x, const uint4* h, i64 blocks, const TO& to,
                              unsigned* words, unsigned char* memory) {
        constexpr int GROUP = TO::GROUP, LANES = GROUP / 8;  // of a group, where vectors have up to 32
        constexpr bool BESIDE = R == 64 && GROUP == 32;      // the lane beside has the group's other half
        constexpr int OWN = R <= 32 ? 4 / LANES : R == 128 && GROUP == 32 ? 1 : 2;
        constexpr bool SIZES = R > 32 && TO::BOUNDED, MEAN = R == 32 && !TO::BOUNDED;
        const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
        const int g = lane >> 2, t = lane & 3;
        const int whole = (int)(count / TILE), rest = (int)(count % TILE), tiles = whole + (rest != 0);
        auto tile_of = [&](int i) { return i * (int)blocks + (int)blockIdx.x; };
        if (threadIdx.x < 32) words[32 + threadIdx.x] = (unsigned)tile_of(warps);
        // Where a lane's pieces come from and go to, and its rows of matrices: rows 0-7 and 8-15 of two q, pieces 2 i, 2 i + 1.
        const unsigned char* own = (const unsigned char*)(x + 8 * lane);
        if (R > 16) kept(own);  // of 16 registers are short
        constexpr int PLACES = R <= 32 ? 1 : R == 64 ? 2 : 4;
        const unsigned base = (unsigned)(warp * (STAGES * HELD));
        unsigned char* place[PLACES];
#pragma unroll
        for (int i = 0; i < PLACES; ++i) {
            place[i] = memory + base + (placed(lane + 32 * i) - 32 * i) * 16;
            if (R > 16) kept(place[i]);
        }
        const unsigned rows = base + (unsigned)placed((row_of((lane >> 3 & 1) * NEXT, lane & 7) + (lane >> 4) * RUN) >> 3) * 16u;
        constexpr int ROWS = R == 64 ? 4 : 2;  // of four: the other two are a number of bytes apart
        const unsigned char* found[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            found[i] = memory + (rows ^ (R <= 32 ? i * 32u : R == 64 ? (i & 1) * 64u + (i >> 1) * 16u : i * 16u));
            if (R != 64 || i < 2) kept(found[i]);  // of 64 registers are short
        }
        unsigned first = base + (unsigned)placed(row_of(t, g) >> 3) * 16u;  // of row t
        if (MEAN) kept(first);
        auto send = [&](int n, int stage) {
            const unsigned char* from = own + (unsigned long long)n * (2 * TILE);
            if (n < whole) {
#pragma unroll
                for (int i = 0; i < 4; ++i) copy_async(place[i % PLACES] + stage * HELD + 512 * i, from + 512 * i);
            } else if (n < tiles) {
#pragma unroll 1
                for (int i = 0; 8 * lane + 256 * i < rest; ++i)
                    copy_async(memory + base + stage * HELD + placed(lane + 32 * i) * 16, from + 512 * i);
            }
            copies_close();
        };
        // The matrix: +-c by the bits that an element and its column have in common. Column g of block j is 8 (g / 2) + 2 j +
        // g % 2, so that a lane's sums are of eight neighbours.
        unsigned b[4][4], weight[2][2];  // of pieces; of b the signs first
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned alike = (unsigned)((t & j) ^ ((R == 16 ? i & 1 & g >> 1 : i & g >> 1) << 2));
                b[j][i] = parity_of(alike) * 0x80008000u ^ (g & 1) * 0x80000000u;
                kept(b[j][i]);
            }
        if (SIZES)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int k = 8 * (i >> 1) + R / 2 * (i & 1) + 2 * t;
                weight[i >> 1][i & 1] = narrow_bf16(roundings(k), roundings(k + 1));
                kept(weight[i >> 1][i & 1]);
            }
        // Row t's scale is this lane's, or those of rows t % 2 and t % 2 + 2 in its half of 32; or of its own groups.
        const int own_row = R <= 32 ? t % LANES : BESIDE ? t % 2 * 2 : 0, own_part = R <= 32 ? t / LANES * GROUP : RUN * t;
        unsigned char* codes_at = to.out + RUN / 2 * lane;  // rows 0, one lane's after another's
        unsigned char* scales_at = R == 128 || (R == 64 && !BESIDE) ? to.scales + RUN / GROUP * lane
                                                                    : to.scales + (row_of(own_row, g) + own_part) / GROUP;
        kept(codes_at), kept(scales_at);
        int n = tile_of(warp), stage = 0, claimed = 0;
        if (R > 32) after_others_once(b[3][3]);
        // h before much else is asked for: all wait for it.
        const unsigned unit = h[0].x & 0xffffu;
        uint4 early[EARLY];
#pragma unroll
        for (int i = 0; i < EARLY; ++i) {
            const int at = (int)threadIdx.x + i * (int)blockDim.x;
            if (at < WORDS) early[i] = h[at];
        }
        TO fetched = to;
        fetched.fetch();
        send(n, 0);
        // Threads have pieces of rows that are a multiple of 8 apart, and of one column.
        const uint4 want = sylvester_word((threadIdx.x * 8 / R) & 7u, 0u, unit);
        unsigned other = 0;
        auto look = [&](int at, const uint4& found) {
            const unsigned signs = parity_of((unsigned)(at / R & at % (R / 8))) ? 0x80008000u : 0u;
            other |= (found.x ^ want.x ^ signs) | (found.y ^ want.y ^ signs);
            other |= (found.z ^ want.z ^ signs) | (found.w ^ want.w ^ signs);
        };
#pragma unroll
        for (int i = 0; i < EARLY; ++i) {
            const int at = (int)threadIdx.x + i * (int)blockDim.x;
            if (at < WORDS) look(at, early[i]);
        }
        if (WORDS > 128)
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
        const auto by = near_by(fetched);
        const float c = widen_bf16(unit), least = fmaxf(vt_abs(c), 0x1p-100f) * (1.004f * 0x1p-24f);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) b[j][i] = R > 16 || i >> 1 == g >> 2 ? (unit | unit << 16) ^ b[j][i] : 0u;
        if (R > 32 && !SIZES)  // the mean of a lane's columns is of every eighth element
#pragma unroll
            for (int i = 0; i < 4; ++i) weight[i >> 1][i & 1] = t ? 0u : b[0][i] & 0xffffu;
        claimed = counted(words + 32 + lane, (int)blocks);
#pragma unroll 1
        while (n < tiles) {
            copies_wait<0>();
            warp_meets();
            unsigned a[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                fetch_matrices(a[i], stage * HELD + (R <= 32 ? found[i & 1] + (i >> 1) * 1024
                                                     : R == 64 ? found[i] : found[i >> 1] + (i & 1) * 128));
            float means[2] = {};
            if (MEAN) means[0] = c * widen_bf16(*(const unsigned short*)(memory + stage * HELD + first));
            const int now = n;
            const uint4* raw = STAGES > 1 ? (const uint4*)(memory + base + stage * HELD)
                                          : (const uint4*)x + (i64)(unsigned)now * (TILE / 8);
            n = __shfl_sync(FULL_WARP, claimed, 0);
            if (STAGES > 1) stage ^= 1;
            else warp_meets();  // all have their rows
            claimed = counted(words + 32 + lane, (int)blocks);
            send(n, stage);
            float y[4][8], bound[4], tops[2], squares[2];
            Tile::template sums_of<SIZES>(y, bound, a, b, weight, tops, means, squares);
            Near near[OWN];
            if constexpr (R > 32) {
                bound[0] += bound[1], bound[2] += bound[3];
                if (R == 128) bound[0] = bound[2] = bound[0] + bound[2];
                const float top = OWN > 1 ? tops[0] : larger_or_nan(tops[0], tops[1]);
                near[0] = near_of_rows<R>(top, bound[0] * least, means[0], squares[0], by);
                if constexpr (OWN > 1) near[1] = near_of_rows<R>(tops[1], bound[2] * least, means[1], squares[1], by);
            } else {
                near_of<R>(near, y, means[0], by);
            }
            unsigned word[4], unsure[4], trouble = 0;
            auto of_row = [&](int q, float& factor, float& within) {
                const Near& own = near[OWN == 1 ? 0 : R > 32 ? q / 2 : q / LANES];
                const int from = (lane & -LANES) + q % LANES;
                factor = R > 32 ? own.factor : __shfl_sync(FULL_WARP, own.factor, from);
                within = R > 32 ? own.near : __shfl_sync(FULL_WARP, own.near, from);
            };
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                float factor, within;
                of_row(q, factor, within);
                word[q] = codes_near<TO::BOUNDED>(y[q], factor, within, unsure[q]);
                trouble |= unsure[q];
            }
            bool sure = (trouble & UNSURE) == 0;
#pragma unroll
            for (int i = 0; i < OWN; ++i) sure = sure & near[i].sure;
            unsigned char* codes = apart<TILE / 2>(codes_at, now);
            unsigned char* scales = apart<TILE / GROUP>(scales_at, now);
            auto there = [&](int q, int left) { return row_of(q, g) + RUN * t < left; };
            auto leave = [&](int left) {
                auto of_own = [&](int q) { return row_of(q + own_row, g) + own_part < left; };  // groups
                if constexpr (R == 128) {
                    if (there(0, left)) store_words(codes, word[0], word[1], word[2], word[3]);
                } else if constexpr (R == 64) {
                    if (there(0, left)) store_words(codes, word[0], word[1]);
                    if (there(2, left)) store_words(codes + row_of(2, 0) / 2, word[2], word[3]);
                } else {
#pragma unroll
                    for (int q = 0; q < 4; ++q)
                        if (there(q, left)) store_word(codes + row_of(q, 0) / 2, word[q]);
                }
                if constexpr (BESIDE) {
                    if (of_own(0)) store_byte(scales, t & 1 ? near[OWN - 1].code : near[0].code);
                } else if constexpr (R == 128 && OWN == 2) {
                    if (of_own(0)) store_bytes(scales, near[0].code, near[1].code);
                } else {
                    constexpr int NEXT_GROUP = R > 32 ? 2 : LANES;
#pragma unroll
                    for (int i = 0; i < OWN; ++i)
                        if (of_own(NEXT_GROUP * i)) store_byte(scales + row_of(NEXT_GROUP * i, 0) / GROUP, near[i].code);
                }
            };
            if (now < whole) leave(TILE);
            else leave(rest);
            if (!__any_sync(FULL_WARP, !sure)) continue;
            const int left = now < whole ? TILE : rest;
            // In doubt: scales of groups, bit n that of row n's, and else bytes of two codes, four bits each, of rows 0 and 1 and
            // of rows 2 and 3.
            unsigned doubts = 0;
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                doubts |= near[i].sure ? 0u : R <= 32 ? 1u << LANES * i << t % LANES : OWN == 1 ? 15u : 3u << 2 * i;
            if (R <= 32)
#pragma unroll
                for (int m = 1; m < LANES; m *= 2) doubts |= __shfl_xor_sync(FULL_WARP, doubts, m);
            if (R <= 32)
#pragma unroll
                for (int q = 0; q < 4; ++q) unsure[q] = doubts >> q & 1u || !there(q, left) ? 0u : unsure[q];
            unsigned upper = joined_halves(unsure[0], unsure[1] << 4) & UNSURE * 17u;
            unsigned lower = joined_halves(unsure[2], unsure[3] << 4) & UNSURE * 17u;
            if (R > 32 && !(near[0].sure && there(0, left))) upper = 0u;
            if (R > 32 && !(near[OWN - 1].sure && there(2, left))) lower = 0u;
            warp_meets();  // what follows is written after what was written above
#pragma unroll 1
            for (unsigned lanes; (lanes = lanes_where((upper | lower) != 0)) != 0;) {
                const int lead = (int)last_of(lanes);  // whose last byte is made anew
                const unsigned bytes = upper ? upper : lower, bit = last_of(bytes) & 28u;
                const int q = (int)(bit >> 2 & 1u) + (upper ? 0 : 2);
                const unsigned at = __shfl_sync(FULL_WARP, (unsigned)(row_of(q, g) + RUN * t) + bit / 8 * 2, lead);
                int row = q, from = lead;  // and lane, which have its factor
                if (R <= 32) row = __shfl_sync(FULL_WARP, q, lead), from = (lead & -LANES) + row % LANES;
                const bool second = OWN > 1 && row >= 4 / OWN;
                const unsigned scale = second ? near[OWN - 1].code : near[0].code;
                const float about = second ? near[OWN - 1].factor : near[0].factor;
                const float factor = __shfl_sync(FULL_WARP, by.exactly(scale, about), from);
                const unsigned others = lane == lead ? ~(15u << bit) : ~0u;
                if (upper) upper &= others;
                else lower &= others;
                const int column = (int)(at % R) + (lane & 1);
                const float sum = sum_of_chains(raw, (int)(at / R * (R / 8)), column, c);
                const unsigned code = e2m1_of_one(a_number(sum * factor));
                const unsigned both = code | __shfl_xor_sync(FULL_WARP, code, 1) << 4;
                if (lane == 0) store_byte(to.out + (unsigned long long)now * (TILE / 2) + at / 2, both);
            }
            constexpr unsigned LEADS = R > 32 ? (BESIDE ? 0x55555555u : FULL_WARP) : LANES == 4 ? 0x11111111u : 0x55555555u;
            if (R > 32) doubts &= OWN == 1 ? 1u : 5u;
            unsigned groups = lanes_where(doubts != 0) & LEADS;
#pragma unroll 1
            for (; groups; groups &= groups - 1) {
                const int lead = (int)first_of(groups), part = R > 32 ? RUN * (lead & 3) : (lead & 3) / LANES * GROUP;
#pragma unroll 1
                for (unsigned rows_of = __shfl_sync(FULL_WARP, doubts, lead); rows_of; rows_of &= rows_of - 1) {
                    const int q = (int)first_of(rows_of), at = row_of(q, lead >> 2) + part;
                    if (at >= left) continue;
                    put_by_lanes((i64)now * TILE + at, sum_at(raw, at / R * (R / 8), at % R + lane % GROUP, c), to);
                }
            }
        }
        return true;
    }
};
