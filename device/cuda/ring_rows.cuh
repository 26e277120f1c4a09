// Rows of bfloat16 normed without a residual and quantised, each by a team of one, two or four warps, which takes row after
// row: the next ones are on their way into shared memory, and the weights lie there as float32, once for all teams of a block.
//
// The ladder, 8192 x 5120 into NVFP4, whose bytes alone take 27 us:
// 1. A block of 128 a row, the next one under way in registers: 35 us. A warp's work beside its values, the row's number
//    above all, takes as long as a third of them; of two and a half spans the last is half of the warps'.
// 2. Five warps a row of a ring in shared memory: 36 to 40. Two warps, 80 values a lane: 29.5. A row's values in registers
//    between its sum and its codes: 31.5. Copies of 16 bytes by each thread instead of the copy engine's, of whole rows: 31.
//    Two rows ahead of each team instead of one: 31. Copies that ask the second-level cache to give their bytes up first: 27,
//    but only where the last results lie there still and are overwritten; else 31. Two rows of each team at the start: 31. The
//    first ones into the second-level cache while the kernel before ends: 28.7. A barrier is made ready by its own team and
//    the weights are sent for while the kernel before ends: 28.1; by one warp, which makes one after the other of all, that
//    took 1800 cycles of a start.
// 3. Teams as wide as their rows: of 2048 one warp takes 88 % of a copy's bandwidth, two 76; of 8192 four take 89, two 81.
// 4. 8192 x 2048 into NVFP4 among tiles, four turns of 2.1 us: 12.0; 11.45 with values that stay in registers. Half of the
//    teams send for their first rows once the weights are there: 11.15; of 2880, so, 16.95 instead of 16.8. No gain: two rows
//    sent for at the start (12.5), the next one before a row's squares (+ 0.4), 24 teams (12.5), two blocks of half the teams.
#pragma once
#include "early.cuh"
#include "mma.cuh"
#include "soon.cuh"
#include "tree.cuh"

typedef unsigned long long u64;

#define AHEAD 2        // rows of a team in shared memory, one that is worked at and the next one
#define MOST_TEAMS 16

#if !defined(__CUDACC__) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define WHOLE_ROWS true  // Hopper's copy engine brings them
#else
#define WHOLE_ROWS false
#endif

