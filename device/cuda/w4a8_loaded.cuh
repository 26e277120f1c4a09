// W4A8's products on Hopper: out^T = W a^T, so that weights are the left operand, which tensor cores take from registers.
//
// The copy engine brings 128 k a stage: rows of `a`, a block's words and its tables, a group of scales. Four warps send for
// stages in turn: one alone would be slower than those that multiply. Groups of four warps have 64 columns each, or take
// turns at the stages of the same 64. They look weights up while the products of those before are under way, and read the words
// of those after before they wait for products. Sums leave the tensor cores after CHAIN stages, since they keep too few bits
// there: sooner would be more exact than the result's bfloat16 shows, and takes more additions. They are added up in float32
// from the first one on: in registers, in shared memory as far as those do not suffice (256 rows a tile) or, where groups take
// turns, in shared memory that is handed on; the stages that are left over are chains of their own. So neither the tile's
// form nor the batch shows in a sum.
#pragma once
#include "elected.cuh"
#include "shared_places.cuh"
#include "w4a8_tables.cuh"
#include "w4a8_wide.cuh"

#define MOST_EXPERTS 512
#define CHAIN 8
#define BAND 8  // tiles of rows that pass before the next columns

#if VT_TILES

template <int N> struct Stages { static constexpr int COUNT = N; };
struct alignas(16) Four { float x[4]; };
struct alignas(8) Two { float x[2]; };

