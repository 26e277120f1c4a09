"""Products of weights in GGML blocks: sixteen rows of weights at a time are unpacked once and meet every row of a.

Integer sums of a block are exact in any order; what rounds is what `oracle.ggml_dot` rounds, lane by lane of the vector
in its order. Unpacked rows take two bytes a value at most and stay in the core's own cache; sums stay in registers.
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
from .ggml_eight import in_blocks, in_lanes
from .ggml_grids import unpack_iq2_xxs, unpack_iq3_xxs
from .ggml_one import (
    TABLE,
    dots_q3_k,
    dots_q4_k,
    dots_q5_k,
    dots_q6_k,
    scales_q3_k,
    scales_q4_k,
    scales_q6_k,
    sixteen_by_one,
)  # fmt: skip
from .ggml_rows import EIGHTS_IN_BLOCKS, EIGHTS_IN_LANES
from .lanes import spread, zeros
from .memory import address, allocate, get_f32, get_i32, load_f32, put, release, scratch, store
from .words import (
    add_fours,
    as_float,
    four_rows_of_bytes,
    inlined,
    no_words,
    one_row_of_halves,
    one_row_of_minimums,
    word_everywhere,
)  # fmt: skip

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
def _four_rows_32(form, offset, words, scales, blocks, a, a_step, a_scales, s_step):
    """Sixteen unpacked rows of weights by four rows of a."""
    one, two, three, four = zeros(), zeros(), zeros(), zeros()
    for i in range(blocks):
        p, q, r, t = four_rows_of_bytes(words + 512 * i, a + 32 * i, a_step)
        d, m, s = load_f32(scales, 32 * i), load_f32(scales, 32 * i + 16), a_scales + 8 * i
        one = one + _term_32(form, p, offset, d, m, s)
        two = two + _term_32(form, q, offset, d, m, s + s_step)
        three = three + _term_32(form, r, offset, d, m, s + 2 * s_step)
        four = four + _term_32(form, t, offset, d, m, s + 3 * s_step)
    return one, two, three, four


@inlined
def _store_four(one, two, three, four, out, at, columns, kind):
    store(one, out, at, 16, kind)
    store(two, out, at + columns, 16, kind)
    store(three, out, at + 2 * columns, 16, kind)
    store(four, out, at + 3 * columns, 16, kind)


@inlined
def of_32(codes, scales_of, form, offset, size, begin, end, b, b_step, columns, a, a_scales, rows, blocks, out, kind):
    """Tiles begin ... end of the types with blocks of 32: rows of a by fours, those that are left one by one."""
    fours = rows // 4 * 4
    memory = allocate(640 * blocks) if fours else 0
    scales = memory + 512 * blocks
    for tile in range(begin, end):
        column = min(16 * tile, columns - 16)
        at = b + b_step * column
        if fours:
            _unpack_32(codes, scales_of, size, at, b_step, blocks, memory, scales)
        for row in range(0, fours, 4):
            one, two, three, four = _four_rows_32(form, offset, memory, scales, blocks, a + 32 * row * blocks,
                                                  32 * blocks, a_scales + 8 * row * blocks, 8 * blocks)  # fmt: skip
            _store_four(one, two, three, four, out, row * columns + column, columns, kind)
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
def _one_row_256(minimum, unpack, size, memory, b, b_step, blocks, a, a_scales):
    """Sixteen rows of weights by one row of a: each block is unpacked where the one before it was."""
    total = zeros()
    for i in range(blocks):
        unpack(b + size * i, b_step, 1, memory, memory + 4 * BLOCK)
        sums = no_words()
        for part in range(0, 128, 16):
            sums = sums + one_row_of_halves(memory + 64 * part, a + 544 * i + 4 * part, 0)[0]
        low = one_row_of_minimums(memory + 64 * 128, a + 544 * i + 512, 0)[0]
        d, dmin = load_f32(memory + 4 * BLOCK, 0), load_f32(memory + 4 * BLOCK, 16)
        total = total + _term_256(minimum, sums, low, d, dmin, spread(get_f32(a_scales, i)))
    return total


@inlined
def _by_eights(unpack, meet, minimum, fold, begin, end, b, b_step, columns, a, a_scales, rows, blocks, out, kind):
    """Tiles begin ... end by all rows of a, two tiles and eight rows at a time."""
    apart = (4 * BLOCK + 128) * blocks
    memory, sums = allocate(2 * apart), scratch(2560)
    scales = memory + 4 * BLOCK * blocks
    for tile in range(begin, end, 2):
        for next_ in range(2):
            column = min(16 * (tile + next_), columns - 16)
            unpack(b + b_step * column, b_step, blocks, memory + apart * next_, scales + apart * next_)
        for eight in range(0, rows, 8):
            meet(minimum, blocks, memory, scales, apart, a + 544 * eight * blocks, a_scales + 4 * eight * blocks, sums)
            few = min(8, rows - eight)
            for i in range(2 * few):
                row, next_ = i % few, i // few
                column = min(16 * (tile + next_), columns - 16)
                total = load_f32(sums, 128 * next_ + 16 * row) * fold
                store(total, out, (eight + row) * columns + column, 16, kind)
    release(memory)


@inlined
def of_256(unpack, minimum, size, fold, begin, end, b, b_step, columns, a, a_scales, rows, blocks, out, kind):
    """Tiles begin ... end of the types whose blocks of 256 have one running sum: rows of a by eights, or one."""
    if rows >= EIGHTS_IN_BLOCKS:
        _by_eights(unpack, in_blocks, minimum, fold, begin, end, b, b_step, columns, a, a_scales, rows, blocks, out,
                   kind)  # fmt: skip
        return
    memory = allocate(4 * BLOCK + 128)
    for tile in range(begin, end):
        column = min(16 * tile, columns - 16)
        for row in range(rows):
            total = _one_row_256(minimum, unpack, size, memory, b + b_step * column, b_step, blocks,
                                 a + 544 * row * blocks, a_scales + 4 * row * blocks)  # fmt: skip
            store(total * fold, out, row * columns + column, 16, kind)
    release(memory)


@inlined
def of_256_in_lanes(
    unpack, dots, scales_of, minimum, size, begin, end, b, b_step, columns, a, a_scales, rows, blocks, out, kind
):
    """Tiles begin ... end of the types whose blocks have eight running sums: rows of a by eights, or few of them one
    by one with rows of weights that are not unpacked."""
    if rows >= EIGHTS_IN_LANES:
        _by_eights(unpack, in_lanes, minimum, np.float32(1), begin, end, b, b_step, columns, a, a_scales, rows, blocks,
                   out, kind)  # fmt: skip
        return
    memory = allocate(TABLE * blocks)
    for tile in range(begin, end):
        column = min(16 * tile, columns - 16)
        for row in range(rows):
            total = sixteen_by_one(dots, scales_of, minimum, size, b + b_step * column, b_step, blocks,
                                   a + 544 * row * blocks, a_scales + 4 * row * blocks, memory)  # fmt: skip
            store(total, out, row * columns + column, 16, kind)
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
    of_256_in_lanes(unpack_q3_k, dots_q3_k, scales_q3_k, False, 110, begin, end, address(b), step, columns,
             address(words), address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q4_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    of_256_in_lanes(unpack_q4_k, dots_q4_k, scales_q4_k, True, 144, begin, end, address(b), step, columns,
             address(words), address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q5_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    of_256_in_lanes(unpack_q5_k, dots_q5_k, scales_q4_k, True, 176, begin, end, address(b), step, columns,
             address(words), address(scales), rows, blocks, address(out), kind)  # fmt: skip


@kernel(LETTERS)
def q6_k(begin, end, b, step, columns, words, scales, rows, blocks, out, kind):
    of_256_in_lanes(unpack_q6_k, dots_q6_k, scales_q6_k, False, 210, begin, end, address(b), step, columns,
             address(words), address(scales), rows, blocks, address(out), kind)  # fmt: skip
