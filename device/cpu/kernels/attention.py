"""Paged attention: chunks of 64 keys, each with a maximum of its own, merged in ascending order.

An item is a request's key head with up to ROWS of its query rows (tokens times the heads that share it). A chunk's keys
are turned so that 16 keys are the lanes of a vector, its values are widened; then each row takes the chunk.
"""

from __future__ import annotations

import numpy as np

from ..compiling import device, kernel
from .lanes import fma, lane, lanes_between, lanes_from, maximum, spread, top_lane, where, zeros
from .memory import (
    address,
    aligned,
    get_f32,
    get_i32,
    get_i64,
    get_u8,
    given,
    load,
    load_f32,
    put,
    scratch,
    set_at,
    store,
    through,
)
from .panels import turned
from .reductions import fold
from .transcendental import exp, log, tanh

CHUNK = 64
ROWS = 32
INF = np.float32(np.inf)


@device
def _dot(q, keys, depth, to):
    """to[0 ... 63] = q . k_j for the chunk's keys: eight lanes of eight neighbours by fma, joined in sequence."""
    for j in range(0, CHUNK, 16):
        put(zeros(), to, j)
    for t in range(8):
        a, b, c, d = zeros(), zeros(), zeros(), zeros()
        for step in range(8 * t, depth, 64):
            for i in range(step, min(step + 8, depth)):
                one, at = spread(get_f32(q, i)), CHUNK * i
                a = fma(one, load_f32(keys, at), a)
                b = fma(one, load_f32(keys, at + 16), b)
                c = fma(one, load_f32(keys, at + 32), c)
                d = fma(one, load_f32(keys, at + 48), d)
        if t == 0:
            put(a, to, 0)
            put(b, to, 16)
            put(c, to, 32)
            put(d, to, 48)
        else:
            put(load_f32(to, 0) + a, to, 0)
            put(load_f32(to, 16) + b, to, 16)
            put(load_f32(to, 32) + c, to, 32)
            put(load_f32(to, 48) + d, to, 48)


@device
def _scores(p, base, position, first, last, scale, softcap, slope, sloped):
    """The chunk's dot products in p become scores; -inf outside of keys first ... last. Their maximum."""
    top = spread(-INF)
    for j in range(0, CHUNK, 16):
        s = load_f32(p, j) * scale
        if softcap > np.float32(0):
            s = tanh(s / softcap) * softcap
        if sloped:
            s = s + lanes_from(base + j - position) * slope
        s = where(lanes_between(first - base - j, last - base - j), s, -INF)
        put(s, p, j)
        top = maximum(top, s)
    return top_lane(top)


@device
def _weights(p, top, p_kind):
    """The chunk's scores in p become exp(s - top), rounded to p_kind; the sum of the unrounded in a warp's order."""
    base = np.float32(0) if top == -INF else top
    a, b = exp(load_f32(p, 0) - base), exp(load_f32(p, 16) - base)
    c, d = exp(load_f32(p, 32) - base), exp(load_f32(p, 48) - base)
    put(through(a, p_kind), p, 0)
    put(through(b, p_kind), p, 16)
    put(through(c, p_kind), p, 32)
    put(through(d, p_kind), p, 48)
    return fold((a + c) + (b + d))


@device
def _mix(p, values, stride, first, last, depth, mixed, a, b):
    """mixed = fma(mixed, a, b * sum_j p_j v_j), the sum by fma over keys first ... last, ascending."""
    i = 0
    while i + 64 <= depth:
        w, x, y, z = zeros(), zeros(), zeros(), zeros()
        for j in range(first, last + 1):
            one, at = spread(get_f32(p, j)), j * stride + i
            w = fma(one, load_f32(values, at), w)
            x = fma(one, load_f32(values, at + 16), x)
            y = fma(one, load_f32(values, at + 32), y)
            z = fma(one, load_f32(values, at + 48), z)
        put(fma(load_f32(mixed, i), a, w * b), mixed, i)
        put(fma(load_f32(mixed, i + 16), a, x * b), mixed, i + 16)
        put(fma(load_f32(mixed, i + 32), a, y * b), mixed, i + 32)
        put(fma(load_f32(mixed, i + 48), a, z * b), mixed, i + 48)
        i += 64
    while i < depth:
        w = zeros()
        for j in range(first, last + 1):
            w = fma(spread(get_f32(p, j)), load_f32(values, j * stride + i), w)
        put(fma(load_f32(mixed, i), a, w * b), mixed, i)
        i += 16


@device
def _merged(state, top, total):
    """The weights (a, b) of what was and of a chunk with this maximum and sum; state = (maximum, sum) is brought on."""
    before = get_f32(state, 0)
    larger = before if before >= top or before != before else top
    base = np.float32(0) if larger == -INF else larger
    a, b = lane(exp(spread(before - base)), 0), lane(exp(spread(top - base)), 0)
    set_at(larger, state, 0)
    set_at(lane(fma(spread(get_f32(state, 1)), spread(a), spread(total * b)), 0), state, 1)
    return a, b


@device
def _log_sum(state):
    """m + log(l)."""
    top = get_f32(state, 0)
    return (np.float32(0) if top == -INF else top) + lane(log(spread(get_f32(state, 1))), 0)


