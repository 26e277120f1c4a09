// Dense products: out[m, n] = sum_k a[m, k] * b[n, k] (or b[k, n]), for one matrix or a batch of them.
//
// Every element is summed in one order, so all kernels below give the same bytes for any number of rows: chain l of 32
// is a sequence of fma, from +0, over k = 16 l ... 16 l + 15, then the sixteen 512 further on, and so on; the chains are
// added up from l = 0. A warp that reads a weight row as it lies in memory, 32 bytes a lane, holds the 32 chains; a tile
// walks through them one after the other, sixteen k at a time: half a chain's distance between two steps costs it
// nothing, because a step's 32 bytes a row are a whole sector of memory. A chain beyond K adds +0 and is left out.
//
// The ladder:
// 1. tile_*_any: 64 x 64 elements a block, 8 x 8 a thread, operands widened on their way into shared memory, the next
//    sixteen k in registers meanwhile. Any dtype, width, stride and address: elements move one by one.
// 2. tile_*: the same with 16-byte loads, for 128 x 64, 64 x 64 and 16 x 128 elements a block. Where the tiles are too
//    few for the GPU the chains are dealt out to several blocks, each chain's sum goes to memory, and `join` adds up.
// 3. few_*: up to 8 rows, for which the weights are read once, several kilobytes a warp under way into shared memory (in
//    registers they were not: the compiler loads late to save registers). A warp takes a row of weights, or four, so
//    that what it reads of `a` serves four times; few_*_down a block of columns of [K, N].
// 4. *_bf16: knowing that everything is bfloat16, for the reasons given in norm.cu.
// 5. some_*: for 5 to 32 rows of bfloat16, eight or sixteen at a time, `a` in shared memory as well, for all warps of a
//    block. Then products, not bytes, take the time, so what a lane widens serves four or five rows of weights.
#include "storage.cuh"

#define CHAINS 32
#define PIECE 16                // neighbouring k of one chain
#define TURN (CHAINS * PIECE)   // distance between a chain's pieces

VT_FN Raw<8> nothing() { return {{0, 0, 0, 0}, {0, 0, 0, 0}}; }

// Eight elements, one by one: those from `count` on are zeros. What comes out is float32.
VT_FN Raw<8> fetch_some(const void* base, i64 at, i64 count, int kind) {
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float one[1] = {0.0f};
        if (j < count) load(one, base, at + j, kind);
        x[j] = one[0];
    }
    return narrow(x, F32);
}

// One operand of a tile: WIDTH rows (or columns) of it, sixteen k deep, from memory to registers to shared memory.
template <int WIDTH, int THREADS, bool WIDE> struct Side {
    static constexpr int LOADS = 2 * WIDTH / THREADS > 0 ? 2 * WIDTH / THREADS : 1;
    static constexpr int SWAP = WIDTH >= 32 ? 16 : 0;  // the lower eight k exchange halves: writers meet in no bank
    const char *base, *from[LOADS];
    i64 first, limit, stride, depth;
    int kind;
    bool down;  // k steps over rows: [K, N]
    Raw<8> raw[LOADS];

    VT_MEMBER Side(const void* matrix, i64 first, i64 limit, i64 stride, i64 depth, int kind, bool down)
        : base((const char*)matrix), first(first), limit(limit), stride(stride), depth(depth), kind(kind), down(down) {
        // Beyond the operand's edge its last elements are read once more: nobody asks for what comes of them.
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            i64 at = first + across(number(i)), last = down ? limit - 8 : limit - 1;
            at = at < last ? at : last;
            i64 k = along(number(i));
            from[i] = base + (down ? k * stride + at : at * stride + k) * item_size(kind);
        }
    }

    VT_MEMBER int number(int i) const { return i * THREADS + (int)threadIdx.x; }
    VT_MEMBER int across(int v) const { return down ? v % (WIDTH / 8) * 8 : v >> 1; }
    VT_MEMBER int along(int v) const { return down ? v / (WIDTH / 8) : (v & 1) * 8; }

    // The sixteen from k on.
    VT_MEMBER void fetch_piece(i64 k) {
        i64 offset = k * (down ? stride : 1) * item_size(kind);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            int v = number(i);
            if (LOADS * THREADS > 2 * WIDTH && v >= 2 * WIDTH) continue;
            if constexpr (WIDE) {
                raw[i] = fetch<8>(from[i] + offset, 0, kind);
            } else {
                i64 line = down ? k + along(v) : first + across(v), at = down ? first + across(v) : k + along(v);
                i64 lines = down ? depth : limit, elements = down ? limit : depth;
                raw[i] = line < lines ? fetch_some(base, line * stride + at, elements - at, kind) : nothing();
            }
        }
    }

    VT_MEMBER void deposit(float* shared) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            int v = number(i);
            if (LOADS * THREADS > 2 * WIDTH && v >= 2 * WIDTH) continue;
            float x[8];
            widen(x, raw[i], WIDE ? kind : F32);
            int k = along(v), at = across(v) ^ (k & 8 ? SWAP : 0);
            if (down) {
                store(shared, k * WIDTH + at, x, F32);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) shared[(k + j) * WIDTH + at] = x[j];
            }
        }
    }
};

