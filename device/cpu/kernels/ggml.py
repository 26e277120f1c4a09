"""Products of weights in GGML blocks: sixteen rows of weights at a time are unpacked once and meet every row of a.

Integer sums of a block are exact in any order; what rounds is what `oracle.ggml_dot` rounds, lane by lane of the vector
in its order. Unpacked rows stay in the core's own cache: their chunk is at most _CHUNK values long.
"""

from __future__ import annotations

import numpy as np

from ..compiling import device, kernel
from .ggml_32 import unpack_q4_0, unpack_q4_1, unpack_q5_0, unpack_q5_1, unpack_q8_0
from .ggml_256 import BLOCK, unpack_q2_k, unpack_q3_k, unpack_q4_k, unpack_q5_k, unpack_q6_k
from .ggml_grids import unpack_iq2_xxs, unpack_iq3_xxs
from .lanes import spread, zeros
from .memory import address, allocate, get_f32, get_i32, load_f32, load_i32, put, release, store
from .words import add_pairs, as_float, no_words

CODES, SCALES, SUM, MINIMUM, FOLDED = 0, 1, 2, 3, 4
"""How a block's integer meets its scales: Q4_0; Q5_0 and Q8_0; Q4_1 and Q5_1; Q2_K; the i-quants."""
_ROWS = 64  # of a that share an unpacked chunk
_CHUNK = 4096


@device
def _integers(words, at, count):
    """The sums of products of one row of a and sixteen of weights, over `count` words."""
    one, two, three, four = no_words(), no_words(), no_words(), no_words()
    for k in range(0, count, 4):
        one = add_pairs(one, load_i32(words, 16 * k), get_i32(at, k))
        two = add_pairs(two, load_i32(words, 16 * k + 16), get_i32(at, k + 1))
        three = add_pairs(three, load_i32(words, 16 * k + 32), get_i32(at, k + 2))
        four = add_pairs(four, load_i32(words, 16 * k + 48), get_i32(at, k + 3))
    return (one + two) + (three + four)


@device
def _four_integers(words, at, step, count):
    """The same for four rows of a, `step` bytes apart."""
    one, two, three, four = no_words(), no_words(), no_words(), no_words()
    for k in range(count):
        w = load_i32(words, 16 * k)
        one = add_pairs(one, w, get_i32(at, k))
        two = add_pairs(two, w, get_i32(at + step, k))
        three = add_pairs(three, w, get_i32(at + 2 * step, k))
        four = add_pairs(four, w, get_i32(at + 3 * step, k))
    return one, two, three, four


@device
def _term(form, sums, low, w_scales, a_scales):
    """What one block adds: its rounded integers by its scales, in the type's order."""
    whole, dw, da = as_float(sums), load_f32(w_scales, 0), spread(get_f32(a_scales, 0))
    if form == CODES:
        return (whole * dw) * da
    if form == SUM:
        return (dw * da) * whole + load_f32(w_scales, 16) * spread(get_f32(a_scales, 1))
    if form == MINIMUM:
        return (dw * da) * whole - (da * load_f32(w_scales, 16)) * as_float(low)
    return whole * (dw * da)


@device
def _plain_chunk(form, count, size, blocks, words, scales, rows, a, a_step, a_scales, s_step, totals):
    """Add a chunk of blocks to the running sums of `rows` rows of a; `count` of a block's `size` words are codes."""
    row = 0
    while row < rows:
        many = rows - row >= 4
        at, s_at, to = a + row * a_step, a_scales + row * s_step, 16 * row
        if many:
            one, two = load_f32(totals, to), load_f32(totals, to + 16)
            three, four = load_f32(totals, to + 32), load_f32(totals, to + 48)
            for i in range(blocks):
                w, s, here, a_s = words + 64 * size * i, scales + 128 * i, at + 4 * size * i, s_at + 8 * i
                p, q, r, t = _four_integers(w, here, a_step, count)
                lp, lq, lr, lt = no_words(), no_words(), no_words(), no_words()
                if form == MINIMUM:
                    lp, lq, lr, lt = _four_integers(w + 64 * count, here + 4 * count, a_step, size - count)
                one = one + _term(form, p, lp, s, a_s)
                two = two + _term(form, q, lq, s, a_s + s_step)
                three = three + _term(form, r, lr, s, a_s + 2 * s_step)
                four = four + _term(form, t, lt, s, a_s + 3 * s_step)
            put(one, totals, to)
            put(two, totals, to + 16)
            put(three, totals, to + 32)
            put(four, totals, to + 48)
            row += 4
        else:
            total = load_f32(totals, to)
            for i in range(blocks):
                w, s, here, a_s = words + 64 * size * i, scales + 128 * i, at + 4 * size * i, s_at + 8 * i
                low = no_words()
                if form == MINIMUM:
                    low = _integers(w + 64 * count, here + 4 * count, size - count)
                total = total + _term(form, _integers(w, here, count), low, s, a_s)
            put(total, totals, to)
            row += 1


