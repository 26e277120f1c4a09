// Hopper's tensor cores by the group of four warps, the left operand from registers: 64 rows x 32 k of bytes, each warp's 16
// rows as mma.cuh has them, by the length of `d` twice over as rows of signed bytes of `b`, a tile of 128 k as wgmma.cuh
// has them (`place`), and int32 sums: those of `multiply_tile`. SIGNED is of the left operand. While products are under way
// their registers must stay.
#pragma once
#include "ggml_row.cuh"
#include "wgmma_narrow.cuh"

#ifdef __CUDACC__
#if VT_TILES

#define SUMS_32 SUMS_28 ", %28, %29, %30, %31"
#define SUMS_64 SUMS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
                        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define THIRTY_TWO(kind, i) EIGHT(kind, i), EIGHT(kind, i + 8), EIGHT(kind, i + 16), EIGHT(kind, i + 24)
#define OF_LEFT(LEFT, SUMS, N, A, B, ADD, ...)                                                                           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32." LEFT ".s8 {" SUMS_##SUMS "}, {" A "}, %" #B ", p;\n}\n" \
                 : __VA_ARGS__                                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define BYTES_BY(SUMS, N, A, B, ADD, ...)                                                                                \
    template <bool SIGNED> VT_FN void multiply_bytes_by(int (&d)[SUMS], const unsigned (&a)[4], u64 b, int add) {        \
        if constexpr (SIGNED) OF_LEFT("s8", SUMS, N, A, B, ADD, __VA_ARGS__);                                            \
        else OF_LEFT("u8", SUMS, N, A, B, ADD, __VA_ARGS__);                                                             \
    }
BYTES_BY(8, 16, "%8, %9, %10, %11", 12, 13, EIGHT("+r", 0))
BYTES_BY(16, 32, "%16, %17, %18, %19", 20, 21, SIXTEEN("+r"))
BYTES_BY(32, 64, "%32, %33, %34, %35", 36, 37, THIRTY_TWO("+r", 0))
BYTES_BY(64, 128, "%64, %65, %66, %67", 68, 69, THIRTY_TWO("+r", 0), THIRTY_TWO("+r", 32))

#endif
#else

template <bool SIGNED, int SUMS>
__attribute__((optimize("O3"))) void multiply_bytes_by(int (&d)[SUMS], const unsigned (&a)[4], u64 b, int add) {
    using namespace emulation;
    int lane = running->number & 31, g = lane >> 2, t = lane & 3, first = 2 * (int)(b & 15);
    const u8* right = (const u8*)(b & ~15ull);
    const Operands* lanes = operands.lanes({{a[0], a[1], a[2], a[3]}, {0, 0}});
    short x[2][32];
    for (int half = 0; half < 2; ++half)
        for (int k = 0; k < 32; ++k) {
            u8 byte = (u8)(lanes[4 * g + (k >> 2 & 3)].a[2 * (k >> 4) + half] >> 8 * (k & 3));
            x[half][k] = SIGNED ? (short)(signed char)byte : (short)byte;
        }
    for (int s = 0; s < SUMS; s += s & 1 ? 3 : 1) {  // sums s and s + 2 are of one row of b
        int row = 8 * (s >> 2) + 2 * t + (s & 1);
        signed char y[32];
        for (int v = 0; v < 2; ++v) std::memcpy(y + 16 * v, right + row * 128 + (((first + v) ^ (row & 7)) << 4), 16);
        for (int half = 0; half < 2; ++half) {
            int sum = add ? d[s + 2 * half] : 0;
            for (int k = 0; k < 32; ++k) sum += x[half][k] * y[k];
            d[s + 2 * half] = sum;
        }
    }
    operands.close();
}

#endif
