// Blocks of 32: a lane has two neighbouring blocks, whose words lie at multiples of four bytes together.
//
// Codes of the activations lie in shared memory as the weight's do, with zeros where a block has its scale, so that an
// aligned word of the weight meets one of theirs; four bits have two such streams, for the low ones and the high ones.
#pragma once
#include "early.cuh"
#include "ggml_ring.cuh"

template <int TYPE> struct Pairs {
    static constexpr int BYTES = Block<TYPE>::BYTES;
    static constexpr int UNITS = 2;                          // blocks of a lane
    static constexpr int WORDS = UNITS * BYTES / 4;          // of a lane
    static constexpr int ABREAST = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;  // words of a load: lanes meet in no bank
    static constexpr int PIECE = 32 * WORDS * 4;             // bytes of a warp's of a row
    static constexpr int ROWS = TYPE == Q8_0 ? 1 : 2, SLOT = ROWS * PIECE;  // rows of a slot
    static constexpr bool FOUR = TYPE != Q8_0, FIVE = TYPE == Q5_0 || TYPE == Q5_1, SUMS = Block<TYPE>::MINIMUM;
    static constexpr int FIRST = BYTES - (FOUR ? 16 : 32);   // where a block's codes begin
    static constexpr int STREAMS = FOUR ? 2 : 1;
    static constexpr int TERMS = 32 * UNITS, PITCH = TERMS + 4;
    static constexpr int DEPTH = 9500 / SLOT;                // slots of a warp's ring
};

// Which of a lane's blocks word `i` holds codes of, or -1.
template <int TYPE> VT_FN constexpr int block_of(int i) {
    using P = Pairs<TYPE>;
    int block = P::UNITS == 2 && 4 * i + 4 > P::BYTES + P::FIRST ? 1 : 0, within = 4 * i + 4 - block * P::BYTES;
    return within > P::FIRST && 4 * i < (block + 1) * P::BYTES ? block : -1;
}

template <int TYPE> VT_FN void words_of_lane(unsigned (&w)[Pairs<TYPE>::WORDS], const u8* from) {
    using P = Pairs<TYPE>;
#pragma unroll
    for (int i = 0; i < P::WORDS; i += P::ABREAST) {
        if constexpr (P::ABREAST == 4) {
            uint4 four = *(const uint4*)(from + 4 * i);
            w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
        } else if constexpr (P::ABREAST == 2) {
            uint2 two = *(const uint2*)(from + 4 * i);
            w[i] = two.x, w[i + 1] = two.y;
        } else {
            w[i] = *(const unsigned*)(from + 4 * i);
        }
    }
}

// Fifth bits of four codes, on top of their four.
VT_FN unsigned on_top(unsigned four, unsigned bits) { return (bits & 15u) * 0x02040810u & 0x10101010u | four; }

// Eight of a block's codes, and of the block its scale and what its integers lack or Q8_1's sum.
template <int TYPE> VT_MEMBER void put_codes(u8* codes, unsigned* scales, int stream, int at, const Codes& c) {
    using P = Pairs<TYPE>;
    int unit = at >> 2, part = at & 3, begin = unit * P::BYTES + P::FIRST;
    u8* to = codes + begin + (P::FOUR ? (part >> 1) * stream + (part & 1) * 8 : part * 8);
    unsigned short* halves = (unsigned short*)to;
#pragma unroll
    for (int i = 0; i < 4; ++i) halves[i] = (unsigned short)(packed4(c.code[2 * i], c.code[2 * i + 1], 0, 0));
    if (P::FOUR ? (part & 1) == 0 : part == 0) {
#pragma unroll
        for (int i = 1; i <= P::FIRST / 2; ++i) halves[-i] = 0;
    }
    if (part == 0) {
        scales[2 * unit] = (unsigned)vt_bits(widen_f16(f16_of(c.d)));
        if constexpr (Block<TYPE>::MINIMUM) scales[2 * unit + 1] = (unsigned)vt_bits(widen_f16(f16_of_sum(c.d, c.total)));
        else scales[2 * unit + 1] = (unsigned)(c.total * (TYPE == Q5_0 ? 16 : 8));
    }
}

