// Products of 16-bit activations with weights of e2m1 codes, which go from memory as they are packed into registers as
// operands of tensor cores: out[m, n] = factor * sum_k a[m, k] * (e2m1[n, k] * scale[n, k / group]).
//
// Weights are the left operand, 16 columns of the result its rows, so that eight rows of `a` fill an instruction. A warp
// has 64 columns. K is cut into at most eight chains of whole 128 k, by K alone: a chain is summed by tensor cores from its
// first k to its last, chain sums are added in float32 from the first on, in every kernel and for any number of rows, so
// that a row's bytes are the same in any batch.
//
// Numbers: the bits of a code, moved to the place of a 16-bit number's exponent and mantissa, are that number 2^126
// (bfloat16) or 2^14 (float16) times too small. A scale of e4m3 takes that back but for 2^8 (2^7), which waits for the sum:
// one product of pairs makes a weight. It is exact: two bits of a code times four of a scale are six, and every weight is
// a multiple of 2^-18 under 2^12. A power of two (e8m0) has bfloat16's range itself, so that a second product comes first.
//
// The ladder:
// 1. *_few: up to 16 rows. A block has 64 columns, a warp a chain of them and its own ring of cp.async copies; a lane
//    copies the very codes that it unpacks.
// 2. *_many: 64 rows at a time, eight products for each operand unpacked. Where tiles are few, chains lie beside each
//    other as in *_few, four at a time, else two warps side by side go through them; sums are added up in shared memory.
#pragma once
#include "fp4.cuh"
#include "packed_words.cuh"

#define FP4_CHUNK 128  // k that are sent for at a time, eight instructions' worth
#define FP4_CODES 4096 // bytes of a warp's codes of a chunk

enum { E4M3, E4M3_ROUNDED, E8M0, S0E5M3 };  // scales; E4M3_ROUNDED: of weights that are rounded to bfloat16

#define FP4_PARAMETERS                                                                                           \
    i64 rows, i64 columns, i64 depth, const void *a, const char *words, const char *scales, i64 pitch, i64 step,     \
        const float *factor, const void *bias, void *out, i64 kind, i64 length, i64 chains, i64 across, i64 held
#define FP4_NAMES                                                                                                \
    rows, columns, depth, a, words, scales, pitch, step, factor, bias, out, kind, length, chains, across, held

#ifdef __CUDACC__
// Four bytes on their way into shared memory, or zeros without a look at `global`.
VT_FN void copy_word_or_zero(void* shared, const void* global, bool there) {
    unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    int size = there ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(size) : "memory");
}
#else
static inline void copy_word_or_zero(void* shared, const void* global, bool there) {
    emulation::running->copies.push_back({shared, there ? global : no_bytes, 4});
}
#endif

template <int KIND> VT_FN unsigned times_pair(unsigned a, unsigned b) {
    return fma_pair<KIND>(a, b, Pairs<KIND>::MINUS_ZERO);
}

VT_FN unsigned shifted(unsigned x, int left) { return left < 0 ? x >> -left : x << left; }

// Codes whose first bit is bit `at` of either half, as numbers that are too small by 2^126 or 2^14. Shifts to the left may
// go through the multipliers, which have less to do than what masks.
template <int KIND> VT_FN unsigned small_pair(unsigned codes, int at) {
    constexpr int PLACE = KIND == BF16 ? 6 : 9;
    return (shifted(codes, PLACE - at) & 0x00070007u << PLACE) | (shifted(codes, 12 - at) & 0x80008000u);
}

// Two e4m3 scales, a byte in either half, as bfloat16 that are 2^120 too small: their bits are those.
VT_FN unsigned small_scales(unsigned two) {
    unsigned bits = (two << 4 & 0x07f007f0u) | (two << 8 & 0x80008000u);
    unsigned nan = (two & 0x007f007fu) + 0x00010001u & 0x00800080u;
    return bits | (nan >> 7) * 0x7fc0u;
}

// Two bytes as what codes are multiplied by.
template <int KIND, int SCALE> VT_FN unsigned scale_pair(unsigned two) {
    if constexpr (SCALE == E4M3)  // 2^118 times the scale
        return times_pair<KIND>(times_pair<KIND>(small_scales(two), 0x7b007b00u), 0x7b007b00u);
    else if constexpr (SCALE == E4M3_ROUNDED)
        return times_pair<KIND>(times_pair<KIND>(small_scales(two), 0x7b007b00u), 0x40004000u);
    else if constexpr (SCALE == E8M0) {  // 0 is 2^-127, 255 a NaN
        unsigned some = two + 0x00ff00ffu >> 8 & 0x00010001u, nan = two + 0x00010001u >> 8 & 0x00010001u;
        return two << 7 | (some ^ 0x00010001u | nan) << 6;
    } else if constexpr (KIND == F16)
        return two << 7;  // 128 times the scale
    else  // 2^118 times the scale: exponents are 15 above theirs, and 7 for the 128 that is in them; 0 has no top bit
        return (two << 4) + (two >> 7 & 0x00010001u) * (223u << 7);
}

