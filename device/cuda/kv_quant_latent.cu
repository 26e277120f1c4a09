// Quantised caches of latent attention: entries of 656 bytes (512 codes, four scales, 64 numbers of 16 bits) and the
// indexer's keys, whose block is all codes and then all scales.
//
// The ladder:
// 1. Byte by byte where addresses allow no more: `whole` is 0.
// 2. latent_entries, latent_values: a warp an entry, two vectors a lane, in registers from the load to the codes; lane
//    j of sixteen looks after the scale of tile j % 2 of its two, and maxima of bfloat16 travel two by two.
// 3. indexer_keys: sixteen lanes a key. gather_keys_4: as gather.cuh, a thread a row finds where its token lies, then all
//    move the codes in units of 4 bytes and the scales.
// 4. *_brain_early: the same of bfloat16 alone, pages by factors, started while the kernel before ends: 3.4 us for 8192
//    entries instead of 5.4. gather_keys_early: a warp finds 16 rows at once, and eight lanes move one: 3.9 us for
//    65536 rows; eight lanes that each find their own row took 6.
#include "e2m1_halves.cuh"
#include "gather.cuh"
#include "kv_rows.cuh"

#define LATENT 512
#define TILES 4
#define ROTATED 64
#define ENTRY (LATENT + TILES * 4 + ROTATED * 2)
#define KEY 128

VT_FN float latent_scale(unsigned top) {
    float size = vt_float((int)top);
    return vt_maximum(size < 0x1p-90f ? size / E4M3_LARGEST : over_largest(size), 0x1p-126f);
}

// Two numbers of 16 bits.
VT_FN unsigned take_pair(const void* base, i64 at, bool whole) {
    const unsigned short* from = (const unsigned short*)base + at;
    return whole ? *(const unsigned*)from : from[0] | (unsigned)from[1] << 16;
}

VT_FN void latent_entry(i64 tokens, const void* latent, i64 latent_stride, const void* rotated, i64 rotated_stride,
                        int kind, bool aligned, const Pages& pages, const i64* slots, i64 page_size, i64 room,
                        bool whole) {
    i64 token = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31;
    bool inside = token < tokens;
    i64 slot = inside ? slots[token] : -1;
    Raw<8> raw[2];
    unsigned pair = 0;
    if (inside) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
            raw[c] = fetch_eight(latent, token * latent_stride + c * 256 + lane * 8, kind, aligned);
        pair = take_pair(rotated, token * rotated_stride + lane * 2, aligned);
    }
    loads_are_under_way();
    unsigned first = 0, second = 0, top;
    if (kind == BF16) {
        if (inside) first = lane_maximum<true>(raw[0], BF16), second = lane_maximum<true>(raw[1], BF16);
        top = own_maximum<true>(first, second, 16);
    } else {
        if (inside) first = lane_maximum<false>(raw[0], kind), second = lane_maximum<false>(raw[1], kind);
        top = own_maximum<false>(first, second, 16);
    }
    const Divisor own(latent_scale(top), top, false);
    float inverse = own.middling ? own.inverse : 0.0f, other_scale = __shfl_xor_sync(FULL_WARP, own.scale, 1);
    float other_inverse = __shfl_xor_sync(FULL_WARP, inverse, 1);
    if (slot < 0 || slot >= room) return;
    unsigned char* entry = (unsigned char*)pages.data + pages.at(slot, page_size);
    int unit = whole ? 16 : 1;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        float x[8], q[8];
        widen(x, raw[c], kind);
        bool mine = (lane & 1) == c;
        Divisor(mine ? own.scale : other_scale, mine ? inverse : other_inverse).divide(q, x);
        put_words(entry + c * 256 + lane * 8, e4m3_words(q), unit);
    }
    if ((lane & 15) < 2)
        put_word(entry + LATENT + 4 * (2 * (lane & 1) + (lane >> 4)), (unsigned)vt_bits(own.scale), unit);
    put_word(entry + LATENT + 4 * TILES + 4 * lane, pair, unit);
}

