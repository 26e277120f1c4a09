// `multiply_tile` of wgmma.cuh for as few as 16 rows of `b`, in eights: tiles as narrow as it takes for every multiprocessor to
// have one. Of int8 the instruction has no 40 and no 56.
#pragma once
#include "wgmma.cuh"

#if defined(__CUDACC__) && VT_TILES

#define SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_12 SUMS_8 ", %8, %9, %10, %11"
#define SUMS_16 SUMS_12 ", %12, %13, %14, %15"
#define SUMS_20 SUMS_16 ", %16, %17, %18, %19"
#define SUMS_24 SUMS_20 ", %20, %21, %22, %23"
#define SUMS_28 SUMS_24 ", %24, %25, %26, %27"
#define FOUR(kind, i) kind(d[i]), kind(d[i + 1]), kind(d[i + 2]), kind(d[i + 3])
#define EIGHT(kind, i) FOUR(kind, i), FOUR(kind, i + 4)
#define SIXTEEN(kind) EIGHT(kind, 0), EIGHT(kind, 8)
#define TWENTY(kind) SIXTEEN(kind), FOUR(kind, 16)
#define NARROW_TILE(SUM, SUMS, N, FORM, A, B, ADD, SIGNS, ...)                                                         \
    VT_FN void multiply_tile(SUM (&d)[SUMS], u64 a, u64 b, int add) {                                                  \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32." FORM " {" SUMS_##SUMS "}, %" #A ", %" #B ", p" SIGNS ";\n}\n" \
                     : __VA_ARGS__                                                                                     \
                     : "l"(a), "l"(b), "r"(add));                                                                      \
    }
#define E4M3 "f32.e4m3.e4m3"
#define S8 "s32.s8.s8"
NARROW_TILE(float, 16, 32, E4M3, 16, 17, 18, ", 1, 1", SIXTEEN("+f"))
NARROW_TILE(float, 20, 40, E4M3, 20, 21, 22, ", 1, 1", TWENTY("+f"))
NARROW_TILE(float, 24, 48, E4M3, 24, 25, 26, ", 1, 1", SIXTEEN("+f"), EIGHT("+f", 16))
NARROW_TILE(float, 28, 56, E4M3, 28, 29, 30, ", 1, 1", TWENTY("+f"), EIGHT("+f", 20))
NARROW_TILE(int, 16, 32, S8, 16, 17, 18, "", SIXTEEN("+r"))
NARROW_TILE(int, 24, 48, S8, 24, 25, 26, "", SIXTEEN("+r"), EIGHT("+r", 16))

#endif
