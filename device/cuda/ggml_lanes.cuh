// Blocks of 256 whose sums run in eight lanes: teams of warps take sixteen rows of the weight at once.
//
// A warp multiplies sixteen rows' codes by eight columns of activations, of which column g holds lane g's alone, so that
// the tensor cores leave the eight lanes' integers beside each other. Its terms go to shared memory; when each warp
// of the team has had its blocks of this round, a thread for each row and lane adds them in order.
#pragma once

template <int TYPE> struct Lanes {
    static constexpr int BYTES = Block<TYPE>::BYTES;
    static constexpr bool ALIGNED = BYTES % 16 == 0, PAIRED = ALIGNED;  // PAIRED: words 2 t and 2 t + 1, else t and t + 4
    static constexpr bool MINIMUM = Block<TYPE>::MINIMUM;
    static constexpr int CHUNK = GGML_CHUNK, SPAN = CHUNK * BYTES;     // blocks of a slot, bytes of a row of them
    // Sixteens of bytes from row to row: rows' words of one number meet in no bank.
    static constexpr int LEAST = ALIGNED ? SPAN / 16 : (SPAN + 30) / 16;
    static constexpr int PIECES = PAIRED ? LEAST + (LEAST % 8 == 2 || LEAST % 8 == 6 ? 0 : (10 - LEAST % 8) % 4) : LEAST | 1;
    static constexpr int PITCH = 16 * PIECES, SLOT = 16 * PITCH, STAGES = TYPE == Q6_K ? GGML_STAGES_6 : GGML_STAGES;
};

// The row's codes, of each block its scale, and the sums of its units.
template <int TYPE> VT_MEMBER void code_lanes(const Row& p, u8* codes, float* scales, unsigned short* sums) {
    int blocks = (int)(p.depth / 256), lane = threadIdx.x & 31, part = lane & 3;
    bool wide = ((unsigned long long)p.a & 15) == 0;
    for (int block = (int)threadIdx.x >> 5; block < blocks; block += WARPS) {
        float x[8];
        load_eight(x, p.a, (i64)block * 256 + lane * 8, (int)p.a_kind, wide);
        Codes c = codes_256(x, lane);
        unsigned low = packed4(c.code[0], c.code[1], c.code[2], c.code[3]);
        unsigned high = packed4(c.code[4], c.code[5], c.code[6], c.code[7]);
        int unit = lane >> 2;
        u8* to = codes + block * 256 + (unit >> 1) * 64 + (unit & 1) * 8;
        if constexpr (Lanes<TYPE>::PAIRED) {
            *(uint2*)(to + part * 16) = {low, high};
        } else {
            unsigned* words = (unsigned*)(to + (part & 1) * 32 + (part >> 1) * 4);
            words[0] = low;
            words[4] = high;
        }
        if constexpr (Lanes<TYPE>::MINIMUM) {
#pragma unroll
            for (int m = 1; m <= 2; m *= 2) c.total += __shfl_xor_sync(ALL, c.total, m);
            if (part == 0) sums[block * 8 + unit] = (unsigned short)c.total;
        }
        if (lane == 0) scales[block] = c.d;
    }
}

// A word that may stand at an even address: what is `apart` is joined from two aligned ones.
VT_FN unsigned word_near(const u8* aligned, unsigned select) {
    const unsigned* q = (const unsigned*)aligned;
    return permute(q[0], q[1], select);
}

// Scales of Q4_K and Q5_K, six bits each, four to a word; the minimums stand in the other words of the same form.
VT_FN void six_bits_apart(unsigned (&s)[2], unsigned first, unsigned third) {
    s[0] = first & 0x3f3f3f3fu;
    s[1] = (third & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u);
}

// Products of a half with one scale and of a half with the next, each times its scale.
template <bool UPPER> VT_FN void scaled(int (&total)[4], const int (&one)[4], const int (&two)[4], unsigned s0, unsigned s1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int pair = (int)permute((unsigned)one[i], (unsigned)two[i], 0x5410);
        total[i] = UPPER ? dot2_high(pair, i < 2 ? s0 : s1, total[i]) : dot2_low(pair, i < 2 ? s0 : s1, total[i]);
    }
}

