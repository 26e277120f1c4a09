"""Blocks of 32 values of sixteen rows: eight words of unsigned bytes, word c holding elements 4 c ... 4 c + 3.

`codes_*(at, step)` takes the address of the first row's block and the bytes between rows, and returns the words, row
beside row; `scales_*` the rows' d, and m or zeros. A signed code has an offset, which the product takes off.
"""

from __future__ import annotations

import numpy as np

from .lanes import zeros
from .words import (
    ahead,
    float16_of_rows,
    four_rows,
    high_float16,
    inlined,
    low_float16,
    transposed,
    unsigned_right,
    words_of_rows,
)  # fmt: skip

_NIBBLES, _TOP = np.int32(0x0F0F0F0F), np.int32(0x10101010)
_SIGNS = np.int32(-0x7F7F7F80)  # 0x80808080


@inlined
def sixteen_rows(at, step):
    """The four words at `at` of sixteen rows."""
    return transposed(
        four_rows(at, 4 * step), four_rows(at + step, 4 * step), four_rows(at + 2 * step, 4 * step),
        four_rows(at + 3 * step, 4 * step),
    )  # fmt: skip


@inlined
def fetch(at, step, size):
    """Ask for the part of the next sixteen rows that is as large as a block of these."""
    for line in range(0, 16 * size, 64):
        ahead(at + 16 * step + line)


@inlined
def _nibbles(at, step):
    a, b, c, d = sixteen_rows(at, step)
    return (
        a & _NIBBLES, b & _NIBBLES, c & _NIBBLES, d & _NIBBLES, unsigned_right(a, 4) & _NIBBLES,
        unsigned_right(b, 4) & _NIBBLES, unsigned_right(c, 4) & _NIBBLES, unsigned_right(d, 4) & _NIBBLES,
    )  # fmt: skip


@inlined
def _top(high):
    """Bit 4 of four bytes: the lowest four bits of each word."""
    four = high & np.int32(15)
    return ((four << 4) | (four << 11) | (four << 18) | (four << 25)) & _TOP


@inlined
def _five_bits(at, high_at, step):
    a, b, c, d, e, f, g, h = _nibbles(at, step)
    high = words_of_rows(high_at, step)
    return (
        a | _top(high), b | _top(high >> 4), c | _top(high >> 8), d | _top(high >> 12), e | _top(high >> 16),
        f | _top(high >> 20), g | _top(high >> 24), h | _top(high >> 28),
    )  # fmt: skip


@inlined
def one_scale(at, step):
    return float16_of_rows(at, step), zeros()


@inlined
def two_scales(at, step):
    both = words_of_rows(at, step)
    return low_float16(both), high_float16(both)


@inlined
def codes_q4_0(at, step):
    """d at 0, nibbles at 2; offset 8."""
    return _nibbles(at + 2, step)


@inlined
def codes_q4_1(at, step):
    """d at 0, m at 2, nibbles at 4."""
    return _nibbles(at + 4, step)


@inlined
def codes_q5_0(at, step):
    """d at 0, fifth bits at 2, nibbles at 6; offset 16."""
    return _five_bits(at + 6, at + 2, step)


@inlined
def codes_q5_1(at, step):
    """d at 0, m at 2, fifth bits at 4, nibbles at 8."""
    return _five_bits(at + 8, at + 4, step)


@inlined
def codes_q8_0(at, step):
    """d at 0, codes at 2; offset 128."""
    a, b, c, d = sixteen_rows(at + 2, step)
    e, f, g, h = sixteen_rows(at + 18, step)
    return a ^ _SIGNS, b ^ _SIGNS, c ^ _SIGNS, d ^ _SIGNS, e ^ _SIGNS, f ^ _SIGNS, g ^ _SIGNS, h ^ _SIGNS
