// Heads of bfloat16 by slot, each under its own scale: a lane has E elements of a head of each of four tokens. Their
// maxima are reduced together: in each of the first two steps a lane gives half of them away, and after the last one it
// has that of one token, whose scale it finds for all.
#pragma once
#include "kv_head_codes.cuh"
#include "kv_turns.cuh"

#define TURN 4  // tokens of a thread, device/kv_quant_heads.py

enum { INT8_HEADS, E4M3_HEADS, INT4_HEADS };

VT_FN float from_lane(float x, unsigned lane) { return __shfl_sync(FULL_WARP, x, (int)lane); }

// E elements of a row as they lie in memory: RUNS of neighbours, with those of other lanes between them.
template <int E, int RUNS> struct Neighbours {
    static constexpr int RUN = E / RUNS;
    unsigned w[E / 2];

    VT_MEMBER void fetch(const unsigned char* from, unsigned lanes) {
#pragma unroll
        for (int r = 0; r < RUNS; ++r) {
            const unsigned char* at = from + r * lanes * (2 * RUN);
            if constexpr (RUN == 4) {
                const uint2 two = *(const uint2*)at;
                w[2 * r] = two.x, w[2 * r + 1] = two.y;
            } else {
                const uint4 four = *(const uint4*)at;
                w[4 * r] = four.x, w[4 * r + 1] = four.y, w[4 * r + 2] = four.z, w[4 * r + 3] = four.w;
            }
        }
    }
    // Of four bits the largest and the least one's opposite, else the largest |x| of even and of odd elements.
    template <int FORM> VT_MEMBER unsigned range() const {
        if constexpr (FORM == INT4_HEADS) {
            unsigned high = w[0], low = w[0] ^ 0x80008000u;
#pragma unroll
            for (int i = 1; i < E / 2; ++i) {
                high = larger_signed_pair(high, w[i]);
                low = larger_signed_pair(low, w[i] ^ 0x80008000u);
            }
            return larger_signed_pair((high & 0xffffu) | low << 16, high >> 16 | (low & 0xffff0000u));
        } else {
            unsigned top = 0;
#pragma unroll
            for (int i = 0; i < E / 2; ++i) top = larger_pair<false>(top, w[i] & 0x7fff7fffu);
            return top;
        }
    }
    VT_MEMBER void values(float (&v)[E]) const {
#pragma unroll
        for (int i = 0; i < E / 2; ++i) {
            v[2 * i] = vt_float((int)(w[i] << 16));
            v[2 * i + 1] = vt_float((int)(w[i] & 0xffff0000u));
        }
    }
};

template <int FORM> VT_FN unsigned joined_ranges(unsigned a, unsigned b) {
    return FORM == INT4_HEADS ? larger_signed_pair(a, b) : larger_pair<false>(a, b);
}