// The row's, N of a lane's eights at once.
template <int TYPE, int N> VT_MEMBER void code_pairs(const Row& p, Eights& eights, u8* codes, unsigned* scales) {
    constexpr int STEP = 32 * CREW;
    int units = (int)(p.depth / 32), stream = units * Pairs<TYPE>::BYTES;
#pragma unroll 1
    for (int first = 0; first < units * 4; first += N * STEP) {
        int at = first + (int)threadIdx.x;
        float x[N][8];
        Codes c[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            eights.next(x[n]);
            if (at + n * STEP < units * 4) continue;
#pragma unroll
            for (int i = 0; i < 8; ++i) x[n][i] = 1.0f;  // zeros would take the long way
        }
        words_32(c, x);
#pragma unroll
        for (int n = 0; n < N; ++n)
            if (at + n * STEP < units * 4) put_codes<TYPE>(codes, scales, stream, at + n * STEP, c[n]);
    }
}

// A lane's terms of a row: its words `w`, the activations' codes `x`, scales and what the integers lack.
template <int TYPE>
VT_MEMBER void meet_pair(float (&term)[2], const unsigned (&w)[Pairs<TYPE>::WORDS],
                         const unsigned (&x)[Pairs<TYPE>::STREAMS][Pairs<TYPE>::WORDS], const float (&d)[2], const unsigned (&lack)[2]) {
    using P = Pairs<TYPE>;
    int one[P::UNITS], two[P::UNITS];
#pragma unroll
    for (int u = 0; u < P::UNITS; ++u) {
        one[u] = P::FOUR && !P::SUMS ? -(int)lack[u] : 0;
        two[u] = 0;
    }
#pragma unroll
    for (int i = 0; i < P::WORDS; ++i) {
        int u = block_of<TYPE>(i);
        if (u < 0) continue;
        if constexpr (P::FIVE) {
            int at = u * P::BYTES + P::FIRST, first = 4 * i - at, head = (at - 4) / 4;  // of its bits in `fifth`
            unsigned fifth = at % 4 ? w[head] >> 16 | w[head + 1] << 16 : w[head];
            unsigned low = first < 0 ? fifth << 2 : fifth >> first, high = fifth >> 16 + first;
            one[u] = dot4_unsigned(on_top(w[i] & 0x0f0f0f0fu, low), x[0][i], one[u]);
            two[u] = dot4_unsigned(on_top(w[i] >> 4 & 0x0f0f0f0fu, high), x[1][i], two[u]);
        } else if constexpr (P::FOUR) {
            one[u] = dot4_unsigned(w[i] & 0x0f0f0f0fu, x[0][i], one[u]);
            two[u] = dot4_unsigned(w[i] & 0xf0f0f0f0u, x[1][i], two[u]);
        } else if (i & 1) {
            one[u] = dot4(w[i], x[0][i], one[u]);
        } else {
            two[u] = dot4(w[i], x[0][i], two[u]);
        }
    }
#pragma unroll
    for (int u = 0; u < P::UNITS; ++u) {
        constexpr int SHIFT = P::FOUR && !P::FIVE ? 4 : 0;  // high codes were left where they stand
        float whole = (float)(one[u] + (two[u] >> SHIFT));
        unsigned head = w[u * P::BYTES / 4];
        float scale = widen_f16(u * P::BYTES % 4 ? head >> 16 : head & 0xffffu);
        if constexpr (P::SUMS) term[u] = (scale * d[u]) * whole - -widen_f16(head >> 16) * vt_float((int)lack[u]);
        else if constexpr (TYPE == Q4_0) term[u] = (whole * scale) * d[u];
        else term[u] = whole * (scale * d[u]);
    }
}

