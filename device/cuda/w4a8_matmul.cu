// Products of e4m3 activations with weights of 4 bits that are entries of their scales' tables, dense and by experts.
//
// The ladder:
// 1. exact_w4a8: MIRROR's order, on any GPU, a thread a result.
// 2. w4a8_*: tensor cores of 8-bit operands, sm_89 and later. The weights are their rows: a lane's two words are the codes of
//    its registers, and three byte permutations look four of them up. K is cut into eight chains of whole groups whatever
//    the number of tokens; a warp has one chain's tiles of 16 columns, and a ring of copies of its own. So decode steps have
//    bytes under way in eight places at once, no warp waits for another before the end, and a row has its bytes in any batch.
// 3. Experts: each block has one expert's columns and strides over its rows, so nothing is read back or counted.
// 4. w4a8_loaded_*: Hopper, whose m16n8k32 unpacks e4m3 into float16 first. There the products are by the warp group, for any
//    number of rows, since their sums differ from those of the warp: w4a8_loaded.cuh. With one warp to send for the 5 to 30
//    KiB of a stage, kernels without look-ups took as long as those without products, so four send. Multiplying by powers of
//    two instead of shifting was slower, and so was sharing rows in clusters of two blocks. One lane of the four warps asks for
//    all of a stage: lanes that ask for a piece each take turns. With many experts tiles of 128 or 256 columns are faster than
//    turns, for they have fewer stages. Adding one half of a tile's rows up while the other is multiplied was no faster, nor
//    were looking one product up at a time with three under way, and two accumulators in turn (which the compiler undoes).
//    While wgmma keeps its sums in registers, every other instruction costs its scheduler two cycles, so that at 128 rows a
//    tile 16 of them for a product of 32 k are free, and each further one delays the products: the fewer, the faster.
// 5. Tiles of 256 rows, whose products keep the tensor cores busy: at 2048 rows they take 290 thousand cycles, 262 of them
//    products, where those of 176 rows take 340. Half of the totals are in shared memory, which takes 30 thousand more
//    with chains of 8 stages, and 70 with chains of 4. Neither clusters of two blocks, which share rows, nor one group ahead of the other is faster.
#include "mma.cuh"
#include "w4a8_tables.cuh"

#define GROUP 128
#define PARTS 8

// Where an expert's rows begin and how many it has, within those that there are; all rows where no offsets are given.
struct Own { i64 first, count; };
VT_FN Own rows_of(const i64* offsets, const int* sizes, i64 expert, i64 rows) {
    if (offsets == nullptr) return {0, rows};
    i64 first = offsets[expert], count = sizes[3 * expert + 1];
    if (first < 0 || first > rows || count < 0) return {0, 0};
    return {first, count < rows - first ? count : rows - first};
}
VT_FN i64 expert_of(const i64* offsets, const int* sizes, i64 experts, i64 rows, i64 row) {
    for (i64 e = 0; e < experts; ++e) {
        Own own = rows_of(offsets, sizes, e, rows);
        if (row >= own.first && row < own.first + own.count) return e;
    }
    return -1;
}

#define W4A8_PARAMETERS                                                                                                \
    i64 rows, i64 columns, i64 depth, i64 experts, const unsigned char *a, const unsigned *words,                 \
        const unsigned char *tables, const float *channel, const float *token, const i64 *offsets,                \
        const int *sizes, unsigned short *out

// A block has 128 columns of a row.
extern "C" __global__ void __launch_bounds__(128) exact_w4a8(W4A8_PARAMETERS) {
    i64 row = blockIdx.x / (columns / 128), n = blockIdx.x % (columns / 128) * 128 + threadIdx.x;
    i64 expert = expert_of(offsets, sizes, experts, rows, row);
    float x[1] = {0.0f};
    if (expert >= 0) {
        const unsigned* own = words + expert * (depth / 8) * columns;
        const unsigned char* table = tables + expert * (depth / GROUP) * columns * 8;
        float dot = 0.0f;
        for (int chain = 0; chain < 32 && chain * 16 < depth; ++chain) {
            float sum = 0.0f;
            for (i64 begin = chain * 16; begin < depth; begin += 512)
                for (i64 k = begin; k < begin + 16; ++k) {
                    unsigned code = own[word_of(k, n, columns)] >> 4 * nibble_of(k, n) & 15u;
                    unsigned entry = table[(k / GROUP * columns + n) * 8 + (code & 7u)];
                    unsigned weight = code & 8u ? entry : code ? entry ^ 0x80u : 0u;
                    sum = vt_fma(e4m3_value(a[row * depth + k]), e4m3_value(weight), sum);
                }
            dot += sum;
        }
        x[0] = channel[expert * columns + n] * (token[row] * dot);
    }
    store(out, row * columns + n, x, BF16);
}

