// Loads, stores and counters of rotations by tensor cores, in such instructions as compilers do not find.
#pragma once
#include "e2m1_steps.cuh"
#include "soon.cuh"

// A lane's counter in shared memory, and `more` in it.
VT_FN int counted(unsigned* counter, int more) {
#ifdef __CUDACC__
    int before;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"((unsigned)__cvta_generic_to_shared(counter)), "r"(more)
                 : "memory");
    return before;
#else
    return (int)atomicAdd(counter, (unsigned)more);
#endif
}

// What follows is made once: by a move that no compiler repeats for each tile, nor puts off.
template <class T> VT_FN void kept(T& v) {
#ifdef __CUDACC__
    if constexpr (sizeof(T) == 4)
        asm volatile("shfl.sync.idx.b32 %0, %0, %1, 31, 0xffffffff;" : "+r"(v) : "r"((int)threadIdx.x & 31) : "memory");
    else asm volatile("" : "+l"(v));
#endif
}

// `after_others` once `sign` is known, at most bits 15 and 31, and what was kept before it: no compiler puts that off.
VT_FN void after_others_once(unsigned sign) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred known;\nsetp.ne.u32 known, %0, 1;\n@known griddepcontrol.wait;}" ::"r"(sign) : "memory");
#endif
}

VT_FN void store_word(unsigned char* out, unsigned word) {
#ifdef __CUDACC__
    asm volatile("st.global.u32 [%0], %1;" ::"l"(out), "r"(word) : "memory");
#else
    *(unsigned*)out = word;
#endif
}
VT_FN void store_words(unsigned char* out, unsigned a, unsigned b) {
#ifdef __CUDACC__
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(out), "r"(a), "r"(b) : "memory");
#else
    *(uint2*)out = {a, b};
#endif
}
VT_FN void store_words(unsigned char* out, unsigned a, unsigned b, unsigned c, unsigned d) {
#ifdef __CUDACC__
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(out), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
#else
    *(uint4*)out = {a, b, c, d};
#endif
}
VT_FN void store_byte(unsigned char* out, unsigned byte) {
#ifdef __CUDACC__
    asm volatile("st.global.u8 [%0], %1;" ::"l"(out), "r"(byte) : "memory");
#else
    *out = (unsigned char)byte;
#endif
}

// BYTES n bytes on, by one instruction.
template <int BYTES> VT_FN unsigned char* apart(unsigned char* from, int n) {
#ifdef __CUDACC__
    unsigned char* to;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(to) : "r"(n), "n"(BYTES), "l"(from));
    return to;
#else
    return from + (unsigned long long)n * BYTES;
#endif
}

// The lowest bytes of a and b.
VT_FN void store_bytes(unsigned char* out, unsigned a, unsigned b) {
    const unsigned both = chosen_bytes(a, b, 0x0040u);
#ifdef __CUDACC__
    asm volatile("{.reg .b16 low;\ncvt.u16.u32 low, %1;\nst.global.u16 [%0], low;}" ::"l"(out), "r"(both) : "memory");
#else
    *(unsigned short*)out = (unsigned short)both;
#endif
}
