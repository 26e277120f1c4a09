// Writing keys and values into a paged cache by slot. Bytes are moved; a slot outside the cache stores nothing.
//
// The ladder:
// 1. write_pages_2: a storage element a thread, for any width and address.
// 2. write_pages_16: 16 bytes of the key and 16 of the value a thread, both on their way before the slot is known; a
//    slot's block takes a 32-bit division; heads that lie together count as one, which spares the other division.
// 3. xpacked_2 and _4, the older layout, in which a token's value is one column of its page: a warp takes 32 tokens
//    instead of 32 units of one token, so that the columns of neighbouring slots make whole sectors.
// 4. *_early: started while the kernel before ends (early.cuh): 0.6 us less.
#include "found.cuh"
#include "units.cuh"

template <class U>
VT_FN void write_pages(i64 tokens, i64 lanes, i64 chunks, const void* key, i64 key_stride, const void* value,
                       i64 value_stride, const Pages& keys, const Pages& values, i64 head_lanes, const i64* slots,
                       i64 page_size, i64 room) {
    const Spot at = spot(chunks);
    const i64* slot_at = slots + at.row;
    const U* k_at = (const U*)key + (at.row * key_stride + at.lane);
    const U* v_at = (const U*)value + (at.row * value_stride + at.lane);
    found(slot_at);
    found(k_at);
    found(v_at);
    after_others();
    if (at.row >= tokens || at.lane >= lanes) return;
    i64 slot = *slot_at;
    U k = *k_at, v = *v_at;
    loads_are_under_way();
    others_may_start();
    if (slot < 0 || slot >= room) return;
    int head = 0, within = at.lane;
    if (head_lanes < lanes) {
        head = (int)((unsigned)at.lane / (unsigned)head_lanes);
        within = at.lane - head * (int)head_lanes;
    }
    ((U*)keys.data)[keys.at(slot, page_size) + head * keys.head + within] = k;
    ((U*)values.data)[values.at(slot, page_size) + head * values.head + within] = v;
}

#define WRITE_PAGES(BYTES, U)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) write_pages_##BYTES##_early(                                  \
        i64 tokens, i64 lanes, i64 chunks, const void* key, i64 key_stride, const void* value, i64 value_stride,  \
        void* keys, i64 key_block, i64 key_row, i64 key_head, void* values, i64 value_block, i64 value_row,       \
        i64 value_head, i64 head_lanes, const i64* slots, i64 page_size, i64 room) {                              \
        write_pages<U>(tokens, lanes, chunks, key, key_stride, value, value_stride,                               \
                       Pages{keys, key_block, key_row, key_head},                                                 \
                       Pages{values, value_block, value_row, value_head}, head_lanes, slots, page_size, room);    \
    }
FOR_UNITS_FROM_2(WRITE_PAGES)

// 16 bytes of elements; one by one where they are not `aligned`.
template <class E> struct Pack {
    static constexpr int SIZE = 16 / sizeof(E);
    union { uint4 all; E each[SIZE]; };

    VT_MEMBER void load(const void* base, i64 at, bool aligned) {
        const E* from = (const E*)base + at;
        if (aligned) {
            all = *(const uint4*)from;
        } else {
#pragma unroll
            for (int j = 0; j < SIZE; ++j) each[j] = from[j];
        }
    }
    VT_MEMBER void store(void* base, i64 at, bool aligned) const {
        E* to = (E*)base + at;
        if (aligned) {
            *(uint4*)to = all;
        } else {
#pragma unroll
            for (int j = 0; j < SIZE; ++j) to[j] = each[j];
        }
    }
};

// Pack p of a block's heads lies at (p * page_size + offset) packs of the block for keys; for values its element j at
// (p * SIZE + j) * page_size + offset. A thread takes a pack; neighbouring threads take neighbouring tokens.
template <class E>
VT_FN void xpacked(i64 tokens, i64 packs, i64 tiles, const void* key, i64 key_stride, const void* value,
                   i64 value_stride, i64 aligned, void* keys, void* values, const i64* slots, i64 page_size,
                   i64 room) {
    constexpr int SIZE = Pack<E>::SIZE;
    unsigned down = blockIdx.x / (unsigned)tiles, tile = blockIdx.x - down * (unsigned)tiles;
    i64 token = (i64)tile * blockDim.x + threadIdx.x, pack = (i64)down * blockDim.y + threadIdx.y;
    after_others();
    if (token >= tokens || pack >= packs) return;
    i64 slot = slots[token];
    Pack<E> k, v;
    k.load(key, token * key_stride + pack * SIZE, aligned);
    v.load(value, token * value_stride + pack * SIZE, aligned);
    loads_are_under_way();
    others_may_start();
    if (slot < 0 || slot >= room) return;
    i64 block = quotient(slot, page_size), offset = slot - block * page_size, at = (block * packs + pack) * page_size;
    k.store(keys, (at + offset) * SIZE, aligned);
    E* column = (E*)values + at * SIZE + offset;
#pragma unroll
    for (int j = 0; j < SIZE; ++j) column[j * page_size] = v.each[j];
}

#define XPACKED(BYTES, E)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) xpacked_##BYTES##_early(                                            \
        i64 tokens, i64 packs, i64 tiles, const void* key, i64 key_stride, const void* value, i64 value_stride,   \
        i64 aligned, void* keys, void* values, const i64* slots, i64 page_size, i64 room) {                       \
        xpacked<E>(tokens, packs, tiles, key, key_stride, value, value_stride, aligned, keys, values, slots,      \
                   page_size, room);                                                                              \
    }
XPACKED(2, unsigned short)
XPACKED(4, unsigned)

extern "C" __global__ void __launch_bounds__(256) cache_slots_fit(i64 tokens, const i64* slots, i64 room,
                                                                  i64* first_bad) {
    slots_fit(tokens, slots, room, first_bad);
}
