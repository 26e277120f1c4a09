// Quantised caches of latent attention: entries of 656 bytes (512 codes, four scales, 64 numbers of 16 bits) and the
// indexer's keys, whose block is all codes and then all scales.
//
// The ladder:
// 1. Byte by byte where addresses allow no more: `whole` is 0.
// 2. latent_entries, latent_values: a warp an entry, two vectors a lane, in registers from the load to the codes; lane
//    j of sixteen looks after the scale of tile j % 2 of its two, and maxima of bfloat16 travel two by two.
// 3. indexer_keys: sixteen lanes a key. gather_keys_4: as gather.cuh, a thread a row finds where its token lies, then all
//    move the codes in units of 4 bytes and the scales. gather_keys_16: eight lanes a row, which find it themselves.
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

// Values of the entries of pages of `page_size`, `page` and `token` bytes apart.
extern "C" __global__ void __launch_bounds__(256) latent_values(i64 entries, const unsigned char* cache,
                                                                DIVISION(page_size), i64 page, i64 token, void* out,
                                                                i64 kind, i64 whole, i64 aligned) {
    i64 number = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    int lane = threadIdx.x & 31, unit = whole ? 16 : 1;
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

// Eight lanes a row, each of which finds where its token lies: a chain of reads, but no wait.
extern "C" __global__ void __launch_bounds__(256) gather_keys_16(
    i64 rows, i64 rows_each, const unsigned char* cache, unsigned char* dst, unsigned char* scales, i64 unit, REQUESTS) {
    const Requests requests = THE_REQUESTS;
    const i64 size = requests.page_size, token = (i64)blockIdx.x * (blockDim.x >> 3) + (threadIdx.x >> 3);
    const int lane = threadIdx.x & 7;
    if (token >= rows) return;
    i64 block, row;
    if (requests.find(token, block, row) != NOTHING || block < 0) return;
    const unsigned char* from = cache + block * size * (KEY + 4);
    const uint4 codes = ((const uint4*)(from + row * KEY))[lane];
    if (lane == 0) *(unsigned*)(scales + token * 4) = *(const unsigned*)(from + size * KEY + 4 * row);
    ((uint4*)(dst + token * KEY))[lane] = codes;
}

CHECK_KERNEL(check_gather_keys)

SLOTS_KERNEL(kv_quant_latent_slots_fit)
