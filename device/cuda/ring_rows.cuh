// Rows of bfloat16 normed without a residual and quantised, two warps each, which take row after row: the next ones are on
// their way into shared memory, and the weights lie there as float32, once for all teams of a block.
//
// The ladder, 8192 x 5120 into NVFP4, whose bytes alone take 27 us:
// 1. A block of 128 a row, the next one under way in registers: 35 us. A warp's work beside its values, the row's number
//    above all, takes as long as a third of them; of two and a half spans the last is half of the warps'.
// 2. Five warps a row of a ring in shared memory: 36 to 40. Two warps, 80 values a lane: 29.5, where eight teams a
//    multiprocessor share its rows evenly; five, six or ten do not, 38, 34 and 32. A row's values in registers between its
//    sum and its codes: 31.5. Copies of 16 bytes by each thread instead of the copy engine's, of whole rows: 31.
#pragma once
#include "mma.cuh"
#include "tree.cuh"

typedef unsigned long long u64;

#define TEAM 64      // threads of a row
#define AHEAD 2      // rows of a team in shared memory, one that is worked at and the next one
#define MOST_TEAMS 8

#if !defined(__CUDACC__) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define WHOLE_ROWS true  // Hopper's copy engine brings them
#else
#define WHOLE_ROWS false
#endif

#ifdef __CUDACC__
VT_FN void team_joins(int team) { asm volatile("bar.sync %0, 64;" ::"r"(team + 1) : "memory"); }
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
static inline void team_joins(int team) {
    emulation::joining[team].size = TEAM;
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

// Which rows a team takes, fewer than 2^31: every one that comes `teams` later, or four of a tile of scales, 32 apart, and
// then the next four.
struct RowOrder {
    int own, teams, turns;
    bool fours;

    VT_MEMBER RowOrder(int rows, int grid, bool fours)
        : own(blockIdx.x + grid * (threadIdx.x / TEAM)), teams(grid * (blockDim.x / TEAM)), fours(fours) {
        const int shares = fours ? rows / 4 : rows;
        turns = own < shares ? ((shares - own - 1) / teams + 1) * (fours ? 4 : 1) : 0;
    }
    VT_MEMBER int row(int turn) const {
        if (!fours) return own + turn * teams;
        const int four = own + (turn >> 2) * teams;
        return (four >> 5) * 128 + (four & 31) + (turn & 3) * 32;
    }
};

// Blocks of 16: a thread has B of a row, every 64th; all but its last are inside. Its two vectors of a block are held in the
// order that lanes read them in without meeting in a bank, the second one first where `flipped`.
template <int B> struct RowRing {
    static constexpr int ROW = B * TEAM * 32, BYTES = B * TEAM * 64;  // of a row, and of the weights, in shared memory
    int team, thread, blocks;
    bool flipped;
    const uint4* weights;
    unsigned char* rows;

    VT_MEMBER RowRing(unsigned char* memory, int width)
        : team(threadIdx.x / TEAM), thread(threadIdx.x % TEAM), blocks(width >> 4), flipped(threadIdx.x & 4),
          weights((const uint4*)memory + thread), rows(memory + BYTES + team * (AHEAD * ROW)) {}
    // By all threads of a block.
    VT_MEMBER void widen_weights(const void* weight) const {
        uint4* const memory = (uint4*)weights - thread;
#pragma unroll 1
        for (int block = threadIdx.x; block < B * TEAM; block += blockDim.x) {
            float w[2][8] = {};
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (block < blocks) load(w[h], weight, block * 16 + h * 8, BF16);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Raw<8> floats = narrow(w[h], F32);
                uint4* to = memory + ((block >> 2 ^ h) & 1) * (2 * B * TEAM) + block;  // as it is read
                to[0] = floats.a, to[B * TEAM] = floats.b;
            }
        }
    }
    VT_MEMBER bool inside(int i) const { return i < B - 1 || block(i) < blocks; }
    VT_MEMBER int block(int i) const { return thread + i * TEAM; }
    VT_MEMBER void send(int slot, const void* x, i64 from, u64* barrier) const {
        unsigned char* const to = rows + slot * ROW;
        const char* const at = (const char*)x + from * 2;
        if (WHOLE_ROWS) {
            if (thread == TEAM - 1) row_comes(to, at, blocks * 32, barrier);
            return;
        }
#pragma unroll 1
        for (int n = thread; n < 2 * blocks; n += TEAM) copy_async(to + n * 16, at + n * 16);
    }
    VT_MEMBER void await(u64* barrier, unsigned parity) const {
        if (WHOLE_ROWS) return row_is_there(barrier, parity);
        copies_arrive();
        team_joins(team);
    }
    // The vector of block i that is read first, or (h) second, and its weights; zeros outside.
    VT_MEMBER void values(float (&v)[8], int slot, int i, int h) const {
        Raw<8> raw = {};
        if (inside(i)) raw.a = *(const uint4*)(rows + slot * ROW + i * 2048 + thread * 32 + (flipped != (h == 1) ? 16 : 0));
        widen(v, raw, BF16);
    }
    VT_MEMBER void weights_of(float (&w)[8], int i, int h) const {
        widen(w, {weights[2 * h * (B * TEAM) + i * TEAM], weights[(2 * h + 1) * (B * TEAM) + i * TEAM]}, F32);
    }
    // The sum of a row's squares in the tree's order: a thread has partials 2 t and 2 t + 1 and those 128 further on. Their
    // squares are exact unless they are tiny, and then they change no sum that is not (alone_rows.cuh).
    // meanwhile(): as soon as the team has come here.
    template <class M> VT_MEMBER float squares(int slot, uint4& sums, M&& meanwhile) const {
        float p[2][2] = {}, v[8];
        bool fused = true;
#pragma unroll
        for (int i = 0; i < B; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                values(v, slot, i, h);
                if (i < 2) fused &= !inside(i) || v[0] * v[0] > 0x1p-100f;
#pragma unroll
                for (int j = 0; j < 8; ++j) p[i & 1][h] = vt_fma(v[j], v[j], p[i & 1][h]);
            }
        if (!fused) {
            p[0][0] = p[0][1] = p[1][0] = p[1][1] = 0.0f;
#pragma unroll 1
            for (int i = 0; i < B; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float sum = i & 1 ? p[1][h] : p[0][h];
                    if (!inside(i)) continue;
                    values(v, slot, i, h);
                    add_squares(sum, v);
                    if (i & 1) p[1][h] = sum;
                    else p[0][h] = sum;
                }
        }
        const bool later = thread & 8;  // such lanes go on with the partials that are 128 further on
        const float first = (later ? p[1][0] : p[0][0]) + other_lane(later ? p[0][0] : p[1][0], 8);
        const float second = (later ? p[1][1] : p[0][1]) + other_lane(later ? p[0][1] : p[1][1], 8);
        float sum = first + other_lane(second, 4);  // that lane's second is of the partials that are first here
        sum += other_lane(sum, 2);
        sum += other_lane(sum, 1);
        sum += other_lane(sum, 4);
        sum += other_lane(sum, 8);
        if ((thread & 15) == 0) ((float*)&sums)[thread >> 4] = sum;
        team_joins(team);
        meanwhile();
        const uint4 s = sums;
        return (vt_float((int)s.x) + vt_float((int)s.z)) + (vt_float((int)s.y) + vt_float((int)s.w));
    }
};

