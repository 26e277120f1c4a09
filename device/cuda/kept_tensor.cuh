// A tensor of 16-bit elements under one scale, read from memory once: each block keeps what it can of its share, in
// registers and shared memory, until the largest elements of all shares are known. What it cannot keep it reads again, the
// latest first, out of the second-level cache as far as that holds it.
//
// The ladder, 8192 x 5120, whose bytes, each read once, take 30 us:
// 1. A launch for the maxima and one for the codes: 58 us.
// 2. 26 vectors of a thread in shared memory and 16 in registers: 49. What is read for the last time says so to the
//    second-level cache: 46; so do the codes' stores: 47. What is read again asks to stay there: 47.
// 3. What is read again comes into shared memory as places get free: 44.5. Memory is busy for 29 us of it, since it has the
//    codes of the call before to take as well; then 80 MB go through the second-level cache.
// Of few elements the wait for all blocks takes a microsecond, which the second launch took as well.
//
// No block counts on the others' being there. Which share nobody has begun after a long wait is taken by a block that
// waits, and the one whose share it was finds it begun. So blocks may also run one after the other.
#pragma once
#include "fp8_scales.cuh"
#include "mma.cuh"

#define TEAM 512         // threads, device/quant_fp8.py
#define FEW 4            // vectors of a small tensor's share that a thread has, all in registers
#define MANY 18          // and of another's, the last ones
#define STEP 2           // of a step
#define STAGES 14        // steps in shared memory, those before
#define PATIENCE 64      // looks at a share's maximum before another block takes the share
#define MOST_SHARES 132  // device/launch.py: MULTIPROCESSORS
#define IS_THERE 0x80000000u

