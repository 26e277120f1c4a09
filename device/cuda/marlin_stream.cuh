// Products of up to 64 rows of 16-bit activations with weights in Marlin's tiles on Hopper, for more rows than marlin_few.cuh
// takes. A block has 256 columns: each of two groups of four warps 128, whose tiles a warp unpacks into registers as left
// operands while the products of the 16 k before are under way. The copy engine brings words, scales and zero points in
// runs as long as the block is broad, beside the rows of `a`, many stages ahead.
//
// A part of K, as long as the launcher says, is summed by tensor cores from its first k to its last; part sums are added
// in float32 from the first on, however the work is spread:
// 1. *_run: many columns. Tiles follow each other in one run of 64 k after 64 k, of which each block has an equal share.
//    Where a share ends within a tile, its sums wait in memory for the block that goes on. A block begins with the tile
//    that it leaves unfinished and ends with the one that it takes over, so that nobody waits long. Its place in the run
//    is drawn from a counter: the share before belongs to a block that runs already.
// 2. *_split: few columns. Blocks have equal shares of all tiles' parts and leave each one's sums in memory, which *_join
//    adds up.
#pragma once
#include "marlin_formats.cuh"

#define STREAM_STAGES 20  // at most
#define STREAM_PARTS 8  // of K, at most
#define STREAM_TILES 2  // times 64 columns of a group
#define STREAM_GROUPS 2

#if VT_TILES

#ifdef __CUDACC__
VT_FN void flag_up(unsigned* flag) { asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory"); }
// Until the flag is up; it is taken down again.
VT_FN void flag_wait(unsigned* flag) {
    unsigned up;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(up) : "l"(flag) : "memory");
    while (!up);
    *flag = 0;
}
// Four sums that another block has left.
VT_FN float4 sums_of_others(const float4* at) { return __ldcg(at); }
VT_FN void stores_for_others() { __threadfence(); }
#else
static inline void flag_up(unsigned* flag) { *flag = 1; }
static inline void flag_wait(unsigned* flag) {
    if (!*flag) {
        std::fprintf(stderr, "emulation: a block waits for one that does not run\n");
        std::abort();
    }
    *flag = 0;
}
static inline float4 sums_of_others(const float4* at) { return *at; }
static inline void stores_for_others() {}
#endif

#define STREAM_PARAMETERS                                                                                        \
    VT_MAP rows_map, i64 rows, i64 columns, i64 depth, const void *words, const void *scales, const void *zeros,     \
        void *out, i64 group_size, i64 zero, const void *factors, const void *bias, i64 length, i64 stages_,         \
        i64 blocks, float4 *states, unsigned *flags
#define STREAM_NAMES                                                                                             \
    rows_map, rows, columns, depth, words, scales, zeros, out, group_size, zero, factors, bias, length, stages_,     \
        blocks, states, flags

