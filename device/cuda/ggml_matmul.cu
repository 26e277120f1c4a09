// Products of rows with weights that stay in ggml's blocks: integers within a block, the mirror's order between blocks.
//
// The ladder: (1) Rows of `a` become codes once, in scratch, laid out as the lanes of a warp read them: 1,024 values are
// two planes of 16 bytes a lane; where sums run in eight lanes, a word holds four values of one. (2) A warp has a row of
// the weight and walks down it by 1,024 values, a unit of 32 each lane: the bytes go to shared memory 16 at a time,
// whatever their blocks' size, and two turns ahead, so that every sector is asked for once and in one piece. (3) A
// unit's codes meet up to four rows of `a`, four products an instruction. (4) Blocks of 256 are the eight units of eight
// lanes: their integers meet by shuffles, each lane ends with one of the eight sums, and all lanes run through the
// turn's four blocks in order. (5) Blocks of 32 have a term a lane: terms of eight rows are left in shared memory, and a
// thread for each adds them in order while the other warps are on their way. (6) One row of `a`: a block a
// multiprocessor has its share of the weight's rows, codes that row for itself while the first of them are on their way,
// and lanes keep its codes, or the tensor cores unfold the eight lanes: ggml_pairs.cuh and ggml_tiles.cuh.
#include "ggml_pairs.cuh"
#include "ggml_tiles.cuh"

constexpr int WARPS = 8, STAGES = 3, PIECES = 70, TURNS = 2;  // TURNS: whose terms are added at once

// Where the codes of `unit` of a row begin: its first half; the other is 512 bytes further.
VT_FN i64 place_of(i64 row, i64 turns, i64 unit) { return (row * turns + unit / 32) * 1024 + (unit & 31) * 16; }

// Blocks of 32, four lanes each; beside them Q8_1's sum.
extern "C" __global__ void __launch_bounds__(256)
    ggml_codes_32(i64 count, i64 blocks, const void* a, i64 stride, i64 kind, i64 wide, u8* codes, float* scales,
                  float* sums, i64) {
    i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) / 4;
    bool inside = at < count;
    i64 block = inside ? at : count - 1, row = block / blocks, unit = block % blocks;
    int lane = threadIdx.x & 3;
    float x[8];
    load_eight(x, a, row * stride + unit * 32 + 8 * lane, (int)kind, wide != 0);
    Codes c = codes_32(x);
#pragma unroll
    for (int m = 1; m <= 2; m *= 2) c.total += __shfl_xor_sync(ALL, c.total, m);
    if (!inside) return;
    unsigned* to = (unsigned*)(codes + place_of(row, (blocks + 31) / 32, unit) + lane / 2 * 512) + lane % 2 * 2;
    to[0] = packed4(c.code[0], c.code[1], c.code[2], c.code[3]);
    to[1] = packed4(c.code[4], c.code[5], c.code[6], c.code[7]);
    if (lane == 0) {
        scales[block] = widen_f16(f16_of(c.d));
        sums[block] = widen_f16(f16_of_sum(c.d, c.total));
    }
}

// Blocks of 256, a warp each; beside them the sums of a unit's halves. `apart`: by lanes of sums.
extern "C" __global__ void __launch_bounds__(256)
    ggml_codes_256(i64 count, i64 blocks, const void* a, i64 stride, i64 kind, i64 wide, u8* codes, float* scales,
                   unsigned* sums, i64 apart) {
    i64 block = ((i64)blockIdx.x * 256 + threadIdx.x) / 32;
    if (block >= count) return;
    i64 row = block / blocks, unit = block % blocks * 8 + (threadIdx.x & 31) / 4;
    int lane = threadIdx.x & 31, part = lane & 3;
    float x[8];
    load_eight(x, a, row * stride + block % blocks * 256 + 8 * lane, (int)kind, wide != 0);
    Codes c = codes_256(x);
    u8* to = codes + place_of(row, (blocks + 3) / 4, unit);
    if (apart) {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i / 4 * 512 + 4 * (i & 3) + part] = (u8)c.code[i];
    } else {
        unsigned* words = (unsigned*)(to + part / 2 * 512) + part % 2 * 2;
        words[0] = packed4(c.code[0], c.code[1], c.code[2], c.code[3]);
        words[1] = packed4(c.code[4], c.code[5], c.code[6], c.code[7]);
    }
    int half = c.total + __shfl_xor_sync(ALL, c.total, 1), other = __shfl_xor_sync(ALL, half, 2);
    if (part == 0) sums[row * blocks * 8 + unit] = (half & 0xffff) | (unsigned)other << 16;
    if (lane == 0) scales[block] = c.d;
}

