// A paged cache with a scale for each head of each token: int8 and e4m3 codes, and codes of four bits after a rotation.
//
// The ladder:
// 1. heads_any, int4_any: a warp a head, element by element, for any width and address.
// 2. heads_v8, int4_v8: a team of lanes a head, 8 elements of the key and 8 of the value each, in registers from the
//    load to the codes; a row takes one trip to memory. heads_bf16, int4_bf16: 16 of each, which halves what finding
//    the head, the slot and their addresses costs.
// 3. What the whole team would compute alike, a scale's divisions, even lanes do for the key and odd ones for the
//    value, and hand the other side its factor; extrema of bfloat16 travel two or four to a shuffle.
// 4. heads_*_early (kv_heads_turns.cuh): keys or values of four tokens a thread, whose scales their lanes share among
//    them, started while the kernel before ends: 13.9 us for 8192 x 8 x 128 in int8 and 10.5 in four bits, which 16 of
//    a key or a value a thread did in 15.7 and 13.7. Where lanes store 4 bytes, those of 16 have to lie together.
// 5. rht_one, rht_four: 8 or 32 elements a lane, so that of the stages of a row of 128 five need no shuffle. Of
//    bfloat16 signs are flipped as they lie in memory: 6.5 us for 8192 x 8 x 128 where it took 10.
#include "kv_heads_turns.cuh"

// By words of 64: bit i is set where element i keeps its sign.
VT_FN unsigned signs_of_eight(int group) {
    const u64 words = group < 8    ? 0x808035b16573590dull
                      : group < 16 ? 0x6b7f5438a6443d6cull
                      : group < 24 ? 0xabafc4414aa48b81ull
                                   : 0xfa2043a0320b9848ull;
    return (unsigned)(words >> 8 * (group & 7)) & 0xffu;
}

VT_FN float other_in_team(float x, int distance) { return __shfl_xor_sync(FULL_WARP, x, distance); }
VT_FN unsigned other_in_team(unsigned x, int distance) { return __shfl_xor_sync(FULL_WARP, x, distance); }

// Where a team of 1 << shift lanes works: its row (a head of a token), this lane's first element, and how far its
// vectors are apart.
struct Turn {
    i64 row;
    int first, lanes, step;
    VT_MEMBER Turn(int shift)
        : row((i64)blockIdx.x * (blockDim.x >> shift) + (threadIdx.x >> shift)),
          first(8 * (int)(threadIdx.x & ((1u << shift) - 1))), lanes(1 << shift), step(8 << shift) {}
};

// A lane's Q vectors of a row. BRAIN: aligned bfloat16.
template <bool BRAIN, int Q> struct Vectors {
    Raw<8> raw[Q];
    int count;  // of those that are inside the row

    VT_MEMBER Vectors(const Heads& from, const Target& to, const Turn& turn, bool there, int kind) {
        count = 0;
        const i64 begin = from.at(to.token, to.head) + turn.first;
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            if (!there || turn.first + q * turn.step >= from.width) continue;
            count = q + 1;
            raw[q] = fetch_eight(from.x, begin + q * turn.step, kind, BRAIN || from.aligned);
        }
    }
    VT_MEMBER unsigned maximum(int kind) const {
        unsigned top = 0;
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            if (q >= count) continue;
            unsigned one = lane_maximum<BRAIN>(raw[q], kind);
            top = BRAIN ? larger_pair<false>(top, one) : larger(top, one);
        }
        return top;
    }
};

#define HEADS_PARAMETERS                                                                                          \
    i64 rows, DIVISION(heads), HEADS(key), HEADS(value), SIDE(keys), SIDE(values), i64 kind, i64 int8,            \
        const i64 *slots, i64 page_size, i64 room
#define HEADS_ARGUMENTS                                                                                           \
    rows, THE_DIVISION(heads), THE_HEADS(key), THE_HEADS(value), THE_SIDE(keys), THE_SIDE(values)