// ROWS of `a`. length: 64 k of a part, in such steps.
template <class W, int ROWS, bool SPLIT>
VT_FN void marlin_stream(const TensorMap& rows_map, i64 rows, i64 columns, i64 depth, const void* words, const void* scales,
                         const void* zeros, void* out, i64 group_size, i64 zero, const void* factors, const void* bias,
                         i64 length_, i64 stages_, i64 blocks, float4* states, unsigned* flags) {
    VT_SHARED(memory);
    constexpr int TILES = STREAM_TILES, GROUPS = STREAM_GROUPS;
    typedef Stage<W, ROWS, TILES * GROUPS> S;
    constexpr int KIND = W::KIND, HERE = S::UNITS * COLUMNS, SUMS = ROWS / 2, VECTORS = TILES * SUMS / 4;
    int stages = (int)stages_, thread = (int)threadIdx.x, length = (int)length_;
    u8* tiles = memory + (-(u64)memory & 1023);
    u64 *full = (u64*)(tiles + stages * S::BYTES), *empty = full + STREAM_STAGES;
    int* told = (int*)(empty + STREAM_STAGES);
    int chunks = (int)(depth / CHUNK);
    int across = (int)((columns + HERE - 1) / HERE), parts = (chunks + length - 1) / length;
    int wide = columns < HERE ? (int)columns : HERE;
    auto left_of = [&](int tile) {  // the last tile reaches back where columns end
        i64 n = (i64)tile * HERE;
        return n + wide <= columns ? n : columns - wide;
    };
    if (thread == 0) {
        map_ahead(rows_map);
        for (int s = 0; s < stages; ++s) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, 4 * GROUPS);
        }
        barriers_ready();
        if (!SPLIT) {
            unsigned drawn = atomicAdd(flags, 1u);
            if (drawn == (unsigned)blocks - 1) *flags = 0;
            *told = (int)drawn;
        }
    }
    if constexpr (W::SCALE_ROWS == 1)
        for (int s = 0; scales == nullptr && s < stages; ++s)
            for (int at = thread; at < S::SCALE_ROW / 4; at += (int)blockDim.x)
                ((unsigned*)(tiles + s * S::BYTES + S::SCALES))[at] = W::NO_SCALE;
    __syncthreads();
    int block = SPLIT ? (int)blockIdx.x : *told;
    // What this block does: steps of 64 k on the run from tile to tile, a share of whole parts where SPLIT.
    auto share = [&](int number) {
        if (!SPLIT) return (i64)across * chunks * number / blocks;
        i64 unit = (i64)across * parts * number / blocks, tile = unit / parts, step = (unit - tile * parts) * length;
        return tile * chunks + step;
    };
    i64 begin_all = share(block), end_all = share(block + 1);
    int tile_first = (int)(begin_all / chunks), tile_last = end_all > begin_all ? (int)((end_all - 1) / chunks) : tile_first - 1;
    auto begin_of = [&](int tile) { return tile == tile_first ? (int)(begin_all - (i64)tile * chunks) : 0; };
    auto end_of = [&](int tile) { return tile == tile_last ? (int)(end_all - (i64)tile * chunks) : chunks; };
    int stage = 0, parity = 0;
    if (thread < 128) {
        registers_down<40>();
        int lane = thread & 31, turn = thread >> 5;
        Sender<W, S> sender(lane, wide, columns, group_size, words, scales, zeros);
        for (int tile = tile_last; tile >= tile_first; --tile) {
            int chunk = begin_of(tile), end = end_of(tile);
            sender.begin(left_of(tile), chunk);
#pragma unroll 1
            for (; chunk < end; ++chunk, --turn) {
                if (turn == 0) {
                    turn = SENDERS;
                    barrier_wait(empty + stage, parity ^ 1);
                    u8* here = tiles + stage * S::BYTES;
                    if (lane == 0) {
                        barrier_expect(full + stage, ROWS * 128 + sender.expected);
                        load_tile(here, rows_map, full + stage, chunk * 128, 0);
                    }
                    lanes_meet();
                    sender.send(here, full + stage);
                }
                sender.onward();
                if (++stage == stages) stage = 0, parity ^= 1;
            }
        }
        // Those who multiply take one stage more than there are, whatever lies in it.
        if (turn == 0) {
            barrier_wait(empty + stage, parity ^ 1);
            if (lane == 0) barrier_arrive(full + stage);
        }
    } else {
        registers_up<232>();
        int own = thread - 128, group = own >> 7, lane = own & 31, warp = own >> 5 & 3, g = lane >> 2;
        int unit = group * TILES + warp * TILES / 4, first = warp * TILES & 3;  // tiles `first` on of 64 columns
        float part[TILES][SUMS], total[SPLIT ? 1 : TILES][SUMS];
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) part[j][i] = 0.0f;
        int codes_at = S::WORDS + unit * S::UNIT + lane * (4 * W::TILE) + first * W::TILE;
        int scales_at = S::SCALES + unit * W::SCALE_BYTES, zeros_at = S::ZEROS + unit * W::ZERO_BYTES;
        typename W::template Held<TILES> held;
        held.begin(depth, zero);
        auto release = [&](int from) {
            lanes_meet();
            if (lane == 0) barrier_arrive(empty + from);
        };
        constexpr int TAKEN = TILES * W::TILE / 4;  // words of 16 k
        unsigned raw[4][TAKEN], a[2][TILES][4];
        auto unpack = [&](int s) {
#pragma unroll
            for (int j = 0; j < TILES; ++j) held.operands(a[s & 1][j], raw[s] + j * (W::TILE / 4), s, j, first);
        };
        // What the next 64 k need, as soon as it is there; the operands of the first 16.
        auto take = [&] {
            barrier_wait(full + stage, parity);
            const char* here = (const char*)tiles + stage * S::BYTES;
#pragma unroll
            for (int s = 0; s < 4; ++s) take_words(raw[s], here + codes_at + s * (S::UNITS * S::UNIT));
            held.take(here + scales_at, S::SCALE_ROW, here + zeros_at, first, g, zero);
            unpack(0);
        };
        // One step: the products of 64 k; `fresh`: the sums begin.
        auto step = [&](bool fresh) {
            const u8* here = tiles + stage * S::BYTES;
            int own_stage = stage;
            if (++stage == stages) stage = 0, parity ^= 1;
            // Operands are made while the products before are under way, none of which is as the loop goes round.
            u64 tokens = tile_of(here);
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                products_begin();
#pragma unroll
                for (int j = 0; j < TILES; ++j) multiply_registers<KIND>(part[j], a[s & 1][j], further(tokens, s), s > 0 || !fresh);
                products_close();
                products_wait<1>();
                if (s < 3) unpack(s + 1);
                else take();
            }
            products_wait<0>();
            release(own_stage);
        };
        // Sums of rows 8 e + 2 (lane % 4) and the next, columns g and g + 8 of tile j.
        auto store_sums = [&](int tile, int j, int e, float4 x) {
            const float sums[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int c = (unit * 4 + first + j) * 16 + 8 * h + g;
                i64 n = left_of(tile) + c;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int row = 8 * e + 2 * (lane & 3) + i;
                    if (row < rows && c < wide)
                        ((unsigned short*)out)[row * columns + n] =
                            (unsigned short)pair<KIND>(W::last(sums[2 * h + i], n, factors, bias), 0.0f);
                }
            }
        };
        constexpr int THREADS = 128 * GROUPS;
        take();
