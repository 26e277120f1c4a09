// The fast Hadamard transform of rows of 32768 elements of 2 bytes, whose values change places between threads once; Hopper's.
//
// A block has a row at a time, a thread 128 values. Two threads begin with the same run of 256 neighbours: of its pairs one
// takes the sums, the other the differences, and seven levels of those are its own. After the one exchange a thread has
// every 256th element and seven levels again. The next row comes meanwhile, each warp's part of it for itself, and the copy
// engine takes results away.
//
// 1024 rows of bfloat16: 40.6 us, where transform.cuh takes 42.2 and a copy 33.4. A form of it takes 42, without loads and
// stores 29, and 38 without sums or 40 without the exchange: sums and traffic do not hide each other. No better: the copy
// engine for what comes (46), stores by threads (43), rows ahead into the second-level cache (41.6 to 50), results in memory
// of their own, so that they have the time of a row to leave (41.4 to 45: more instructions, 33 to 36 us of them).
#pragma once
#include "early.cuh"
#include "rotation.cuh"
#include "wgmma_codes.cuh"


#ifdef __CUDACC__
#if VT_TILES
// A multiple of 16 bytes on its way to global memory.
VT_FN void bytes_leave(void* to, const void* from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;"
                 ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
// Until what this thread sent away is read.
VT_FN void bytes_have_left() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
#endif
#else
namespace emulation {
inline std::vector<Copy> leaving;
}
// Bytes leave as late as a wait allows.
static inline void bytes_leave(void* to, const void* from, int bytes) { emulation::leaving.push_back({to, from, (size_t)bytes}); }
static inline void bytes_have_left() {
    for (auto& part : emulation::leaving) std::memcpy(part.to, part.from, part.size);
    emulation::leaving.clear();
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
    static constexpr int ROW = 65536, RUN = 512;  // bytes of a row, and of 256 elements
    static constexpr int BETWEEN = 2 * ROW, PART = ROW / 8;
    static constexpr int LATER = ROW / 2 + 64;    // where the second half of results lies, in other banks

    // Every eighth run of the row at x, from number `warp` on, into the warp's memory: vectors change places, so that lanes
    // that read of four runs meet in no bank.
    static VT_MEMBER void send(unsigned char* next, const unsigned char* x) {
        const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
        const unsigned char* from = x + warp * RUN + lane * 16;
#pragma unroll
        for (int i = 0; i < 16; ++i) copy_async(next + i * RUN + ((lane ^ i >> 2) << 4), from + i * 8 * RUN);
    }

    static VT_MEMBER void run(i64 rows, i64 blocks, const unsigned char* x, unsigned char* out, float factor, unsigned char* memory) {
        const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
        const int odd = lane & 1, part = lane >> 1 & 3, later = lane >> 3;
        unsigned char* const next = memory + BETWEEN + warp * PART;
        const float sign = odd ? -1.0f : 1.0f;
        // First a thread has run warp + 8 (4 part + later), its sums or (odd) differences 0 ... 127. Between threads number
        // b * 16 + e * 4 + g of those is float e of vector g of 64 bytes, whose vectors change places.
        const unsigned char* const raw = next + (part * 4 + later) * RUN;
        unsigned char* const mine = memory + warp * 16384 + lane * 64;
        // Then it has element lane / 4 + lane % 4 * 8 + warp * 32 of all runs.
        const unsigned char* const column = memory + warp * 2048 + (lane & 4) * 16 + (lane & 3) * 4;
        unsigned char* const results = memory + odd * LATER + later * (16 * RUN) + warp * 64 + part * 16;
        after_others();
        others_may_start();
        i64 row = blockIdx.x;
        send(next, x + row * ROW);
#pragma unroll 1
        for (; row < rows; row += blocks) {
            float v[128];
            copies_arrive();
            warp_meets();
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                float eight[8];
                const uint4 vector = *(const uint4*)(raw + (i & ~3) * 16 + (((i & 3) ^ part) << 4));
                widen(eight, Raw<8>{vector, vector}, KIND);
#pragma unroll
                for (int j = 0; j < 4; ++j) v[4 * i + j] = vt_fma(eight[2 * j + 1], sign, eight[2 * j]);  // one rounding
                levels_apart<0, 2>(v, 4 * i);
            }
            warp_meets();
            if (row + blocks < rows) send(next, x + (row + blocks) * ROW);
            if (threadIdx.x == 0) bytes_have_left();
            __syncthreads();
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                levels_apart<2, 7>(v, g);
#pragma unroll
                for (int b = 0; b < 8; ++b) {
                    const float four[4] = {v[g + 16 * b], v[g + 16 * b + 4], v[g + 16 * b + 8], v[g + 16 * b + 12]};
                    *(uint4*)(mine + b * 2048 + ((g ^ part) << 4)) = four_bits(four, 0);
                }
            }
            __syncthreads();
#pragma unroll
            for (int r = 0; r < 128; r += 16) {
                const unsigned char* sixteen = column + (r >> 5) * 128 + ((later ^ r >> 5) << 4) + (r >> 4 & 1) * 1024;
#pragma unroll
                for (int i = 0; i < 16; ++i) v[r + i] = *(const float*)(sixteen + (i & 7) * 16384 + (i >> 3) * 512);
                levels_apart<0, 4>(v, r);
            }
            __syncthreads();
#pragma unroll
            for (int r = 0; r < 16; ++r) {
                levels_apart<4, 7>(v, r);
                unsigned words[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const float low = v[r + 16 * m] * factor, high = v[r + 16 * m + 64] * factor;
                    words[m] = KIND == BF16 ? narrow_bf16(low, high) : narrow_f16(low, high);
                }
                leave_transposed(results + r * RUN, words);
            }
            stores_to_products();
            __syncthreads();
            if (threadIdx.x == 0) {
                bytes_leave(out + row * ROW, memory, ROW / 2);
                bytes_leave(out + row * ROW + ROW / 2, memory + LATER, ROW / 2);
            }
        }
        if (threadIdx.x == 0) bytes_have_left();
    }
};

#endif
