// Several rows of activations meet the weights on tensor cores.
//
// A block has a share of the weight's rows, sixteen a warp (or, where sums run in eight lanes, two warps, with four lanes
// each), and 8 TILES rows of activations; one block has all of few rows, so that weights are read once. Stages of 256 k
// come into shared memory as they lie, whatever their alignment, while earlier ones are at work; activations lie in
// scratch as the lanes of a warp read them. A lane takes its parts of the blocks apart in registers, for all rows of
// activations at once. Integers meet exactly, and every term is added in the mirror's order: a warp walks down all of k.
#pragma once
#include "early.cuh"
#include "ggml_stages.cuh"

template <int TYPE, int TILES> struct Several : Staged<TYPE, TILES> {
    using S = Staged<TYPE, TILES>;
    using typename S::B;
    using typename S::R;
    using S::TURNS; using S::DEEP; using S::TEAM; using S::OWN; using S::LOWS; using S::LOW_BYTES; using S::CHECKED;
    using S::GRID; using S::PITCH; using S::p; using S::lane; using S::warp; using S::g; using S::t; using S::stages;
    using S::tiles; using S::rows; using S::top; using S::records; using S::ring; using S::memory; using S::barriers;
    using S::slot_bytes; using S::span; using S::lows_of; using S::engine; using S::send; using S::send_records;
    using S::stretch_rows; using S::stretch_records; using S::locate;

    VT_MEMBER Several(const Product& given, u8* shared) : S(given, shared) {}

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
