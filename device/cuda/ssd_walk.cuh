// Mamba-2's time steps on all chunks, and the states between them, on tensor cores. A block a sequence, head, 64 channels
// and 64 elements of the state (16 of these by 32 channels for each of its warps), whose S stays in registers as the sums
// of S += (B f)^T x from the first token to the last, f = exp(a_last - a) dt; at the start of a chunk it leaves rounded and
// decays. The next tiles of 64 tokens are under way meanwhile.
//
// S holds something that is not finite after a chunk wherever one of its tokens does: `loud` says so of each warp's part.
#pragma once
#include "gdn_tiles.cuh"
#include "ssd_steps.cuh"

#define LOG2_E 1.442695f
#define SUM_HEADS 8           // heads of a block of ssd_sums: device/ssd_scan.py
#define PART 64               // channels, and elements of the state, of a block; tokens of a tile
#define PART_ROW 8            // vectors of them
#define PART_TILE (PART * PART * 2)
#define WALK_THREADS 256      // device/ssd_scan.py
#define WALK_WARPS (WALK_THREADS / 32)
#define WALK_STAGES 3
#define WALK_STAGE (2 * PART_TILE)

// exp2 of a difference of sums, which are in units of log 2; min(late - early, 0), and NaN stays.
#ifdef __CUDACC__
VT_FN float below_zero(float x) {
    float y;
    asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}
#else
VT_FN float below_zero(float x) { return vt_minimum(x, 0.0f); }
#endif
VT_FN float fade_of(float late, float early) { return fast_exp2(below_zero(late - early)); }

// send_rows of rows of `vectors` of them, the tile's others zeros.
template <int VECTORS, int ROWS, int OF_BLOCK = THREADS>
VT_FN void send_some(unsigned char* tile, const void* from, i64 step, int rows, int vectors) {
    constexpr int TURN = OF_BLOCK / VECTORS;
    const int row = threadIdx.x / VECTORS, v = threadIdx.x % VECTORS;
    const char* source = (const char*)from + (row * step + v * 8) * 2;
    unsigned char* to = tile + swizzled<VECTORS>(row, v);
#pragma unroll
    for (int r = 0; r < ROWS; r += TURN, source += TURN * step * 2)
        copy_or_zero(to + r * VECTORS * 16, source, row + r < rows && v < vectors);
}

// dt and the running sums of dt A of each chunk, in units of log 2: a warp a chunk and head. Both are [heads, tokens].
extern "C" __global__ void __launch_bounds__(32 * SUM_HEADS)
    ssd_sums(STEPS_PARAMETERS, const float* A, const int* starts, i64 sequences, i64 size, i64 tokens, float* sums,
             float* dts) {
    const Steps steps = THE_STEPS;
    const Chunks chunks = {starts, nullptr, (int)sequences, (int)size};
    const int groups = ((int)heads + SUM_HEADS - 1) / SUM_HEADS, lane = lane_of();
    const i64 head = blockIdx.x % groups * SUM_HEADS + warp_of();
    const Piece piece = chunks.at((int)(blockIdx.x / groups));
    if (head >= heads) return;
    const float own = A[head] * LOG2_E;
    float carried = 0.0f;
    for (int first = 0; first < piece.length; first += 32) {
        const bool there = first + lane < piece.length;
        const i64 at = piece.first + first + lane;
        const float step = there ? steps.at(at, head) : 0.0f;
        float total = step * own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const float other = __shfl_sync(WARP_LANES, total, lane >= d ? lane - d : lane);
            if (lane >= d) total += other;
        }
        total += carried;
        carried = __shfl_sync(WARP_LANES, total, 31);
        if (there) {
            sums[head * tokens + at] = total;
            dts[head * tokens + at] = step;
        }
    }
}

template <int KIND> VT_FN void halves_of(float& low, float& high, unsigned two) {
    low = KIND == BF16 ? vt_float((int)(two << 16)) : widen_f16(two & 0xffffu);
    high = KIND == BF16 ? vt_float((int)(two & 0xffff0000u)) : widen_f16(two >> 16);
}
template <int KIND> VT_FN unsigned times(unsigned two, float of_low, float of_high) {
    float low, high;
    halves_of<KIND>(low, high, two);
    return pair<KIND>(low * of_low, high * of_high);
}

