// What a chunk needs before the states are known, in one go: running sums G of the gates, A = beta K K^T and P = scale
// Q K^T with their decays, X = (I + A)^-1, the factors w = X (beta 2^G k) and u = X (beta v), and what the states and
// the outputs take, kg = 2^(G_last - G) k and qg = 2^G scale q. A block a chunk and head, eight warps.
//
// A pair i > j decays by 2^(G_i - G_j) in each channel, which no factor of i alone and one of j alone make without
// 2^-G_j, which overflows. But for a token m between them both 2^(G_i - G_m) and 2^(G_m - G_j) are at most one. So the
// triangle is cut in halves: of a span of 2 S tokens the later S times the earlier S are a product through m, the first
// of the later ones; what is left are two spans of S. Keys and queries of eight later tokens share their decays, and an
// `a`. Below S = 8 these eight are the later tokens of 8 / S spans, each S of them with columns of their own. Factors
// are float32 in two bfloat16 halves, as A and X are in gdn_prepare.cuh: 2^-16 of what is summed up.
//
// The ladder:
// 1. Spans of 1 to 32 alike, each warp with the factors that it needs: at S = 16 and 32 most were made more than once.
// 2. Half of the warps take S = 32, 8 and 4, half 16, 2, 1 and the diagonal, so that few are; S = 1 is its own middle,
//    and addresses are one exclusive or. A quarter of all instructions less.
#pragma once
#include "gdn_prepare.cuh"
#include "kda_decay.cuh"

#define PREPARING 256      // device/kda_chunk_states.py
#define APART (WIDTH + 8)  // floats from a token's sums to the next one's

// 2^(from - to) of eight neighbours.
VT_FN void fades(float (&f)[8], const float* from, const float* to) {
    float x[8], y[8];
    load(x, from, 0, F32);
    load(y, to, 0, F32);
#pragma unroll
    for (int j = 0; j < 8; ++j) f[j] = fast_exp2(x[j] - y[j]);
}

// Two float32 in two halves each, as `split`.
VT_FN void halves(unsigned& high, unsigned& low, float x, float y) {
    high = pair<BF16>(x, y);
    low = pair<BF16>(x - vt_float((int)(high << 16)), y - vt_float((int)(high & 0xffff0000u)));
}

struct Decayed {
    const unsigned char* keys;  // and the queries after them
    const float* sums;

    // 2^(G_from - G_to) for the lane's elements of a step over d: two neighbours, and two of the vector after.
    VT_MEMBER void fade(float (&f)[4], const float* from, const float* to, int d) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint2 x = *(const uint2*)(from + 16 * d + 8 * half), y = *(const uint2*)(to + 16 * d + 8 * half);
            f[2 * half] = fast_exp2(vt_float((int)x.x) - vt_float((int)y.x));
            f[2 * half + 1] = fast_exp2(vt_float((int)x.y) - vt_float((int)y.y));
        }
    }
    VT_MEMBER const float* sums_of(int row) const { return sums + row * APART + (lane_of() & 3) * 2; }

    // The lane's two neighbours of a row's vector v, from `at`, where those of vector 0 are.
    VT_MEMBER unsigned two(const unsigned char* tile, int at, int v) const {
        return *(const unsigned*)(tile + (at ^ v * 16));
    }
    VT_MEMBER int place(int row) const { return swizzled<ROW>(row, 0) + (lane_of() & 3) * 4; }

    VT_MEMBER static void take(unsigned& high, unsigned& low, unsigned bits, float f, float g) {
        halves(high, low, vt_float((int)(bits << 16)) * f, vt_float((int)(bits & 0xffff0000u)) * g);
    }

    // c += keys, then queries, of the lane's row `later` times keys of its rows `earlier`, `earlier` + 8 ... through
    // `middle`; where that is `later` itself (not FADES) these are taken as they are.
    template <int MANY, bool FADES>
    VT_MEMBER void multiply_pairs(float (&c)[MANY][4], int later, int middle, int earlier) const {
        const float *own = sums_of(later), *between = sums_of(middle), *others = sums_of(earlier);
        int left = place(later), right = place(earlier);
#pragma unroll 2
        for (int d = 0; d < WIDTH / 16; ++d) {
            float f[4];
            unsigned high[4], low[4] = {};
            if (FADES) fade(f, own, between, d);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                high[i] = two(i & 1 ? keys + TILE : keys, left, 2 * d + (i >> 1));
                if (FADES) take(high[i], low[i], high[i], f[i & 2], f[(i & 2) + 1]);
            }
#pragma unroll
            for (int m = 0; m < MANY; ++m) {
                unsigned b[4];
                fade(f, between, others + 8 * m * APART, d);
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    take(b[i], b[2 + i], two(keys + 8 * m * ROW * 16, right, 2 * d + i), f[2 * i], f[2 * i + 1]);
                multiply<BF16>(c[m], high, b[0], b[1]);
                multiply<BF16>(c[m], high, b[2], b[3]);
                if (FADES) multiply<BF16>(c[m], low, b[0], b[1]);
            }
        }
    }
};

