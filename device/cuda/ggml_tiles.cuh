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
    static constexpr int STAGES = BYTES > 200 ? 3 : BYTES > 150 ? 4 : BYTES > 120 ? 5 : 6;  // slots of a team's ring

    // Bytes from row to row of so many blocks in shared memory: rows' words of one number meet in no bank.
    static VT_MEMBER int pitch(int blocks) {
        int pieces = ALIGNED ? blocks * BYTES / 16 : (blocks * BYTES + 30) / 16;
        return 16 * (ALIGNED ? pieces + (2 - pieces & 3) : pieces | 1);
    }
};

// The row's codes, of each block its scale, and the sums of its units or of their halves.
template <int TYPE> VT_MEMBER void code_tiles(const Row& p, Eights& eights, u8* codes, float* scales, unsigned short* sums) {
    using T = Tiles<TYPE>;
    int blocks = (int)(p.depth / 256), lane = threadIdx.x & 31, part = lane & 3;
    for (int block = (int)threadIdx.x >> 5; block < blocks; block += CREW) {
        float x[8];
        eights.next(x);
        Codes c = codes_256(x);
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

// A team has sixteen rows at a time and a block a warp of them; its warps share the work of copying.
template <int TYPE> VT_MEMBER void in_tiles(const Row& p, int grid, int team_size) {
    using T = Tiles<TYPE>;
    constexpr int ROWS = 16, SUMS = T::SUMS, TERMS = ROWS * SUMS;
    VT_SHARED(memory);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, teams = CREW / team_size, team = warp / team_size;
    int member = warp - team * team_size, thread = member * 32 + lane, g = lane >> 2, t = lane & 3;
    int blocks = (int)(p.depth / 256), row_bytes = blocks * T::BYTES, pitch = T::pitch(team_size), slot_bytes = ROWS * pitch;
    u8* ring = memory + team * T::STAGES * slot_bytes;
    u8* rest = memory + teams * T::STAGES * slot_bytes;
    float* terms = (float*)rest + team * team_size * TERMS;  // a second half of them CREW * TERMS further on
    float* lows = (float*)rest + 2 * CREW * TERMS + team * team_size * ROWS;
    rest += 2 * CREW * (TERMS + (T::LOWS ? ROWS : 0)) * 4;
    unsigned* grid_of = (unsigned*)rest;
    if constexpr (T::GRID) rest += 1024;
    u8* codes = rest;
    unsigned short* sums = (unsigned short*)(codes + p.depth);
    float* scales = (float*)(codes + p.depth + blocks * T::A_SUMS * 2);
    int number = (int)blockIdx.x * teams + team, rounds = (blocks + team_size - 1) / team_size;
    int first = cut(0, (int)p.columns, number, grid * teams), last = cut(0, (int)p.columns, number + 1, grid * teams);
    int tiles = (last - first + ROWS - 1) / ROWS;
    // What is sent for next.
    int tile = 0, round = 0, top = first, rows = tiles ? cut(first, last, 1, tiles) - first : 0;
    // Rows from the sixteen bytes that they begin in; nothing past a row is touched.
    auto send = [&](int to) {
        int at = round * team_size * T::BYTES, span = team_size * T::BYTES;
        if (span > row_bytes - at) span = row_bytes - at;
        if (tile < tiles) {
            for (int row = member; row < rows; row += team_size) {
                const u8* from = p.b + (top + row) * p.stride + at;
                u8* slot = ring + to * slot_bytes + row * pitch;
                int skew = T::ALIGNED ? 0 : (int)(unsigned long long)from & 15, end = skew + span;
                from -= skew;
                int whole = end;
                if (!T::ALIGNED && at + span == row_bytes) {
                    whole = end & ~15;
                    for (int i = whole + 2 * lane; i < end; i += 64)
                        *(unsigned short*)(slot + i) = *(const unsigned short*)(from + i);
                }
#pragma unroll 4
                for (int i = 16 * lane; i < whole; i += 512) copy_async(slot + i, from + i);
            }
        }
        copies_close();
        if (++round == rounds) {
            round = 0;
            if (++tile < tiles) {
                top += rows;
                rows = cut(first, last, tile + 1, tiles) - top;
            }
        }
    };
    Eights eights(p, (int)threadIdx.x, 32 * CREW);
    send(0);  // the others after the codes, whose loads would have to wait for all that is sent for before them
    code_tiles<TYPE>(p, eights, codes, scales, sums);
    if constexpr (T::GRID) unfold<TYPE>(grid_of);
#pragma unroll
    for (int s = 1; s < T::STAGES - 1; ++s) send(s);
    copies_wait<T::STAGES - 2>();
    __syncthreads();
    int slot = 0, half = 0;
    for (int i = 0; i < tiles; ++i) {
        int row0 = cut(first, last, i, tiles), height = cut(first, last, i + 1, tiles) - row0;
        float sum = 0.0f, low = 0.0f;
        for (int r = 0; r < rounds; ++r) {
            send(slot == 0 ? T::STAGES - 1 : slot - 1);
            const u8* held = ring + slot * slot_bytes;
            slot = slot + 1 == T::STAGES ? 0 : slot + 1;
            int block = r * team_size + member;
            if (block < blocks) {
                float* to = terms + (half * CREW + member) * TERMS;
                const u8* mine[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    int row = g + 8 * k, skew = (int)(long long)(p.b + (row0 + row) * p.stride + r * team_size * T::BYTES) & 15;
                    mine[k] = held + row * pitch + (T::ALIGNED ? 0 : skew) + member * T::BYTES;
                }
                const u8* met = codes + block * 256;
                float d = scales[block];
                if constexpr (SUMS == 8) {
                    int total[4];
                    float factor[2], less;
                    meet_lanes<TYPE>(total, factor, less, mine, met, d, sums + T::A_SUMS * block, g, t);
                    if (T::LOWS && t < 2) lows[(half * CREW + member) * ROWS + g + 8 * t] = less;
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        float x = factor[k] * (float)total[2 * k], y = factor[k] * (float)total[2 * k + 1];
                        *(uint2*)(to + 8 * (g + 8 * k) + 2 * t) = {(unsigned)vt_bits(x), (unsigned)vt_bits(y)};
                    }
                } else {
                    float term = meet_whole<TYPE>(mine, met, d, sums + T::A_SUMS * block, grid_of, g, t);
                    if (t < 2) to[g + 8 * t] = term;
                }
            }
            copies_wait<T::STAGES - 2>();  // what this thread has sent for the next round
            team_meets(team, 32 * team_size);
            if (thread < TERMS) {
                int left = blocks - r * team_size, n = left < team_size ? left : team_size;
                const float* from = terms + half * CREW * TERMS + thread;
                const float* under = lows + half * CREW * ROWS + thread / SUMS;
#pragma unroll 4
                for (int b = 0; b < n; ++b) {
                    sum = sum + from[TERMS * b];
                    if (T::LOWS) low = low - under[ROWS * b];
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