struct Tokens {
    const unsigned char *x, *B;
    const float *sums, *dts;  // of the sequence's first token
    unsigned char* ring;
    float* factors;  // [2][PART + 4]: f of this tile and of the next; then exp(a_last)
    i64 x_step, B_step;
    int length, size, vectors;

    VT_MEMBER int tiles() const { return (length + PART - 1) / PART; }
    VT_MEMBER int rows(int i) const { return length - i * PART; }
    VT_MEMBER unsigned char* stage(int i) const { return ring + i % WALK_STAGES * WALK_STAGE; }

    VT_MEMBER void send(int i) const {
        if (i < tiles()) {
            const i64 first = (i64)i * PART;
            send_some<PART_ROW, PART, WALK_THREADS>(stage(i), x + first * x_step * 2, x_step, rows(i), PART_ROW);
            send_some<PART_ROW, PART, WALK_THREADS>(stage(i) + PART_TILE, B + first * B_step * 2, B_step, rows(i), vectors);
        }
        copies_close();
    }

    // This thread's token of tile i: its sum and step, and the sum at the end of its chunk, which ends before `end`.
    struct Asked { float own, last, step; };
    VT_MEMBER Asked ask(int i, int& end) const {
        Asked asked = {0.0f, 0.0f, 0.0f};
        if (i >= tiles()) return asked;
        if (i * PART >= end) end += size;
        const int t = i * PART + threadIdx.x;
        asked.last = sums[(end < length ? end : length) - 1];
        if (threadIdx.x < PART && t < length) asked.own = sums[t], asked.step = dts[t];
        return asked;
    }
    VT_MEMBER void put(int i, const Asked& asked) const {
        if (i >= tiles()) return;
        float* to = factors + (i & 1) * (PART + 4);
        if (threadIdx.x < PART) to[threadIdx.x] = (int)threadIdx.x < rows(i) ? fade_of(asked.last, asked.own) * asked.step : 0.0f;
        if (threadIdx.x == 0) to[PART] = fast_exp2(asked.last);
    }
};

#define WALK_PARAMETERS                                                                                          \
    i64 heads, i64 width, i64 groups, i64 length, const void *x, const void *B, const float *sums,               \
        const float *dts, const int *starts, i64 sequences, i64 size, i64 tokens, const void *initial,           \
        i64 initial_kind, void *before, int *loud, float *final
#define WALK_NAMES                                                                                               \
    heads, width, groups, length, x, B, sums, dts, starts, sequences, size, tokens, initial, initial_kind, before, loud, final