// Where the pairs go: A in halves below its blocks on the diagonal, these in float32 column by column, and P rounded.
struct Triangle {
    Square A;
    unsigned char* P;
    const float* strength;
    float scale;

    // In A's first 16 rows, of which nothing else is kept.
    VT_MEMBER float* diagonal(int block) const {
        return (float*)((block < 2 ? A.high : A.low) + (block & 1) * BLOCK_BYTES);
    }
    VT_MEMBER void put_weight(int row, int column, float x) const {
        unsigned bits = narrow_bf16(x * scale, 0.0f);
        *(unsigned short*)(P + swizzled<8>(row, column >> 3) + (column & 7) * 2) = (unsigned short)bits;
    }
    // Of a product's eight columns, those of the lane's own span of 2 S.
    VT_MEMBER void put_near(const float (&c)[4], int block, int later, int middle, int S) const {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            int n = (lane_of() & 3) * 2 + e, j = middle - S + (n & S - 1);
            if ((n ^ lane_of() >> 2) >= S) continue;
            diagonal(block)[(j - 16 * block) * 16 + later - 16 * block] = c[e] * strength[later];
            put_weight(later, j, c[2 + e]);
        }
    }
    // The tokens of a block themselves, which do not decay.
    VT_MEMBER void put_own(const unsigned char* keys, int block) const {
        float c[2][4] = {};
#pragma unroll
        for (int d = 0; d < WIDTH / 16; ++d) {
            unsigned a[4], b[4];
            fetch_matrices(a, tall<ROW>(keys + TILE, 16 * block, 2 * d));
            fetch_matrices(b, flat<ROW>(keys, 16 * block, 2 * d));
            multiply<BF16>(c[0], a, b[0], b[1]);
            multiply<BF16>(c[1], a, b[2], b[3]);
        }
        int row = lane_of() >> 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if ((lane_of() & 3) * 2 + e != row) continue;
            put_weight(16 * block + row, 16 * block + row, c[0][e]);
            put_weight(16 * block + 8 + row, 16 * block + 8 + row, c[1][2 + e]);
        }
    }
    // A product's eight columns from 8 n.
    VT_MEMBER void put(const float (&c)[4], int row, int n) const {
        A.put(row, n, c[0] * strength[row], c[1] * strength[row]);
        put_pair<8>(P, row, n, pair<BF16>(c[2] * scale, c[3] * scale));
    }

    static constexpr int BLOCK_BYTES = 16 * 16 * 4;
};