#ifdef __CUDACC__
// A word that says all there is to say: nothing else need be seen with it.
VT_FN void show(unsigned* to, unsigned word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
VT_FN unsigned look(const unsigned* at) {
    unsigned word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
    return word;
}
VT_FN unsigned exchanged(unsigned* at, unsigned word) { return atomicExch(at, word); }
// What is read for the last time leaves the second-level cache to what is not.
VT_FN uint4 last_read(const uint4* at) { return __ldcs(at); }
VT_FN void last_copy(void* shared, const void* global) {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 ::"r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "l"(policy) : "memory");
}
#else
static inline uint4 last_read(const uint4* at) { return *at; }
static inline void last_copy(void* shared, const void* global) { copy_async(shared, global); }
static inline void show(unsigned* to, unsigned word) { *to = word; }
static inline unsigned look(const unsigned* at) { return *at; }
static inline unsigned exchanged(unsigned* at, unsigned word) { return std::exchange(*at, word); }
#endif

// The scale of a tensor whose largest element is `top`, and what makes codes of its elements.
struct TensorScale {
    float scale, inverse;

    VT_MEMBER TensorScale(unsigned top, int rule) : scale(vt_float((int)top) / E4M3_LARGEST) {
        if (rule == VLLM_NATIVE) scale = vt_maximum(scale, SCALE_FLOOR);
        inverse = rule == VT && scale == 0.0f ? 0.0f : 1.0f / scale;
    }
};

// Neighbouring vectors of eight, `turns` of each thread; the last shares may have fewer, or none.
struct Share {
    const uint4* x;
    unsigned char* out;
    int room;

    VT_MEMBER Share(const uint4* all, unsigned char* codes, i64 count, int turns, int number) {
        const i64 first = (i64)number * turns * TEAM, left = count - first;
        x = all + first, out = codes + first * 8;
        room = left <= 0 ? 0 : left < (i64)turns * TEAM ? (int)left : turns * TEAM;
    }
    VT_MEMBER bool has(int turn) const { return turn * TEAM + (int)threadIdx.x < room; }
    VT_MEMBER const uint4* at(int turn) const { return x + turn * TEAM + threadIdx.x; }
};

template <int KIND> struct TensorCodes {
    float inverse;
    unsigned nan;

    VT_MEMBER void put(const Share& share, int turn, const uint4& raw) const {
        float v[8], q[8];
        widen(v, {raw, {}}, KIND);
        products(q, v, inverse);
        store_e4m3(share.out, (i64)(turn * TEAM + (int)threadIdx.x) * 8, q, nan);
    }
    VT_MEMBER void put_all(const Share& share, int turns) const {
#pragma unroll 1
        for (int turn = 0; turn < turns; ++turn)
            if (share.has(turn)) put(share, turn, *share.at(turn));
    }
};

// meeting: for each share whether it is begun, and its largest element once that is there; and how many blocks have seen
// all. Zeros before and after. KEPT: vectors in registers; STAGED: there are more.
template <int KIND, int KEPT, bool STAGED>
VT_FN void kept_tensor(i64 count, int turns, int shares, const uint4* x, unsigned* meeting, int rule, float* scale_out,
                       unsigned char* codes, unsigned nan) {
    VT_SHARED(memory);
    __shared__ unsigned tops[3][TEAM / 32], taken, late_ones[MOST_SHARES], many;
    unsigned *begun = meeting, *largest = meeting + shares, *gone = meeting + 2 * shares;
    const bool keep_nan = rule == VLLM_NATIVE;
    const int own = blockIdx.x, thread = threadIdx.x;
    const int steps = STAGED && turns > KEPT ? (turns - KEPT + STEP - 1) / STEP : 0, before = steps * STEP;
    const int again = steps > STAGES ? steps - STAGES : 0;  // steps that are read again
    unsigned was_begun = 0;  // looked at late, since the answer takes its time
    if (thread == 0 && shares > 1) was_begun = exchanged(begun + own, 1u);
    if (thread == 0) many = 0;
    const Share share(x, codes, count, turns, own);
    unsigned top = 0;
    auto see = [&](const uint4& raw) {
        float v[8];
        widen(v, {raw, {}}, KIND);
        top = larger(top, KIND == BF16 ? largest_of_bf16({raw, {}}, keep_nan) : largest_of(v, keep_nan));
    };
    auto place = [&](int step, int d) { return (uint4*)memory + (step % STAGES * STEP + d) * TEAM + thread; };
    // A step's vectors to the places of step `to`.
    auto send = [&](int to, int step) {
#pragma unroll
        for (int d = 0; d < STEP; ++d) {
            const int turn = step * STEP + d;
            if (step >= steps || !share.has(turn)) continue;
            if (step < again && to == step) copy_async(place(to, d), share.at(turn));
            else last_copy(place(to, d), share.at(turn));
        }
        copies_close();
    };
    auto see_step = [&](int step) {
        uint4 raw[STEP] = {};
#pragma unroll
        for (int d = 0; d < STEP; ++d)
            if (share.has(step * STEP + d)) raw[d] = *place(step, d);
#pragma unroll
        for (int d = 0; d < STEP; ++d) see(raw[d]);
    };
    if (STAGED)
#pragma unroll 1
        for (int step = 0; step < STAGES; ++step) send(step, step);
#pragma unroll 1
    for (int step = 0; step < again; ++step) {
        copies_wait<STAGES - 1>();
        see_step(step);
        send(step + STAGES, step + STAGES);
    }
    uint4 kept[KEPT] = {};
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (share.has(before + i)) kept[i] = last_read(share.at(before + i));
    if (STAGED) copies_wait<0>();
#pragma unroll 1
    for (int step = again; step < steps; ++step) see_step(step);
#pragma unroll
    for (int i = 0; i < KEPT; ++i) see(kept[i]);
    if (thread == 0) taken = was_begun;
    top = largest_of_block(top, tops[0]);
    const bool mine = taken == 0;
    if (thread == 0 && mine && shares > 1) show(largest + own, top | IS_THERE);
    // What another block has taken needs no waiting for.
    while (mine && shares > 1) {
        top = 0;
        if (thread < shares) {
            for (int looks = 0; looks < PATIENCE && !(top & IS_THERE); ++looks) top = look(largest + thread);
            top = top & IS_THERE ? top & ~IS_THERE : IS_THERE | (unsigned)(shares - thread);
        }
        top = largest_of_block(top, tops[1]);
        if (!(top & IS_THERE)) break;
        const int late = shares - (int)(top & ~IS_THERE);
        if (thread == 0) taken = exchanged(begun + late, 1u);
        __syncthreads();
        if (taken == 0) {
            const Share other(x, codes, count, turns, late);
            top = 0;
#pragma unroll 1
            for (int turn = 0; turn < turns; ++turn)
                if (other.has(turn)) see(*other.at(turn));
            top = largest_of_block(top, tops[2]);
            if (thread == 0) {
                show(largest + late, top | IS_THERE);
                late_ones[many++] = late;
            }
        }
        __syncthreads();
    }
    if (thread < 32 && shares > 1) {
        int all = 0;
        if (thread == 0) all = (int)atomicAdd(gone, 1u) + 1;
        if (__shfl_sync(FULL_WARP, all, 0) == shares)
            for (int i = thread; i <= 2 * shares; i += 32) meeting[i] = 0;
    }
    if (!mine) return;
    const TensorScale by(top, rule);
    const TensorCodes<KIND> to = {by.inverse, nan};
    if (thread == 0) scale_out[0] = by.scale;
    // What shared memory keeps, and as its places get free the other steps, the latest first.
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        const int step = n < STAGES ? again + n : steps - 1 - n;
        uint4 raw[STEP];
        copies_wait<STAGES - 1>();
#pragma unroll
        for (int d = 0; d < STEP; ++d)
            if (share.has(step * STEP + d)) raw[d] = *place(again + n, d);
#pragma unroll
        for (int d = 0; d < STEP; ++d)
            if (share.has(step * STEP + d)) to.put(share, step * STEP + d, raw[d]);
        if (n < again) send(again + n, again - 1 - n);
        else copies_close();
    }
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        if (share.has(before + i)) to.put(share, before + i, kept[i]);
#pragma unroll 1
    for (unsigned n = 0; n < many; ++n) to.put_all(Share(x, codes, count, turns, (int)late_ones[n]), turns);
}
