"""Paged attention: chunks of 64 keys, each with a maximum of its own, merged in ascending order.

An item is a request's key head with up to ROWS of its query rows (tokens times the heads that share it). A chunk's keys
are turned so that 16 keys are the lanes of a vector, its values are widened; then each row takes the chunk.
"""

from __future__ import annotations

import numpy as np

from ..compiling import device, kernel
from ..tier import tier
from .attention_rows import CELL, CHUNK, INF, merged, mix, seen, stored
from .lanes import fma, lanes_between, lanes_from, maximum, spread, top_lane, where, zeros
from .memory import (
    address,
    aligned,
    get_f32,
    get_i32,
    get_i64,
    get_u8,
    given,
    load,
    load_f16,
    load_f32,
    put,
    scratch,
    set_at,
    through,
)
from .panels import send_for, turned
from .reductions import fold
from .storage import BFLOAT16
from .transcendental import exp, tanh

ROWS = 32
WEIGHTS = 2 * CHUNK
PLACES = 2 * CHUNK  # of the addresses of a chunk, in float32
TOGETHER = 2 if tier() == "avx512" else 1  # rows that meet keys and values together: others lack the registers
FEW = 8  # rows of queries that take values from where they are; for more a chunk of them is copied, side by side


@device
def _joined(t, sums, to, j):
    """Lane t's sums of 16 keys to those of the lanes before it."""
    put(sums if t == 0 else load_f32(to, j) + sums, to, j)


@device
def _dot(q, keys, depth, to):
    """to[0 ... 63] = q . k_j for the chunk's keys: eight lanes of eight neighbours by fma, joined in sequence."""
    for t in range(8):
        a, b, c, d = zeros(), zeros(), zeros(), zeros()
        for step in range(8 * t, depth, 64):
            for i in range(step, min(step + 8, depth)):
                one, at = spread(get_f32(q, i)), CHUNK * i
                a = fma(one, load_f32(keys, at), a)
                b = fma(one, load_f32(keys, at + 16), b)
                c = fma(one, load_f32(keys, at + 32), c)
                d = fma(one, load_f32(keys, at + 48), d)
        _joined(t, a, to, 0)
        _joined(t, b, to, 16)
        _joined(t, c, to, 32)
        _joined(t, d, to, 48)


@device
def _dots(q, apart, keys, depth, to):
    """`_dot` of two rows of queries, `apart` elements from each other: eight sums hide what each waits for."""
    for t in range(8):
        a, b, c, d = zeros(), zeros(), zeros(), zeros()
        e, f, g, h = zeros(), zeros(), zeros(), zeros()
        for step in range(8 * t, depth, 64):
            for i in range(step, min(step + 8, depth)):
                one, two, at = spread(get_f32(q, i)), spread(get_f32(q, apart + i)), CHUNK * i
                k = load_f32(keys, at)
                a, e = fma(one, k, a), fma(two, k, e)
                k = load_f32(keys, at + 16)
                b, f = fma(one, k, b), fma(two, k, f)
                k = load_f32(keys, at + 32)
                c, g = fma(one, k, c), fma(two, k, g)
                k = load_f32(keys, at + 48)
                d, h = fma(one, k, d), fma(two, k, h)
        _joined(t, a, to, 0)
        _joined(t, b, to, 16)
        _joined(t, c, to, 32)
        _joined(t, d, to, 48)
        _joined(t, e, to, CHUNK)
        _joined(t, f, to, CHUNK + 16)
        _joined(t, g, to, CHUNK + 32)
        _joined(t, h, to, CHUNK + 48)


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