// Where no warp has more rows than a slot: a warp of its own adds all rows' terms, a lane each, while those of the next
// chunk are made. Each warp would bring 32 lanes' worth of terms for one or two of them.
template <int TYPE> struct Aside {
    using P = Pairs<TYPE>;
    static constexpr int DEEP = 3, ROWS = CREW * P::ROWS, SIZE = ROWS * P::PITCH;  // buffers of a chunk's terms; of one
    float* terms;
    u64 *full, *empty;
    VT_MEMBER Aside(float* all) : terms(all), full((u64*)(all + DEEP * SIZE)), empty(full + DEEP) {}
    VT_MEMBER void begin() const {
        for (int i = 0; i < DEEP; ++i) {
            phases_begin(full + i, 32 * CREW);
            phases_begin(empty + i, 32);
        }
        phases_seen();
    }
    VT_MEMBER float add(int units) const {
        int lane = threadIdx.x & 31, buffer = 0;
        unsigned parity = 0;
        float sum = 0.0f;
#pragma unroll 1
        for (int left = units; left > 0; left -= P::TERMS) {
            phase_over(full + buffer, parity);
            const float* from = terms + buffer * SIZE + lane % ROWS * P::PITCH;
            if (left >= P::TERMS) {
                uint4 four[P::TERMS / 4];
#pragma unroll
                for (int i = 0; i < P::TERMS / 4; ++i) four[i] = ((const uint4*)from)[i];
#pragma unroll
                for (int i = 0; i < P::TERMS / 4; ++i) {
                    sum = sum + vt_float((int)four[i].x);
                    sum = sum + vt_float((int)four[i].y);
                    sum = sum + vt_float((int)four[i].z);
                    sum = sum + vt_float((int)four[i].w);
                }
            } else {
#pragma unroll 1
                for (int i = 0; i < left; ++i) sum = sum + from[i];
            }
            arrive(empty + buffer);
            if (++buffer == DEEP) {
                buffer = 0;
                parity ^= 1;
            }
        }
        return sum;
    }
};

