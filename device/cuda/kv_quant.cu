// FP8 in a paged cache under one scale a tensor or a head: codes by slot, and their values.
//
// The ladder:
// 1. write_codes_v1, read_codes_v1: an element a thread, for any width and address.
// 2. *_v8: 16 bytes of the key and of the value a thread, two of each on their way before the slot and the scales are
//    known; a product with the scale's reciprocal and a correction for the quotient (fp8_scales.cuh).
// 3. write_sixteen_*: 16 bfloat16 of a key or of a value a thread, whose codes are stored at once.
// 4. Heads, tokens and pages are told apart by factors (whole_quotient), once for all vectors of a thread; what lies
//    together counts as one head.
// 5. *_early: started while the kernel before ends (early.cuh), which takes 0.6 us off a call of few tokens. A grid that
//    lets the next kernel start pays a nanosecond for each of its blocks of threads: 128 threads, not 64.
#include "kv_rows.cuh"

#define WRITE_DEPTH 2  // vectors of the key and of the value a thread, device/kv_quant.py

// What a float32 that is no NaN becomes as e5m2, in integers: as e4m3_by_hand.
VT_FN unsigned e5m2_by_hand(float x) {
    unsigned sign = (unsigned)vt_bits(x) >> 24 & 0x80u;
    float size = vt_abs(x);
    if (size >= 57344.0f) return sign | 0x7bu;
    if (size < 0x1p-14f) return sign | ((unsigned)vt_bits(size * 65536.0f + 12582912.0f) & 0x7u);
    unsigned bits = (unsigned)vt_bits(size);
    bits += 0xfffffu + (bits >> 21 & 1u);
    return sign | ((bits >> 21) - (112u << 2));
}

VT_FN unsigned e5m2_pair(float lo, float hi) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(hi), "f"(lo));
    return pair;
#else
    return (lo != lo ? 0x7fu : e5m2_by_hand(lo)) | (hi != hi ? 0x7fu : e5m2_by_hand(hi)) << 8;
#endif
}

VT_FN unsigned code_pair(float lo, float hi, int codes) {
    return codes == E5M2_CODES ? e5m2_pair(lo, hi) : e4m3_pair(lo, hi);
}

VT_FN void put_codes(unsigned char* to, const float (&q)[8], int codes, int unit) {
    uint2 words;
    if (codes == E5M2_CODES) {
        words.x = e5m2_pair(q[0], q[1]) | e5m2_pair(q[2], q[3]) << 16;
        words.y = e5m2_pair(q[4], q[5]) | e5m2_pair(q[6], q[7]) << 16;
    } else {
        words = e4m3_words(q);
    }
    put_words(to, words, unit);
}

VT_FN void put_codes(unsigned char* to, const float (&q)[1], int codes, int) {
    *to = (unsigned char)code_pair(q[0], 0.0f, codes);
}

// The scales of heads: `step` 0 for one of all heads.
struct HeadScales {
    const float* scales;
    i64 step;

    VT_MEMBER float of(i64 h) const { return scales[h * step]; }
};

template <int V>
VT_FN void write_vector(const Side& side, i64 page, i64 offset, i64 h, int within, const Raw<V>& raw,
                        float scale, int kind, int codes) {
    float x[V], q[V];
    widen(x, raw, kind);
    Divisor(scale, largest_of(x, false), false).divide(q, x);
    put_codes(side.at(page, offset, h) + within, q, codes, side.unit);
}

// `width` elements of all heads of a token; the key alone where there is no value.
template <int V>
VT_FN void write_codes(i64 tokens, i64 width, i64 chunks, const Heads& key, const Heads& value, const Side& keys,
                       const Side& values, const HeadScales& k_scale, const HeadScales& v_scale,
                       const Division& head_width, int kind, int codes, const i64* slots, i64 page_size, i64 room) {
    Place at[WRITE_DEPTH];
    Raw<V> k[WRITE_DEPTH], v[WRITE_DEPTH];
    float by_k[WRITE_DEPTH], by_v[WRITE_DEPTH];
    unsigned h[WRITE_DEPTH];
    i64 slot = -1;
#pragma unroll
    for (int d = 0; d < WRITE_DEPTH; ++d) {
        at[d] = place<V>(tokens, width, chunks, WRITE_DEPTH, d);
        if (!at[d].inside) continue;
        if (d == 0) slot = slots[at[0].row];
        h[d] = head_width.of((unsigned)at[d].column);
        i64 within = at[d].column - h[d] * head_width.d;
        k[d] = fetch<V>(key.x, key.at(at[d].row, h[d]) + within, kind);
        by_k[d] = k_scale.of(h[d]);
        if (value.x == nullptr) continue;
        v[d] = fetch<V>(value.x, value.at(at[d].row, h[d]) + within, kind);
        by_v[d] = v_scale.of(h[d]);
    }
    loads_are_under_way();
    if (slot < 0 || slot >= room) return;
    i64 page = quotient(slot, page_size), offset = slot - page * page_size;
#pragma unroll
    for (int d = 0; d < WRITE_DEPTH; ++d) {
        if (!at[d].inside) continue;
        int within = (int)(at[d].column - h[d] * head_width.d);
        write_vector(keys, page, offset, h[d], within, k[d], by_k[d], kind, codes);
        if (value.x != nullptr) write_vector(values, page, offset, h[d], within, v[d], by_v[d], kind, codes);
    }
}

