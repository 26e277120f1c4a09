// Rows of activations meet weights in ggml's blocks by groups of four warps, Hopper's tensor cores taking float16.
//
// A block has ROWS rows of the weight and N of activations at a time. One warp sends for both: 256 k are a stage, rows of
// the weight as they lie, activations as the tensor cores take them (ggml_group_codes.cuh). A group takes 64 rows of the
// weight apart in registers and multiplies them by all N; where sums run in eight lanes, it does so for OWN of these, and
// LW groups have the same rows. Integers meet exactly; what leaves the tensor cores is scaled and added in the mirror's
// order. A group of its own that takes the weight apart into shared memory was slower: 512 rows by 14336 x 4096 took 250 us
// with Q4_0 and 443 with Q4_K on an H200, where these groups take 213 and 365.
#pragma once
#include "ggml_group_sends.cuh"

#if VT_TILES

template <int TYPE, int N> struct Group : GroupSends<TYPE, N> {
    using S = GroupSends<TYPE, N>;
    using typename S::B; using S::OWN; using S::LW; using S::RECORD; using S::PITCH; using S::LOWN; using S::LOWS;
    using S::SUMS; using S::CODES; using S::LOW; using S::SLOT; using S::MEET_PITCH; using S::MEET; using S::UNITS;
    using S::LOW_BYTES; using S::STASH; using S::STEP; using S::PARTS; using S::MANY; using S::FEW; using S::BUFFERS;
    using S::PLANES; using S::p; using S::ring; using S::warp; using S::meeting; using S::full; using S::empty;
    using S::across; using S::items; using S::lows_of; using S::skew_of; using S::is_half; using S::tile_of_item;
    using S::top_of; using S::send;

    VT_MEMBER Group(const Groups& given, u8* memory) : S(given, memory) {}

    // Sums of N / 2 values a thread, as the tensor cores leave them: d[4 j + 2 h + i] is row 8 h + g, column 8 j + 2 t + i.
    static VT_MEMBER Four scales_of(const u8* scales, int j2, int t) { return *(const Four*)(scales + (4 * j2 + t) * 16); }

    // STEPS steps, of BODY at a time: products are under way while the sums of those before them leave. `issue(first, s)`
    // starts step first + s, `fetch(first, s)` reads what it is scaled by, ahead of the wait, `leave(first, s)` adds. None is
    // under way from one time to the next, which compilers forbid.
    template <int STEPS, int BODY, class ISSUE, class FETCH, class LEAVE>
    static VT_MEMBER void in_turns(const ISSUE& issue, const FETCH& fetch, const LEAVE& leave) {
#pragma unroll 1
        for (int first = 0; first < STEPS; first += BODY) {
            if constexpr (BUFFERS == 2) issue(first, 0);
#pragma unroll
            for (int s = 0; s < BODY; ++s) {
                if (BUFFERS == 1) issue(first, s);
                else if (s + 1 < BODY) issue(first, s + 1);
                fetch(first, s);
                if (BUFFERS == 2 && s + 1 < BODY) products_wait<1>();
                else products_wait<0>();
                leave(first, s);
            }
        }
    }

    // COUNT parts of the columns, from part `first` on.
    template <int COUNT>
    VT_MEMBER void meet_units(float (&sum)[OWN][N / 2], const u8* const (&mine)[2], const u8* record, int t, int first) const {
        unsigned a[2][2][4];
        float d[2][2], m[2][2], c[BUFFERS][STEP / 2];
        Four of_codes[STEP / 16], of_sums[STEP / 16];
        UnitHalves<TYPE> coming[2];
        auto fetch = [&](int u) {
#pragma unroll
            for (int r = 0; r < 2; ++r) coming[r].fetch(mine[r] + u * B::BYTES, t);
        };
        auto unpack = [&](int k, int next) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                unsigned h[4];
                coming[r].take_apart(h, d[k][r], m[k][r], t);
#pragma unroll
                for (int s = 0; s < 2; ++s) a[k][s][r] = h[2 * s], a[k][s][2 + r] = h[2 * s + 1];
            }
            fetch(next < 8 ? next : 7);
        };
        fetch(0);
        const u64 codes = beyond(tile_of(record), first * (128 * STEP));
        in_turns<8 * COUNT, UNITS * COUNT>(
            [&](int before, int s) {
                const int k = s / COUNT & 1, q = s % COUNT, u = before / COUNT + s / COUNT;
                float(&x)[STEP / 2] = c[s % BUFFERS];
                u64 tile = further(beyond(codes, u / 2 * (128 * N) + q * (128 * STEP)), u % 2 * 2);
                if (q == 0) unpack(k, u + 1);
                products_there(x);
                products_begin();
                multiply_registers<F16>(x, a[k][0], tile, 0);
                multiply_registers<F16>(x, a[k][1], further(tile, 1), 1);
                products_close();
            },
            [&](int before, int s) {
                const int q = s % COUNT, u = before / COUNT + s / COUNT;
                const u8 *sums = record + CODES + u * 4 * N + first * (4 * STEP), *scales = sums + LOW;
#pragma unroll
                for (int j2 = 0; j2 < STEP / 16; ++j2) {
                    of_codes[j2] = scales_of(scales, q * (STEP / 16) + j2, t);
                    if constexpr (SUMS) of_sums[j2] = scales_of(sums, q * (STEP / 16) + j2, t);
                }
            },
            [&](int, int s) {
                const int k = s / COUNT & 1, q = s % COUNT;
                float(&x)[STEP / 2] = c[s % BUFFERS];
                products_there(x);
#pragma unroll
                for (int j2 = 0; j2 < STEP / 16; ++j2) {
                    const Four &da = of_codes[j2], &s = of_sums[j2];
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        int h = e >> 1 & 1, i = (e >> 2) * 2 + (e & 1);
                        float whole = x[8 * j2 + e], dw = d[k][h], term, &held = sum[0][q * (STEP / 2) + 8 * j2 + e];
                        if constexpr (SUMS) term = (dw * da.x[i]) * whole - -m[k][h] * s.x[i];
                        else if constexpr (TYPE == Q4_0) term = (whole * dw) * da.x[i];
                        else term = whole * (dw * da.x[i]);
                        held = held + term;
                    }
                }
            });
    }

    VT_MEMBER void meet_lanes(float (&sum)[OWN][N / 2], Four* low, const u8* const (&mine)[2], const u8* record, int t,
                              int part) const {
        const u8* scales = record + CODES + LOW;
        unsigned a[BUFFERS][PLANES][2][4];
        float less[LOWN / 2], c[BUFFERS][STEP / 2], dw[2], dmin[2];
        LanesPart w[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            lanes_of_row<TYPE>(w[r], mine[r], t, part);
            join_lanes<TYPE>(w[r]);
            dw[r] = w[r].d, dmin[r] = w[r].dmin;
        }
        if constexpr (LOWS) {
            const unsigned minimum[4] = {w[0].m[0], w[1].m[0], w[0].m[1], w[1].m[1]};
            products_there(less);
            products_begin();
            multiply_registers<F16>(less, minimum, further(tile_of(record + CODES), part), 0);
            products_close();
        }
        uint4* stash = (uint4*)(meeting() + MEET + 2 * LOW_BYTES) + (thread_from_here() & 255);
        if constexpr (STASH) {
#pragma unroll
            for (int r = 0; r < 2; ++r) stash[256 * r] = {w[r].q[2], w[r].q[3], w[r].q[6], w[r].q[7]};
        }
        auto unpack = [&](int l) {
            if (STASH && l == 2) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    uint4 q = stash[256 * r];
                    w[r].q[2] = q.x, w[r].q[3] = q.y, w[r].q[6] = q.z, w[r].q[7] = q.w;
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    unsigned lost = 0;
                    a[l % BUFFERS][0][q >> 1][2 * (q & 1) + r] = joined_pair<TYPE>(lost, w[r], q, l);
                    if constexpr (PLANES == 2) a[l % BUFFERS][PLANES - 1][q >> 1][2 * (q & 1) + r] = lost;
                }
        };
        unpack(0);
        if constexpr (LOWS) {
            products_wait<0>();
            products_there(less);
#pragma unroll
            for (int j2 = 0; j2 < LOWN / 16; ++j2) {
                Four da = scales_of(scales + part * LOWN * 4, j2, t);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    Four held = low[128 * (2 * j2 + j)];
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        held.x[e] = held.x[e] - (dmin[e >> 1] * da.x[2 * j + (e & 1)]) * less[4 * (2 * j2 + j) + e];
                    low[128 * (2 * j2 + j)] = held;
                }
            }
        }
        const u64 codes = tile_of(record);
        Four of_codes[STEP / 16];  // one stage's, where registers last
        auto fetch = [&](int, int s) {
            if (STASH || (PARTS == 1 && s > 0)) return;
#pragma unroll
            for (int j2 = 0; j2 < STEP / 16; ++j2) of_codes[j2] = scales_of(scales, s % PARTS * (STEP / 16) + j2, t);
        };
        in_turns<OWN * PARTS, OWN * PARTS>(
            [&](int, int s) {
                const int l = s / PARTS, q = s % PARTS;
                float(&x)[STEP / 2] = c[s % BUFFERS];
                const int lane = part * OWN + l;
                u64 tile = further(beyond(codes, lane / 2 * (128 * N) + q * (128 * STEP)), lane % 2 * 2);
                if (BUFFERS == 1 && s > 0 && p.slots < 0) barrier_wait(full(), 0);  // never: additions stay ahead of this
                if (q == 0 && l > 0) unpack(l);
                products_there(x);
                products_begin();
                multiply_registers<F16>(x, a[l % BUFFERS][0][0], tile, 0);
                multiply_registers<F16>(x, a[l % BUFFERS][0][1], further(tile, 1), 1);
                if constexpr (PLANES == 2) {
                    multiply_registers<F16>(x, a[l % BUFFERS][PLANES - 1][0], tile, 1);
                    multiply_registers<F16>(x, a[l % BUFFERS][PLANES - 1][1], further(tile, 1), 1);
                }
                products_close();
            },
            fetch,
            [&](int, int s) {
                const int l = s / PARTS, q = s % PARTS;
                float(&x)[STEP / 2] = c[s % BUFFERS];
                products_there(x);
#pragma unroll
                for (int j2 = 0; j2 < STEP / 16; ++j2) {
                    const Four da = STASH ? scales_of(scales, q * (STEP / 16) + j2, t) : of_codes[j2];
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        float& held = sum[l][q * (STEP / 2) + 8 * j2 + e];
                        held = held + (dw[e >> 1 & 1] * da.x[(e >> 2) * 2 + (e & 1)]) * x[8 * j2 + e];
                    }
                }
            });
    }

    VT_MEMBER void put(const float (&x)[4], int j, i64 above, i64 row, int t) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            i64 m = above + 8 * j + 2 * t + (i & 1), n = row + 8 * (i >> 1);
            float one[1] = {x[i]};
            if (n < p.columns && m < p.rows) store(p.out, m * p.out_stride + n, one, p.kind);
        }
    }

    static VT_MEMBER int own_row(int thread) { return (thread >> 5 & 3) * 16 + (thread >> 2 & 7); }  // the first of two

    VT_MEMBER void meet() const {
        const int group = warp >> 2, part = group % LW, team = group / LW;
        int slot = 0, parity = 0;
        for (int item = (int)blockIdx.x; item < items(); item += p.grid) {
            float sum[OWN][N / 2];
            Four* low = lows_of(group) + (thread_from_here() & 127);
#pragma unroll
            for (int l = 0; l < OWN; ++l)
#pragma unroll
                for (int i = 0; i < N / 2; ++i) sum[l][i] = 0.0f;
            if constexpr (LOWS) {
#pragma unroll
                for (int j = 0; j < LOWN / 8; ++j) low[128 * j] = {};
            }
            const bool half = is_half(item);
            i64 top = top_of(item), above = (i64)(tile_of_item(item) % across()) * N;
            auto down = [&](const auto& meet_stage) {
#pragma unroll 1
                for (int stage = 0; stage < p.stages; ++stage) {
                    const u8* record = ring + slot * SLOT;
                    const int thread = thread_from_here();  // anew each time, for want of registers
                    const u8* first = record + RECORD + ((half ? 0 : team * 64) + own_row(thread)) * PITCH + skew_of(stage);
                    const u8* const mine[2] = {first, first + 8 * PITCH};
                    barrier_wait(full() + slot, parity);
                    meet_stage(mine, record, thread & 3);
                    lanes_meet();
                    if ((thread & 31) == 0) barrier_arrive(empty() + slot);
                    if (++slot == p.slots) slot = 0, parity ^= 1;
                }
            };
            typedef const u8* const Mine[2];
            if constexpr (B::LANES) down([&](Mine& mine, const u8* record, int t) {
                    meet_lanes(sum, lows_of(part) + (thread_from_here() & 127), mine, record, t, part);
                });
            else if (half) down([&](Mine& mine, const u8* record, int t) { meet_units<1>(sum, mine, record, t, group); });
            else down([&](Mine& mine, const u8* record, int t) { meet_units<PARTS>(sum, mine, record, t, 0); });
            if constexpr (LW == 1) {
                const int thread = thread_from_here();
#pragma unroll
                for (int j = 0; j < N / 8; ++j) {
                    if (half && j >= STEP / 8) break;
                    Four total = {};
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int l = 0; l < OWN; ++l) total.x[i] = total.x[i] + sum[l][4 * j + i];
                    put(total.x, j, half ? above + group * STEP : above, top + (half ? 0 : team * 64) + own_row(thread), thread & 3);
                }
            } else {
                finish(sum, part, team, above, top + 64 * team);
            }
        }
    }

    // Minimums, then the sums of lanes, ascending, come together in shared memory; then they leave row by row.
    VT_MEMBER void finish(const float (&sum)[OWN][N / 2], int part, int team, i64 above, i64 top) const {
        const int thread = thread_from_here(), lane = thread & 31, mine = 2 * (lane & 3) * MEET_PITCH + own_row(thread);
        float* meets = (float*)meeting() + team * N * MEET_PITCH;
        auto held = [&](int e) -> float& { return meets[mine + (e / 4 * 8 + (e & 1)) * MEET_PITCH + (e >> 1 & 1) * 8]; };
#pragma unroll 1
        for (int turn = -2; turn < LW; ++turn) {  // the first time all that was there has left
            if (turn == -1) {
                if constexpr (LOWS) {
                    const Four* low = lows_of(part) + (thread & 127);
#pragma unroll
                    for (int j = 0; j < LOWN / 8; ++j) {
                        Four minimums = low[128 * j];
#pragma unroll
                        for (int e = 0; e < 4; ++e) (&held(4 * j + e))[part * LOWN * MEET_PITCH] = minimums.x[e];
                    }
                }
            } else if (turn == part) {
#pragma unroll
                for (int e = 0; e < N / 2; ++e) {
                    float total = LOWS || turn > 0 ? held(e) : 0.0f;
#pragma unroll
                    for (int l = 0; l < OWN; ++l) total = total + sum[l][e];
                    held(e) = total;
                }
            }
            team_meets(1 + team, 128 * LW);
        }
        const int row = thread & 63;
        if (top + row >= p.columns) return;
#pragma unroll 1
        for (int m = (thread & 127) / 64 + 2 * part; m < N && above + m < p.rows; m += 2 * LW) {
            float one[1] = {meets[m * MEET_PITCH + row]};
            store(p.out, (above + m) * p.out_stride + top + row, one, p.kind);
        }
    }

    VT_MEMBER void run() const {
        if (threadIdx.x == 0) {
            for (int s = 0; s < p.slots; ++s) barrier_init(full() + s, 129), barrier_init(empty() + s, 8);
            barriers_ready();
        }
        __syncthreads();
        if (warp >= 8) {
            registers_down<FEW>();
            send();
        } else {
            registers_up<MANY>();
            meet();
        }
    }
};

template <int TYPE, int N> VT_FN void by_groups(const Groups& p) {
    VT_SHARED(memory);
    Group<TYPE, N>(p, memory).run();
}
#endif
