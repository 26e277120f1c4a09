// Blocks of 256: teams of warps take sixteen rows of the weight at once, a block each, on the tensor cores.
//
// A warp leaves its block's terms in shared memory; when each warp of the team has had its blocks of this round, a thread
// for each of the rows' sums adds them in order.
#pragma once
#include "ggml_meet.cuh"

template <int TYPE> struct Tiles {
    static constexpr int BYTES = Block<TYPE>::BYTES, SUMS = Block<TYPE>::LANES ? 8 : 1;  // SUMS: of a row
    static constexpr bool ALIGNED = BYTES % 16 == 0, GRID = TYPE == IQ2_XXS || TYPE == IQ3_XXS;
    static constexpr bool PAIRED = ALIGNED || GRID;  // lane t has words 2 t and 2 t + 1 of a unit, else t and t + 4
    static constexpr bool MINIMUM = Block<TYPE>::MINIMUM, HALVES = TYPE == Q2_K;  // HALVES: minimums of half units
    static constexpr int A_SUMS = MINIMUM ? HALVES ? 16 : 8 : 0;  // the activations', of a block
    static constexpr bool LOWS = MINIMUM && SUMS == 8;            // minimums run by themselves
    static constexpr int CHUNK = BYTES > 128 ? 1 : GGML_CHUNK, SPAN = CHUNK * BYTES;  // blocks of a slot, a row's bytes
    // Sixteens of bytes from row to row: rows' words of one number meet in no bank.
    static constexpr int LEAST = ALIGNED ? SPAN / 16 : (SPAN + 30) / 16;
    static constexpr int PIECES = ALIGNED ? LEAST + (10 - LEAST % 8) % 4 : LEAST | 1;
    static constexpr int PITCH = 16 * PIECES, SLOT = 16 * PITCH, STAGES = GGML_RING / SLOT;
};

// The row's codes, of each block its scale, and the sums of its units or of their halves.
template <int TYPE> VT_MEMBER void code_tiles(const Row& p, u8* codes, float* scales, unsigned short* sums) {
    using T = Tiles<TYPE>;
    int blocks = (int)(p.depth / 256), lane = threadIdx.x & 31, part = lane & 3;
    bool wide = ((unsigned long long)p.a & 15) == 0;
    for (int block = (int)threadIdx.x >> 5; block < blocks; block += CREW) {
        float x[8];
        load_eight(x, p.a, (i64)block * 256 + lane * 8, (int)p.a_kind, wide);
        Codes c = codes_256(x, lane);
        unsigned low = packed4(c.code[0], c.code[1], c.code[2], c.code[3]);
        unsigned high = packed4(c.code[4], c.code[5], c.code[6], c.code[7]);
        int unit = lane >> 2;
        u8* to = codes + block * 256 + (unit >> 1) * 64 + (unit & 1) * 8;
        if constexpr (T::PAIRED) {
            *(uint2*)(to + part * 16) = {low, high};
        } else {
            unsigned* words = (unsigned*)(to + (part & 1) * 32 + (part >> 1) * 4);
            words[0] = low;
            words[4] = high;
        }
        if constexpr (T::MINIMUM) {
            int total = c.total + __shfl_xor_sync(ALL, c.total, 1);
            if constexpr (!T::HALVES) total += __shfl_xor_sync(ALL, total, 2);
            if (T::HALVES ? (part & 1) == 0 : part == 0) sums[block * T::A_SUMS + (T::HALVES ? lane / 2 : unit)] = (unsigned short)total;
        }
        if (lane == 0) scales[block] = c.d;
    }
}

