// One row meets the i-quants' blocks of 256 where a multiprocessor's share of the weight's rows fits its shared memory.
//
// Bytes come in chunks as they lie, a few at a time: asked for all at once, the first would come as late as the last. A
// warp has 16 blocks of four rows, in the order of bytes, and begins as soon as they are there. A lane has a block of two
// rows. Two lanes have the same block and ask for its activations together, and words of one number meet in no bank where
// a row is 32 bytes more than a multiple of all banks. Where a row's blocks are one warp's, it adds their terms itself.
#pragma once
#include "early.cuh"
#include "ggml_sign_tables.cuh"

// Warps of a block, of which the last one sends and those before it fill the tables; bytes of a chunk, how many there may
// be, and how many are on their way at once.
constexpr int HELD_WARPS = 32, CHUNK = 16384, CHUNKS = 12, WINDOW = 3;

// words_256 by quotients that do not ask where sizes lie.
VT_FN Words quick_words(const float (&x)[8]) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = larger(most, vt_abs(x[i]));
    unsigned largest = largest_of_warp((unsigned)vt_bits(most));
    if (__builtin_expect(far_off(largest), 0)) return words_256(x);
    float inverse = quotient_of(127.0f, vt_float((int)largest));
    unsigned near[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) near[i] = (unsigned)vt_bits(x[i] * inverse + 12582912.0f);
    return {quotient_of(1.0f, inverse),
            permute(permute(near[0], near[1], 0x0040), permute(near[2], near[3], 0x0040), 0x5410),
            permute(permute(near[4], near[5], 0x0040), permute(near[6], near[7], 0x0040), 0x5410)};
}

// The sums of a lane's block of two rows.
template <int TYPE>
VT_MEMBER void meet_held(int (&total)[2], const u8* const (&p)[2], const uint4* x, Tables tables) {
    constexpr bool SHORT = TYPE == IQ3_XXS;
    unsigned select[2];
    const unsigned* q[2];
    total[0] = total[1] = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        unsigned apart = (unsigned)(unsigned long long)p[r] & 2;
        q[r] = (const unsigned*)(p[r] - apart);
        select[r] = apart ? 0x7654u : 0x5432u;  // what follows the scale
    }
    auto word = [&](int r, int i) { return picked(q[r][i], q[r][i + 1], select[r]); };
#pragma unroll
    for (int u = 0; u < 8; ++u) {
        uint4 one = x[2 * u], two = x[2 * u + 1];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            unsigned low = word(r, 2 * u), high = word(r, 2 * u + 1);
            unsigned beside = TYPE == IQ2_XXS ? high : word(r, 16 + u), v[8];
            if (TYPE == IQ2_XXS) high = low;
            eight_values<TYPE, 0, SHORT>(v[0], v[1], tables, low, beside);
            eight_values<TYPE, 1, SHORT>(v[2], v[3], tables, low, beside);
            eight_values<TYPE, 2, SHORT>(v[4], v[5], tables, high, beside);
            eight_values<TYPE, 3, SHORT>(v[6], v[7], tables, high, beside);
            int sum = dot4(v[3], one.w, dot4(v[2], one.z, dot4(v[1], one.y, dot4(v[0], one.x, 0))));
            sum = dot4(v[7], two.w, dot4(v[6], two.z, dot4(v[5], two.y, dot4(v[4], two.x, sum))));
            total[r] += (int)(beside >> 27 | 1) * sum;
        }
    }
}

