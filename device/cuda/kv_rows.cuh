// Heads of tokens between plain rows and a paged cache of bytes: what both sides of a cache look like, teams of lanes
// that share a head, stores as wide as addresses allow, and codes back to values.
#pragma once
#include "e4m3_halves.cuh"
#include "found.cuh"
#include "fp8_scales.cuh"
#include "rows.cuh"
#include "units.cuh"

#define READ_DEPTH 2  // vectors a thread, device/kv_rows.py

// n / d by a factor and a shift (whole_quotient); d itself for what is left.
struct Division {
    unsigned d, magic;
    int shift;
    VT_MEMBER Division(i64 d, i64 magic, i64 shift) : d((unsigned)d), magic((unsigned)magic), shift((int)shift) {}
    VT_MEMBER unsigned of(unsigned n) const { return whole_quotient(n, magic, shift); }
};

// Heads [tokens, heads, width] of a dtype, `token` and `head` elements apart; `aligned`: in whole vectors of 16 bytes.
struct Heads {
    const void* x;
    i64 token, head;
    int width;
    bool aligned;

    VT_MEMBER i64 at(i64 t, i64 h) const { return t * token + h * head; }
};

// Where the bytes of a cache lie and, in float32, its scales; `unit`: the widest store, in bytes, that all of its
// addresses allow.
struct Side {
    unsigned char* data;
    i64 block, row, head;
    float* scales;
    i64 scale_block, scale_row, scale_head;
    int unit;

    VT_MEMBER unsigned char* at(i64 page, i64 offset, i64 h) const {
        return data + page * block + offset * row + h * head;
    }
    VT_MEMBER float* scale(i64 page, i64 offset, i64 h) const {
        return scales + page * scale_block + offset * scale_row + h * scale_head;
    }
};

#define HEADS(NAME) const void *NAME, i64 NAME##_token, i64 NAME##_head, i64 NAME##_width, i64 NAME##_aligned
#define THE_HEADS(NAME) Heads{NAME, NAME##_token, NAME##_head, (int)NAME##_width, NAME##_aligned != 0}
#define SIDE(NAME)                                                                                                \
    unsigned char *NAME##_data, i64 NAME##_block, i64 NAME##_row, i64 NAME##_page_head, float *NAME##_scales,     \
        i64 NAME##_scale_block, i64 NAME##_scale_row, i64 NAME##_scale_head, i64 NAME##_unit
#define THE_SIDE(NAME)                                                                                            \
    Side{NAME##_data, NAME##_block, NAME##_row, NAME##_page_head, NAME##_scales, NAME##_scale_block,              \
         NAME##_scale_row, NAME##_scale_head, (int)NAME##_unit}
#define DIVISION(NAME) i64 NAME, i64 NAME##_magic, i64 NAME##_shift
#define THE_DIVISION(NAME) Division(NAME, NAME##_magic, NAME##_shift)

// Eight elements, one by one where they are not aligned.
VT_FN Raw<8> fetch_eight(const void* base, i64 at, int kind, bool aligned) {
    if (aligned) return fetch<8>(base, at, kind);
    unsigned w[8];
    if (kind == F32) {
#pragma unroll
        for (int j = 0; j < 8; ++j) w[j] = ((const unsigned*)base)[at + j];
    } else {
        const unsigned short* from = (const unsigned short*)base + at;
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = from[2 * j] | (unsigned)from[2 * j + 1] << 16;
#pragma unroll
        for (int j = 4; j < 8; ++j) w[j] = w[j - 4];
    }
    return {{w[0], w[1], w[2], w[3]}, {w[4], w[5], w[6], w[7]}};
}

VT_FN void put_word(unsigned char* to, unsigned word, int unit) {
    if (unit >= 4) {
        *(unsigned*)to = word;
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j] = (unsigned char)(word >> 8 * j);
    }
}

VT_FN void put_words(unsigned char* to, uint2 words, int unit) {
    if (unit >= 8) {
        *(uint2*)to = words;
    } else {
        put_word(to, words.x, unit);
        put_word(to + 4, words.y, unit);
    }
}

VT_FN unsigned take_word(const unsigned char* from, int unit) {
    if (unit >= 4) return *(const unsigned*)from;
    return from[0] | (unsigned)from[1] << 8 | (unsigned)from[2] << 16 | (unsigned)from[3] << 24;
}

VT_FN uint2 take_words(const unsigned char* from, int unit) {
    if (unit >= 8) return *(const uint2*)from;
    return {take_word(from, unit), take_word(from + 4, unit)};
}

VT_FN uint2 e4m3_words(const float (&x)[8]) {
    return {e4m3_pair(x[0], x[1]) | e4m3_pair(x[2], x[3]) << 16, e4m3_pair(x[4], x[5]) | e4m3_pair(x[6], x[7]) << 16};
}

// A row's token, head and slot; where the slot is, `find` says, once the row is on its way.
struct Target {
    i64 token, head, slot, page, offset;
    bool stored;
    VT_MEMBER Target(i64 row, i64 rows, const Division& heads, const i64* slots)
        : token(row < rows ? heads.of((unsigned)row) : 0), head(row < rows ? row - token * heads.d : 0),
          slot(row < rows ? slots[token] : -1), page(0), offset(0), stored(false) {}
    VT_MEMBER void find(i64 page_size, i64 room) {
        stored = slot >= 0 && slot < room;
        if (!stored) return;
        page = quotient(slot, page_size);
        offset = slot - page * page_size;
    }
};