template <int KIND> VT_FN void walk(WALK_PARAMETERS) {
    VT_SHARED(shared);
    const Chunks chunks = {starts, nullptr, (int)sequences, (int)size};
    const int parts = (int)((length + PART - 1) / PART), tops = (int)(width / PART);
    const int part = blockIdx.x % parts, top = blockIdx.x / parts % tops, at = blockIdx.x / parts / tops;
    const int head = at % (int)heads, n = at / (int)heads, group = head / (int)(heads / groups);
    const int lane = lane_of(), warp = warp_of(), row = lane >> 2, column = (lane & 3) * 2;
    const int strip = warp & 3, side = warp >> 2 << 5;  // the warp's 16 elements of the state; its first channel
    const int e0 = part * PART + 16 * strip;
    const bool own = e0 < length;
    const i64 first = chunks.begin(n), kept = (((i64)n * heads + head) * width + top * PART) * length;
    const int left = (int)length - part * PART;
    const Tokens walked = {(const unsigned char*)x + ((first * heads + head) * width + top * PART) * 2,
                           (const unsigned char*)B + ((first * groups + group) * length + part * PART) * 2,
                           sums + head * tokens + first, dts + head * tokens + first, shared,
                           (float*)(shared + WALK_STAGES * WALK_STAGE + PART_TILE), heads * width, groups * length,
                           chunks.length(n), (int)size, left < PART ? left / 8 : PART_ROW};
    unsigned char* staged = shared + WALK_STAGES * WALK_STAGE;
    const int tiles = walked.tiles();
    int end = walked.size;  // of the chunk of the tile that is asked for; that is two ahead
    const Tokens::Asked asked = walked.ask(0, end);
    Tokens::Asked next = walked.ask(1, end);
    for (int i = 0; i < WALK_STAGES - 1; ++i) walked.send(i);

    float S[4][4];  // element e0 + row + 8 (i / 2), channel side + 8 b + column + i % 2
    const auto place_of = [&](int b, int i) {
        return kept + (i64)(side + 8 * b + column + (i & 1)) * length + e0 + row + 8 * (i >> 1);
    };
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float one[1] = {0.0f};
            if (own && initial != nullptr) load(one, initial, place_of(b, i), (int)initial_kind);
            S[b][i] = one[0];
        }
    walked.put(0, asked);

    i64 chunk = (i64)chunks.place(n) * heads + head;
    for (int i = 0, begin = 0; i < tiles; ++i) {  // begin: of the next chunk
        copies_wait<WALK_STAGES - 2>();
        __syncthreads();
        walked.send(i + WALK_STAGES - 1);
        const Tokens::Asked later = walked.ask(i + 2, end);
        const unsigned char *x_tile = walked.stage(i), *B_tile = x_tile + PART_TILE;
        const float* factor = walked.factors + (i & 1) * (PART + 4);
        if (i * PART == begin) {
            begin += walked.size;
#pragma unroll
            for (int b = 0; b < 4; ++b)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    put_pair<PART_ROW>(staged, side + 8 * b + row, 2 * strip + half,
                                       transposed(pair<KIND>(S[b][2 * half], S[b][2 * half + 1])));
            warp_meets();
            char* to = (char*)before + ((chunk * width + top * PART) * length + part * PART) * 2;
            if (own) write_rows<PART_ROW, 2, 32>(to, length, staged, side, PART, 2 * strip);
            warp_meets();
            const float keep = factor[PART];
#pragma unroll
            for (int b = 0; b < 4; ++b)
#pragma unroll
                for (int j = 0; j < 4; ++j) S[b][j] *= keep;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            unsigned a[4];
            fetch_transposed(a, flat<PART_ROW>(B_tile, 16 * k, 2 * strip));
            const float* f = factor + 16 * k + column;
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] = times<KIND>(a[j], f[8 * (j >> 1)], f[8 * (j >> 1) + 1]);
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                unsigned other[4];
                fetch_transposed(other, tall<PART_ROW>(x_tile, 16 * k, side / 8 + 2 * b));
                multiply<KIND>(S[2 * b], a, other[0], other[1]);
                multiply<KIND>(S[2 * b + 1], a, other[2], other[3]);
            }
        }
        if ((i + 1) * PART == begin || i + 1 == tiles) {
            float zero = 0.0f;
#pragma unroll
            for (int b = 0; b < 4; ++b)
#pragma unroll
                for (int j = 0; j < 4; ++j) zero = vt_fma(S[b][j], 0.0f, zero);
            const int any = __any_sync(WARP_LANES, zero != zero);
            if (lane == 0) loud[((chunk * tops + top) * parts + part) * WALK_WARPS + warp] = any;
            chunk += heads;
        }
        walked.put(i + 1, next);
        next = later;
    }
    if (!own) return;
#pragma unroll
    for (int b = 0; b < 4; ++b)
#pragma unroll
        for (int i = 0; i < 4; ++i) final[place_of(b, i)] = S[b][i];
}

extern "C" __global__ void __launch_bounds__(WALK_THREADS, 2) ssd_walk_bf16(WALK_PARAMETERS) { walk<BF16>(WALK_NAMES); }
extern "C" __global__ void __launch_bounds__(WALK_THREADS, 2) ssd_walk_f16(WALK_PARAMETERS) { walk<F16>(WALK_NAMES); }
