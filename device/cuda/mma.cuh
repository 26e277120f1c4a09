// Tensor cores by the warp: m16n8k16 products of bfloat16 or float16 with float32 sums, the ways of their operands from
// shared memory into registers, and of tiles from global into shared memory.
//
// Every function is the whole warp's: all 32 lanes call it together. With g = lane / 4 and t = lane % 4, a register of an
// 8 x 8 matrix of 16-bit elements holds row g's elements 2t (low half) and 2t + 1. The operands of `multiply`:
//   a[4], 16 rows x 16 k:  rows 0-7 k 0-7, rows 8-15 k 0-7, rows 0-7 k 8-15, rows 8-15 k 8-15;
//   b0, b1, 8 columns x 16 k, a column as a row of its matrix:  k 0-7, k 8-15;
//   c[4], 16 rows x 8 columns:  row g columns 2t and 2t + 1, then row g + 8.
// So c rounded by `pair` is again a quarter of an `a` (and, its rows taken as columns, half of a `b`): a chain of products
// need not leave the registers. Exact products are summed in an order of the hardware's own, to about float32's accuracy.
// On a host (parity/emulation.hpp) the same registers move, and sums are taken one by one.
#pragma once
#include "storage.cuh"

#define WARP_LANES 0xffffffffu

template <int KIND> VT_FN unsigned pair(float low, float high) {
    return KIND == BF16 ? narrow_bf16(low, high) : narrow_f16(low, high);
}

// Where vector `v` (16 bytes) of a row of VECTORS of them lies in shared memory, in bytes. Eight rows' vectors of one
// number, which one matrix is made of, meet in no bank, and a row's neighbours stay in its 128 bytes. VECTORS: 8 or more.
template <int VECTORS> VT_FN int swizzled(int row, int v) { return (row * VECTORS + (v ^ (row & 7))) * 16; }

#ifdef __CUDACC__

// c += a b.
template <int KIND> VT_FN void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if constexpr (KIND == BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices out of shared memory; lane l gives the address of row l % 8 of matrix l / 8, 16 bytes, aligned.
VT_FN void fetch_matrices(unsigned (&r)[4], const void* row) {
    unsigned from = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

// The same, each matrix transposed.
VT_FN void fetch_transposed(unsigned (&r)[4], const void* row) {
    unsigned from = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

// One matrix transposed.
VT_FN unsigned transposed(unsigned x) {
    unsigned y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// 16 bytes on their way into shared memory, or zeros without a look at `global`; in groups that `copies_close` ends.
VT_FN void copy_or_zero(void* shared, const void* global, bool there) {
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    int size = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(size) : "memory");
}
VT_FN void copies_close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All groups but the last LEFT are there, for the thread that sent for them.
template <int LEFT> VT_FN void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
VT_FN void warp_meets() { __syncwarp(); }

#else

namespace emulation {

// What the lanes of a warp lay open to each other.
template <class T> struct Open {
    T held[1024];
    const T* lanes(const T& own) {
        int lane = running->number;
        held[lane] = own;
        wait_for(warps[lane / 32]);
        return held + lane / 32 * 32;
    }
    void close() { wait_for(warps[running->number / 32]); }
};

struct Operands { unsigned a[4], b[2]; };
inline Open<Operands> operands;
inline Open<const unsigned short*> addresses;
inline Open<unsigned> registers;

template <int KIND> float half_of(unsigned pair, int which) {
    unsigned bits = which ? pair >> 16 : pair & 0xffffu;
    return KIND == BF16 ? widen_bf16(bits) : widen_f16(bits);
}

}  // namespace emulation

template <int KIND> void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    using namespace emulation;
    int lane = running->number & 31, g = lane >> 2, t = lane & 3;
    const Operands* lanes = operands.lanes({{a[0], a[1], a[2], a[3]}, {b0, b1}});
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) {
            int from = (k & 7) >> 1, upper = k >> 3;
            float x = half_of<KIND>(lanes[4 * g + from].a[2 * upper + (i >> 1)], k & 1);
            float y = half_of<KIND>(lanes[4 * (2 * t + (i & 1)) + from].b[upper], k & 1);
            c[i] += x * y;
        }
    operands.close();
}

static inline void fetch_matrices(unsigned (&r)[4], const void* row) {
    using namespace emulation;
    int lane = running->number & 31, g = lane >> 2, t = lane & 3;
    const unsigned short* const* rows = addresses.lanes((const unsigned short*)row);
    for (int m = 0; m < 4; ++m) r[m] = rows[8 * m + g][2 * t] | (unsigned)rows[8 * m + g][2 * t + 1] << 16;
    addresses.close();
}

static inline void fetch_transposed(unsigned (&r)[4], const void* row) {
    using namespace emulation;
    int lane = running->number & 31, g = lane >> 2, t = lane & 3;
    const unsigned short* const* rows = addresses.lanes((const unsigned short*)row);
    for (int m = 0; m < 4; ++m) r[m] = rows[8 * m + 2 * t][g] | (unsigned)rows[8 * m + 2 * t + 1][g] << 16;
    addresses.close();
}

static inline unsigned transposed(unsigned x) {
    using namespace emulation;
    int lane = running->number & 31, g = lane >> 2, t = lane & 3, shift = (g & 1) * 16;
    const unsigned* lanes = registers.lanes(x);
    unsigned low = lanes[8 * t + g / 2] >> shift & 0xffffu, high = lanes[8 * t + 4 + g / 2] >> shift & 0xffffu;
    registers.close();
    return low | high << 16;
}

static const unsigned char no_bytes[16] = {};
static inline void copy_or_zero(void* shared, const void* global, bool there) {
    copy_async(shared, there ? global : no_bytes);
}
static inline void warp_meets() { emulation::wait_for(emulation::warps[emulation::running->number / 32]); }

#endif
