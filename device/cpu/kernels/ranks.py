"""The largest of a row without sorting it: histograms of the codes' bits, upper ones first."""

from __future__ import annotations

import numpy as np

from ..compiling import device, kernel
from .fixed_point import INF, peak, units
from .lanes import codes_of, lanes_below, where
from .memory import address, aligned, get_f32, get_i32, get_i64, get_u32, given, load, put, set_at
from .transcendental import exp

_NAN_CODE = np.int64(0xFFC00000)
CELLS = 2048


@device
def _coded(x, first, width, codes):
    """Each float32 as a number that ascends with the value: -0 is +0, and every NaN is the same, above +inf."""
    for i in range(0, width, 16):
        put(codes_of(load(x, first + i, width - i, 0)), codes, i)


@device
def _cell(code, level):
    """The bits of a code that stand at this level: 11, 11 and 10."""
    if level == 0:
        return code >> 21
    return (code >> 10) & 2047 if level == 1 else code & 1023


@device
def _kth(codes, width, k, cells):
    """(the code of the k-th largest, how many are larger)."""
    prefix, above = np.int64(0), np.int64(0)
    for level in range(3):
        for i in range(CELLS):
            set_at(np.int64(0), cells, i)
        shift = 32 if level == 0 else (21 if level == 1 else 10)
        for i in range(width):
            code = np.int64(get_u32(codes, i))
            if code >> shift == prefix:
                cell = _cell(code, level)
                set_at(get_i64(cells, cell) + 1, cells, cell)
        cell = np.int64(1023 if level == 2 else 2047)
        while above + get_i64(cells, cell) < k:
            above += get_i64(cells, cell)
            cell -= 1
        prefix = (prefix << (10 if level == 2 else 11)) | cell
    return prefix, above


@device
def _cut(codes, weights, width, whole, limit, cells):
    """(code, sum below it): the first in ascending order with which the running share of `whole` passes `limit`.

    A code of 2^32 where none does.
    """
    prefix, below = np.int64(0), np.int64(0)
    for level in range(3):
        for i in range(CELLS):
            set_at(np.int64(0), cells, i)
        shift = 32 if level == 0 else (21 if level == 1 else 10)
        for i in range(width):
            code = np.int64(get_u32(codes, i))
            if code >> shift == prefix:
                cell = _cell(code, level)
                set_at(get_i64(cells, cell) + get_i64(weights, i), cells, cell)
        cell, most = np.int64(0), np.int64(1023 if level == 2 else 2047)
        while np.float32(below + get_i64(cells, cell)) / np.float32(whole) <= limit:
            below += get_i64(cells, cell)
            if cell == most:
                return np.int64(1) << 32, below
            cell += 1
        prefix = (prefix << (10 if level == 2 else 11)) | cell
    return prefix, below


@device
def _keep_largest(x, first, width, codes, k, cells):
    """-inf in place of what is below the k-th largest; a NaN there leaves all."""
    threshold, _ = _kth(codes, width, k, cells)
    if threshold < _NAN_CODE:
        for i in range(width):
            if np.int64(get_u32(codes, i)) < threshold:
                set_at(-INF, x, first + i)


@device
def _keep_share(x, first, width, codes, weights, limit, cells):
    """-inf in place of all that precedes, in ascending (value, place) order, the first whose running share passes."""
    top = peak(x, first, width)
    if not abs(top) < INF or not np.float32(0) <= limit:
        return
    _coded(x, first, width, codes)
    whole = np.int64(0)
    for i in range(0, width, 16):
        w = exp(load(x, first + i, width - i, 0) - top)
        put(units(where(lanes_below(width - i), w, np.float32(0))), weights, i)
    for i in range(width):
        whole += get_i64(weights, i)
    cut, share = _cut(codes, weights, width, whole, limit, cells)
    last, largest = np.int64(-1), np.int64(-1)
    if cut >> 32:
        for i in range(width):
            code = np.int64(get_u32(codes, i))
            if code >= largest:
                last, largest = i, code
    open_ = False
    for i in range(width):
        code = np.int64(get_u32(codes, i))
        dropped = code < cut
        if code == cut and not open_:
            share += get_i64(weights, i)
            dropped = np.float32(share) / np.float32(whole) <= limit
            open_ = not dropped
        if dropped and i != last:
            set_at(-INF, x, first + i)


@kernel("iiaaaia")
def top_k_top_p(begin, end, out, k, p, width, work):
    """Rows of logits in `out`, in place; k and p may be absent."""
    cells = aligned(work)
    codes = cells + 8 * CELLS
    weights = aligned(codes + 4 * width + 64)
    for row in range(begin, end):
        first = row * width
        if given(k):
            most = np.int64(get_i32(k, row))
            if 1 <= most < width:
                _coded(out, first, width, codes)
                _keep_largest(address(out), first, width, codes, most, cells)
        if given(p):
            _keep_share(address(out), first, width, codes, weights, np.float32(1) - get_f32(p, row), cells)


@kernel("iiaaaaaiia")
def largest(begin, end, x, ids, indices, values, ranks, width, count, work):
    """ids[row] and its value, then the `count` largest and theirs, descending, ties by place; the rank of the id."""
    cells = aligned(work)
    codes = cells + 8 * CELLS
    found = aligned(codes + 4 * width + 64)
    for row in range(begin, end):
        first, to, chosen = row * width, row * (count + 1), get_i64(ids, row)
        value, rank = get_f32(x, first + chosen), np.int64(0)
        for i in range(width):
            rank += get_f32(x, first + i) >= value
        set_at(np.int32(chosen), indices, to)
        set_at(value, values, to)
        set_at(rank, ranks, row)
        if count:
            _coded(x, first, width, codes)
            threshold, above = _kth(codes, width, count, cells)
            equal, held = count - above, np.int64(0)
            for i in range(width):
                code = np.int64(get_u32(codes, i))
                if code > threshold or (code == threshold and equal > 0):
                    equal -= code == threshold
                    at = held
                    while at > 0 and np.int64(get_u32(codes, get_i64(found, at - 1))) < code:
                        set_at(get_i64(found, at - 1), found, at)
                        at -= 1
                    set_at(np.int64(i), found, at)
                    held += 1
            for n in range(count):
                at = get_i64(found, n)
                set_at(np.int32(at), indices, to + 1 + n)
                set_at(get_f32(x, first + at), values, to + 1 + n)