@device
def _seen(i, new, total, causal, left, right):
    """(first, last) key that row i of `new` sees of `total`."""
    position = total - new + i
    last = position if causal else total - 1
    return max(np.int64(0), position - left), min(min(last, position + right), total - 1)


@device
def _addresses(cache, size, page, slot, head, keys, table_row, page_size, first, least, most, table):
    """The addresses of keys first ... first + 15 of a request to `table`; those outside of least ... most clamped."""
    for i in range(16):
        j = min(max(first + i, least), most)
        block = np.int64(get_i32(keys, table_row + j // page_size))
        set_at(cache + (block * page + j % page_size * slot + head) * size, table, i)


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


@kernel("iiaiaiiiaiiiiaiaaaiiiiiiiffaaiiaaiia")
def paged(
    begin, end, q, q_kind, k_cache, k_page, k_slot, k_head, v_cache, v_page, v_slot, v_head, kind, pages, pages_row,
    lengths, starts, causals, causal, group, key_heads, depth, page_size, left, right, scale, softcap, sinks, slopes,
    counted, p_kind, out, lse, tokens, blocks, work,
):  # fmt: skip
    """Items begin ... end = (request, key head, block of query rows) of paged attention; strides in elements.

    causals: a byte for each request, else `causal` for all. left, right: reach of the window. lse may be absent.
    """
    size = 2 if kind else 4
    height = max(1, ROWS // group)
    padded = (depth + 15) // 16 * 16
    rows = height * group
    heads = group * key_heads
    keys = aligned(work)
    values = keys + 4 * CHUNK * padded
    queries = values + 4 * CHUNK * padded
    mixed = queries + 4 * rows * padded
    states = mixed + 4 * rows * padded
    p = scratch(CHUNK)
    table = scratch(32)
    for item in range(begin, end):
        r, g, block = item // (key_heads * blocks), item // blocks % key_heads, item % blocks
        start, stop = np.int64(get_i32(starts, r)), np.int64(get_i32(starts, r + 1))
        new, total = stop - start, np.int64(get_i32(lengths, r))
        forward = get_u8(causals, r) != 0 if given(causals) else causal != 0
        begin_row, end_row = block * height, min(block * height + height, new)
        if begin_row >= end_row:
            continue
        least, most = total, np.int64(-1)
        for i in range(begin_row, end_row):
            first, last = _seen(i, new, total, forward, left, right)
            if first <= last:
                least, most = min(least, first), max(most, last)
            for h in range(group):
                row = (i - begin_row) * group + h
                for d in range(0, depth, 16):
                    at = ((start + i) * heads + g * group + h) * depth + d
                    put(load(q, at, depth - d, q_kind), queries, row * padded + d)
                    put(zeros(), mixed, row * padded + d)
                set_at(-INF, states, 2 * row)
                set_at(np.float32(0), states, 2 * row + 1)
        base = least // CHUNK * CHUNK
        while base <= most:
            low, high = max(least, base), min(most, base + CHUNK - 1)
            for j in range(0, CHUNK, 16):
                if base + j > high or base + j + 15 < low:
                    for d in range(depth):  # what is left there might be slow to multiply
                        put(zeros(), keys + 4 * j, CHUNK * d)
                    continue
                _addresses(
                    address(k_cache), size, k_page, k_slot, g * k_head, address(pages), r * pages_row, page_size,
                    base + j, least, most, table,
                )  # fmt: skip
                turned(table, 0, depth, 0, keys + 4 * j, CHUNK, kind)
                _addresses(
                    address(v_cache), size, v_page, v_slot, g * v_head, address(pages), r * pages_row, page_size,
                    base + j, least, most, table,
                )  # fmt: skip
                for i in range(16):
                    for d in range(0, depth, 16):
                        put(load(get_i64(table, i), d, depth - d, kind), values, (j + i) * padded + d)
            for i in range(begin_row, end_row):
                first, last = _seen(i, new, total, forward, left, right)
                first, last = max(first, base), min(last, base + CHUNK - 1)
                if first > last:
                    continue
                for h in range(group):
                    row = (i - begin_row) * group + h
                    slope = get_f32(slopes, g * group + h) if given(slopes) else np.float32(0)
                    _dot(queries + 4 * row * padded, keys, depth, p)
                    top = _scores(p, base, total - new + i, first, last, scale, softcap, slope, given(slopes))
                    share = _weights(p, top, p_kind)
                    a, b = _merged(states + 8 * row, top, share)
                    _mix(p, values, padded, first - base, last - base, depth, mixed + 4 * row * padded, a, b)
            base += CHUNK
        for i in range(begin_row, end_row):
            first, last = _seen(i, new, total, forward, left, right)
            for h in range(group):
                row, head = (i - begin_row) * group + h, g * group + h
                at = ((start + i) * heads + head) * depth
                result = -INF
                if first <= last:
                    sunk = given(sinks)
                    sink = get_f32(sinks, head) if sunk else np.float32(0)
                    result = _finished(
                        states + 8 * row, mixed + 4 * row * padded, depth, sink, sunk, counted, address(out), at, q_kind
                    )
                else:
                    for d in range(0, depth, 16):
                        store(zeros(), out, at + d, depth - d, q_kind)
                if given(lse):
                    set_at(result, lse, head * tokens + start + i)
