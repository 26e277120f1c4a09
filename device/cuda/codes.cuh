// Codes of 2, 3, 4 and 8 bits in 32-bit words: who stands where, both ways, and the move from one layout to another.
//
// The ladder: one kernel, a thread a word of the result, which fetches the codes it is made of one by one. A weight is
// packed once; what the kernel reads again comes out of the caches.
#pragma once
#include "storage.cuh"

// Of ops/lowbit.py: a code a word; streams of bits along K or along N; along N, even places first; exllama's words; Marlin's
// tiles for 16-bit and 8-bit activations; Machete's blocks; Marlin's zero points for either.
enum Layout { PLAIN, DOWN, ACROSS, INTERLEAVED, SHUFFLED, MARLIN, MARLIN_WIDE, MACHETE, ZEROS, ZEROS_WIDE };

struct Codes { i64 k, n; int bits, layout; };

struct Place { i64 word; int shift; };  // the word's number and the first bit in it

// Even numbers of `count` first, then the odd ones: where number i lies, and who lies at place i.
VT_FN int parted(int i, int count) { return (i >> 1) + (i & 1) * (count / 2); }
VT_FN int joined(int i, int count) { return i < count / 2 ? 2 * i : 2 * i - count + 1; }

// Columns of a row of words: the place of column n, and the column at a place.
VT_FN i64 place_of_column(const Codes& c, i64 n) {
    int count = 32 / c.bits;
    if (c.layout == INTERLEAVED) return n / count * count + parted((int)(n % count), count);
    if (c.layout == ZEROS || c.layout == ZEROS_WIDE) {
        int at = 8 * (int)(n % 8) + (int)(n % 64 / 8);
        if (c.layout == ZEROS) at = at / count * count + parted(at % count, count);
        return n / 64 * 64 + at;
    }
    return n;
}
VT_FN i64 column_at_place(const Codes& c, i64 p) {
    int count = 32 / c.bits;
    if (c.layout == INTERLEAVED) return p / count * count + joined((int)(p % count), count);
    if (c.layout == ZEROS || c.layout == ZEROS_WIDE) {
        int at = (int)(p % 64);
        if (c.layout == ZEROS) at = at / count * count + joined(at % count, count);
        return p / 64 * 64 + at / 8 + 8 * (at % 8);
    }
    return p;
}

// A code's number among all of tiles or blocks.
VT_FN i64 number_in_tiles(const Codes& c, i64 k, i64 n) {
    int count = 32 / c.bits;
    if (c.layout == MACHETE) {
        int t = (int)(n % 128 / 64 * 128 + n % 64 / 16 * 32 + n % 8 * 4 + k % 8 / 2);
        int e = (int)(k % 2 + n % 16 / 8 * 2 + k % 16 / 8 * 4);
        int slot = c.bits == 4 ? parted(e, 8) : e;
        return (k / 64 * (c.n / 128) + n / 128) * 8192 + t * 32 + k % 64 / 16 * 8 + slot;
    }
    if (c.layout == MARLIN) {
        int e = (int)(n % 16 / 8 * 4 + k % 2 + k % 16 / 8 * 2), lane = (int)(n % 8 * 4 + k % 8 / 2);
        return k / 16 * (c.n * 16) + n / 64 * 1024 + lane * 32 + n % 64 / 16 * 8 + e / count * count + parted(e % count, count);
    }
    int e = (int)(n % 16 / 8 * 8 + k % 4 + k % 32 / 16 * 4), lane = (int)(n % 8 * 4 + k % 16 / 4);
    int slot = c.bits == 4 ? e / 8 * 8 + (e % 4 * 2 | e % 8 / 4) : e;
    return k / 32 * (c.n * 32) + n / 32 * 1024 + lane * 32 + n % 32 / 16 * 16 + slot;
}
VT_FN void from_tiles(const Codes& c, i64 number, i64& k, i64& n) {
    int count = 32 / c.bits;
    if (c.layout == MACHETE) {
        int t = (int)(number % 8192 / 32), slot = (int)(number % 8), s = (int)(number % 32 / 8);
        int e = c.bits == 4 ? joined(slot, 8) : slot;
        i64 block = number / 8192;
        k = block / (c.n / 128) * 64 + s * 16 + t % 4 * 2 + e % 2 + e / 4 * 8;
        n = block % (c.n / 128) * 128 + t / 128 * 64 + t / 32 % 4 * 16 + t % 32 / 4 + e / 2 % 2 * 8;
    } else if (c.layout == MARLIN) {
        i64 row = number / (c.n * 16), rest = number % (c.n * 16);
        int lane = (int)(rest % 1024 / 32), tile = (int)(rest % 32 / 8), slot = (int)(rest % 8);
        int e = slot / count * count + joined(slot % count, count);
        k = row * 16 + lane % 4 * 2 + e % 2 + e / 2 % 2 * 8;
        n = rest / 1024 * 64 + tile * 16 + lane / 4 + e / 4 * 8;
    } else {
        i64 row = number / (c.n * 32), rest = number % (c.n * 32);
        int lane = (int)(rest % 1024 / 32), tile = (int)(rest % 32 / 16), slot = (int)(rest % 16);
        int e = c.bits == 4 ? slot / 8 * 8 + (slot % 2 * 4 | slot % 8 / 2) : slot;
        k = row * 32 + lane % 4 * 4 + e % 4 + e / 4 % 2 * 16;
        n = rest / 1024 * 32 + tile * 16 + lane / 4 + e / 8 * 8;
    }
}

