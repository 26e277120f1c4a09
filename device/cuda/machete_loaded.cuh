// Products of 16-bit activations with Machete's weights of 4 bits on Hopper, for more rows than a few: the
// numbers of w4a16.cuh, added up in its order. K is dealt out: SPLIT blocks of a cluster have the same columns, and of each
// LANES teams with a ring of stages of their own; chain c is that of actor c % ACTORS. After each round of chains every actor
// sends the others their shares of its sums, into their shared memory, and adds up what has come for its own share, from
// the round's first chain to its last. So rows of `a` are read by few blocks, which all have much to do.
// BLOCKS of a cluster have the same rows otherwise, of which each brings its share for all. Beside products under way an
// instruction costs about two cycles, so stages come round with as few as may be.
#pragma once
#include "elected.cuh"
#include "packed_words.cuh"
#include "shared_places.cuh"

#if VT_TILES

#ifdef __CUDACC__
// What lies at `shared` of this block, in block `rank` of the cluster.
VT_FN unsigned address_at(const void* shared, int rank) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(shared)), "r"(rank));
    return there;
}
// Four numbers to memory and a barrier of the same block of the cluster.
VT_FN void send_four(void* to, u64* barrier, int rank, float a, float b, float c, float d) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];"
                 ::"r"(address_at(to, rank)), "r"(address_at(barrier, rank)), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// `barrier_wait`, for what other blocks of the cluster have sent.
