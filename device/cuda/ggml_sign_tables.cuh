// Signed bytes of the i-quants' values, by tables in shared memory.
//
// The tables lie in shared memory once for each lane, whose bank nobody else asks: entry e of the grid at 128 e, and
// after them what eight bits say of eight signs, the last of which is not asked, so that one product of bytes makes an
// address of a byte, on the pipe that permutations leave alone. An entry's and a pattern's nibbles together pick four
// signed bytes of eight: IQ2_XXS's from the magnitudes and their negatives, IQ3_XXS's from an entry and its negative.
// (Tensor cores took longer: an instruction of theirs keeps others waiting for five cycles.)
#pragma once
#include "ggml_tiles.cuh"

// TABLES_AT: where they begin within 65,536 bytes of shared memory, at whose beginning 1,024 bytes are the system's.
constexpr int TABLE_BYTES = 256 * 256, SIGNS_AT = 128 * 256, TABLES_AT = 1024;

// Eight bits to the third bits of eight digits.
VT_FN unsigned thirds_of(unsigned bits) {
    bits = bits * 0x1001u & 0x000f000fu;
    bits = bits * 0x41u & 0x03030303u;
    return bits * 0x24u & 0x44444444u;
}

// The word that the tables have for entry number `entry`, of which the last 256 are the signs'.
template <int TYPE> VT_FN unsigned entry_of(unsigned entry) {
    if (entry >= 256) {
        const unsigned seven = entry & 127, signs = seven | (ones_of(seven) & 1u) << 7;  // their number is even
        return thirds_of(signs) | (TYPE == IQ3_XXS ? 0x32103210u : 0u);
    }
    if constexpr (TYPE == IQ2_XXS) return IQ2_XXS_DIGITS[entry];
    else return permute(0x1c140c04u, 0x3e342c24u, IQ3_XXS_DIGITS[entry]);
}

// `warps` warps of which this is number `warp` fill the tables, 32 entries at a time, four of them together, 16 bytes a
// lane; `entry` is this lane's first.
template <int TYPE> VT_MEMBER void fill_tables(u8* tables, int warp, int warps, unsigned entry) {
    int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int first = 32 * warp; first < 512; first += 32 * warps) {
        if (first != 32 * warp) entry = entry_of<TYPE>((unsigned)(first + lane));
        u8* to = tables + (first + (lane >> 3)) * 128 + (lane & 7) * 16;
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            unsigned one = __shfl_sync(ALL, entry, i + (lane >> 3));
            *(uint4*)(to + 128 * i) = {one, one, one, one};
        }
    }
}

// What a lane asks the tables by: its `place` in them, of whose address bits 7 to 15 are not there, and numbers that have
// to stay in registers, made of what the compiler does not know: 1, -1, and the magnitudes of IQ2_XXS.
struct Tables {
    unsigned place, one, minus_one, plus;
};
#ifdef __CUDACC__
VT_FN Tables tables_of(const u8* tables, int blocks) {
    // The magnitudes by a comparison that lanes could answer in different ways: numbers of a whole warp lie where
    // permutations cannot take them from, and each would be copied first.
    const unsigned one = blocks > 0, own = threadIdx.x < 1024u * blocks;
    return {ring_address(tables) - TABLES_AT + 4 * (threadIdx.x & 31), one, 0u - one, own * 0x002b1908u};
}
// The word at `place` and FURTHER.
template <int FURTHER> VT_FN unsigned entry_at(unsigned place) {
    unsigned found;
    asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(found) : "r"(place), "n"(FURTHER + TABLES_AT));
    return found;
}
// c and the products of bytes, none of them signed.
VT_FN unsigned dot4_plain(unsigned a, unsigned b, unsigned c) {
    asm("dp4a.u32.u32 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
    return c;
}
// Bits of `mask` added to a place that has none of them.
VT_FN unsigned within(unsigned bits, unsigned mask, unsigned place) {
    asm("lop3.b32 %0, %1, %2, %0, 0xea;" : "+r"(place) : "r"(bits), "r"(mask));
    return place;
}
#else
static inline Tables tables_of(const u8*, int) { return {4 * (threadIdx.x & 31), 1, ~0u, 0x002b1908u}; }
template <int FURTHER> unsigned entry_at(unsigned place) { return *(const unsigned*)(emulation::shared + FURTHER + place); }
static inline unsigned dot4_plain(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
    return c;
}
static inline unsigned within(unsigned bits, unsigned mask, unsigned place) { return (bits & mask) | place; }
#endif

// Entries by byte BYTE of `bits`, or by seven bits from 7 L on.
template <int BYTE> VT_FN unsigned of_byte(Tables t, unsigned bits) {
    return entry_at<0>(dot4_plain(bits, 0x80u << 8 * BYTE, t.place));
}
template <int L> VT_FN unsigned of_seven(Tables t, unsigned bits) {
    if (L & 2) bits >>= 14;
    return entry_at<SIGNS_AT>(L & 1 ? within(bits, 127 * 128, t.place) : dot4_plain(bits, 0x80, t.place));
}

// The negatives of four bytes, none of which is 0. As a product, for which there is room.
VT_FN unsigned negatives_of(Tables t, unsigned x) { return times_plus(x, t.minus_one, 0x01010100u); }

// Eight values of a unit from 8 L on, four and four; `bits` has their numbers in the grid.
template <int TYPE, int L>
VT_FN void eight_values(unsigned& low, unsigned& high, Tables tables, unsigned bits, unsigned beside) {
    unsigned minus = of_seven<L>(tables, beside);
    if constexpr (TYPE == IQ2_XXS) {
        unsigned digits = times_plus(of_byte<L>(tables, bits), tables.one, minus);
        low = picked(tables.plus, 0x00d5e7f8u, digits);
        high = picked(tables.plus, 0x00d5e7f8u, digits >> 16);
    } else {
        unsigned x = of_byte<2 * (L & 1)>(tables, bits), y = of_byte<2 * (L & 1) + 1>(tables, bits);
        low = picked(x, negatives_of(tables, x), minus);
        high = picked(y, negatives_of(tables, y), minus >> 16);
    }
}
