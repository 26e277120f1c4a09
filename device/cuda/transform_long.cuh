// The fast Hadamard transform of rows of 32768 elements of 2 bytes, whose values change places between threads once; Hopper's.
//
// A block has a row at a time, a thread 128 values. Two threads begin with the same run of 256 neighbours: of its pairs one
// takes the sums, the other the differences, and seven levels of those are its own. Then a thread has one element of each
// of the 128 runs and seven levels again. Values go through shared memory, which has room for one row: a thread that has
// summed up its run takes its elements of the row before, and leaves its values in their place. So the next row lies there
// the other way round, and all a thread waits for is that others have left their values, a row earlier.
//
// 1024 rows of bfloat16: 37.0 to 37.5 us, where a block whose threads met at each exchange took 40.4 and a copy takes 33.2.
// Without the first rows ahead it is 38.6; without loads and stores 32: what is left of sums and exchanges still adds up, as
// warps are at the same of them at the same time. How long the code is counts: the levels are one place of it for both, and
// with a place for each it takes 45, with a few hundred moves more 44. Tiles that left one by one took 37.2, 132 blocks
// 37.1. No better: blocks with a row less that begin later (37.3), first rows of all announced by the first blocks; warps
// that take turns at sums (37.4), or at shared memory (41); stores by threads (42); copies by threads (42.9 with those); two
// multiprocessors of a cluster with half a row each, two rows at once (58; 42 without the values that go to the other one,
// 57 without loads and stores); the row after the next announced (39 to 40); results made words before a wait (37.8); a
// block's rows one after another (38.9).
#pragma once
#include "copy_engine.cuh"
#include "early.cuh"
#include "rotation.cuh"
#include "soon.cuh"
#include "wgmma_codes.cuh"

struct alignas(64) WarpMaps { TensorMap of[8]; };  // each of 64 bytes of a run

#ifdef __CUDACC__
#define VT_WARP_MAPS const __grid_constant__ WarpMaps
#if VT_TILES
VT_FN void unknown(int& x) { asm volatile("" : "+r"(x)); }  // to the compiler
VT_FN void whatever(float& x) { asm volatile("" : "=f"(x)); }
// A tile of rows of 64 bytes on its way to global memory, from row y on.
VT_FN void tile_leaves(const void* from, const TensorMap& map, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\ncp.async.bulk.commit_group;"
                 ::"l"(&map), "r"(shared_address(from)), "r"(0), "r"(y) : "memory");
}
// Until all but the last LEFT of this thread's tiles are read.
template <int LEFT> VT_FN void tiles_have_left() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory"); }
#endif
#else
#define VT_WARP_MAPS const WarpMaps
namespace emulation {
struct Leaving { const u8* from; const TensorMap* map; int y; };
inline std::vector<Leaving> leaving[8];  // of warps
}
static inline void unknown(int&) {}
static inline void whatever(float& x) { x = NAN; }
// Tiles leave as late as a wait allows.
static inline void tile_leaves(const void* from, const TensorMap& map, int y) {
    emulation::leaving[threadIdx.x / 32].push_back({(const u8*)from, &map, y});
}
template <int LEFT> void tiles_have_left() {
    auto& all = emulation::leaving[threadIdx.x / 32];
    for (; all.size() > LEFT; all.erase(all.begin()))
        for (int r = 0; r < (int)all[0].map->high; ++r)
            std::memcpy((u8*)all[0].map->address + (all[0].y + r) * all[0].map->stride, all[0].from + r * 64, 64);
}
#endif

#if VT_TILES

VT_FN void pair_of(float& a, float& b) {
    const float low = a, high = b;
    a = low + high;
    b = low - high;
}
// Levels FROM ... TO - 1 of 1 << TO - FROM values, number k at `first` + (k << FROM).
template <int FROM, int TO> VT_FN void levels_apart(float (&v)[128], int first) {
#pragma unroll
    for (int level = FROM; level < TO; ++level)
#pragma unroll
        for (int k = 0; k < 1 << (TO - FROM); ++k)
            if (!(k >> (level - FROM) & 1)) pair_of(v[first + (k << FROM)], v[first + (k << FROM) + (1 << level)]);
}

