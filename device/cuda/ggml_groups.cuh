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
#include "ggml_planes.cuh"
#include "wgmma_bytes.cuh"

#if VT_TILES

template <int TYPE, int N, bool TURNS> struct Group : GroupSends<TYPE, N, TURNS> {
    using S = GroupSends<TYPE, N, TURNS>;
    using typename S::B; using S::RECORD; using S::PITCH; using S::LOWN; using S::LOWS; using S::SUMS; using S::CODES;
    using S::LOW; using S::SLOT; using S::UNITS; using S::STEP; using S::PARTS; using S::MANY; using S::FEW;
    using S::BUFFERS; using S::p; using S::ring; using S::warp; using S::chain; using S::full; using S::empty; using S::turn;
    using S::across; using S::items; using S::skew_of; using S::is_half; using S::tile_of_item; using S::top_of; using S::send;
    static constexpr int GROUPS = 2;

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
    VT_MEMBER void meet_units(float (&sum)[N / 2], const u8* const (&mine)[2], const u8* record, int t, int first) const {
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
                        float whole = x[8 * j2 + e], dw = d[k][h], term, &held = sum[q * (STEP / 2) + 8 * j2 + e];
                        if constexpr (SUMS) term = (dw * da.x[i]) * whole - -m[k][h] * s.x[i];
                        else if constexpr (TYPE == Q4_0) term = (whole * dw) * da.x[i];
                        else term = whole * (dw * da.x[i]);
                        held = held + term;
                    }
                }
            });
    }

    // The same of a block of 256 in planes of bytes, by COLUMNS of them from `first` on; `add` takes four terms at a time.
    // Both planes have sums of their own where registers last; otherwise the first one's are shifted.
    template <int COLUMNS, class ADD>
    VT_MEMBER void meet_planes(const u8* const (&mine)[2], const u8* record, int t, int first, const ADD& add) const {
        using P = Planes<TYPE>;
        constexpr bool APART = P::COUNT == 2 && COLUMNS <= 64, AT_ONCE = PARTS == 1;
        constexpr int EACH = N < 64 ? 4 : 8;  // units that are taken apart while products of those before are under way
        P w[2];
        unsigned a[8][P::COUNT][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) w[r].fetch(mine[r], t);
        auto unpack = [&](int u) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                unsigned words[P::COUNT][2];
                w[r].take(words, u);
#pragma unroll
                for (int i = 0; i < P::COUNT; ++i) a[u][i][r] = words[i][0], a[u][i][2 + r] = words[i][1];
            }
        };
        const u64 codes = beyond(tile_of(record), first * 128);
        auto tile = [&](int u) { return further(beyond(codes, u / 4 * (128 * N)), u % 4); };
        int x[COLUMNS / 2], y[APART ? COLUMNS / 2 : 1];
        float less[COLUMNS / LOWN][LOWN / 2];
        auto multiply_minimums = [&] {
            const unsigned minimum[4] = {w[0].m[0], w[1].m[0], w[0].m[1], w[1].m[1]};
#pragma unroll
            for (int i = 0; i < COLUMNS / LOWN; ++i) products_there(less[i]);
            products_begin();
#pragma unroll
            for (int i = 0; i < COLUMNS / LOWN; ++i)
                multiply_registers<F16>(less[i], minimum, further(tile_of(record + CODES), first / LOWN + i), 0);
        };
        products_there(x);
        if constexpr (APART) products_there(y);
#pragma unroll
        for (int v = 0; v < 8; v += EACH) {
#pragma unroll
            for (int u = v; u < v + EACH; ++u) unpack(u);
            products_begin();
#pragma unroll
            for (int u = v; u < v + EACH; ++u) {
                multiply_bytes_by<P::SIGNED>(x, a[u][0], tile(u), u > 0);
                if constexpr (APART) multiply_bytes_by<false>(y, a[u][1], tile(u), u > 0);
            }
        }
        if constexpr (LOWS && AT_ONCE) multiply_minimums();
        products_close();
        products_wait<0>();
        products_there(x);
        if constexpr (P::COUNT == 2) {
            if constexpr (APART) products_there(y);
#pragma unroll
            for (int e = 0; e < COLUMNS / 2; ++e) x[e] = x[e] * (1 << P::SHIFT) + (APART ? y[APART ? e : 0] : 0);
        }
        if constexpr (P::COUNT == 2 && !APART) {
            products_there(x);
            products_begin();
#pragma unroll
            for (int u = 0; u < 8; ++u) multiply_bytes_by<false>(x, a[u][1], tile(u), 1);
            products_close();
            products_wait<0>();
            products_there(x);
        }
        if constexpr (LOWS && !AT_ONCE) {
            products_there(x);
            multiply_minimums();
            products_close();
            products_wait<0>();
        }
        if constexpr (LOWS) {
#pragma unroll
            for (int i = 0; i < COLUMNS / LOWN; ++i) products_there(less[i]);
        }