// Scales of a lane's eight columns, number 2 i + h of them in half h of two[i].
template <int KIND, int SCALE> struct Scales {
    unsigned pair[8];

    VT_MEMBER void take(const unsigned (&two)[4], float) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned both = scale_pair<KIND, SCALE>(two[i]);
            pair[2 * i] = pick<0x1010>(both, 0), pair[2 * i + 1] = pick<0x3232>(both, 0);
        }
    }
    VT_MEMBER unsigned weights(unsigned value, int p) const {
        if constexpr (SCALE == E8M0) value = times_pair<KIND>(value, 0x7e807e80u);
        return times_pair<KIND>(value, pair[p]);
    }
};
template <int KIND> struct Scales<KIND, E4M3_ROUNDED> {
    float value[8];

    VT_MEMBER void take(const unsigned (&two)[4], float factor) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned both = scale_pair<KIND, E4M3_ROUNDED>(two[i]);
            value[2 * i] = vt_float((int)(both << 16)) * factor;
            value[2 * i + 1] = vt_float((int)(both & 0xffff0000u)) * factor;
        }
    }
    VT_MEMBER unsigned weights(unsigned small, int p) const {
        unsigned codes = times_pair<KIND>(small, 0x7e807e80u);
        return pair<KIND>(vt_float((int)(codes << 16)) * value[p], vt_float((int)(codes & 0xffff0000u)) * value[p]);
    }
};

// A format: where a warp's 64 columns x 128 k lie, and what of them a lane unpacks. With g = lane / 4 and t = lane % 4:
// `send` copies them into the warp's own part of a stage, `fetch` gives the words of step s (of eight, 16 k each), which
// hold for FETCH steps, `small` the pair of register r of tile i in step s of four, `scales` bytes, two[i] for
// columns 16 i + g and 8 more, which hold for EVERY steps, `rows` the right operands of steps 2 j and 2 j + 1. `place` says
// where vector v of a row of `a` lies.

// Codes [N, K / 2] in rows. A lane has 32 neighbouring k of a chunk, so that scales are its own as well. They lie in rows,
// `pitch` bytes apart, or in tiles (step 512), `pitch` bytes of them side by side. One mask takes two codes of a word that
// are four apart, and so pairs of `a` are.
template <int KIND_, int SCALE> struct CodesInRows {
    static constexpr int KIND = KIND_, SCALES = SCALE, GROUP = SCALE == E8M0 ? 32 : 16, WORDS = FP4_CHUNK / GROUP / 4;
    static constexpr int BYTES = FP4_CODES + COLUMNS * 4 * WORDS, FETCH = 4, EVERY = GROUP / 4;

    static VT_MEMBER int place(int row, int v) { return v ^ v >> 3 ^ (row & 1) << 1; }  // eight lanes meet in no bank
    static VT_MEMBER void send(char* mine, const char* words, const char* scales, i64 columns, i64 depth, i64 n,
                               i64 chunk, i64 pitch, i64 step, int lane) {
        int g = lane >> 2, t = lane & 3;
        bool inside = chunk * FP4_CHUNK + t * 32 < depth;
        const char* from = words + (n + g) * (depth / 2) + chunk * (FP4_CHUNK / 2) + t * 16;
#pragma unroll
        for (int q = 0; q < 8; ++q)
            copy_or_zero(mine + q * 512 + lane * 16, from + q * 4 * depth, inside && n + g + 8 * q < columns);
#pragma unroll
        for (int x = 0; x < 2; ++x) {
            i64 row = n + lane + 32 * x, at = row * pitch;
            if (step == 512) at = (row >> 7) * pitch + (row & 31) * 16 + (row >> 5 & 3) * 4;
#pragma unroll
            for (int w = 0; w < WORDS; ++w)
                copy_word_or_zero(mine + FP4_CODES + (lane + 32 * x) * 4 * WORDS + 4 * w,
                                  scales + at + (chunk * WORDS + w) * step,
                                  row < columns && (chunk * WORDS + w) * (4 * GROUP) < depth);
        }
    }
    static VT_MEMBER void fetch(unsigned (&raw)[16], const char* mine, int s, int lane) {
#pragma unroll
        for (int q = 0; q < 8; ++q) {
            const uint2 w = *(const uint2*)(mine + q * 512 + lane * 16 + s / 4 * 8);
            raw[2 * q] = w.x, raw[2 * q + 1] = w.y;
        }
    }
    static VT_MEMBER unsigned small(const unsigned (&raw)[16], int s, int i, int r) {
        return small_pair<KIND>(raw[2 * (2 * i + (r & 1)) + s / 2], 8 * (s & 1) + 4 * (r >> 1));
    }
    // None where there are no k: what fills a tile up may be anything.
    static VT_MEMBER void scales(unsigned (&two)[4], const char* mine, int s, int lane, bool inside) {
        const unsigned char* from = (const unsigned char*)mine + FP4_CODES + lane * WORDS + s / EVERY;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            two[i] = inside ? from[i * 64 * WORDS] | (unsigned)from[i * 64 * WORDS + 32 * WORDS] << 16 : 0u;
    }
    static VT_MEMBER void rows(unsigned (&b)[4], const char* stage, int e, int j, int lane) {
        int row = 8 * e + (lane >> 2);
        uint4 q = words_at(stage, (row * 16 + place(row, 4 * (lane & 3) + j)) * 16);
        b[0] = pick<0x5410>(q.x, q.z), b[1] = pick<0x7632>(q.x, q.z);
        b[2] = pick<0x5410>(q.y, q.w), b[3] = pick<0x7632>(q.y, q.w);
    }
};