VT_FN void four(float* x, const float* shared) {
    uint4 q = *(const uint4*)shared;
    x[0] = vt_float((int)q.x);
    x[1] = vt_float((int)q.y);
    x[2] = vt_float((int)q.z);
    x[3] = vt_float((int)q.w);
}

#define PRODUCT_PARAMETERS                                                                                       \
    i64 rows, i64 columns, i64 depth, const void *a, i64 a_stride, i64 a_batch, i64 a_kind, const void *b,       \
        i64 b_stride, i64 b_batch, i64 b_kind, i64 down, void *out, i64 out_kind, i64 tiles, uint4 *chains, i64 parts
#define PRODUCT_NAMES                                                                                            \
    rows, columns, depth, a, a_stride, a_batch, a_kind, b, b_stride, b_batch, b_kind, down, out, out_kind,       \
        tiles, chains, parts
#define PRODUCT_BF16 ((int)a_kind == BF16 && (int)b_kind == BF16 && (int)out_kind == BF16)

// Which elements are whose: BM x BN a tile, TM x 8 a thread, four neighbours at a time, number 0 ... 2 TM - 1.
struct Tiling {
    int bm, bn, tm;

    VT_MEMBER int threads() const { return bm / tm * (bn / 8); }
    VT_MEMBER int x(int thread) const { return (thread & 7) + 8 * ((thread >> 5) % (bn / 64)); }
    VT_MEMBER int y(int thread) const { return (thread >> 3 & 3) + 4 * ((thread >> 5) / (bn / 64)); }
    VT_MEMBER int row(int thread, int number) const {
        return y(thread) * 4 + (number >> 1 & 3) + (number >> 3) * (bm / 2);
    }
    VT_MEMBER int column(int thread, int number) const { return x(thread) * 4 + (number & 1) * (bn / 2); }
};

// A tile's place: neighbouring tiles take the next rows, then the next columns, then the next matrix.
struct Corner {
    i64 row, column, batch;

    VT_MEMBER Corner(i64 tile, i64 rows, i64 columns, int bm, int bn) {
        i64 down = (rows + bm - 1) / bm, across = (columns + bn - 1) / bn;
        row = tile % down * bm, column = tile / down % across * bn, batch = tile / down / across;
    }
};

VT_FN void store_four(void* out, const float* x, i64 row, i64 column, const Corner& at, i64 rows, i64 columns, int kind) {
    row += at.row, column += at.column;
    if (row >= rows) return;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float one[1] = {x[j]};
        if (column + j < columns) store(out, (at.batch * rows + row) * columns + column + j, one, kind);
    }
}