template <int TYPE> VT_MEMBER void in_pairs(const Row& p, int blocks, int each, int) {
    using P = Pairs<TYPE>;
    VT_SHARED(memory);
    others_may_start();
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, units = (int)(p.depth / 32), row_bytes = units * P::BYTES;
    u8* ring = memory + warp * (P::DEPTH * P::SLOT);
    float *all_terms = (float*)(memory + CREW * P::DEPTH * P::SLOT), *terms = all_terms + warp * (TILE * P::PITCH);
    unsigned* scales = (unsigned*)(memory + CREW * (P::DEPTH * P::SLOT + TILE * P::PITCH * 4));
    u8* codes = (u8*)(scales + 2 * units);
    int number = (int)blockIdx.x * CREW + warp, chunks = (units + 32 * P::UNITS - 1) / (32 * P::UNITS);
    int first = begin_of(number, blocks * CREW, (int)p.columns, each);
    int last = begin_of(number + 1, blocks * CREW, (int)p.columns, each);
    const Aside<TYPE> aside(all_terms);
    bool few = each + ((int)p.columns > each * blocks * CREW) <= P::ROWS;
    int tiles = (last - first + TILE - 1) / TILE;
    int height = tiles > 1 ? (int)((unsigned)(last - first + tiles - 1) / (unsigned)tiles) : last - first;  // of a tile
    // What is sent for next.
    int tile = 0, chunk = 0, begin = first, end = first + height, row = begin, slot = 0;
    const u8* from = p.b + row * p.stride + 16 * lane;
    const Spot spot = spot_of(ring + 16 * lane);
    auto send = [&](int to) {
        if (tile < tiles) {
            int left = row_bytes - chunk * P::PIECE - 16 * lane;
#pragma unroll
            for (int r = 0; r < P::ROWS; ++r) {
                if (row + r >= end) break;
#pragma unroll
                for (int i = 0; i < P::PIECE; i += 512) {
                    bool within = i + 512 <= P::PIECE || 16 * lane < P::PIECE - i;
                    if (within && i < left) copy_to(spot + to * P::SLOT + r * P::PIECE + i, from + r * p.stride + i);
                }
            }
            row += P::ROWS;
            from += P::ROWS * p.stride;
            if (row >= end) {
                if (++chunk == chunks) {
                    chunk = 0;
                    ++tile;
                    begin = end;
                    end = end + height < last ? end + height : last;
                }
                row = begin;
                from = p.b + row * p.stride + chunk * P::PIECE + 16 * lane;
            }
        }
        copies_close();
    };
    after_others();
    if (warp < CREW) {
        Eights eights(p, (int)threadIdx.x, 32 * CREW);
#pragma unroll 1
        for (int s = 0; s < P::DEPTH - 1; ++s) send(s);
        if (units * 4 <= 32 * CREW) code_pairs<TYPE, 1>(p, eights, codes, scales);
        else code_pairs<TYPE, 2>(p, eights, codes, scales);
    } else if (lane == 0 && few) {
        aside.begin();
    }
    __syncthreads();
    if (warp == CREW) {
        if (!few) return;
        float one[1] = {aside.add(units)};
        number = (int)blockIdx.x * CREW + lane / P::ROWS;
        int row = begin_of(number, blocks * CREW, (int)p.columns, each) + lane % P::ROWS;
        bool mine = lane < aside.ROWS && row < begin_of(number + 1, blocks * CREW, (int)p.columns, each);
        if (mine) store(p.out, row, one, (int)p.kind);
        return;
    }
    unsigned x[P::STREAMS][P::WORDS], lack[P::UNITS];
    float d[P::UNITS], sum = 0.0f;
    int mine = 0;
    // The activations' part of a chunk: how many units it has.
    auto begin_chunk = [&](int c) {
        int left = units - c * 32 * P::UNITS, count = left < 32 * P::UNITS ? left : 32 * P::UNITS;
        mine = count / P::UNITS - 1 < lane ? count / P::UNITS - 1 : lane;
        const u8* words = codes + c * P::PIECE + mine * P::WORDS * 4;
#pragma unroll
        for (int u = 0; u < P::UNITS; ++u) {
            const unsigned* beside = scales + 2 * ((c * 32 + mine) * P::UNITS + u);
            d[u] = vt_float((int)beside[0]);
            lack[u] = beside[1];
        }
#pragma unroll
        for (int k = 0; k < P::STREAMS; ++k) words_of_lane<TYPE>(x[k], words + k * row_bytes);
        return count;
    };
    // The words of the next slot's rows; a second one that is not there leaves terms that nobody adds.
    auto take_slot = [&](unsigned (&w)[P::ROWS][P::WORDS]) {
        copies_wait<P::DEPTH - 2>();
        warp_meets();
        send(slot == 0 ? P::DEPTH - 1 : slot - 1);
        const u8* held = ring + slot * P::SLOT + mine * P::WORDS * 4;
        slot = slot + 1 == P::DEPTH ? 0 : slot + 1;
#pragma unroll
        for (int k = 0; k < P::ROWS; ++k) words_of_lane<TYPE>(w[k], held + k * P::PIECE);
    };
    auto meet_slot = [&](const unsigned (&w)[P::ROWS][P::WORDS], float* to) {
#pragma unroll
        for (int k = 0; k < P::ROWS; ++k) {
            float term[P::UNITS];
            meet_pair<TYPE>(term, w[k], x, d, lack);
            *(uint2*)(to + k * P::PITCH + lane * P::UNITS) = {(unsigned)vt_bits(term[0]), (unsigned)vt_bits(term[1])};
        }
    };
    auto add_four = [&](const float* from) {
        uint4 four = *(const uint4*)from;
        sum = sum + vt_float((int)four.x);
        sum = sum + vt_float((int)four.y);
        sum = sum + vt_float((int)four.z);
        sum = sum + vt_float((int)four.w);
    };
    auto add_up_to = [&](const float* from, int count) {
        int i = 0;
#pragma unroll 4
        for (; i + 4 <= count; i += 4) add_four(from + i);
        for (; i < count; ++i) sum = sum + from[i];
    };
    if (few) {
        int buffer = 0;
        unsigned parity = 1;
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
            unsigned w[P::ROWS][P::WORDS];
            begin_chunk(c);
            take_slot(w);
            phase_over(aside.empty + buffer, parity);
            meet_slot(w, aside.terms + buffer * aside.SIZE + warp * P::ROWS * P::PITCH);
            arrive(aside.full + buffer);
            if (++buffer == aside.DEEP) {
                buffer = 0;
                parity ^= 1;
            }
        }
        return;
    }
    for (int t = 0; t < tiles; ++t) {
        int top = first + t * height, rows = last - top < height ? last - top : height;
        sum = 0.0f;
        for (int c = 0; c < chunks; ++c) {
            int count = begin_chunk(c);
            for (int r = 0; r < rows; r += P::ROWS) {
                unsigned w[P::ROWS][P::WORDS];
                take_slot(w);
                meet_slot(w, terms + r * P::PITCH);
            }
            warp_meets();
            if (lane < rows) add_up_to(terms + lane * P::PITCH, count);
            warp_meets();
        }
        float one[1] = {sum};
        if (lane < rows) store(p.out, top + lane, one, (int)p.kind);
    }
}