// Marlin's tiles of 16 k x 64 columns, int32 [K / 16, 2 N], and scales [K / GROUP, N] in its order.
template <int KIND_, int SCALE> struct MarlinCodes {
    static constexpr int KIND = KIND_, SCALES = SCALE, GROUP = SCALE == E8M0 ? 32 : 16, GROUPS = FP4_CHUNK / GROUP;
    static constexpr int BYTES = FP4_CODES + COLUMNS * GROUPS, FETCH = 1, EVERY = GROUP / 16;

    static VT_MEMBER int place(int row, int v) { return v ^ (row & 7); }
    static VT_MEMBER void send(char* mine, const char* words, const char* scales, i64 columns, i64 depth, i64 n,
                               i64 chunk, i64, i64, int lane) {
        bool beside = n < columns;
        const char* from = words + (chunk * 8 * columns + n) * 8 + lane * 16;
#pragma unroll
        for (int q = 0; q < 8; ++q)
            copy_or_zero(mine + q * 512 + lane * 16, from + q * columns * 8, beside && chunk * FP4_CHUNK + 16 * q < depth);
        i64 group = chunk * GROUPS + lane / 4;
        if (lane < 4 * GROUPS)
            copy_or_zero(mine + FP4_CODES + lane * 16, scales + group * columns + n + (lane & 3) * 16,
                         beside && group * GROUP < depth);
    }
    static VT_MEMBER void fetch(unsigned (&raw)[16], const char* mine, int s, int lane) {
        uint4 q = words_at(mine, s * 512 + lane * 16);
        raw[0] = q.x, raw[1] = q.y, raw[2] = q.z, raw[3] = q.w;
    }
    static VT_MEMBER unsigned small(const unsigned (&raw)[16], int, int i, int r) {
        return small_pair<KIND>(raw[i], 8 * (r & 1) + 4 * (r >> 1));
    }
    static VT_MEMBER void scales(unsigned (&two)[4], const char* mine, int s, int lane, bool) {
        const uint2 q = *(const uint2*)(mine + FP4_CODES + s / EVERY * COLUMNS + (lane >> 2) * 8);
        two[0] = q.x & 0x00ff00ffu, two[1] = q.x >> 8 & 0x00ff00ffu;  // of each four columns 0, 2, 1, 3
        two[2] = q.y & 0x00ff00ffu, two[3] = q.y >> 8 & 0x00ff00ffu;
    }
    static VT_MEMBER void rows(unsigned (&b)[4], const char* stage, int e, int j, int lane) {
        int row = 8 * e + (lane & 7);
        fetch_matrices(b, stage + (row * 16 + place(row, 4 * j + (lane >> 3))) * 16);
    }
};

