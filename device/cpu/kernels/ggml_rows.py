"""Rows of activations as codes of eight bits: blocks of bytes, or the words that products of blocks read.

The words of a row of Q8_0 or Q8_1: its codes, eight words of four bytes a block. Of Q8_K: 128 a block, word 8 g + l
holding elements 16 g + l and 16 g + l + 8 as int16, then 8 with the sums of each 16 codes. Beside them stand two 32-bit
numbers a block: d, and Q8_1's sum as a float32, or Q8_0's sum of codes as an integer.
"""

from __future__ import annotations

import numpy as np

from ..compiling import device, kernel
from .lanes import absolute, lane, spread, where
from .memory import address, load, set_at, store, through
from .storage import FLOAT16
from .words import (
    as_float,
    as_word,
    largest,
    paired_16,
    put_bytes,
    put_eight,
    summed,
    swapped,
    whole,
    word_everywhere,
)  # fmt: skip

WORDS_K = 136  # of a block of Q8_K


@device
def _rounded(v):
    """v of at most 128 to the nearest integer, halves away from zero; NaN to 0."""
    v = where(v == v, v, np.float32(0))
    size = absolute(v)
    low = whole(size)
    code = low + as_word(size - as_float(low) >= np.float32(0.5))
    return where(v < np.float32(0), -code, code)


@device
def _scales(x, y):
    """d and the factor of the codes of 32 values."""
    nothing = (x != x) | (y != y)
    one, two = absolute(x), absolute(y)
    peak = largest(where(one > two, one, two))
    bad = lane(summed(as_word(nothing)), 0)
    d = lane(peak, 0) / np.float32(127)
    if bad:
        d = np.float32(np.nan)
    inverse = np.float32(1) / d
    if not abs(inverse) <= np.float32(3.4028235e38):
        inverse = np.float32(0)
    return d, inverse


@device
def _codes_32(a, at, kind):
    """d, and the codes of the 32 values at element `at`."""
    x, y = load(a, at, 16, kind), load(a, at + 16, 16, kind)
    d, inverse = _scales(x, y)
    return d, _rounded(x * inverse), _rounded(y * inverse)


@device
def _half(x):
    """A float32 through float16."""
    return lane(through(spread(x), FLOAT16), 0)


@kernel("iiaiiiaai")
def words_32(begin, end, a, stride, kind, blocks, words, scales, with_sum):
    """Rows begin ... end of a as words and scales of Q8_0, or of Q8_1 (`with_sum`)."""
    for row in range(begin, end):
        for i in range(blocks):
            at = row * blocks + i
            d, x, y = _codes_32(a, row * stride + 32 * i, kind)
            put_bytes(x, address(words), 32 * at)
            put_bytes(y, address(words), 32 * at + 16)
            set_at(_half(d), address(scales), 2 * at)
            total = lane(summed(x + y), 0)
            if with_sum:
                set_at(_half(d * np.float32(total)), address(scales), 2 * at + 1)
            else:
                set_at(total, address(scales), 2 * at + 1)


@kernel("iiaiiiai")
def blocks_32(begin, end, a, stride, kind, blocks, out, with_sum):
    """Rows begin ... end of a as blocks of Q8_0, or of Q8_1 (`with_sum`)."""
    size = 36 if with_sum else 34
    for row in range(begin, end):
        for i in range(blocks):
            at = address(out) + size * (row * blocks + i)
            d, x, y = _codes_32(a, row * stride + 32 * i, kind)
            store(spread(d), at, 0, 1, FLOAT16)
            if with_sum:
                store(spread(d * np.float32(lane(summed(x + y), 0))), at, 1, 1, FLOAT16)
            put_bytes(x, at, size - 32)
            put_bytes(y, at, size - 16)


@device
def _extremum(a, at, kind):
    """The first of the largest magnitudes of 256 values, sign and all; NaN is passed over."""
    peak = spread(np.float32(0))
    for g in range(0, 256, 16):
        size = absolute(load(a, at + g, 16, kind))
        peak = where(size > peak, size, peak)
    most = lane(largest(peak), 0)
    if most == np.float32(0):
        return most
    for g in range(0, 256, 16):
        x = load(a, at + g, 16, kind)
        if lane(summed(as_word(absolute(x) == most)), 0):
            for i in range(16):
                if abs(lane(x, i)) == most:
                    return lane(x, i)
    return most


