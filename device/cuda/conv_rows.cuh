// The convolution of one token a row with a filter of four taps, everything in bfloat16: two channels a thread.
//
// Few rows are short work, whose time is that of loads that wait for each other: the slot, then the state. All else is
// sent for beside the slot, and what comes before it happens while the kernel before this one ends (early.cuh). The
// states of two channels are three words, so a step moves halves of words.
#pragma once
#include "conv.cuh"
#include "conv_silu.cuh"
#include "early.cuh"
#include "rows.cuh"

#define FEW_LANES 64  // device/causal_conv.py

#define ROWS_PARAMETERS                                                                                           \
    i64 rows, i64 width, i64 chunks, const void *x, i64 x_row, i64 x_kind, const void *weight, i64 weight_kind,   \
        const void *bias, i64 bias_kind, void *state, i64 state_kind, i64 slots, const int *state_idx, i64 taps,  \
        i64 held, i64 count, const int *accepted, i64 flags, void *out

// Half `first` and half `second` of two words, of which a has 0 and 1 and b has 2 and 3; the lower ones are even.
VT_FN unsigned halves(unsigned a, unsigned b, int first, int second) {
#ifdef __CUDACC__
    return __byte_perm(a, b, (unsigned)((2 * second + 1) << 12 | 2 * second << 8 | (2 * first + 1) << 4 | 2 * first));
#else
    const unsigned half[4] = {a & 0xffffu, a >> 16, b & 0xffffu, b >> 16};
    return half[first] | half[second] << 16;
#endif
}
VT_FN float low_half(unsigned pair) { return vt_float((int)(pair << 16)); }
VT_FN float high_half(unsigned pair) { return vt_float((int)(pair & 0xffff0000u)); }

// total and the four products of a channel: filter and inputs as two pairs each.
template <int HOW> VT_FN float four_taps(float total, unsigned w01, unsigned w23, unsigned x01, unsigned x23) {
    if (HOW == ROUNDED) {
        const unsigned early = brain_products(w01, x01), late = brain_products(w23, x23);
        total += low_half(early);
        total += high_half(early);
        total += low_half(late);
        return total + high_half(late);
    }
    total = vt_fma(low_half(w01), low_half(x01), total);
    total = vt_fma(high_half(w01), high_half(x01), total);
    total = vt_fma(low_half(w23), low_half(x23), total);
    return vt_fma(high_half(w23), high_half(x23), total);
}

// chunks: `split` of groups of blockDim.y rows; their blocks have neighbouring numbers and one filter.
template <int HOW> VT_FN void conv_few(ROWS_PARAMETERS) {
    const Part part = part_of(chunks);
    const unsigned across = (unsigned)width, row = part.rest * blockDim.y + threadIdx.y;
    const unsigned column = (part.whole * FEW_LANES + threadIdx.x) * 2;
    const unsigned short* const from = (const unsigned short*)x + (i64)row * x_row + column;
    unsigned short* const to = (unsigned short*)out + (i64)row * across + column;
    const uint4* const taps_at = (const uint4*)((const unsigned short*)weight + (i64)column * 4);
    char* const held_at = (char*)state + (i64)column * 6;
    after_others();
    if (column >= across || row >= (unsigned)rows) return;
    const unsigned slot = state_idx == nullptr ? row : (unsigned)state_idx[row];
    const unsigned token = *(const unsigned*)from;
    const uint4 w = *taps_at;
    float total[2] = {};
    if (bias != nullptr) {
        total[0] = load_one(bias, column, (int)bias_kind);
        total[1] = load_one(bias, column + 1, (int)bias_kind);
    }
    unsigned y = 0;
    if (slot < (unsigned)slots) {  // a negative one is larger than any
        unsigned* const past = (unsigned*)(held_at + (unsigned long long)slot * (across * 6));
        const unsigned a = past[0], b = past[1], c = past[2];
        others_may_start();  // while this waits: sooner they would be in its way
        const unsigned newest = halves(c, token, 1, 3);
        past[0] = halves(a, b, 1, 2);
        past[1] = halves(token, c, 0, 2);
        past[2] = newest;
        total[0] = four_taps<HOW>(total[0], w.x, w.y, a, halves(b, token, 0, 2));
        total[1] = four_taps<HOW>(total[1], w.z, w.w, halves(b, c, 1, 2), newest);
        if (flags & ACTIVATED) brain_silu(total);
        y = narrow_bf16(total[0], total[1]);
    }
    *(unsigned*)to = y;
}

#define CONV_FEW(NAME, HOW)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) NAME(ROWS_PARAMETERS) {                                     \
        conv_few<HOW>(rows, width, chunks, x, x_row, x_kind, weight, weight_kind, bias, bias_kind, state,         \
                      state_kind, slots, state_idx, taps, held, count, accepted, flags, out);                     \
    }