// A vector's largest |x|; of bfloat16 the largest of even and of odd elements, in the halves of a word.
template <bool BRAIN> VT_FN unsigned lane_maximum(const Raw<8>& raw, int kind) {
    if (BRAIN) return largest_pair<false>(raw.a);
    float x[8];
    widen(x, raw, kind);
    return largest_of(x, false);
}

// Of lanes' maxima for a key and a value: the largest over a team of `lanes`, at least two. An even lane gets that of
// the key, an odd one that of the value.
template <bool BRAIN> VT_FN unsigned own_maximum(unsigned a, unsigned b, int lanes) {
    bool odd = threadIdx.x & 1;
    if (BRAIN) {
        unsigned top = larger_pair<false>((a & 0xffffu) | b << 16, a >> 16 | (b & 0xffff0000u));
        for (int m = lanes >> 1; m >= 1; m >>= 1) top = larger_pair<false>(top, __shfl_xor_sync(FULL_WARP, top, m));
        return odd ? top & 0xffff0000u : top << 16;
    }
    a = largest_of_lanes(a, lanes);
    b = largest_of_lanes(b, lanes);
    return odd ? b : a;
}

// A code of e5m2 is the upper byte of a float16, a code of int8 a number.
VT_FN void e5m2_values(float* v, unsigned word) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = widen_f16((word >> 8 * j & 0xffu) << 8);
}

VT_FN void int8_values(float* v, unsigned word) {
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = (float)((int)(word << (24 - 8 * j)) >> 24);
}

enum { E4M3_CODES = 0, E5M2_CODES = 1, INT8_CODES = 2 };  // device/kv_rows.py

template <int SECOND> VT_FN void values_of_word(float* v, unsigned word, int codes) {
    if (codes == SECOND) {
        if (SECOND == E5M2_CODES) e5m2_values(v, word);
        else int8_values(v, word);
    } else {
        e4m3_values(v, word);
    }
}

// Rows are heads of tokens, `heads` to a token and `size` tokens to a page; pages, tokens and heads lie anywhere.
struct Paged {
    Division heads, size;
    i64 page, token, head;  // steps of the codes
    i64 scale_page, scale_token, scale_head;

    VT_MEMBER void find(i64 row, i64& code, i64& scale) const {
        unsigned t = heads.of((unsigned)row), h = (unsigned)row - t * heads.d;
        unsigned p = size.of(t), o = t - p * size.d;
        code = p * page + o * token + h * head;
        scale = p * scale_page + o * scale_token + h * scale_head;
    }
};

#define PAGED                                                                                                     \
    DIVISION(heads), DIVISION(size), i64 page, i64 token, i64 head, i64 scale_page, i64 scale_token, i64 scale_head
#define THE_PAGED                                                                                                 \
    Paged{THE_DIVISION(heads), THE_DIVISION(size), page, token, head, scale_page, scale_token, scale_head}

// out[row] = code * scale, rows of `width` codes; `codes` are E4M3_CODES or SECOND.
template <int V, int SECOND>
VT_FN void read_codes(i64 rows, i64 width, i64 chunks, const unsigned char* cache, const float* scales,
                      const Paged& paged, void* out, int kind, int codes, int unit) {
    Place at[READ_DEPTH];
    uint2 words[READ_DEPTH];
    i64 from = 0, scale_at = 0;
    after_others();
#pragma unroll
    for (int d = 0; d < READ_DEPTH; ++d) {
        at[d] = place<V>(rows, width, chunks, READ_DEPTH, d);
        if (!at[d].inside) continue;
        if (d == 0) paged.find(at[0].row, from, scale_at);
        if (V == 8) words[d] = take_words(cache + from + at[d].column, unit);
        else words[d].x = cache[from + at[d].column];
    }
    if (!at[0].inside) return;
    float scale = scales[scale_at];
    others_may_start();
#pragma unroll
    for (int d = 0; d < READ_DEPTH; ++d) {
        if (!at[d].inside) continue;
        float v[8], y[V];
        values_of_word<SECOND>(v, words[d].x, codes);
        if (V == 8) values_of_word<SECOND>(v + 4, words[d].y, codes);
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] = v[j] * scale;
        store(out, at[d].row * width + at[d].column, y, kind);
    }
}

#define READ_CODES(NAME, V, SECOND)                                                                               \
    extern "C" __global__ void __launch_bounds__(256) NAME(i64 rows, i64 width, i64 chunks,                       \
                                                           const unsigned char* cache, const float* scales,       \
                                                           PAGED, void* out, i64 kind, i64 codes, i64 unit) {     \
        read_codes<V, SECOND>(rows, width, chunks, cache, scales, THE_PAGED, out, (int)kind, (int)codes,          \
                              (int)unit);                                                                         \
    }

#define SLOTS_KERNEL(NAME)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256) NAME(i64 tokens, const i64* slots, i64 room,                \
                                                           i64* first_bad) {                                      \
        slots_fit(tokens, slots, room, first_bad);                                                                \
    }