// Rows that no expert has are zeros; a block a row.
extern "C" __global__ void __launch_bounds__(128)
    w4a8_left_out(i64 rows, i64 columns, i64 experts, const i64* offsets, const int* sizes, unsigned short* out) {
    if (expert_of(offsets, sizes, experts, rows, blockIdx.x) >= 0) return;
    for (i64 n = threadIdx.x; n < columns; n += 128) out[blockIdx.x * columns + n] = 0;
}

#if !defined(__CUDACC__) || __CUDA_ARCH__ >= 890

#ifdef __CUDACC__
// c += a b, 16 rows x 32 k by 8 columns, as `multiply` with four codes where that has two elements.
VT_FN void multiply_e4m3(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#else
static inline void multiply_e4m3(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    using namespace emulation;
    int lane = running->number & 31, g = lane >> 2, t = lane & 3;
    const Operands* lanes = operands.lanes({{a[0], a[1], a[2], a[3]}, {b0, b1}});
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 32; ++k) {
            int from = (k & 15) >> 2, upper = k >> 4, shift = 8 * (k & 3);
            float x = e4m3_value(lanes[4 * g + from].a[2 * upper + (i >> 1)] >> shift & 0xffu);
            float y = e4m3_value(lanes[4 * (2 * t + (i & 1)) + from].b[upper] >> shift & 0xffu);
            c[i] += x * y;
        }
    operands.close();
}
#endif

// A block has 16 TILES columns of an expert and of its rows every `high`-th stretch of 8 EIGHTS.
template <int EIGHTS, int TILES, int STAGES> VT_FN void w4a8(W4A8_PARAMETERS, i64 high, i64 vectors) {
    VT_SHARED(memory);
    constexpr int ROWS = 8 * EIGHTS, COLUMNS = 16 * TILES, PITCH = COLUMNS + 4, STEPS = EIGHTS == 1 ? 2 : 1;
    constexpr int WORDS_AT = ROWS * 128, TABLES_AT = WORDS_AT + TILES * 1024, STAGE = TABLES_AT + TILES * 128;
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, team = threadIdx.x >> 5, teams = blockDim.x >> 5;
    float* total = (float*)memory;
    char* ring = (char*)memory + ROWS * PITCH * 4 + team * STAGES * STAGE;
    i64 across = columns / COLUMNS, rest = blockIdx.x / high, expert = rest / across, left = rest % across * COLUMNS;
    int groups = (int)(depth / GROUP), length = (groups + PARTS - 1) / PARTS;
    Own own = rows_of(offsets, sizes, expert, rows);
    const char* codes = (const char*)(words + expert * (depth / 8) * columns) + left * 16;
    const char* scales = (const char*)tables + (expert * groups * columns + left) * 8;
    for (i64 top = blockIdx.x % high * ROWS; top < own.count; top += high * ROWS) {
        const unsigned char* first_row = a + (own.first + top) * depth;
        auto send = [&](int group, int slot) {
            char* to = ring + slot * STAGE;
            int row = lane / 8, v = lane & 7, real = (int)(own.count - top < ROWS ? own.count - top : ROWS);
            const unsigned char* from = first_row + row * depth + group * GROUP + v * 16;
#pragma unroll 2
            for (int i = 0; i < 2 * EIGHTS; ++i, row += 4, from += 4 * depth)
                copy_or_zero(to + swizzled<8>(row, v), from, row < real);
#pragma unroll 1
            for (int s = 0; s < 4; ++s)
#pragma unroll
                for (int h = 0; h < TILES / 2; ++h) {
                    int at = (lane + 32 * h) * 16;
                    copy_or_zero(to + WORDS_AT + s * TILES * 256 + at, codes + (i64)(group * 4 + s) * columns * 16 + at, true);
                }
            if (lane < 8 * TILES) copy_or_zero(to + TABLES_AT + lane * 16, scales + (i64)group * columns * 8 + lane * 16, true);
        };
        for (int part = team; part < PARTS; part += teams) {
            float sum[TILES][EIGHTS][4] = {};
            int begin = part * length, end = begin + length < groups ? begin + length : groups, count = end - begin;
#pragma unroll
            for (int s = 0; s < STAGES - 1; ++s) {
                if (s < count) send(begin + s, s);
                copies_close();
            }
            for (int i = 0; i < count; ++i) {
                copies_wait<STAGES - 2>();
                warp_meets();
                if (i + STAGES - 1 < count) send(begin + i + STAGES - 1, (i + STAGES - 1) % STAGES);
                copies_close();
                const char* here = ring + i % STAGES * STAGE;
#pragma unroll 1
                for (int s = 0; s < 4; s += STEPS) {
                    unsigned right[EIGHTS][2 * STEPS];
                    if constexpr (EIGHTS == 1) {
                        fetch_matrices(right[0], here + swizzled<8>(lane & 7, 2 * s + (lane >> 3)));
                    } else {
#pragma unroll
                        for (int e = 0; e < EIGHTS; e += 2) {
                            unsigned two[4];
                            fetch_matrices(two, here + swizzled<8>(8 * (e + (lane >> 4)) + (lane & 7), 2 * s + (lane >> 3 & 1)));
                            right[e][0] = two[0], right[e][1] = two[1], right[e + 1][0] = two[2], right[e + 1][1] = two[3];
                        }
                    }
#pragma unroll
                    for (int j = 0; j < TILES; ++j) {
                        Table low, up;
                        low.fetch(here + TABLES_AT + (16 * j + g) * 8);
                        up.fetch(here + TABLES_AT + (16 * j + g + 8) * 8);
#pragma unroll
                        for (int one = 0; one < STEPS; ++one) {
                            uint2 q = *(const uint2*)(here + WORDS_AT + ((s + one) * TILES + j) * 256 + lane * 8);
                            unsigned weights[4];
                            look_up_eight(q.x, low, up, weights[0], weights[1]);
                            look_up_eight(q.y, low, up, weights[2], weights[3]);
#pragma unroll
                            for (int e = 0; e < EIGHTS; ++e)
                                multiply_e4m3(sum[j][e], weights, right[e][2 * one], right[e][2 * one + 1]);
                        }
                    }
                }
            }
            copies_wait<0>();
            warp_meets();
            for (int turn = 0; turn < teams; ++turn) {  // parts are added up from the first one on
                if (turn == team)
#pragma unroll
                    for (int j = 0; j < TILES; ++j)
#pragma unroll
                        for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                float* at = total + (8 * e + 2 * t + (i & 1)) * PITCH + 16 * j + g + 8 * (i >> 1);
                                *at = part ? *at + sum[j][e][i] : sum[j][e][i];
                            }
                __syncthreads();
            }
        }
        for (int at = threadIdx.x; at < ROWS * COLUMNS / 8; at += blockDim.x) {
            int m = at / (COLUMNS / 8), c = at % (COLUMNS / 8) * 8;
            if (top + m >= own.count) break;
            i64 row = own.first + top + m, to = row * columns + left + c;
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = channel[expert * columns + left + c + i] * (token[row] * total[m * PITCH + c + i]);
            if (vectors) {
                store(out, to, x, BF16);
            } else {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    float one[1] = {x[i]};
                    store(out, to + i, one, BF16);
                }
            }
        }
        __syncthreads();
    }
}

