"""Rows of attention: what a row of queries sees, and its running result, which chunks of keys are merged into in turn.

A row's state is the maximum and the sum of its weights so far; beside it stand its mixed values, not yet divided.
"""

from __future__ import annotations

import numpy as np

from ..compiling import device, kernel
from .lanes import fma, lane, lanes_below, spread, where, zeros
from .memory import address, aligned, get_f32, get_i32, get_u8, given, load_f32, put, set_at, store
from .transcendental import exp, log

CHUNK = 64
CELL = 16
INF = np.float32(np.inf)


@device
def seen(i, new, total, causal, left, right):
    """(first, last) key that row i of `new` sees of `total`."""
    position = total - new + i
    last = position if causal else total - 1
    return max(np.int64(0), position - left), min(min(last, position + right), total - 1)


@device
def merged(state, top, total):
    """The weights (a, b) of what was and of a chunk with this maximum and sum; state = (maximum, sum) is brought on."""
    before = get_f32(state, 0)
    larger = before if before >= top or before != before else top
    base = np.float32(0) if larger == -INF else larger
    both = exp(where(lanes_below(1), spread(before - base), spread(top - base)))
    a, b = lane(both, 0), lane(both, 1)
    set_at(larger, state, 0)
    set_at(lane(fma(spread(get_f32(state, 1)), spread(a), spread(total * b)), 0), state, 1)
    return a, b


@device
def mix(sums, depth, mixed, a, b):
    """mixed = fma(mixed, a, b * sums)"""
    for i in range(0, depth, 16):
        put(fma(load_f32(mixed, i), a, load_f32(sums, i) * b), mixed, i)


@device
def _log_sum(state):
    """m + log(l)."""
    top = get_f32(state, 0)
    return (np.float32(0) if top == -INF else top) + lane(log(spread(get_f32(state, 1))), 0)


@device
def _finished(state, mixed, depth, sink, sunk, counted, out, at, kind):
    """out = mixed / l, with the sink as one more key without a value; the log of the sum."""
    total_log = _log_sum(state)
    scale = np.float32(1)
    if sunk:
        before = get_f32(state, 0)
        larger = before if before >= sink or before != before else sink
        base = np.float32(0) if larger == -INF else larger
        a, b = lane(exp(spread(before - base)), 0), lane(exp(spread(sink - base)), 0)
        scale = a
        set_at(larger, state, 0)
        set_at(lane(fma(spread(get_f32(state, 1)), spread(a), spread(b)), 0), state, 1)
        if counted:
            total_log = _log_sum(state)
    total = get_f32(state, 1)
    inverse = np.float32(1) / (np.float32(1) if total == np.float32(0) else total)
    for i in range(0, depth, 16):
        value = load_f32(mixed, i)
        if sunk:
            value = value * scale
        store(value * inverse + np.float32(0), out, at + i, depth - i, kind)
    return total_log


@device
def stored(state, mixed, depth, sinks, any, counted, out, lse, tokens, token, head, heads, kind):
    """A row's result to its place, zeros where it saw no key; its log-sum where that is wanted."""
    at, result = (token * heads + head) * depth, -INF
    if any:
        sunk = given(sinks)
        sink = get_f32(sinks, head) if sunk else np.float32(0)
        result = _finished(state, mixed, depth, sink, sunk, counted, address(out), at, kind)
    else:
        for d in range(0, depth, 16):
            store(zeros(), out, at + d, depth - d, kind)
    if given(lse):
        set_at(result, lse, head * tokens + token)


@kernel("iiaiaaiii")
def unasked(begin, end, starts, requests, out, lse, tokens, heads, size):
    """Tokens beyond the last request's: zeros, `size` bytes each, and -inf for the log of their sums."""
    done = np.int64(get_i32(starts, requests))
    for i in range(done * size, tokens * size):
        set_at(np.uint8(0), out, i)
    if given(lse):
        for head in range(heads):
            for token in range(done, tokens):
                set_at(-INF, lse, head * tokens + token)


@kernel("iiaaaiiiiiiaiiaaiiaia")
def joined(
    begin, end, lengths, starts, causals, causal, group, key_heads, depth, left, right, sinks, counted, kind, out, lse,
    tokens, parts, partial, kept, work,
):  # fmt: skip
    """Items begin ... end = (request, key head): what `paged` left of the chunks, merged in ascending order."""
    padded = (depth + 15) // 16 * 16
    mixed = aligned(work)
    state = mixed + 4 * padded
    for item in range(begin, end):
        r, g = item // key_heads, item % key_heads
        start, stop = np.int64(get_i32(starts, r)), np.int64(get_i32(starts, r + 1))
        new, total = stop - start, np.int64(get_i32(lengths, r))
        forward = get_u8(causals, r) != 0 if given(causals) else causal != 0
        for row in range(new * group):
            first, last = seen(row // group, new, total, forward, left, right)
            for d in range(0, depth, 16):
                put(zeros(), mixed, d)
            set_at(-INF, state, 0)
            set_at(np.float32(0), state, 1)
            for part in range(first // CHUNK, last // CHUNK + 1):
                cell = address(partial) + 4 * (CELL + padded) * ((item * kept + row) * parts + part)
                a, b = merged(state, get_f32(cell, 0), get_f32(cell, 1))
                mix(cell + 4 * CELL, depth, mixed, a, b)
            stored(
                state, mixed, depth, sinks, first <= last, counted, out, lse, tokens, start + row // group,
                g * group + row % group, key_heads * group, kind,
            )  # fmt: skip
