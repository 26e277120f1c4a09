// Tokens in chunks of `size`, aligned to the starts of their sequences; the last chunk of a sequence may be short.
#pragma once
#include "storage.cuh"

struct Piece {
    int sequence, first, length;  // no token where the length is not positive
};

struct Chunks {
    const int* starts;
    const int* before;  // the chunks before each sequence; null: places with gaps, which need no count of the others
    int sequences, size;

    VT_MEMBER int begin(int n) const { return starts[n]; }
    VT_MEMBER int length(int n) const { return starts[n + 1] - starts[n]; }
    VT_MEMBER int count(int n) const { return (length(n) + size - 1) / size; }

    // Where the sequence's chunks stand among all of them. With gaps a sequence has a place more than it fills whole
    // chunks, counted over all tokens before it: enough for its own.
    VT_MEMBER int place(int n) const { return before != nullptr ? before[n] : starts[n] / size + n; }

    // The last sequence that begins at or before `value`, as `of` tells its beginning.
    template <class Of> VT_MEMBER int last_from(int value, Of of) const {
        int low = 0, high = sequences - 1;
        while (low < high) {
            int middle = (low + high + 1) >> 1;
            if (of(middle) <= value) low = middle;
            else high = middle - 1;
        }
        return low;
    }

    VT_MEMBER Piece part(int n, int local) const {
        int left = length(n) - local * size;
        return {n, begin(n) + local * size, left < size ? left : size};
    }

    VT_MEMBER Piece at(int place_of_chunk) const {
        int n = last_from(place_of_chunk, [&](int i) { return place(i); });
        return part(n, place_of_chunk - place(n));
    }

    VT_MEMBER Piece of_token(int t) const {
        int n = last_from(t, [&](int i) { return begin(i); });
        return part(n, (t - begin(n)) / size);
    }
};

// Heads of tokens that lie `step` elements apart, each of them a row of `width`.
struct Heads {
    const void* base;
    i64 step, width;

    VT_MEMBER float element(i64 token, int head, int d, int kind) const {
        float one[1];
        load(one, base, token * step + head * width + d, kind);
        return one[0];
    }
};

VT_FN void store_one(void* base, i64 at, float x, int kind) {
    float one[1] = {x};
    store(base, at, one, kind);
}