#define W4A8_PLAIN(EIGHTS, TILES, STAGES, BLOCKS)                                                                        \
    extern "C" __global__ void __launch_bounds__(256, BLOCKS) w4a8_##EIGHTS(W4A8_PARAMETERS, i64 high, i64 vectors) {          \
        w4a8<EIGHTS, TILES, STAGES>(rows, columns, depth, experts, a, words, tables, channel, token, offsets, sizes,      \
                                    out, high, vectors);                                                                  \
    }
W4A8_PLAIN(1, 2, 4, 2)
W4A8_PLAIN(2, 2, 3, 2)
W4A8_PLAIN(4, 4, 3, 1)
#endif

#include "w4a8_loaded.cuh"
#if VT_TILES

#define W4A8_LOADED(TOKENS, ACROSS, TURNS, ...)                                                                           \
    extern "C" __global__ void __launch_bounds__(128 + 128 * ACROSS * TURNS, 1)                                           \
        w4a8_loaded_##TOKENS##_##ACROSS(VT_MAP rows_map, W4A8_PARAMETERS, i64 vectors, i64 grid) {                        \
        VT_SHARED(room);                                                                                                  \
        w4a8_loaded<TOKENS, ACROSS, TURNS, __VA_ARGS__>(rows_map, rows, columns, depth, experts, a, words, tables,        \
                                                        channel, token, offsets, sizes, out, (int)vectors, (int)grid, room);\
    }
W4A8_LOADED(16, 1, 4, 26)
W4A8_LOADED(16, 4, 1, 10)
W4A8_LOADED(32, 1, 3, 20)
W4A8_LOADED(32, 2, 2, 13)
W4A8_LOADED(32, 4, 1, 8)
W4A8_LOADED(64, 1, 2, 13)
W4A8_LOADED(64, 2, 1, 11)
W4A8_LOADED(128, 2, 1, 7)
W4A8_LOADED(176, 2, 1, 5)
W4A8_LOADED(256, 2, 1, 3, 64)
#endif