// Neighbouring blocks take the parts of one tile.
template <int BM, int BN, int TM, bool WIDE> VT_FN void tile(PRODUCT_PARAMETERS) {
    constexpr int THREADS = BM / TM * (BN / 8);
    constexpr Tiling tiling = {BM, BN, TM};
    constexpr bool PARKED = BM * BN <= 4096;  // totals wait in shared memory, where there is room: 64 registers less
    __shared__ uint4 memory[2][PIECE * (BM + BN) / 4], parked[PARKED ? BM * BN / 4 : 1];
    i64 number = (i64)blockIdx.x / parts, part = (i64)blockIdx.x % parts;
    const Corner corner(number, rows, columns, BM, BN);
    int x0 = tiling.column(threadIdx.x, 0), y0 = tiling.row(threadIdx.x, 0);
    Side<BM, THREADS, WIDE> left((const char*)a + corner.batch * a_batch * item_size((int)a_kind), corner.row, rows,
                                 a_stride, depth, (int)a_kind, false);
    Side<BN, THREADS, WIDE> right((const char*)b + corner.batch * b_batch * item_size((int)b_kind), corner.column,
                                  columns, b_stride, depth, (int)b_kind, down != 0);

    i64 chain = part * (CHAINS / parts), last = chain + CHAINS / parts, k = chain * PIECE;
    float total[TM][8] = {};
    if constexpr (PARKED)
        for (int i = 0; i < 2 * TM; ++i) parked[i * THREADS + threadIdx.x] = {0, 0, 0, 0};
    bool more = k < depth;
    int buffer = 0;
    if (more) {
        left.fetch_piece(k);
        right.fetch_piece(k);
        left.deposit((float*)memory[0]);
        right.deposit((float*)memory[0] + PIECE * BM);
        __syncthreads();
    }
    for (; more; ++chain) {
        float sum[TM][8] = {};
        bool whole = false;
        while (!whole) {
            const float *x_at = (const float*)memory[buffer], *y_at = x_at + PIECE * BM;
            k += TURN;
            whole = k >= depth;
            if (whole) k = (chain + 1) * PIECE;
            more = k < depth && !(whole && chain + 1 == last);
            if (more) {
                left.fetch_piece(k);
                right.fetch_piece(k);
            }
#pragma unroll
            for (int i = 0; i < PIECE; ++i) {
                int x_swap = i & 8 ? left.SWAP : 0, y_swap = i & 8 ? right.SWAP : 0;
                float x[TM], y[8];
                four(x, x_at + i * BM + (y0 ^ x_swap));
                if constexpr (TM == 8) four(x + TM - 4, x_at + i * BM + ((BM / 2 + y0) ^ x_swap));
                four(y, y_at + i * BN + (x0 ^ y_swap));
                four(y + 4, y_at + i * BN + ((BN / 2 + x0) ^ y_swap));
#pragma unroll
                for (int m = 0; m < TM; ++m)
#pragma unroll
                    for (int n = 0; n < 8; ++n) sum[m][n] = vt_fma(x[m], y[n], sum[m][n]);
            }
            if (more) {
                buffer ^= 1;
                left.deposit((float*)memory[buffer]);
                right.deposit((float*)memory[buffer] + PIECE * BM);
                __syncthreads();
            }
        }
        uint4* to = chains != nullptr ? chains + (chain * tiles + number) * (BM * BN / 4) : parked;
        if (PARKED || chains != nullptr) {
#pragma unroll
            for (int i = 0; i < 2 * TM; ++i) {
                float x[4] = {};
                if (chains == nullptr) four(x, (const float*)&parked[i * THREADS + threadIdx.x]);
#pragma unroll
                for (int j = 0; j < 4; ++j) x[j] += sum[i >> 1][(i & 1) * 4 + j];
                to[i * THREADS + threadIdx.x] = {(unsigned)vt_bits(x[0]), (unsigned)vt_bits(x[1]), (unsigned)vt_bits(x[2]),
                                                 (unsigned)vt_bits(x[3])};
            }
        } else {
#pragma unroll
            for (int m = 0; m < TM; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n) total[m][n] += sum[m][n];
        }
    }
    if (chains != nullptr) return;
#pragma unroll
    for (int i = 0; i < 2 * TM; ++i) {
        float* x = &total[i >> 1][(i & 1) * 4];
        if constexpr (PARKED) four(x, (const float*)&parked[i * THREADS + threadIdx.x]);
        store_four(out, x, tiling.row(threadIdx.x, i), tiling.column(threadIdx.x, i), corner, rows, columns,
                   (int)out_kind);
    }
}

#define TILE(NAME, THREADS, BLOCKS, BM, BN, TM, WIDE, KNOWN)                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(PRODUCT_PARAMETERS) {                     \
        VT_ASSUME(KNOWN);                                                                                        \
        tile<BM, BN, TM, WIDE>(PRODUCT_NAMES);                                                                   \
    }