template <int TYPE> VT_MEMBER void in_tiles(const Row& p, int grid, int TEAM) {
    using L = Tiles<TYPE>;
    constexpr int C = L::CHUNK, ROWS = 16, ROUND = CREW * C, SUMS = L::SUMS, TERMS = ROWS * SUMS;  // ROUND: of all teams
    VT_SHARED(memory);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, TEAMS = CREW / TEAM, team = warp / TEAM, member = warp - team * TEAM;
    int g = lane >> 2, t = lane & 3, line = lane >> 1, side = lane & 1;
    int blocks = (int)(p.depth / 256), row_bytes = blocks * L::BYTES, stride = (int)p.stride, round_blocks = TEAM * C;
    u8* ring = memory + warp * (L::STAGES * L::SLOT);
    u8* rest = memory + CREW * L::STAGES * L::SLOT;
    float* terms = (float*)rest + team * round_blocks * TERMS;  // a second half of them ROUND * TERMS further on
    float* lows = (float*)rest + 2 * ROUND * TERMS + team * round_blocks * ROWS;
    rest += 2 * ROUND * (TERMS + (L::LOWS ? ROWS : 0)) * 4;
    unsigned* grid_of = (unsigned*)rest;
    if constexpr (L::GRID) rest += 1024;
    u8* codes = rest;
    unsigned short* sums = (unsigned short*)(codes + p.depth);
    float* scales = (float*)(codes + p.depth + blocks * L::A_SUMS * 2);
    int number = (int)blockIdx.x * TEAMS + team, rounds = (blocks + round_blocks - 1) / round_blocks;
    int first = cut(0, (int)p.columns, number, grid * TEAMS), last = cut(0, (int)p.columns, number + 1, grid * TEAMS);
    int tiles = (last - first + ROWS - 1) / ROWS;
    // What is sent for next.
    int tile = 0, round = 0, top = first, rows = tiles ? cut(first, last, 1, tiles) - first : 0;
    const u8* base = p.b + first * p.stride;
#if defined(__CUDACC__) && defined(GGML_BULK)
    __shared__ unsigned long long bars[CREW][L::STAGES];
    if (lane < L::STAGES) bulk_barrier(&bars[warp][lane], ROWS);
    __syncwarp();
    unsigned phase = 0;
#endif
    // Two lanes a row: its bytes from the sixteen that they begin in; nothing past the row is touched.
    auto send = [&](int to) {
        int at = (round * TEAM + member) * C, count = blocks - at < C ? blocks - at : C;
        if (tile < tiles && count > 0) {
            const u8* from = base + line * stride + at * L::BYTES;
            int skew = L::ALIGNED ? 0 : (int)(unsigned long long)from & 15, end = line < rows ? skew + count * L::BYTES : 0;
            u8* slot = ring + to * L::SLOT + line * L::PITCH;
            from -= skew;
            int whole = end + 15 >> 4;
            if constexpr (!L::ALIGNED) {
                int room = skew + row_bytes - at * L::BYTES >> 4;  // to the row's end
                if (room < whole) {
                    whole = room;
                    if (side == 0)
                        for (int i = 16 * whole; i < end; i += 2) *(unsigned short*)(slot + i) = *(const unsigned short*)(from + i);
                }
            }
#if defined(__CUDACC__) && defined(GGML_BULK)
            if (side == 0) {
                bulk_expect(&bars[warp][to], 16 * whole);
                if (whole) bulk_copy(slot, from, 16 * whole, &bars[warp][to]);
            }
#else
            slot += 16 * side;
            from += 16 * side;
            whole -= side;
#pragma unroll
            for (int i = 0; i < (L::LEAST + 1) / 2; ++i)
                if (2 * i < whole) copy_async(slot + 32 * i, from + 32 * i);
#endif
        }
        copies_close();
        if (++round == rounds) {
            round = 0;
            if (++tile < tiles) {
                top += rows;
                rows = cut(first, last, tile + 1, tiles) - top;
                base = p.b + top * p.stride;
            }
        }
    };
#pragma unroll
    for (int s = 0; s < L::STAGES - 1; ++s) send(s);
    code_tiles<TYPE>(p, codes, scales, sums);
    if constexpr (L::GRID) unfold<TYPE>(grid_of);
    __syncthreads();
    int slot = 0, half = 0, thread = member * 32 + lane;
    for (int i = 0; i < tiles; ++i) {
        int row0 = cut(first, last, i, tiles), height = cut(first, last, i + 1, tiles) - row0;
        float sum = 0.0f, low = 0.0f;
        for (int r = 0; r < rounds; ++r) {
            int at = (r * TEAM + member) * C, count = blocks - at < C ? blocks - at : C;
            float* to = terms + half * (ROUND * TERMS) + member * (C * TERMS);
            float* off = lows + half * (ROUND * ROWS) + member * (C * ROWS);
#if defined(__CUDACC__) && defined(GGML_BULK)
            if (count > 0) {
                bulk_wait(&bars[warp][slot], phase >> slot & 1);
                phase ^= 1u << slot;
            }
#else
            copies_wait<L::STAGES - 2>();
#endif
            warp_meets();
            send(slot == 0 ? L::STAGES - 1 : slot - 1);
            const u8* held = ring + slot * L::SLOT;
            slot = slot + 1 == L::STAGES ? 0 : slot + 1;
            if (count > 0) {
                unsigned here = L::ALIGNED ? 0 : (unsigned)(unsigned long long)(p.b + row0 * p.stride) + at * L::BYTES;
                unsigned step = L::ALIGNED ? 0 : (unsigned)stride;
                const u8* mine[2] = {held + g * L::PITCH + (here + g * step & 15), held + (g + 8) * L::PITCH + (here + (g + 8) * step & 15)};
#pragma unroll 1
                for (int j = 0; j < count; ++j) {
                    const u8* const two[2] = {mine[0] + j * L::BYTES, mine[1] + j * L::BYTES};
                    const u8* met = codes + (at + j) * 256;
                    float d = scales[at + j];
                    if constexpr (SUMS == 8) {
                        int total[4];
                        float factor[2], less;
                        meet_lanes<TYPE>(total, factor, less, two, met, d, sums + L::A_SUMS * (at + j), g, t);
                        if (L::LOWS && t < 2) off[ROWS * j + g + 8 * t] = less;
#pragma unroll
                        for (int k = 0; k < 2; ++k) {
                            float x = factor[k] * (float)total[2 * k], y = factor[k] * (float)total[2 * k + 1];
                            *(uint2*)(to + TERMS * j + 8 * (g + 8 * k) + 2 * t) = {(unsigned)vt_bits(x), (unsigned)vt_bits(y)};
                        }
                    } else {
                        float term = meet_whole<TYPE>(two, met, d, sums + L::A_SUMS * (at + j), grid_of, g, t);
                        if (t < 2) to[TERMS * j + g + 8 * t] = term;
                    }
                }
            }
            team_meets(team, 32 * TEAM);
            if (thread < TERMS) {
                int left = blocks - r * round_blocks, n = left < round_blocks ? left : round_blocks;
                const float* from = terms + half * (ROUND * TERMS) + thread;
                const float* under = lows + half * (ROUND * ROWS) + thread / SUMS;
#pragma unroll 4
                for (int b = 0; b < n; ++b) {
                    sum = sum + from[TERMS * b];
                    if (L::LOWS) low = low - under[ROWS * b];
                }
            }
            half ^= 1;
        }
        if (thread < TERMS) {
            float total[1] = {low};
            if constexpr (SUMS == 8) {
#pragma unroll
                for (int c = 0; c < 8; ++c) total[0] = total[0] + __shfl_sync(ALL, sum, (lane & 24) + c);
            } else {
                total[0] = sum * Block<TYPE>::FOLD;
            }
            int row = thread / SUMS;
            if (thread % SUMS == 0 && row < height) store(p.out, row0 + row, total, (int)p.kind);
        }
    }
}
