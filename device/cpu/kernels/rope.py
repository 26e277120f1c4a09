"""Rotary embedding of the heads of q and k, and the heads' way into the paged cache."""

from __future__ import annotations

import numpy as np

from ..compiling import device, kernel
from .lanes import even, fma, odd, woven_high, woven_low
from .memory import address, aligned, copy_bytes, get_any, get_i32, get_i64, load, set_at, store, through

NEOX, FUSED = 1, 2
"""Bits of `mode`: pairs are lanes i and half + i, not 2i and 2i + 1; the products of x go unrounded into the sums."""


@device
def _angles(table, table_kind, half, positions, tokens, t, section, interleaved, wide, inverse, angles):
    """cos of token t's pairs to angles, sin behind them; with three rows of positions each pair reads one of them."""
    for i in range(half):
        axis = 0
        if section:
            tall, deep = get_i64(section, 0), get_i64(section, 1)
            if interleaved:
                wanted = i % 3
                if (wanted == 1 and i <= 3 * deep) or (wanted == 2 and i <= 3 * get_i64(section, 2)):
                    axis = wanted
            elif i >= tall:
                axis = 1 if i < tall + deep else 2
        at = axis * tokens + t
        row = get_i64(positions, at) if wide else np.int64(get_i32(positions, at))
        sin = get_any(table, row * 2 * half + half + i, table_kind)
        set_at(get_any(table, row * 2 * half + i, table_kind), angles, i)
        set_at(-sin if inverse else sin, angles, half + i)


@device
def _rotated(x, y, c, s, point, mode):
    """(x c - y s, y c + x s)."""
    if mode & FUSED:
        return fma(x, c, -(y * s)), fma(x, s, y * c)
    return through(x * c, point) - through(y * s, point), through(y * c, point) + through(x * s, point)


@device
def _head(x, first, out, to, kind, width, offset, half, angles, point, mode):
    """One head: the rotary lanes rotated and rounded once, the others copied."""
    size = 2 if kind else 4
    copy_bytes(address(out) + to * size, address(x) + first * size, offset * size)
    done = offset + 2 * half
    copy_bytes(address(out) + (to + done) * size, address(x) + (first + done) * size, (width - done) * size)
    for i in range(0, half, 16):
        left = half - i
        c, s = load(angles, i, left, 0), load(angles, half + i, left, 0)
        if mode & NEOX:
            a, b = first + offset + i, to + offset + i
            ahead, behind = _rotated(load(x, a, left, kind), load(x, a + half, left, kind), c, s, point, mode)
            store(ahead, out, b, left, kind)
            store(behind, out, b + half, left, kind)
        else:
            a, b = first + offset + 2 * i, to + offset + 2 * i
            low, high = load(x, a, 2 * left, kind), load(x, a + 16, 2 * left - 16, kind)
            ahead, behind = _rotated(even(low, high), odd(low, high), c, s, point, mode)
            store(woven_low(ahead, behind), out, b, 2 * left, kind)
            store(woven_high(ahead, behind), out, b + 16, 2 * left - 16, kind)


@kernel("iiaiiiaaiiiaiaiiaiiaiiiiiia")
def rope(
    begin, end, q, q_token, q_head, q_heads, q_out, k, k_token, k_head, k_heads, k_out, kind, table, table_kind, half,
    positions, wide, tokens, section, interleaved, width, offset, inverse, point, mode,
    work,
):  # fmt: skip
    """Tokens begin ... end: the rotary lanes of every head of q and k, strides in elements."""
    angles = aligned(work)
    for t in range(begin, end):
        _angles(
            address(table), table_kind, half, address(positions), tokens, t, address(section), interleaved, wide,
            inverse, angles,
        )  # fmt: skip
        for h in range(q_heads):
            first, to = t * q_token + h * q_head, (t * q_heads + h) * width
            _head(address(q), first, address(q_out), to, kind, width, offset, half, angles, point, mode)
        for h in range(k_heads):
            first, to = t * k_token + h * k_head, (t * k_heads + h) * width
            _head(address(k), first, address(k_out), to, kind, width, offset, half, angles, point, mode)


@kernel("iiaiaiaiiiaiiiaii")
def write_pages(
    begin, end, key, k_row, value, v_row, key_cache, k_page, k_slot, k_head, value_cache, v_page, v_slot, v_head, slots,
    count, packed,
):  # fmt: skip
    """Heads begin ... end of `count` tokens to their slots, ascending, so that the last of a slot stays; in bytes.

    packed: page size << 32 | bytes of a head.
    """
    page, size = packed >> 32, packed & 0xFFFFFFFF
    for token in range(count):
        slot = get_i64(slots, token)
        if slot >= 0:
            block, place = slot // page, slot % page
            for h in range(begin, end):
                copy_bytes(
                    address(key_cache) + block * k_page + place * k_slot + h * k_head,
                    address(key) + token * k_row + h * size,
                    size,
                )
                copy_bytes(
                    address(value_cache) + block * v_page + place * v_slot + h * v_head,
                    address(value) + token * v_row + h * size,
                    size,
                )


@kernel("iiaiiaiiaiiiiaiiiiaii")
def write_rounded(
    begin, end, key, k_row, kind, value, v_row, width, key_cache, k_page, k_slot, k_head, cache_kind, value_cache,
    v_page, v_slot, v_head, page, slots, count, size,
):  # fmt: skip
    """As `write_pages`, into caches of another dtype; strides in bytes, `size` bytes of an element of key."""
    for token in range(count):
        slot = get_i64(slots, token)
        if slot < 0:
            continue
        block, place = slot // page, slot % page
        for h in range(begin, end):
            to_key = address(key_cache) + block * k_page + place * k_slot + h * k_head
            to_value = address(value_cache) + block * v_page + place * v_slot + h * v_head
            from_key = address(key) + token * k_row + h * width * size
            from_value = address(value) + token * v_row + h * width * size
            for d in range(0, width, 16):
                store(load(from_key, d, width - d, kind), to_key, d, width - d, cache_kind)
                store(load(from_value, d, width - d, kind), to_value, d, width - d, cache_kind)