template <bool BRAIN, int Q>
VT_FN void write_heads(i64 rows, const Division& heads, const Heads& key, const Heads& value, const Side& keys,
                       const Side& values, const ByteCodes& codes, int kind, const i64* slots, i64 page_size, i64 room,
                       int shift) {
    const Turn turn(shift);
    Target to(turn.row, rows, heads, slots);
    const Vectors<BRAIN, Q> k(key, to, turn, turn.row < rows, kind), v(value, to, turn, turn.row < rows, kind);
    loads_are_under_way();
    to.find(page_size, room);
    float scale = codes.scale(own_maximum<BRAIN>(k.maximum(kind), v.maximum(kind), turn.lanes));
    float inverse = 1.0f / scale, other = other_in_team(inverse, 1);
    if (!to.stored) return;
    bool odd = threadIdx.x & 1;
    if (turn.first < 16) *(odd ? values : keys).scale(to.page, to.offset, to.head) = scale;
    auto put = [&](const Vectors<BRAIN, Q>& row, const Side& side, float by) {
        unsigned char* bytes = side.at(to.page, to.offset, to.head) + turn.first;
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            if (q >= row.count) continue;
            float x[8];
            widen(x, row.raw[q], kind);
            put_words(bytes + q * turn.step, codes.words(x, by), side.unit);
        }
    };
    put(k, keys, odd ? other : inverse);
    put(v, values, odd ? inverse : other);
}

extern "C" __global__ void __launch_bounds__(256) heads_bf16(HEADS_PARAMETERS, i64 shift) {
    write_heads<true, 2>(HEADS_ARGUMENTS, ByteCodes{int8 != 0}, BF16, slots, page_size, room, (int)shift);
}
extern "C" __global__ void __launch_bounds__(256) heads_v8(HEADS_PARAMETERS, i64 shift) {
    write_heads<false, 1>(HEADS_ARGUMENTS, ByteCodes{int8 != 0}, (int)kind, slots, page_size, room, (int)shift);
}

// One of a head's two rows, and where its codes and scale go.
struct Half {
    const void* x;
    i64 begin;
    int width;
    unsigned char* bytes;
    float* scale;
    VT_MEMBER Half(const Target& to, const Heads& from, const Side& side)
        : x(from.x), begin(from.at(to.token, to.head)), width(from.width),
          bytes(side.at(to.page, to.offset, to.head)), scale(side.scale(to.page, to.offset, to.head)) {}
};

// Row `number / 2`: the key where the number is even, else the value.
extern "C" __global__ void __launch_bounds__(256) heads_any(HEADS_PARAMETERS) {
    i64 number = (i64)blockIdx.x * 8 + (threadIdx.x >> 5), row = number >> 1;
    int lane = threadIdx.x & 31;
    Target to(row, rows, THE_DIVISION(heads), slots);
    to.find(page_size, room);
    const Half half =
        number & 1 ? Half(to, THE_HEADS(value), THE_SIDE(values)) : Half(to, THE_HEADS(key), THE_SIDE(keys));
    const ByteCodes codes{int8 != 0};
    unsigned top = 0;
    float x[1];
    for (int at = lane; to.stored && at < half.width; at += 32) {
        load(x, half.x, half.begin + at, (int)kind);
        top = larger(top, largest_of(x, false));
    }
    top = largest_of_warp(top);
    if (!to.stored) return;
    float scale = codes.scale(top), inverse = 1.0f / scale;
    if (lane == 0) *half.scale = scale;
    for (int at = lane; at < half.width; at += 32) {
        load(x, half.x, half.begin + at, (int)kind);
        half.bytes[at] = (unsigned char)codes.one(x[0], inverse);
    }
}

VT_FN void widen_range(float& high, float& low, const float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        high = fmaxf(high, x[j]);
        low = fminf(low, x[j]);
    }
}

// The range of the key's row for even lanes, of the value's for odd ones.
template <bool BRAIN, int Q>
VT_FN NibbleCodes own_range(const Vectors<BRAIN, Q>& k, const Vectors<BRAIN, Q>& v, int kind, int lanes) {
    bool odd = threadIdx.x & 1;
    if (BRAIN) {
        unsigned a = NO_RANGE, b = NO_RANGE;
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            if (q < k.count) a = larger_signed_pair(a, range_of(k.raw[q].a));
            if (q < v.count) b = larger_signed_pair(b, range_of(v.raw[q].a));
        }
        for (int m = lanes >> 1; m >= 1; m >>= 1) {
            a = larger_signed_pair(a, other_in_team(a, m));
            b = larger_signed_pair(b, other_in_team(b, m));
        }
        unsigned own = odd ? b : a;
        return NibbleCodes(widen_bf16(own & 0xffffu), -widen_bf16(own >> 16));
    }
    float x[8], high[2] = {-VT_INF, -VT_INF}, low[2] = {VT_INF, VT_INF};
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        if (q < k.count) {
            widen(x, k.raw[q], kind);
            widen_range(high[0], low[0], x);
        }
        if (q < v.count) {
            widen(x, v.raw[q], kind);
            widen_range(high[1], low[1], x);
        }
    }
    for (int m = lanes >> 1; m >= 1; m >>= 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            high[i] = fmaxf(high[i], other_in_team(high[i], m));
            low[i] = fminf(low[i], other_in_team(low[i], m));
        }
    }
    return NibbleCodes(odd ? high[1] : high[0], odd ? low[1] : low[0]);
}

