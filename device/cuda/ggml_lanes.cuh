// One row meets blocks of 256 that are an odd number of two bytes: a lane keeps the activations of half a block in registers
// and meets that half of one row of the weight after another, two at a time.
//
// Half a warp's lanes have every other block of as many rows as fit: two blocks are an odd number of words, so that words
// of one number lie in different banks. Warps with even blocks and with odd ones take turns. Rows come as they lie, a slot
// of a ring at a time; who meets one sends for another, whatever others have left. Terms stay until all rows have theirs,
// and are then added, a thread a row, in the order of blocks.
//
// A block's time is a third over before it meets anything, so what comes first is as little as can be: the last warp sends
// for rows while the others code the activations, and nobody waits for what he does not need.
#pragma once
#include "early.cuh"
#include "ggml_row_codes.cuh"

// Warps, rows that a lane has at once, and slots at most.
constexpr int MEETERS = 20, ABREAST = 2, MOST_IN_RING = 24;
constexpr int SOON = 1 << 15;  // bytes of a block's rows that are asked for before they may be read
enum { BEGUN = 1, CODED, ADDED };  // where warps meet: barriers of the first slots, codes, terms

// How rows are shared out (device/ggml_matmul.py). Kinds of warps, by the blocks they have; lanes of a row; pairs of rows a
// warp has at once, warps that have rows of a slot; slots, and how many may be on their way. What begins with `over` is
// what a small number is divided by another with: times it, 12 bits up. `turned`: lanes, a bit each, that meet their
// second row first, which lies in other banks.
struct Split {
    int kinds, span, high, groups, slots, ahead, over_kinds, over_span, over_groups;
    unsigned turned;
};
VT_FN int quotient(int n, int over) { return n * over >> 12; }

// A lane's half of a block of activations.
struct Activations {
    unsigned x[32];
    VT_MEMBER void take(const u8* codes) {
        const uint4* from = (const uint4*)codes;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint4 four = from[i];
            x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
        }
    }
};

// Words from an even address on.
struct EvenWords {
    const unsigned* q;
    unsigned select;
    VT_MEMBER EvenWords(const u8* p) {
        unsigned apart = (unsigned)(unsigned long long)p & 2;
        q = (const unsigned*)(p - apart);
        select = apart ? 0x5432u : 0x3210u;
    }
    VT_MEMBER EvenWords further(int bytes) const {  // a multiple of four
        EvenWords found = *this;
        found.q = (const unsigned*)((const u8*)q + bytes);
        return found;
    }
    VT_MEMBER unsigned operator[](int i) const { return picked(q[i], q[i + 1], select); }
};

// How half a block of a type meets its activations: the sum of its integers' products, times 1 / UNIT. SCALE: where a
// block has its scale. TABLES: bytes of what begins at place(memory) and fill(...) makes, all but the last warp, of what
// ask() asks for; it is the module's own and waits for nobody.
template <int TYPE> struct Met;

// Rows from `row` on their way to a slot; nothing past the weight is touched.
VT_MEMBER void send_slot(const Row& p, u8* to, int row, int rows, u64* full) {
    const u8* from = p.b + row * p.stride;
    const int skew = (int)(unsigned long long)from & 15, end = skew + rows * (int)p.stride;
    int bytes = end + 15 & ~15;
    from -= skew;
    if (row + rows == (int)p.columns) {
        bytes = end & ~15;
#pragma unroll 1
        for (int k = bytes; k < end; k += 2) *(unsigned short*)(to + k) = *(const unsigned short*)(from + k);
    }
    if (bytes) stretch(to, from, bytes, full);
    arrive(full);
}

// Rows on their way into the second-level cache: nothing is read.
VT_FN void rows_ahead(const u8* rows, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const int skew = (int)(unsigned long long)rows & 15;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(rows - skew), "r"(skew + bytes & ~15) : "memory");
#endif
}