// The integers of lanes 2 t and 2 t + 1 of two rows, whose blocks are p[0] and p[1], and the rows' factors. `low` is the
// first row's term of the minimums for t = 0, the second one's for t = 1.
template <int TYPE>
VT_MEMBER void meet(int (&total)[4], float (&factor)[2], float& low, const u8* const (&p)[2], const u8* codes, float d,
                    const unsigned short* sums, int t, unsigned m0, unsigned m1) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] = 0;
    if constexpr (TYPE == Q4_K) {
        uint4 head[2] = {*(const uint4*)p[0], *(const uint4*)p[1]};
        unsigned s0[2], s1[2], m[2];
        six_bits_apart(s0, head[0].y, head[0].w);
        six_bits_apart(s1, head[1].y, head[1].w);
        uint4 other = t & 1 ? head[1] : head[0], a = *(const uint4*)sums;
        six_bits_apart(m, other.z, other.w >> 4);
        int minimum = dot2_high((int)a.y, m[0], dot2_low((int)a.x, m[0], 0));
        minimum = dot2_high((int)a.w, m[1], dot2_low((int)a.z, m[1], minimum));
        low = (widen_f16(other.x >> 16) * d) * (float)minimum;
        factor[0] = widen_f16(head[0].x & 0xffffu) * d;
        factor[1] = widen_f16(head[1].x & 0xffffu) * d;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            uint4 x = *(const uint4*)(codes + 64 * c + 16 * t);
            uint2 w0 = *(const uint2*)(p[0] + 16 + 32 * c + 8 * t), w1 = *(const uint2*)(p[1] + 16 + 32 * c + 8 * t);
            int one[4] = {0, 0, 0, 0}, two[4] = {0, 0, 0, 0};
            const unsigned low[4] = {w0.x & 0x0f0f0f0fu, w1.x & 0x0f0f0f0fu, w0.y & 0x0f0f0f0fu, w1.y & 0x0f0f0f0fu};
            const unsigned high[4] = {w0.x >> 4 & 0x0f0f0f0fu, w1.x >> 4 & 0x0f0f0f0fu, w0.y >> 4 & 0x0f0f0f0fu,
                                      w1.y >> 4 & 0x0f0f0f0fu};
            multiply_bytes(one, low, x.x & m0, x.y & m1);
            multiply_bytes(two, high, x.z & m0, x.w & m1);
            if (c & 1) scaled<true>(total, one, two, s0[c >> 1], s1[c >> 1]);
            else scaled<false>(total, one, two, s0[c >> 1], s1[c >> 1]);
        }
    } else if constexpr (TYPE == Q6_K) {
        // Codes less 32 are their six bits with the upper one turned over, four times as large at the top of a byte.
        int apart[2];
        unsigned select[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            apart[r] = (int)(unsigned long long)p[r] & 2;
            select[r] = apart[r] ? 0x5432u : 0x3210u;
        }
        bool straight = !__any_sync(ALL, apart[0] | apart[1]);
        low = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r) factor[r] = f16_at(p[r] + 208) * d;
#pragma unroll 1
        for (int h = 0; h < 2; ++h) {
            unsigned q[6][2], scale[2][2];
            const u8* from[2] = {p[0] - apart[0] + 64 * h + 4 * t, p[1] - apart[1] + 64 * h + 4 * t};
            const u8* beside[2] = {p[0] - apart[0] + 192 + 8 * h, p[1] - apart[1] + 192 + 8 * h};
            if (straight) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
#pragma unroll
                    for (int i = 0; i < 6; ++i) q[i][r] = *(const unsigned*)(from[r] + (i < 4 ? 16 * i : 128 - 32 * h + 16 * (i - 4)));
#pragma unroll
                    for (int i = 0; i < 2; ++i) scale[i][r] = *(const unsigned*)(beside[r] + 4 * i);
                }
            } else {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
#pragma unroll
                    for (int i = 0; i < 6; ++i) q[i][r] = word_near(from[r] + (i < 4 ? 16 * i : 128 - 32 * h + 16 * (i - 4)), select[r]);
#pragma unroll
                    for (int i = 0; i < 2; ++i) scale[i][r] = word_near(beside[r] + 4 * i, select[r]);
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                q[4][r] ^= 0xaaaaaaaau;
                q[5][r] ^= 0xaaaaaaaau;
            }
#pragma unroll
            for (int u = 0; u < 4; u += 2) {
                uint4 x = *(const uint4*)(codes + 128 * h + 32 * u + 16 * t);
                const unsigned a[4] = {x.x & m0, x.y & m0, x.z & m0, x.w & m0};
                int part[4][4] = {};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    unsigned b[2];
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        unsigned nibbles = (u ? q[i][r] >> 2 : q[i][r] << 2) & 0x3c3c3c3cu;
                        b[r] = nibbles | (q[4 + (i & 1)][r] << 6 - 2 * (u + (i >> 1)) & 0xc0c0c0c0u);
                    }
                    multiply_bytes(part[i], b, a[i]);
                }
                scaled<false>(total, part[0], part[1], scale[u >> 1][0], scale[u >> 1][1]);
                scaled<true>(total, part[2], part[3], scale[u >> 1][0], scale[u >> 1][1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] >>= 2;
    }
}