// G from g1 in `tile`: two channels of 16 tokens a thread, then what comes before these.
VT_FN void sum_gates(float* sums, float* ends, float* totals, const unsigned char* tile, const float* A_log,
                     const float* dt_bias, int head, int length) {
    int two = threadIdx.x % (WIDTH / 2), part = threadIdx.x / (WIDTH / 2), channel = 2 * two;
    float fade = -vt_exp(A_log[head]), bias[2] = {}, total[2] = {}, sum[16][2];
    if (dt_bias != nullptr) {
        bias[0] = dt_bias[head * WIDTH + channel];
        bias[1] = dt_bias[head * WIDTH + channel + 1];
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        int row = 16 * part + i;
        unsigned bits = *(const unsigned*)(tile + swizzled<ROW>(row, two >> 2) + (two & 3) * 4);
        float g[2] = {fade * fast_softplus(widen_bf16(bits & 0xffffu) + bias[0]),
                      fade * fast_softplus(widen_bf16(bits >> 16) + bias[1])};
#pragma unroll
        for (int e = 0; e < 2; ++e) sum[i][e] = total[e] += row < length ? g[e] : 0.0f;
    }
    totals[part * WIDTH + channel] = total[0];
    totals[part * WIDTH + channel + 1] = total[1];
    __syncthreads();
    float before[2] = {};
    for (int p = 0; p < part; ++p)
#pragma unroll
        for (int e = 0; e < 2; ++e) before[e] += totals[p * WIDTH + channel + e];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        uint2 both = {(unsigned)vt_bits(before[0] + sum[i][0]), (unsigned)vt_bits(before[1] + sum[i][1])};
        *(uint2*)(sums + (16 * part + i) * APART + channel) = both;
        if (part == 3 && i == 15) *(uint2*)(ends + channel) = both;
    }
}

// 32 columns from vector `first` of X tile, by way of the tile's own.
VT_FN void times_columns(void* out, i64 step, int rows, const Square& X, unsigned char* tile, int first) {
    float sum[4][4][4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        unsigned b[2][4];
        fetch_transposed(b[0], tall<ROW>(tile, 16 * k, first));
        fetch_transposed(b[1], tall<ROW>(tile, 16 * k, first + 2));
#pragma unroll
        for (int m = k; m < 4; ++m) {
            unsigned a[4];
            fetch_matrices(a, tall<8>(X.high, 16 * m, 2 * k));
#pragma unroll
            for (int n = 0; n < 4; ++n) multiply<BF16>(sum[m][n], a, b[n / 2][2 * (n & 1)], b[n / 2][2 * (n & 1) + 1]);
        }
    }
    warp_meets();
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                put_pair<ROW>(tile, 16 * m + 8 * half + (lane_of() >> 2), first + n,
                              pair<BF16>(sum[m][n][2 * half], sum[m][n][2 * half + 1]));
    warp_meets();
    write_rows<ROW, 4, SIZE>(out, step, tile, 0, rows, first);
}

// A chunk's vectors as half of the block takes them in turn; `do_one(row, v, its place in a tile)`.
template <class F> VT_FN void each_vector(F do_one) {
    int thread = threadIdx.x % THREADS, v = thread % ROW;
#pragma unroll 2
    for (int row = thread / ROW; row < SIZE; row += THREADS / ROW) do_one(row, v, swizzled<ROW>(row, v));
}

