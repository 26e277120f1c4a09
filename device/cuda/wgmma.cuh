// Hopper's tensor cores by the group of four warps: products of 8-bit tiles that lie in shared memory, and the barriers
// between the threads that fetch tiles and those that multiply them.
//
// A tile has rows of 128 bytes; its 16-byte vectors change places within each eight rows (`place`), so that neither the
// fetching nor the multiplying side meets itself in a bank. Tiles start at multiples of 1024 bytes. `multiply_tile` takes
// 64 rows of `a`, the length of `d` twice over as rows of `b`, and 32 of their k; of its sums thread t holds
//   d[4 j + 2 h + i] = row 16 (t / 32) + 8 h + t % 32 / 4 of a, row 8 j + 2 (t % 4) + i of b.
// Sums of int8 products are exact. Those of e4m3 keep fewer bits than float32 (14 or so of the largest term), which is
// why a sum should leave the tensor cores after few products. On a host they are taken one by one.
#pragma once
#include "storage.cuh"

typedef unsigned long long u64;
typedef unsigned char u8;

#if !defined(__CUDACC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VT_TILES 1
#else
#define VT_TILES 0  // other GPUs have no such instructions: their kernels are empty, and never launched
#endif

// Byte offset of 16-byte vector v of a row.
VT_FN int place(int row, int v) { return row * 128 + ((v ^ (row & 7)) << 4); }

#ifdef __CUDACC__
#if VT_TILES

VT_FN unsigned shared_address(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

// A tile as the tensor cores are told of it: where it is, 1024 bytes from eight rows to the next, vectors as in `place`.
VT_FN u64 tile_of(const void* shared) {
    return (u64)(shared_address(shared) >> 4 & 0x3fffu) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// The same 32 k further on.
VT_FN u64 further(u64 tile, int steps) { return tile & ~0xffffffffull | ((unsigned)tile + 2u * steps); }
// The tile so many bytes, a multiple of 1024, behind.
VT_FN u64 beyond(u64 tile, int bytes) { return further(tile, bytes >> 5); }
// What all threads of a warp have alike, so that the compiler knows.
VT_FN int same_in_warp(int x) { return __shfl_sync(0xffffffffu, x, 0); }
// threadIdx.x, read here and not before: what hangs on it holds no registers until then.
VT_FN int thread_from_here() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

VT_FN void multiply_tile(float (&d)[8], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7"
                 "}, %8, %9, p, 1, 1;\n}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7])
                 : "l"(a), "l"(b), "r"(add));
}
VT_FN void multiply_tile(float (&d)[32], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, p, 1, 1;\n}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(add));
}
VT_FN void multiply_tile(float (&d)[64], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, p, 1, 1;\n}\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "l"(a), "l"(b), "r"(add));
}
VT_FN void multiply_tile(int (&d)[8], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7"
                 "}, %8, %9, p;\n}\n"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]),
                   "+r"(d[6]), "+r"(d[7])
                 : "l"(a), "l"(b), "r"(add));
}
VT_FN void multiply_tile(int (&d)[32], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, p;\n}\n"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]),
                   "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]),
                   "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]),
                   "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
                   "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]),
                   "+r"(d[30]), "+r"(d[31])
                 : "l"(a), "l"(b), "r"(add));
}
VT_FN void multiply_tile(int (&d)[64], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, p;\n}\n"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]),
                   "+r"(d[6]), "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]),
                   "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]),
                   "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]),
                   "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]),
                   "+r"(d[30]), "+r"(d[31]), "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]),
                   "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), "+r"(d[40]), "+r"(d[41]),
                   "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]),
                   "+r"(d[48]), "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]),
                   "+r"(d[54]), "+r"(d[55]), "+r"(d[56]), "+r"(d[57]), "+r"(d[58]), "+r"(d[59]),
                   "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
                 : "l"(a), "l"(b), "r"(add));
}