// A sum of column n on its way to the result, with `bias`, which is in Marlin's order.
template <int KIND, int SCALE> VT_FN float fp4_finished(float x, i64 n, const float* factor, const void* bias) {
    // Two powers of two that are no part of any scale: the sums', and of the factor, as Marlin lifts it.
    constexpr float UP = SCALE == E4M3 || SCALE == S0E5M3 ? (KIND == BF16 ? 0x1p8f : 0x1p7f) : 1.0f;
    constexpr float DOWN = SCALE != S0E5M3 ? 1.0f : KIND == BF16 ? 0x1p-119f : 0x1p-7f;
    x = x * UP * (SCALE == E4M3_ROUNDED || factor == nullptr ? 1.0f : factor[0] * DOWN);
    if (bias != nullptr) {
        float y[1];
        load(y, bias, (n & ~31ll) | (n & 6) << 2 | (n >> 3 & 3) << 1 | (n & 1), KIND);
        x = through(x, KIND) + y[0];
    }
    return x;
}

// EIGHTS: rows of `a` in eights, of which `held` are copied; `across` warps side by side, teams of them on other chains.
template <class W, int EIGHTS, int STAGES> VT_FN void fp4_product(FP4_PARAMETERS) {
    VT_SHARED(memory);
    constexpr int KIND = W::KIND, SCALE = W::SCALES, OWN_SUMS = EIGHTS * 16 * 32;
    constexpr int AT_ONCE = EIGHTS > 4 ? 2 : 1;  // eights between branches past rows that are not there
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, strips = (int)across, side = warp % strips;
    int team = warp / strips, teams = (int)(blockDim.x >> 5) / strips, member = side * 32 + lane;
    unsigned down = (unsigned)((rows + EIGHTS * 8 - 1) / (EIGHTS * 8));
    i64 top = (i64)(blockIdx.x % down) * (EIGHTS * 8), left = (i64)(blockIdx.x / down) * strips * COLUMNS;
    i64 n = left + side * COLUMNS;
    int chunks = (int)((depth + FP4_CHUNK - 1) / FP4_CHUNK), stage_bytes = (int)held * 256 + strips * W::BYTES;
    float* total = (float*)memory + side * OWN_SUMS + lane;  // number r of a lane is 32 r further on
    char* ring = (char*)memory + strips * OWN_SUMS * 4 + team * STAGES * stage_bytes;
    int steps = ((int)chains + teams - 1) / teams * (int)length;
    float of_all = SCALE == E4M3_ROUNDED ? factor[0] : 1.0f;

    // On the way through a team's chains: the next chunk to send for, and where it goes.
    int chunk_ahead = team * (int)length, at_ahead = 0, stage_ahead = 0, sent = 0, jump = (teams - 1) * (int)length + 1;
    auto send = [&] {
        i64 chunk = chunk_ahead;
        if (sent < steps && chunk_ahead < chunks) {
            char *stage = ring + stage_ahead, *mine = stage + held * 256 + side * W::BYTES;
            W::send(mine, words, scales, columns, depth, n, chunk, pitch, step, lane);
            for (int at = member; at < (int)held * 16; at += strips * 32) {
                int row = at >> 4, v = at & 15;
                i64 k = chunk * FP4_CHUNK + v * 8;
                copy_or_zero(stage + (row * 16 + W::place(row, v)) * 16, (const char*)a + ((top + row) * depth + k) * 2,
                             top + row < rows && k < depth);
            }
        }
        bool end = ++at_ahead == (int)length;
        if (end) at_ahead = 0;
        chunk_ahead += end ? jump : 1;
        stage_ahead = stage_ahead == (STAGES - 1) * stage_bytes ? 0 : stage_ahead + stage_bytes;
        ++sent;
        copies_close();
    };
    float sum[EIGHTS][4][4];
    auto each = [&](auto act) {
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int r = 0; r < 4; ++r) act(sum[e][i][r], (e * 4 + i) * 4 + r);
    };
    auto add_up = [&](bool begun) {
        each([&](float& x, int number) { total[number * 32] = begun ? total[number * 32] + x : x; });
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) send();
    int stage_here = 0, chain = team, at_here = 0;
    each([](float& x, int) { x = 0.0f; });