template <bool BRAIN, int Q>
VT_FN void write_int4(i64 rows, const Division& heads, const Heads& key, const Heads& value, const Side& keys,
                      const Side& values, int kind, const i64* slots, i64 page_size, i64 room, int shift) {
    const Turn turn(shift);
    Target to(turn.row, rows, heads, slots);
    const Vectors<BRAIN, Q> k(key, to, turn, turn.row < rows, kind), v(value, to, turn, turn.row < rows, kind);
    loads_are_under_way();
    to.find(page_size, room);
    const NibbleCodes own = own_range(k, v, kind, turn.lanes);
    float other_inverse = other_in_team(own.inverse, 1), other_zero = other_in_team(own.zero, 1);
    if (!to.stored) return;
    bool odd = threadIdx.x & 1;
    if (turn.first < 16) *(odd ? values : keys).scale(to.page, to.offset, to.head) = own.stored();
    auto put = [&](const Vectors<BRAIN, Q>& row, const Side& side, bool mine) {
        const NibbleCodes codes(mine ? own.inverse : other_inverse, mine ? own.zero : other_zero, 0);
        unsigned char* bytes = side.at(to.page, to.offset, to.head) + (turn.first >> 1);
#pragma unroll
        for (int q = 0; q < Q; ++q) {
            if (q >= row.count) continue;
            float x[8];
            widen(x, row.raw[q], kind);
            put_word(bytes + q * (turn.step >> 1), codes.word(x), side.unit);
        }
    };
    put(k, keys, !odd);
    put(v, values, odd);
}

extern "C" __global__ void __launch_bounds__(256) int4_bf16(HEADS_PARAMETERS, i64 shift) {
    write_int4<true, 2>(HEADS_ARGUMENTS, BF16, slots, page_size, room, (int)shift);
}
extern "C" __global__ void __launch_bounds__(256) int4_v8(HEADS_PARAMETERS, i64 shift) {
    write_int4<false, 1>(HEADS_ARGUMENTS, (int)kind, slots, page_size, room, (int)shift);
}

extern "C" __global__ void __launch_bounds__(256) int4_any(HEADS_PARAMETERS) {
    i64 number = (i64)blockIdx.x * 8 + (threadIdx.x >> 5), row = number >> 1;
    int lane = threadIdx.x & 31;
    Target to(row, rows, THE_DIVISION(heads), slots);
    to.find(page_size, room);
    const Half half =
        number & 1 ? Half(to, THE_HEADS(value), THE_SIDE(values)) : Half(to, THE_HEADS(key), THE_SIDE(keys));
    float high = -VT_INF, low = VT_INF, a[1], b[1];
    for (int at = lane; to.stored && at < half.width; at += 32) {
        load(a, half.x, half.begin + at, (int)kind);
        high = fmaxf(high, a[0]);
        low = fminf(low, a[0]);
    }
    for (int m = 16; m >= 1; m >>= 1) {
        high = fmaxf(high, other_in_team(high, m));
        low = fminf(low, other_in_team(low, m));
    }
    if (!to.stored) return;
    const NibbleCodes codes(high, low);
    if (lane == 0) *half.scale = codes.stored();
    for (int at = 2 * lane; at < half.width; at += 64) {
        load(a, half.x, half.begin + at, (int)kind);
        load(b, half.x, half.begin + at + 1, (int)kind);
        half.bytes[at >> 1] = (unsigned char)(codes.one(a[0]) | codes.one(b[0]) << 4);
    }
}

HEADS_TURNS(heads_int8_early, INT8_HEADS, 8, 2)
HEADS_TURNS(heads_e4m3_early, E4M3_HEADS, 8, 2)
HEADS_TURNS(heads_int4_early, INT4_HEADS, 16, 2)

READ_CODES(read_heads_v8_early, 8, INT8_CODES)
READ_CODES(read_heads_v1_early, 1, INT8_CODES)

