// What kernels of SiLU-and-mul into FP8 codes share: a row of x is a half of gates and a half of what they gate.
#pragma once
#include "bf16_quotients.cuh"
#include "early.cuh"
#include "rows.cuh"
#include "silu_guess.cuh"

// y = round(act * up) as the activation stores it.
template <int V> VT_FN void silu_products(float (&y)[V], const Raw<V>& gate, const Raw<V>& up, int kind, bool rounded) {
    float g[V], u[V];
    widen(g, gate, kind);
    widen(u, up, kind);
    gate_products<true>(y, g, u, rounded ? kind : F32, kind);
#pragma unroll
    for (int j = 0; j < V; ++j) y[j] = through(y[j], kind);
}

// Vectors of all rows in a row, D a thread, `step` apart. Number n of the result is made of numbers n + row * per_row
// and, per_row further, of x. What has no place reads the last one, so that loads wait for no comparison.
template <int D> struct Halves {
    const void* x;
    Raw<8> gate[D], up[D];
    unsigned row[D], first, step, count, per_row;

    VT_MEMBER Halves(const void* x, int kind, i64 rows, unsigned per_row, unsigned magic, int magic_shift)
        : x(x), first(blockIdx.x * (blockDim.x * D) + threadIdx.x), step(blockDim.x), count((unsigned)rows * per_row),
          per_row(per_row) {
        after_others();
#pragma unroll
        for (int d = 0; d < D; ++d) {
            unsigned place = inside(d) ? number(d) : count - 1;
            row[d] = whole_quotient(place, magic, magic_shift);
            unsigned at = place + row[d] * per_row;
            gate[d] = fetch<8>(x, (i64)at * 8, kind);
            up[d] = fetch<8>(x, (i64)(at + per_row) * 8, kind);
        }
    }
    VT_MEMBER unsigned number(int d) const { return first + d * step; }
    VT_MEMBER bool inside(int d) const { return number(d) < count; }
    // For a place: MIRROR's silu(gate) * up of element n of vector d, both bfloat16, which are read once more; rounded: the act is.
    VT_MEMBER float exact(int d, int n, bool rounded) const {
        unsigned row_of = row[0];
#pragma unroll
        for (int e = 1; e < D; ++e)
            if (d == e) row_of = row[e];
        const unsigned short* from = (const unsigned short*)x + (i64)(first + d * step + row_of * per_row) * 8 + n;
        float g = widen_bf16(from[0]), u = widen_bf16(from[(i64)per_row * 8]);
        return exact_product<true>(g, u, rounded ? BF16 : F32);
    }
};

VT_FN unsigned char one_code(float q, unsigned nan) {
    return (unsigned char)(q != q ? nan : e4m3_pair(q, 0.0f) & 0xffu);
}
