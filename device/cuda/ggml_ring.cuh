// Stretches of rows on their way from global into shared memory by Hopper's copy engine, and barriers in shared memory
// that say how far copies and warps have come.
#pragma once
#include "ggml_row.cuh"

typedef unsigned long long u64;

#ifdef __CUDACC__
VT_FN unsigned ring_address(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

#if __CUDA_ARCH__ >= 900

VT_FN void phases_begin(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ring_address(barrier)), "r"(arrivals) : "memory");
}
VT_FN void phases_seen() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
VT_FN void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ring_address(barrier)) : "memory");
}
// 16 bytes times any number, at multiples of 16; the phase under way waits for them, too.
VT_FN void stretch(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%3], %2;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(ring_address(to)), "l"(from), "r"(bytes), "r"(ring_address(barrier)) : "memory");
}
// Until the phase of this parity is over; phases are 0, 1, 0, ...
VT_FN void phase_over(u64* barrier, unsigned parity) {
    asm volatile("{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(ring_address(barrier)), "r"(parity) : "memory");
}
// What this thread read and wrote comes before what the copy engine writes.
VT_FN void before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#else  // no such kernel is launched there (device/ggml_matmul.py)

VT_FN void phases_begin(u64*, int) {}
VT_FN void phases_seen() {}
VT_FN void arrive(u64*) {}
VT_FN void stretch(void*, const void*, int, u64*) {}
VT_FN void phase_over(u64*, unsigned) {}
VT_FN void before_copies() {}

#endif
#else

namespace emulation {
struct RingPhases { unsigned short left, arrivals; unsigned phase; };
inline std::vector<Copy> coming[SHARED / 8];
inline std::vector<Copy>& copies_of(u64* barrier) { return coming[((u8*)barrier - shared) / 8]; }
}  // namespace emulation

static inline void phases_begin(u64* barrier, int arrivals) {
    emulation::RingPhases phases = {(unsigned short)arrivals, (unsigned short)arrivals, 0};
    std::memcpy(barrier, &phases, 8);
    emulation::copies_of(barrier).clear();
}
static inline void phases_seen() {}
static inline void arrive(u64* barrier) {
    auto phases = (emulation::RingPhases*)barrier;
    ++emulation::progress;
    if (--phases->left) return;
    phases->left = phases->arrivals;
    phases->phase ^= 1;
}
static inline void stretch(void* to, const void* from, int bytes, u64* barrier) {
    emulation::copies_of(barrier).push_back({to, from, (size_t)bytes});
}
// Bytes come as late as a wait allows, and the last that were sent for first.
static inline void phase_over(u64* barrier, unsigned parity) {
    auto phases = (emulation::RingPhases*)barrier;
    while (phases->phase == parity) emulation::change(emulation::running->context, emulation::scheduler);
    auto& copies = emulation::copies_of(barrier);
    for (size_t i = copies.size(); i-- > 0;) std::memcpy(copies[i].to, copies[i].from, copies[i].size);
    copies.clear();
}
static inline void before_copies() {}

#endif
