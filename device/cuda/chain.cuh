// What generated kernels stand on (device/fusion/emit.py): how the threads of a grid share rows. A frame says which of
// its row a thread holds, TURNS times V neighbours in registers, and reduces over the row: sums, sums of the squares of
// bfloat16 that are zero where nothing is. Every thread of a warp or block takes part in the reductions, with or without a
// place inside.
//
// The ladder:
// 1. *_long: a block of 256 a row of any width and address, an element at a time; what it needs again it computes again.
// 2. *_rows: rows of up to 256, several to a warp. *_block1, *_block4: a block a row of up to 2048 or 8192, read once,
//    everything between its loads and its stores in registers.
// 3. block4 reads what all rows share when it needs it: held from the start it would cost registers, and with them rows
//    under way. *_few4, for few rows: it is sent for with the row, whose latency hides its own.
//    *_half3, *_half5, for many rows of 1024 to 5120 of which more is found than a sum: 128 threads find it in less time than
//    256. *_ring32x1 ...: many rows of one operand that are normed and quantised (ring_rows.cuh). *_teams4, for many narrow
//    rows with a gate: four rows a team, whose roots four lanes find, 65 us instead of 75 for 8192 x 48 x 128.
// 4. *_v8, *_v1: chains without a reduction over the row, on a grid of rows and columns. *_shared: of groups, whose lanes
//    find scales for each other.
// 5. chain_gates.cuh: products with SiLU or a sigmoid. chain_fp4.cuh: chains into NVFP4.
#pragma once
#include "alone_rows.cuh"
#include "bf16_quotients.cuh"
#include "chain_gates.cuh"
#include "e4m3.cuh"
#include "rows.cuh"
#include "teams.cuh"

// The only element of an operand, or the one of a row or group of a result.
VT_FN float load_one(const void* from, int kind) {
    float x[1];
    load(x, from, 0, kind);
    return x[0];
}
VT_FN float load_at(const void* from, i64 at, int kind) {
    float x[1];
    load(x, from, at, kind);
    return x[0];
}
VT_FN void store_one(void* to, i64 at, float value, int kind) {
    const float x[1] = {value};
    store(to, at, x, kind);
}

VT_FN float max_of_lanes(float x, int lanes) {
    for (int m = lanes >> 1; m >= 1; m >>= 1) x = vt_maximum(x, other_lane(x, m));
    return x;
}

// As tree_of_block.
VT_FN float max_of_block(float x, float* warps) {
    x = max_of_lanes(x, 32);
    int count = blockDim.x >> 5;
    if (count == 1) return x;
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = x;
    __syncthreads();
    x = warps[0];
    for (int w = 1; w < count; ++w) x = vt_maximum(x, warps[w]);
    return x;
}

// The largest |x| that is a number; numbers from 0 on order like their bits.
template <int V> VT_FN unsigned size_of(const float (&x)[V], unsigned top, bool inside) {
    return inside ? larger(top, largest_of(x, false)) : top;
}
template <int LANES, int V> VT_FN float group_size(const float (&x)[V], bool inside) {
    return vt_float((int)largest_of_lanes(size_of(x, 0u, inside), LANES));
}

// Codes of e4m3 see no difference to x / scale (fp8_scales.cuh); bf16_quotients: of bfloat16 x and a scale that is no less
// than some usual number.
template <int V> VT_FN void quotients(float (&q)[V], const float (&x)[V], float scale) {
    Divisor(scale, largest_of(x, false), false).divide(q, x);
}
template <int V> VT_FN void bf16_quotients(float (&q)[V], const float (&x)[V], float scale) {
    Quotients(scale).divide(q, x);
}

template <int V> VT_FN float max_of(const float (&x)[V], float start, bool inside) {
    if (inside)
        EACH(j, V) start = vt_maximum(start, x[j]);
    return start;
}

// Over a group of 8 * LANES neighbours, which lanes of one warp hold: to each of them.
template <int LANES> VT_FN float group_max(const float (&x)[8], float start, bool inside) {
    return max_of_lanes(max_of(x, start, inside), LANES);
}

