// Several rows of activations meet the weights on tensor cores.
//
// A block has a share of the weight's rows, sixteen a warp (or, where sums run in eight lanes, two warps, with four lanes
// each), and 8 TILES rows of activations; one block has all of few rows, so that weights are read once. Stages of 256 k
// come into shared memory as they lie, whatever their alignment, while earlier ones are at work; activations lie in
// scratch as the lanes of a warp read them. A lane takes its parts of the blocks apart in registers, for all rows of
// activations at once. Integers meet exactly, and every term is added in the mirror's order: a warp walks down all of k.
#pragma once
#include "early.cuh"
#include "ggml_fragments.cuh"
#include "ggml_ring.cuh"

// What stands together of eight rows of activations and 256 k: codes, sums that minimums meet, scales.
template <int TYPE> struct Record {
    using B = Block<TYPE>;
    static constexpr int CODES = B::LANES ? 4096 : 2048, SUMS = B::MINIMUM ? 256 : 0, SCALES = B::LARGE ? 32 : 256;
    static constexpr int BYTES = CODES + SUMS + SCALES;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr bool SPARING = true;  // other architectures' code has more in registers
#else
constexpr bool SPARING = false;
#endif

struct alignas(16) Four { float x[4]; };

struct Product {
    i64 rows, columns, units, stride, out_stride;
    const u8 *b, *records;
    void* out;
    int kind, shares, slots, bulk;  // bulk: the copy engine can bring whole stages of rows
};

template <int TYPE, int TILES> struct Several {
    using B = Block<TYPE>;
    using R = Record<TYPE>;
    // Blocks of 32 and few rows: two warps take turns, so that there are warps enough; a stage has 256 k for each.
    static constexpr bool TURNS = !B::LARGE && TILES == 2;
    static constexpr int DEEP = TILES == 2 ? 2 : 1, CHAINS = TURNS ? 8 * 32 * 16 * TILES : 0, BARRIERS = 64;
    static constexpr int CHUNK = B::BYTES * (B::LARGE ? 1 : 8) * DEEP;  // bytes of a row of a stage
    static constexpr int PIECES = (CHUNK + 14) / 16 + 1;                // of 16 bytes, wherever it begins
    static constexpr int PITCH = 16 * (PIECES | 1);                     // rows meet in no bank
    static constexpr int ABREAST = PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : PIECES <= 32 ? 32 : 64;  // threads that send a row's
    // Warps that have sixteen rows together, and the sums of each.
    static constexpr int TEAM = B::LANES || TURNS ? 2 : 1, OWN = B::LANES ? 4 : 1;
    static constexpr int LOWS = (TILES + 1) / 2;  // eights whose minimums a warp adds up, in shared memory
    static constexpr int LOW_BYTES = B::LANES && B::MINIMUM ? (TILES == 2 ? 14 : 8) * 32 * 16 * LOWS : 0;
    static constexpr int CHECKED = TILES < 4 || SPARING ? 1 : 2;  // eights of rows that are there or not together
    static constexpr int GRID = TYPE == IQ2_XXS || TYPE == IQ3_XXS ? 1024 : 0;

    const Product& p;
    int lane, warp, g, t, stages, tiles, rows;  // tiles: of eight rows of activations; rows: of the weight
    i64 top;                                     // the first of the weight's
    const u8* records;
    u8 *ring, *memory;
    u64* barriers;
    int slot_bytes, span;

    VT_MEMBER Several(const Product& given, u8* shared) : p(given) {
        lane = threadIdx.x & 31, warp = (int)threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
        stages = (int)((p.units + 8 * DEEP - 1) / (8 * DEEP));
        memory = shared;
        barriers = (u64*)(shared + GRID + CHAINS);
        ring = shared + GRID + CHAINS + BARRIERS + LOW_BYTES;
        span = (int)blockDim.x / 32 / TEAM * 16;
        slot_bytes = span * PITCH + TILES * DEEP * R::BYTES;
    }
    VT_MEMBER Four* lows_of(int warp) const { return (Four*)(ring - LOW_BYTES) + warp * 32 * LOWS + lane; }
    // Whether rows come by Hopper's copy engine; threads' own copies were faster with eight lanes of many rows.
    VT_MEMBER bool engine() const { return !(B::LANES && TILES > 2) && p.bulk != 0; }
    VT_MEMBER const u8* row(int i) const { return p.b + (top + i) * p.stride; }

    // Nothing past the end of a row is touched, and of what is before it, its sixteen bytes alone.
    VT_MEMBER void send(int stage, int slot) const {
        // A thread sends one piece of rows `sent`, `sent` + `step`, ...
        int piece = (int)threadIdx.x % ABREAST, sent = (int)threadIdx.x / ABREAST, step = (int)blockDim.x / ABREAST;
        bool even = (((unsigned long long)p.b | (unsigned long long)p.stride) & 15) == 0;  // rows begin at 16 bytes
        u8* to = ring + slot * slot_bytes + sent * PITCH + 16 * piece;
        int end = (int)(p.units / (B::LARGE ? 8 : 1)) * B::BYTES - stage * CHUNK;
        const u8* from = row(sent) + (i64)stage * CHUNK;
        i64 leap = step * p.stride;
        int at = 16 * piece - (CHUNK % 16 ? stage * CHUNK & 15 : 0);
        if (even && at < CHUNK && at + 16 <= end) {
            from += at;
#pragma unroll 4
            for (int r = sent; r < rows; r += step, from += leap, to += step * PITCH) copy_async(to, from);
        } else if (piece < PIECES) {
#pragma unroll 1
            for (int r = sent; r < rows; r += step, from += leap, to += step * PITCH) send_piece(to, from, end, piece);
        }
    }
    static VT_MEMBER void send_piece(u8* to, const u8* from, int end, int piece) {
        int at = 16 * piece - (int)((unsigned long long)from & 15);
        if (at >= CHUNK) return;
        if (at + 16 <= end) {
            copy_async(to, from + at);
        } else {
            for (int b = at < 0 ? -at : 0; b < 16; b += 2) {
                *(unsigned short*)(to + b) = at + b < end ? *(const unsigned short*)(from + at + b) : 0;
            }
        }
    }
    VT_MEMBER void send_records(int stage, int slot) const {
        u8* to = ring + slot * slot_bytes + span * PITCH;
        const u8* from = records + stage * ((p.rows + 7) / 8 * DEEP * R::BYTES);
        int all = tiles * DEEP * R::BYTES;
#pragma unroll 4
        for (int i = 16 * (int)threadIdx.x; i < all; i += 16 * (int)blockDim.x) copy_async(to + i, from + i);
    }

    // The same by Hopper's copy engine, a row a thread; a slot's barrier waits for all of these threads.
    VT_MEMBER void stretch_rows(int stage, int slot) const {
        int skew = CHUNK % 16 ? stage * CHUNK & 15 : 0, r = (int)threadIdx.x;
        if (r >= rows) return;
        stretch(ring + slot * slot_bytes + r * PITCH, row(r) + (i64)stage * CHUNK - skew, skew + CHUNK + 15 & ~15, barriers + slot);
    }
    VT_MEMBER void stretch_records(int stage, int slot) const {
        if ((int)threadIdx.x >= span) return;
        if (threadIdx.x == 0) {
            const u8* from = records + stage * ((p.rows + 7) / 8 * DEEP * R::BYTES);
            stretch(ring + slot * slot_bytes + span * PITCH, from, tiles * DEEP * R::BYTES, barriers + slot);
        }
        arrive(barriers + slot);
    }

    VT_MEMBER void locate(const u8* (&mine)[2], const u8* slot, int first, int stage) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int i = first + g + 8 * r;
            mine[r] = slot + i * PITCH + ((int)(unsigned long long)row(i) + stage * CHUNK & 15);
        }
    }

    // A stage of blocks of 32; those past the end of k are zeros.
    VT_MEMBER void meet_units(float (&sum)[TILES][OWN][4], const u8* const (&mine)[2], const u8* acts) const {
#pragma unroll 1
        for (int u = 0; u < 8; u += 2) {
            UnitPart w[2][2];
            units_of(w, mine, u);
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                if (j >= tiles && j % CHECKED == 0) break;
                float term[2][4];
                terms_of(term, w, acts + j * R::BYTES, u);
                add_up(sum[j][0], term);
            }
        }
    }
    VT_MEMBER Four* chain_of(int team) const { return (Four*)memory + team * 32 * TILES + lane; }
    // The same where two warps have turns: the first one's terms are added first.
    VT_MEMBER void meet_in_turns(const u8* const (&mine)[2], const u8* acts, int stage) const {
        int part = warp % TEAM, team = warp / TEAM;
        Four* chain = chain_of(team);
        const u8* const own[2] = {mine[0] + part * 8 * B::BYTES, mine[1] + part * 8 * B::BYTES};
        UnitPart w[2][8];
        units_of(w, own, 0);
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            if (j >= tiles) break;
            float term[8][4];
            terms_of(term, w, acts + (part * tiles + j) * R::BYTES, 0);
            auto add = [&] {
                Four held = {};
                if (part == 1 || stage > 0) held = chain[32 * j];
                add_up(held.x, term);
                chain[32 * j] = held;
            };
            if (part == 0) add();
            team_meets(1 + team, 64);  // both from one place: checkers of barriers want that
            if (part == 1) add();
        }
    }
    template <int COUNT> static VT_MEMBER void add_up(float (&sum)[4], const float (&term)[COUNT][4]) {
#pragma unroll
        for (int v = 0; v < COUNT; ++v) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = sum[i] + term[v][i];
        }
    }
    template <int COUNT> VT_MEMBER void units_of(UnitPart (&w)[2][COUNT], const u8* const (&mine)[2], int u) const {
#pragma unroll
        for (int v = 0; v < COUNT; ++v) {
#pragma unroll
            for (int r = 0; r < 2; ++r) w[r][v] = unit_of_row<TYPE>(mine[r] + (u + v) * B::BYTES, t);
        }
    }
    template <int COUNT>
    VT_MEMBER void terms_of(float (&term)[COUNT][4], const UnitPart (&w)[2][COUNT], const u8* record, int u) const {
        const u8 *codes = record + u * 256 + lane * 16, *beside = record + R::CODES + u * 32 + 8 * t;
#pragma unroll
        for (int v = 0; v < COUNT; ++v) {
            uint4 x = *(const uint4*)(codes + v / 2 * 512);
            uint2 d = *(const uint2*)(beside + R::SUMS + v * 32);
            const float da[2] = {vt_float((int)d.x), vt_float((int)d.y)};
            float s[2] = {};
            if constexpr (B::MINIMUM) {
                uint2 sums = *(const uint2*)(beside + v * 32);
                s[0] = vt_float((int)sums.x), s[1] = vt_float((int)sums.y);
            }
            const unsigned a[4] = {w[0][v].low, w[1][v].low, w[0][v].high, w[1][v].high};
            int c[4];
            bytes_onto<true>(c, a, v & 1 ? x.z : x.x, v & 1 ? x.w : x.y, MAGIC);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float whole = vt_float(c[i]) - VT_MAGIC, dw = scale_of<TYPE>(w[i >> 1][v]);
                if constexpr (B::MINIMUM) term[v][i] = (dw * da[i & 1]) * whole - -widen_f16(w[i >> 1][v].head >> 16) * s[i & 1];
                else if constexpr (TYPE == Q4_0) term[v][i] = (whole * dw) * da[i & 1];
                else term[v][i] = whole * (dw * da[i & 1]);
            }
        }
    }

    // A stage that is a block of 256 with one sum.
    VT_MEMBER void meet_block(float (&sum)[TILES][OWN][4], const u8* const (&mine)[2], const u8* acts) const {
        WholePart<TYPE> w[2];
        whole_of_row<TYPE>(w[0], mine[0], t, (const unsigned*)memory);
        whole_of_row<TYPE>(w[1], mine[1], t, (const unsigned*)memory);
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            if (j >= tiles && j % CHECKED == 0) break;
            const u8* held = acts + j * R::BYTES;
            uint2 d = *(const uint2*)(held + R::CODES + R::SUMS + 8 * t);
            const float da[2] = {vt_float((int)d.x), vt_float((int)d.y)};
            int total[4] = {0, 0, 0, 0};
#pragma unroll
            for (int u = 0; u < 8; u += 2) {
                uint4 x = *(const uint4*)(held + u * 256 + lane * 16);
#pragma unroll
                for (int v = 0; v < 2; ++v) {
                    const unsigned a[4] = {w[0].low[u + v], w[1].low[u + v], w[0].high[u + v], w[1].high[u + v]};
                    if constexpr (TYPE == Q2_K) {
                        multiply_bytes(total, a, v ? x.z : x.x, v ? x.w : x.y);
                    } else {
                        int c[4];
                        bytes_onto<true>(c, a, v ? x.z : x.x, v ? x.w : x.y, 0);
#pragma unroll
                        for (int i = 0; i < 4; ++i) total[i] += w[i >> 1].s[u + v] * c[i];
                    }
                }
            }
            float less[4] = {};
            if constexpr (B::MINIMUM) {
                const unsigned m[4] = {w[0].m[0], w[1].m[0], w[0].m[1], w[1].m[1]};
                minimums(less, m, held);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float whole = (float)total[i], dw = w[i >> 1].d, term;
                if constexpr (B::MINIMUM) term = (da[i & 1] * dw) * whole - (da[i & 1] * w[i >> 1].dmin) * less[i];
                else term = whole * (dw * da[i & 1]);
                sum[j][0][i] = sum[j][0][i] + term;
            }
        }
    }
    VT_MEMBER void minimums(float (&less)[4], const unsigned (&m)[4], const u8* held) const {
        uint2 x = *(const uint2*)(held + R::CODES + lane * 8);
        halves_product(less, m, x.x, x.y);
    }

    // A stage that is a block of 256 in eight lanes, of which OWN are this warp's; its minimums for some of the eights.
    VT_MEMBER void meet_lanes(float (&sum)[TILES][OWN][4], const u8* const (&mine)[2],
                              const u8* acts, int part) const {
        constexpr int PLANES = TYPE == Q6_K ? 2 : 1, AT_ONCE = SPARING ? 1 : TYPE == Q6_K || TILES == 2 ? 2 : 4;  // for want of registers
#pragma unroll
        for (int l0 = 0; l0 < OWN; l0 += AT_ONCE) {
            unsigned a[AT_ONCE][PLANES][2][4], minimum[4];
            float dw[2], dmin[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                LanesPart w;
                lanes_of_row<TYPE>(w, mine[r], t, part);
                dw[r] = w.d, dmin[r] = w.dmin;
                minimum[r] = w.m[0], minimum[2 + r] = w.m[1];
#pragma unroll
                for (int q = 0; q < 4; ++q) {
#pragma unroll
                    for (int l = 0; l < AT_ONCE; ++l) {
                        unsigned lost = 0;
                        a[l][0][q >> 1][2 * (q & 1) + r] = lanes_pair<TYPE>(lost, w, q, l0 + l);
                        if constexpr (PLANES == 2) a[l][1][q >> 1][2 * (q & 1) + r] = lost;
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                if (j >= tiles && j % CHECKED == 0) break;
                const u8* held = acts + j * R::BYTES;
                uint2 d = *(const uint2*)(held + R::CODES + R::SUMS + 8 * t);
                const float da[2] = {vt_float((int)d.x), vt_float((int)d.y)};
#pragma unroll
                for (int l = 0; l < AT_ONCE; ++l) {
                    uint4 x = *(const uint4*)(held + (OWN * part + l0 + l) * 512 + lane * 16);
                    float c[4];
                    halves_product(c, a[l][0][0], x.x, x.y);
                    multiply<F16>(c, a[l][0][1], x.z, x.w);
                    if constexpr (PLANES == 2) {
                        multiply<F16>(c, a[l][1][0], x.x, x.y);
                        multiply<F16>(c, a[l][1][1], x.z, x.w);
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[j][l0 + l][i] = sum[j][l0 + l][i] + (dw[i >> 1] * da[i & 1]) * c[i];
                }
                if constexpr (B::MINIMUM) {
                    if (l0 == 0 && j % TEAM == part) {
                        float less[4];
                        minimums(less, minimum, held);
                        Four low = lows_of(warp)[32 * (j / TEAM)];
#pragma unroll
                        for (int i = 0; i < 4; ++i) low.x[i] = low.x[i] - (dmin[i >> 1] * da[i & 1]) * less[i];
                        lows_of(warp)[32 * (j / TEAM)] = low;
                    }
                }
            }
        }
    }

    VT_MEMBER void put(int tile, int first, const float (&total)[4], i64 above) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            i64 m = above + 8 * tile + 2 * t + (i & 1);
            int n = first + g + 8 * (i >> 1);
            float one[1] = {total[i]};
            if (n < rows && m < p.rows) store(p.out, m * p.out_stride + top + n, one, p.kind);
        }
    }

    VT_MEMBER void run() {
        int groups = (int)((p.rows + 8 * TILES - 1) / (8 * TILES)), share = (int)blockIdx.x / groups;
        i64 above = (i64)((int)blockIdx.x - share * groups) * 8 * TILES, left = (p.rows - above + 7) / 8;
        tiles = left < TILES ? (int)left : TILES;
        records = p.records + above / 8 * R::BYTES;
        if constexpr (GRID != 0) {
            for (int i = (int)threadIdx.x; i < 256; i += (int)blockDim.x) {
                unsigned entry = TYPE == IQ2_XXS ? IQ2_XXS_DIGITS[i] : permute(0x1c140c04u, 0x3e342c24u, IQ3_XXS_DIGITS[i]);
                ((unsigned*)memory)[i] = entry;
            }
        }
        i64 begin = p.columns * share / p.shares, end = p.columns * (share + 1) / p.shares;
        int part = warp % TEAM, first = warp / TEAM * 16;
        int slot = 0, parity = 0;
        if (engine()) {
            if ((int)threadIdx.x < p.slots) phases_begin(barriers + threadIdx.x, span);
            phases_seen();
            __syncthreads();
        }
        for (top = begin; top < end; top += span) {
            rows = (int)(end - top < span ? end - top : span);
            float sum[TILES][OWN][4] = {};
            if constexpr (LOW_BYTES > 0) {
                for (int j = 0; j < LOWS; ++j) lows_of(warp)[32 * j] = {};
            }
            auto ahead = [&](int s) { return slot + s < p.slots ? slot + s : slot + s - p.slots; };
            for (int s = 0; s < p.slots - 1 && s < stages; ++s) {
                if (engine()) stretch_rows(s, ahead(s));
                else send(s, ahead(s));
            }
            after_others();  // what the activations became; weights were there before
            for (int s = 0; s < p.slots - 1; ++s) {
                if (s < stages) {
                    if (engine()) stretch_records(s, ahead(s));
                    else send_records(s, ahead(s));
                }
                copies_close();
            }
            for (int stage = 0; stage < stages; ++stage) {
                if (engine()) {
                    phase_over(barriers + slot, parity);
                    before_copies();
                } else if (p.slots == 2) copies_wait<0>();
                else copies_wait<1>();
                __syncthreads();
                int next = stage + p.slots - 1;
                if (next < stages) {
                    if (engine()) {
                        stretch_rows(next, ahead(p.slots - 1));
                        stretch_records(next, ahead(p.slots - 1));
                    } else {
                        send(next, ahead(p.slots - 1));
                        send_records(next, ahead(p.slots - 1));
                    }
                }
                copies_close();
                if (first < rows) {
                    const u8* held = ring + slot * slot_bytes;
                    const u8* acts = held + span * PITCH;
                    const u8* mine[2];
                    locate(mine, held, first, stage);
                    if constexpr (TURNS) {
                        meet_in_turns(mine, acts, stage);
                    } else {
#pragma unroll 1
                        for (int d = 0; d < DEEP; ++d) {
                            if constexpr (B::LANES) meet_lanes(sum, mine, acts, part);
                            else if constexpr (B::LARGE) meet_block(sum, mine, acts);
                            else meet_units(sum, mine, acts);
                            if constexpr (DEEP > 1) {
                                mine[0] += B::BYTES, mine[1] += B::BYTES;
                                acts += tiles * R::BYTES;
                            }
                        }
                    }
                }
                slot = slot + 1 == p.slots ? 0 : slot + 1;
                parity ^= slot == 0;
            }
            __syncthreads();
            finish(sum, first, part, above);
        }
    }

    // Minimums and the sums of lanes go from warp to warp by way of shared memory.
    VT_MEMBER void finish(const float (&sum)[TILES][OWN][4], int first, int part, i64 above) const {
        if constexpr (!B::LANES) {
            if (first >= rows || part + 1 < TEAM) return;
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                if (j >= tiles) break;
                float total[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if constexpr (TURNS) total[i] = stages ? chain_of(warp / TEAM)[32 * j].x[i] : 0.0f;
                    else total[i] = sum[j][0][i] * B::FOLD;
                }
                put(j, first, total, above);
            }
        } else {
            Four* meeting = (Four*)ring + warp / TEAM * 32 * TILES + lane;
            for (int turn = 0; turn < TEAM; ++turn) {
                if (part == turn) {
#pragma unroll
                    for (int j = 0; j < TILES; ++j) {
                        Four held = {};
                        if (turn > 0) held = meeting[32 * j];
                        else if (B::MINIMUM) held = lows_of(warp + j % TEAM)[32 * (j / TEAM)];
#pragma unroll
                        for (int l = 0; l < OWN; ++l) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) held.x[i] = held.x[i] + sum[j][l][i];
                        }
                        if (turn + 1 < TEAM) meeting[32 * j] = held;
                        else if (j < tiles) put(j, first, held.x, above);
                    }
                }
                if (engine()) before_copies();
                __syncthreads();
            }
        }
    }
};

template <int TYPE, int TILES> VT_MEMBER void several(const Product& p) {
    VT_SHARED(memory);
    Several<TYPE, TILES>(p, memory).run();
}
