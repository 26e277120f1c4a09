"""Blocks of the i-quants of sixteen rows, unpacked as in `ggml_256`: magnitudes from grids, signs from a number."""

from __future__ import annotations

import numpy as np

from vtlab.ops.block_grids import grid, signs

from .ggml_32 import fetch
from .ggml_256 import BLOCK, put_signed
from .memory import get_i32, get_u8, put, scratch, set_at
from .words import float16_of_rows, inlined, twice, unsigned_right, words_of_rows

EIGHTS = grid("IQ2_XXS").view(np.uint64)[:, 0]
FOURS = grid("IQ3_XXS").view(np.uint32)[:, 0]
NEGATIVE = (signs() >> 7).view(np.uint64)[:, 0]
_ONES = np.uint64(0x0101010101010101)


@inlined
def _signed(magnitudes, index):
    """Eight bytes, those negative that the sign index says: -x = (x ^ 255) + 1, and no magnitude is 0."""
    mask = NEGATIVE[index & 127]
    return (magnitudes ^ mask) + (mask & _ONES)


@inlined
def unpack_iq2_xxs(b, step, blocks, words, scales):
    """d at 0; for each 32 values four grid numbers, then four sign numbers and a scale."""
    rows = scratch(128)
    for i in range(blocks):
        at, to = b + 66 * i, words + 4 * BLOCK * i
        fetch(b + 66 * 16 * i, step, 66)
        put(float16_of_rows(at, step), scales, 32 * i)
        for part in range(8):
            where = at + 2 + 8 * part
            for row in range(16):
                here = where + step * row
                index = get_i32(here + 4, 0)
                for k in range(4):
                    magnitudes = EIGHTS[get_u8(here, k)]
                    set_at(_signed(magnitudes, index >> (7 * k)), rows, 4 * row + k)
            odd = (unsigned_right(words_of_rows(where + 4, step), 28) << 1) | np.int32(1)
            put_signed(rows, twice(odd), to, 256 * part)


@inlined
def unpack_iq3_xxs(b, step, blocks, words, scales):
    """d at 0, grid numbers at 2, sign numbers and scales at 66."""
    rows = scratch(128)
    for i in range(blocks):
        at, to = b + 98 * i, words + 4 * BLOCK * i
        fetch(b + 98 * 16 * i, step, 98)
        put(float16_of_rows(at, step), scales, 32 * i)
        for part in range(8):
            where = at + 66 + 4 * part
            for row in range(16):
                index, here = get_i32(where + step * row, 0), at + step * row + 2 + 8 * part
                for k in range(4):
                    low, high = np.uint64(FOURS[get_u8(here, 2 * k)]), np.uint64(FOURS[get_u8(here, 2 * k + 1)])
                    set_at(_signed(low | (high << np.uint64(32)), index >> (7 * k)), rows, 4 * row + k)
            odd = (unsigned_right(words_of_rows(where, step), 28) << 1) | np.int32(1)
            put_signed(rows, twice(odd), to, 256 * part)