@device
def _nearest(v):
    """v of at most 128 to the nearest integer, ties to even; NaN to 0."""
    v = where(v == v, v, np.float32(0))
    size = absolute(v)
    low = whole(size)
    rest = size - as_float(low)
    odd = (low & np.int32(1)) != np.int32(0)
    up = (rest > np.float32(0.5)) | ((rest == np.float32(0.5)) & odd)
    code = low + as_word(up)
    code = where(v < np.float32(0), -code, code)
    return where(code > np.int32(127), word_everywhere(127), code)


@device
def _scales_k(a, at, kind):
    """d and the factor of the codes of 256 values; zeros where the factor is infinite or there is nothing."""
    extremum = _extremum(a, at, kind)
    inverse = np.float32(-127) / extremum
    if extremum == np.float32(0) or abs(inverse) > np.float32(3.4028235e38):
        return np.float32(0), np.float32(0)
    return np.float32(1) / inverse, inverse


EIGHTS_IN_BLOCKS, EIGHTS_IN_LANES = 2, 4
"""How many rows of a, or more, are met by eights: blocks of one running sum, and of eight."""
ROW_BY_ROW, BY_EIGHTS, AS_BYTES = 0, 1, 2
"""How words of Q8_K stand: row after row, eight rows beside each other, row after row as `ggml_one` meets them."""


@device
def _words_256(first, inverse, a, kind, words, at, step):
    """One block as words of halves, element l beside element l + 8; `step` words from each 16 elements to the next."""
    before = np.int32(0)
    for g in range(16):
        codes = _nearest(load(a, first + 16 * g, 16, kind) * inverse)
        put_eight(paired_16(codes), words, at + step * g)
        total = lane(summed(codes), 0)
        if g % 2:
            set_at(np.int32((before & 0xFFFF) | (total << 16)), words, at + step * 16 + g // 2)
        before = total


@device
def _bytes_256(first, inverse, a, kind, words, at, offset):
    """One block as `ggml_one` meets it: 64 words of bytes, 64 with `offset` times the sums of their pairs, and the sums
    of each 32 codes as int16: 0 and 2, 1 and 3, and so on."""
    for j in range(8):
        x = _nearest(load(a, first + 32 * j, 16, kind) * inverse)
        y = _nearest(load(a, first + 32 * j + 16, 16, kind) * inverse)
        other, next_ = swapped(x), swapped(y)
        low = (x & np.int32(255)) | ((other & np.int32(255)) << 8)
        put_eight(low | ((y & np.int32(255)) << 16) | (next_ << 24), words, at + 8 * j)
        one, two = (x + other) * np.int32(offset), (y + next_) * np.int32(offset)
        put_eight((one & np.int32(0xFFFF)) | (two << 16), words, at + 64 + 8 * j)
        total = np.int16(lane(summed(x + y), 0))
        set_at(total, words, 2 * at + 256 + 4 * (j // 4) + 2 * (j % 2) + j % 4 // 2)


@kernel("iiaiiiaaiii")
def words_256(begin, end, a, stride, kind, blocks, words, scales, rows, form, offset):
    """Rows begin ... end of a as words and scales of Q8_K, in one of the forms above; the last of a's `rows` again and
    again to fill the last eight. `offset`: of the codes of weights that meet bytes."""
    for row in range(begin, end):
        eight, place = row // 8 * 8, row % 8
        for i in range(blocks):
            first, block = min(row, rows - 1) * stride + 256 * i, row * blocks + i
            d, inverse = _scales_k(a, first, kind)
            if form == BY_EIGHTS:
                at = eight * blocks + 8 * i
                set_at(d, address(scales), at + place)
                _words_256(first, inverse, address(a), kind, address(words), WORDS_K * at + 8 * place, 64)
                continue
            set_at(d, address(scales), block)
            if form == AS_BYTES:
                _bytes_256(first, inverse, address(a), kind, address(words), WORDS_K * block, offset)
            else:
                _words_256(first, inverse, address(a), kind, address(words), WORDS_K * block, 8)


@kernel("iiaiiia")
def blocks_256(begin, end, a, stride, kind, blocks, out):
    """Rows begin ... end of a as blocks of Q8_K."""
    for row in range(begin, end):
        for i in range(blocks):
            first, at = row * stride + 256 * i, address(out) + 292 * (row * blocks + i)
            d, inverse = _scales_k(a, first, kind)
            set_at(d, at, 0)
            for g in range(16):
                codes = _nearest(load(a, first + 16 * g, 16, kind) * inverse)
                put_bytes(codes, at, 4 + 16 * g)
                set_at(np.int16(lane(summed(codes), 0)), at, 130 + g)
