// The fast Hadamard transform of rows of 2-byte elements, by butterflies over 1, 2, 4 ... n / 2 neighbours in that order.
//
// A thread has HELD elements at a time: first neighbours, so that log2 HELD levels need no other thread; then, after an
// exchange through shared memory, elements HELD apart, for as many levels more; last eight neighbours of each part that
// is left, whose levels remain and which it stores. The next rows are on their way while these are summed up.
#pragma once
#include "rotation.cuh"

// Butterflies over reg numbers' bits FROM ... TO - 1.
template <int FROM, int TO, int HELD> VT_FN void levels_of(float (&v)[HELD]) {
#pragma unroll
    for (int level = FROM; level < TO; ++level)
#pragma unroll
        for (int j = 0; j < HELD; ++j)
            if (!(j >> level & 1)) {
                const float low = v[j], high = v[j + (1 << level)];
                v[j] = low + high;
                v[j + (1 << level)] = low - high;
            }
}

template <int KIND, int HELD> VT_FN void widen_eight(float (&v)[HELD], int from, const uint4& raw) {
    float eight[8];
    widen(eight, Raw<8>{raw, raw}, KIND);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[from + j] = eight[j];
}

template <int KIND, int HELD> VT_FN uint4 narrow_eight(const float (&v)[HELD], int from, float factor) {
    float eight[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) eight[j] = v[from + j] * factor;
    return narrow(eight, KIND).a;
}

// N neighbouring threads of a block of ALL, 32 or more.
template <int N, int ALL> VT_FN void some_meet() {
#ifdef __CUDACC__
    if (N == 32) __syncwarp();
    else if (N == ALL) __syncthreads();
    else asm volatile("bar.sync %0, %1;" ::"r"(1 + (int)threadIdx.x / N), "n"(N) : "memory");
#else
    if (N == 32) warp_meets();
    else __syncthreads();
#endif
}