extern "C" __global__ void __launch_bounds__(256) latent_entries(
    i64 tokens, const void* latent, i64 latent_stride, const void* rotated, i64 rotated_stride, i64 kind, i64 aligned,
    void* cache, i64 cache_block, i64 cache_row, const i64* slots, i64 page_size, i64 room, i64 whole) {
    latent_entry(tokens, latent, latent_stride, rotated, rotated_stride, (int)kind, aligned != 0,
                 Pages{cache, cache_block, cache_row, 0}, slots, page_size, room, whole != 0);
}

// Of bfloat16 and where addresses allow whole vectors; pages and slots of 31 bits.
extern "C" __global__ void __launch_bounds__(256) latent_brain_early(
    i64 tokens, const void* latent, i64 latent_stride, const void* rotated, i64 rotated_stride, void* cache,
    i64 cache_block, i64 cache_row, const i64* slots, DIVISION(page_size), i64 room) {
    const unsigned token = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const int lane = threadIdx.x & 31;
    const uint4* from = (const uint4*)((const unsigned short*)latent + token * latent_stride) + lane;
    const unsigned* beside = (const unsigned*)((const unsigned short*)rotated + token * rotated_stride) + lane;
    const i64* slot_at = slots + token;
    const Division size = THE_DIVISION(page_size);
    found(from);
    found(beside);
    found(slot_at);
    others_may_start();
    after_others();
    if (token >= (unsigned)tokens) return;  // a warp
    const i64 slot = *slot_at;
    const uint4 raw[2] = {from[0], from[32]};
    const unsigned pair = *beside;
    loads_are_under_way();
    const unsigned top = own_maximum<true>(largest_pair<false>(raw[0]), largest_pair<false>(raw[1]), 16);
    const Divisor own(latent_scale(top), top, false);
    const float inverse = own.middling ? own.inverse : 0.0f, other_scale = __shfl_xor_sync(FULL_WARP, own.scale, 1);
    const float other_inverse = __shfl_xor_sync(FULL_WARP, inverse, 1);
    if ((u64)slot >= (u64)room) return;
    const unsigned page = size.of((unsigned)slot), offset = (unsigned)slot - page * size.d;
    unsigned char* entry = (unsigned char*)cache + page * cache_block + offset * cache_row;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        float x[8], q[8];
        widen(x, {raw[c], {}}, BF16);
        const bool mine = (lane & 1) == c;
        Divisor(mine ? own.scale : other_scale, mine ? inverse : other_inverse).divide(q, x);
        *(uint2*)(entry + c * 256 + lane * 8) = e4m3_words(q);
    }
    if ((lane & 15) < 2) *(float*)(entry + LATENT + 4 * (2 * (lane & 1) + (lane >> 4))) = own.scale;
    *(unsigned*)(entry + LATENT + 4 * TILES + 4 * lane) = pair;
}

// Values of the entries of pages of `page_size`, `page` and `token` bytes apart.
extern "C" __global__ void __launch_bounds__(256) latent_values_early(i64 entries, const unsigned char* cache,
                                                                DIVISION(page_size), i64 page, i64 token, void* out,
                                                                i64 kind, i64 whole, i64 aligned) {
    i64 number = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31, unit = whole ? 16 : 1;
    others_may_start();
    after_others();
    if (number >= entries) return;
    const Division size = THE_DIVISION(page_size);
    unsigned p = size.of((unsigned)number);
    const unsigned char* entry = cache + p * page + ((unsigned)number - p * size.d) * token;
    uint2 words[2];
    float scale[2], v[8], y[8];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        words[c] = take_words(entry + c * 256 + lane * 8, unit);
        scale[c] = vt_float((int)take_word(entry + LATENT + 4 * (2 * c + (lane >> 4)), unit));
    }
    unsigned pair = take_word(entry + LATENT + 4 * TILES + 4 * lane, unit);
    i64 to = number * (LATENT + ROTATED);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        e4m3_values(v, words[c].x);
        e4m3_values(v + 4, words[c].y);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = v[j] * scale[c];
        i64 at = to + c * 256 + lane * 8;
        if (aligned) {
            store(out, at, y, (int)kind);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float one[1] = {y[j]};
                store(out, at + j, one, (int)kind);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        float one[1] = {widen_bf16(pair >> 16 * j & 0xffffu)};
        store(out, to + LATENT + 2 * lane + j, one, (int)kind);
    }
}

