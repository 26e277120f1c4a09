// NVFP4 in a paged cache: e2m1 codes by slot, and e4m3 scales of 16 neighbours in the second part of their block.
//
// The ladder:
// 1. nvfp4_v8: 8 elements of the key and of the value a thread, in registers from the load to the codes; two
//    neighbouring lanes share a block of 16.
// 2. nvfp4_bf16: maxima of a key and a value travel in one word; the even lane finds the key's scale and factor, with
//    its division, the odd one the value's (fp4.cu).
// 3. nvfp4_sixteens: keys and values alike; a block of a key or of a value a thread: 17.5 us for 8192 x 8 x 128.
// 4. Codes out of float16s (e2m1_halves.cuh), addresses by products of 32 bits, and no load waits for the slot.
#include "e2m1_halves.cuh"
#include "kv_rows.cuh"

#define FP4_SIXTH vt_float(0x3e2aaaab)  // float32(1 / 6)

VT_FN float reciprocal_or_zero(float x) { return x == 0.0f ? 0.0f : 1.0f / x; }

VT_FN unsigned scaled_word(const Raw<8>& raw, float factor, int kind) {
    float v[8];
    widen(v, raw, kind);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= factor;
    return e2m1_word<false>(v);
}

VT_FN unsigned char* scale_byte(const Side& side, i64 page, i64 offset, i64 h) {
    return (unsigned char*)side.scales + page * side.scale_block + offset * side.scale_row + h * side.scale_head;
}

// `lanes` threads, an even number, a head of a token; `quarter`: a fourth of the scales of a head of values.
template <bool BRAIN>
VT_FN void write_nvfp4(i64 rows, const Division& heads, const Division& lanes, const Heads& key, const Heads& value,
                       const Side& keys, const Side& values, const float* k_scale, const float* v_scale, int quarter,
                       int kind, const i64* slots, i64 page_size, i64 room) {
    unsigned number = blockIdx.x * blockDim.x + threadIdx.x, row = lanes.of(number);
    int first = 8 * (int)(number - row * lanes.d);
    Target to(row, rows, heads, slots);
    bool has_k = row < rows && first < key.width, has_v = row < rows && first < value.width, odd = threadIdx.x & 1;
    Raw<8> k, v;
    if (has_k) k = fetch_eight(key.x, key.at(to.token, to.head) + first, kind, BRAIN || key.aligned);
    if (has_v) v = fetch_eight(value.x, value.at(to.token, to.head) + first, kind, BRAIN || value.aligned);
    float global = 1.0f / (odd ? v_scale : k_scale)[0];
    loads_are_under_way();
    to.find(page_size, room);
    unsigned top = own_maximum<BRAIN>(has_k ? lane_maximum<BRAIN>(k, kind) : 0u,
                                      has_v ? lane_maximum<BRAIN>(v, kind) : 0u, 2);
    unsigned code = e4m3_code(global * (vt_float((int)top) * FP4_SIXTH));
    float factor = reciprocal_or_zero(e4m3_value(code) * reciprocal_or_zero(global));
    float other = __shfl_xor_sync(FULL_WARP, factor, 1);
    if (!to.stored) return;
    if (has_k)
        put_word(keys.at(to.page, to.offset, to.head) + (first >> 1), scaled_word(k, odd ? other : factor, kind), keys.unit);
    if (has_v)
        put_word(values.at(to.page, to.offset, to.head) + (first >> 1), scaled_word(v, odd ? factor : other, kind),
                 values.unit);
    int group = first >> 4;
    if (!odd && has_k) scale_byte(keys, to.page, to.offset, to.head)[group] = (unsigned char)code;
    if (odd && has_v) {
        int turn = group / quarter, t = (int)(to.offset & 3);
        scale_byte(values, to.page, to.offset - t + turn, to.head)[(group - turn * quarter) * 4 + t] =
            (unsigned char)code;
    }
}

#define NVFP4_PARAMETERS                                                                                          \
    i64 rows, DIVISION(heads), DIVISION(lanes), HEADS(key), HEADS(value), SIDE(keys), SIDE(values),               \
        const float *k_scale, const float *v_scale, i64 quarter, i64 kind, const i64 *slots, i64 page_size, i64 room