// Four neighbours of four units of eight -> the four values of each place.
VT_FN void transpose(unsigned (&t)[8], int at, unsigned a, unsigned b, unsigned c, unsigned d) {
    unsigned low = permute(a, b, 0x5140), high = permute(a, b, 0x7362);
    unsigned low2 = permute(c, d, 0x5140), high2 = permute(c, d, 0x7362);
    t[at] = permute(low, low2, 0x5410);
    t[at + 1] = permute(low, low2, 0x7632);
    t[at + 2] = permute(high, high2, 0x5410);
    t[at + 3] = permute(high, high2, 0x7632);
}

VT_FN int over_eight(int x) {
#pragma unroll
    for (int m = 1; m <= 4; m *= 2) x += __shfl_xor_sync(ALL, x, m);
    return x;
}

// Eight sums of eight lanes: lane u is left with the u-th over all of them.
VT_FN int scattered(int (&part)[8], int u) {
#pragma unroll
    for (int m = 4; m >= 1; m /= 2) {
        bool upper = (u & m) != 0;
#pragma unroll
        for (int c = 0; c < m; ++c) {
            int give = upper ? part[c] : part[c + m], keep = upper ? part[c + m] : part[c];
            part[c] = keep + __shfl_xor_sync(ALL, give, m);
        }
    }
    return part[0];
}

struct Product {
    i64 rows, columns, units, stride, out_stride;
    const u8* b;
    const uint4* codes;
    const float* scales;
    const unsigned* sums;
    void* out;
    int kind;
};

// A row of the weight on its way into shared memory, a turn at a time; nothing past the row is touched.
template <int TYPE> struct Bytes {
    static constexpr int CHUNK = Block<TYPE>::BYTES * (Block<TYPE>::LARGE ? 4 : 32);
    const u8* from;  // the 16 bytes that the row begins in
    int skew, end;   // where the row begins and ends after `from`

    VT_MEMBER Bytes(const u8* row, int blocks) {
        skew = (int)((unsigned long long)row & 15);
        from = row - skew;
        end = skew + blocks * Block<TYPE>::BYTES;
    }
    VT_MEMBER void send(int turn, uint4* to, int lane) const {
        int begin = CHUNK % 16 ? (skew + turn * CHUNK) & ~15 : turn * CHUNK, last = skew + (turn + 1) * CHUNK;
        last = last < end ? last : end;
#pragma unroll
        for (int i = 0; i * 512 < CHUNK + 30; ++i) {
            int at = begin + 16 * (lane + 32 * i);
            if (at >= last) continue;
            uint4* there = to + lane + 32 * i;
            if (at + 16 <= end) {
                copy_async(there, from + at);
            } else {
                unsigned short* halves = (unsigned short*)there;
                for (int b = 0; at + b < end; b += 2) halves[b / 2] = *(const unsigned short*)(from + at + b);
            }
        }
    }
    VT_MEMBER int begin(int turn) const { return CHUNK % 16 ? (skew + turn * CHUNK) & 15 : skew; }
};