VT_FN void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
VT_FN void products_close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All groups of products but the last LEFT are done.
template <int LEFT> VT_FN void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// Sums are made before this and read behind it: the compiler moves neither over waits and products as it otherwise might.
template <int SUMS> VT_FN void products_there(float (&d)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int SUMS> VT_FN void products_there(int (&d)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

VT_FN void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
VT_FN void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
VT_FN void barrier_arrive(u64* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier)) : "memory");
}
// As soon as all that this thread has sent for is there.
VT_FN void barrier_arrive_with_copies(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Until the phase of this parity is over; phases are 0, 1, 0, ...
VT_FN void barrier_wait(u64* barrier, int parity) {
    asm volatile("{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}"
                 ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}
// What others stored, and a barrier made visible, may be multiplied.
VT_FN void stores_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
VT_FN void vector_or_zero(void* shared, const void* global, bool there) {
    int size = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(size) : "memory");
}
VT_FN void copy_word(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
template <int COUNT> VT_FN void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> VT_FN void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
// The first `threads` of a block meet.
VT_FN void some_meet(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

#endif
#else

namespace emulation {

struct Phases { unsigned short left, arrivals; unsigned phase; };
static_assert(sizeof(Phases) == sizeof(u64), "");
alignas(16) inline const u8 zeros[16] = {};
inline Meeting some;

inline float e4m3(u8 code) {
    int exponent = code >> 3 & 15, digits = code & 7;
    if ((code & 0x7f) == 0x7f) return NAN;
    float size = exponent ? std::ldexp(8.0f + digits, exponent - 10) : std::ldexp((float)digits, -9);
    return code & 0x80 ? -size : size;
}
inline const float* factors(float) {
    static float all[256];
    if (!all[1])
        for (int i = 0; i < 256; ++i) all[i] = e4m3((u8)i);
    return all;
}
inline const int* factors(int) {
    static int all[256];
    if (!all[1])
        for (int i = 0; i < 256; ++i) all[i] = (signed char)i;
    return all;
}

}  // namespace emulation

// The address, with the steps of 32 k in its lowest bits: tiles start at multiples of 1024.
static inline u64 tile_of(const void* shared) { return (u64)shared; }
static inline u64 further(u64 tile, int steps) { return tile + steps; }
static inline u64 beyond(u64 tile, int bytes) { return tile + bytes; }
static inline int same_in_warp(int x) { return x; }
static inline int thread_from_here() { return (int)threadIdx.x; }

template <class T, int SUMS> __attribute__((optimize("O3"))) void multiply_tile(T (&d)[SUMS], u64 a, u64 b, int add) {
    const T* factors = emulation::factors(T());
    int thread = emulation::running->number & 127, of_a = 2 * (int)(a & 15), of_b = 2 * (int)(b & 15);
    const u8 *left = (const u8*)(a & ~15ull), *right = (const u8*)(b & ~15ull);
    for (int s = 0; s < SUMS; ++s) {
        int row = 16 * (thread >> 5) + 8 * (s >> 1 & 1) + (thread & 31) / 4, column = 8 * (s >> 2) + 2 * (thread & 3) + (s & 1);
        T sum = add ? d[s] : 0;
        for (int v = 0; v < 2; ++v) {  // vectors as `place` has them
            const u8* x = left + row * 128 + (((of_a + v) ^ (row & 7)) << 4);
            const u8* y = right + column * 128 + (((of_b + v) ^ (column & 7)) << 4);
            for (int k = 0; k < 16; ++k) sum += factors[x[k]] * factors[y[k]];
        }
        d[s] = sum;
    }
}
static inline void products_begin() {}
static inline void products_close() {}
template <int LEFT> void products_wait() {}
template <class T, int SUMS> void products_there(T (&)[SUMS]) {}
static inline void barrier_init(u64* barrier, int arrivals) {
    emulation::Phases phases = {(unsigned short)arrivals, (unsigned short)arrivals, 0};
    std::memcpy(barrier, &phases, 8);
}
static inline void barriers_ready() {}
static inline void barrier_arrive(u64* barrier) {
    auto phases = (emulation::Phases*)barrier;
    ++emulation::progress;
    if (--phases->left) return;
    phases->left = phases->arrivals;
    phases->phase ^= 1;
}
static inline void barrier_arrive_with_copies(u64* barrier) {
    copies_arrive();
    barrier_arrive(barrier);
}
static inline void barrier_wait(u64* barrier, int parity) {
    while (((emulation::Phases*)barrier)->phase == (unsigned)parity) emulation::change(emulation::running->context, emulation::scheduler);
}
static inline void stores_to_products() {}
static inline void vector_or_zero(void* shared, const void* global, bool there) { copy_async(shared, there ? global : emulation::zeros); }
static inline void copy_word(void* shared, const void* global) { std::memcpy(shared, global, 4); }
template <int COUNT> void registers_up() {}
template <int COUNT> void registers_down() {}
static inline void some_meet(int threads) {
    emulation::some.size = threads;
    emulation::wait_for(emulation::some);
}

#endif