#define WRITE_CODES(V)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) write_codes_v##V(                                           \
        i64 tokens, i64 width, i64 chunks, HEADS(key), HEADS(value), SIDE(keys), SIDE(values),                    \
        const float* k_scale, i64 k_step, const float* v_scale, i64 v_step, DIVISION(head_width), i64 kind,       \
        i64 codes, const i64* slots, i64 page_size, i64 room) {                                                   \
        write_codes<V>(tokens, width, chunks, THE_HEADS(key), THE_HEADS(value), THE_SIDE(keys), THE_SIDE(values), \
                       HeadScales{k_scale, k_step}, HeadScales{v_scale, v_step}, THE_DIVISION(head_width),        \
                       (int)kind, (int)codes, slots, page_size, room);                                            \
    }
WRITE_CODES(8)
WRITE_CODES(1)

// Sixteen neighbours of the key a thread, or in the second half of the grid, of the value: one of the two is half as much
// code. `per_token` and `per_head` count sixteens.
template <int CODES>
VT_FN void write_sixteen(i64 count, i64 half, const Heads& key, const Heads& value, const Side& keys,
                         const Side& values, const HeadScales& k_scale, const HeadScales& v_scale,
                         const Division& per_token, const Division& per_head, const Division& page_size,
                         const i64* slots, i64 room) {
    const bool second = blockIdx.x >= (unsigned)half;
    const Heads from{second ? value.x : key.x, second ? value.token : key.token, second ? value.head : key.head, 0, true};
    const HeadScales by{second ? v_scale.scales : k_scale.scales, second ? v_scale.step : k_scale.step};
    const unsigned number = (blockIdx.x - (second ? (unsigned)half : 0u)) * blockDim.x + threadIdx.x;
    const unsigned token = per_token.of(number), rest = number - token * per_token.d, h = per_head.of(rest);
    const int within = 16 * (int)(rest - h * per_head.d);
    const i64* slot_at = slots + token;
    const uint4* sixteen = (const uint4*)((const unsigned short*)from.x + (from.at(token, h) + within));
    const float* scale_at = by.scales + h * by.step;
    found(slot_at);
    found(sixteen);
    found(scale_at);
    after_others();
    if (number >= (unsigned)count) return;
    const i64 slot = *slot_at;
    const Raw<8> low{sixteen[0], {}}, high{sixteen[1], {}};
    const float scale = *scale_at;
    loads_are_under_way();
    others_may_start();
    if (slot >= room || slot < 0) return;
    const unsigned page = page_size.of((unsigned)slot), offset = (unsigned)slot - page * page_size.d;
    const unsigned pair = larger_pair<false>(largest_pair<false>(low.a), largest_pair<false>(high.a));
    const Divisor divisor(scale, larger(pair << 16, pair & 0xffff0000u), false);
    float x[8], q[8];
    uint4 codes;
    widen(x, low, BF16);
    divisor.divide(q, x);
    codes.x = code_pair(q[0], q[1], CODES) | code_pair(q[2], q[3], CODES) << 16;
    codes.y = code_pair(q[4], q[5], CODES) | code_pair(q[6], q[7], CODES) << 16;
    widen(x, high, BF16);
    divisor.divide(q, x);
    codes.z = code_pair(q[0], q[1], CODES) | code_pair(q[2], q[3], CODES) << 16;
    codes.w = code_pair(q[4], q[5], CODES) | code_pair(q[6], q[7], CODES) << 16;
    *(uint4*)((second ? values : keys).at(page, offset, h) + within) = codes;
}

#define WRITE_SIXTEEN(NAME, CODES)                                                                                \
    extern "C" __global__ void __launch_bounds__(128) NAME(                                                        \
        i64 count, i64 half, HEADS(key), HEADS(value), SIDE(keys), SIDE(values), const float* k_scale,            \
        i64 k_step, const float* v_scale, i64 v_step, DIVISION(per_token), DIVISION(per_head),                    \
        DIVISION(page_size), const i64* slots, i64 room) {                                                        \
        write_sixteen<CODES>(count, half, THE_HEADS(key), THE_HEADS(value), THE_SIDE(keys), THE_SIDE(values),     \
                             HeadScales{k_scale, k_step}, HeadScales{v_scale, v_step}, THE_DIVISION(per_token),   \
                             THE_DIVISION(per_head), THE_DIVISION(page_size), slots, room);                       \
    }
WRITE_SIXTEEN(write_sixteen_e4m3_early, E4M3_CODES)
WRITE_SIXTEEN(write_sixteen_e5m2_early, E5M2_CODES)

READ_CODES(read_codes_v8_early, 8, E5M2_CODES)
READ_CODES(read_codes_v1_early, 1, E5M2_CODES)

SLOTS_KERNEL(kv_quant_slots_fit)