// work(row, turn, slot, number) for each row: where it lies, and root(sum of its squares). meanwhile(): what else a block
// does before its threads have met.
template <int B, class M, class R, class W>
VT_FN void each_row(const RowRing<B>& ring, const RowOrder& order, const void* x, i64 x_stride, const void* weight,
                    M&& meanwhile, R&& root, W&& work) {
    __shared__ uint4 sums[MOST_TEAMS][AHEAD];
    __shared__ u64 barriers[MOST_TEAMS][AHEAD];
    if (threadIdx.x < MOST_TEAMS * AHEAD) {
        u64* const barrier = &barriers[0][0] + threadIdx.x;
        *barrier = threadIdx.x;
        row_is_none(barrier);
    }
    __syncthreads();
    auto send = [&](int turn) {
        const int slot = turn & 1;
        if (turn < order.turns) ring.send(slot, x, order.row(turn) * x_stride, &barriers[ring.team][slot]);
    };
    send(0);
    ring.widen_weights(weight);
    meanwhile();
    __syncthreads();
#pragma unroll 1
    for (int turn = 0; turn < order.turns; ++turn) {
        const int slot = turn & 1;
        ring.await(&barriers[ring.team][slot], turn >> 1 & 1);
        const float sum = ring.squares(slot, sums[ring.team][slot], [&] { send(turn + 1); });
        work(order.row(turn), turn, slot, root(sum));
    }
}
