// Formats of weights in Marlin's tiles, as kernels for Hopper unpack them into registers as left operands of tensor cores,
// and what becomes of a sum on its way to the result.
#pragma once
#include "w4a16.cuh"
#include "wgmma_registers.cuh"

#define SENDERS 4  // warps that take turns at stages: one alone would take longer to send than others to multiply

#if VT_TILES

#ifndef __CUDACC__
struct float4 { float x, y, z, w; };
#endif

// A sum of column n on its way to the result, as `finish` has it.
template <int KIND, int BITS> VT_FN float finished(float x, i64 n, const void* factors, const void* bias) {
    float y[1];
    if (factors != nullptr) {
        load(y, factors, single(n), KIND);
        if (BITS == 4) x = through(x, KIND);
        x *= y[0];
    }
    if (bias != nullptr) {
        load(y, bias, single(n), KIND);
        x = through(x, KIND) + y[0];
    }
    return x;
}

// Formats: the bytes that a lane has of a tile of 16 columns x 16 k, how many rows of scales 64 k have, and the bytes of
// such a row, and of zero points, for 64 columns. `Held` is what a lane keeps of scales for the TILES tiles from `first`
// on: `take` reads it, `operands` makes the left operand of tile j and the 16 k number s of the lane's words.
template <int KIND_, int BITS_, bool ZEROED> struct StreamedCodes {
    static constexpr int KIND = KIND_, TILE = BITS_, SCALE_ROWS = 1, SCALE_BYTES = 128, ZERO_BYTES = ZEROED ? 32 : 0;
    static constexpr unsigned NO_SCALE = Pairs<KIND>::ONE;

    template <int TILES> struct Held {
        unsigned mask, scale[TILES][2], minus[TILES][2];

        VT_MEMBER void begin(i64 depth, i64 zero) {
            // The mask is in a register, as long as the compiler cannot know: depth < 2^31.
            mask = (BITS_ == 4 ? 0x000f000fu : KIND == F16 ? 0x00ff00ffu : 0x007f007fu) + (unsigned)(depth >> 32);
#pragma unroll
            for (int j = 0; j < TILES; ++j) minus[j][0] = minus[j][1] = Pairs<KIND>::MINUS_BASE + (unsigned)zero * 0x10001u;
        }
        VT_MEMBER void take(const char* scales, int, const char* zeros, int first, int g, i64 zero) {
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                unsigned both = word_at(scales, g * 16 + (first + j) * 4);
                scale[j][0] = pick<0x1010>(both, 0), scale[j][1] = pick<0x3232>(both, 0);
            }
            if (ZEROED) {
                unsigned word = word_at(zeros, g * 4);
#pragma unroll
                for (int j = 0; j < TILES; ++j)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        minus[j][h] = Pairs<KIND>::MINUS_BASE + ((word >> 4 * (first + j + 4 * h) & 15u) + (unsigned)zero) * 0x10001u;
            }
        }
        // Each weight rounded as `Group::weights` has it.
        VT_MEMBER void operands(unsigned (&a)[4], const unsigned* words, int, int j, int) const {
            unsigned w = words[0], codes[4] = {w, w >> 8, w >> 4, w >> 12};
            if constexpr (BITS_ == 8) codes[1] = words[1], codes[2] = w >> 8, codes[3] = words[1] >> 8;
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                unsigned less = BITS_ == 8 && KIND == BF16 ? (codes[r] & 0x00800080u) ^ 0xc380c380u : minus[j][r & 1];
                unsigned whole = fma_pair<KIND>((codes[r] & mask) | Pairs<KIND>::BASE, Pairs<KIND>::ONE, less);
                a[r] = fma_pair<KIND>(whole, scale[j][r & 1], Pairs<KIND>::MINUS_ZERO);
            }
        }
    };
    static VT_MEMBER float last(float x, i64 n, const void* factors, const void* bias) {
        return finished<KIND, BITS_>(x, n, factors, bias);
    }
};

// What lies in a stage of 64 k, byte by byte: rows of `a`, and of UNITS times 64 columns the words of 16 k four times, rows
// of scales, and zero points.
template <class W, int ROWS, int UNITS_> struct Stage {
    static constexpr int UNITS = UNITS_, UNIT = 128 * W::TILE, WORDS = ROWS * 128, SCALES = WORDS + 4 * UNITS * UNIT;
    static constexpr int SCALE_ROW = UNITS * W::SCALE_BYTES, ZEROS = SCALES + W::SCALE_ROWS * SCALE_ROW;
    static constexpr int BYTES = (ZEROS + UNITS * W::ZERO_BYTES + 1023) / 1024 * 1024;
};

// What a lane sends for, beside the rows: lanes 0 to 3 words of 16 k each, lanes 4 to 7 a row of scales, lane 8 zero points,
// of `wide` columns that lie side by side.
template <class W, class S> struct Sender {
    const char *base, *from;
    i64 row_bytes;
    int bytes, to, column_bytes_twice, pace, apart, first_row, at, expected;

    VT_MEMBER Sender(int lane, int wide, i64 columns, i64 group_size, const void* words, const void* scales, const void* zeros) {
        constexpr int ROW = W::SCALE_BYTES / COLUMNS;  // bytes of a column's scale
        bool of_words = lane < 4, of_scales = lane >= 4 && lane < 4 + W::SCALE_ROWS && scales != nullptr;
        bool of_zeros = lane == 8 && W::ZERO_BYTES;
        base = (const char*)(of_words ? words : of_scales ? scales : zeros);
        column_bytes_twice = of_words ? 4 * W::TILE : of_scales ? 2 * ROW : 1;
        row_bytes = columns * column_bytes_twice / 2;
        bytes = of_words || of_scales || of_zeros ? wide * column_bytes_twice / 2 : 0;
        first_row = of_words ? lane : of_scales ? lane - 4 : 0;
        to = of_words ? S::WORDS + lane * S::UNITS * S::UNIT : of_scales ? S::SCALES + first_row * S::SCALE_ROW : S::ZEROS;
        pace = of_words || W::SCALE_ROWS > 1 ? 1 : (int)(group_size / CHUNK), apart = of_words ? 4 : of_scales ? W::SCALE_ROWS : 1;
        expected = wide * (8 * W::TILE) + (scales != nullptr ? wide * ROW * W::SCALE_ROWS : 0) + (W::ZERO_BYTES ? wide / 2 : 0);
    }
    // The next to be sent for is 64 k number `chunk` of the columns from n on.
    VT_MEMBER void begin(i64 n, int chunk) {
        int number = chunk / pace;
        at = chunk - number * pace;
        from = base + n * column_bytes_twice / 2 + ((i64)number * apart + first_row) * row_bytes;
    }
    VT_MEMBER void send(u8* stage, u64* barrier) const {
        if (bytes) load_bytes(stage + to, from, barrier, bytes);
    }
    VT_MEMBER void onward() {
        if (++at == pace) at = 0, from += apart * row_bytes;
    }
};

// The words of 16 k of TILES tiles of a lane.
template <int TAKEN> VT_FN void take_words(unsigned (&raw)[TAKEN], const char* at) {
    if constexpr (TAKEN == 1) {
        raw[0] = word_at(at, 0);
    } else if constexpr (TAKEN == 2) {
        const uint2 w = *(const uint2*)at;
        raw[0] = w.x, raw[1] = w.y;
    } else {
#pragma unroll
        for (int i = 0; i < TAKEN; i += 4) {
            uint4 w = words_at(at, 4 * i);
            raw[i] = w.x, raw[i + 1] = w.y, raw[i + 2] = w.z, raw[i + 3] = w.w;
        }
    }
}

#endif
