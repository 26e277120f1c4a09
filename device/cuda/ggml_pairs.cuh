// Blocks of 32: a lane has two neighbouring blocks, whose words lie at multiples of four bytes together.
//
// Codes of the activations lie in shared memory as the weight's do, with zeros where a block has its scale, so that an
// aligned word of the weight meets one of theirs; four bits have two such streams, for the low ones and the high ones.
#pragma once
#include "ggml_row.cuh"

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

// The row's codes, and of each block its scale and what its integers lack or Q8_1's sum.
template <int TYPE> VT_MEMBER void code_pairs(const Row& p, Eights& eights, u8* codes, unsigned* scales) {
    using P = Pairs<TYPE>;
    int units = (int)(p.depth / 32), stream = units * P::BYTES;
#pragma unroll 1
    for (int first = 0; first < units * 4; first += 32 * CREW) {
        int at = first + (int)threadIdx.x;
        bool inside = at < units * 4;
        int unit = at >> 2, part = at & 3;
        float x[8];
        eights.next(x);
        Codes c = codes_32(x);
#pragma unroll
        for (int m = 1; m <= 2; m *= 2) c.total += __shfl_xor_sync(ALL, c.total, m);
        if (!inside) continue;
        int begin = unit * P::BYTES + P::FIRST;
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

template <int TYPE> VT_MEMBER void in_pairs(const Row& p, int blocks, int each, int) {
    using P = Pairs<TYPE>;
    VT_SHARED(memory);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, units = (int)(p.depth / 32), row_bytes = units * P::BYTES;
    u8* ring = memory + warp * (P::DEPTH * P::SLOT);
    float* terms = (float*)(memory + CREW * P::DEPTH * P::SLOT) + warp * (TILE * P::PITCH);
    unsigned* scales = (unsigned*)(memory + CREW * (P::DEPTH * P::SLOT + TILE * P::PITCH * 4));
    u8* codes = (u8*)(scales + 2 * units);
    int number = (int)blockIdx.x * CREW + warp, chunks = (units + 32 * P::UNITS - 1) / (32 * P::UNITS);
    int first = begin_of(number, blocks * CREW, (int)p.columns, each);
    int last = begin_of(number + 1, blocks * CREW, (int)p.columns, each);
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
    Eights eights(p, (int)threadIdx.x, 32 * CREW);
#pragma unroll 1
    for (int s = 0; s < P::DEPTH - 1; ++s) send(s);
    code_pairs<TYPE>(p, eights, codes, scales);
    __syncthreads();
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
    auto meet_slot = [&](const unsigned (&w)[P::ROWS][P::WORDS], int r) {
#pragma unroll
        for (int k = 0; k < P::ROWS; ++k) {
            float term[P::UNITS];
            meet_pair<TYPE>(term, w[k], x, d, lack);
            *(uint2*)(terms + (r + k) * P::PITCH + lane * P::UNITS) = {(unsigned)vt_bits(term[0]), (unsigned)vt_bits(term[1])};
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
    if (height <= P::ROWS && tiles == 1) {
        // A slot a chunk: terms of one are added while those of the next are made, which would take as long again.
        // Before the first they are zeros, which leave the sum at +0.
        const float* from = terms + (lane % P::ROWS) * P::PITCH;
        for (int i = lane; i < P::ROWS * P::PITCH; i += 32) terms[P::ROWS * P::PITCH + i] = 0.0f;
        int count = 0;
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
            unsigned w[P::ROWS][P::WORDS];
            count = begin_chunk(c);
            take_slot(w);
#pragma unroll
            for (int i = 0; i < 32 * P::UNITS; i += 4) add_four(from + (~c & 1) * P::ROWS * P::PITCH + i);
            meet_slot(w, (c & 1) * P::ROWS);
        }
        warp_meets();
        add_up_to(from + (~chunks & 1) * P::ROWS * P::PITCH, count);
        float one[1] = {sum};
        if (lane < last - first) store(p.out, first + lane, one, (int)p.kind);
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
                meet_slot(w, r);
            }
            warp_meets();
            if (lane < rows) add_up_to(terms + lane * P::PITCH, count);
            warp_meets();
        }
        float one[1] = {sum};
        if (lane < rows) store(p.out, top + lane, one, (int)p.kind);
    }
}