// A thread's two partials of a row of bfloat16, vectors in turn, zeros where there are none. Their squares are exact in
// float32 unless they are tiny, and then they change no sum that is not: a fused sum is the same from a first square on
// that is not tiny.
template <int TURNS> VT_FN void add_squares_in_turn(float (&partials)[2], const float (&x)[TURNS][8]) {
    if (x[0][0] * x[0][0] > 0x1p-100f && x[1][0] * x[1][0] > 0x1p-100f) {
        EACH(t, TURNS) EACH(j, 8) partials[t & 1] = vt_fma(x[t][j], x[t][j], partials[t & 1]);
    } else {
        EACH(t, TURNS) add_squares(partials[t & 1], x[t]);
    }
}

// What a frame is not unless it says so: blocks of 16 are PAIRS of turns, a thread for all that is stored (PADS), lanes
// find what belongs to a group for one turn each (SHARES), turns that are outside of a row need not be computed (SKIPS), a
// grid has rows and columns (MAPS), all turns' columns are the first one's (ALIKE).
struct Frame {
    static constexpr bool PAIRS = false, PADS = false, SHARES = false, SKIPS = false, MAPS = false;
    static constexpr bool ALIKE = false;
    // How far turn t's row is from the frame's, in steps of `step`, and what is known of it.
    VT_MEMBER i64 down(int, i64) const { return 0; }
    VT_MEMBER float of(float x, int) const { return x; }
};

template <int V_, int TURNS_, bool SHARES_ = false> struct MapFrame : Frame {
    static constexpr int V = V_, TURNS = TURNS_;
    static constexpr bool EARLY = true, SHARES = SHARES_, MAPS = true;
    i64 row, width, first;
    unsigned across;
    bool present;

    VT_MEMBER MapFrame(i64 rows, i64 width, i64 chunks) : width(width), across((unsigned)chunks) {
        const Place spot = place<V>(rows, width, chunks, TURNS);
        row = spot.row;
        first = spot.column;
        present = spot.row < rows;
    }
    VT_MEMBER bool inside(int t) const { return present && at(t) < width; }
    VT_MEMBER i64 at(int t) const { return first + t * (int)(blockDim.x * V); }
    VT_MEMBER i64 blocks(i64 rows) const { return ((unsigned)rows + blockDim.y - 1) / blockDim.y * (i64)across; }
};

struct LanesFrame : Frame {
    static constexpr int V = 8, TURNS = 1;
    static constexpr bool EARLY = true;
    i64 row;
    int first, lanes;
    bool present;

    VT_MEMBER LanesFrame(i64 rows, i64 width, int shift) : lanes(1 << shift) {
        row = (i64)blockIdx.x * (blockDim.x >> shift) + (threadIdx.x >> shift);
        first = (threadIdx.x & (lanes - 1)) * 8;
        present = row < rows && first < width;
    }
    VT_MEMBER bool inside(int) const { return present; }
    VT_MEMBER i64 at(int) const { return first; }
    VT_MEMBER float sum(const float (&x)[1][8], int) const {
        float partial = 0.0f;
        if (present) add_terms(partial, x[0]);
        return tree_of_lanes(partial, lanes);
    }
    VT_MEMBER float squares(const float (&x)[1][8], int) const {
        float partial = 0.0f;
        add_squares(partial, x[0]);
        return tree_of_lanes(partial, lanes);
    }
    VT_MEMBER float max(const float (&x)[1][8], float start, int) const {
        return max_of_lanes(max_of(x[0], start, present), lanes);
    }
    VT_MEMBER float size(const float (&x)[1][8], int) const {
        return vt_float((int)largest_of_lanes(size_of(x[0], 0u, present), lanes));
    }
    VT_MEMBER i64 blocks(i64 rows) const {
        const int each = (int)(blockDim.x / (unsigned)lanes);
        return (rows + each - 1) / each;
    }
};