// Blocks that a multiprocessor should hold: six need 168 registers a thread, which sm_120 and 121 do not manage.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define SIX 4
#else
#define SIX 6
#endif

TILE(tile_64x64_any, 64, 4, 64, 64, 8, false, true)
TILE(tile_16x128, 64, SIX, 16, 128, 4, true, true)
TILE(tile_64x64, 64, 4, 64, 64, 8, true, true)
TILE(tile_128x64, 128, 2, 128, 64, 8, true, true)
TILE(tile_16x128_bf16, 64, 8, 16, 128, 4, true, PRODUCT_BF16)
TILE(tile_64x64_bf16, 64, SIX, 64, 64, 8, true, PRODUCT_BF16)
TILE(tile_128x64_bf16, 128, 2, 128, 64, 8, true, PRODUCT_BF16)

// What the blocks of a tile left in memory, `count` chains, added up in their order: four neighbours a thread.
extern "C" __global__ void __launch_bounds__(256)
    join(i64 tiles, i64 count, const uint4* chains, i64 rows, i64 columns, void* out, i64 out_kind, i64 bm, i64 bn, i64 tm) {
    const Tiling tiling = {(int)bm, (int)bn, (int)tm};
    i64 size = tiles * (bm * bn / 4), at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= size) return;
    float total[4] = {};
#pragma unroll 8
    for (int l = 0; l < (int)count; ++l) {
        float x[4];
        four(x, (const float*)(chains + l * size + at));
#pragma unroll
        for (int j = 0; j < 4; ++j) total[j] += x[j];
    }
    i64 number = at / (bm * bn / 4);
    int inside = (int)(at % (bm * bn / 4)), thread = inside % tiling.threads(), i = inside / tiling.threads();
    store_four(out, total, tiling.row(thread, i), tiling.column(thread, i),
               Corner(number, rows, columns, tiling.bm, tiling.bn), rows, columns, (int)out_kind);
}

#define FEW_WARPS 2

#ifdef __CUDACC__
VT_FN void copies_sent() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATEST> VT_FN void copies_arrive_but() { asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory"); }
VT_FN void warp_meets() { __syncwarp(); }
#else
VT_FN void copies_sent() {}
template <int LATEST> VT_FN void copies_arrive_but() { copies_arrive(); }
VT_FN void warp_meets() { __shfl_xor_sync(0xffffffffu, 0.0f, 1); }
#endif

// Up to M rows of `a`; a warp takes R rows of weights, lane l chain l of each. The weights of STAGES - 1 turns are on
// their way into shared memory, WORDS times 16 bytes a lane and row: neighbouring lanes send for neighbouring bytes, for
// past the first-level cache every sector that two instructions share is read twice. Rows beyond the edge are the last
// one once more, and not stored.
template <int M, int R, int STAGES, int WORDS> VT_FN void few(PRODUCT_PARAMETERS) {
    __shared__ uint4 ring[FEW_WARPS][STAGES][R][WORDS * 32];
    __shared__ float sums[FEW_WARPS][R * M][CHAINS + 1];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, item = item_size((int)b_kind);
    i64 first = ((i64)blockIdx.x * FEW_WARPS + warp) * R;
    const char *b_row[R], *a_row[M];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        i64 n = first + r < columns ? first + r : columns - 1;
        b_row[r] = (const char*)b + n * b_stride * item + lane * 16;
    }
#pragma unroll
    for (int m = 0; m < M; ++m) a_row[m] = (const char*)a + (m < rows ? m : rows - 1) * a_stride * item_size((int)a_kind);

    int turns = (int)((depth + TURN - 1) / TURN);
    auto place = [](int word) { return word ^ (word >> 3 & 3); };  // readers, every second or fourth, meet in no bank
    auto send = [&](int turn) {
        i64 from = (i64)turn * TURN * item;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            if (w >= item || from + w * 512 + lane * 16 >= depth * item) continue;
#pragma unroll
            for (int r = 0; r < R; ++r)
                copy_async(&ring[warp][turn % STAGES][r][place(w * 32 + lane)], b_row[r] + from + w * 512);
        }
        copies_sent();
    };
    float sum[R][M] = {};