template <int KIND> struct LongTransform {
    static constexpr int ROW = 65536, RAW = 2 * ROW, RESULTS = RAW + ROW, BARRIERS = RESULTS + ROW / 2;  // bytes
    static constexpr int PART = ROW / 8, RUNS = 128;  // a warp's part of a row comes as four tiles of 16 runs

    // The number of a thread's element whose value of a run was number k, and the other way round: the lowest four bits
    // change places two by two, so that lanes of neighbouring runs have elements 8 apart.
    static VT_MEMBER constexpr int turned(int k) { return (k & ~15) | (k & 3) << 2 | (k >> 2 & 3); }

    static VT_MEMBER void send(unsigned char* raw, const TensorMap& map, u64* there, i64 row, int warp) {
        barrier_expect(there, PART);
#pragma unroll
        for (int q = 0; q < 4; ++q) load_tile(raw + q * (PART / 4), map, there, q * 128, (int)row * RUNS + warp * 16);
    }

    static VT_MEMBER void first_level(float* to, const float* from) {
#pragma unroll
        for (int k = 0; k < 16; k += 2) {
            to[k] = from[k] + from[k + 1];
            to[k + 1] = from[k] - from[k + 1];
        }
    }

    // Takes the row before by sixteens, leaves v in its place, and sums the first level up.
    template <class TAKE, class LEAVE> static VT_MEMBER void exchanged(float (&v)[128], TAKE&& take, LEAVE&& leave) {
        float came[2][16];
        take(came[0], 0);
#pragma unroll
        for (int part = 0; part < 8; ++part) {
            float* now = v + part * 16;
            if (part < 7) take(came[part + 1 & 1], part + 1);
            leave(now, part);
            first_level(now, came[part & 1]);
        }
    }
    // A row that lies there by elements: run r's value of this thread is at column[r & 3] + r * 128.
    static VT_MEMBER void by_elements(float (&v)[128], unsigned char* const (&column)[4]) {
        auto at = [&](int part, int k) { return (float*)(column[k & 3] + (part * 16 + k) * 128); };
        exchanged(v, [&](float* came, int part) {
#pragma unroll
            for (int k = 0; k < 16; ++k) came[k] = *at(part, k);
        }, [&](const float* now, int part) {
#pragma unroll
            for (int k = 0; k < 16; ++k) *at(part, k) = now[turned(k)];
        });
    }
    // One that lies there by runs: values g, g + 4, g + 8 and g + 12 of each sixteen are a vector.
    static VT_MEMBER void by_runs(float (&v)[128], unsigned char* const (&mine)[4]) {
        auto at = [&](int part, int g) { return (uint4*)(mine[g] + part * 16384); };
        exchanged(v, [&](float* came, int part) {
#pragma unroll
            for (int g = 0; g < 4; ++g) four_floats(came, turned(g), *at(part, g));
        }, [&](const float* now, int part) {
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const float four[4] = {now[g], now[g + 4], now[g + 8], now[g + 12]};
                *at(part, g) = four_bits(four, 0);
            }
        });
    }

    static VT_MEMBER void run(i64 rows, i64 blocks, const unsigned char* x, float factor, const TensorMap& comes,
                              const WarpMaps& leaves, unsigned char* memory) {
        const int warp = same_in_warp((int)threadIdx.x >> 5), lane = (int)threadIdx.x & 31;
        // First a thread has run 16 warp + `run`, its sums or (odd) differences, then element 32 warp + 8 (lane % 4) + lane / 4.
        const int near = lane & 3, odd = lane >> 2 & 1, far = lane >> 3, run = near + 4 * far;
        const float sign = odd ? -1.0f : 1.0f;
        unsigned char* const raw = memory + RAW + warp * PART;
        unsigned char* const results = memory + RESULTS + warp * 4096;
        unsigned char* const corner = results + (lane >> 3) * 128 + (lane & 1) * 64 + (lane >> 1 & 3) * 16;
        // Between threads value n of run r is at (n / 16 * 128 + r) * 128 + odd * 64 + (n % 4 ^ r % 4) * 16 + n / 4 % 4 * 4.
        unsigned char *mine[4], *column[4];
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            mine[g] = memory + (warp * 16 + run) * 128 + odd * 64 + ((g ^ near) << 4);
            column[g] = memory + warp * 16384 + odd * 64 + near * 4 + ((g ^ far) << 4);
        }
        // All have left their values; a warp's part is there; the first half of the warps have begun.
        u64* const left = (u64*)(memory + BARRIERS);
        u64* const there = left + 1 + warp;
        u64* const begun = left + 9;
        if (lane == 0) {
            if (warp == 0) barrier_init(left, 256), barrier_init(begun, 128);
            barrier_init(there, 1);
        }
        barriers_ready();
        __syncthreads();
        i64 row = blockIdx.x;
        if (threadIdx.x == 0) read_soon(x + row * ROW, ROW);
        after_others();
        others_may_start();
        const int own = ((int)rows - 1 - (int)row) / (int)blocks + 1;  // rows
        if (warp >= 4) barrier_wait(begun, 0);  // whose turn is later
        if (lane == 0) send(raw, comes, there, row, warp);
        float v[128];
        int then = 0, tile = (int)blockIdx.x * RUNS;
        // Runs of this block's row number n, then elements of its row n - 1. The compiler is not to know which is which, or
        // it would sum up in two places.
