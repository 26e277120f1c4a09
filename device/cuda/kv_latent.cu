// The paged cache of multi-head latent attention: write by slot, gather by block table. Bytes are moved.
//
// The ladder:
// 1. concat_2: a storage element a thread; concat_16: 16 bytes, on their way before the slot is known, from the
//    latent or from the rotated part; a token's 72 units (512 + 64 bfloat16) are 72 threads, three tokens a block.
// 2. gather_latent_2 ... _16: gather.cuh.
// 3. *_early: started while the kernel before ends (early.cuh): half a microsecond less.
#include "gather.cuh"

template <class U>
VT_FN void concat(i64 tokens, i64 lanes, i64 chunks, const void* latent, i64 latent_stride, i64 latent_lanes,
                  const void* rotated, i64 rotated_stride, const Pages& pages, const i64* slots, i64 page_size,
                  i64 room) {
    const Spot at = spot(chunks);
    const i64* slot_at = slots + at.row;
    const U* from = at.lane < latent_lanes ? (const U*)latent + at.row * latent_stride + at.lane
                                           : (const U*)rotated + at.row * rotated_stride + (at.lane - latent_lanes);
    found(slot_at);
    found(from);
    after_others();
    if (at.row >= tokens || at.lane >= lanes) return;
    i64 slot = *slot_at;
    U held = *from;
    loads_are_under_way();
    others_may_start();
    if (slot < 0 || slot >= room) return;
    ((U*)pages.data)[pages.at(slot, page_size) + at.lane] = held;
}

#define CONCAT(BYTES, U)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) concat_##BYTES##_early(                                             \
        i64 tokens, i64 lanes, i64 chunks, const void* latent, i64 latent_stride, i64 latent_lanes,               \
        const void* rotated, i64 rotated_stride, void* cache, i64 cache_block, i64 cache_row, const i64* slots,   \
        i64 page_size, i64 room) {                                                                                \
        concat<U>(tokens, lanes, chunks, latent, latent_stride, latent_lanes, rotated, rotated_stride,            \
                  Pages{cache, cache_block, cache_row, 0}, slots, page_size, room);                               \
    }
FOR_UNITS_FROM_2(CONCAT)

extern "C" __global__ void __launch_bounds__(256) latent_slots_fit(i64 tokens, const i64* slots, i64 room,
                                                                   i64* first_bad) {
    slots_fit(tokens, slots, room, first_bad);
}

#define GATHER_LATENT(BYTES, U) GATHER_KERNEL(gather_latent_##BYTES##_early, U)
FOR_UNITS_FROM_2(GATHER_LATENT)
CHECK_KERNEL(check_gather_latent)
