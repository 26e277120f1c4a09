// Several rows of activations meet the weights on tensor cores.
//
// A block has a share of the weight's rows, sixteen a warp, and 8 TILES rows of activations; one block has all of few
// rows, so that weights are read once. Stages of 256 k
// come into shared memory as they lie, whatever their alignment, while earlier ones are at work; activations lie in
// scratch as the lanes of a warp read them. A lane takes its parts of the blocks apart in registers, for all rows of
// activations at once. Integers meet exactly, and every term is added in the mirror's order: a warp walks down all of k.
#pragma once
#include "early.cuh"
#include "ggml_planes.cuh"
#include "ggml_stages.cuh"

template <int TYPE, int TILES> struct Several : Staged<TYPE, TILES> {
    using S = Staged<TYPE, TILES>;
    using typename S::B;
    using typename S::R;
    using S::TURNS; using S::DEEP; using S::TEAM; using S::CHECKED;
    using S::GRID; using S::PITCH; using S::p; using S::lane; using S::warp; using S::g; using S::t; using S::stages;
    using S::tiles; using S::rows; using S::top; using S::records; using S::ring; using S::memory; using S::barriers;
    using S::slot_bytes; using S::span; using S::engine; using S::send; using S::send_records;
    using S::stretch_rows; using S::stretch_records; using S::locate;

    VT_MEMBER Several(const Product& given, u8* shared) : S(given, shared) {}

    // A stage of blocks of 32; those past the end of k are zeros.
    VT_MEMBER void meet_units(float (&sum)[TILES][4], const u8* const (&mine)[2], const u8* acts) const {
#pragma unroll 1
        for (int u = 0; u < 8; u += 2) {
            UnitPart w[2][2];
            units_of(w, mine, u);
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                if (j >= tiles && j % CHECKED == 0) break;
                float term[2][4];
                terms_of(term, w, acts + j * R::BYTES, u);
                add_up(sum[j], term);
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

    // A stage that is a block of 256: the i-quants, whose scales are apart, and the others in planes of bytes.
    VT_MEMBER void meet_signs(float (&sum)[TILES][4], const u8* const (&mine)[2], const u8* acts) const {
        WholePart<TYPE> w[2];
        whole_of_row<TYPE>(w[0], mine[0], t, (const unsigned*)memory);
        whole_of_row<TYPE>(w[1], mine[1], t, (const unsigned*)memory);
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            if (j >= tiles && j % CHECKED == 0) break;
            const u8* held = acts + j * R::BYTES;
            int total[4] = {0, 0, 0, 0};
#pragma unroll
            for (int u = 0; u < 8; u += 2) {
                uint4 x = *(const uint4*)(held + u * 256 + lane * 16);
#pragma unroll
                for (int v = 0; v < 2; ++v) {
                    const unsigned a[4] = {w[0].low[u + v], w[1].low[u + v], w[0].high[u + v], w[1].high[u + v]};
                    int c[4];
                    bytes_onto<true>(c, a, v ? x.z : x.x, v ? x.w : x.y, 0);
#pragma unroll
                    for (int i = 0; i < 4; ++i) total[i] += w[i >> 1].s[u + v] * c[i];
                }
            }
            float da[2];
            scales_of(da, held);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[j][i] = sum[j][i] + (float)total[i] * (w[i >> 1].d * da[i & 1]);
        }
    }
    VT_MEMBER void scales_of(float (&da)[2], const u8* held) const {
        uint2 d = *(const uint2*)(held + R::CODES + R::SUMS + 8 * t);
        da[0] = vt_float((int)d.x), da[1] = vt_float((int)d.y);
    }
    VT_MEMBER void meet_block(float (&sum)[TILES][4], const u8* const (&mine)[2], const u8* acts) const {
        using P = Planes<TYPE>;
        P w[2];
        unsigned a[8][P::COUNT][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            w[r].fetch(mine[r], t);
#pragma unroll
            for (int u = 0; u < 8; ++u) {
                unsigned words[P::COUNT][2];
                w[r].take(words, u);
#pragma unroll
                for (int plane = 0; plane < P::COUNT; ++plane) a[u][plane][r] = words[plane][0], a[u][plane][2 + r] = words[plane][1];
            }
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            if (j >= tiles && j % CHECKED == 0) break;
            const u8* held = acts + j * R::BYTES;
            int total[4] = {0, 0, 0, 0}, rest[4] = {0, 0, 0, 0};
#pragma unroll
            for (int u = 0; u < 8; u += 2) {
                uint4 x = *(const uint4*)(held + u * 256 + lane * 16);
#pragma unroll
                for (int v = 0; v < 2; ++v) {
                    if constexpr (P::SIGNED) multiply_bytes(total, a[u + v][0], v ? x.z : x.x, v ? x.w : x.y);
                    else multiply_unsigned(total, a[u + v][0], v ? x.z : x.x, v ? x.w : x.y);
                    if constexpr (P::COUNT == 2) multiply_unsigned(rest, a[u + v][1], v ? x.z : x.x, v ? x.w : x.y);
                }
            }
            float da[2], less[4] = {};
            scales_of(da, held);
            if constexpr (B::MINIMUM) {
                const unsigned m[4] = {w[0].m[0], w[1].m[0], w[0].m[1], w[1].m[1]};
                uint2 x = *(const uint2*)(held + R::CODES + lane * 8);
                halves_product(less, m, x.x, x.y);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int whole = P::COUNT == 2 ? total[i] * (1 << P::SHIFT) + rest[i] : total[i];
                sum[j][i] = sum[j][i] + term_of_block<TYPE>(whole, less[i], w[i >> 1].d, w[i >> 1].dmin, da[i & 1]);
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
            float sum[TILES][4] = {};
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
                            if constexpr (GRID != 0) meet_signs(sum, mine, acts);
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

    VT_MEMBER void finish(const float (&sum)[TILES][4], int first, int part, i64 above) const {
        if (first >= rows || part + 1 < TEAM) return;
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            if (j >= tiles) break;
            float total[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (TURNS) total[i] = stages ? chain_of(warp / TEAM)[32 * j].x[i] : 0.0f;
                else total[i] = sum[j][i] * B::FOLD;
            }
            put(j, first, total, above);
        }
    }
};

template <int TYPE, int TILES> VT_MEMBER void several(const Product& p) {
    VT_SHARED(memory);
    Several<TYPE, TILES>(p, memory).run();
}