// Eight or two elements from the codes of 4 or 1 bytes; `width` counts elements.
template <int V>
VT_FN void read_int4(i64 rows, i64 width, i64 chunks, const unsigned char* cache, const float* scales,
                     const Paged& paged, void* out, int kind, int unit) {
    Place at[READ_DEPTH];
    unsigned word[READ_DEPTH];
    i64 from = 0, scale_at = 0;
    others_may_start();
    after_others();
#pragma unroll
    for (int d = 0; d < READ_DEPTH; ++d) {
        at[d] = place<V>(rows, width, chunks, READ_DEPTH, d);
        if (!at[d].inside) continue;
        if (d == 0) paged.find(at[0].row, from, scale_at);
        const unsigned char* bytes = cache + from + (at[d].column >> 1);
        word[d] = V == 8 ? take_word(bytes, unit) : (unsigned)*bytes >> 4 * (at[d].column & 1);
    }
    if (!at[0].inside) return;
    int bits = ((const int*)scales)[scale_at];
    float scale = vt_float(bits & ~15), zero = vt_float(bits & 15 | 0x4b000000), y[V];  // 2^23 and a number
#pragma unroll
    for (int d = 0; d < READ_DEPTH; ++d) {
        if (!at[d].inside) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) y[j] = (vt_float((int)(word[d] >> 4 * j & 15u | 0x4b000000u)) - zero) * scale;
        store(out, at[d].row * width + at[d].column, y, kind);
    }
}

#define READ_INT4(V)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) read_int4_v##V##_early(                                             \
        i64 rows, i64 width, i64 chunks, const unsigned char* cache, const float* scales, PAGED, void* out,       \
        i64 kind, i64 codes, i64 unit) {                                                                          \
        read_int4<V>(rows, width, chunks, cache, scales, THE_PAGED, out, (int)kind, (int)unit);                   \
    }
READ_INT4(8)
READ_INT4(1)

// Sums and differences of all pairs that are `span` apart within `count` elements.
template <int COUNT, int SPAN> VT_FN void butterflies(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        if (i & SPAN) continue;
        float a = x[i], b = x[i | SPAN];
        x[i] = a + b;
        x[i | SPAN] = a - b;
    }
}

// x with the signs of vector `group`'s elements.
VT_FN void signed_eight(float* x, int group) {
    const unsigned flips = ~signs_of_eight(group);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = vt_float(vt_bits(x[j]) ^ (int)(flips << (31 - j) & 0x80000000u));
}

// The first `width` elements of a row, fewer than 8, and zeros.
VT_FN void load_few(float* x, const void* base, i64 at, int width, int kind) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float one[1] = {0.0f};
        if (j < width) load(one, base, at + j, kind);
        x[j] = one[0];
    }
}

// A row of `width` elements by a team of 1 << shift lanes, Q vectors of 8 a lane, a team's vectors side by side. A row
// narrower than a vector has one that is not full (Q = 1), whose stages end at the width.
template <int Q>
VT_FN void rotate(i64 rows, i64 width, const void* x, i64 stride, bool aligned, int kind, bool inverse, void* out,
                  int shift) {
    const int lanes = 1 << shift, place = threadIdx.x & (lanes - 1);
    i64 row = (i64)blockIdx.x * (blockDim.x >> shift) + (threadIdx.x >> shift);
    bool there = row < rows, whole = Q > 1 || width >= 8;
    Raw<8> raw[Q];
    float v[8 * Q];
    after_others();
#pragma unroll
    for (int q = 0; q < Q; ++q)
        if (there && whole) raw[q] = fetch_eight(x, row * stride + 8 * (q * lanes + place), kind, aligned);
    others_may_start();
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        float one[8] = {};
        if (there && whole) widen(one, raw[q], kind);
        if (there && !whole) load_few(one, x, row * stride, (int)width, kind);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[8 * q + j] = one[j];
        if (!inverse) signed_eight(v + 8 * q, q * lanes + place);
    }
    if (Q > 1 || width > 1) butterflies<8 * Q, 1>(v);
    if (Q > 1 || width > 2) butterflies<8 * Q, 2>(v);
    if (Q > 1 || width > 4) butterflies<8 * Q, 4>(v);
    for (int m = 1; m < lanes; m <<= 1) {
        float sign = place & m ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 8 * Q; ++i) v[i] = vt_fma(sign, v[i], other_in_team(v[i], m));
    }
    if constexpr (Q == 4) {
        butterflies<8 * Q, 8>(v);
        butterflies<8 * Q, 16>(v);
    }
    if (!there) return;
    float factor = 1.0f / (float)width;
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        float one[8];
        if (inverse) {
            signed_eight(v + 8 * q, q * lanes + place);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[8 * q + j] *= factor;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) one[j] = v[8 * q + j];
        i64 at = row * width + 8 * (q * lanes + place);
        if (whole && aligned) {
            store(out, at, one, kind);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float single[1] = {one[j]};
                if (whole || j < (int)width) store(out, at + j, single, kind);
            }
        }
    }
}

