// Hopper's tensor cores by the group of four warps, both operands from shared memory: 64 rows of `a` x 16 k of bfloat16 or
// float16, by the length of `d` twice over as rows of `b`, tiles of 64 k as wgmma.cuh has them (`place`). Products are added
// to float32 sums, which lie as those of `multiply_tile` do.
#pragma once
#include "copy_engine.cuh"
#include "mma.cuh"

#ifdef __CUDACC__
#if VT_TILES

#define NUMBERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NUMBERS_32 NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NUMBERS_48 NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NUMBERS_64 NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NUMBERS_80 NUMBERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_48(i) SUMS_32(i), SUMS_16(i + 32)
#define SUMS_64(i) SUMS_48(i), SUMS_16(i + 48)
#define SUMS_80(i) SUMS_64(i), SUMS_16(i + 64)
#define PRODUCTS(TYPE, SUMS, N, A, B)                                                                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE    \
                 " {" NUMBERS_##SUMS "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}\n" : SUMS_##SUMS(0) : "l"(a), "l"(b))
#define MULTIPLY_SHARED(SUMS, N, A, B)                                                                                 \
    template <int KIND> VT_FN void multiply_shared(float (&d)[SUMS], u64 a, u64 b) {                                   \
        if constexpr (KIND == BF16) PRODUCTS("bf16", SUMS, N, A, B);                                                   \
        else PRODUCTS("f16", SUMS, N, A, B);                                                                           \
    }
MULTIPLY_SHARED(16, 32, 16, 17)
MULTIPLY_SHARED(32, 64, 32, 33)
MULTIPLY_SHARED(48, 96, 48, 49)
MULTIPLY_SHARED(64, 128, 64, 65)
MULTIPLY_SHARED(80, 160, 80, 81)

#endif
#else

template <int KIND, int SUMS> __attribute__((optimize("O3"))) void multiply_shared(float (&d)[SUMS], u64 a, u64 b) {
    using namespace emulation;
    int thread = running->number & 127, of_a = 2 * (int)(a & 15), of_b = 2 * (int)(b & 15);
    auto row_of = [](u64 tile, int first, int row, float* to) {
        for (int v = 0; v < 2; ++v) {
            unsigned short codes[8];
            std::memcpy(codes, (const u8*)(tile & ~15ull) + row * 128 + (((first + v) ^ (row & 7)) << 4), 16);
            for (int k = 0; k < 8; ++k) to[8 * v + k] = half_of<KIND>(codes[k], 0);
        }
    };
    float x[2][16], y[16];
    for (int h = 0; h < 2; ++h) row_of(a, of_a, 16 * (thread >> 5) + 8 * h + (thread & 31) / 4, x[h]);
    for (int s = 0; s < SUMS; s += s & 1 ? 3 : 1) {  // sums s and s + 2 are of one row of b
        row_of(b, of_b, 8 * (s >> 2) + 2 * (thread & 3) + (s & 1), y);
        for (int h = 0; h < 2; ++h)
            for (int k = 0; k < 16; ++k) d[s + 2 * h] += x[h][k] * y[k];
    }
}

#endif