#ifdef __CUDACC__
template <int T> VT_FN void team_joins(int team) {
    if (T == 32) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(T) : "memory");
}
#if WHOLE_ROWS
VT_FN unsigned ring_address(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }
VT_FN void row_is_none(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(ring_address(barrier)) : "memory");
}
// A multiple of 16 bytes at multiples of 16, to where all have read and nobody has written. A fence, which waits for the
// codes' stores as well, would take a microsecond a row.
VT_FN void row_comes(void* to, const void* from, int bytes, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%3], %2;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(ring_address(to)), "l"(from), "r"(bytes), "r"(ring_address(barrier)) : "memory");
}
VT_FN void row_is_there(u64* barrier, unsigned parity) {
    asm volatile("{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(ring_address(barrier)), "r"(parity) : "memory");
}
#else
VT_FN void row_is_none(u64*) {}
VT_FN void row_comes(void*, const void*, int, u64*) {}
VT_FN void row_is_there(u64*, unsigned) {}
#endif
#else
namespace emulation {
inline Meeting joining[MOST_TEAMS];
struct RowOnItsWay { void* to; const void* from; int bytes; unsigned phase; };
inline RowOnItsWay on_their_way[MOST_TEAMS * AHEAD];
}  // namespace emulation
template <int T> void team_joins(int team) {
    emulation::joining[team].size = T;
    emulation::wait_for(emulation::joining[team]);
}
// `barrier` holds the row's number. Bytes come as late as a wait allows.
static inline void row_is_none(u64* barrier) { emulation::on_their_way[*barrier] = {}; }
static inline void row_comes(void* to, const void* from, int bytes, u64* barrier) {
    auto& row = emulation::on_their_way[*barrier];
    ++emulation::progress;
    row.to = to, row.from = from, row.bytes = bytes;
}
static inline void row_is_there(u64* barrier, unsigned parity) {
    auto& row = emulation::on_their_way[*barrier];
    while (row.phase == parity && row.to == nullptr) emulation::change(emulation::running->context, emulation::scheduler);
    if (row.phase != parity) return;
    std::memcpy(row.to, row.from, row.bytes);
    row.to = nullptr, row.phase ^= 1;
}
#endif

// Which of fewer than 2^31 rows a team takes: every one that comes `step` later.
struct RowOrder {
    int own, step, turns;

    VT_MEMBER RowOrder(int rows, int grid, int team, int teams)
        : own(blockIdx.x + grid * team), step(grid * teams), turns(own < rows ? (rows - own - 1) / step + 1 : 0) {}
    VT_MEMBER int row(int turn) const { return own + turn * step; }
    VT_MEMBER int after(int row, int) const { return row + step; }
};

// Of a number that a thread has room for: compilers would rather make it once more wherever it is asked for.
#ifdef __CUDACC__
VT_FN void stays(int& x) { asm volatile("" : "+r"(x)); }
VT_FN void stays(float& x) { asm volatile("" : "+f"(x)); }
#else
template <class X> static inline void stays(X&) {}
#endif

// T threads, B blocks of 16 of a row each, every T-th; all but the last are inside. A thread's two vectors of a block are held
// in the order that lanes read them in without meeting in a bank, the second one first where `flipped`. Of neighbouring teams
// of four warps the last span is other warps'.
template <int T, int B, int KEPT = 0> struct RowRing {
    static constexpr int ROW = B * T * 32, BYTES = B * T * 64;  // of a row, and of the weights, in shared memory
    int team, teams, thread, blocks;
    bool flipped;
    const uint4* weights;
    unsigned char *memory, *rows, *end;
    int first;  // where a thread's first vector of its team's first row lies in memory

    struct Kept { float of[KEPT > 0 ? KEPT : 1][2][8]; };  // a row's first KEPT blocks, as `squares` reads them

    VT_MEMBER RowRing(unsigned char* memory, int width)
        : team(threadIdx.x / T), teams(blockDim.x / T), thread(threadIdx.x % T ^ (T == 128 ? team % 2 * 64 : 0)),
          blocks(width >> 4), flipped(threadIdx.x & 4), weights((const uint4*)memory + thread), memory(memory),
          rows(memory + BYTES + team * (AHEAD * ROW)), end(memory + BYTES + teams * (AHEAD * ROW)),
          first(BYTES + team * (AHEAD * ROW) + thread * 32 + (flipped ? 16 : 0)) {
        stays(first);
    }
    // By all threads of a block. meanwhile(): while a thread's first weights come.
    template <class M> VT_MEMBER void widen_weights(const void* weight, M&& meanwhile) const {
        uint4* const memory = (uint4*)weights - thread;
        Raw<8> raw[2] = {};
        auto read = [&](int block) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (block < blocks) raw[h] = fetch<8>(weight, block * 16 + h * 8, BF16);
        };
        read(threadIdx.x);
        meanwhile();
#pragma unroll 1
        for (int block = threadIdx.x; block < B * T; block += blockDim.x) {
            if (block >= (int)blockDim.x) read(block);
            float w[2][8] = {};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (block < blocks) widen(w[h], raw[h], BF16);
                const Raw<8> floats = narrow(w[h], F32);
                uint4* to = memory + ((block >> 2 ^ h) & 1) * (2 * B * T) + block;  // as it is read
                to[0] = floats.a, to[B * T] = floats.b;
            }
        }
    }
    VT_MEMBER bool inside(int i) const { return i < B - 1 || block(i) < blocks; }
    VT_MEMBER int block(int i) const { return thread + i * T; }
    VT_MEMBER void send(int slot, const void* x, i64 from, u64* barrier) const {
        unsigned char* const to = rows + slot * ROW;
        const char* const at = (const char*)x + from * 2;
        if (WHOLE_ROWS) {
            if (thread == T - 1) row_comes(to, at, blocks * 32, barrier);
            return;
        }
#pragma unroll 1
        for (int n = thread; n < 2 * blocks; n += T) copy_async(to + n * 16, at + n * 16);
    }
    // A row that the team will send for.
    VT_MEMBER void announce(const void* x, i64 from) const {
        if (thread == T - 1) read_soon((const char*)x + from * 2, blocks * 32);
    }
    VT_MEMBER void await(u64* barrier, unsigned parity) const {
        if (WHOLE_ROWS) return row_is_there(barrier, parity);
        copies_arrive();
        team_joins<T>(team);
    }
    // The vector of block i that is read first, or (h) second, and its weights; zeros outside.
    VT_MEMBER void values(float (&v)[8], int slot, int i, int h) const {
        Raw<8> raw = {};
        if (inside(i)) raw.a = *(const uint4*)(memory + ((h == 1 ? first ^ 16 : first) + slot * ROW + i * (T * 32)));
        widen(v, raw, BF16);
    }
    VT_MEMBER void weights_of(float (&w)[8], int i, int h) const {
        widen(w, {weights[2 * h * (B * T) + i * T], weights[(2 * h + 1) * (B * T) + i * T]}, F32);
    }
    // The sum of a row's squares in the tree's order: of the tree's 256 partials a thread has 2 t and 2 t + 1, those 2 T further
    // on, and so on. Their squares are exact unless they are tiny, and then they change no sum that is not (alone_rows.cuh).
    // meanwhile(): as soon as the team has come here.
    template <class M> VT_MEMBER float squares(int slot, Kept& kept, uint4 (&sums)[2], M&& meanwhile) const {
        constexpr int PARTS = 128 / T;
        float p[PARTS][2] = {}, v[8];
        float least = 1.0f;
#pragma unroll
        for (int i = 0; i < B; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                values(v, slot, i, h);
#pragma unroll
                for (int j = 0; i < KEPT && j < 8; ++j) kept.of[i < KEPT ? i : 0][h][j] = v[j];
                if (i < PARTS && inside(i)) least = fminf(least, vt_abs(v[0]));
#pragma unroll
                for (int j = 0; j < 8; ++j) p[i % PARTS][h] = vt_fma(v[j], v[j], p[i % PARTS][h]);
            }
        if (!(least > 0x1p-50f)) {
#pragma unroll
            for (int k = 0; k < PARTS; ++k) p[k][0] = p[k][1] = 0.0f;
// Hardly ever done, so rolled up where registers suffice elsewhere too.
#pragma unroll (PARTS == 1 ? B : 1)
            for (int i = 0; i < B; i += PARTS)
#pragma unroll
                for (int k = 0; k < PARTS; ++k)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        if (i + k >= B || !inside(i + k)) continue;
                        values(v, slot, i + k, h);
                        add_squares(p[k][h], v);
                    }
        }
        // Where a thread has partials further on, lanes go on with some of them for each other. A flipped lane's second vectors
        // are what the others read first.
        auto halved = [](float a, float b, bool later, int m) { return (later ? b : a) + other_lane(later ? a : b, m); };
        const bool eight = thread & 8, two = thread & 2;
        float first[2], sum;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if constexpr (T == 128) first[h] = p[0][h] + other_lane(p[0][h], 8);
            else first[h] = halved(p[0][h], p[1][h], eight, 8);
        }
        sum = first[0] + other_lane(first[1], 4);
        if constexpr (T == 32) {
            float second[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) second[h] = halved(p[2][h], p[3][h], eight, 8);
            sum = halved(sum, second[0] + other_lane(second[1], 4), two, 2);
        } else {
            sum += other_lane(sum, 2);
        }
        sum += other_lane(sum, 1);
        sum += other_lane(sum, 4);
        if constexpr (T == 32) {
            sum += other_lane(sum, 2);
            sum += other_lane(sum, 8);
            sum += other_lane(sum, 16);
            team_joins<T>(team);
            meanwhile();
            return sum;
        }
        if (T == 64) sum += other_lane(sum, 8);
        if ((thread & 15) == 0) ((float*)sums)[thread >> 4] = sum;
        team_joins<T>(team);
        meanwhile();
        const uint4 s = sums[0];
        float e[8] = {vt_float((int)s.x), vt_float((int)s.y), vt_float((int)s.z), vt_float((int)s.w)};
        if (T == 64) return (e[0] + e[2]) + (e[1] + e[3]);
        const uint4 t = sums[1];
        e[4] = vt_float((int)t.x), e[5] = vt_float((int)t.y), e[6] = vt_float((int)t.z), e[7] = vt_float((int)t.w);
        return tree_of_eight(e);
    }
};