#pragma unroll 1
    for (int done = 0; done < steps; ++done) {
        copies_wait<STAGES - 2>();
        if (strips == 1) warp_meets();
        else __syncthreads();
        send();
        int chunk = chain * (int)length + at_here;
        if (chunk < chunks) {
            const char *stage = ring + stage_here, *mine = stage + held * 256 + side * W::BYTES;
            bool inside = (i64)chunk * FP4_CHUNK + (lane & 3) * 32 < depth;
            unsigned raw[16];
            Scales<KIND, SCALE> scales_here;
#pragma unroll 1
            for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                unsigned w[2][4][4];
#pragma unroll
                for (int d = 0; d < 2; ++d) {
                    int within = 2 * j + d, s = 4 * half + within;
                    if (within % W::FETCH == 0) W::fetch(raw, mine, s, lane);
                    if (within % W::EVERY == 0 && (W::EVERY < 8 || half == 0)) {
                        unsigned two[4];
                        W::scales(two, mine, s, lane, inside);
                        scales_here.take(two, of_all);
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int r = 0; r < 4; ++r)
                            w[d][i][r] = scales_here.weights(W::small(raw, within, i, r), 2 * i + (r & 1));
                }
#pragma unroll
                for (int first = 0; first < EIGHTS; first += AT_ONCE) {
                    if (8 * first >= (int)held) break;
#pragma unroll
                    for (int e = first; e < first + AT_ONCE; ++e) {
                        unsigned b[4];
                        W::rows(b, stage, e, 2 * half + j, lane);
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            multiply<KIND>(sum[e][i], w[0][i], b[0], b[1]);
                            multiply<KIND>(sum[e][i], w[1][i], b[2], b[3]);
                        }
                    }
                }
            }
        }
        stage_here = stage_here == (STAGES - 1) * stage_bytes ? 0 : stage_here + stage_bytes;
        if (++at_here < (int)length) continue;
#pragma unroll 1
        for (int turn = 0; turn < teams; ++turn) {  // teams' chains are neighbours
            if (turn == team && chain < chains) add_up(chain > 0);
            if (teams > 1) __syncthreads();
        }
        each([](float& x, int) { x = 0.0f; });
        at_here = 0, chain += teams;
    }
    copies_wait<0>();
    __syncthreads();
    int wide = strips * COLUMNS, high = rows - top < EIGHTS * 8 ? (int)(rows - top) : EIGHTS * 8;
    for (int at = threadIdx.x; at < high * wide; at += blockDim.x) {
        int m = at / wide, c = at % wide, within = c % COLUMNS;
        if (left + c >= columns) continue;
        int number = (m >> 3) * 16 + (within >> 4) * 4 + (within >> 3 & 1) * 2 + (m & 1);
        float x = ((float*)memory)[c / COLUMNS * OWN_SUMS + number * 32 + (within & 7) * 4 + (m >> 1 & 3)];
        const float one[1] = {fp4_finished<KIND, SCALE>(x, left + c, factor, bias)};
        store(out, (top + m) * columns + left + c, one, (int)kind);
    }
}

#define FP4_KERNELS(NAME, FORMAT)                                                                                \
    extern "C" __global__ void __launch_bounds__(256, 1) NAME##_few(FP4_PARAMETERS) {                            \
        fp4_product<FORMAT, 2, 3>(FP4_NAMES);                                                                    \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(128, 2) NAME##_many(FP4_PARAMETERS) {                           \
        fp4_product<FORMAT, 8, 2>(FP4_NAMES);                                                                    \
    }

// Eight values of e2m1 codes under their scales [rows, K / group], in rows or in tiles, a thread: exact in bfloat16. Where
// they are `turned`, of 128 k the eight from 32 t + 8 s on are word t of four vectors, pairs (i, i + 4): strided_rows.cuh.
template <int SCALE> VT_FN void fp4_expanded(
    i64 count, i64 blocks, const unsigned char* codes, const unsigned char* scales, i64 tiled, void* out, i64 turned) {
    constexpr int EIGHTS_OF = SCALE == E8M0 ? 4 : 2;
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x, block = at / EIGHTS_OF;
    if (at >= count) return;
    i64 row = block / blocks, column = block - row * blocks;
    unsigned code = scales[tiled ? tiled_place<i64>(row, column, (blocks + 3) >> 2) : block];
    float factor = SCALE == E8M0 ? widen_bf16(scale_pair<BF16, E8M0>(code) & 0xffffu) : e4m3_value(code), v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = e2m1_value(codes[at * 4 + j / 2] >> 4 * (j & 1) & 15u) * factor;
    if (!turned) {
        store(out, at * 8, v, BF16);
        return;
    }
    unsigned* words = (unsigned*)out + (at >> 4) * 64 + (at & 3) * 16 + (at >> 2 & 3);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[4 * i] = pair<BF16>(v[i], v[i + 4]);
}

#define FP4_EXPANDED(NAME, SCALE)                                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        NAME(i64 count, i64 blocks, const unsigned char* codes, const unsigned char* scales, i64 tiled, void* out, \
             i64 turned) {                                                                                       \
        fp4_expanded<SCALE>(count, blocks, codes, scales, tiled, out, turned);                                   \
    }
