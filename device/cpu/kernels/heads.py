"""RMSNorm over each head and the rotation behind it, unrounded between them or rounded once."""

from __future__ import annotations

import numpy as np

from ..compiling import kernel
from .lanes import even, odd, woven_high, woven_low
from .memory import address, aligned, copy_bytes, get_i32, get_i64, given, load, put, scratch, store, through
from .norm import inverse_root, row_sum
from .reductions import SLOTS

GEMMA, ROUNDED, NEOX, COPIED = 1, 2, 4, 8
"""Bits of `mode`: the weight is weight + 1; the norm rounds to x's dtype; pairs are lanes i and half + i; nothing but
bytes moves."""


@kernel("iiaiiiiaiaiiaiaiiifia")
def norm_rope(
    begin, end, x, x_token, x_head, heads, kind, weight, w_kind, table, table_kind, half, positions, wide, out,
    out_token, out_kind, width, eps, mode, work,
):  # fmt: skip
    """Heads begin ... end, `heads` of them a token; strides in elements. Without positions a token has its own row."""
    partials, normed = scratch(SLOTS), aligned(work)
    for item in range(begin, end):
        token, head = item // heads, item % heads
        first, to = token * x_token + head * x_head, token * out_token + head * width
        if mode & COPIED:
            size = 2 if kind else 4
            copy_bytes(address(out) + to * size, address(x) + first * size, width * size)
            continue
        inverse = inverse_root(row_sum(x, first, width, kind, np.float32(0), True, partials), width, eps)
        for i in range(0, width, 16):
            w = load(weight, i, width - i, w_kind)
            if mode & GEMMA:
                w = w + np.float32(1)
            value = (load(x, first + i, width - i, kind) * inverse) * w
            put(through(value, kind) if mode & ROUNDED else value, normed, i)
        row = token
        if given(positions):
            row = get_i64(positions, token) if wide else np.int64(get_i32(positions, token))
        for i in range(0, half, 16):
            left = half - i
            c = load(table, row * 2 * half + i, left, table_kind)
            s = load(table, row * 2 * half + half + i, left, table_kind)
            if mode & NEOX:
                a, b = load(normed, i, left, 0), load(normed, half + i, left, 0)
                store(a * c - b * s, normed, i, left, 0)
                store(b * c + a * s, normed, half + i, left, 0)
            else:
                low, high = load(normed, 2 * i, 2 * left, 0), load(normed, 2 * i + 16, 2 * left - 16, 0)
                a, b = even(low, high), odd(low, high)
                ahead, behind = a * c - b * s, b * c + a * s
                store(woven_low(ahead, behind), normed, 2 * i, 2 * left, 0)
                store(woven_high(ahead, behind), normed, 2 * i + 16, 2 * left - 16, 0)
        for i in range(0, width, 16):
            store(load(normed, i, width - i, 0), out, to + i, width - i, out_kind)
