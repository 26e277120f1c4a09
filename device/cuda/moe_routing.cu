// Which experts each token goes to and with what weight, and the sum of what they gave.
//
// The ladder of the router:
// 1. moe_router_any: a warp a token, lane l experts l, l + 32, ...; scores and the order of the choice in shared memory.
// 2. moe_router_64 ... _512: the same in registers, up to so many experts. A choice is two reductions over the warp. Where
//    logits choose, only chosen scores are divided; up to eight groups of 32, a lane an expert, are looked
//    at side by side.
#include "rows.cuh"

#define ALL_LANES 0xffffffffu

// Codes ascend with the value as a choice goes by it: -0 is +0, NaN is below every number. 0: taken before.
#define CODE_TAKEN 0u
#define CODE_NAN 1u
#define CODE_MINUS_INF 0x007fffffu

VT_FN unsigned code_of(float x) {
    unsigned bits = (unsigned)vt_bits(x);
    if (x != x) return CODE_NAN;
    if (x == 0.0f) return 0x80000000u;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

#ifdef __CUDACC__
VT_FN unsigned warp_largest(unsigned x) { return __reduce_max_sync(ALL_LANES, x); }
VT_FN unsigned warp_least(unsigned x) { return __reduce_min_sync(ALL_LANES, x); }
VT_FN void warp_meets() { __syncwarp(); }
#else
VT_FN unsigned warp_largest(unsigned x) {
    for (int m = 16; m >= 1; m >>= 1) {
        unsigned other = __shfl_xor_sync(ALL_LANES, x, m);
        x = other > x ? other : x;
    }
    return x;
}
VT_FN unsigned warp_least(unsigned x) { return ~warp_largest(~x); }
VT_FN void warp_meets() { __shfl_xor_sync(ALL_LANES, 0.0f, 1); }
#endif

// A lane's experts: number i of them is expert 32 i + lane.
template <int COUNT> struct Experts {
    float score[COUNT];
    unsigned code[COUNT];

    VT_MEMBER Experts(unsigned char*, int, int) {}
    VT_MEMBER constexpr int count() const { return COUNT; }
    static constexpr int BYTES = 0;  // of shared memory an expert
};

template <> struct Experts<0> {
    template <class T> struct Column {
        T* base;
        VT_MEMBER T& operator[](int i) { return base[32 * i]; }
    };
    Column<float> score;
    Column<unsigned> code;
    int number;
    static constexpr int BYTES = 8;

    VT_MEMBER Experts(unsigned char* room, int experts, int lane) : number((experts + 31) / 32) {
        score = {(float*)room + lane};
        code = {(unsigned*)room + 32 * number + lane};
    }
    VT_MEMBER int count() const { return number; }
};

// The best of all lanes' candidates, the lowest number where two are equal.
struct Best {
    unsigned code, number;
};
VT_FN Best best_of_warp(Best own) {
    unsigned code = warp_largest(own.code);
    return {code, warp_least(own.code == code ? own.number : ALL_LANES)};
}

// The two largest scores of a group; one that is NaN makes them NaN.
struct TwoBest {
    float high = -VT_INF, low = -VT_INF;

    VT_MEMBER void joins(float x) {
        low = vt_maximum(low, vt_minimum(high, x));
        high = vt_maximum(high, x);
    }
    VT_MEMBER void of_lanes(int distance) {
        float other_high = __shfl_xor_sync(ALL_LANES, high, distance), other_low = __shfl_xor_sync(ALL_LANES, low, distance);
        joins(other_high);
        low = vt_maximum(low, other_low);
    }
    VT_MEMBER unsigned code(bool both) const { return code_of(both ? high + low : high); }
};

#define ROUTER_PARAMETERS                                                                                        \
    i64 tokens, i64 experts, const void *logits, i64 kind, const float *bias, i64 top_k, i64 renormalize,        \
        i64 sigmoid, i64 groups, i64 kept, float factor, float *weights, int *ids, i64 room
#define ROUTER_NAMES                                                                                             \
    tokens, experts, logits, kind, bias, top_k, renormalize, sigmoid, groups, kept, factor, weights, ids, room

// room: bytes of shared memory a warp: experts, the weights chosen, a code a group.
template <int COUNT> VT_FN void router(ROUTER_PARAMETERS) {
    VT_SHARED(memory);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, all = (int)experts, k = (int)top_k;
    i64 token = (i64)blockIdx.x * (blockDim.x >> 5) + warp;
    if (token >= tokens) return;
    unsigned char* own = memory + warp * room;
    Experts<COUNT> held(own, all, lane);
    float* chosen = (float*)(own + (i64)held.count() * 32 * Experts<COUNT>::BYTES);
    unsigned* group_code = (unsigned*)(chosen + k);
    auto expert = [&](int i) { return 32 * i + lane; };

#pragma unroll
    for (int i = 0; i < held.count(); ++i) {
        float x[1] = {0.0f};
        if (expert(i) < all) load(x, logits, token * experts + expert(i), (int)kind);
        held.score[i] = x[0];
    }
    bool by_logit = !sigmoid && bias == nullptr && groups == 1;
    float sum = 0.0f;
    if (by_logit) {
#pragma unroll
        for (int i = 0; i < held.count(); ++i) held.code[i] = code_of(held.score[i]);
    }
    if (sigmoid) {
#pragma unroll
        for (int i = 0; i < held.count(); ++i) held.score[i] = vt_sigmoid(held.score[i]);
    } else {
        float most = -VT_INF;
#pragma unroll
        for (int i = 0; i < held.count(); ++i)
            if (expert(i) < all) most = vt_maximum(most, held.score[i]);
#pragma unroll
        for (int m = 16; m >= 1; m >>= 1) most = vt_maximum(most, __shfl_xor_sync(ALL_LANES, most, m));
#pragma unroll
        for (int i = 0; i < held.count(); ++i) {
            float power = vt_exp(held.score[i] - most);
            if (expert(i) < all) sum += power;
            held.score[i] = power;
        }
#pragma unroll
        for (int m = 16; m >= 1; m >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, m);
        if (!by_logit) {
#pragma unroll
            for (int i = 0; i < held.count(); ++i) held.score[i] = held.score[i] / sum;
        }
    }
    auto choice = [&](int i) { return bias == nullptr ? held.score[i] : held.score[i] + bias[expert(i)]; };
#pragma unroll
    for (int i = 0; i < held.count(); ++i) {
        if (expert(i) >= all) held.code[i] = CODE_TAKEN;
        else if (!by_logit) held.code[i] = code_of(choice(i));
    }

    if (groups > 1) {
        int size = all / (int)groups;
        constexpr bool FEW = COUNT > 0 && COUNT <= 8;  // more have too few registers
        bool beside = FEW && size == 32;
        if constexpr (FEW) {
            if (beside) {
                TwoBest best[COUNT];
#pragma unroll
                for (int i = 0; i < COUNT; ++i)
                    if (i < (int)groups) best[i].joins(choice(i));
#pragma unroll
                for (int m = 16; m >= 1; m >>= 1)
#pragma unroll
                    for (int i = 0; i < COUNT; ++i) best[i].of_lanes(m);
#pragma unroll
                for (int i = 0; i < COUNT; ++i)
                    if (lane == 0 && i < (int)groups) group_code[i] = best[i].code(bias != nullptr);
            }
        }
        for (int group = 0; !beside && group < (int)groups; ++group) {
            int first = group * size, last = first + size;
            TwoBest best;
#pragma unroll
            for (int i = 0; i < held.count(); ++i)
                if (expert(i) >= first && expert(i) < last) best.joins(choice(i));
#pragma unroll
            for (int m = 16; m >= 1; m >>= 1) best.of_lanes(m);
            if (lane == 0) group_code[group] = best.code(bias != nullptr);
        }
        warp_meets();
        for (int round = 0; round < (int)kept; ++round) {
            Best own_best = {CODE_TAKEN, ALL_LANES};
            for (int group = lane; group < (int)groups; group += 32)
                if (group_code[group] > own_best.code) own_best = {group_code[group], (unsigned)group};
            Best best = best_of_warp(own_best);
            if (((int)best.number & 31) == lane) group_code[best.number] = CODE_TAKEN;
        }
        warp_meets();
#pragma unroll
        for (int i = 0; i < held.count(); ++i)
            if (expert(i) < all && group_code[expert(i) / size] != CODE_TAKEN) held.code[i] = CODE_MINUS_INF;
    }

    float total = 0.0f;
    for (int r = 0; r < k; ++r) {
        Best own_best = {CODE_TAKEN, ALL_LANES};
        float own_score = 0.0f;
#pragma unroll
        for (int i = 0; i < held.count(); ++i)
            if (held.code[i] > own_best.code) {
                own_best = {held.code[i], (unsigned)expert(i)};
                own_score = held.score[i];
            }
        Best best = best_of_warp(own_best);
        float score = __shfl_sync(ALL_LANES, own_score, (int)best.number & 31);
        if (by_logit) score = score / sum;
#pragma unroll
        for (int i = 0; i < held.count(); ++i)
            if ((unsigned)expert(i) == best.number) held.code[i] = CODE_TAKEN;
        total += score;
        if (lane == (r & 31)) {
            chosen[r] = score;
            ids[token * top_k + r] = (int)best.number;
        }
    }
    total = total > 0.0f ? total : 1.0f;
    for (int r = lane; r < k; r += 32) {
        float weight = chosen[r];
        if (renormalize) weight = weight / total;
        weights[token * top_k + r] = weight * factor;
    }
}

#define ROUTER(NAME, COUNT)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128, 4) NAME(ROUTER_PARAMETERS) { router<COUNT>(ROUTER_NAMES); }

ROUTER(moe_router_64, 2)
ROUTER(moe_router_128, 4)
ROUTER(moe_router_256, 8)
ROUTER(moe_router_512, 16)
ROUTER(moe_router_any, 0)

// out[t] = x[t, 0] + x[t, 1] + ..., from +0: V neighbours a thread, four choices of a token under way together.
template <int V> VT_FN void moe_sum(i64 rows, i64 width, i64 chunks, const void* x, i64 choices, i64 kind, void* out) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    float total[V] = {};
    const i64 from = at.row * choices * width + at.column;
    for (i64 first = 0; first < choices; first += 4) {
        Raw<V> raw[4];
#pragma unroll
        for (int r = 0; r < 4; ++r)
            if (first + r < choices) raw[r] = fetch<V>(x, from + (first + r) * width, (int)kind);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            if (first + r >= choices) continue;
            float y[V];
            widen(y, raw[r], (int)kind);
#pragma unroll
            for (int j = 0; j < V; ++j) total[j] += y[j];
        }
    }
    store(out, at.row * width + at.column, total, (int)kind);
}

#define SUM(NAME, V)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        NAME(i64 rows, i64 width, i64 chunks, const void* x, i64 choices, i64 kind, void* out) {                 \
        moe_sum<V>(rows, width, chunks, x, choices, kind, out);                                                  \
    }

SUM(moe_sum_v1, 1)
SUM(moe_sum_v8, 8)