// ROWS neighbouring rows to a team of 1 << shift >= ROWS lanes, a turn each; what follows from its sum is found by a lane
// for each of them (teams.cuh).
template <int ROWS> struct TeamsFrame : Frame {
    static constexpr int V = 8, TURNS = ROWS;
    static constexpr bool EARLY = true, ALIKE = true;
    Team team;
    i64 row;
    int here;

    VT_MEMBER TeamsFrame(i64 rows, i64 width, int shift) : team(shift) {
        row = (i64)team_number(blockIdx.x, shift) * ROWS;
        here = at(0) < width ? (rows - row < ROWS ? (int)(rows - row) : ROWS) : 0;
    }
    VT_MEMBER bool inside(int t) const { return t < here; }
    VT_MEMBER i64 at(int) const { return team.place * 8; }
    // Not to be made a product of the row's number, which would be one of 64 bits for each turn.
    VT_MEMBER i64 down(int t, i64 step) const {
        i64 steps = t * step;
#ifdef __CUDACC__
        asm("" : "+l"(steps));
#endif
        return steps;
    }
    VT_MEMBER float of(float x, int t) const { return from_lane(x, team.begin + t); }
    VT_MEMBER float sum(const float (&x)[TURNS][8], int) const {
        float partials[TURNS] = {};
        EACH(t, TURNS)
            if (inside(t)) add_terms(partials[t], x[t]);
        return own(partials);
    }
    VT_MEMBER float squares(const float (&x)[TURNS][8], int) const {
        float partials[TURNS] = {};
        EACH(t, TURNS) {
            if (x[t][0] * x[t][0] > 0x1p-100f) EACH(j, 8) partials[t] = vt_fma(x[t][j], x[t][j], partials[t]);
            else add_squares(partials[t], x[t]);
        }
        return own(partials);
    }
    VT_MEMBER float own(float (&partials)[TURNS]) const {
        for (int m = team.lanes >> 1; m >= 1; m >>= 1) EACH(t, TURNS) partials[t] += other_lane(partials[t], m);
        float total = partials[0];
        EACH(t, TURNS)
            if (team.place == t) total = partials[t];
        return total;
    }
    VT_MEMBER i64 blocks(i64) const { return 0; }
};

// A row a block of 128 threads: a thread holds two of the tree's partials, of the even turns and of the odd ones.
template <int TURNS_, bool EARLY_> struct HalfFrame : Frame {
    static constexpr int V = 8, TURNS = TURNS_;
    static constexpr bool EARLY = EARLY_;
    i64 row;
    int width, first;
    float* warps;  // 8 floats for each reduction of the kernel

    VT_MEMBER HalfFrame(i64 width, float* warps)
        : row(blockIdx.x), width((int)width), first(threadIdx.x * 8), warps(warps) {}
    VT_MEMBER bool inside(int t) const { return at(t) < width; }
    VT_MEMBER i64 at(int t) const { return first + t * (TREE_SPAN / 2); }
    VT_MEMBER float sum(const float (&x)[TURNS][8], int number) const {
        float partials[2] = {};
        EACH(t, TURNS)
            if (inside(t)) add_terms(partials[t & 1], x[t]);
        return joined(partials, number);
    }
    VT_MEMBER float squares(const float (&x)[TURNS][8], int number) const {
        float partials[2] = {};
        add_squares_in_turn(partials, x);
        return joined(partials, number);
    }
    VT_MEMBER float joined(const float (&partials)[2], int number) const {
        return tree_of_two<16>(partials, warps + 8 * number);
    }
    VT_MEMBER float max(const float (&x)[TURNS][8], float start, int number) const {
        EACH(t, TURNS) start = max_of(x[t], start, inside(t));
        return max_of_block(start, warps + 8 * number);
    }
    VT_MEMBER float size(const float (&x)[TURNS][8], int number) const {
        unsigned top = 0;
        EACH(t, TURNS) top = size_of(x[t], top, inside(t));
        return vt_float((int)largest_of_block(top, (unsigned*)warps + 8 * number));
    }
    VT_MEMBER i64 blocks(i64 rows) const { return rows; }
};

