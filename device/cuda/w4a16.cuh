// Products of 16-bit activations with weights of 4 or 8 bits, which go from memory as they are packed into registers as
// operands of tensor cores: out[m, n] = sum_k a[m, k] * T((q[k, n] - zero[g, n]) * scale[g, n]).
//
// Weights are the left operand, 16 columns of them its rows, so that eight rows of `a` fill an instruction. A warp has 64
// columns. K is cut into at most sixteen chains of whole 64 k, by K alone: a chain is summed by tensor cores from its
// first k to its last, chain sums are added in float32 from the first on, in every kernel and for any number of rows.
//
// The ladder, whose first step is plain_product.cuh:
// 1. *_few: up to 16 rows. A block has 64 columns, a warp a chain of them, every warp a ring of cp.async copies of its
//    own. Where the columns are too few for the GPU, or shared memory for a ring a chain, chains are dealt out to blocks,
//    leave their sums in memory, and `join` adds up.
// 2. *_many: 64 rows at a time, and a warp takes one chain after the other: eight products for each operand unpacked, and
//    the next operands are unpacked between them. Warps side by side share the rows of `a`; sums wait in shared memory.
#pragma once
#include "packed_words.cuh"

#define PITCH 68  // between rows of a warp's sums: writers meet in no bank

#define W4A16_PARAMETERS                                                                                         \
    i64 rows, i64 columns, i64 depth, const void *a, const void *words, const void *scales,                      \
        const void *zeros, void *out, i64 group, i64 zero, i64 order, const void *factors, const void *bias,     \
        i64 length, i64 chains, i64 across, i64 held, i64 parts, float *sums
#define W4A16_NAMES                                                                                              \
    rows, columns, depth, a, words, scales, zeros, out, group, zero, order, factors, bias, length,               \
        chains, across, held, parts, sums

// Marlin's place of column n's factor or bias among 32.
VT_FN i64 single(i64 n) { return (n & ~31ll) | (n & 6) << 2 | (n >> 3 & 3) << 1 | (n & 1); }

// A sum as it is stored: by `factors`, one a column, and with `bias`, each step rounded; of 4 bits the sum as well.
template <int KIND, int BITS> VT_FN void finish(void* out, i64 m, i64 n, i64 columns, float x, const void* factors, const void* bias) {
    float y[1];
    if (factors != nullptr) {
        load(y, factors, single(n), KIND);
        x = (BITS == 4 ? through(x, KIND) : x) * y[0];
    }
    if (bias != nullptr) {
        load(y, bias, single(n), KIND);
        x = through(x, KIND) + y[0];
    }
    y[0] = x;
    store(out, m * columns + n, y, KIND);
}

// What the eight columns of a lane need of their group.
template <int KIND, class W> struct Group {
    unsigned scale[8], zero[8], mask;

    // Without scales and zero points.
    VT_MEMBER void clear(int bias) {
        mask = kept(W::BITS == 4 ? 0x000f000fu : KIND == F16 ? 0x00ff00ffu : 0x007f007fu);
#pragma unroll
        for (int p = 0; p < 8; ++p) {
            scale[p] = Pairs<KIND>::ONE;
            zero[p] = W::ZEROS_ADDED ? Pairs<KIND>::MINUS_ZERO : Pairs<KIND>::MINUS_BASE + (unsigned)bias * 0x10001u;
        }
    }

    VT_MEMBER void take(const char* scales, const char* zeros, bool scaled, bool zeroed, int bias, int order, int lane) {
        int g = lane >> 2;
        if (scaled) {
            if constexpr (W::NEIGHBOURS) {
                uint4 q = words_at(scales, g * 16);
                const unsigned w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (int p = 0; p < 8; ++p) scale[p] = p & 1 ? pick<0x3232>(w[p / 2], 0) : pick<0x1010>(w[p / 2], 0);
            } else {
#pragma unroll
                for (int p = 0; p < 8; ++p) scale[p] = *(const unsigned short*)(scales + 2 * W::scale(g, p, order)) * 0x10001u;
            }
        }
        if (zeroed) {
            unsigned word = W::ZEROS_ADDED ? 0 : word_at(zeros, g * 4);
#pragma unroll
            for (int p = 0; p < 8; ++p) {
                if constexpr (W::ZEROS_ADDED) zero[p] = *(const unsigned short*)(zeros + 2 * W::scale(g, p, order)) * 0x10001u;
                else zero[p] = Pairs<KIND>::MINUS_BASE + ((word >> 4 * W::nibble(p) & 15u) + (unsigned)bias) * 0x10001u;
            }
        }
    }

    // A pair of weights of number p, each rounded to KIND: its codes are `raw`'s masked bits.
    VT_MEMBER unsigned weights(unsigned raw, int p, int bias) const {
        typedef Pairs<KIND> N;
        unsigned value;
        if constexpr (W::BITS == 4) {
            unsigned minus = W::ZEROS_ADDED ? N::MINUS_BASE + (unsigned)bias * 0x10001u : zero[p];
            value = fma_pair<KIND>((raw & mask) | N::BASE, N::ONE, minus);
        } else if constexpr (KIND == F16) {
            value = fma_pair<KIND>((raw & mask) | N::BASE, N::ONE, N::MINUS_BASE + (unsigned)bias * 0x10001u);
        } else {  // seven bits of the code fit: less 128 or, where the eighth is not set, less 256
            value = fma_pair<KIND>((raw & mask) | N::BASE, N::ONE, (raw & 0x00800080u) ^ 0xc380c380u);
            if (W::ZEROS_ADDED) value = fma_pair<KIND>(value, N::ONE, bias ? N::MINUS_ZERO : 0x43004300u);
        }
        return fma_pair<KIND>(value, scale[p], W::ZEROS_ADDED ? zero[p] : N::MINUS_ZERO);
    }
};

