// A row a block of 128 threads, normed without a residual and quantised: G vectors a thread, every 128th, each thread with two
// of the tree's partials. Half as many threads as have one find the row's numbers, and no warp idles. What lies beyond the
// width is zero all along.
#pragma once
#include "bf16_quotients.cuh"
#include "tree.cuh"

#define ALONE_SPAN (TREE_SPAN / 2)

// A thread's two partials of a row joined over a block of 128 in the tree's order, with little more to do than for one: half
// of the lanes join the first ones, half the second. FIRST: the tree's first step among lanes, 16 where the second partials
// are 128 further on, 8 where they are the next ones. `warps` as for tree_of_block.
template <int FIRST> VT_FN float tree_of_two(const float (&partials)[2], float* warps) {
    const int lane = threadIdx.x & 31;
    const bool second = lane & FIRST;
    float joined = (second ? partials[1] : partials[0]) + other_lane(second ? partials[0] : partials[1], FIRST);
    joined = tree_of_lanes(joined, FIRST);
    if (FIRST == 8) joined += other_lane(joined, 8);
    if ((lane & 15) == 0) warps[FIRST == 8 ? threadIdx.x >> 4 : (lane >> 2) + (threadIdx.x >> 5)] = joined;
    __syncthreads();
    float s[8];
#pragma unroll
    for (int w = 0; w < 8; ++w) s[w] = warps[w];
    return tree_of_eight(s);
}

// A thread's two partials of a row of bfloat16: vectors in turn. Their squares are exact in float32 unless they are tiny,
// and then they change no sum that is not: a fused sum is the same from a first square on that is not tiny.
template <int G> VT_FN void add_in_turn(float (&partials)[2], const Raw<8> (&y)[G]) {
    const float a = widen_bf16(y[0].a.x & 0xffffu), b = widen_bf16(y[1].a.x & 0xffffu);
    const bool fused = a * a > 0x1p-100f && b * b > 0x1p-100f;
    float v[8];
    if (fused) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
            widen(v, y[g], BF16);
#pragma unroll
            for (int j = 0; j < 8; ++j) partials[g & 1] = vt_fma(v[j], v[j], partials[g & 1]);
        }
    } else {
#pragma unroll
        for (int g = 0; g < G; ++g) {
            widen(v, y[g], BF16);
            add_squares(partials[g & 1], v);
        }
    }
}

// y = normed(x, weights, root(sum of squares)), vector by vector, weights sent for with the row.
template <int G, class R, class N>
VT_FN void alone_normed(Raw<8> (&y)[G], const void* x, i64 from, int width, const void* weight, R&& root, N&& normed) {
    __shared__ float warps[8];
    const int first = threadIdx.x * 8;
    Raw<8> weights[G];
    float partials[2] = {};
#pragma unroll
    for (int g = 0; g < G; ++g) {
        y[g] = {};
        if (first + g * ALONE_SPAN < width) y[g] = fetch<8>(x, from + first + g * ALONE_SPAN, BF16);
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
        weights[g] = {};
        if (first + g * ALONE_SPAN < width) weights[g] = fetch<8>(weight, first + g * ALONE_SPAN, BF16);
    }
    add_in_turn(partials, y);
    const float number = root(tree_of_two<16>(partials, warps));
#pragma unroll
    for (int g = 0; g < G; ++g) y[g] = normed(y[g], weights[g], number);
}

// The bits of the row's largest size; a NaN is passed over, or (KEEP) the largest.
template <bool KEEP, int G> VT_FN unsigned alone_largest(const Raw<8> (&y)[G]) {
    __shared__ unsigned tops[4];
    unsigned pair = 0;
#pragma unroll
    for (int g = 0; g < G; ++g) pair = larger_pair<KEEP>(pair, largest_pair<KEEP>(y[g].a));
    return largest_of_block(larger(pair << 16, pair & 0xffff0000u), tops);
}

// quotients(q, v, g): what becomes codes of vector g.
template <int G, class Q>
VT_FN void alone_codes(const Raw<8> (&y)[G], unsigned char* out, i64 from, int width, unsigned nan, Q&& quotients) {
    const int first = threadIdx.x * 8;
    float v[8], q[8];
#pragma unroll
    for (int g = 0; g < G; ++g) {
        widen(v, y[g], BF16);
        quotients(q, v, g);  // by all lanes, which may look at each other's
        if (first + g * ALONE_SPAN < width) store_e4m3(out, from + first + g * ALONE_SPAN, q, nan);
    }
}