template <int TURNS_, bool EARLY_> struct BlockFrame : Frame {
    static constexpr int V = 8, TURNS = TURNS_;
    static constexpr bool EARLY = EARLY_;
    i64 row;
    int width, first;
    float* warps;  // 8 floats for each reduction of the kernel

    VT_MEMBER BlockFrame(i64 width, float* warps)
        : row(blockIdx.x), width((int)width), first(threadIdx.x * 8), warps(warps) {}
    VT_MEMBER bool inside(int t) const { return at(t) < width; }
    VT_MEMBER i64 at(int t) const { return first + t * TREE_SPAN; }
    VT_MEMBER float sum(const float (&x)[TURNS][8], int number) const {
        float partial = 0.0f;
        EACH(t, TURNS)
            if (inside(t)) add_terms(partial, x[t]);
        return tree_of_block(partial, warps + 8 * number);
    }
    VT_MEMBER float squares(const float (&x)[TURNS][8], int number) const {
        float partial = 0.0f;
        EACH(t, TURNS) add_squares(partial, x[t]);
        return tree_of_block(partial, warps + 8 * number);
    }
    VT_MEMBER float max(const float (&x)[TURNS][8], float start, int number) const {
        EACH(t, TURNS) start = max_of(x[t], start, inside(t));
        return max_of_block(start, warps + 8 * number);
    }
    VT_MEMBER float size(const float (&x)[TURNS][8], int number) const {
        unsigned top = 0;
        EACH(t, TURNS) top = size_of(x[t], top, inside(t));
        return vt_float((int)largest_of_block(top, (unsigned*)warps + 8 * number));
    }
    VT_MEMBER i64 blocks(i64 rows) const { return rows; }
};

// work(at) for each of a thread's elements of a row of any width, in the order of its partial sum.
template <class W> VT_FN void each_of_long(i64 width, W&& work) {
    for (i64 base = threadIdx.x * 8; base < width; base += TREE_SPAN)
        for (i64 at = base; at < base + 8 && at < width; ++at) work(at);
}

// Codes of bfloat16 under a scale of each group of LANES >= TURNS lanes, where the frame SHARES: a lane finds that of one of
// its turns, scale_of(size).
template <int LANES, class F, class S>
VT_FN void put_shared(const F& frame, const float (&x)[F::TURNS][8], S&& scale_of, i64 row, i64 width, void* codes,
                      void* scales, unsigned nan) {
    constexpr int TURNS = F::TURNS;
    const int lane = threadIdx.x & (LANES - 1), own = lane & (TURNS - 1);
    float top[TURNS], q[8];
    EACH(t, TURNS) top[t] = vt_float((int)size_of(x[t], 0u, frame.inside(t)));
    int m = 1;
#pragma unroll
    for (int held = TURNS; held > 1; held >>= 1, m <<= 1)
        EACH(d, held / 2) {
            const bool second = own & m;
            const float mine = second ? top[2 * d + 1] : top[2 * d], sent = second ? top[2 * d] : top[2 * d + 1];
            top[d] = fmaxf(mine, other_lane(sent, m));
        }
#pragma unroll
    for (; m < LANES; m <<= 1) top[0] = fmaxf(top[0], other_lane(top[0], m));
    const float scale = scale_of(top[0]);
    const Quotients mine(scale);
    const bool large = __any_sync(FULL_WARP, mine.large);
    if (lane < TURNS && frame.inside(own))
        ((float*)scales)[row * (width / (8 * LANES)) + frame.at(own) / (8 * LANES)] = scale;
    EACH(t, TURNS) {
        Quotients by(other_lane(mine.inverse, own ^ t), other_lane(mine.low, own ^ t));
        if (large) by = Quotients(other_lane(scale, own ^ t));
        if (!frame.inside(t)) continue;
        by.divide(q, x[t]);
        store_e4m3((unsigned char*)codes, row * width + frame.at(t), q, nan);
    }
}