template <int TYPE, int M> VT_MEMBER void product(const Product& p) {
    using B = Block<TYPE>;
    constexpr int RUN = TURNS * 32 + 1;
    __shared__ uint4 stage[WARPS][STAGES][PIECES];
    __shared__ float terms[B::LARGE ? 1 : 2][WARPS][M][B::LARGE ? 1 : RUN];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, units = (int)p.units;
    unsigned groups = (unsigned)((p.rows + M - 1) / M), tile = blockIdx.x / groups;
    i64 first = (i64)(blockIdx.x - tile * groups) * M, top = (i64)tile * WARPS;
    i64 column = top + warp < p.columns ? top + warp : p.columns - 1;
    int turns = (units + 31) / 32, blocks = B::LARGE ? units / 8 : units;
    Bytes<TYPE> bytes(p.b + column * p.stride, blocks);
    unsigned a_row[M];
    float sum[M], low[M];
#pragma unroll
    for (int m = 0; m < M; ++m) {
        a_row[m] = (unsigned)(first + m < p.rows ? first + m : p.rows - 1);
        sum[m] = low[m] = 0.0f;
    }
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < turns) bytes.send(s, stage[warp][s], lane);
        copies_close();
    }
    int slot = 0;
    for (int turn = 0; turn < turns; ++turn) {
        copies_wait<STAGES - 2>();
        warp_meets();
        int next = turn + STAGES - 1;
        if (next < turns) bytes.send(next, stage[warp][slot == 0 ? STAGES - 1 : slot - 1], lane);
        copies_close();
        // Lanes past the end repeat the last unit; nobody looks at what they find.
        unsigned mine = (unsigned)(units - 1 - turn * 32 < lane ? units - 1 - turn * 32 : lane);
        unsigned unit = (unsigned)turn * 32 + mine, block = B::LARGE ? unit / 8 : unit;
        bool live = mine == (unsigned)lane;
        unsigned q[8], t[8];
        Scales k;
        const u8* held = (const u8*)stage[warp][slot] + bytes.begin(turn);
        take_apart<TYPE>(q, k, held + (B::LARGE ? mine / 8 : mine) * B::BYTES, (int)(mine & 7));
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        if constexpr (B::LANES) {
            transpose(t, 0, q[0], q[2], q[4], q[6]);
            transpose(t, 4, q[1], q[3], q[5], q[7]);
        }
#pragma unroll
        for (int m = 0; m < M; ++m) {
            unsigned codes = (a_row[m] * turns + turn) * 64 + mine;
            uint4 x = p.codes[codes], y = p.codes[codes + 32];
            float d = p.scales[a_row[m] * blocks + block];
            unsigned halves = 0;
            if constexpr (B::MINIMUM) halves = p.sums[a_row[m] * units + unit];
            const unsigned w[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
            int minimum = 0;
            if constexpr (B::LARGE && B::MINIMUM) {
                minimum = over_eight(k.m[0] * (int)(short)halves + k.m[1] * (int)(short)(halves >> 16));
            }
            if constexpr (B::LANES) {
                int part[8];
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    if constexpr (TYPE == Q4_K || TYPE == Q5_K) {
                        part[c] = k.s[0] * dot4(t[c], w[c], 0);
                    } else {
                        int one = dot4(t[c] & 0xffffu, w[c], 0), two = dot4(t[c] & 0xffff0000u, w[c], 0);
                        part[c] = k.s[0] * one + k.s[1] * two;
                    }
                }
                float term = (k.d * d) * (float)scattered(part, lane & 7), off = (k.dmin * d) * (float)minimum;
                term = live ? term : 0.0f;  // sums begin at +0 and are never -0: to add it changes nothing
                off = live ? off : 0.0f;
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    sum[m] = sum[m] + __shfl_sync(ALL, term, 8 * b + (lane & 7));
                    if constexpr (B::MINIMUM) low[m] = low[m] - __shfl_sync(ALL, off, 8 * b);
                }
            } else {
                int one = 0, two = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    one = dot4(q[i], w[i], one);
                    two = dot4(q[i + 4], w[i + 4], two);
                }
                float term;
                if constexpr (B::LARGE) {
                    float i = (float)over_eight(k.s[0] * one + k.s[1] * two);
                    if constexpr (B::MINIMUM) term = (d * k.d) * i - (d * k.dmin) * (float)minimum;
                    else term = i * (k.d * d);
                    term = live ? term : 0.0f;
#pragma unroll
                    for (int b = 0; b < 4; ++b) sum[m] = sum[m] + __shfl_sync(ALL, term, 8 * b);
                } else {
                    float i = (float)(one + two);
                    if constexpr (B::MINIMUM) term = (k.d * d) * i - k.dmin * vt_float((int)halves);
                    else if constexpr (TYPE == Q4_0) term = (i * k.d) * d;
                    else term = i * (k.d * d);
                    terms[turn / TURNS & 1][warp][m][turn % TURNS * 32 + lane] = term;
                }
            }
        }
        if constexpr (!B::LARGE) {
            if (turn % TURNS == TURNS - 1 || turn + 1 == turns) {
                __syncthreads();
                if (threadIdx.x < WARPS * M) {
                    const float* run = terms[turn / TURNS & 1][threadIdx.x & (WARPS - 1)][threadIdx.x / WARPS];
                    int left = units - turn / TURNS * TURNS * 32, count = left < TURNS * 32 ? left : TURNS * 32;
#pragma unroll 8
                    for (int i = 0; i < count; ++i) sum[0] = sum[0] + run[i];
                }
            }
        }
    }
    if constexpr (B::LARGE) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            float total = B::LANES ? low[m] : sum[m] * B::FOLD;
            if constexpr (B::LANES) {
#pragma unroll
                for (int c = 0; c < 8; ++c) total = total + __shfl_sync(ALL, sum[m], c);
            }
            float one[1] = {total};
            if (lane == 0 && top + warp < p.columns && first + m < p.rows) {
                store(p.out, (first + m) * p.out_stride + top + warp, one, p.kind);
            }
        }
    } else if (threadIdx.x < WARPS * M) {
        i64 n = top + (threadIdx.x & (WARPS - 1)), m = first + threadIdx.x / WARPS;
        float one[1] = {sum[0]};
        if (n < p.columns && m < p.rows) store(p.out, m * p.out_stride + n, one, p.kind);
    }
}