#pragma unroll 1
        for (int tile = tile_last; tile >= tile_first; --tile) {
            int chunk = begin_of(tile), end = end_of(tile), at = chunk % length;
            if constexpr (!SPLIT) {
                if (chunk > 0) {
                    if ((own & 127) == 0) flag_wait(flags + 1 + (block - 1) * GROUPS + group);
                    group_meets(group);
                }
                const float4* from = states + (i64)(block - 1) * (2 * VECTORS * THREADS) + own;
#pragma unroll
                for (int j = 0; j < TILES; ++j)
#pragma unroll
                    for (int e = 0; e < SUMS / 4; ++e) {
                        float4 x = {0.0f, 0.0f, 0.0f, 0.0f}, y = {-0.0f, -0.0f, -0.0f, -0.0f};
                        if (chunk > 0) {
                            int v = j * (SUMS / 4) + e;
                            x = sums_of_others(from + v * THREADS);
                            y = sums_of_others(from + (VECTORS + v) * THREADS);
                        }
                        part[j][4 * e] = x.x, part[j][4 * e + 1] = x.y, part[j][4 * e + 2] = x.z, part[j][4 * e + 3] = x.w;
                        total[j][4 * e] = y.x, total[j][4 * e + 1] = y.y, total[j][4 * e + 2] = y.z, total[j][4 * e + 3] = y.w;
                    }
            }
            while (chunk < end) {
                int stop = chunk - at + length;
                stop = stop < end ? stop : end;
                bool fresh = at == 0;
#pragma unroll 1
                for (; chunk < stop; ++chunk) {
                    step(fresh);
                    fresh = false;
                }
                at = chunk % length;
                if (at && chunk < chunks) break;
                at = 0;
                if constexpr (SPLIT) {
                    float4* to = states + ((i64)tile * parts + (chunk - 1) / length) * (VECTORS * THREADS) + own;
#pragma unroll
                    for (int j = 0; j < TILES; ++j)
#pragma unroll
                        for (int e = 0; e < SUMS / 4; ++e)
                            if (8 * e + 2 * (lane & 3) < rows)
                                to[(j * (SUMS / 4) + e) * THREADS] =
                                    {part[j][4 * e], part[j][4 * e + 1], part[j][4 * e + 2], part[j][4 * e + 3]};
                } else {
#pragma unroll
                    for (int j = 0; j < TILES; ++j)
#pragma unroll
                        for (int i = 0; i < SUMS; ++i) total[j][i] += part[j][i];
                }
            }
            if constexpr (!SPLIT) {  // else *_join adds up
                if (end == chunks) {
#pragma unroll
                    for (int j = 0; j < TILES; ++j)
#pragma unroll
                        for (int e = 0; e < SUMS / 4; ++e)
                            store_sums(tile, j, e, {total[j][4 * e], total[j][4 * e + 1], total[j][4 * e + 2], total[j][4 * e + 3]});
                } else {
                    float4* to = states + (i64)block * (2 * VECTORS * THREADS) + own;
#pragma unroll
                    for (int j = 0; j < TILES; ++j)
#pragma unroll
                        for (int e = 0; e < SUMS / 4; ++e) {
                            int v = j * (SUMS / 4) + e;
                            to[v * THREADS] = {part[j][4 * e], part[j][4 * e + 1], part[j][4 * e + 2], part[j][4 * e + 3]};
                            to[(VECTORS + v) * THREADS] = {total[j][4 * e], total[j][4 * e + 1], total[j][4 * e + 2], total[j][4 * e + 3]};
                        }
                    stores_for_others();
                    group_meets(group);
                    if ((own & 127) == 0) flag_up(flags + 1 + block * GROUPS + group);
                }
            }
        }
    }
}

