// Keys and values by slot, a thread the same elements of a head of several tokens that follow each other: which side,
// head and part of it, and where that lies, is found once for all of them, before the kernels ahead are over.
// device/kv_turns.py says where these kernels may be used: steps fit into 32 bits, slots and threads into 31.
#pragma once
#include "kv_rows.cuh"

struct Turns {
    unsigned first, head, lane;
    int count;  // of tokens that there are from `first` on
    bool second;

    // `group`: threads of `depth` tokens, the first half of them for keys; `per_head` of them have a head.
    VT_MEMBER Turns(i64 tokens, const Division& group, int depth, const Division& per_head) {
        const unsigned number = blockIdx.x * blockDim.x + threadIdx.x, turn = group.of(number), half = group.d >> 1;
        const unsigned rest = number - turn * group.d;
        second = rest >= half;
        const unsigned place = rest - (second ? half : 0u);
        head = per_head.of(place);
        lane = place - head * per_head.d;
        first = turn * depth;
        count = (int)tokens - (int)first;
    }
};

// Where a slot's bytes begin: at data + slot * row + page * rest. Found once: without the empty statements a compiler
// finds the side's own parameters anew for every token.
struct Slots {
    unsigned char* data;
    unsigned row, rest;

    VT_MEMBER Slots(unsigned char* data, unsigned row, unsigned block, const Division& page_size)
        : data(data), row(row), rest(block - page_size.d * row) {
        found(this->data);
        found(this->row);
        found(rest);
    }
    VT_MEMBER unsigned char* at(unsigned slot, unsigned page) const {
        return data + ((u64)slot * row + (u64)page * rest);
    }
};

#define TURNS_PARAMETERS                                                                                          \
    i64 tokens, DIVISION(group), DIVISION(per_head), HEADS(key), HEADS(value), SIDE(keys), SIDE(values),          \
        DIVISION(page_size), const i64 *slots, i64 room
// The side's own one of two parameters.
#define OF_SIDE(A, B) (turns.second ? (B) : (A))