#define PRODUCT(name, bounds, TYPE, M)                                                                                \
    extern "C" __global__ void bounds name(i64 rows, i64 columns, i64 units, const u8* b, i64 stride,                 \
                                           const uint4* codes, const float* scales, const unsigned* sums, void* out,  \
                                           i64 out_stride, i64 kind) {                                                \
        product<TYPE, M>({rows, columns, units, stride, out_stride, b, codes, scales, sums, out, (int)kind});         \
    }
#define ROW(name, FORM, WARPS_, TYPE)                                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * WARPS_, 1)                                                      \
        name(i64 columns, i64 depth, const void* a, i64 a_kind, const u8* b, i64 stride, void* out, i64 kind,         \
             i64 blocks, i64 slots) {                                                                                 \
        FORM<TYPE>({columns, depth, a, a_kind, b, stride, out, kind}, (int)blocks, (int)slots);                       \
    }
#define PRODUCTS(name, TYPE, FORM)                        \
    PRODUCT(name##_1, __launch_bounds__(256), TYPE, 1)    \
    PRODUCT(name##_4, __launch_bounds__(256, 2), TYPE, 4) \
    ROW(name##_row, FORM, FORM##_warps, TYPE)
constexpr int in_pairs_warps = CREW, in_tiles_warps = CREW + SENDERS + ADDERS;

PRODUCTS(ggml_q4_0, Q4_0, in_pairs)
PRODUCTS(ggml_q4_1, Q4_1, in_pairs)
PRODUCTS(ggml_q5_0, Q5_0, in_pairs)
PRODUCTS(ggml_q5_1, Q5_1, in_pairs)
PRODUCTS(ggml_q8_0, Q8_0, in_pairs)
PRODUCTS(ggml_q2_k, Q2_K, in_tiles)
PRODUCTS(ggml_q3_k, Q3_K, in_tiles)
PRODUCTS(ggml_q4_k, Q4_K, in_tiles)
PRODUCTS(ggml_q5_k, Q5_K, in_tiles)
PRODUCTS(ggml_q6_k, Q6_K, in_tiles)
PRODUCTS(ggml_iq2_xxs, IQ2_XXS, in_tiles)
PRODUCTS(ggml_iq3_xxs, IQ3_XXS, in_tiles)

// Weights in Q8_K, which no activation meets as integers: an element a thread, one fma a value.
extern "C" __global__ void __launch_bounds__(256)
    ggml_q8_k(i64 count, i64 columns, i64 depth, const void* a, i64 a_stride, i64 a_kind, const u8* b, i64 stride,
              void* out, i64 out_stride, i64 kind) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    const u8* row = b + at % columns * stride;
    float sum[1] = {0.0f};
    for (i64 k = 0; k < depth; ++k) {
        const u8* block = row + k / 256 * 292;
        float x[1];
        load(x, a, at / columns * a_stride + k, (int)a_kind);
        sum[0] = vt_fma(x[0], *(const float*)block * (float)(signed char)block[4 + k % 256], sum[0]);
    }
    store(out, at / columns * out_stride + at % columns, sum, (int)kind);
}