// work(row, turn, slot, number, values kept) for each row: where it lies, and root(sum of its squares). meanwhile(): what else
// a block does, and reads, while the first rows come. Kernels that stand on it are early ones.
template <int T, int B, int KEPT, class O, class M, class R, class W>
VT_FN void each_row(const RowRing<T, B, KEPT>& ring, const O& order, const void* x, i64 x_stride, const void* weight,
                    M&& meanwhile, R&& root, W&& work) {
    __shared__ uint4 sums[MOST_TEAMS][AHEAD][2];
    __shared__ u64 barriers[MOST_TEAMS][AHEAD];
    others_may_start();
    if (order.turns) ring.announce(x, order.row(0) * x_stride);
    if (threadIdx.x == 0) read_soon(weight, ring.blocks * 32);
    if (ring.thread == T - 1)
#pragma unroll
        for (int slot = 0; slot < AHEAD; ++slot) {
            barriers[ring.team][slot] = ring.team * AHEAD + slot;
            row_is_none(&barriers[ring.team][slot]);
        }
    after_others();
    auto send = [&](int turn, int slot, int row) {
        if (turn < order.turns) ring.send(slot, x, (i64)(unsigned)row * x_stride, &barriers[ring.team][slot]);
    };
    int row = order.row(0), slot = 0, parity = 0;
    const bool late = T == 32 && B <= 4 && 2 * ring.team >= ring.teams && ring.teams > 1;
    if (!late) send(0, 0, row);
    ring.widen_weights(weight, meanwhile);
    __syncthreads();
    if (late) send(0, 0, row);
#pragma unroll 1
    for (int turn = 0; turn < order.turns; ++turn) {
        const int next = order.after(row, turn);
        ring.await(&barriers[ring.team][slot], parity);
        typename RowRing<T, B, KEPT>::Kept kept;
        const float sum = ring.squares(slot, kept, sums[ring.team][slot], [&] { send(turn + 1, slot ^ 1, next); });
#pragma unroll
        for (int n = 0; n < KEPT * 16; ++n) stays(kept.of[n >> 4][n >> 3 & 1][n & 7]);
        work(row, turn, slot, root(sum), kept);
        row = next;
        parity ^= slot;
        slot ^= 1;
    }
}
