// Moves of codes of 4 and 8 bits between packings that are known when compiled; K N < 2^32, arrays at multiples of 16 bytes.
//
// The ladder:
// 1. codes.cuh: a thread a word, code by code, 64-bit divisions for each: 310 to 850 us for 8192 x 8192 codes of 4 bits.
// 2. These: one division of 32 bits a thread, 16-byte stores, all of a thread's loads under way together; what remains
//    are shifts by constants.
#pragma once
#include "codes.cuh"

VT_FN void keep_words(unsigned* out, unsigned a, unsigned b, unsigned c, unsigned d) { *(uint4*)out = {a, b, c, d}; }

// From where in `perm` row k comes; an index out of range is row 0.
VT_FN unsigned row_of(const int* perm, unsigned k, unsigned rows) {
    const unsigned row = (unsigned)perm[k];
    return row < rows ? row : 0;
}

// Where the 32 codes begin that a thread makes, a lane's or a thread's of tiles, and how far code i is from there.
template <int BITS, int TO> struct Tiles {
    static constexpr int COUNT = 32 / BITS;
    unsigned k, n;

    VT_MEMBER Tiles(unsigned unit, unsigned columns) {
        if (TO == MACHETE) {
            const unsigned block = unit / 256, t = unit % 256, across = columns / 128, row = block / across;
            k = row * 64 + t % 4 * 2;
            n = (block - row * across) * 128 + t / 128 * 64 + t / 32 % 4 * 16 + t % 32 / 4;
        } else {
            constexpr unsigned ROWS = TO == MARLIN ? 16 : 32, COLUMNS = TO == MARLIN ? 64 : 32;
            const unsigned per_row = columns * ROWS / 32, row = unit / per_row, rest = unit - row * per_row, lane = rest % 32;
            k = row * ROWS + lane % 4 * (ROWS / 8);
            n = rest / 32 * COLUMNS + lane / 4;
        }
    }
    static VT_MEMBER int element(int i) {
        if (TO == MACHETE) return BITS == 4 ? joined(i % 8, 8) : i % 8;
        if (TO == MARLIN) return i % 8 / COUNT * COUNT + joined(i % COUNT, COUNT);
        return BITS == 4 ? i % 16 / 8 * 8 + (i % 2 * 4 | i % 8 / 2) : i % 16;
    }
    static VT_MEMBER unsigned down(int i) {
        const int e = element(i);
        if (TO == MACHETE) return i / 8 * 16 + e % 2 + e / 4 * 8;
        return TO == MARLIN ? e % 2 + e / 2 % 2 * 8 : e % 4 + e / 4 % 2 * 16;
    }
    static VT_MEMBER unsigned across(int i) {
        const int e = element(i);
        if (TO == MACHETE) return e / 2 % 2 * 8;
        return TO == MARLIN ? i / 8 * 16 + e / 4 * 8 : i / 16 * 16 + e / 8 * 8;
    }
};

// Codes packed along K (whose rows `perm` names, if there is one) or along N, even columns first, into tiles. No sum of a
// thread's first row or column and a code's distance crosses a word but by whole words.
template <int BITS, int FROM, int TO>
VT_FN void into_tiles(unsigned units, unsigned rows, unsigned columns, const unsigned* words, const int* perm, unsigned* out) {
    typedef Tiles<BITS, TO> Tile;
    constexpr unsigned COUNT = 32 / BITS, MASK = (1u << BITS) - 1;
    const unsigned unit = blockIdx.x * 256 + threadIdx.x;
    if (unit >= units) return;
    const Tile tile(unit, columns);
    unsigned made[BITS] = {};
    if (FROM == DOWN && perm != nullptr) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const unsigned k = row_of(perm, tile.k + Tile::down(i), rows), n = tile.n + Tile::across(i);
            made[i / COUNT] |= (words[k / COUNT * columns + n] >> k % COUNT * BITS & MASK) << i % COUNT * BITS;
        }
    } else if (FROM == DOWN) {
        const unsigned* from = words + tile.k / COUNT * columns + tile.n;
        const unsigned shift = tile.k % COUNT * BITS;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const unsigned word = from[Tile::down(i) / COUNT * columns + Tile::across(i)] >> shift;
            made[i / COUNT] |= (word >> Tile::down(i) % COUNT * BITS & MASK) << i % COUNT * BITS;
        }
    } else {
        const unsigned pitch = columns / COUNT;
        const unsigned* from = words + tile.k * pitch + tile.n / COUNT;
        const unsigned shift = parted((int)(tile.n % COUNT), (int)COUNT) * BITS;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const unsigned word = from[Tile::down(i) * pitch + Tile::across(i) / COUNT];
            made[i / COUNT] |= (word >> shift & MASK) << i % COUNT * BITS;
        }
    }