def _summing(load):
    """`_sums` and `_sums_of_two` of values that `load` reads."""

    @device
    def sums(p, values, first, last, depth, to):
        i = 0
        while i + 64 <= depth:
            w, x, y, z = zeros(), zeros(), zeros(), zeros()
            for j in range(first, last + 1):
                one, at = spread(get_f32(p, j)), get_i64(values, j)
                w = fma(one, load(at, i), w)
                x = fma(one, load(at, i + 16), x)
                y = fma(one, load(at, i + 32), y)
                z = fma(one, load(at, i + 48), z)
            put(w, to, i)
            put(x, to, i + 16)
            put(y, to, i + 32)
            put(z, to, i + 48)
            i += 64
        while i < depth:
            w = zeros()
            for j in range(first, last + 1):
                w = fma(spread(get_f32(p, j)), load(get_i64(values, j), i), w)
            put(w, to, i)
            i += 16

    @device
    def of_two(p, values, first, last, depth, to, other):
        i = 0
        while i + 64 <= depth:
            a, b, c, d = zeros(), zeros(), zeros(), zeros()
            w, x, y, z = zeros(), zeros(), zeros(), zeros()
            for j in range(first, last + 1):
                one, two, at = spread(get_f32(p, j)), spread(get_f32(p, CHUNK + j)), get_i64(values, j)
                v = load(at, i)
                a, w = fma(one, v, a), fma(two, v, w)
                v = load(at, i + 16)
                b, x = fma(one, v, b), fma(two, v, x)
                v = load(at, i + 32)
                c, y = fma(one, v, c), fma(two, v, y)
                v = load(at, i + 48)
                d, z = fma(one, v, d), fma(two, v, z)
            put(a, to, i)
            put(b, to, i + 16)
            put(c, to, i + 32)
            put(d, to, i + 48)
            put(w, other, i)
            put(x, other, i + 16)
            put(y, other, i + 32)
            put(z, other, i + 48)
            i += 64
        while i < depth:
            a, w = zeros(), zeros()
            for j in range(first, last + 1):
                v = load(get_i64(values, j), i)
                a, w = fma(spread(get_f32(p, j)), v, a), fma(spread(get_f32(p, CHUNK + j)), v, w)
            put(a, to, i)
            put(w, other, i)
            i += 16

    return sums, of_two


_sums_f32, _two_f32 = _summing(load_f32)
_sums_f16, _two_f16 = _summing(load_f16)


@device
def _sums(p, values, first, last, depth, half, rows, to, other):
    """to = sum_j p_j v_j by fma over keys first ... last, ascending; `values` are the addresses of float32 rows, or of
    float16 rows. Of two rows, the second's weights are CHUNK further on and its sums go to `other`."""
    if rows == 2:
        if half:
            _two_f16(p, values, first, last, depth, to, other)
        else:
            _two_f32(p, values, first, last, depth, to, other)
    elif half:
        _sums_f16(p, values, first, last, depth, to)
    else:
        _sums_f32(p, values, first, last, depth, to)


@device
def _addresses(cache, size, page, slot, head, keys, table_row, page_size, first, least, most, table):
    """The addresses of keys first ... first + 15 of a request to `table`; those outside of least ... most clamped."""
    j = min(max(first, least), most)
    index, place = table_row + j // page_size, j % page_size
    row = cache + (np.int64(get_i32(keys, index)) * page + head) * size
    for i in range(first, first + 16):
        set_at(row + place * slot * size, table, i - first)
        if least <= i < most:
            place += 1
            if place == page_size:
                index, place = index + 1, 0
                row = cache + (np.int64(get_i32(keys, index)) * page + head) * size


@device
def _send(cache, size, page, slot, head, keys, table_row, page_size, first, last, depth):
    """Have the rows of keys first ... last of a request brought near."""
    j = first
    while j <= last:
        index, place = table_row + j // page_size, j % page_size
        at = cache + (np.int64(get_i32(keys, index)) * page + head + place * slot) * size
        count = min(page_size - place, last + 1 - j)
        if slot == depth:
            for line in range(at, at + count * depth * size, 64):
                send_for(line)
        else:
            for _ in range(count):
                for line in range(at, at + depth * size, 64):
                    send_for(line)
                at += slot * size
        j += count