// A slot of a ring, and whether its end was passed an odd number of times; a step is no longer than the ring.
struct InRing {
    int slot;
    unsigned parity = 0;
    VT_MEMBER void forward(int step, int size) {
        slot += step;
        if (slot < size) return;
        slot -= size;
        parity ^= 1;
    }
};

// A warp says that it was where a team meets, and goes on.
VT_FN void team_arrives(int team, int threads) {
#ifdef __CUDACC__
    asm volatile("bar.arrive %0, %1;" ::"r"(team), "r"(threads) : "memory");
#else
    emulation::Meeting& meeting = emulation::teams[team];
    meeting.size = threads;
    ++emulation::progress;
    if (++meeting.waiting < threads) return;
    meeting.waiting = 0;
    ++meeting.round;
#endif
}

// A number that is not found before what was asked for earlier is on its way.
VT_FN int later(int number) {
#ifdef __CUDACC__
    asm volatile("" : "+r"(number)::"memory");
#endif
    return number;
}

// The sum of a row's terms.
VT_FN float sum_of(const float* terms, int blocks) {
    float sum = 0.0f;
    int block = 0;
#pragma unroll 1
    for (; block + 8 <= blocks; block += 8) {
        float eight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) eight[i] = terms[block + i];
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = sum + eight[i];
    }
#pragma unroll 1
    for (; block < blocks; ++block) sum = sum + terms[block];
    return sum;
}