// Eight lanes a key of bfloat16, where addresses allow whole vectors; pages and slots of 31 bits.
extern "C" __global__ void __launch_bounds__(256) indexer_brain_early(i64 tokens, const void* k, i64 stride,
                                                                      unsigned char* cache, const i64* slots,
                                                                      DIVISION(page_size), i64 room, i64 ue8m0) {
    const unsigned number = blockIdx.x * blockDim.x + threadIdx.x, token = number >> 3;
    const int lane = (int)(number & 7u);
    const Division size = THE_DIVISION(page_size);
    const uint4* from = (const uint4*)((const unsigned short*)k + token * stride) + lane;
    const i64* slot_at = slots + token;
    found(from);
    found(slot_at);
    after_others();
    uint4 low = {}, high = {};
    i64 slot = -1;
    if (token < (unsigned)tokens) low = from[0], high = from[8], slot = *slot_at;
    loads_are_under_way();
    others_may_start();
    const unsigned top = largest_of_lanes(largest_of_sixteen<false>(low, high), 8);
    if ((u64)slot >= (u64)room) return;
    float scale = over_largest(vt_maximum(vt_float((int)top), 1e-4f)), x[8], q[8];
    if (ue8m0) scale = power_of_two(scale);
    const Divisor by(scale, top, false);
    const unsigned page = size.of((unsigned)slot), offset = (unsigned)slot - page * size.d;
    unsigned char* block = cache + (i64)page * (size.d * (KEY + 4));
    uint2* to = (uint2*)(block + offset * KEY) + lane;
    widen(x, {low, {}}, BF16);
    by.divide(q, x);
    to[0] = e4m3_words(q);
    widen(x, {high, {}}, BF16);
    by.divide(q, x);
    to[8] = e4m3_words(q);
    if (lane == 0) *(float*)(block + size.d * KEY + offset * 4) = scale;
}

// Keys of 128 into blocks of `page_size` * 132 bytes.
extern "C" __global__ void __launch_bounds__(256) indexer_keys(i64 tokens, const void* k, i64 stride, i64 kind,
                                                               i64 aligned, unsigned char* cache, const i64* slots,
                                                               i64 page_size, i64 room, i64 ue8m0, i64 whole) {
    i64 token = (i64)blockIdx.x * (blockDim.x >> 4) + (threadIdx.x >> 4);
    int lane = threadIdx.x & 15, unit = whole ? 8 : 1;
    bool inside = token < tokens;
    i64 slot = inside ? slots[token] : -1;
    float x[8], q[8];
    unsigned top = 0;
    if (inside) {
        Raw<8> raw = fetch_eight(k, token * stride + lane * 8, (int)kind, aligned != 0);
        widen(x, raw, (int)kind);
        top = kind == BF16 ? largest_of_bf16(raw, false) : largest_of(x, false);
    }
    loads_are_under_way();
    top = largest_of_lanes(top, 16);
    if (slot < 0 || slot >= room) return;
    float scale = over_largest(vt_maximum(vt_float((int)top), 1e-4f));
    if (ue8m0) scale = power_of_two(scale);
    Divisor(scale, top, false).divide(q, x);
    i64 page = quotient(slot, page_size), offset = slot - page * page_size;
    unsigned char* block = cache + page * page_size * (KEY + 4);
    put_words(block + offset * KEY + lane * 8, e4m3_words(q), unit);
    if (lane == 0) put_word(block + page_size * KEY + offset * 4, (unsigned)vt_bits(scale), unit);
}

