// NVFP4 in a paged cache: e2m1 codes by slot, and e4m3 scales of 16 neighbours in the second part of their block.
//
// The ladder:
// 1. nvfp4_v8: 8 elements of the key and of the value a thread, in registers from the load to the codes; two
//    neighbouring lanes share a block of 16.
// 2. nvfp4_bf16: maxima of a key and a value travel in one word; the even lane finds the key's scale and factor, with
//    its division, the odd one the value's (fp4.cu).
// 3. Keys and values alike; a block of a key or of a value a thread: 17.5 us for 8192 x 8 x 128.
// 4. Codes out of float16s (e2m1_halves.cuh), addresses by products of 32 bits, and no load waits for the slot: 14.2 us,
//    300 instructions a block, more than half of them for its side, head, page and factor.
// 5. nvfp4_few_early: kernels start while the one before ends. nvfp4_many_early: the same block of four tokens a thread,
//    two under way at a time, and the factors of all codes of scales in a table; what is rare is fetched again: 11.4 us.
#include "e2m1_halves.cuh"
#include "kv_turns.cuh"

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

// A block of 16 bfloat16 of each of a thread's tokens: nothing passes between lanes.
template <int DEPTH, int ROUNDS>
VT_FN void write_blocks(i64 tokens, const Division& group, const Division& per_head, const Heads& key, const Heads& value,
                        const Side& keys, const Side& values, const Division& pages, const i64* slots, i64 room,
                        const float* k_scale, const float* v_scale) {
    const Turns turns(tokens, group, DEPTH * ROUNDS, per_head);
    const u64 step = 2 * (u64)(unsigned)OF_SIDE(key.token, value.token);
    const unsigned char* from = (const unsigned char*)OF_SIDE(key.x, value.x) + turns.first * step +
                                (u64)turns.head * (unsigned)OF_SIDE(key.head, value.head) * 2 + turns.lane * 32;
    const i64* at = slots + turns.first;
    found(from);
    found(at);
    const float* global = OF_SIDE(k_scale, v_scale);
    const Slots codes(OF_SIDE(keys.data, values.data) + (u64)turns.head * (unsigned)OF_SIDE(keys.head, values.head) +
                          turns.lane * 8,
                      (unsigned)OF_SIDE(keys.row, values.row), (unsigned)OF_SIDE(keys.block, values.block), pages);
    // Scales of four tokens' values take turns: those of a quarter of the head are in the row of the token that it is.
    const unsigned scale_row = (unsigned)OF_SIDE(keys.scale_row, values.scale_row), quarter = per_head.d >> 2;
    const unsigned turn = OF_SIDE(0u, (turns.lane >= quarter) + (turns.lane >= 2 * quarter) + (turns.lane >= 3 * quarter));
    const unsigned column = OF_SIDE(turns.lane, (turns.lane - turn * quarter) * 4), turned = OF_SIDE(0u, 3u);
    const Slots scales((unsigned char*)OF_SIDE(keys.scales, values.scales) + (u64)turn * scale_row + column +
                           (u64)turns.head * (unsigned)OF_SIDE(keys.scale_head, values.scale_head),
                       scale_row, (unsigned)OF_SIDE(keys.scale_block, values.scale_block), pages);
    if (DEPTH == 1) others_may_start();
    after_others();
    i64 slot[DEPTH];
    uint4 low[DEPTH], high[DEPTH];
    int count = turns.count;
    auto fetch_all = [&] {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            slot[d] = -1;
            if (d >= count) continue;
            const uint4* sixteen = (const uint4*)(from + d * step);
            low[d] = sixteen[0], high[d] = sixteen[1];
            slot[d] = at[d];
        }
    };
    fetch_all();
    const float given = global[0];
    loads_are_under_way();
    const float by = 1.0f / given, back = reciprocal_or_zero(by);
    // The factors of both sides by their scales' codes, where a block of threads has many to look up.
    __shared__ float factors[DEPTH > 1 ? 256 : 1];
    if (DEPTH > 1) {
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < 256; i += blockDim.x) {
            const float other = reciprocal_or_zero(1.0f / (i < 128 ? k_scale : v_scale)[0]);
            factors[i] = factor_to_halves(normal_e4m3(i & 127) * other, normal_e4m3(i & 127));
        }
        __syncthreads();
    }
    const float* own = factors + OF_SIDE(0, 128);
    auto put = [&](unsigned s, const uint2& words, unsigned code) {
        const unsigned page = pages.of(s), t = s & turned;
        *(uint2*)codes.at(s, page) = words;
        scales.at(s - t, page)[t] = (unsigned char)code;
    };
#pragma unroll 1
    for (int round = 0;;) {
        unsigned rare = 0;
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if ((u64)slot[d] >= (u64)room) continue;
            const unsigned code = e4m3_code(by * (vt_float((int)largest_of_sixteen<true>(low[d], high[d])) * FP4_SIXTH));
            const float quick = DEPTH > 1 ? own[code & 127] : factor_to_halves(normal_e4m3(code) * back, normal_e4m3(code));
            if (quick != 0.0f) put((unsigned)slot[d], {e2m1_of_bf16(low[d], quick), e2m1_of_bf16(high[d], quick)}, code);
            else rare |= 1u << d;
        }
#pragma unroll 1
        for (int d = 0; rare != 0; ++d, rare >>= 1) {
            if ((rare & 1u) == 0) continue;
            const uint4* sixteen = (const uint4*)(from + d * step);
            const uint4 one = sixteen[0], two = sixteen[1];
            const unsigned code = e4m3_code(by * (vt_float((int)largest_of_sixteen<false>(one, two)) * FP4_SIXTH));
            const float factor = reciprocal_or_zero(e4m3_value(code) * back);
            put((unsigned)at[d], {scaled_word({one, one}, factor, BF16), scaled_word({two, two}, factor, BF16)}, code);
        }
        if (++round == ROUNDS) return;
        from += DEPTH * step, at += DEPTH, count -= DEPTH;
        fetch_all();
        loads_are_under_way();
        if (round == ROUNDS - 1) others_may_start();
    }
}

#define NVFP4_TURNS(NAME, DEPTH, ROUNDS)                                                                           \
    extern "C" __global__ void __launch_bounds__(256) NAME(TURNS_PARAMETERS, const float* k_scale,                 \
                                                           const float* v_scale) {                                 \
        write_blocks<DEPTH, ROUNDS>(tokens, THE_DIVISION(group), THE_DIVISION(per_head), THE_HEADS(key),           \
                                    THE_HEADS(value), THE_SIDE(keys), THE_SIDE(values), THE_DIVISION(page_size),   \
                                    slots, room, k_scale, v_scale);                                                \
    }
NVFP4_TURNS(nvfp4_few_early, 1, 1)
NVFP4_TURNS(nvfp4_many_early, 2, 2)

SLOTS_KERNEL(kv_quant_fp4_slots_fit)