// Of `grid` blocks, which have `each` rows or one more. Rows lie one after the other, and barriers are set up where they
// are next asked for: one takes as long as a dozen other instructions.
template <int TYPE> VT_MEMBER void in_held(const Row& p, int grid, int each, int) {
    constexpr int BYTES = Block<TYPE>::BYTES, CODES = Tiles<TYPE>::CODES;
    constexpr int FURTHER = TYPE == IQ2_XXS ? 2 : 1;  // a lane's second row, so that no banks are asked for twice
    constexpr bool SHORT = TYPE == IQ3_XXS;  // a share of 170 KB is to fit beside the tables
    constexpr int SENDER = HELD_WARPS - 1, FILLERS = SHORT ? 12 : 15, FILLER = SENDER - FILLERS;
    VT_SHARED(memory);
    others_may_start();
    const int lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5, stride = (int)p.stride;
    const int blocks = (int)((unsigned)p.depth / 256);
#ifdef __CUDACC__
    u8* tables_at = memory + ((TABLES_AT - ring_address(memory)) & 0xffff);
#else
    u8* tables_at = memory;
#endif
    u64* full = (u64*)(tables_at + (SHORT ? SHORT_BYTES : TABLE_BYTES));
    u8* codes = (u8*)(full + CHUNKS);
    float* scales = (float*)(codes + blocks * CODES);
    u8* held = (u8*)scales + (4 * blocks + 15 & ~15);
    const int first = begin_of((int)blockIdx.x, grid, (int)p.columns, each);
    const int count = begin_of((int)blockIdx.x + 1, grid, (int)p.columns, each) - first;
    const u8* from = p.b + (i64)first * stride;
    const int skew = (int)(unsigned long long)from & 15, all = skew + count * stride;
    const int chunks = (int)((unsigned)(all + CHUNK - 1) / CHUNK);
    auto send = [&](int chunk) {
        int begin = chunk * CHUNK, end = all - begin < CHUNK ? all - begin : CHUNK, bytes = end + 15 & ~15;
        const u8* source = from - skew + begin;
        if (begin + end == all && first + count == (int)p.columns) {  // nothing past the weight is touched
            bytes = end & ~15;
#pragma unroll 1
            for (int i = bytes; i < end; i += 2)
                *(unsigned short*)(held + begin + i) = *(const unsigned short*)(source + i);
        }
        if (bytes) stretch(held + begin, source, bytes, full + chunk);
        arrive(full + chunk);
    };
    const bool sends = warp == SENDER;
    if (sends) {
        if (lane == 0) {
#pragma unroll
            for (int chunk = 0; chunk < WINDOW; ++chunk) phases_begin(full + chunk, 1);
            phases_seen();
            after_others();
#pragma unroll 1
            for (int chunk = 0; chunk < WINDOW && chunk < chunks; ++chunk) send(chunk);
        }
        warp_meets();
    } else if (warp >= FILLER) {
        fill_tables<TYPE, SHORT>(tables_at, warp - FILLER, FILLERS);  // the module's own: they wait for nobody
    }
    if (warp >= WINDOW && warp < CHUNKS && lane == 0) {
        phases_begin(full + warp, 1);
        phases_seen();
    }
    if (warp < blocks) {
        after_others();
        Eights eights(p, (int)threadIdx.x, 32 * HELD_WARPS);
#pragma unroll 1
        for (int block = warp; block < blocks; block += HELD_WARPS) {
            float x[8];
            eights.next(x);
            Words c = quick_words(x);
            *(uint2*)(codes + block * CODES + lane * 8) = {c.low, c.high};
            if (lane == 0) scales[block] = c.d;
        }
    }
    Tables tables = tables_of(tables_at, blocks);
    __syncthreads();
    if (sends && lane == 0) {
#pragma unroll 1
        for (int chunk = WINDOW; chunk < chunks; ++chunk) {
            phase_over(full + chunk - WINDOW, 0);
            send(chunk);
        }
    }
    const int jobs = ((count + 3) / 4 * blocks + 15) / 16;
    const bool own = blocks == 16 || blocks == 8 || blocks == 4;
    auto apart = [&](int row) { return (float*)(held + (all + 15 & ~15)) + row * (blocks | 1); };  // else: a row's terms
    if (!sends) {
#pragma unroll 1
        for (int job = warp; job < jobs; job += SENDER) {
            int item = 16 * job + (lane >> 1), four = (int)((unsigned)item / (unsigned)blocks), block = item - four * blocks;
            int row = 4 * four + (FURTHER == 2 ? lane & 1 : 2 * (lane & 1)), other = row + FURTHER;
            int top = 4 * __shfl_sync(ALL, four, 0), end = skew + (4 * __shfl_sync(ALL, four, 31) + 4) * stride;
            bool there = row < count, both = other < count;
            const u8* at[2];  // what is not there is read where nobody writes
            at[0] = there ? held + skew + row * stride + block * BYTES : tables_at;
            at[1] = both ? held + skew + other * stride + block * BYTES : tables_at;
            int last = ((end < all ? end : all) - 1) / CHUNK;
            for (int chunk = (skew + top * stride) / CHUNK; chunk <= last; ++chunk) phase_over(full + chunk, 0);
            int total[2];
            meet_held<TYPE>(total, at, (const uint4*)(codes + block * CODES), tables);
            float d = scales[block], term = (float)total[0] * (f16_at(at[0]) * d);
            float second = (float)total[1] * (f16_at(at[1]) * d);
            if (!own) {
                if (there) apart(row)[block] = term;
                if (both) apart(other)[block] = second;
                continue;
            }
            // Into the warp's own bytes, once all of them are read; the first words are the block's before, too.
            float* terms = (float*)(held + (skew + top * stride + 15 & ~15) + 16);
            warp_meets();
            terms[(row - top) * blocks + block] = term;
            terms[(other - top) * blocks + block] = second;
            warp_meets();
            if (lane < 64 / blocks && top + lane < count) {
                const uint4* mine = (const uint4*)(terms + lane * blocks);
                uint4 four[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) four[i] = 4 * i < blocks ? mine[i] : uint4{0, 0, 0, 0};
                float sum = 0.0f;  // which zeros leave as it is
#pragma unroll
                for (int i = 0; i < 16; ++i) sum = sum + vt_float((int)word_in(four[i / 4], i % 4));
                float result[1] = {sum * Block<TYPE>::FOLD};
                store(p.out, first + top + lane, result, (int)p.kind);
            }
        }
    }
    if (own) return;
    __syncthreads();
    for (int row = (int)threadIdx.x; row < count; row += 32 * HELD_WARPS) {
        const float* terms = apart(row);
        float sum = 0.0f;
#pragma unroll 8
        for (int block = 0; block < blocks; ++block) sum = sum + terms[block];
        float result[1] = {sum * Block<TYPE>::FOLD};
        store(p.out, first + row, result, (int)p.kind);
    }
}