extern "C" __global__ void __launch_bounds__(PREPARING, 2)
    kda_prepare(i64 heads, const void* q, const void* k, const void* v, const void* g1, const float* beta,
                const float* A_log, const float* dt_bias, const int* starts, i64 sequences, float scale, float* ends,
                void* w, void* u, void* kg, void* qg, void* P) {
    VT_SHARED(shared);
    unsigned char *keys = shared, *queries = keys + TILE, *lower = queries + TILE, *upper = lower + TILE;
    float *sums = (float*)(upper + TILE), *strength = sums + SIZE * APART;
    const Square X = {upper, upper + HALF};  // comes when g1 and P have gone
    const Triangle triangle = {{lower, lower + HALF}, upper, strength, scale};
    const Chunks chunks = {starts, nullptr, (int)sequences, SIZE};
    int number = (int)(blockIdx.x / heads), head = (int)(blockIdx.x % heads);
    const Piece piece = chunks.at(number);
    if (piece.length <= 0) return;
    int thread = threadIdx.x, lane = lane_of(), warp = warp_of(), row = lane >> 2, column = (lane & 3) * 2;
    int block = warp & 3;
    bool second = warp >= 4;
    i64 first = (i64)piece.first * heads + head, step = heads * WIDTH;
    each_vector([&](int i, int vector, int at) {
        i64 from = (first * WIDTH + i * step + vector * 8) * 2;
        bool there = i < piece.length;
        if (second) {
            copy_or_zero(upper + at, (const char*)g1 + from, there);
            copy_or_zero(queries + at, (const char*)q + from, there);
        } else {
            copy_or_zero(keys + at, (const char*)k + from, there);
        }
    });
    copies_close();
    if (thread < SIZE) strength[thread] = thread < piece.length ? beta[first + thread * heads] : 0.0f;
    copies_wait<0>();
    __syncthreads();
    float* end = ends + ((i64)number * heads + head) * WIDTH;
    sum_gates(sums, end, (float*)lower, upper, A_log, dt_bias, head, piece.length);
    const uint4 zeros = {0, 0, 0, 0};
    for (int i = thread; i < HALF / 16; i += PREPARING) ((uint4*)upper)[i] = zeros;
    __syncthreads();

    const Decayed decayed = {keys, sums};
    if (second) {
        float c[2][4] = {};
        int middle = 32 * (block >> 1) + 16, later = middle + 8 * (block & 1) + row;
        decayed.multiply_pairs<2, true>(c, later, middle, middle - 16 + row);
#pragma unroll
        for (int n = 0; n < 2; ++n) triangle.put(c[n], later, 4 * (block >> 1) + n);
    } else {
        float c[4][4] = {};
        int later = 32 + 8 * block + row;
        decayed.multiply_pairs<4, true>(c, later, 32, row);
#pragma unroll
        for (int n = 0; n < 4; ++n) triangle.put(c[n], later, n);
    }
    for (int S = second ? 2 : 8; S > (second ? 1 : 2); S >>= 1) {
        float c[1][4] = {};
        int middle = 16 * block + 2 * (row & -S) + S, later = middle + (row & S - 1);
        decayed.multiply_pairs<1, true>(c, later, middle, later - S);
        triangle.put_near(c[0], block, later, middle, S);
    }
    if (second) {
        float c[1][4] = {};
        int later = 16 * block + 2 * row + 1;
        decayed.multiply_pairs<1, false>(c, later, later, later - 1);
        triangle.put_near(c[0], block, later, later, 1);
        triangle.put_own(keys, block);
    }
    __syncthreads();
    write_rows<8, 8, 8>((char*)P + first * SIZE * 2, heads * SIZE, upper, 8 * warp, piece.length, 0);
    __syncthreads();

    if (second) {
        each_vector([&](int i, int vector, int at) {
            float x[8], sum[8];
            load(x, queries + at, 0, BF16);
            load(sum, sums + i * APART + 8 * vector, 0, F32);
#pragma unroll
            for (int j = 0; j < 8; ++j)  // an infinite sum makes NaN of its token, whose own decay is inf - inf
                x[j] = through(x[j] * scale, BF16) * fast_exp2(sum[j]) + (sum[j] - sum[j]);
            if (i < piece.length) store(qg, first * WIDTH + i * step + 8 * vector, x, BF16);
            copy_or_zero(queries + at, (const char*)v + (first * WIDTH + i * step + vector * 8) * 2, i < piece.length);
        });
        copies_close();
    } else {
        invert_block(triangle.diagonal(block), X, 16 * block);
    }
    __syncthreads();
    if (second) {
        each_vector([&](int i, int vector, int at) {
            float x[8], y[8], sum[8];
            load(x, keys + at, 0, BF16);
            fades(y, sums + (SIZE - 1) * APART + 8 * vector, sums + i * APART + 8 * vector);
            load(sum, sums + i * APART + 8 * vector, 0, F32);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                y[j] *= x[j];
                x[j] = x[j] * strength[i] * fast_exp2(sum[j]);
            }
            if (i < piece.length) store(kg, first * WIDTH + i * step + 8 * vector, y, BF16);
            store(keys + at, 0, x, BF16);
        });
    } else {
        below<1>(triangle.A, X, 16 + 32 * (warp >> 1), 32 * (warp >> 1), warp & 1);
    }
    __syncthreads();
    if (second) {
        copies_wait<0>();
        each_vector([&](int i, int, int at) {
            float x[8];
            load(x, queries + at, 0, BF16);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] *= strength[i];
            store(queries + at, 0, x, BF16);
        });
    } else {
        below<2>(triangle.A, X, 32, 0, warp);
    }
    __syncthreads();
    void* to = (char*)(second ? u : w) + first * WIDTH * 2;
    times_columns(to, step, piece.length, X, second ? queries : keys, 4 * block);
}