// Aligned bfloat16, signs as they lie in memory: element 2 i of eight is flipped by bit 15 of a word, 2 i + 1 by bit 31.
VT_FN void flip_eight(uint4& w, int group) {
    const unsigned eight = ~signs_of_eight(group) & 0xffu, apart = eight | eight << 15;
    w.x ^= apart << 15 & 0x80008000u;
    w.y ^= apart << 13 & 0x80008000u;
    w.z ^= apart << 11 & 0x80008000u;
    w.w ^= apart << 9 & 0x80008000u;
}

template <int Q>
VT_FN void rotate_brain(i64 rows, i64 width, const void* x, i64 stride, bool inverse, void* out, int shift) {
    const int lanes = 1 << shift, place = threadIdx.x & (lanes - 1);
    const i64 row = (i64)blockIdx.x * (blockDim.x >> shift) + (threadIdx.x >> shift);
    const bool there = row < rows;
    const uint4* from = (const uint4*)((const unsigned short*)x + row * stride) + place;
    uint4 raw[Q];
    float v[8 * Q];
    found(from);
    if (Q < 4) others_may_start();
    after_others();
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        raw[q] = {};
        if (there) raw[q] = from[q * lanes];
    }
    loads_are_under_way();
    if (Q == 4) others_may_start();
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        float one[8];
        if (!inverse) flip_eight(raw[q], q * lanes + place);
        widen(one, Raw<8>{raw[q], {}}, BF16);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[8 * q + j] = one[j];
    }
    butterflies<8 * Q, 1>(v);
    butterflies<8 * Q, 2>(v);
    butterflies<8 * Q, 4>(v);
    for (int m = 1; m < lanes; m <<= 1) {
        const float sign = place & m ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 8 * Q; ++i) v[i] = vt_fma(sign, v[i], other_in_team(v[i], m));
    }
    if constexpr (Q >= 2) butterflies<8 * Q, 8>(v);
    if constexpr (Q == 4) butterflies<8 * Q, 16>(v);
    if (!there) return;
    const float factor = inverse ? 1.0f / (float)width : 1.0f;
    uint4* to = (uint4*)((unsigned short*)out + row * width) + place;
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        if (inverse) {
#pragma unroll
            for (int j = 0; j < 8; ++j) v[8 * q + j] *= factor;
        }
        uint4 w = {narrow_bf16(v[8 * q], v[8 * q + 1]), narrow_bf16(v[8 * q + 2], v[8 * q + 3]),
                   narrow_bf16(v[8 * q + 4], v[8 * q + 5]), narrow_bf16(v[8 * q + 6], v[8 * q + 7])};
        if (inverse) flip_eight(w, q * lanes + place);
        to[q * lanes] = w;
    }
}

#define ROTATE_BRAIN(NAME, Q, RESIDENT)                                                                           \
    extern "C" __global__ void __launch_bounds__(256, RESIDENT) NAME(i64 rows, i64 width, const void* x,          \
                                                                     i64 stride, i64 inverse, void* out,          \
                                                                     i64 shift) {                                 \
        rotate_brain<Q>(rows, width, x, stride, inverse != 0, out, (int)shift);                                   \
    }
ROTATE_BRAIN(rht_few_early, 2, 5)
ROTATE_BRAIN(rht_many_early, 4, 4)

#define ROTATE(NAME, Q)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256, 4) NAME(i64 rows, i64 width, const void* x, i64 stride,     \
                                                              i64 aligned, i64 kind, i64 inverse, void* out,      \
                                                              i64 shift) {                                        \
        rotate<Q>(rows, width, x, stride, aligned != 0, (int)kind, inverse != 0, out, (int)shift);                \
    }
ROTATE(rht_one_early, 1)
ROTATE(rht_four_early, 4)

SLOTS_KERNEL(kv_quant_heads_slots_fit)
