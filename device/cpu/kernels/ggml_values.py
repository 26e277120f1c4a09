"""GGML blocks value by value: rows of a table as float32, each operation rounded as in ggml's decoders."""

from __future__ import annotations

import numpy as np

from ..compiling import device, kernel
from .ggml_grids import EIGHTS, FOURS, NEGATIVE
from .memory import FLOAT16, address, get_any, get_i32, get_u8, load_f32, scratch, set_at, store

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ3_XXS")
"""By number, as `rows` takes them."""


@device
def _signed(x):
    return x - 256 if x > 127 else x


@device
def _byte(at, i):
    return np.int64(get_u8(at, i))


@device
def _of_32(number, at, e):
    """The code of element e of Q4_0 ... Q8_0, its offset taken off."""
    if number == 4:
        return _signed(_byte(at, 2 + e))
    first = (2, 4, 6, 8)[number]
    q = _byte(at, first + e % 16) >> (4 * (e // 16)) & 15
    if number >= 2:
        q |= (_byte(at, first - 4 + e // 8) >> (e % 8) & 1) << 4
    if number == 0:
        return q - 8
    return q - 16 if number == 2 else q


@device
def _six_bits(at, j):
    """Scale and minimum of sub-block j of Q4_K and Q5_K."""
    if j < 4:
        return _byte(at, j) & 63, _byte(at, j + 4) & 63
    s = (_byte(at, j + 4) & 15) | (_byte(at, j - 4) >> 6 << 4)
    return s, (_byte(at, j + 4) >> 4) | (_byte(at, j) >> 6 << 4)


@device
def _of_256(number, at, e):
    """Code, scale and minimum of element e of Q2_K ... Q6_K."""
    h, t, low, j = e // 128, e // 32 % 4, e % 32, e // 16
    if number == 5:
        pair = _byte(at, j)
        return _byte(at, 16 + 32 * h + low) >> (2 * t) & 3, pair & 15, pair >> 4
    if number == 6:
        q = (_byte(at, 32 + 32 * h + low) >> (2 * t) & 3) | (_byte(at, low) >> (4 * h + t) & 1) << 2
        s = (_byte(at, 96 + j % 8) >> (4 * (j // 8)) & 15) | (_byte(at, 104 + j % 4) >> (2 * (j // 4)) & 3) << 4
        return q - 4, s - 32, 0
    if number == 9:
        q = (_byte(at, 64 * h + 32 * (t % 2) + low) >> (4 * (t // 2)) & 15) | (
            _byte(at, 128 + 32 * h + low) >> (2 * t) & 3
        ) << 4
        return q - 32, _signed(_byte(at, 192 + j)), 0
    s, m = _six_bits(at + 4, e // 32)
    codes = at + (16 if number == 7 else 48)
    q = _byte(codes, 32 * (e // 64) + low) >> (4 * (e // 32 % 2)) & 15
    if number == 8:
        q |= (_byte(at + 16, low) >> (e // 32) & 1) << 4
    return q, s, m


@device
def _of_grid(number, at, e):
    """Signed magnitude and odd scale of element e of the i-quants."""
    part, k, i = e // 32, e % 32 // 8, e % 8
    if number == 10:
        word = get_i32(at + 6 + 8 * part, 0)
        magnitude = np.int64(EIGHTS[get_u8(at + 2 + 8 * part, k)] >> np.uint64(8 * i) & np.uint64(255))
    else:
        word = get_i32(at + 66 + 4 * part, 0)
        four = np.int64(FOURS[get_u8(at + 2 + 8 * part, 2 * k + i // 4)])
        magnitude = four >> (8 * (i % 4)) & 255
    word = np.int64(word)
    negative = np.int64(NEGATIVE[word >> (7 * k) & 127] >> np.uint64(8 * i) & np.uint64(1))
    return magnitude * (1 - 2 * negative), 2 * (word >> 28 & 15) + 1


@device
def _value(number, at, e, d, low):
    """(d s) q - dmin m, or what the type has of it."""
    if number < 5:
        q = np.float32(_of_32(number, at, e)) * d
        return q + low if number == 1 or number == 3 else q
    if number >= 10:
        q, s = _of_grid(number, at, e)
        return (d * (np.float32(s) * np.float32(0.125 if number == 10 else 0.25))) * np.float32(q)
    q, s, m = _of_256(number, at, e)
    value = (d * np.float32(s)) * np.float32(q)
    return value if number == 6 or number == 9 else value - low * np.float32(m)


@kernel("iiaiaiiiiaii")
def rows(begin, end, table, step, ids, wide, number, elements, size, out, width, kind):
    """Rows ids[begin ... end] of a table of blocks of `size` bytes; `wide`: the ids have 64 bits."""
    sixteen = scratch(16)
    for item in range(begin, end):
        row = np.int64(get_i32(address(ids), (1 + wide) * item))
        values = address(table) + step * row
        for block in range(width // elements):
            at = values + size * block
            d_at = at + (80 if number == 5 else 108 if number == 6 else 208 if number == 9 else 0)
            d = get_any(d_at, 0, FLOAT16)
            low = get_any(d_at + 2, 0, FLOAT16) if number in (1, 3, 5, 7, 8) else np.float32(0)
            for e in range(0, elements, 16):
                for i in range(16):
                    set_at(_value(number, at, e + i, d, low), sixteen, i)
                store(load_f32(sixteen, 0), out, item * width + elements * block + e, 16, kind)