template <int TYPE> VT_MEMBER void in_lanes(const Row& p, int grid, int TEAM) {
    using L = Lanes<TYPE>;
    constexpr int C = L::CHUNK, ROWS = 16, ROUND = WARPS * C;  // ROUND: of all teams together
    VT_SHARED(memory);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, TEAMS = WARPS / TEAM, team = warp / TEAM, member = warp - team * TEAM;
    int g = lane >> 2, t = lane & 3, line = lane >> 1, side = lane & 1;
    int blocks = (int)(p.depth / 256), row_bytes = blocks * L::BYTES, stride = (int)p.stride, round_blocks = TEAM * C;
    u8* ring = memory + warp * (L::STAGES * L::SLOT);
    u8* rest = memory + WARPS * L::STAGES * L::SLOT;
    float* terms = (float*)rest + team * round_blocks * 128;           // a second half of them ROUND * 128 further on
    float* lows = (float*)rest + 2 * ROUND * 128 + team * round_blocks * ROWS;
    u8* codes = rest + 2 * ROUND * 144 * 4;
    unsigned short* sums = (unsigned short*)(codes + p.depth);
    float* scales = (float*)(codes + p.depth + blocks * 16);
    int number = (int)blockIdx.x * TEAMS + team, rounds = (blocks + round_blocks - 1) / round_blocks;
    int first = cut(0, (int)p.columns, number, grid * TEAMS), last = cut(0, (int)p.columns, number + 1, grid * TEAMS);
    int tiles = (last - first + ROWS - 1) / ROWS;
    // What is sent for next.
    int tile = 0, round = 0, top = first, rows = tiles ? cut(first, last, 1, tiles) - first : 0;
    const u8* base = p.b + first * p.stride;
#if defined(__CUDACC__) && defined(GGML_BULK)
    __shared__ unsigned long long bars[WARPS][L::STAGES];
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
#ifndef GGML_UNCODED
    code_lanes<TYPE>(p, codes, scales, sums);
#endif
    __syncthreads();
    // The byte of a word of activations that is of column g's lane.
    bool even = L::PAIRED || (t & 1) == 0;
    unsigned m0 = (g < 4) == even ? 0xffu << 8 * (g & 3) : 0u, m1 = L::PAIRED && g >= 4 ? 0xffu << 8 * (g & 3) : 0u;
    int slot = 0, half = 0, thread = member * 32 + lane;
    for (int i = 0; i < tiles; ++i) {
        int row0 = cut(first, last, i, tiles), height = cut(first, last, i + 1, tiles) - row0;
        float sum = 0.0f, low = 0.0f;
        for (int r = 0; r < rounds; ++r) {
            int at = (r * TEAM + member) * C, count = blocks - at < C ? blocks - at : C;
            float* to = terms + half * (ROUND * 128) + member * (C * 128);
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
#ifdef GGML_STREAM
                count = 0;
#endif
#pragma unroll 1
                for (int j = 0; j < count; ++j) {
                    int total[4];
                    float factor[2], less;
                    const u8* const two[2] = {mine[0] + j * L::BYTES, mine[1] + j * L::BYTES};
                    meet<TYPE>(total, factor, less, two, codes + (at + j) * 256, scales[at + j], sums + 8 * (at + j), t, m0, m1);
                    if (L::MINIMUM && t < 2) off[ROWS * j + g + 8 * t] = less;
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        float x = factor[k] * (float)total[2 * k], y = factor[k] * (float)total[2 * k + 1];
                        *(uint2*)(to + 128 * j + 8 * (g + 8 * k) + 2 * t) = {(unsigned)vt_bits(x), (unsigned)vt_bits(y)};
                    }
                }
            }
            team_meets(team, 32 * TEAM);
            if (thread < 128) {
                int left = blocks - r * round_blocks, n = left < round_blocks ? left : round_blocks;
                const float* from = terms + half * (ROUND * 128) + thread;
                const float* under = lows + half * (ROUND * ROWS) + (thread >> 3);
#pragma unroll 4
                for (int b = 0; b < n; ++b) {
                    sum = sum + from[128 * b];
                    if (L::MINIMUM) low = low - under[ROWS * b];
                }
            }
            half ^= 1;
        }
        if (thread < 128) {
            float total[1] = {low};
#pragma unroll
            for (int c = 0; c < 8; ++c) total[0] = total[0] + __shfl_sync(ALL, sum, (lane & 24) + c);
            int row = thread >> 3;
            if ((lane & 7) == 0 && row < height) store(p.out, row0 + row, total, (int)p.kind);
        }
    }
}