@device
def plain(unpack, form, count, size, block, length, fold, begin, end, b, b_step, columns, a, a_scales, rows, blocks,
          out, kind):  # fmt: skip
    """Tiles begin ... end of the types whose blocks have one running sum."""
    chunk = min(blocks, _CHUNK // length)
    memory = allocate(64 * size * chunk + 128 * chunk + 64 * _ROWS)
    scales = memory + 64 * size * chunk
    totals = scales + 128 * chunk
    for tile in range(begin, end):
        column = min(16 * tile, columns - 16)
        for first in range(0, rows, _ROWS):
            some = min(_ROWS, rows - first)
            for row in range(some):
                put(zeros(), totals, 16 * row)
            for block_at in range(0, blocks, chunk):
                here = min(chunk, blocks - block_at)
                unpack(b + b_step * column + block * block_at, b_step, here, memory, scales)
                _plain_chunk(
                    form, count, size, here, memory, scales, some, a + 4 * size * (first * blocks + block_at),
                    4 * size * blocks, a_scales + 8 * (first * blocks + block_at), 8 * blocks, totals,
                )  # fmt: skip
            for row in range(some):
                total = load_f32(totals, 16 * row)
                if form in (FOLDED, MINIMUM):
                    total = total * fold
                store(total, out, (first + row) * columns + column, 16, kind)
    release(memory)


@device
def _lanes_chunk(minimum, blocks, words, scales, rows, a, a_step, a_scales, s_step, totals):
    """Add a chunk of blocks to the eight running sums, and those of the minimums, of `rows` rows of a."""
    for row in range(rows):
        at, s_at, to = a + row * a_step, a_scales + row * s_step, totals + 64 * 9 * row
        t0, t1, t2, t3 = load_f32(to, 0), load_f32(to, 16), load_f32(to, 32), load_f32(to, 48)
        t4, t5, t6, t7 = load_f32(to, 64), load_f32(to, 80), load_f32(to, 96), load_f32(to, 112)
        low = load_f32(to, 128)
        for i in range(blocks):
            w, here = words + 4 * BLOCK * i, at + 544 * i
            i0, i1, i2, i3 = no_words(), no_words(), no_words(), no_words()
            i4, i5, i6, i7 = no_words(), no_words(), no_words(), no_words()
            for g in range(0, 128, 8):
                i0 = add_pairs(i0, load_i32(w, 16 * g), get_i32(here, g))
                i1 = add_pairs(i1, load_i32(w, 16 * g + 16), get_i32(here, g + 1))
                i2 = add_pairs(i2, load_i32(w, 16 * g + 32), get_i32(here, g + 2))
                i3 = add_pairs(i3, load_i32(w, 16 * g + 48), get_i32(here, g + 3))
                i4 = add_pairs(i4, load_i32(w, 16 * g + 64), get_i32(here, g + 4))
                i5 = add_pairs(i5, load_i32(w, 16 * g + 80), get_i32(here, g + 5))
                i6 = add_pairs(i6, load_i32(w, 16 * g + 96), get_i32(here, g + 6))
                i7 = add_pairs(i7, load_i32(w, 16 * g + 112), get_i32(here, g + 7))
            da = spread(get_f32(s_at, 2 * i))
            d = load_f32(scales, 32 * i) * da
            t0, t1, t2, t3 = t0 + d * as_float(i0), t1 + d * as_float(i1), t2 + d * as_float(i2), t3 + d * as_float(i3)
            t4, t5, t6, t7 = t4 + d * as_float(i4), t5 + d * as_float(i5), t6 + d * as_float(i6), t7 + d * as_float(i7)
            if minimum:
                sums = _integers(w + 64 * 128, here + 512, 8)
                low = low - (load_f32(scales, 32 * i + 16) * da) * as_float(sums)
        put(t0, to, 0)
        put(t1, to, 16)
        put(t2, to, 32)
        put(t3, to, 48)
        put(t4, to, 64)
        put(t5, to, 80)
        put(t6, to, 96)
        put(t7, to, 112)
        put(low, to, 128)


@device
def in_lanes(unpack, minimum, block, begin, end, b, b_step, columns, a, a_scales, rows, blocks, out, kind):
    """Tiles begin ... end of the types whose blocks have eight running sums."""
    chunk = min(blocks, _CHUNK // 256)
    memory = allocate(4 * BLOCK * chunk + 128 * chunk + 64 * 9 * _ROWS)
    scales = memory + 4 * BLOCK * chunk
    totals = scales + 128 * chunk
    for tile in range(begin, end):
        column = min(16 * tile, columns - 16)
        for first in range(0, rows, _ROWS):
            some = min(_ROWS, rows - first)
            for row in range(9 * some):
                put(zeros(), totals, 16 * row)
            for block_at in range(0, blocks, chunk):
                here = min(chunk, blocks - block_at)
                unpack(b + b_step * column + block * block_at, b_step, here, memory, scales)
                _lanes_chunk(
                    minimum, here, memory, scales, some, a + 544 * (first * blocks + block_at), 544 * blocks,
                    a_scales + 8 * (first * blocks + block_at), 8 * blocks, totals,
                )  # fmt: skip
            for row in range(some):
                to = totals + 64 * 9 * row
                total = load_f32(to, 128)
                for lane in range(8):
                    total = total + load_f32(to, 16 * lane)
                store(total, out, (first + row) * columns + column, 16, kind)
    release(memory)


LETTERS = "iiaiiaaiiai"
"""begin, end, b, bytes between its rows, its rows, words, scales, rows and blocks of a, out, its kind."""


@kernel(LETTERS)
def q4_0(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    plain(unpack_q4_0, CODES, 16, 16, 18, 32, np.float32(1), begin, end, address(b), step, columns, address(words),
          address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q4_1(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    plain(unpack_q4_1, SUM, 16, 16, 20, 32, np.float32(1), begin, end, address(b), step, columns, address(words),
          address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q5_0(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    plain(unpack_q5_0, SCALES, 16, 16, 22, 32, np.float32(1), begin, end, address(b), step, columns, address(words),
          address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q5_1(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    plain(unpack_q5_1, SUM, 16, 16, 24, 32, np.float32(1), begin, end, address(b), step, columns, address(words),
          address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q8_0(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    plain(unpack_q8_0, SCALES, 16, 16, 34, 32, np.float32(1), begin, end, address(b), step, columns, address(words),
          address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q2_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    plain(unpack_q2_k, MINIMUM, 128, 136, 84, 256, np.float32(1), begin, end, address(b), step, columns, address(words),
          address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def iq2_xxs(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    plain(unpack_iq2_xxs, FOLDED, 128, 136, 66, 256, np.float32(0.125), begin, end, address(b), step, columns,
          address(words), address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def iq3_xxs(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    plain(unpack_iq3_xxs, FOLDED, 128, 136, 98, 256, np.float32(0.25), begin, end, address(b), step, columns,
          address(words), address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q3_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    in_lanes(unpack_q3_k, False, 110, begin, end, address(b), step, columns, address(words), address(scales), rows,
             blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q4_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    in_lanes(unpack_q4_k, True, 144, begin, end, address(b), step, columns, address(words), address(scales), rows,
             blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q5_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    in_lanes(unpack_q5_k, True, 176, begin, end, address(b), step, columns, address(words), address(scales), rows,
             blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q6_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    in_lanes(unpack_q6_k, False, 210, begin, end, address(b), step, columns, address(words), address(scales), rows,
             blocks, address(out), kind)  # fmt: skip
