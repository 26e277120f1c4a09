// Places in shared memory as numbers of 32 bits, what lies there, and barriers there: a loop whose stages come round takes
// fewer instructions so than with pointers.
#pragma once
#include "wgmma_registers.cuh"

#if VT_TILES
#ifdef __CUDACC__
typedef unsigned SharedPlace;
VT_FN SharedPlace place_in(const void* shared) { return (unsigned)same_in_warp((int)shared_address(shared)); }
VT_FN u64 tile_in(SharedPlace at) { return (u64)(at >> 4 | 1u << 16) | 64ull << 32 | 1ull << 62; }
VT_FN uint4 four_at(SharedPlace at) {
    uint4 q;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "r"(at) : "memory");
    return q;
}
template <int FURTHER> VT_FN uint2 two_at(SharedPlace at) {
    uint2 q;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2 + %3];" : "=r"(q.x), "=r"(q.y) : "r"(at), "n"(FURTHER) : "memory");
    return q;
}
template <int FURTHER> VT_FN unsigned half_at(SharedPlace at) {
    unsigned short x;
    asm volatile("ld.shared.u16 %0, [%1 + %2];" : "=h"(x) : "r"(at), "n"(FURTHER) : "memory");
    return x;
}
VT_FN void wait_at(SharedPlace barrier, int parity) {
    asm volatile("{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}"
                 ::"r"(barrier), "r"(parity) : "memory");
}
VT_FN void arrive_at_if(bool arrives, SharedPlace barrier) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}"
                 ::"r"(barrier), "r"((int)arrives) : "memory");
}
#else
typedef u8* SharedPlace;
static inline SharedPlace place_in(const void* shared) { return (u8*)shared; }
static inline u64 tile_in(SharedPlace at) { return tile_of(at); }
static inline uint4 four_at(SharedPlace at) { return *(const uint4*)at; }
template <int FURTHER> uint2 two_at(SharedPlace at) { return *(const uint2*)(at + FURTHER); }
template <int FURTHER> unsigned half_at(SharedPlace at) { return *(const unsigned short*)(at + FURTHER); }
static inline void wait_at(SharedPlace barrier, int parity) { barrier_wait((u64*)barrier, parity); }
static inline void arrive_at_if(bool arrives, SharedPlace barrier) {
    if (arrives) barrier_arrive((u64*)barrier);
}
#endif
#endif