// Adds up what *_split leaves; a block is a vector of each thread's sums of a tile.
template <class W, int ROWS>
VT_FN void marlin_join(i64 rows, i64 columns, i64 parts_, const float4* states, const void* factors, const void* bias, void* out) {
    constexpr int KIND = W::KIND, TILES = STREAM_TILES, GROUPS = STREAM_GROUPS, HERE = TILES * GROUPS * COLUMNS;
    constexpr int SUMS = ROWS / 2, VECTORS = TILES * SUMS / 4, THREADS = 128 * GROUPS;
    int own = (int)threadIdx.x, group = own >> 7, lane = own & 31, warp = own >> 5 & 3, g = lane >> 2, parts = (int)parts_;
    int unit = group * TILES + warp * TILES / 4, first = warp * TILES & 3;
    int tile = (int)blockIdx.x / VECTORS, v = (int)blockIdx.x % VECTORS, j = v / (SUMS / 4), e = v % (SUMS / 4);
    const float4* from = states + ((i64)tile * parts * VECTORS + v) * THREADS + own;
    if (8 * e + 2 * (lane & 3) >= rows) return;
    float4 x[STREAM_PARTS];
#pragma unroll
    for (int p = 0; p < STREAM_PARTS; ++p)
        if (p < parts) x[p] = sums_of_others(from + (i64)p * VECTORS * THREADS);
#pragma unroll
    for (int p = 1; p < STREAM_PARTS; ++p)
        if (p < parts) x[0].x += x[p].x, x[0].y += x[p].y, x[0].z += x[p].z, x[0].w += x[p].w;
    int wide = columns < HERE ? (int)columns : HERE;
    i64 left = (i64)tile * HERE;
    left = left + wide <= columns ? left : columns - wide;
    const float sums[4] = {x[0].x, x[0].y, x[0].z, x[0].w};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int c = (unit * 4 + first + j) * 16 + 8 * h + g;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int row = 8 * e + 2 * (lane & 3) + i;
            if (row < rows && c < wide)
                ((unsigned short*)out)[row * columns + left + c] =
                    (unsigned short)pair<KIND>(W::last(sums[2 * h + i], left + c, factors, bias), 0.0f);
        }
    }
}

#define MARLIN_STREAM(NAME, FORMAT, ROWS)                                                                             \
    extern "C" __global__ void __launch_bounds__(128 + 128 * STREAM_GROUPS, 1) NAME##_run_##ROWS(STREAM_PARAMETERS) { \
        marlin_stream<FORMAT, ROWS, false>(STREAM_NAMES);                                                             \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128 + 128 * STREAM_GROUPS, 1) NAME##_split_##ROWS(STREAM_PARAMETERS) { \
        marlin_stream<FORMAT, ROWS, true>(STREAM_NAMES);                                                              \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128 * STREAM_GROUPS)                                                 \
        NAME##_join_##ROWS(i64 rows, i64 columns, i64 parts, const float4* states, const void* factors,               \
                           const void* bias, void* out) {                                                             \
        marlin_join<FORMAT, ROWS>(rows, columns, parts, states, factors, bias, out);                                  \
    }
#endif