#pragma unroll
    for (int t = 0; t < STAGES - 1; ++t) send(t);
    for (int turn = 0; turn < turns; ++turn) {
        copies_arrive_but<STAGES - 2>();
        warp_meets();  // this turn's weights are there for all lanes, and none reads the last turn's any more
        send(turn + STAGES - 1);
        i64 k = (i64)turn * TURN + lane * PIECE;
        if (k >= depth) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float y[R][8];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const uint4* words = ring[warp][turn % STAGES][r];
                int word = lane * item + h * (item / 2);
                Raw<8> raw;
                raw.a = words[place(word)];
                raw.b = raw.a;
                if (item == 4) raw.b = words[place(word + 1)];
                widen(y[r], raw, (int)b_kind);
            }
#pragma unroll
            for (int m = 0; m < M; ++m) {
                float x[8];
                load(x, a_row[m], k + 8 * h, (int)a_kind);
#pragma unroll
                for (int r = 0; r < R; ++r)
#pragma unroll
                    for (int j = 0; j < 8; ++j) sum[r][m] = vt_fma(x[j], y[r][j], sum[r][m]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int m = 0; m < M; ++m) sums[warp][r * M + m][lane] = sum[r][m];
    __syncthreads();
    if (lane >= R * M) return;
    float total[1] = {0.0f};
#pragma unroll
    for (int l = 0; l < CHAINS; ++l) total[0] += sums[warp][lane][l];
    i64 row = lane % M, column = first + lane / M;
    if (row < rows && column < columns) store(out, row * columns + column, total, (int)out_kind);
}

#define FEW(NAME, M, R, STAGES, WORDS, KNOWN)                                                                    \
    extern "C" __global__ void __launch_bounds__(FEW_WARPS * 32) NAME(PRODUCT_PARAMETERS) {                      \
        VT_ASSUME(KNOWN);                                                                                        \
        few<M, R, STAGES, WORDS>(PRODUCT_NAMES);                                                                 \
    }

FEW(few_1, 1, 1, 8, 4, true)
FEW(few_2, 2, 1, 5, 4, true)
FEW(few_4, 4, 1, 5, 4, true)
FEW(few_8, 8, 1, 5, 4, true)
FEW(few_1_bf16, 1, 1, 8, 2, PRODUCT_BF16)
FEW(few_2_bf16, 2, 1, 8, 2, PRODUCT_BF16)
FEW(few_4_bf16, 4, 1, 8, 2, PRODUCT_BF16)
FEW(few_1_by_4_bf16, 1, 4, 3, 2, PRODUCT_BF16)
FEW(few_2_by_4_bf16, 2, 4, 3, 2, PRODUCT_BF16)
FEW(few_4_by_4_bf16, 4, 4, 3, 2, PRODUCT_BF16)

// Up to M rows of bfloat16 `a` at a time, a block's: with the weights of its warps, R rows each, it sends for the same k
// of `a`, which from the first-level cache would cost more time than the products: every warp there reads all of it.
// What is widened serves R or M times. Neighbouring blocks take the next rows of `a` and the same weights.
#define SOME_WARPS 4
template <int M, int R, int STAGES> VT_FN void some(PRODUCT_PARAMETERS) {
    constexpr int WORDS = 64, OWN = M / SOME_WARPS;  // of 16 bytes a turn and row; rows of `a` that a warp sends for
    VT_SHARED(memory);  // [STAGES][SOME_WARPS][R][WORDS] of the weights, [STAGES][M][WORDS] of `a`
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    unsigned groups = (unsigned)((rows + M - 1) / M), block = blockIdx.x / groups;
    i64 top = (i64)(blockIdx.x - block * groups) * M, first = ((i64)block * SOME_WARPS + warp) * R;
    uint4 *weights = (uint4*)memory + warp * R * WORDS, *left = (uint4*)memory + STAGES * SOME_WARPS * R * WORDS;
    const char *b_row[R], *a_row[OWN];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        i64 n = first + r < columns ? first + r : columns - 1;
        b_row[r] = (const char*)b + (n * b_stride + lane * 8) * 2;
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        i64 m = top + warp * OWN + i < rows ? top + warp * OWN + i : rows - 1;
        a_row[i] = (const char*)a + (m * a_stride + lane * 8) * 2;
    }
    auto place = [](int word) { return word ^ (word >> 3 & 3); };  // as in `few`
    uint4 *to = weights + place(lane), *to_left = left + warp * OWN * WORDS + place(lane);
    int turns = (int)((depth + TURN - 1) / TURN), within = (int)(depth - (i64)(turns - 1) * TURN) - lane * 8;
    auto send = [&](int turn, int stage) {
        i64 from = (i64)turn * (TURN * 2);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            if (turn >= turns || (turn + 1 == turns && w * 256 >= within)) continue;
#pragma unroll
            for (int r = 0; r < R; ++r)
                copy_async(to + (stage * SOME_WARPS * R + r) * WORDS + w * 32, b_row[r] + from + w * 512);
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                copy_async(to_left + (stage * M + i) * WORDS + w * 32, a_row[i] + from + w * 512);
        }
        copies_sent();
    };
    float sum[R][M] = {};