VT_FN void barrier_wait_for_all(u64* barrier, int parity) {
    asm volatile("{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}
#else
static inline void send_four(void* to, u64* barrier, int, float a, float b, float c, float d) {
    const float all[4] = {a, b, c, d};
    std::memcpy(to, all, 16);
    emulation::bytes_come(barrier, 16);
}
static inline void barrier_wait_for_all(u64* barrier, int parity) { barrier_wait(barrier, parity); }
#endif

struct alignas(16) FourSums { float x[4]; };

#define MACHETE_SHARED ((227 << 10) - 512)
#define MACHETE_BARRIERS 512
#define MACHETE_STAGES 24  // at most

// ROWS of `a` a tile, GROUPS of 64 columns. `stages` of 64 k a lane, of which `length` make a chain. At one time STEP times
// 16 k are unpacked.
template <int KIND, bool ZEROS, int ROWS, int GROUPS, int LANES, int SPLIT, int BLOCKS, int STEP>
VT_FN void machete_loaded(const TensorMap& rows_map, i64 rows, i64 columns, i64 depth, const void* words, const void* scales,
                          const void* zeros, void* out, i64 group_size, i64 zero, i64 length_, i64 vectors, u8* memory) {
    typedef Pairs<KIND> P;
    static_assert(SPLIT == 1 || BLOCKS == 1, "");
    constexpr int IN_CLUSTER = TOGETHER(BLOCKS), RANKS = TOGETHER(SPLIT), ACTORS = LANES * RANKS, TEAMS = LANES * GROUPS, SUMS = ROWS / 2, PART = SUMS / ACTORS;
    constexpr int WORDS_AT = ROWS * 128, SCALES_AT = WORDS_AT + GROUPS * 2048, ZEROS_AT = SCALES_AT + GROUPS * 128;
    constexpr int STAGE = (ZEROS_AT + GROUPS * 128 + 1023) / 1024 * 1024, SHARE = PART * 512, SENDERS = 4 / LANES;
    static_assert(PART % 4 == 0, "");
    // Barriers come first, what is sent after them, so that all places are constants but one.
    constexpr int EXCHANGE = TEAMS * (ACTORS > 1 ? SUMS * 512 : ROWS * 128);
    constexpr int ALL = (MACHETE_SHARED - MACHETE_BARRIERS - 1024 - EXCHANGE) / STAGE;
    constexpr int stages = (ALL < MACHETE_STAGES ? ALL : MACHETE_STAGES) / LANES;
    static_assert(stages >= SENDERS, "");
    if (RANKS < SPLIT && blockIdx.x % SPLIT) return;  // on a host, one block does the work of all
    int thread = (int)threadIdx.x, rank = RANKS == 1 ? 0 : block_of_cluster(), side = IN_CLUSTER == 1 ? 0 : block_of_cluster();
    u64 *full = (u64*)memory, *empty = full + MACHETE_STAGES, *arrived = empty + MACHETE_STAGES, *room = arrived + TEAMS;
    u64* nobodys = (u64*)(memory + MACHETE_BARRIERS) - 1;  // where arrives who has no stage to release yet
    u8 *tiles = memory + MACHETE_BARRIERS + (-(u64)(memory + MACHETE_BARRIERS) & 1023), *exchange = tiles + LANES * stages * STAGE;
    int down = (int)((rows + ROWS - 1) / ROWS), cluster = (int)blockIdx.x / (SPLIT * IN_CLUSTER), across = cluster / down;
    int top = (cluster - across * down) * ROWS, chunks = (int)(depth / CHUNK), length = (int)length_;
    int chains = (chunks + length - 1) / length, rounds = (chains + ACTORS - 1) / ACTORS;
    i64 left = (i64)(across * IN_CLUSTER + side) * GROUPS * COLUMNS;
    bool ours = left < columns;
    if (!ours) left = columns - GROUPS * COLUMNS;  // the last ones once more
    auto chunks_of = [&](int chain) { return chain >= chains ? 0 : chain + 1 < chains ? length : chunks - chain * length; };
    auto bytes_of = [&](int round) { return (chains - round * ACTORS < ACTORS ? chains - round * ACTORS : ACTORS) * SHARE; };
    if (thread == 0) {
        map_ahead(rows_map);
        for (int s = 0; s < LANES * stages; ++s) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, IN_CLUSTER * 4 * GROUPS);
        }
        for (int i = 0; i < TEAMS; ++i) {
            barrier_init(arrived + i, 1);
            barrier_init(room + i, 4 * ACTORS);
        }
        barrier_init(nobodys, 1 << 16);
        barriers_ready();
        for (int i = 0; ACTORS > 1 && i < TEAMS; ++i) barrier_expect(arrived + i, bytes_of(0));
    }
    cluster_meets();
    if (thread < 128) {
        registers_down<40>();
        // Warps take a lane's stages in turn: one or two alone would be slower than those that multiply.
        int warp = same_in_warp(thread >> 5), lane = warp % LANES, turn = warp / LANES, actor = lane * RANKS + rank;
        int stage = 0, parity = 1, chunks_a_group = (int)(group_size / CHUNK), chain = actor;
        bool one = one_of_warp();
        unsigned reciprocal = chunks_a_group > 1 ? 0xffffffffu / (unsigned)chunks_a_group + 1 : 0;
        u64 *ready = full + lane * stages, *used = empty + lane * stages;
        const char* from = (const char*)words + left * 32;
        auto advance = [&](int by) {
            if ((stage += by) >= stages) stage -= stages, parity ^= 1;
        };
        advance(turn);
        int first = chain * length, chunk = first + turn, end = first + chunks_of(chain);
#pragma unroll 1
        for (;; chunk += SENDERS, advance(SENDERS)) {
            while (chain < chains && chunk >= end) {
                chain += ACTORS;
                first = chain * length, chunk += first - end, end = first + chunks_of(chain);
            }
            if (chain >= chains) break;
            barrier_wait(used + stage, parity);
            lanes_meet();
            if (!one) continue;
            u8* here = tiles + (lane * stages + stage) * STAGE;
            int group = chunks_a_group > 1 ? (int)((u64)reciprocal * (unsigned)chunk >> 32) : chunk;
            barrier_expect(ready + stage, ROWS * 128 + GROUPS * (2048 + 128) + (ZEROS ? GROUPS * 128 : 0));
#pragma unroll
            for (int i = 0; i < BLOCKS / IN_CLUSTER; ++i) {
                int part = (side + i) * (ROWS / BLOCKS);
                load_tile_for<IN_CLUSTER>(here + part * 128, rows_map, ready + stage, chunk * 128, top + part, 0, 1);
            }
            if (GROUPS % 2 == 0) {  // blocks of 128 columns lie side by side
                load_bytes(here + WORDS_AT, from + chunk * columns * 32, ready + stage, GROUPS * 2048);
            } else {
                for (int c = 0; c < GROUPS; ++c) {
                    i64 n = left + c * COLUMNS;
                    const char* block = (const char*)words + chunk * columns * 32 + n / 128 * 4096;
                    load_bytes(here + WORDS_AT + c * 2048, block + (n & 64) * 32, ready + stage, 2048);
                }
            }
            load_bytes(here + SCALES_AT, (const char*)scales + (group * columns + left) * 2, ready + stage, GROUPS * 128);
            if (ZEROS) load_bytes(here + ZEROS_AT, (const char*)zeros + (group * columns + left) * 2, ready + stage, GROUPS * 128);
        }
        // Those who multiply take one stage more than there are, whatever lies in it.
        if (chunk == first) {
            barrier_wait(used + stage, parity);
            lanes_meet();
            if (one) barrier_arrive(ready + stage);
        }
    } else {
        registers_up<TEAMS <= 2 ? 232 : 104>();
        int own = thread - 128, team = __shfl_sync(0xffffffffu, own >> 7, 0), lane_of_chains = team / GROUPS, group = team % GROUPS;
        int actor = lane_of_chains * RANKS + rank, lane = own & 31, warp = own >> 5 & 3, g = lane >> 2;
        int stage = 0, parity = 0, at = own & 127;
        const SharedPlace ring = place_in(tiles + lane_of_chains * stages * STAGE), ready = place_in(full + lane_of_chains * stages);
        const SharedPlace used = place_in(empty + lane_of_chains * stages);
        const auto theirs = barriers_of(empty + lane_of_chains * stages, lane & IN_CLUSTER - 1);  // of each block of the cluster
        SharedPlace here = ring;
        const u64 first_tokens = tile_in(ring);
        const int words_place = WORDS_AT + group * 2048 + warp * 512 + lane * 16;
        const int scales_place = SCALES_AT + group * 128 + 2 * (16 * warp + g);
        u8* mine = exchange + team * (EXCHANGE / TEAMS);
        // The mask is in a register, as long as the compiler cannot know: depth < 2^31.
        unsigned mask = 0x000f000fu + (unsigned)(depth >> 32), minus = P::MINUS_BASE + (unsigned)zero * 0x10001u;
        constexpr int BATCHES = 4 / STEP;  // of a stage, which are under way at one time, but for one
        unsigned scale[2], plus[2] = {P::MINUS_ZERO, P::MINUS_ZERO}, a[BATCHES][STEP][4];
        int arrives = lane < IN_CLUSTER, before = (int)(nobodys - empty) - lane_of_chains * stages;
        uint4 q;
        float part[SUMS], total[PART];
#pragma unroll
        for (int i = 0; i < PART; ++i) total[i] = -0.0f;
        auto take = [&] {
            wait_at(ready + 8 * stage, parity);
            q = four_at(here + words_place);
            scale[0] = half_at<0>(here + scales_place), scale[1] = half_at<16>(here + scales_place);
            scale[0] *= 0x10001u, scale[1] *= 0x10001u;
            if constexpr (ZEROS) {
                plus[0] = half_at<GROUPS * 128>(here + scales_place) * 0x10001u;
                plus[1] = half_at<GROUPS * 128 + 16>(here + scales_place) * 0x10001u;
            }
        };
        auto onward = [&] {
            if (++stage == stages) stage = 0, parity ^= 1;
            here = ring + stage * STAGE;
        };
        auto unpack = [&](int batch) {
            const unsigned w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
            for (int s = 0; s < STEP; ++s)
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    unsigned code = fma_pair<KIND>((w[batch * STEP + s] >> 4 * r & mask) | P::BASE, P::ONE, minus);
                    a[batch][s][r] = fma_pair<KIND>(code, scale[r & 1], plus[r & 1]);
                }
        };
        auto multiply_batch = [&](u64 tokens, int batch, bool adds) {
            products_begin();
#pragma unroll
            for (int s = 0; s < STEP; ++s)
                multiply_registers<KIND>(part, a[batch][s], further(tokens, batch * STEP + s), adds || batch > 0 || s > 0);
            products_close();
        };
        auto release = [&](int from) {
            lanes_meet();
            if constexpr (IN_CLUSTER == 1) arrive_at_if(arrives, used + 8 * from);
            else barrier_arrive_if(arrives, theirs, from);
        };
        // The products of 64 k, of which STEP times 16 are unpacked before, or, if all of them, taken; `adds`: to those before.
        auto step = [&](bool adds) {
            u64 tokens = beyond(first_tokens, stage * STAGE);
            if constexpr (STEP == 4) {
                unpack(0);
                multiply_batch(tokens, 0, adds);
                before = stage;
                onward();
                take();
                products_wait<0>();
                release(before);
            } else {
#pragma unroll
                for (int batch = 0; batch < BATCHES; ++batch) {
                    multiply_batch(tokens, batch, adds);
                    int now = stage;
                    if (batch + 1 == BATCHES) {
                        onward();
                        take();
                    }
                    products_wait<BATCHES - 1>();
                    if (batch + 2 == BATCHES) release(before);
                    if (batch + 1 == BATCHES) before = now;
                    unpack((batch + 1) % BATCHES);
                }
            }
        };
        // Adds up this actor's share of a round; then there is room for the next one's.
        auto gather = [&](int round) {
            barrier_wait_for_all(arrived + team, round & 1);
            int count = bytes_of(round) / SHARE;
            const u8* from = mine + at * 16;
#pragma unroll 1
            for (int sender = 0; sender < count; ++sender, from += SHARE)
#pragma unroll
                for (int v = 0; v < PART / 4; ++v) {
                    FourSums x = *(const FourSums*)(from + v * 2048);
#pragma unroll
                    for (int e = 0; e < 4; ++e) total[4 * v + e] += x.x[e];
                }
            if (round + 1 < rounds) {
                if (at == 0) barrier_expect(arrived + team, bytes_of(round + 1));
                lanes_meet();
                if (lane < ACTORS) barrier_arrive_at(room + lane / RANKS * GROUPS + group, lane % RANKS);
            }
        };
        take();
        if (STEP < 4) unpack(0);
#pragma unroll 1
        for (int round = 0; round < rounds; ++round) {
            int count = chunks_of(round * ACTORS + actor), done = 0;
            bool pending = ACTORS > 1 && round > 0;
            int stop = pending && count > 0 ? (count >> 1) + 1 : count;
            if (count > 0) step(false), done = 1;
#pragma unroll 1
            for (;;) {
#pragma unroll 1
                for (; done < stop; ++done) step(true);
                if (pending) gather(round - 1);
                pending = false;
                if (stop == count) break;
                stop = count;
            }
            products_wait<0>();
            products_there(part);
            if (count == 0) continue;
            if constexpr (ACTORS == 1) {
#pragma unroll
                for (int i = 0; i < SUMS; ++i) total[i] += part[i];
                continue;
            }
            if (round > 0) barrier_wait_for_all(room + team, ~round & 1);
#pragma unroll
            for (int other = 0; other < ACTORS; ++other) {
                u8* there = exchange + (other / RANKS * GROUPS + group) * (EXCHANGE / TEAMS) + actor * SHARE + at * 16;
#pragma unroll
                for (int v = 0; v < PART / 4; ++v) {
                    const float* x = part + other * PART + 4 * v;
                    send_four(there + v * 2048, arrived + other / RANKS * GROUPS + group, other % RANKS,
                              x[0], x[1], x[2], x[3]);
                }
            }
        }
        if (ACTORS > 1) gather(rounds - 1);
        group_meets(team);
        int first = top + actor * PART * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int column = 16 * warp + 8 * h + g;
#pragma unroll
            for (int i = 0; i < PART; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    *(unsigned short*)(mine + place(2 * i + 2 * (lane & 3) + e, column >> 3) + 2 * (column & 7)) = (unsigned short)pair<KIND>(total[i + 2 * h + e], 0.0f);
        }
        group_meets(team);
#pragma unroll
        for (int i = 0; i < PART * 2; i += 16) {
            int row = (at >> 3) + i, v = at & 7;
            if (row < PART * 2 && first + row < rows && ours) {
                uint4 r = *(const uint4*)(mine + place(row, v));
                unsigned short* to = (unsigned short*)out + (first + row) * columns + left + group * COLUMNS + 8 * v;
                if (vectors) {
                    *(uint4*)to = r;
                } else {
                    const unsigned pairs[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
                    for (int e = 0; e < 8; ++e) to[e] = (unsigned short)(pairs[e >> 1] >> 16 * (e & 1));
                }
            }
        }
    }
    cluster_meets();
}

#define MACHETE_LOADED(NAME, KIND, ZEROS, ROWS, GROUPS, LANES, SPLIT, BLOCKS, STEP)                                      \
    extern "C" __global__ void VT_CLUSTER_OF(SPLIT * BLOCKS) __launch_bounds__(128 + 128 * GROUPS * LANES, 1)                      \
        NAME(VT_MAP rows_map, i64 rows, i64 columns, i64 depth, const void* words, const void* scales,                    \
             const void* zeros, void* out, i64 group, i64 zero, i64 length, i64 vectors) {                                \
        VT_SHARED(memory);                                                                                                \
        machete_loaded<KIND, ZEROS, ROWS, GROUPS, LANES, SPLIT, BLOCKS, STEP>(rows_map, rows, columns, depth, words,      \
                                                                              scales, zeros, out, group, zero, length, vectors, memory);  \
    }
#endif