VT_FN bool in_tiles(const Codes& c) { return c.layout == MARLIN || c.layout == MARLIN_WIDE || c.layout == MACHETE; }
VT_FN bool along_k(const Codes& c) { return c.layout == DOWN || c.layout == SHUFFLED; }

// A code's first bit, counted along a column's words for those along K, along all words for others.
VT_FN unsigned fetch_code(const Codes& c, const unsigned* words, i64 k, i64 n) {
    unsigned mask = (1u << c.bits) - 1;
    if (c.layout == PLAIN) return words[k * c.n + n];
    if (c.layout == SHUFFLED && c.bits == 3) {
        i64 row = k / 32 * 3;
        int code = (int)(k % 32);
        if (code < 30) return words[(row + code / 10) * c.n + n] >> (16 * (code & 1) + 3 * (code % 10 / 2)) & mask;
        unsigned found = 0;
        for (int b = 0; b < 3; ++b) found |= (words[(row + b) * c.n + n] >> (16 * (code - 30) + 15) & 1u) << b;
        return found;
    }
    if (along_k(c)) {
        i64 bit = k * c.bits;
        int shift = (int)(bit % 32);
        if (c.layout == SHUFFLED && c.bits < 8) shift = shift / c.bits % 2 * 16 + shift / c.bits / 2 * c.bits;
        unsigned found = words[bit / 32 * c.n + n] >> shift;
        if (shift + c.bits > 32) found |= words[(bit / 32 + 1) * c.n + n] << (32 - shift);
        return found & mask;
    }
    i64 bit = in_tiles(c) ? number_in_tiles(c, k, n) * c.bits : (k * c.n + place_of_column(c, n)) * c.bits;
    int shift = (int)(bit % 32);
    unsigned found = words[bit / 32] >> shift;
    if (shift + c.bits > 32) found |= words[bit / 32 + 1] << (32 - shift);
    return found & mask;
}

// Whose bit stands at `bit` of word number `at`: (k, n) and which of the code's bits. Words have whole runs of codes.
VT_FN int owner_of(const Codes& c, i64 at, int bit, i64& k, i64& n) {
    if (along_k(c)) {
        i64 row = at / c.n;
        n = at % c.n;
        if (c.layout == SHUFFLED && c.bits < 8) {
            int half = bit / 16, low = bit % 16;
            if (c.bits == 3 && low == 15) {
                k = row / 3 * 32 + 30 + half;
                return (int)(row % 3);
            }
            k = (c.bits == 3 ? row / 3 * 32 + row % 3 * 10 : row * (32 / c.bits)) + low / c.bits * 2 + half;
            return low % c.bits;
        }
        k = (row * 32 + bit) / c.bits;
        return (int)((row * 32 + bit) % c.bits);
    }
    i64 number = (at * 32 + bit) / c.bits;
    if (in_tiles(c)) from_tiles(c, number, k, n);
    else k = number / c.n, n = column_at_place(c, number % c.n);
    return (int)((at * 32 + bit) % c.bits);
}

// Word `at` of the layout `to`, made of the codes of `from`, whose rows `perm` names if there is one.
VT_FN unsigned moved_word(const Codes& to, const Codes& from, const unsigned* words, const int* perm, i64 at) {
    unsigned out = 0;
    for (int bit = 0; bit < 32;) {
        i64 k = 0, n = 0;
        int inside = 0;
        if (to.layout == PLAIN) k = at / to.n, n = at % to.n;
        else inside = owner_of(to, at, bit, k, n);
        if (perm != nullptr) k = (unsigned long long)perm[k] < (unsigned long long)to.k ? perm[k] : 0;
        unsigned code = fetch_code(from, words, k, n);
        if (to.layout == PLAIN) return code;
        bool alone = to.layout == SHUFFLED && to.bits == 3;  // its last codes lie bit by bit
        int count = alone ? 1 : to.bits - inside;
        out |= (code >> inside & ((1u << count) - 1)) << bit;
        bit += count;
    }
    return out;
}

#define MOVE_CODES(NAME)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        NAME(i64 count, i64 k, i64 n, i64 bits, i64 from, i64 to, const unsigned* words, const int* perm,        \
             unsigned* out) {                                                                                    \
        i64 at = (i64)blockIdx.x * 256 + threadIdx.x;                                                            \
        if (at < count)                                                                                          \
            out[at] = moved_word({k, n, (int)bits, (int)to}, {k, n, (int)bits, (int)from}, words, perm, at);     \
    }