// The codes and scales of tokens into rows of 128 bytes and of 4, words moved byte by byte where addresses want it.
extern "C" __global__ void __launch_bounds__(256) gather_keys_4(
    i64 rows, i64 rows_each, const unsigned char* cache, unsigned char* dst, unsigned char* scales, i64 unit, REQUESTS) {
    constexpr int CODES = KEY / 4, LANES = CODES + 1;
    __shared__ i64 from[MOST_ROWS], beside[MOST_ROWS];
    const Requests requests = THE_REQUESTS;
    i64 first = (i64)blockIdx.x * rows_each, size = requests.page_size;
    int here = (int)(rows - first < rows_each ? rows - first : rows_each);
    if ((int)threadIdx.x < here) {
        i64 block, row;
        int fault = requests.find(first + threadIdx.x, block, row);
        bool there = fault == NOTHING && block >= 0;
        from[threadIdx.x] = there ? block * size * (KEY + 4) + row * KEY : -1;
        beside[threadIdx.x] = there ? block * size * (KEY + 4) + size * KEY + row * 4 : -1;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < here * LANES; at += (int)blockDim.x) {
        int row = at / LANES, lane = at - row * LANES;
        if (from[row] < 0) continue;
        if (lane == CODES) put_word(scales + (first + row) * 4, take_word(cache + beside[row], (int)unit), (int)unit);
        else put_word(dst + (first + row) * KEY + lane * 4, take_word(cache + from[row] + lane * 4, (int)unit), (int)unit);
    }
}

// A warp takes ROWS rows, up to 32: a lane finds where one's token lies, among bounds that the warp has in its registers
// where they are few; then eight lanes move a row.
template <int ROWS>
VT_FN void gather_by_warps(i64 rows, const unsigned char* cache, unsigned char* dst, unsigned char* scales,
                           const Requests& requests) {
    const int lane = threadIdx.x & 31, count = (int)requests.count;
    const i64 size = requests.page_size, first = ((i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5)) * ROWS;
    const i64 token = first + (lane & (ROWS - 1));
    others_may_start();
    after_others();
    i64 block = -1, row = 0;
    if (count < 32) {
        const int bound = lane <= count ? requests.bounds[lane] : 0;
        int request = 0;
        for (int i = 1; i < count; ++i) request += token >= __shfl_sync(FULL_WARP, bound, i);
        const int begin = __shfl_sync(FULL_WARP, bound, request), end = __shfl_sync(FULL_WARP, bound, request + 1);
        if (token < rows && token >= begin && token < end) {
            const i64 page = quotient(token - begin, size);
            if (page < requests.table_width) {
                block = requests.table[request * requests.table_stride + page];
                row = token - begin - page * size;
            }
        }
        if (block >= requests.blocks) block = -1;
    } else if (token < rows && requests.find(token, block, row) != NOTHING) {
        block = -1;
    }
    const unsigned char* page = cache + block * size * (KEY + 4);
    const i64 from = block < 0 ? -1 : block * size * (KEY + 4) + row * KEY;
    uint4 codes[ROWS / 4];
    bool there[ROWS / 4];
#pragma unroll
    for (int r = 0; r < ROWS / 4; ++r) {
        const i64 at = __shfl_sync(FULL_WARP, from, 4 * r + (lane >> 3));
        there[r] = at >= 0;
        if (there[r]) codes[r] = ((const uint4*)(cache + at))[lane & 7];
    }
    unsigned scale = 0;
    const bool own = block >= 0 && lane < ROWS;
    if (own) scale = *(const unsigned*)(page + size * KEY + 4 * row);
    loads_are_under_way();
#pragma unroll
    for (int r = 0; r < ROWS / 4; ++r)
        if (there[r]) ((uint4*)(dst + (first + 4 * r + (lane >> 3)) * KEY))[lane & 7] = codes[r];
    if (own) *(unsigned*)(scales + token * 4) = scale;
}

#define GATHER_KEYS(NAME, ROWS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) NAME(i64 rows, const unsigned char* cache,                  \
                                                           unsigned char* dst, unsigned char* scales, REQUESTS) { \
        gather_by_warps<ROWS>(rows, cache, dst, scales, THE_REQUESTS);                                            \
    }
GATHER_KEYS(gather_keys_early, 16)

CHECK_KERNEL(check_gather_keys)

SLOTS_KERNEL(kv_quant_latent_slots_fit)