@kernel("iiaiaiiiaiiiiaiaaaiiiiiiiffaaiiaaiiiaia")
def paged(
    begin, end, q, q_kind, k_cache, k_page, k_slot, k_head, v_cache, v_page, v_slot, v_head, kind, pages, pages_row,
    lengths, starts, causals, causal, group, key_heads, depth, page_size, left, right, scale, softcap, sinks, slopes,
    counted, p_kind, out, lse, tokens, blocks, parts, partial, kept, work,
):  # fmt: skip
    """Items begin ... end = (request, key head, block of query rows, part) of paged attention; strides in elements.

    causals: a byte for each request, else `causal` for all. left, right: reach of the window. lse may be absent.
    Of several parts each is one chunk of keys, whose results go to `partial`, for `joined`: for each of the `kept` rows
    of a key head and each part a cell of float32, maximum and sum of the weights first, the sums from CELL on.
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
    sums = states + 8 * rows
    p, sources, shares = scratch(WEIGHTS), scratch(PLACES), scratch(4)
    cells = address(partial)
    beside = k_page == v_page and k_slot == v_slot and k_head == v_head
    ahead = address(v_cache) - address(k_cache) if beside else np.int64(0)  # from a key to its value
    for item in range(begin, end):
        item_of, item, part = item, item // parts, item % parts
        r, g, block = item // (key_heads * blocks), item // blocks % key_heads, item % blocks
        start, stop = np.int64(get_i32(starts, r)), np.int64(get_i32(starts, r + 1))
        new, total = stop - start, np.int64(get_i32(lengths, r))
        forward = get_u8(causals, r) != 0 if given(causals) else causal != 0
        begin_row, end_row = block * height, min(block * height + height, new)
        if begin_row >= end_row:
            continue
        least, most = total, np.int64(-1)
        for i in range(begin_row, end_row):
            first, last = seen(i, new, total, forward, left, right)
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
        base, end_base = least // CHUNK * CHUNK, most
        if parts > 1:
            base, end_base = CHUNK * part, min(most, CHUNK * part + CHUNK - 1)
        direct = kind != BFLOAT16 and padded == depth and (end_row - begin_row) * group <= FEW
        while base <= end_base:
            low, high = max(least, base), min(most, base + CHUNK - 1)
            sent, wanted = base + CHUNK, most if parts == 1 or item_of + 1 < end else np.int64(-1)
            if sent <= wanted:
                _send(
                    address(k_cache), size, k_page, k_slot, g * k_head, address(pages), r * pages_row, page_size,
                    sent, min(wanted, base + 2 * CHUNK - 1), depth,
                )  # fmt: skip
            for j in range(0, CHUNK, 16):
                if base + j > high or base + j + 15 < low:
                    for d in range(depth):  # what is left there might be slow to multiply
                        put(zeros(), keys + 4 * j, CHUNK * d)
                    continue
                at = sources + 8 * j
                _addresses(
                    address(k_cache), size, k_page, k_slot, g * k_head, address(pages), r * pages_row, page_size,
                    base + j, least, most, at,
                )  # fmt: skip
                turned(at, 0, depth, ahead, keys + 4 * j, CHUNK, kind)
                if beside:
                    for i in range(16):
                        set_at(get_i64(at, i) + ahead, at, i)
                else:
                    _addresses(
                        address(v_cache), size, v_page, v_slot, g * v_head, address(pages), r * pages_row, page_size,
                        base + j, least, most, at,
                    )  # fmt: skip
                if not direct:
                    for i in range(j, j + 16):
                        for d in range(0, depth, 16):
                            put(load(get_i64(sources, i), d, depth - d, kind), values, i * padded + d)
                        set_at(values + 4 * i * padded, sources, i)
            for i in range(begin_row, end_row):
                first, last = seen(i, new, total, forward, left, right)
                first, last = max(first, base), min(last, base + CHUNK - 1)
                if first > last:
                    continue
                position = total - new + i
                for h in range(0, group, TOGETHER):
                    row, some = (i - begin_row) * group + h, min(TOGETHER, group - h)
                    if some == 2:
                        _dots(queries + 4 * row * padded, padded, keys, depth, p)
                    else:
                        _dot(queries + 4 * row * padded, keys, depth, p)
                    cell = cells + 4 * (CELL + padded) * (((r * key_heads + g) * kept + row) * parts + part)
                    apart = 4 * (CELL + padded) * parts
                    for one in range(some):
                        slope = get_f32(slopes, g * group + h + one) if given(slopes) else np.float32(0)
                        at = p + 4 * CHUNK * one
                        top = _scores(at, base, position, first, last, scale, softcap, slope, given(slopes))
                        share = _weights(at, top, p_kind)
                        if parts > 1:
                            set_at(top, cell + apart * one, 0)
                            set_at(share, cell + apart * one, 1)
                        else:
                            a, b = merged(states + 8 * (row + one), top, share)
                            set_at(a, shares, 2 * one)
                            set_at(b, shares, 2 * one + 1)
                    to = cell + 4 * CELL if parts > 1 else sums
                    other = to + (apart if parts > 1 else 4 * padded)
                    _sums(p, sources, first - base, last - base, depth, direct and kind, some, to, other)
                    if parts == 1:
                        for one in range(some):
                            mix(
                                sums + 4 * padded * one, depth, mixed + 4 * (row + one) * padded,
                                get_f32(shares, 2 * one), get_f32(shares, 2 * one + 1),
                            )  # fmt: skip
            base += CHUNK
        if parts > 1:
            continue
        for i in range(begin_row, end_row):
            first, last = seen(i, new, total, forward, left, right)
            for h in range(group):
                row = (i - begin_row) * group + h
                stored(
                    states + 8 * row, mixed + 4 * row * padded, depth, sinks, first <= last, counted, out, lse, tokens,
                    start + i, g * group + h, heads, q_kind,
                )  # fmt: skip