#pragma unroll
    for (int t = 0; t < STAGES - 1; ++t) send(t, t);
    int stage = 0, next = STAGES - 1;
    for (int turn = 0; turn < turns; ++turn) {
        copies_arrive_but<STAGES - 2>();
        __syncthreads();  // this turn's words are there for all, and nobody reads the last turn's any more
        send(turn + STAGES - 1, next);
        const uint4 *y_at = weights + stage * SOME_WARPS * R * WORDS, *x_at = left + stage * M * WORDS;
        next = stage;
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        if ((i64)turn * TURN + lane * PIECE >= depth) continue;
#pragma unroll(M < 16 ? 2 : 1)
        for (int h = 0; h < 2; ++h) {
            int at = place(lane * 2 + h);
            float y[R][8];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                Raw<8> raw = {y_at[r * WORDS + at], {}};
                widen(y[r], raw, BF16);
            }
#pragma unroll
            for (int m = 0; m < M; m += 2) {  // two at a time: R sums alone are too few for the pipeline
                float x[2][8];
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    Raw<8> raw = {x_at[(m + p) * WORDS + at], {}};
                    widen(x[p], raw, BF16);
                }
#pragma unroll
                for (int j = 0; j < 8; ++j)
#pragma unroll
                    for (int p = 0; p < 2; ++p)
#pragma unroll
                        for (int r = 0; r < R; ++r) sum[r][m + p] = vt_fma(x[p][j], y[r][j], sum[r][m + p]);
            }
        }
    }
    __syncthreads();
    float* sums = (float*)memory + warp * R * M * (CHAINS + 1);
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int m = 0; m < M; ++m) sums[(r * M + m) * (CHAINS + 1) + lane] = sum[r][m];
    warp_meets();
    for (int o = lane; o < R * M; o += 32) {
        float total[1] = {0.0f};
#pragma unroll
        for (int l = 0; l < CHAINS; ++l) total[0] += sums[o * (CHAINS + 1) + l];
        i64 row = top + o % M, column = first + o / M;
        if (row < rows && column < columns) store(out, row * columns + column, total, BF16);
    }
}

#define SOME(NAME, M, R, STAGES)                                                                                 \
    extern "C" __global__ void __launch_bounds__(SOME_WARPS * 32, 2) NAME(PRODUCT_PARAMETERS) {                  \
        some<M, R, STAGES>(PRODUCT_NAMES);                                                                       \
    }

SOME(some_8_by_2, 8, 2, 6)
SOME(some_16_by_2, 16, 2, 4)
SOME(some_8_by_5, 8, 5, 3)
SOME(some_16_by_4, 16, 4, 3)