#pragma unroll
    for (int w = 0; w < BITS; w += 4)
        keep_words(out + (i64)unit * BITS + w, made[w], made[w + 1], made[w + 2], made[w + 3]);
}

// The first bit of code i of a word along K.
template <int BITS, int LAYOUT> VT_FN unsigned bit_of(unsigned i) {
    return LAYOUT == SHUFFLED && BITS < 8 ? i % 2 * 16 + i / 2 * BITS : i * BITS;
}

// Four columns' words along K of single codes, or of words along K in another order or of other rows.
template <int BITS, int FROM, int TO>
VT_FN void into_words(unsigned units, unsigned rows, unsigned columns, const unsigned* words, const int* perm, unsigned* out) {
    constexpr unsigned COUNT = 32 / BITS, MASK = (1u << BITS) - 1;
    const unsigned unit = blockIdx.x * 256 + threadIdx.x, across = columns / 4;
    if (unit >= units) return;
    const unsigned row = unit / across;
    const uint4* from = (const uint4*)words + (unit - row * across);
    uint4 raw[COUNT];
    unsigned shift[COUNT];
    if (FROM == PLAIN || perm != nullptr) {
#pragma unroll
        for (unsigned i = 0; i < COUNT; ++i) {
            const unsigned k = perm != nullptr ? row_of(perm, row * COUNT + i, rows) : row * COUNT + i;
            raw[i] = from[(i64)(FROM == PLAIN ? k : k / COUNT) * across];
            shift[i] = FROM == PLAIN ? 0 : bit_of<BITS, FROM>(k % COUNT);
        }
    } else {
        const uint4 own = from[(i64)row * across];
#pragma unroll
        for (unsigned i = 0; i < COUNT; ++i) raw[i] = own, shift[i] = bit_of<BITS, FROM>(i);
    }
    uint4 made = {};
#pragma unroll
    for (unsigned i = 0; i < COUNT; ++i) {
        made.x |= (raw[i].x >> shift[i] & MASK) << bit_of<BITS, TO>(i);
        made.y |= (raw[i].y >> shift[i] & MASK) << bit_of<BITS, TO>(i);
        made.z |= (raw[i].z >> shift[i] & MASK) << bit_of<BITS, TO>(i);
        made.w |= (raw[i].w >> shift[i] & MASK) << bit_of<BITS, TO>(i);
    }
    ((uint4*)out)[unit] = made;
}

// The codes of four columns' words along K, a row of results each.
template <int BITS> VT_FN void out_of_words(unsigned units, unsigned columns, const unsigned* words, unsigned* out) {
    constexpr unsigned COUNT = 32 / BITS, MASK = (1u << BITS) - 1;
    const unsigned unit = blockIdx.x * 256 + threadIdx.x, across = columns / 4;
    if (unit >= units) return;
    const unsigned row = unit / across;
    const uint4 w = ((const uint4*)words)[unit];
    uint4* to = (uint4*)out + (i64)row * COUNT * across + (unit - row * across);
#pragma unroll
    for (unsigned i = 0; i < COUNT; ++i) {
        const unsigned at = i * BITS;
        to[(i64)i * across] = {w.x >> at & MASK, w.y >> at & MASK, w.z >> at & MASK, w.w >> at & MASK};
    }
}

