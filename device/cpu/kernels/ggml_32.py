"""Blocks of 32 values of sixteen rows, unpacked: 16 words of codes a block, each a pair of int16, row beside row.

The words of a block, c = 0 ... 3 one after the other: elements (4c, 4c + 2), (4c + 1, 4c + 3), and the same 16 further
on. `unpack_*(b, step, blocks, words, scales)` takes the address of the first row's first block, the bytes between rows,
and writes 16 words and one scale (two, with a minimum) of every block.
"""

from __future__ import annotations

import numpy as np

from ..compiling import device
from .memory import put
from .words import (
    ahead,
    float16_of_rows,
    four_rows,
    high_bytes,
    high_float16,
    less,
    low_bytes,
    low_float16,
    transposed,
    unsigned_right,
    word_everywhere,
    words_of_rows,
)  # fmt: skip

PAIRS = 16
_LOW = np.int32(0x000F000F)


@device
def sixteen_rows(at, step):
    """The four words at `at` of sixteen rows."""
    return transposed(
        four_rows(at, 4 * step), four_rows(at + step, 4 * step), four_rows(at + 2 * step, 4 * step),
        four_rows(at + 3 * step, 4 * step),
    )  # fmt: skip


@device
def fetch(at, step, size):
    """Ask for the part of the next sixteen rows that is as large as a block of these."""
    for line in range(0, 16 * size, 64):
        ahead(at + 16 * step + line)


@device
def _nibbles(x, offset, words, at):
    """The codes of one word of bytes, less `offset`: two pairs of the first 16 values, two of the last."""
    put(less(x & _LOW, offset), words, at)
    put(less(unsigned_right(x, 8) & _LOW, offset), words, at + 16)
    put(less(unsigned_right(x, 4) & _LOW, offset), words, at + 32)
    put(less(unsigned_right(x, 12) & _LOW, offset), words, at + 48)


@device
def _five(x, high, c, offset, words, at):
    """As `_nibbles`, with the fifth bits: bit j of `high` is element j's."""
    first, last = unsigned_right(high, 4 * c), unsigned_right(high, 16 + 4 * c)
    one = ((first << 4) & np.int32(0x10)) | ((first << 18) & np.int32(0x100000))
    two = ((first << 3) & np.int32(0x10)) | ((first << 17) & np.int32(0x100000))
    three = ((last << 4) & np.int32(0x10)) | ((last << 18) & np.int32(0x100000))
    four = ((last << 3) & np.int32(0x10)) | ((last << 17) & np.int32(0x100000))
    put(less((x & _LOW) | one, offset), words, at)
    put(less((unsigned_right(x, 8) & _LOW) | two, offset), words, at + 16)
    put(less((unsigned_right(x, 4) & _LOW) | three, offset), words, at + 32)
    put(less((unsigned_right(x, 12) & _LOW) | four, offset), words, at + 48)


@device
def _four_bit(at, step, offset, words, to):
    a, b, c, d = sixteen_rows(at, step)
    _nibbles(a, offset, words, to)
    _nibbles(b, offset, words, to + 64)
    _nibbles(c, offset, words, to + 128)
    _nibbles(d, offset, words, to + 192)


@device
def _five_bit(at, high_at, step, offset, words, to):
    a, b, c, d = sixteen_rows(at, step)
    high = words_of_rows(high_at, step)
    _five(a, high, 0, offset, words, to)
    _five(b, high, 1, offset, words, to + 64)
    _five(c, high, 2, offset, words, to + 128)
    _five(d, high, 3, offset, words, to + 192)


@device
def unpack_q4_0(b, step, blocks, words, scales):
    """d at 0, nibbles at 2."""
    offset = word_everywhere(0x00080008)
    for i in range(blocks):
        at = b + 18 * i
        fetch(b + 18 * 16 * i, step, 18)
        put(float16_of_rows(at, step), scales, 32 * i)
        _four_bit(at + 2, step, offset, words, 256 * i)


@device
def unpack_q4_1(b, step, blocks, words, scales):
    """d at 0, m at 2, nibbles at 4."""
    offset = word_everywhere(0)
    for i in range(blocks):
        at = b + 20 * i
        fetch(b + 20 * 16 * i, step, 20)
        both = words_of_rows(at, step)
        put(low_float16(both), scales, 32 * i)
        put(high_float16(both), scales, 32 * i + 16)
        _four_bit(at + 4, step, offset, words, 256 * i)


@device
def unpack_q5_0(b, step, blocks, words, scales):
    """d at 0, fifth bits at 2, nibbles at 6."""
    offset = word_everywhere(0x00100010)
    for i in range(blocks):
        at = b + 22 * i
        fetch(b + 22 * 16 * i, step, 22)
        put(float16_of_rows(at, step), scales, 32 * i)
        _five_bit(at + 6, at + 2, step, offset, words, 256 * i)


@device
def unpack_q5_1(b, step, blocks, words, scales):
    """d at 0, m at 2, fifth bits at 4, nibbles at 8."""
    offset = word_everywhere(0)
    for i in range(blocks):
        at = b + 24 * i
        fetch(b + 24 * 16 * i, step, 24)
        both = words_of_rows(at, step)
        put(low_float16(both), scales, 32 * i)
        put(high_float16(both), scales, 32 * i + 16)
        _five_bit(at + 8, at + 4, step, offset, words, 256 * i)


@device
def _signed(x, words, at):
    put(low_bytes(x), words, at)
    put(high_bytes(x), words, at + 16)


@device
def unpack_q8_0(b, step, blocks, words, scales):
    """d at 0, codes at 2."""
    for i in range(blocks):
        at = b + 34 * i
        fetch(b + 34 * 16 * i, step, 34)
        put(float16_of_rows(at, step), scales, 32 * i)
        for half in range(2):
            a, b_, c, d = sixteen_rows(at + 2 + 16 * half, step)
            _signed(a, words, 256 * i + 32 * half)
            _signed(b_, words, 256 * i + 32 * half + 64)
            _signed(c, words, 256 * i + 32 * half + 128)
            _signed(d, words, 256 * i + 32 * half + 192)