// Rows of 2^LOG, 2^PART elements a thread, LOG <= 3 PART - 3. A block has whole rows.
template <int LOG, int PART, int KIND> struct Transform {
    static constexpr int HELD = 1 << PART, N = 1 << LOG, TEAM = N / HELD, PIECES = HELD / 8, LAST = LOG - 2 * PART;
    static constexpr int ROWS = TEAM < 128 ? 128 / TEAM : 1, THREADS = TEAM * ROWS;
    static constexpr int ROOM = N + 4 * TEAM;  // floats of a row between threads: four more after each HELD
    static constexpr int BYTES = ROWS * (N * 2 + ROOM * 4);

    static VT_MEMBER int place(int n) { return n + (n >> PART) * 4; }
    // Of 64 in a row the second half's fours change places in pairs: lanes that read eight each meet in no bank.
    static VT_MEMBER int turned(int four) { return PART == 6 ? four ^ (four >> 3 & 1) : four; }
    // Of HELD threads, which have neighbours of the first two rounds, and of a row's.
    static VT_MEMBER void few_meet() { some_meet<HELD, THREADS>(); }
    static VT_MEMBER void row_meets() { some_meet<TEAM, THREADS>(); }
    static VT_MEMBER void send(uint4* raw, const uint4* row, int t) {
        const int first = t / HELD * (HELD * PIECES) + t % HELD;
#pragma unroll
        for (int i = 0; i < PIECES; ++i) copy_async(raw + place_of_piece<PIECES>(first + i * HELD), row + first + i * HELD);
    }

    // little: what comes and what goes between threads share their memory, so that no row is on its way meanwhile; of rows
    // of which not every GPU has room for both.
    static VT_MEMBER void run(i64 rows, i64 blocks, const uint4* x, uint4* out, float factor, bool little, unsigned char* memory) {
        const bool alone = LOG >= 14 && little;
        const int within = (int)threadIdx.x / TEAM, t = (int)threadIdx.x % TEAM;
        uint4* raw = (uint4*)memory + within * (N / 8);
        float* between = (float*)(memory + (alone ? 0 : ROWS * N * 2)) + within * ROOM;
        i64 row = (i64)blockIdx.x * ROWS + within;
        if (row < rows && !alone) send(raw, x + row * (N / 8), t);
        for (i64 first = (i64)blockIdx.x * ROWS; first < rows; first += blocks * ROWS, row += blocks * ROWS) {
            float v[HELD];
            if (alone) {
                __syncthreads();
                if (row < rows) send(raw, x + row * (N / 8), t);
            }
            copies_arrive();
            few_meet();
#pragma unroll
            for (int i = 0; i < PIECES; ++i) widen_eight<KIND>(v, 8 * i, raw[place_of_piece<PIECES>(t * PIECES + i)]);
            levels_of<0, PART>(v);
            if (alone) __syncthreads();
            uint4* fours = (uint4*)between + t * (HELD / 4 + 1);
#pragma unroll
            for (int i = 0; i < HELD / 4; ++i)
                fours[turned(i)] = four_bits(v, 4 * i);
            few_meet();
            const i64 then = row + blocks * ROWS;
            if (then < rows && !alone) send(raw, x + then * (N / 8), t);
            float* column = between + place((t >> PART << 2 * PART) + 4 * turned((t & (HELD - 1)) >> 2) + (t & 3));
#pragma unroll
            for (int q = 0; q < HELD; ++q) v[q] = column[q * (HELD + 4)];
            levels_of<0, PART>(v);
            uint4* to = out + row * (N / 8) + t;
            if constexpr (LAST == 0) {
                few_meet();
                unsigned short* shorts = (unsigned short*)between + t;
#pragma unroll
                for (int q = 0; q < HELD; q += 2) {
                    const float lo = v[q] * factor, hi = v[q + 1] * factor;
                    const unsigned pair = KIND == BF16 ? narrow_bf16(lo, hi) : narrow_f16(lo, hi);
                    shorts[q * HELD] = (unsigned short)pair;
                    shorts[(q + 1) * HELD] = (unsigned short)(pair >> 16);
                }
                few_meet();
#pragma unroll
                for (int i = 0; i < PIECES; ++i)
                    if (row < rows) to[i * TEAM] = ((const uint4*)between)[i * TEAM + t];
            } else {
#pragma unroll
                for (int q = 0; q < HELD; ++q) column[q * (HELD + 4)] = v[q];
                row_meets();
                constexpr int PARTS = 1 << LAST, WIDE = PIECES / PARTS;  // eights of a part
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
#pragma unroll
                    for (int w = 0; w < WIDE; ++w) {
                        const int at = (part << 2 * PART) + (w * TEAM + t) * 8;
                        const uint4* eight = (const uint4*)(between + place(at & ~(HELD - 1)));
                        const int four = (at & (HELD - 1)) >> 2;
                        float* mine = v + (part * WIDE + w) * 8;
#pragma unroll
                        for (int h = 0; h < 2; ++h) four_floats(mine, 4 * h, eight[turned(four + h)]);
                    }
                if (!alone) row_meets();  // the next row may come there
                levels_of<PART - LAST, PART>(v);
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
#pragma unroll
                    for (int w = 0; w < WIDE; ++w)
                        if (row < rows)
                            to[(part << (2 * PART - 3)) + w * TEAM] = narrow_eight<KIND>(v, (part * WIDE + w) * 8, factor);
            }
        }
    }
};

// Rows of 2^log2n elements, 32 to 512, 32 of each in a lane; a warp has 1024 elements.
template <int KIND>
VT_FN void transform_in_lanes(i64 count, int log2n, i64 blocks, const uint4* x, uint4* out, float factor, uint4* memory) {
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    uint4* mine = memory + warp * 128;
    const i64 runs = count / 32;  // of 32 elements
    for (i64 first = ((i64)blockIdx.x * 4 + warp) * 32; first < runs; first += blocks * 128) {
        const int left = runs - first < 32 ? (int)(runs - first) : 32;
        float v[32];
        send_for_runs<32>(mine, x + first * 4, left);
        copies_arrive();
        warp_meets();
#pragma unroll
        for (int i = 0; i < 4; ++i) widen_eight<KIND>(v, 8 * i, mine[place_of_piece<4>(lane * 4 + i)]);
        levels_of<0, 5>(v);
        for (int level = 5; level < log2n; ++level) {
            const int far = 1 << (level - 5);
            const float sign = lane & far ? -1.0f : 1.0f;
#pragma unroll
            for (int j = 0; j < 32; ++j) v[j] = vt_fma(v[j], sign, __shfl_xor_sync(0xffffffffu, v[j], far));
        }
        warp_meets();
#pragma unroll
        for (int i = 0; i < 4; ++i) mine[place_of_piece<4>(lane * 4 + i)] = narrow_eight<KIND>(v, 8 * i, factor);
        warp_meets();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = i * 32 + lane;
            if (n < left * 4) out[first * 4 + n] = mine[place_of_piece<4>(n)];
        }
        warp_meets();
    }
}
