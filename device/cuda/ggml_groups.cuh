// Rows of activations meet weights in ggml's blocks by groups of four warps, Hopper's tensor cores taking float16.
//
// A block has ROWS rows of the weight and N of activations at a time. One warp sends for both: 256 k are a stage, rows of
// the weight as they lie, activations as the tensor cores take them (ggml_group_codes.cuh). A group takes 64 rows of the
// weight apart in registers and multiplies them by all N; where sums run in eight lanes, it does so for OWN of these, and
// LW groups have the same rows. Integers meet exactly; what leaves the tensor cores is scaled and added in the mirror's
// order.
#pragma once
#include "early.cuh"
#include "ggml_halves.cuh"
#include "wgmma_registers.cuh"

// Where a column's scale stands, so that four a thread needs lie side by side.
VT_FN int scale_place(int n) { return ((n / 16) * 4 + n % 8 / 2) * 4 + n / 8 % 2 * 2 + n % 2; }

struct Groups {
    i64 rows, columns, stages, stride, out_stride;
    const u8 *b, *records;
    void* out;
    int kind, slots, grid;
};

#if VT_TILES

template <int TYPE, int N> struct Group {
    using B = Block<TYPE>;
    static constexpr int OWN = B::LANES ? 4 : 1, LW = B::LANES ? 2 : 1, ROWS = B::LANES ? 64 : 128;
    static constexpr int CHUNK = B::BYTES * (B::LARGE ? 1 : 8);  // bytes of a row of a stage
    static constexpr bool SKEWED = CHUNK % 16 != 0;
    static constexpr int PIECES = (CHUNK + 15 + 14 * SKEWED) / 16, PITCH = 16 * (PIECES | 1);  // rows meet in no bank
    // A stage's record of activations: codes, what minimums meet, scales.
    static constexpr int LOWN = N / LW < 8 ? 8 : N / LW;  // columns whose minimums are a group's
    static constexpr bool LOWS = B::LARGE && B::MINIMUM, SUMS = !B::LARGE && B::MINIMUM;
    static constexpr int CODES = 512 * N, LOW = LOWS ? 128 * LOWN : SUMS ? 32 * N : 0, SCALES = B::LARGE ? 4 * N : 32 * N;
    static constexpr int RECORD = CODES + LOW + SCALES, SLOT = (RECORD + ROWS * PITCH + 1023) / 1024 * 1024;
    static constexpr int MEET_PITCH = 68, MEET = LW > 1 ? MEET_PITCH * N * 4 : 0;  // where lanes' sums meet
    static constexpr int UNITS = TYPE == Q8_0 || TYPE == Q5_0 ? 2 : 8;  // of 32, together: more of them where registers last
    static constexpr int LOW_BYTES = LOWS ? 256 * LOWN : 0;  // of a group's running minimums
    // Words of the last two lanes stay in shared memory until their turn, for want of registers.
    static constexpr bool STASH = B::LANES && TYPE != Q4_K && N > 32;
    static constexpr int STEP = N < 64 ? N : 64, PARTS = N / STEP;  // columns of a product
    static constexpr int MANY = 232, FEW = 40;  // registers of groups and of those that send
    static constexpr int BUFFERS = N > 32 && B::LANES ? 1 : 2;
    static constexpr int PLANES = TYPE == Q6_K ? 2 : 1;
    static constexpr bool HALVES = !B::LANES && PARTS == 2;

    const Groups& p;
    u8* ring;
    int warp;

    VT_MEMBER Group(const Groups& given, u8* memory) : p(given) {
        ring = memory + (-(u64)memory & 1023);
        warp = same_in_warp((int)threadIdx.x >> 5);
    }
    VT_MEMBER u8* meeting() const { return ring + p.slots * SLOT; }
    VT_MEMBER u64* full() const { return (u64*)(meeting() + MEET + 2 * LOW_BYTES + 8192 * STASH); }
    VT_MEMBER u64* empty() const { return full() + p.slots; }
    VT_MEMBER int across() const { return (int)((p.rows + N - 1) / N); }
    // The last tiles are cut in two where that lets more blocks have a part of them: rows in two, columns a group each.
    VT_MEMBER int tiles() const { return (int)((p.columns + ROWS - 1) / ROWS) * across(); }
    VT_MEMBER int whole() const {
        int all = tiles(), last = all % p.grid;
        return HALVES && 2 * last <= p.grid ? all - last : all;
    }
    VT_MEMBER int items() const { return 2 * tiles() - whole(); }
    VT_MEMBER Four* lows_of(int group) const { return (Four*)(meeting() + MEET + group * LOW_BYTES); }
    static VT_MEMBER int skew_of(int stage) { return SKEWED ? stage * CHUNK & 15 : 0; }

    // Item `item` of the work: a tile, or the first or the last half of its rows.
    VT_MEMBER bool is_half(int item) const { return HALVES && item >= whole(); }
    VT_MEMBER int tile_of_item(int item) const { return is_half(item) ? whole() + (item - whole()) / 2 : item; }
    VT_MEMBER i64 top_of(int item) const {
        i64 top = (i64)(tile_of_item(item) / across()) * ROWS;
        return is_half(item) ? top + (item - whole()) % 2 * (ROWS / 2) : top;
    }

    // Rows by a group's 128 threads, 16 bytes each at a time: one copy of a row by the copy engine costs as much as ten of
    // these, since a warp starts its lanes' one after the other.
    VT_MEMBER void send_rows(int item, int stage, int slot) const {
        const int thread = (int)threadIdx.x & 127, stride = (int)p.stride;
        const i64 top = top_of(item), left = p.columns - top, begin = (i64)stage * CHUNK - skew_of(stage);
        int high = is_half(item) ? ROWS / 2 : ROWS;
        if (left < high) high = (int)left;  // what no row is there for, nothing is made of
        int row = thread / PIECES, piece = thread - row * PIECES, at = row * stride + 16 * piece;
        const int end = SKEWED ? (int)(p.stages * CHUNK - begin) : 16 * PIECES;
        const u8* from = p.b + top * p.stride + begin;
        Spot to = spot_of(ring + slot * SLOT + RECORD) + row * PITCH + 16 * piece;
        constexpr int DOWN = 128 / PIECES, ON = 128 % PIECES;
#pragma unroll 3
        for (int i = 0; i < (ROWS * PIECES + 127) / 128; ++i) {
            if (row < high && (!SKEWED || 16 * piece < end)) copy_to(to, from + at);
            row += DOWN, piece += ON, at += DOWN * stride + 16 * ON, to += DOWN * PITCH + 16 * ON;
            if (piece >= PIECES) ++row, piece -= PIECES, at += stride - 16 * PIECES, to += PITCH - 16 * PIECES;
        }
        barrier_arrive_with_copies(full() + slot);
    }
    VT_MEMBER void send_record(int item, int stage, int slot) const {
        if (((int)threadIdx.x & 127) != 0) return;
        const u8* from = p.records + ((i64)(tile_of_item(item) % across()) * p.stages + stage) * RECORD;
        barrier_expect(full() + slot, RECORD);
        load_bytes(ring + slot * SLOT, from, full() + slot, RECORD);
    }
    VT_MEMBER void send() const {
        const int first = (int)blockIdx.x, all = items();
        int ahead = 0;
        for (; ahead < p.slots && ahead < p.stages && first < all; ++ahead) send_rows(first, ahead, ahead);
        after_others();  // what the activations became; weights were there before
        int slot = 0, parity = 1, sent = 0;
        for (int item = first; item < all; item += p.grid)
            for (int stage = 0; stage < p.stages; ++stage) {
                if (sent >= ahead) {
                    barrier_wait(empty() + slot, parity);
                    send_rows(item, stage, slot);
                }
                send_record(item, stage, slot);
                sent += sent < ahead;
                if (++slot == p.slots) slot = 0, parity ^= 1;
            }
    }

    // Sums of N / 2 values a thread, as the tensor cores leave them: d[4 j + 2 h + i] is row 8 h + g, column 8 j + 2 t + i.
    static VT_MEMBER Four scales_of(const u8* scales, int j2, int t) { return *(const Four*)(scales + (4 * j2 + t) * 16); }

    // STEPS steps, of BODY at a time: products are under way while the sums of those before them leave. `issue(first, s)`
    // starts step first + s, `leave(first, s)` adds. None is under way from one time to the next, which compilers forbid.
    template <int STEPS, int BODY, class ISSUE, class LEAVE> static VT_MEMBER void in_turns(const ISSUE& issue, const LEAVE& leave) {
#pragma unroll 1
        for (int first = 0; first < STEPS; first += BODY) {
            if constexpr (BUFFERS == 2) issue(first, 0);
#pragma unroll
            for (int s = 0; s < BODY; ++s) {
                if (BUFFERS == 1) issue(first, s);
                else if (s + 1 < BODY) issue(first, s + 1);
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
                const int k = s / COUNT & 1, q = s % COUNT, u = before / COUNT + s / COUNT;
                float(&x)[STEP / 2] = c[s % BUFFERS];
                products_there(x);
                const u8 *sums = record + CODES + u * 4 * N + first * (4 * STEP), *scales = sums + LOW;
#pragma unroll
                for (int j2 = 0; j2 < STEP / 16; ++j2) {
                    Four da = scales_of(scales, q * (STEP / 16) + j2, t), s;
                    if constexpr (SUMS) s = scales_of(sums, q * (STEP / 16) + j2, t);
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
            [&](int, int s) {
                const int l = s / PARTS, q = s % PARTS;
                float(&x)[STEP / 2] = c[s % BUFFERS];
                products_there(x);
#pragma unroll
                for (int j2 = 0; j2 < STEP / 16; ++j2) {
                    Four da = scales_of(scales, q * (STEP / 16) + j2, t);
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