// The same against [K, N]: `lanes` lanes a chain, four where K has all 32 of them, eight columns a lane, so that all
// chains of 8 * lanes columns are one block's. Four k of a chain are one of the STAGES that are on their way.
template <int M, int STAGES, int WORDS> VT_FN void few_down(PRODUCT_PARAMETERS, int lanes) {
    constexpr int DEEP = 4, THREADS = 128, MOST_LANES = 16;
    constexpr int RING = STAGES * DEEP * WORDS * THREADS, SUMS = M * 8 * (THREADS + MOST_LANES) / 4;
    __shared__ uint4 memory[RING > SUMS ? RING : SUMS];
    int thread = threadIdx.x, chain = thread / lanes, across = 8 * (thread & (lanes - 1));
    int item = item_size((int)b_kind), a_item = item_size((int)a_kind), wide = 8 * lanes, count = THREADS / lanes;
    unsigned places = (unsigned)((columns + wide - 1) / wide), batch = blockIdx.x / places;
    i64 first = (i64)(blockIdx.x - batch * places) * wide, column = first + across;
    column = column < columns ? column : columns - 8;
    const char* b_from = (const char*)b + (batch * b_batch + column) * item;
    const char* a_row[M];
#pragma unroll
    for (int m = 0; m < M; ++m) a_row[m] = (const char*)a + (batch * a_batch + (m < rows ? m : rows - 1) * a_stride) * a_item;

    int steps = (int)((depth + TURN - 1) / TURN) * (PIECE / DEEP);
    auto depth_of = [&](int step) {
        return (i64)(step / (PIECE / DEEP)) * TURN + chain * PIECE + step % (PIECE / DEEP) * DEEP;
    };
    auto place = [&](int step, int i, int w) {
        return &memory[((step % STAGES * DEEP + i) * WORDS + w) * THREADS + thread];
    };
    auto send = [&](int step) {
        i64 k = depth_of(step);
        if (k < depth) {
#pragma unroll
            for (int i = 0; i < DEEP; ++i)
#pragma unroll
                for (int w = 0; w < WORDS; ++w)
                    if (2 * w < item) copy_async(place(step, i, w), b_from + (k + i) * b_stride * item + w * 16);
        }
        copies_sent();
    };
    float sum[M][8] = {};
#pragma unroll
    for (int t = 0; t < STAGES - 1; ++t) send(t);
    for (int step = 0; step < steps; ++step) {
        send(step + STAGES - 1);
        copies_arrive_but<STAGES - 1>();
        i64 k = depth_of(step);
        if (k >= depth) continue;
#pragma unroll(M < 8 ? DEEP : 1)
        for (int i = 0; i < DEEP; ++i) {
            Raw<8> raw;
            raw.a = *place(step, i, 0);
            raw.b = raw.a;
            if (item == 4) raw.b = *place(step, i, WORDS - 1);
            float y[8];
            widen(y, raw, (int)b_kind);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                float x[1];
                load(x, a_row[m], k + i, (int)a_kind);
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[m][j] = vt_fma(x[0], y[j], sum[m][j]);
            }
        }
    }
    __syncthreads();
    float* sums = (float*)memory;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[(m * wide + across + j) * (count + 1) + chain] = sum[m][j];
    __syncthreads();
    for (int o = thread; o < M * wide; o += THREADS) {
        float total[1] = {0.0f};
#pragma unroll 8
        for (int l = 0; l < count; ++l) total[0] += sums[o * (count + 1) + l];
        i64 row = o / wide, at = first + o % wide;
        if (row < rows && at < columns) store(out, (batch * rows + row) * columns + at, total, (int)out_kind);
    }
}

#define FEW_DOWN(NAME, M, STAGES, WORDS, KNOWN)                                                                  \
    extern "C" __global__ void __launch_bounds__(128) NAME(PRODUCT_PARAMETERS, i64 lanes) {                      \
        VT_ASSUME(KNOWN);                                                                                        \
        few_down<M, STAGES, WORDS>(PRODUCT_NAMES, (int)lanes);                                                   \
    }

FEW_DOWN(few_1_down, 1, 2, 2, true)
FEW_DOWN(few_2_down, 2, 2, 2, true)
FEW_DOWN(few_4_down, 4, 2, 2, true)
FEW_DOWN(few_8_down, 8, 2, 2, true)
FEW_DOWN(few_1_down_bf16, 1, 5, 1, PRODUCT_BF16)
FEW_DOWN(few_2_down_bf16, 2, 5, 1, PRODUCT_BF16)
FEW_DOWN(few_4_down_bf16, 4, 5, 1, PRODUCT_BF16)
FEW_DOWN(few_8_down_bf16, 8, 5, 1, PRODUCT_BF16)
