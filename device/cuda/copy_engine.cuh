// Hopper's copy engine and clusters of blocks: tiles of rows of 128 bytes on their way from global into shared memory
// of one block or of several, their vectors placed as `place` has it, beside the barriers of wgmma.cuh.
//
// A tensor map says where a matrix of bytes lies, how wide it is and how high a tile: device/tensor_maps.py makes it. A
// tile that reaches beyond the matrix is filled up with zeros. On a host (parity/emulation.hpp) a cluster has one block.
#pragma once
#include "wgmma.cuh"

#ifdef __CUDACC__

struct alignas(64) TensorMap { u64 words[16]; };
#define VT_MAP const __grid_constant__ TensorMap

#if VT_TILES

#define CLUSTER 2
#define VT_CLUSTER_OF(blocks) __cluster_dims__(blocks, 1, 1)
#define VT_CLUSTER VT_CLUSTER_OF(CLUSTER)
#define TOGETHER(blocks) (blocks)

VT_FN int block_of_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of a cluster's blocks meet; what they stored in shared memory before is there for all.
VT_FN void cluster_meets() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
// The same without a word of what they stored, but for barriers that were made ready.
VT_FN void cluster_in_step() { asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
VT_FN void map_ahead(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// This thread arrives, and the phase waits for `bytes` that the copy engine brings as well.
VT_FN void barrier_expect(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// An arrival at this barrier of block `rank` of the cluster.
VT_FN void barrier_arrive_at(u64* barrier, int rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
                 ::"r"(shared_address(barrier)), "r"(rank) : "memory");
}
// Barriers of block `rank` of the cluster, as those of this block lie from `first` on.
VT_FN unsigned barriers_of(u64* first, int rank) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(first)), "r"(rank));
    return there;
}
// Without a branch, which products under way would not outlive.
VT_FN void barrier_arrive_if(bool arrives, unsigned barriers, int number) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n}"
                 ::"r"(barriers + 8 * number), "r"((int)arrives) : "memory");
}
// The tile whose first byte is byte x of row y.
VT_FN void load_tile(void* to, const TensorMap& map, u64* barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y) : "memory");
}
// The same for BLOCKS of the cluster, number `first` and then every `step`-th, at the same place of each and announced to
// the barrier of each.
template <int BLOCKS> VT_FN void load_tile_for(void* to, const TensorMap& map, u64* barrier, int x, int y, int first, int step) {
    if constexpr (BLOCKS == 1) return load_tile(to, map, barrier, x, y);
    unsigned blocks = 0;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) blocks |= 1u << i * step;
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%4, %5}], [%2], %3;"
                 ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "h"((unsigned short)(blocks << first)),
                 "r"(x), "r"(y) : "memory");
}
// For all of them.
VT_FN void load_tile_for_all(void* to, const TensorMap& map, u64* barrier, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%4, %5}], [%2], %3;"
                 ::"r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "h"((unsigned short)((1 << CLUSTER) - 1)),
                 "r"(x), "r"(y) : "memory");
}
VT_FN void lanes_meet() { __syncwarp(); }
// The 128 threads of a group meet, whatever others do.
VT_FN void group_meets(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory"); }

#endif
#else

struct TensorMap { u64 address, width, rows, stride, high, rest[11]; };
#define VT_MAP const TensorMap
#define CLUSTER 1
#define VT_CLUSTER_OF(blocks)
#define VT_CLUSTER
#define TOGETHER(blocks) 1

namespace emulation {
inline Meeting groups[4];
inline i64 expected[SHARED / 8];  // bytes, for each barrier
inline void bytes_come(u64* barrier, i64 bytes) {
    i64& left = expected[((u8*)barrier - shared) / 8];
    if (bytes > left) {
        std::fprintf(stderr, "emulation: more bytes come than a barrier expects\n");
        std::abort();
    }
    if ((left -= bytes) == 0) barrier_arrive(barrier);
}
}  // namespace emulation

static inline int block_of_cluster() { return 0; }
static inline void cluster_meets() { __syncthreads(); }
static inline void cluster_in_step() { __syncthreads(); }
static inline void map_ahead(const TensorMap&) {}
// The arrival comes with the last byte.
static inline void barrier_expect(u64* barrier, int bytes) { emulation::expected[((u8*)barrier - emulation::shared) / 8] += bytes; }
static inline void barrier_arrive_at(u64* barrier, int) { barrier_arrive(barrier); }
static inline u64* barriers_of(u64* first, int) { return first; }
static inline void barrier_arrive_if(bool arrives, u64* barriers, int number) {
    if (arrives) barrier_arrive(barriers + number);
}
static inline void load_tile(void* to, const TensorMap& map, u64* barrier, int x, int y) {
    for (int row = 0; row < (int)map.high; ++row)
        for (int k = 0; k < 128; ++k) {
            bool there = y + row < (i64)map.rows && x + k < (i64)map.width;
            ((u8*)to)[place(row, k >> 4) + (k & 15)] = there ? ((const u8*)map.address)[(y + row) * map.stride + x + k] : 0;
        }
    emulation::bytes_come(barrier, 128 * (i64)map.high);
}
static inline void load_tile_for_all(void* to, const TensorMap& map, u64* barrier, int x, int y) { load_tile(to, map, barrier, x, y); }
template <int BLOCKS> void load_tile_for(void* to, const TensorMap& map, u64* barrier, int x, int y, int, int) { load_tile(to, map, barrier, x, y); }
static inline void lanes_meet() { emulation::wait_for(emulation::warps[emulation::running->number / 32]); }
static inline void group_meets(int group) {
    emulation::groups[group].size = 128;
    emulation::wait_for(emulation::groups[group]);
}

#endif