#pragma unroll 1
        for (int n = 0; n <= own;) {
            if (!then && n == own) {
                then = 1;
#pragma unroll
                for (int k = 0; k < 128; ++k) whatever(v[k]);
            }
            unknown(then);
            const bool reads = n > 0;
            if (!then) {
            runs:
                barrier_wait(there, n & 1);
                if (n == 0 && warp < 4) barrier_arrive(begun);
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    float eight[8];
                    const uint4 vector = *(const uint4*)(raw + place(run, (i & 7)) + (i >> 3) * (PART / 4));
                    widen(eight, Raw<8>{vector, vector}, KIND);
#pragma unroll
                    for (int j = 0; j < 4; ++j) v[4 * i + j] = vt_fma(eight[2 * j + 1], sign, eight[2 * j]);  // one rounding
                    levels_apart<0, 1>(v, 4 * i);
                    levels_apart<0, 1>(v, 4 * i + 2);
                }
                warp_meets();
                row += blocks;
                if (lane == 0 && row < rows) send(raw, comes, there, row, warp);
            } else {
                if (n) barrier_wait(left, n - 1 & 1);
                if (n & 1) by_elements(v, column);
                else by_runs(v, mine);
                barrier_arrive(left);
                if (n == 0 && own > 1) {
                    n = 1, then = 0;  // no row before: a condition around the levels made the code longer
                    goto runs;
                }
            }
#pragma unroll
            for (int k = 0; k < 128; k += 8) levels_apart<1, 3>(v, k), levels_apart<1, 3>(v, k + 1);
#pragma unroll
            for (int k = 0; k < 8; ++k) levels_apart<3, 7>(v, k);
            if (then && reads) {
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    if (q % 2 == 0) {
                        if (lane == 0) tiles_have_left<0>();
                        warp_meets();
                    }
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        unsigned words[4];
#pragma unroll
                        for (int m = 0; m < 4; ++m) {
                            const float *two = v + q * 32 + r * 8 + 2 * m, a = two[0] * factor, b = two[1] * factor;
                            words[m] = KIND == BF16 ? narrow_bf16(a, b) : narrow_f16(a, b);
                        }
                        leave_transposed(corner + (q & 1) * 2048 + r * 512, words);
                    }
                    if (q % 2 == 0) continue;  // two leave together
                    stores_to_products();
                    warp_meets();
                    if (lane == 0) {
                        tile_leaves(results, leaves.of[warp], tile + q * 32 - 32);
                        tile_leaves(results + 2048, leaves.of[warp], tile + q * 32);
                    }
                }
                tile += (int)blocks * RUNS;
            }
            n += then;
            then ^= 1;
        }
        if (lane == 0) tiles_have_left<0>();
    }
};

#endif