// TOKENS: rows of `a` a tile. ACROSS: groups side by side. TURNS: groups that take turns. KEPT: sums of a thread whose
// totals are in registers. Where that is not all of them there are no experts, for who sends has few registers left.
template <int TOKENS, int ACROSS, int TURNS, int STAGES, int KEPT = TOKENS / 2>
VT_FN void w4a8_loaded(const TensorMap& rows_map, W4A8_PARAMETERS, int vectors, int grid, u8* memory) {
    constexpr int REST = TOKENS / 2 - KEPT, SENDERS = STAGES < 4 ? 2 : 4, EACH = REST > 0 ? 1 : 2;
    if (REST > 0) offsets = nullptr;
    // A group that skips the other turns' stages must not come round to one that nobody has filled for the first time.
    static_assert(STAGES > (TURNS - 1) * CHAIN, "");
    constexpr int GROUPS = ACROSS * TURNS, SUMS = TOKENS / 2, SPAN = 64 * ACROSS;
    constexpr bool SOON = TURNS == 1 && TOKENS <= 128;  // there are registers for what is needed at a tile's end
    constexpr int FEW = REST > 0 ? 24 : 40, MANY = REST > 0 ? 240 : GROUPS == 2 ? 232 : GROUPS == 3 ? 152 : 104;  // registers
    constexpr int WORDS_AT = TOKENS * 128, TABLES_AT = WORDS_AT + ACROSS * 4096, STAGE_BYTES = TABLES_AT + ACROSS * 512;
    constexpr int STAGE = (STAGE_BYTES + 1023) / 1024 * 1024;
    constexpr int LEAVING = REST * 512 > TOKENS * 128 ? REST * 512 : TOKENS * 128;  // of a group: totals, then results
    u8 *stages = memory + (-(u64)memory & 1023), *leaving = stages + STAGES * STAGE;
    Four* totals = (Four*)(leaving + GROUPS * LEAVING);
    u64 *full = (u64*)(totals + (TURNS > 1 ? ACROSS * SUMS * 32 : 0)), *empty = full + STAGES, *turns = empty + STAGES;
    float* token_scales = (float*)(turns + 4 * GROUPS);
    int *first = (int*)(token_scales + GROUPS * TOKENS), *count = first + MOST_EXPERTS, *ends = count + MOST_EXPERTS;
    int* sums = ends + MOST_EXPERTS;
    int thread = (int)threadIdx.x, warp = same_in_warp(thread >> 5), owners = offsets == nullptr ? 1 : (int)experts;
    bool one = one_of_warp();
    if (one) {
        if (warp == 0) map_ahead(rows_map);
        for (int s = warp; s < STAGES; s += 4 + 4 * GROUPS) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, 4 * ACROSS);
        }
        if (warp < 4 * GROUPS) barrier_init(turns + warp, 32);
        barriers_ready();
    }
    for (int e = thread; e < owners; e += 128 + 128 * GROUPS) {
        Own own = rows_of(offsets, sizes, e, rows);
        first[e] = (int)own.first, count[e] = (int)own.count;
        ends[e] = (int)((own.count + TOKENS - 1) / TOKENS);
    }
    __syncthreads();
    for (int d = 1; d < owners; d *= 2) {  // tiles of rows become those up to each expert
        for (int e = thread; e < owners; e += 128 + 128 * GROUPS) sums[e] = ends[e] + (e >= d ? ends[e - d] : 0);
        __syncthreads();
        int* other = ends;
        ends = sums, sums = other;
    }
    int across = (int)(columns / SPAN), all = ends[owners - 1] * across;
    int groups = (int)(depth / GROUP), stage = 0, parity = 0, expert = 0;
    struct Tile { int top, rows, column; };
    auto tile_at = [&](int number) {  // numbers ascend, and with them `expert`
        while (number >= ends[expert] * across) ++expert;
        int before = expert ? ends[expert - 1] : 0, down = ends[expert] - before, within = number - before * across;
        int band = within / (BAND * across), high = down - band * BAND < BAND ? down - band * BAND : BAND;
        within -= band * BAND * across;
        int column = within / high, top = (band * BAND + within - column * high) * TOKENS;
        return Tile{first[expert] + top, count[expert] - top, column * SPAN};
    };
    auto advance = [&](int by) {
        if ((stage += by) >= STAGES) stage -= STAGES, parity ^= 1;
    };
    if (thread < 128) {
        registers_down<FEW>();
        int lane = thread & 31, group = warp;
        stage = warp;
        for (int number = (int)blockIdx.x; number < all && warp < SENDERS; number += grid) {
            Tile tile = tile_at(number);
            const char* codes = (const char*)(words + expert * (depth / 8) * columns) + tile.column * 16;
            const char* scales = (const char*)tables + (expert * groups * columns + tile.column) * 8;
#pragma unroll 1
            for (; group < groups; group += SENDERS) {
                barrier_wait(empty + stage, parity ^ 1);
                lanes_meet();
                if (one) {
                    u8* here = stages + stage * STAGE;
                    barrier_expect(full + stage, STAGE_BYTES);
                    load_tile(here, rows_map, full + stage, group * 128, tile.top);
#pragma unroll
                    for (int s = 0; s < 4; ++s)
                        load_bytes(here + WORDS_AT + s * ACROSS * 1024, codes + (i64)(4 * group + s) * columns * 16, full + stage, ACROSS * 1024);
                    load_bytes(here + TABLES_AT, scales + (i64)group * columns * 8, full + stage, ACROSS * 512);
                }
                advance(SENDERS);
            }
            group -= groups;
        }
        if (offsets != nullptr)  // rows that no expert has are zeros, a warp a row
            for (i64 row = (i64)blockIdx.x * 4 + warp; row < rows; row += 4 * grid) {
                bool owned = false;
                for (int e = lane; e < owners; e += 32) owned |= row >= first[e] && row < (i64)first[e] + count[e];
                if (any_lane_has(owned)) continue;
                for (i64 n = lane; n < columns; n += 32) out[row * columns + n] = 0;
            }
    } else {
        registers_up<MANY>();
        int own = thread - 128, group = (warp - 4) >> 2, lane = own & 31, g = lane >> 2;
        warp &= 3;
        int side = group % ACROSS, turn = group / ACROSS, next = (turn + 1 == TURNS ? 0 : group + ACROSS - side) + side;
        int chain = 0, handed = 0;
        bool opens = turn == 0;  // the first chain of all has none before it
        u8* mine = leaving + group * LEAVING;
        float* scales = token_scales + group * TOKENS;
        Four* so_far = totals + side * SUMS * 32 + (own & 127);
        Four* rest = (Four*)mine + (own & 127);
        float part[SUMS], total[KEPT];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) part[i] = 0.0f;
        const SharedPlace ring = place_in(stages), ready = place_in(full), used = place_in(empty);
        const int words_place = WORDS_AT + side * 1024 + warp * 256 + lane * 8, tables_place = TABLES_AT + side * 512 + (16 * warp + g) * 8;
        SharedPlace here = ring;
        auto onward = [&](int by) {
            advance(by);
            here = ring + stage * STAGE;
        };
        Table low, up;
        uint2 low_entries, up_entries, q[2];  // of what is looked up next: they come while products are under way
        auto fetch = [&](int half) {
            if (half == 0) {
                wait_at(ready + 8 * stage, parity);
                low_entries = two_at<0>(here + tables_place), up_entries = two_at<64>(here + tables_place);
                q[0] = two_at<0>(here + words_place), q[1] = two_at<ACROSS * 1024>(here + words_place);
            } else {
                q[0] = two_at<2 * ACROSS * 1024>(here + words_place), q[1] = two_at<3 * ACROSS * 1024>(here + words_place);
            }
        };
        // EACH products of 32 k at a time.
        auto look_up = [&](unsigned(&a)[EACH][4], int batch) {
            if (batch == 0) low.fetch(&low_entries), up.fetch(&up_entries);
#pragma unroll
            for (int s = 0; s < EACH; ++s) {
                look_up_eight(q[(batch * EACH + s) & 1].x, low, up, a[s][0], a[s][1]);
                look_up_eight(q[(batch * EACH + s) & 1].y, low, up, a[s][2], a[s][3]);
            }
        };
        auto multiply = [&](unsigned(&a)[EACH][4], int batch, bool add) {
            u64 tokens = tile_in(here);
            products_begin();
#pragma unroll
            for (int s = 0; s < EACH; ++s) multiply_codes(part, a[s], further(tokens, batch * EACH + s), add || s > 0);
            products_close();
        };
        auto release = [&](int from) {
            lanes_meet();
            arrive_at_if(lane == 0, used + 8 * from);
        };
        // The products of a chain of stages, of which the first batch is looked up already; `more`: then look up the next one's.
        // Of totals in shared memory those of the last chain stay in `part`.
        unsigned codes[2][EACH][4];
        auto products = [&](auto length, bool first, bool more) {
            constexpr int BATCHES = 4 / EACH;
            int before = -1;
#pragma unroll
            for (int i = 0; i < decltype(length)::COUNT; ++i) {
                bool on = i + 1 < decltype(length)::COUNT || more;
#pragma unroll
                for (int batch = 0; batch < BATCHES; ++batch) {
                    multiply(codes[batch & 1], batch, i > 0 || batch > 0);
                    if (batch + 1 == BATCHES / 2) fetch(1);
                    if (batch + 1 == BATCHES) {
                        before = stage;
                        onward(1);
                        if (on) fetch(0);
                    }
                    products_wait<1>();
                    if (batch == 0 && i > 0) release(before);
                    if (batch + 1 < BATCHES || on) look_up(codes[batch + 1 & 1], (batch + 1) % BATCHES);
                }
            }
            products_wait<0>();
            release(before);
            if constexpr (TURNS == 1)
#pragma unroll
                for (int j = 0; j < KEPT; ++j) total[j] += part[j];
            if constexpr (REST > 0) {
                if (!first)
#pragma unroll
                    for (int j = 0; j < REST / 4; ++j) {
                        Four sum = rest[j * 128];
#pragma unroll
                        for (int e = 0; e < 4; ++e) part[KEPT + 4 * j + e] += sum.x[e];
                    }
                if (more)
#pragma unroll
                    for (int j = 0; j < REST / 4; ++j) {
                        const float* x = part + KEPT + 4 * j;
                        rest[j * 128] = {x[0], x[1], x[2], x[3]};
                    }
            }
        };
        for (int number = (int)blockIdx.x; number < all; number += grid) {
            Tile tile = tile_at(number);
            bool last = true;
            int at = own & 127;
            float high, lower;
            auto take_factors = [&] {
                const float* factors = channel + expert * columns + tile.column + side * 64 + 16 * warp + g;
                high = factors[0], lower = factors[8];
            };
            if (SOON) take_factors();
            auto scale_of = [&](int row) { return row < TOKENS && row < tile.rows ? token[tile.top + row] : 0.0f; };
            float scale;
            if (REST == 0) scale = scale_of(at);
            if constexpr (TURNS == 1) {
#pragma unroll
                for (int i = 0; i < KEPT; ++i) total[i] = -0.0f;
                fetch(0);
                look_up(codes[0], 0);
#pragma unroll 1
                for (int begin = 0; begin + CHAIN <= groups; begin += CHAIN) products(Stages<CHAIN>(), begin == 0, begin + CHAIN < groups);
#pragma unroll 1
                for (int more = groups % CHAIN; more > 0; --more) products(Stages<1>(), more == groups, more > 1);
            } else {
                last = false;
                for (int begin = 0, length; begin < groups; begin += length) {
                    length = groups - begin < CHAIN ? 1 : CHAIN;
                    if (chain == turn) {
                        fetch(0);
                        look_up(codes[0], 0);
                        if (length == CHAIN) products(Stages<CHAIN>(), false, false);
                        else products(Stages<1>(), false, false);
                        last = begin + length == groups;
                        if (!opens) {
                            barrier_wait(turns + 4 * group + warp, handed);
                            handed ^= 1;
                        }
                        opens = false;
#pragma unroll
                        for (int i = 0; i < SUMS / 4; ++i) {
                            Four sum = begin ? so_far[i * 128] : Four{-0.0f, -0.0f, -0.0f, -0.0f};
#pragma unroll
                            for (int e = 0; e < 4; ++e) total[4 * i + e] = sum.x[e] += part[4 * i + e];
                            if (!last) so_far[i * 128] = sum;
                        }
                        barrier_arrive(turns + 4 * next + warp);
                    } else {
                        onward(length);
                    }
                    chain = chain + 1 == TURNS ? 0 : chain + 1;
                }
            }
            if (!last) continue;
            if (REST > 0) {  // what hangs on the thread takes no registers before
                own = thread_from_here() - 128, lane = own & 31, g = lane >> 2, warp = own >> 5 & 3, at = own & 127;
                scale = scale_of(at);
            }
            if (at < TOKENS) scales[at] = scale;
            if (TOKENS > 128 && at + 128 < TOKENS) scales[at + 128] = scale_of(at + 128);
            group_meets(group);
            i64 left = tile.column + side * 64;
            if (!SOON) take_factors();
            constexpr int PAIRS = TOKENS == 8 ? 1 : 2;
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j += PAIRS) {
                unsigned r[2 * PAIRS];
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    Two one = *(const Two*)(scales + 8 * (j + p) + 2 * (lane & 3));
                    const float* x = 4 * (j + p) < KEPT ? total + 4 * (j + p) : part + 4 * (j + p);
                    r[2 * p] = narrow_bf16(high * (one.x[0] * x[0]), high * (one.x[1] * x[1]));
                    r[2 * p + 1] = narrow_bf16(lower * (one.x[0] * x[2]), lower * (one.x[1] * x[3]));
                }
                leave_transposed(mine + place(8 * j + (PAIRS > 1 ? 8 * (lane >> 4) : 0) + (lane & 7), 2 * warp + (lane >> 3 & 1)), r);
            }
            group_meets(group);
            for (int row = at >> 3; row < TOKENS && row < tile.rows; row += 16) {
                uint4 q = *(const uint4*)(mine + place(row, at & 7));
                unsigned short* to = out + (i64)(tile.top + row) * columns + left + 8 * (at & 7);
                if (vectors) {
                    *(uint4*)to = q;
                } else {
                    const unsigned pairs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                    for (int e = 0; e < 8; ++e) to[e] = (unsigned short)(pairs[e >> 1] >> 16 * (e & 1));
                }
            }
            if (REST > 0) group_meets(group);  // before totals come there again
        }
    }
}

#endif