#pragma unroll
        for (int j2 = 0; j2 < COLUMNS / 16; ++j2) {
            const Four da = scales_of(record + CODES + LOW + first * 4, j2, t);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                Four term;
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int at = 4 * (2 * j2 + j) + e, h = e >> 1;
                    float low = LOWS ? less[at / (LOWN / 2)][at % (LOWN / 2)] : 0.0f;
                    term.x[e] = term_of_block<TYPE>(x[at], low, w[h].d, w[h].dmin, da.x[2 * j + (e & 1)]);
                }
                add(2 * j2 + j, term);
            }
        }
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

    // `meet_stage(mine, record, t)` for this stage's bytes, as soon as they are there.
    template <class MEET> VT_MEMBER void take(int& slot, int& parity, int stage, int row, const MEET& meet_stage) const {
        const u8* record = ring + slot * SLOT;
        const int thread = thread_from_here();  // anew each time, for want of registers
        const u8* first = record + RECORD + (row + own_row(thread)) * PITCH + skew_of(stage);
        const u8* const mine[2] = {first, first + 8 * PITCH};
        barrier_wait(full() + slot, parity);
        meet_stage(mine, record, thread & 3);
        lanes_meet();
        if ((thread & 31) == 0) barrier_arrive(empty() + slot);
        go_on(slot, parity);
    }
    VT_MEMBER void go_on(int& slot, int& parity) const {
        if (++slot == p.slots) slot = 0, parity ^= 1;
    }

    VT_MEMBER void meet() const {
        const int group = warp >> 2;
        int slot = 0, parity = 0;
        for (int item = (int)blockIdx.x; item < items(); item += p.grid) {
            float sum[N / 2];
#pragma unroll
            for (int i = 0; i < N / 2; ++i) sum[i] = 0.0f;
            const bool half = is_half(item);
            const int row = half ? 0 : group * 64, first = half ? group : 0;
            i64 top = top_of(item), above = (i64)(tile_of_item(item) % across()) * N + first * STEP;
            auto down = [&](const auto& meet_stage) {
#pragma unroll 1
                for (int stage = 0; stage < p.stages; ++stage) take(slot, parity, stage, row, meet_stage);
            };
            auto add = [&](int j, const Four& term) {
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[4 * j + e] = sum[4 * j + e] + term.x[e];
            };
            typedef const u8* const Mine[2];
            if constexpr (B::LARGE) {
                if (half) down([&](Mine& mine, const u8* record, int t) { meet_planes<STEP>(mine, record, t, first * STEP, add); });
                else down([&](Mine& mine, const u8* record, int t) { meet_planes<N>(mine, record, t, 0, add); });
            } else {
                if (half) down([&](Mine& mine, const u8* record, int t) { meet_units<1>(sum, mine, record, t, first); });
                else down([&](Mine& mine, const u8* record, int t) { meet_units<PARTS>(sum, mine, record, t, 0); });
            }
            const int thread = thread_from_here();
#pragma unroll
            for (int j = 0; j < N / 8; ++j) {
                if (half && j >= STEP / 8) break;
                const float total[4] = {sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]};
                put(total, j, above, top + row + own_row(thread), thread & 3);
            }
        }
    }

    // Groups in turns: what a stage adds is made beside the other group's, and added after it.
    VT_MEMBER void meet_in_turns() const {
        const int group = warp >> 2;
        int slot = 0, parity = 0, count = 0;
        for (int item = (int)blockIdx.x; item < items(); item += p.grid) {
            i64 top = top_of(item), above = (i64)(tile_of_item(item) % across()) * N;
#pragma unroll 1
            for (int stage = 0; stage < p.stages; ++stage, ++count) {
                if (count % GROUPS != group) {
                    go_on(slot, parity);
                    continue;
                }
                Four term[N / 8];
                take(slot, parity, stage, 0, [&](const u8* const (&mine)[2], const u8* record, int t) {
                    meet_planes<N>(mine, record, t, 0, [&](int j, const Four& one) { term[j] = one; });
                });
                const int thread = thread_from_here();
                Four* held = (Four*)chain() + (thread & 127);
                if (count > 0) barrier_wait(turn() + (count - 1) % GROUPS, (count - 1) / GROUPS & 1);
#pragma unroll
                for (int j = 0; j < N / 8; ++j) {
                    Four total = {};
                    if (stage > 0) total = held[128 * j];
#pragma unroll
                    for (int e = 0; e < 4; ++e) total.x[e] = total.x[e] + term[j].x[e];
                    if (stage + 1 < p.stages) held[128 * j] = total;
                    else put(total.x, j, above, top + own_row(thread), thread & 3);
                }
                barrier_arrive(turn() + group);
            }
        }
    }

    VT_MEMBER void run() const {
        if (threadIdx.x == 0) {
            for (int s = 0; s < p.slots; ++s) barrier_init(full() + s, 129), barrier_init(empty() + s, TURNS ? 4 : 8);
            for (int g = 0; g < 2; ++g) barrier_init(turn() + g, 128);
            barriers_ready();
        }
        __syncthreads();
        if (warp >= 4 * GROUPS) {
            registers_down<FEW>();
            send();
        } else {
            registers_up<MANY>();
            if constexpr (TURNS) meet_in_turns();
            else meet();
        }
    }
};

template <int TYPE, int N, bool TURNS = false> VT_FN void by_groups(const Groups& p) {
    VT_SHARED(memory);
    Group<TYPE, N, TURNS>(p, memory).run();
}
#endif
