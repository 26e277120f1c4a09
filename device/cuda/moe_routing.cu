// Which experts each token goes to and with what weight; the sum of what they gave is moe_sum.cuh's.
//
// The ladder of the router:
// 1. moe_router_any: a warp a token, lane l experts l, l + 32, ...; scores and the order of the choice in shared
//    memory. A choice is two reductions over the warp.
// 2. moe_router_64 ... _512: the same in registers, up to so many experts. Of k experts none is below the k-th best of
//    the lanes' best, so that few candidates remain, whose ranks are counted. Where logits choose, only chosen scores are
//    divided; up to eight groups of 32, a lane an expert, are looked at side by side.
// 3. moe_router_groups: a warp a group, for few tokens.
#include "early.cuh"
#include "fp8_scales.cuh"
#include "moe_sum.cuh"

#define ALL_LANES 0xffffffffu
#define FEW_TOKENS 512
#define MANY_TOKENS 4096

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
VT_FN unsigned lanes_with(unsigned value) { return __match_any_sync(ALL_LANES, value); }
VT_FN void warp_meets() { __syncwarp(); }
VT_FN unsigned warp_votes(bool yes) { return __ballot_sync(ALL_LANES, yes); }
VT_FN int ones(unsigned bits) { return __popc(bits); }
VT_FN int lowest_bit(unsigned bits) { return __ffs((int)bits) - 1; }
#else
VT_FN unsigned warp_largest(unsigned x) {
    for (int m = 16; m >= 1; m >>= 1) {
        unsigned other = __shfl_xor_sync(ALL_LANES, x, m);
        x = other > x ? other : x;
    }
    return x;
}
VT_FN unsigned warp_least(unsigned x) { return ~warp_largest(~x); }
VT_FN unsigned lanes_with(unsigned value) {
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= (unsigned)(__shfl_sync(ALL_LANES, value, lane) == value) << lane;
    return found;
}
VT_FN void warp_meets() { __shfl_xor_sync(ALL_LANES, 0.0f, 1); }
VT_FN unsigned warp_votes(bool yes) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= __shfl_sync(ALL_LANES, (unsigned)yes, lane) << lane;
    return votes;
}
VT_FN int ones(unsigned bits) { return __builtin_popcount(bits); }
VT_FN int lowest_bit(unsigned bits) { return __builtin_ctz(bits); }
#endif

VT_FN float value_of(unsigned code) { return vt_float((int)(code & 0x80000000u ? code & 0x7fffffffu : ~code)); }

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

VT_FN float divisor_of(float total) { return total > 0.0f ? total : 1.0f; }

// Up to 32 experts of which the best are chosen, in the order of their numbers; `own`: each lane's code for `rank_of`.
struct Candidates {
    unsigned own[32], code[32];
    float score[32];
    unsigned number[32];
};

// How many lanes have a better code, or an equal one and a lower number.
VT_FN int rank_of(unsigned code, unsigned* own) {
    const int lane = threadIdx.x & 31;
    own[lane] = code;
    warp_meets();
    int rank = ones(lanes_with(code) & ((1u << lane) - 1));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint4 others = ((const uint4*)own)[i];
        rank += (others.x > code) + (others.y > code) + (others.z > code) + (others.w > code);
    }
    return rank;
}

// Of a lane's group among the first eight lanes', whether it is one of the `kept` best: a bit a lane.
VT_FN unsigned best_groups(unsigned code, int groups, int kept) {
    const int lane = threadIdx.x & 31;
    int before = 0;
#pragma unroll
    for (int g = 0; g < 8; ++g) {
        const unsigned other = __shfl_sync(ALL_LANES, code, g);
        before += other > code || (other == code && g < lane);
    }
    return warp_votes(lane < groups && before < kept);
}

// What the k <= 32 best of a warp's codes are among: those that are not below the k-th of the lanes' own best. How many
// they are; no more than 32 have room.
template <int COUNT> VT_FN int candidates_of(const Experts<COUNT>& held, int k, Candidates& room) {
    const int lane = threadIdx.x & 31;
    unsigned best = CODE_TAKEN;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) best = held.code[i] > best ? held.code[i] : best;
    const unsigned last = warp_votes(rank_of(best, room.own) == k - 1 && best != CODE_TAKEN);
    const unsigned least = last ? __shfl_sync(ALL_LANES, best, lowest_bit(last)) : CODE_NAN;
    int count = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const bool candidate = held.code[i] >= least;
        const unsigned votes = warp_votes(candidate);
        const int at = count + ones(votes & ((1u << lane) - 1));
        if (candidate && at < 32) {
            room.code[at] = held.code[i];
            room.score[at] = held.score[i];
            room.number[at] = (unsigned)(32 * i + lane);
        }
        count += ones(votes);
    }
    warp_meets();
    return count;
}

