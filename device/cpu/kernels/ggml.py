"""Products of weights in GGML blocks: sixteen rows of weights at a time are unpacked once and meet every row of a.

Integer sums of a block are exact in any order; what rounds is what `oracle.ggml_dot` rounds, lane by lane of the vector
in its order. Unpacked rows stay in the core's own cache: their chunk is at most _CHUNK values long.
"""

from __future__ import annotations

import numpy as np

from ..compiling import kernel
from .ggml_32 import (
    codes_q4_0,
    codes_q4_1,
    codes_q5_0,
    codes_q5_1,
    codes_q8_0,
    fetch,
    one_scale,
    two_scales,
)  # fmt: skip
from .ggml_256 import BLOCK, unpack_q2_k, unpack_q3_k, unpack_q4_k, unpack_q5_k, unpack_q6_k
from .ggml_grids import unpack_iq2_xxs, unpack_iq3_xxs
from .ggml_one import (
    one_by_one,
    row_q3_k,
    row_q4_k,
    row_q5_k,
    row_q6_k,
    scales_q4_k,
    scales_row_q3_k,
    scales_row_q6_k,
)  # fmt: skip
from .lanes import spread, zeros
from .memory import address, allocate, get_f32, get_i32, load_f32, put, release, set_at, store
from .words import (
    add_fours,
    as_float,
    four_rows_of_a_lane,
    four_rows_of_bytes,
    four_rows_of_halves,
    four_rows_of_minimums,
    inlined,
    no_words,
    one_row_of_halves,
    one_row_of_minimums,
    word_everywhere,
)  # fmt: skip

_ROWS = 64  # of a that share an unpacked chunk
_CHUNK = 512  # values that are unpacked at a time: they stay in the first cache while rows of a pass by
CODES_FIRST, SCALES_FIRST, MINIMUM = 0, 1, 2
"""How a block's integer meets its scales: Q4_0; Q5_0 and Q8_0; Q4_1 and Q5_1."""


@inlined
def _term_32(form, sums, offset, d, m, a_scales):
    """What one block of 32 adds: its rounded integer by its scales, in the type's order."""
    da = spread(get_f32(a_scales, 0))
    if form == MINIMUM:
        return (d * da) * as_float(sums) + m * spread(get_f32(a_scales, 1))
    whole = as_float(sums - word_everywhere(offset * np.int64(get_i32(a_scales, 1))))
    return (whole * d) * da if form == CODES_FIRST else whole * (d * da)


@inlined
def _one_row_32(codes, scales_of, form, offset, size, b, step, blocks, a, a_scales):
    """Sixteen rows of weights by one row of a, block after block in registers."""
    total = zeros()
    for i in range(blocks):
        fetch(b + 16 * size * i, step, size)
        w0, w1, w2, w3, w4, w5, w6, w7 = codes(b + size * i, step)
        d, m = scales_of(b + size * i, step)
        at = a + 32 * i
        one = add_fours(no_words(), w0, get_i32(at, 0))
        two = add_fours(no_words(), w1, get_i32(at, 1))
        three = add_fours(no_words(), w2, get_i32(at, 2))
        four = add_fours(no_words(), w3, get_i32(at, 3))
        one, two = add_fours(one, w4, get_i32(at, 4)), add_fours(two, w5, get_i32(at, 5))
        three, four = add_fours(three, w6, get_i32(at, 6)), add_fours(four, w7, get_i32(at, 7))
        total = total + _term_32(form, (one + two) + (three + four), offset, d, m, a_scales + 8 * i)
    return total


@inlined
def _unpack_32(codes, scales_of, size, b, step, blocks, words, scales):
    for i in range(blocks):
        fetch(b + 16 * size * i, step, size)
        w0, w1, w2, w3, w4, w5, w6, w7 = codes(b + size * i, step)
        d, m = scales_of(b + size * i, step)
        to = 128 * i
        put(w0, words, to)
        put(w1, words, to + 16)
        put(w2, words, to + 32)
        put(w3, words, to + 48)
        put(w4, words, to + 64)
        put(w5, words, to + 80)
        put(w6, words, to + 96)
        put(w7, words, to + 112)
        put(d, scales, 32 * i)
        put(m, scales, 32 * i + 16)