// EIGHTS: rows of `a` in eights; `across` warps side by side, the others on other chains.
template <int KIND, class W, int EIGHTS, int STAGES, bool FEW> VT_FN void w4a16(W4A16_PARAMETERS) {
    VT_SHARED(memory);
    constexpr int HALVES = W::BITS / 4;
    const int broad = FEW ? 1 : (int)across;  // warps of a team: 1, 2 or 4
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, side = warp & (broad - 1), team = warp / broad;
    int teams = (int)(blockDim.x >> 5) / broad, member = side * 32 + lane;
    unsigned down = FEW ? (unsigned)parts : (unsigned)((rows + EIGHTS * 8 - 1) / (EIGHTS * 8));
    unsigned column = blockIdx.x / down, beside_it = blockIdx.x - column * down;
    int part = FEW ? (int)beside_it : 0;
    i64 top = FEW ? 0 : (i64)beside_it * (EIGHTS * 8), left = (i64)column * broad * COLUMNS, n = left + side * COLUMNS;
    bool scaled = scales != nullptr, zeroed = zeros != nullptr;
    int chunks = (int)(depth / CHUNK), groups = group < CHUNK ? CHUNK / (int)group : 1;
    int chunks_a_group = group < CHUNK ? 1 : (int)group / CHUNK;
    unsigned reciprocal = chunks_a_group > 1 ? 0xffffffffu / (unsigned)chunks_a_group + 1 : 0;
    constexpr int ZERO_BYTES = W::ZEROS_ADDED ? 128 : 32;
    int own = W::BYTES + groups * (128 + ZERO_BYTES), stage_bytes = (int)held * 128 + broad * own;
    float* total = (float*)memory;
    char* ring = (char*)memory + (FEW ? 0 : broad * EIGHTS * 8 * PITCH * 4) + team * STAGES * stage_bytes;
    int steps = (int)length * (FEW ? 1 : ((int)chains + teams - 1) / teams);
    // A chunk's group, exact while K < 2^22 and so chunk * chunks_a_group < 2^32; the first one where it has several.
    auto group_of = [&](int chunk) {
        return chunks_a_group > 1 ? (int)((unsigned long long)reciprocal * (unsigned)chunk >> 32) : chunk * groups;
    };

    // What this lane copies: 16 bytes of every fourth row a warp of the team, of words, and of scales and zero points.
    int row = member >> 3, vector = member & 7, apart = 4 * broad, lines = 0;
    if (top + row < rows) {
        int reach = (int)(rows - top < held ? rows - top : held);
        lines = (reach - row + apart - 1) / apart;
    }
    const char* line = (const char*)a + ((top + row) * depth + vector * 8) * 2;
    const char* word = (const char*)words + W::from(n, columns, lane);
    int place = kept(swizzled<8>(row, vector)), to = kept(W::to(lane));
    i64 quarter = W::quarter(columns), chunk_bytes = columns * (CHUNK * W::BITS / 8), line_bytes = apart * depth * 2;
    bool at_zeros = lane >= 8, beside = at_zeros ? zeroed && lane < 8 + ZERO_BYTES / 16 : scaled;
    const char* factor = at_zeros ? (const char*)zeros + n * ZERO_BYTES / COLUMNS + (lane - 8) * 16
                                  : (const char*)scales + n * 2 + lane * 16;
    i64 factor_bytes = at_zeros ? columns * ZERO_BYTES / COLUMNS : columns * 2;

    // On the way through a team's chains: the next chunk to send for, and where it goes.
    int chunk_ahead = (part * teams + team) * (int)length, at_ahead = 0, stage_ahead = 0, sent = 0;
    int jump = (teams - 1) * (int)length + 1;
    word += chunk_ahead * chunk_bytes;
    line += (i64)chunk_ahead * (CHUNK * 2);
    auto send = [&] {
        if (sent < steps && chunk_ahead < chunks) {
            char *stage = ring + stage_ahead, *mine = stage + held * 128 + side * own, *quarters = mine + to;
            const char* from = word;
#pragma unroll
            for (int q = 0; q < 4; ++q, from += quarter)
#pragma unroll
                for (int h = 0; h < HALVES; ++h) copy_async(quarters + (q * HALVES + h) * 512, from + h * 16);
            auto copy_line = [&](int i) {  // as `swizzled` has it: rows apart by 4 have their halves exchanged
                copy_async(stage + i * apart * 128 + (place ^ (i * apart & 4) << 4), line + i * line_bytes);
            };
            if (FEW) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (i < lines) copy_line(i);
            } else {
#pragma unroll 4
                for (int i = 0; i < lines; ++i) copy_line(i);
            }
            int g = group_of(chunk_ahead);
            if (groups == 1) {
                if (beside) copy_async(mine + W::BYTES + lane * 16, factor + g * factor_bytes);
            } else {
#pragma unroll 1
                for (int each = 0; each < groups; ++each)
                    if (beside)
                        copy_async(mine + W::BYTES + (at_zeros ? groups * 128 + each * ZERO_BYTES + lane * 16 - 128 : each * 128 + lane * 16),
                                   factor + (g + each) * factor_bytes);
            }
        }
        bool end = !FEW && ++at_ahead == (int)length;
        if (end) at_ahead = 0;
        chunk_ahead += end ? jump : 1;
        word += end ? jump * chunk_bytes : chunk_bytes;
        line += end ? jump * (CHUNK * 2) : CHUNK * 2;
        stage_ahead = stage_ahead == (STAGES - 1) * stage_bytes ? 0 : stage_ahead + stage_bytes;
        ++sent;
        copies_close();
    };
    auto meet = [&] {
        if (FEW || broad == 1) warp_meets();
        else __syncthreads();
    };

    float sum[EIGHTS][4][4];
    // Sums of rows 8 e ... 8 e + 7: row 8 e + 2 (lane % 4) + r % 2, number 16 t + 8 (r / 2) + lane / 4 of the columns.
    auto each = [&](int e, auto act) {
#pragma unroll
        for (int t = 0; t < 4; ++t)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                act(8 * e + 2 * (lane & 3) + (r & 1), 16 * t + 8 * (r >> 1) + (lane >> 2), sum[e][t][r]);
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) send();
    int step = 0, stage_here = 0;
    int rows_from = kept(swizzled<8>((lane & 7) + (lane >> 4) * 8, 0)), lane_bit = kept(lane >> 3 & 1), lane_row = kept(lane & 7);
    Group<KIND, W> of;
    of.clear((int)zero);
    for (int chain = part * teams + team; step < steps; chain += teams) {
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
            for (int t = 0; t < 4; ++t)
#pragma unroll
                for (int r = 0; r < 4; ++r) sum[e][t][r] = 0.0f;
        int taken = -1;
#pragma unroll 1
        for (int at = 0; at < (int)length; ++at, ++step) {
            copies_wait<STAGES - 2>();
            meet();
            send();
            int chunk = chain * (int)length + at;
            if (chunk < chunks) {
                const char* stage = ring + stage_here;
                const char *mine = stage + held * 128 + side * own, *factors_at = mine + W::BYTES;
                const char* zeros_at = factors_at + groups * 128;
                auto take = [&](int which) {
                    of.take(factors_at + which * 128, zeros_at + which * ZERO_BYTES, scaled, zeroed, (int)zero, (int)order, lane);
                };
                auto unpack = [&](unsigned (&raw)[4][4], int t) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) raw[t][r] = of.weights(raw[t][r], 2 * t + (r & 1), (int)zero);
                };
                // Products of the sixteen k that `raw` is of; meanwhile those after them are unpacked, a tile a time.
                auto sixteen_k = [&](int s, unsigned (&raw)[4][4], unsigned (&next)[4][4], bool more) {
                    if (more) W::codes(next, mine, s + 1, lane, (int)order);
                    const char* sixteen = stage + (rows_from + (((2 * s + lane_bit) ^ lane_row) - lane_row) * 16);
                    each_number<0, EIGHTS / 2>([&](auto pair_of_eights) {
                        constexpr int q = 2 * decltype(pair_of_eights)::value;
                        unsigned b[4];
                        fetch_matrices(b, sixteen + q * 1024);
#pragma unroll
                        for (int t = 0; t < 4; ++t) {
                            multiply<KIND>(sum[q][t], raw[t], b[0], b[1]);
                            if (FEW) multiply_if<KIND>(held > 8, sum[q + 1][t], raw[t], b[2], b[3]);
                            else multiply<KIND>(sum[q + 1][t], raw[t], b[2], b[3]);
                            if (more && FEW) unpack(next, t);
                        }
                        if (more && !FEW) unpack(next, q / 2);
                    });
                };
                unsigned raw[2][4][4];
                auto begin = [&](int s) {
                    W::codes(raw[0], mine, s, lane, (int)order);
#pragma unroll
                    for (int t = 0; t < 4; ++t) unpack(raw[0], t);
                };
                if (groups == 1) {
                    int g = group_of(chunk);
                    if (g != taken) take(0);
                    taken = g;
                    constexpr bool AHEAD = FEW || !W::ZEROS_ADDED;  // else there are too few registers
                    if (AHEAD) begin(0);
#pragma unroll(AHEAD ? 4 : 1)
                    for (int s = 0; s < 4; ++s) {
                        if (!AHEAD) begin(s);
                        sixteen_k(s, raw[AHEAD ? s & 1 : 0], raw[AHEAD ? ~s & 1 : 1], AHEAD && s < 3);
                    }
                } else {
#pragma unroll 1
                    for (int s = 0; s < 4; ++s) {
                        if (groups == 4 || s != 1 && s != 3) take(groups == 4 ? s : s / 2);
                        begin(s);
                        sixteen_k(s, raw[0], raw[1], false);
                    }
                }
            }
            stage_here = stage_here == (STAGES - 1) * stage_bytes ? 0 : stage_here + stage_bytes;
        }
        if constexpr (!FEW) {  // eight rows after eight rows, each team one behind the team before it
            float* sums_at = total + side * EIGHTS * 8 * PITCH;
            for (int turn = 0; turn < EIGHTS + teams - 1; ++turn) {
                each_number<0, EIGHTS>([&](auto eight) {
                    constexpr int e = decltype(eight)::value;
                    if (e != turn - team || chain >= chains) return;
                    stay_apart<e>();
                    each(e, [&](int m, int number, float x) {
                        float* at = sums_at + m * PITCH + number;
                        *at = chain ? *at + x : x;
                    });
                });
                __syncthreads();
            }
        }
    }
    copies_wait<0>();
    __syncthreads();
    if constexpr (FEW) {  // a chain's sums lie where its ring was
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
            each(e, [&](int m, int number, float x) { total[(team * 16 + m) * PITCH + number] = x; });
        __syncthreads();
        int count = (int)chains - (int)part * teams < teams ? (int)chains - (int)part * teams : teams;
        for (int at = threadIdx.x; at < (int)rows * COLUMNS; at += blockDim.x) {
            int m = at / COLUMNS, number = number_of<W>(at % COLUMNS, (int)order);
            const float* from = total + m * PITCH + number;
            if (sums == nullptr) {
                float x = from[0];
                for (int c = 1; c < count; ++c) x += from[c * 16 * PITCH];
                finish<KIND, W::BITS>(out, m, left + at % COLUMNS, columns, x, factors, bias);
            } else {
                for (int c = 0; c < count; ++c)
                    sums[((part * teams + c) * rows + m) * columns + left + at % COLUMNS] = from[c * 16 * PITCH];
            }
        }
    } else {
        int wide = (int)across * COLUMNS;
        for (int at = threadIdx.x; at < EIGHTS * 8 * wide; at += blockDim.x) {
            int m = at / wide, c = at % wide;
            if (top + m >= rows) break;
            float x = total[(c / COLUMNS * EIGHTS * 8 + m) * PITCH + number_of<W>(c % COLUMNS, (int)order)];
            finish<KIND, W::BITS>(out, top + m, left + c, columns, x, factors, bias);
        }
    }
}

// Chain sums [chains, rows, columns] added up from the first on.
template <int KIND, int BITS> VT_FN void join_chains(
    i64 rows, i64 columns, i64 chains, const float* sums, const void* factors, const void* bias, void* out) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * columns) return;
    float x = sums[at];
    for (i64 c = 1; c < chains; ++c) x += sums[c * rows * columns + at];
    finish<KIND, BITS>(out, at / columns, at % columns, columns, x, factors, bias);
}

#define W4A16_KERNELS(NAME, KIND, WORDS)                                                                         \
    extern "C" __global__ void __launch_bounds__(512, 1) NAME##_few(W4A16_PARAMETERS) {                          \
        w4a16<KIND, WORDS, 2, WORDS::BITS == 4 ? 3 : 2, true>(W4A16_NAMES);                                                             \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 1) NAME##_many(W4A16_PARAMETERS) {                         \
        w4a16<KIND, WORDS, 8, 2, false>(W4A16_NAMES);                                                            \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) NAME##_join(i64 rows, i64 columns, i64 chains,             \
                                                                  const float* sums, const void* factors,        \
                                                                  const void* bias, void* out) {                 \
        join_chains<KIND, WORDS::BITS>(rows, columns, chains, sums, factors, bias, out);                         \
    }