// Of `grid` blocks, which have `each` rows or one more. Rows lie one after the other.
template <int TYPE> VT_MEMBER void in_lanes(const Row& p, int grid, int each, const Split& s) {
    using M = Met<TYPE>;
    constexpr int ALL_OF_THEM = 32 * MEETERS, CODERS = MEETERS - 1;
    VT_SHARED(shared);
    others_may_start();
    M met;
    met.ask();
    u8* memory = in_register(shared);
    const int warp = __shfl_sync(ALL, (int)threadIdx.x >> 5, 0), stride = (int)p.stride;
    const bool leads = warp == CODERS, alone = (threadIdx.x & 31) == 0;
    const int blocks = (int)((unsigned)p.depth / 256), ways = blocks > 1 ? 2 : 1;
    const int first = begin_of((int)blockIdx.x, grid, (int)p.columns, each);
    const int count = begin_of((int)blockIdx.x + 1, grid, (int)p.columns, each) - first;
    // Of a slot: rows, bytes. Of a row of terms: floats, so that rows' are in different banks.
    const int rows = ABREAST * s.high * s.groups, size = (16 + rows * stride + 15) & ~15, pitch = blocks | 1;
    const int turns = (int)((unsigned)(count + rows - 1) / (unsigned)rows);
    const bool again = turns > s.slots;  // whether others come into a slot
    u8* tables = M::place(memory);
    u64 *full = (u64*)(tables + M::TABLES), *empty = full + MOST_IN_RING;
    Share w;
    w.blocks = blocks;
    w.codes = (u8*)(empty + MOST_IN_RING);
    w.sums = 0;
    w.scales = (float*)(w.codes + blocks * Tiles<TYPE>::CODES);
    float* const ones = w.scales + blocks;  // terms
    u8* const ring = (u8*)(w.scales + (blocks + turns * rows * pitch + 3 & ~3));
    auto send = [&](int turn, int slot) {
        const int begin = turn * rows;
        if (turn < turns) send_slot(p, ring + slot * size, first + begin, count - begin < rows ? count - begin : rows, full + slot);
    };
    if (leads) {
        if (alone) {
            rows_ahead(p.b + first * p.stride, count * stride < SOON ? count * stride : SOON);
#pragma unroll 1
            for (int i = 0; i < s.ahead; ++i) phases_begin(full + i, 1);
            phases_seen();
        }
        warp_meets();
        team_arrives(BEGUN, ALL_OF_THEM);
    } else {
        met.fill(tables, warp);
        const int kind = CODERS - 1 - warp;  // of other barriers: to begin one takes long
        if (kind < 2 && alone) {
            const int from = kind ? 0 : s.ahead, end = kind && !again ? 0 : s.slots;
#pragma unroll 1
            for (int i = from; i < end; ++i) phases_begin((kind ? empty : full) + i, kind ? 32 * s.kinds * s.groups : 1);
            phases_seen();
        }
        warp_meets();
    }
    after_others();
    if (leads && alone) {
#pragma unroll 1
        for (int i = 0; i < s.ahead; ++i) send(i, i);
    }
    warp_meets();
    Eights eights(p, leads ? (int)p.depth : (int)threadIdx.x, 32 * CODERS);
    // What a lane has is found while the activations come.
    const int thread = later((int)threadIdx.x), lane = thread & 31, number = __shfl_sync(ALL, thread >> 5, 0);
    const int group = quotient(number, s.over_kinds), kind = number - group * s.kinds;
    const int begin = quotient(group, s.over_groups), step = quotient(quotient(MEETERS, s.over_kinds), s.over_groups);
    const int half = lane >> 4, up = quotient(lane & 15, s.over_span);
    const int row = ((group - begin * s.groups) * s.high + up) * ABREAST;  // of a slot
    const int block = ways * ((kind >> ways - 1) * s.span + (lane & 15) - up * s.span) + (kind & ways - 1);
    const bool there = up < s.high && block < blocks;
    const int mine = there ? block : 0;  // what is not there is as another block, and is not kept
    const bool turned = s.turned >> lane & 1, second = half != (int)turned;  // whether the row met last is the one it keeps
    const int away = ((there ? row : 0) + turned) * stride + mine * Block<TYPE>::BYTES, apart = turned ? -stride : stride;
    int turn = begin < step ? begin : turns;
    InRing at = {turn};
    unsigned low = (unsigned)(unsigned long long)p.b + (unsigned)((first + turn * rows) * stride);
    float* terms = ones + (turn * rows + row + half) * pitch + block;
    met.begin(tables, blocks);
    if (leads) {
        team_meets(CODED, ALL_OF_THEM);
    } else {
        if (warp < blocks) code_tiles<TYPE, CODERS>(w, eights);
        team_arrives(CODED, ALL_OF_THEM);
        team_meets(BEGUN, ALL_OF_THEM);
    }
    Activations a;
    a.take(w.codes + place_of<TYPE>(w, mine) * Tiles<TYPE>::CODES + half * 128);
    const float d = w.scales[mine];
    // To send keeps a scheduler's other warps waiting, too: they take turns.
    const int mates = s.kinds * s.groups, eldest = begin * mates, sender = eldest + (mates < 4 ? 0 : begin - eldest & 3);
    const bool sends = lane == 0 && number == sender;
#pragma unroll 1
    for (; turn < turns; turn += step) {
        phase_over(full + at.slot, at.parity);
        if (sends && turn + s.ahead < turns) {
            InRing to = at;
            to.forward(s.ahead, s.slots);
            if (turn + s.ahead >= s.slots) phase_over(empty + to.slot, to.parity ^ 1);
            send(turn + s.ahead, to.slot);
        }
        const u8 *one = ring + at.slot * size + (int)(low & 15) + away, *two = one + apart;
        const int sum = met(one, half, a), other = met(two, half, a);
        // Each half of the warp has one of both rows.
        const int total = (second ? other : sum) + __shfl_xor_sync(ALL, second ? sum : other, 16);
        const float term = (float)total * M::UNIT * (f16_at((second ? two : one) + M::SCALE) * d);
        if (there) *terms = term;
        terms += step * rows * pitch;
        if (again) arrive(empty + at.slot);  // each lane for itself: race checkers do not let one lane speak for all
        at.forward(step, s.slots);
        low += (unsigned)(step * rows * stride);
    }
    team_meets(ADDED, ALL_OF_THEM);
    for (int i = (int)threadIdx.x; i < count; i += ALL_OF_THEM) {
        float result[1] = {sum_of(ones + i * pitch, blocks) * Block<TYPE>::FOLD};
        store(p.out, first + i, result, (int)p.kind);
    }
}