template <int FORM, int E, int RUNS>
VT_FN void write_heads_turns(i64 tokens, const Division& group, const Division& per_head, const Heads& key,
                             const Heads& value, const Side& keys, const Side& values, const Division& pages,
                             const i64* slots, i64 room) {
    const Turns turns(tokens, group, TURN, per_head);
    const unsigned quarter = per_head.d >> 2, first_lane = (threadIdx.x & 31u) - turns.lane;
    const bool upper = (turns.lane & 2 * quarter) != 0, odd = (turns.lane & quarter) != 0;
    const int own = (upper ? 2 : 0) + (odd ? 1 : 0);
    const u64 token_step = 2 * (u64)(unsigned)OF_SIDE(key.token, value.token);
    const unsigned char* from = (const unsigned char*)OF_SIDE(key.x, value.x) + turns.first * token_step +
                                (u64)turns.head * (unsigned)OF_SIDE(key.head, value.head) * 2 + turns.lane * (2 * E / RUNS);
    const i64* at = slots + turns.first;
    const Slots codes(OF_SIDE(keys.data, values.data) + (u64)turns.head * (unsigned)OF_SIDE(keys.head, values.head) +
                          turns.lane * ((FORM == INT4_HEADS ? E / 2 : E) / RUNS),
                      (unsigned)OF_SIDE(keys.row, values.row), (unsigned)OF_SIDE(keys.block, values.block), pages);
    const Slots scales((unsigned char*)OF_SIDE(keys.scales, values.scales) +
                           (u64)turns.head * (unsigned)OF_SIDE(keys.scale_head, values.scale_head) * 4,
                       (unsigned)OF_SIDE(keys.scale_row, values.scale_row) * 4,
                       (unsigned)OF_SIDE(keys.scale_block, values.scale_block) * 4, pages);
    found(from);
    found(at);
    others_may_start();
    after_others();
    i64 slot[TURN], own_slot = -1;
    Neighbours<E, RUNS> raw[TURN];
#pragma unroll
    for (int d = 0; d < TURN; ++d) {
        slot[d] = -1;
        if (d >= turns.count) continue;
        raw[d].fetch(from + d * token_step, per_head.d);
        slot[d] = at[d];
    }
    if (own < turns.count) own_slot = at[own];
    loads_are_under_way();
    unsigned range[TURN];
#pragma unroll
    for (int d = 0; d < TURN; ++d) range[d] = raw[d].template range<FORM>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const unsigned given = __shfl_xor_sync(FULL_WARP, upper ? range[i] : range[i + 2], (int)(2 * quarter));
        range[i] = joined_ranges<FORM>(upper ? range[i + 2] : range[i], given);
    }
    unsigned top = joined_ranges<FORM>(odd ? range[1] : range[0],
                                       __shfl_xor_sync(FULL_WARP, odd ? range[0] : range[1], (int)quarter));
#pragma unroll
    for (int m = 4; m >= 1; m >>= 1)
        if (m < (int)quarter) top = joined_ranges<FORM>(top, __shfl_xor_sync(FULL_WARP, top, m));
    float scale, inverse, zero = 0.0f;
    if constexpr (FORM == INT4_HEADS) {
        const NibbleCodes code(widen_bf16(top & 0xffffu), -widen_bf16(top >> 16));
        scale = code.stored(), inverse = code.inverse, zero = code.zero;
    } else {
        scale = ByteCodes{FORM == INT8_HEADS}.scale(larger(top << 16, top & 0xffff0000u));
        inverse = 1.0f / scale;
    }
#pragma unroll
    for (int d = 0; d < TURN; ++d) {
        const float by = from_lane(inverse, first_lane + d * quarter);
        const float zero_of = FORM == INT4_HEADS ? from_lane(zero, first_lane + d * quarter) : 0.0f;
        if ((u64)slot[d] >= (u64)room) continue;
        unsigned char* to = codes.at((unsigned)slot[d], pages.of((unsigned)slot[d]));
        float v[E];
        raw[d].values(v);
        constexpr int RUN = E / RUNS;
#pragma unroll
        for (int r = 0; r < RUNS; ++r) {
            if constexpr (FORM == INT4_HEADS) {
                const NibbleCodes code(by, zero_of, 0);
                float run[RUN];
#pragma unroll
                for (int i = 0; i < RUN; ++i) run[i] = v[r * RUN + i];
                unsigned char* here = to + r * per_head.d * (RUN / 2);
                *(unsigned*)here = code.word(run);
            } else {
                const ByteCodes code{FORM == INT8_HEADS};
                unsigned char* here = to + r * per_head.d * RUN;
#pragma unroll
                for (int i = 0; i < RUN; i += 4) {
                    const float* x = v + (r * RUN + i);
                    *(unsigned*)(here + i) = code.word(x[0], x[1], x[2], x[3], by);
                }
            }
        }
    }
    if ((turns.lane & (quarter - 1)) == 0 && (u64)own_slot < (u64)room)
        *(float*)scales.at((unsigned)own_slot, pages.of((unsigned)own_slot)) = scale;
}

#define HEADS_TURNS(NAME, FORM, E, RUNS)                                                                          \
    extern "C" __global__ void __launch_bounds__(256) NAME(TURNS_PARAMETERS) {                                    \
        write_heads_turns<FORM, E, RUNS>(tokens, THE_DIVISION(group), THE_DIVISION(per_head), THE_HEADS(key),           \
                                   THE_HEADS(value), THE_SIDE(keys), THE_SIDE(values), THE_DIVISION(page_size),   \
                                   slots, room);                                                                  \
    }