#define ABREAST 4  // groups of four codes a thread, device/codes.py

// The first bit of column i of a word along N.
template <int BITS> VT_FN unsigned bit_across(unsigned i, bool even_first) {
    constexpr int COUNT = 32 / BITS;
    return (even_first ? (unsigned)parted((int)i, COUNT) : i) * BITS;
}

// Four codes out of a word along N; rows have whole words, so that they follow each other without gaps.
template <int BITS> VT_FN void out_of_rows(unsigned units, bool even_first, const unsigned* words, unsigned* out) {
    constexpr unsigned PARTS = 8 / BITS, MASK = (1u << BITS) - 1;
    const unsigned first = blockIdx.x * (256 * ABREAST) + threadIdx.x;
    unsigned w[ABREAST];
#pragma unroll
    for (int g = 0; g < ABREAST; ++g)
        if (first + 256 * g < units) w[g] = words[(first + 256 * g) / PARTS];
#pragma unroll
    for (int g = 0; g < ABREAST; ++g) {
        const unsigned unit = first + 256 * g, column = unit % PARTS * 4;
        if (unit >= units) return;
        unsigned q[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) q[j] = w[g] >> bit_across<BITS>(column + j, even_first) & MASK;
        keep_words(out + (i64)unit * 4, q[0], q[1], q[2], q[3]);
    }
}

// A word along N out of single codes.
template <int BITS> VT_FN void into_rows(unsigned units, bool even_first, const unsigned* words, unsigned* out) {
    constexpr unsigned PARTS = 8 / BITS, MASK = (1u << BITS) - 1;
    const unsigned first = blockIdx.x * (256 * ABREAST) + threadIdx.x;
    uint4 raw[ABREAST][PARTS];
#pragma unroll
    for (int g = 0; g < ABREAST; ++g)
        if (first + 256 * g < units)
#pragma unroll
            for (unsigned p = 0; p < PARTS; ++p) raw[g][p] = ((const uint4*)words)[(i64)(first + 256 * g) * PARTS + p];
#pragma unroll
    for (int g = 0; g < ABREAST; ++g) {
        if (first + 256 * g >= units) return;
        unsigned made = 0;
#pragma unroll
        for (unsigned p = 0; p < PARTS; ++p) {
            made |= (raw[g][p].x & MASK) << bit_across<BITS>(4 * p, even_first);
            made |= (raw[g][p].y & MASK) << bit_across<BITS>(4 * p + 1, even_first);
            made |= (raw[g][p].z & MASK) << bit_across<BITS>(4 * p + 2, even_first);
            made |= (raw[g][p].w & MASK) << bit_across<BITS>(4 * p + 3, even_first);
        }
        out[first + 256 * g] = made;
    }
}

#define QUICK_MOVE(NAME, CALL)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        NAME(i64 units, i64 k, i64 n, i64 even_first, const unsigned* words, const int* perm, unsigned* out) {        \
        CALL;                                                                                                         \
    }
#define MOVE_OF_WORDS(NAME, MOVE, FROM, TO)                                                                           \
    QUICK_MOVE(NAME##_4, (MOVE<4, FROM, TO>((unsigned)units, (unsigned)k, (unsigned)n, words, perm, out)))            \
    QUICK_MOVE(NAME##_8, (MOVE<8, FROM, TO>((unsigned)units, (unsigned)k, (unsigned)n, words, perm, out)))
#define MOVE_OF_ROWS(NAME, MOVE)                                                                                      \
    QUICK_MOVE(NAME##_4, MOVE<4>((unsigned)units, even_first != 0, words, out))                                       \
    QUICK_MOVE(NAME##_8, MOVE<8>((unsigned)units, even_first != 0, words, out))