#define NVFP4_ARGUMENTS                                                                                           \
    rows, THE_DIVISION(heads), THE_DIVISION(lanes), THE_HEADS(key), THE_HEADS(value), THE_SIDE(keys),             \
        THE_SIDE(values), k_scale, v_scale, (int)quarter

extern "C" __global__ void __launch_bounds__(256) nvfp4_bf16(NVFP4_PARAMETERS) {
    write_nvfp4<true>(NVFP4_ARGUMENTS, BF16, slots, page_size, room);
}
extern "C" __global__ void __launch_bounds__(256) nvfp4_v8(NVFP4_PARAMETERS) {
    write_nvfp4<false>(NVFP4_ARGUMENTS, (int)kind, slots, page_size, room);
}

// An address from steps that fit into 32 bits: one instruction a product.
VT_FN i64 steps_of(unsigned a, i64 step_a, unsigned b, i64 step_b) {
    return (i64)a * (unsigned)step_a + (i64)b * (unsigned)step_b;
}

// A block of 16 bfloat16 of the key a thread, or in the second half of the grid, of the value: nothing passes between
// lanes. `per_token` and `per_head` count blocks; all steps fit into 32 bits.
extern "C" __global__ void __launch_bounds__(64) nvfp4_sixteens(
    i64 count, i64 half, HEADS(key), HEADS(value), SIDE(keys), SIDE(values), const float* k_scale, const float* v_scale,
    DIVISION(per_token), DIVISION(per_head), DIVISION(page_size), i64 quarter, const i64* slots, i64 room) {
    const bool second = blockIdx.x >= (unsigned)half;
    const Division tokens = THE_DIVISION(per_token), heads = THE_DIVISION(per_head), pages = THE_DIVISION(page_size);
    const unsigned number = (blockIdx.x - (second ? (unsigned)half : 0u)) * blockDim.x + threadIdx.x;
    if (number >= (unsigned)count) return;
    const unsigned token = tokens.of(number), rest = number - token * tokens.d, head = heads.of(rest);
    const unsigned group = rest - head * heads.d;
    const i64 slot = slots[token];
    const i64 at = steps_of(token, second ? value_token : key_token, head, second ? value_head : key_head) + 16 * group;
    const uint4* from = (const uint4*)((const unsigned short*)(second ? value : key) + at);
    const uint4 low = from[0], high = from[1];
    const float given = (second ? v_scale : k_scale)[0];
    loads_are_under_way();
    const float by = 1.0f / given, back = reciprocal_or_zero(by);
    unsigned code = e4m3_code(by * (vt_float((int)largest_of_sixteen<true>(low, high)) * FP4_SIXTH));
    const float quick = factor_to_halves(normal_e4m3(code) * back, normal_e4m3(code));
    uint2 words;
    if (quick != 0.0f) {
        words = {e2m1_of_bf16(low, quick), e2m1_of_bf16(high, quick)};
    } else {
        code = e4m3_code(by * (vt_float((int)largest_of_sixteen<false>(low, high)) * FP4_SIXTH));
        const float factor = reciprocal_or_zero(e4m3_value(code) * back);
        words = {scaled_word({low, low}, factor, BF16), scaled_word({high, high}, factor, BF16)};
    }
    if (slot >= room || slot < 0) return;  // not before: loads would wait for it
    const unsigned page = pages.of((unsigned)slot), offset = (unsigned)slot - page * pages.d;
    const Side side = second ? THE_SIDE(values) : THE_SIDE(keys);
    unsigned char *codes = side.data + 8 * group, *scale = (unsigned char*)side.scales;
    put_words(codes + (steps_of(page, side.block, offset, side.row) + steps_of(head, side.head, 0, 0)), words, side.unit);
    scale += steps_of(page, side.scale_block, head, side.scale_head);
    if (second) {
        const unsigned q = (unsigned)quarter, turn = (group >= q) + (group >= 2 * q) + (group >= 3 * q), t = offset & 3u;
        scale += steps_of(offset - t + turn, side.scale_row, 0, 0) + ((group - turn * q) * 4 + t);
    } else {
        scale += steps_of(offset, side.scale_row, 0, 0) + group;
    }
    *scale = (unsigned char)code;
}

SLOTS_KERNEL(kv_quant_fp4_slots_fit)