// The chosen scores one after another.
VT_FN float total_of(const float* chosen, int k) {
    float total = 0.0f;
    for (int first = 0; first < k; first += 8)
#pragma unroll
        for (int r = 0; r < 8; ++r) total += first + r < k ? chosen[first + r] : 0.0f;
    return total;
}

#define ROUTER_PARAMETERS                                                                                        \
    i64 tokens, i64 experts, const void *logits, i64 kind, const float *bias, i64 top_k, i64 renormalize,        \
        i64 sigmoid, i64 groups, i64 kept, i64 by, float *weights, int *ids, i64 room
#define ROUTER_NAMES                                                                                             \
    tokens, experts, logits, kind, bias, top_k, renormalize, sigmoid, groups, kept, by, weights, ids, room

// A warp's token. room: bytes of shared memory a warp: experts or candidates, the weights chosen, a code a group.
template <int COUNT> VT_FN void route(i64 token, unsigned char* own, ROUTER_PARAMETERS) {
    int lane = threadIdx.x & 31, all = (int)experts, k = (int)top_k;
    Experts<COUNT> held(own, all, lane);
    float* chosen = (float*)(own + (COUNT > 0 ? sizeof(Candidates) : (i64)held.count() * 32 * Experts<COUNT>::BYTES));
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
        unsigned best = ALL_LANES;
        if constexpr (FEW) {
            if (beside) {
                unsigned high = CODE_TAKEN, low = CODE_TAKEN;
#pragma unroll
                for (int i = 0; i < COUNT; ++i) {
                    const unsigned one = warp_largest(held.code[i]);
                    const int first = lowest_bit(warp_votes(held.code[i] == one));
                    const unsigned other = warp_largest(lane == first ? CODE_TAKEN : held.code[i]);
                    const bool unknown = warp_votes(held.code[i] == CODE_NAN) != 0;
                    if (lane == i) high = unknown ? CODE_NAN : one, low = other;
                }
                if (bias != nullptr && high != CODE_NAN) high = code_of(value_of(high) + value_of(low));
                best = best_groups(high, (int)groups, (int)kept);
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
        if (!beside) {
            warp_meets();
            for (int round = 0; round < (int)kept; ++round) {
                Best own_best = {CODE_TAKEN, ALL_LANES};
                for (int group = lane; group < (int)groups; group += 32)
                    if (group_code[group] > own_best.code) own_best = {group_code[group], (unsigned)group};
                Best best = best_of_warp(own_best);
                if (((int)best.number & 31) == lane) group_code[best.number] = CODE_TAKEN;
            }
            warp_meets();
        }
#pragma unroll
        for (int i = 0; i < held.count(); ++i) {
            if (expert(i) >= all) continue;
            if (beside ? !(best >> i & 1u) : group_code[expert(i) / size] != CODE_TAKEN) held.code[i] = CODE_MINUS_INF;
        }
    }

    float total = 0.0f;
    int found = 33;
    if constexpr (COUNT > 0) found = k <= 32 ? candidates_of(held, k, *(Candidates*)own) : 33;
    if (found <= 32) {
        Candidates& from = *(Candidates*)own;
        const int rank = rank_of(lane < found ? from.code[lane] : CODE_TAKEN, from.own);
        if (lane < found && rank < k) {
            chosen[rank] = by_logit ? from.score[lane] / sum : from.score[lane];
            ids[token * top_k + rank] = (int)from.number[lane];
        }
        warp_meets();
        total = total_of(chosen, k);
    }
    for (int r = 0; found > 32 && r < k; ++r) {
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
    total = divisor_of(total);
    for (int r = lane; r < k; r += 32) {
        float weight = chosen[r];
        if (renormalize) weight = weight / total;
        weights[token * top_k + r] = weight * vt_float((int)by);
    }
}

template <int COUNT> VT_FN void router(ROUTER_PARAMETERS) {
    VT_SHARED(memory);
    // Blocks that wait would take the place of those that work, where these do not follow each other anyway.
    if (tokens <= FEW_TOKENS || tokens > MANY_TOKENS) others_may_start();
    after_others();
    const int warp = threadIdx.x >> 5;
    const i64 token = (i64)blockIdx.x * (blockDim.x >> 5) + warp;
    if (token < tokens) route<COUNT>(token, memory + warp * room, ROUTER_NAMES);
}
// Groups of up to 32 experts that a sigmoid scores, and up to 32 candidates in the groups that are kept: a token a
// block, a warp a group, a lane an expert. A warp finds the best of its group, the first warp the best of those. Where
// one is chosen that is not above -infinity, which one that is takes the whole row to tell.
VT_FN void router_of_groups(ROUTER_PARAMETERS, i64 size) {
    VT_SHARED(memory);
    __shared__ Candidates found[8];
    __shared__ unsigned group_code[8];
    __shared__ float chosen[32];
    others_may_start();
    const int lane = threadIdx.x & 31, group = threadIdx.x >> 5, k = (int)top_k, expert = group * (int)size + lane;
    const i64 token = blockIdx.x;
    const bool inside = lane < size;
    Candidates& mine = found[group];
    after_others();
    float x[1] = {0.0f}, more = 0.0f;
    if (inside) load(x, logits, token * experts + expert, (int)kind);
    if (inside && bias != nullptr) more = bias[expert];
    const float score = vt_sigmoid(x[0]), choice = bias != nullptr ? score + more : score;
    unsigned code = inside ? code_of(choice) : CODE_TAKEN;
    int rank = rank_of(code, mine.own);
    if (inside && rank < k) {
        mine.code[rank] = code;
        mine.score[rank] = score;
        mine.number[rank] = (unsigned)expert;
    }
    if (!inside) mine.code[lane] = CODE_TAKEN;
    const float best = __shfl_sync(ALL_LANES, choice, lowest_bit(warp_votes(inside && rank == 0)));
    float sum = best;
    if (bias != nullptr) sum += __shfl_sync(ALL_LANES, choice, lowest_bit(warp_votes(inside && rank == 1)));
    const bool unknown = warp_votes(code == CODE_NAN) != 0;
    if (lane == 0) group_code[group] = unknown ? CODE_NAN : code_of(sum);
    __syncthreads();
    if (group != 0) return;
    code = lane < (int)groups ? group_code[lane] : CODE_TAKEN;
    const unsigned best_ones = best_groups(code, (int)groups, (int)kept);
    int turn = 0, from = 0, passed = 0;
#pragma unroll
    for (int g = 1; g < 8; ++g) turn += lane >= g * k;
#pragma unroll
    for (int g = 0; g < 8; ++g) {
        const bool one = best_ones >> g & 1u;
        if (one && passed == turn) from = g;
        passed += one;
    }
    const bool candidate = lane < (int)kept * k;
    const int place = lane - turn * k;
    code = candidate ? found[from].code[place] : CODE_TAKEN;
    rank = rank_of(code, mine.own);
    if (code != CODE_TAKEN && rank < k) {
        chosen[rank] = found[from].score[place];
        ids[token * top_k + rank] = (int)found[from].number[place];
    }
    // What is not above -infinity may come after other groups' experts.
    if (warp_votes(code > CODE_MINUS_INF && rank == k - 1) == 0) return route<8>(token, memory, ROUTER_NAMES);
    warp_meets();
    float total = total_of(chosen, k);
    if (lane >= k) return;
    float weight = chosen[lane];
    total = divisor_of(total);
    if (renormalize) weight = weight / total;
    weights[token * top_k + lane] = weight * vt_float((int)by);
}

#define ROUTER(NAME, COUNT)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128, 4) NAME(ROUTER_PARAMETERS) { router<COUNT>(ROUTER_NAMES); }

ROUTER(moe_router_64_early, 2)
ROUTER(moe_router_128_early, 4)
ROUTER(moe_router_256_early, 8)
ROUTER(moe_router_512_early, 16)
ROUTER(moe_router_any_early, 0)
extern "C" __global__ void __launch_bounds__(256, 4) moe_router_groups_early(ROUTER_PARAMETERS, i64 size) {
    router_of_groups(ROUTER_NAMES, size);
}