@inlined
def _four_rows_32(form, offset, words, scales, blocks, a, a_step, a_scales, s_step, totals):
    """Add a chunk of blocks to the running sums of four rows of a."""
    one, two = load_f32(totals, 0), load_f32(totals, 16)
    three, four = load_f32(totals, 32), load_f32(totals, 48)
    for i in range(blocks):
        p, q, r, t = four_rows_of_bytes(words + 512 * i, a + 32 * i, a_step)
        d, m, s = load_f32(scales, 32 * i), load_f32(scales, 32 * i + 16), a_scales + 8 * i
        one = one + _term_32(form, p, offset, d, m, s)
        two = two + _term_32(form, q, offset, d, m, s + s_step)
        three = three + _term_32(form, r, offset, d, m, s + 2 * s_step)
        four = four + _term_32(form, t, offset, d, m, s + 3 * s_step)
    put(one, totals, 0)
    put(two, totals, 16)
    put(three, totals, 32)
    put(four, totals, 48)


@inlined
def of_32(codes, scales_of, form, offset, size, begin, end, b, b_step, columns, a, a_scales, rows, blocks, out, kind):
    """Tiles begin ... end of the types with blocks of 32: rows of a by fours, those that are left one by one."""
    chunk, fours = min(blocks, 2 * _CHUNK // 32), rows // 4 * 4
    memory = allocate(640 * chunk + 64 * _ROWS) if fours else 0
    scales = memory + 512 * chunk
    totals = scales + 128 * chunk
    for tile in range(begin, end):
        column = min(16 * tile, columns - 16)
        at = b + b_step * column
        for first in range(0, fours, _ROWS):
            some = min(_ROWS, fours - first)
            for row in range(some):
                put(zeros(), totals, 16 * row)
            for block in range(0, blocks, chunk):
                here = min(chunk, blocks - block)
                _unpack_32(codes, scales_of, size, at + size * block, b_step, here, memory, scales)
                for row in range(0, some, 4):
                    from_ = (first + row) * blocks + block
                    _four_rows_32(form, offset, memory, scales, here, a + 32 * from_, 32 * blocks,
                                  a_scales + 8 * from_, 8 * blocks, totals + 64 * row)  # fmt: skip
            for row in range(some):
                store(load_f32(totals, 16 * row), out, (first + row) * columns + column, 16, kind)
        for row in range(fours, rows):
            total = _one_row_32(codes, scales_of, form, offset, size, at, b_step, blocks, a + 32 * row * blocks,
                                a_scales + 8 * row * blocks)  # fmt: skip
            store(total, out, row * columns + column, 16, kind)
    if fours:
        release(memory)


@inlined
def _term_256(minimum, sums, low, d, dmin, da):
    """What one block of 256 adds where it has one sum."""
    if minimum:
        return (d * da) * as_float(sums) - (da * dmin) * as_float(low)
    return as_float(sums) * (d * da)


@inlined
def _whole_chunk(minimum, blocks, words, scales, rows, a, a_step, a_scales, s_step, totals):
    """Add a chunk of blocks to the running sums of `rows` rows of a."""
    fours = rows // 4 * 4
    for row in range(0, fours, 4):
        for i in range(blocks):
            w, at, s = words + 4 * BLOCK * i, a + row * a_step + 544 * i, a_scales + row * s_step + 8 * i
            p, q, r, t = no_words(), no_words(), no_words(), no_words()
            for part in range(0, 128, 16):
                p0, q0, r0, t0 = four_rows_of_halves(w + 64 * part, at + 4 * part, a_step)
                p, q, r, t = p + p0, q + q0, r + r0, t + t0
            low = four_rows_of_minimums(w + 64 * 128, at + 512, a_step)
            d, dmin, to = load_f32(scales, 32 * i), load_f32(scales, 32 * i + 16), 16 * row
            for j in range(4):
                sums = p if j == 0 else q if j == 1 else r if j == 2 else t
                term = _term_256(minimum, sums, low[j], d, dmin, spread(get_f32(s + j * s_step, 0)))
                put(load_f32(totals, to + 16 * j) + term, totals, to + 16 * j)
    for row in range(fours, rows):
        total = load_f32(totals, 16 * row)
        for i in range(blocks):
            w, at, s = words + 4 * BLOCK * i, a + row * a_step + 544 * i, a_scales + row * s_step + 8 * i
            sums = no_words()
            for part in range(0, 128, 16):
                sums = sums + one_row_of_halves(w + 64 * part, at + 4 * part, a_step)[0]
            low = one_row_of_minimums(w + 64 * 128, at + 512, a_step)[0]
            d, dmin = load_f32(scales, 32 * i), load_f32(scales, 32 * i + 16)
            total = total + _term_256(minimum, sums, low, d, dmin, spread(get_f32(s, 0)))
        put(total, totals, 16 * row)


@inlined
def of_256(unpack, minimum, size, fold, begin, end, b, b_step, columns, a, a_scales, rows, blocks, out, kind):
    """Tiles begin ... end of the types whose blocks of 256 have one running sum."""
    chunk = min(blocks, _CHUNK // 256)
    memory = allocate(4 * BLOCK * chunk + 128 * chunk + 64 * _ROWS)
    scales = memory + 4 * BLOCK * chunk
    totals = scales + 128 * chunk
    for tile in range(begin, end):
        column = min(16 * tile, columns - 16)
        for first in range(0, rows, _ROWS):
            some = min(_ROWS, rows - first)
            for row in range(some):
                put(zeros(), totals, 16 * row)
            for block in range(0, blocks, chunk):
                here, from_ = min(chunk, blocks - block), first * blocks + block
                unpack(b + b_step * column + size * block, b_step, here, memory, scales)
                _whole_chunk(minimum, here, memory, scales, some, a + 544 * from_, 544 * blocks, a_scales + 8 * from_,
                             8 * blocks, totals)  # fmt: skip
            for row in range(some):
                store(load_f32(totals, 16 * row) * fold, out, (first + row) * columns + column, 16, kind)
    release(memory)


@inlined
def _four_in_lanes(minimum, blocks, words, scales, at, step, s_at, s_step, to):
    """Add a chunk of blocks to the eight running sums, and those of the minimums, of four rows of a."""
    for i in range(blocks):
        w, here = words + 4 * BLOCK * i, at + 544 * i
        d = load_f32(scales, 32 * i)
        a0, a1 = spread(get_f32(s_at, 2 * i)), spread(get_f32(s_at + s_step, 2 * i))
        a2, a3 = spread(get_f32(s_at + 2 * s_step, 2 * i)), spread(get_f32(s_at + 3 * s_step, 2 * i))
        d0, d1, d2, d3 = d * a0, d * a1, d * a2, d * a3
        for lane in range(8):
            i0, i1, i2, i3 = four_rows_of_a_lane(w + 64 * lane, here + 4 * lane, step)
            put(load_f32(to, 16 * lane) + d0 * as_float(i0), to, 16 * lane)
            put(load_f32(to, 16 * lane + 144) + d1 * as_float(i1), to, 16 * lane + 144)
            put(load_f32(to, 16 * lane + 288) + d2 * as_float(i2), to, 16 * lane + 288)
            put(load_f32(to, 16 * lane + 432) + d3 * as_float(i3), to, 16 * lane + 432)
        if minimum:
            low = load_f32(scales, 32 * i + 16)
            i0, i1, i2, i3 = four_rows_of_minimums(w + 64 * 128, here + 512, step)
            put(load_f32(to, 128) - (low * a0) * as_float(i0), to, 128)
            put(load_f32(to, 272) - (low * a1) * as_float(i1), to, 272)
            put(load_f32(to, 416) - (low * a2) * as_float(i2), to, 416)
            put(load_f32(to, 560) - (low * a3) * as_float(i3), to, 560)


@inlined
def in_lanes(
    unpack, codes, scales_of, shift, minimum, size, begin, end, b, b_step, columns, a, a_scales, rows, blocks, out, kind
):
    """Tiles begin ... end of the types whose blocks have eight running sums: rows of a by fours, those that are left
    one by one with every row of weights."""
    chunk, fours = min(blocks, _CHUNK // 256), rows // 4 * 4
    memory = allocate(4 * BLOCK * chunk + 128 * chunk + 576 * _ROWS + 64)
    scales = memory + 4 * BLOCK * chunk
    totals = scales + 128 * chunk
    for tile in range(begin, end):
        column = min(16 * tile, columns - 16)
        at = b + b_step * column
        for first in range(0, fours, _ROWS):
            some = min(_ROWS, fours - first)
            for row in range(9 * some):
                put(zeros(), totals, 16 * row)
            for block in range(0, blocks, chunk):
                here = min(chunk, blocks - block)
                unpack(at + size * block, b_step, here, memory, scales)
                for row in range(0, some, 4):
                    from_ = (first + row) * blocks + block
                    _four_in_lanes(minimum, here, memory, scales, a + 544 * from_, 544 * blocks, a_scales + 8 * from_,
                                   8 * blocks, totals + 576 * row)  # fmt: skip
            for row in range(some):
                to = totals + 576 * row
                total = load_f32(to, 128)
                for lane in range(8):
                    total = total + load_f32(to, 16 * lane)
                store(total, out, (first + row) * columns + column, 16, kind)
        for row in range(fours, rows):
            for i in range(16):
                dot = one_by_one(codes, scales_of, shift, minimum, size, at + b_step * i, blocks,
                                 a + 544 * row * blocks, a_scales + 8 * row * blocks)  # fmt: skip
                set_at(dot, totals, i)
            store(load_f32(totals, 0), out, row * columns + column, 16, kind)
    release(memory)


LETTERS = "iiaiiaaiiai"
"""begin, end, b, bytes between its rows, its rows, words, scales, rows and blocks of a, out, its kind."""


@kernel(LETTERS)
def q4_0(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    of_32(codes_q4_0, one_scale, CODES_FIRST, 8, 18, begin, end, address(b), step, columns, address(words),
          address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q4_1(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    of_32(codes_q4_1, two_scales, MINIMUM, 0, 20, begin, end, address(b), step, columns, address(words),
          address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q5_0(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    of_32(codes_q5_0, one_scale, SCALES_FIRST, 16, 22, begin, end, address(b), step, columns, address(words),
          address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q5_1(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    of_32(codes_q5_1, two_scales, MINIMUM, 0, 24, begin, end, address(b), step, columns, address(words),
          address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q8_0(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    of_32(codes_q8_0, one_scale, SCALES_FIRST, 128, 34, begin, end, address(b), step, columns, address(words),
          address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q2_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    of_256(unpack_q2_k, True, 84, np.float32(1), begin, end, address(b), step, columns, address(words),
           address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def iq2_xxs(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    of_256(unpack_iq2_xxs, False, 66, np.float32(0.125), begin, end, address(b), step, columns, address(words),
           address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def iq3_xxs(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    of_256(unpack_iq3_xxs, False, 98, np.float32(0.25), begin, end, address(b), step, columns, address(words),
           address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q3_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    in_lanes(unpack_q3_k, row_q3_k, scales_row_q3_k, 2, False, 110, begin, end, address(b), step, columns,
             address(words), address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q4_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    in_lanes(unpack_q4_k, row_q4_k, scales_q4_k, 0, True, 144, begin, end, address(b), step, columns,
             address(words), address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q5_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    in_lanes(unpack_q5_k, row_q5_k, scales_q4_k, 0, True, 176, begin, end, address(b), step, columns,
             address(words), address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q6_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    in_lanes(unpack_q6_k, row_q6_k, scales_row_q6_k, 5, False, 210, begin, end, address(b), step, columns,
             address(words), address(scales), rows, blocks, address(out), kind)  # fmt: skip
