"""Sixteen rows of weights in blocks of 256 by one row of activations, two rows of weights in a vector.

A vector has eight words of each of the two rows, word l with elements l, l + 8, l + 16 and l + 24 of 32: one lane of
ggml's order, and in its halves the two 16 values that may have scales of their own. Scales are taken apart for all
sixteen rows at once and stand in a table, one word of two int16 for each 32 values of each row; then come the rows'
float32 scales.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..tier import tier
from .ggml_32 import sixteen_rows
from .ggml_256 import six_bits
from .lanes import float32x16, function, int32x16, spread, zeros
from .memory import Address, get_f32, get_i32, put, scratch
from .vectors import F32, I8, I32, I64, LANES, V
from .words import (
    HALVES,
    WORDS,
    _at,
    _half_constant,
    _halves,
    _mask,
    _words,
    added_pairs,
    ahead,
    as_float,
    float16_of_rows,
    high_float16,
    inlined,
    low_float16,
    no_words,
    unsigned_right,
)  # fmt: skip

_BYTES = ir.VectorType(I8, 64)
TABLE = 64 * 9  # bytes a block: eight vectors of scales, and the float32 ones


def _two_rows(b, at, step, offset: int):
    """32 bytes at `offset` of two rows, those of each as words of lanes."""
    kind = ir.VectorType(I8, 32)
    parts = [b.load(_at(b, row, I64(offset), kind), align=1) for row in (at, b.add(at, step))]
    places = [32 * row + lane + 8 * k for row in (0, 1) for lane in range(8) for k in range(4)]
    return b.shuffle_vector(*parts, _mask(places))


def _field(b, x, first: int, mask: int, to: int = 0):
    """The bits `mask` of each byte from bit `first` on, moved to bit `to`."""
    halves, move = b.bitcast(x, HALVES), first - to
    if move:
        halves = (b.lshr if move > 0 else b.shl)(halves, _half_constant(b, abs(move)))
    return b.and_(b.bitcast(halves, _BYTES), ir.Constant(_BYTES, [I8(mask << to)] * 64))


def _nibbles(b, at, step, offset: int):
    for p in range(4):
        x = _two_rows(b, at, step, offset + 32 * p)
        yield from (_field(b, x, 0, 15), _field(b, x, 4, 15))


def _q4_k(b, at, step):
    """Nibbles at 16."""
    yield from _nibbles(b, at, step, 16)


def _q5_k(b, at, step):
    """Fifth bits at 16, nibbles at 48."""
    high = _two_rows(b, at, step, 16)
    for j, low in enumerate(_nibbles(b, at, step, 48)):
        yield b.or_(low, _field(b, high, j, 1, 4))


def _q6_k(b, at, step):
    """Low nibbles at 0, upper two bits at 128."""
    for half in range(2):
        low = [_two_rows(b, at, step, 64 * half + 32 * k) for k in range(2)]
        high = _two_rows(b, at, step, 128 + 32 * half)
        for t in range(4):
            yield b.or_(_field(b, low[t % 2], 4 * (t // 2), 15), _field(b, high, 2 * t, 3, 4))


def _q3_k(b, at, step):
    """Upper bits at 0, lower two at 32."""
    high = _two_rows(b, at, step, 0)
    for half in range(2):
        low = _two_rows(b, at, step, 32 + 32 * half)
        for t in range(4):
            yield b.or_(_field(b, low, 2 * t, 3), _field(b, high, 4 * half + t, 1, 2))


def _byte_pairs(b, x, y):
    """x0 y0 + x1 y1 of bytes as int16, x unsigned and small enough."""
    if tier() == "avx512":
        name = "llvm.x86.avx512.pmaddubs.w.512"
        found = b.module.globals.get(name) or ir.Function(b.module, ir.FunctionType(HALVES, [_BYTES, _BYTES]), name)
        return b.call(found, [b.bitcast(x, _BYTES), b.bitcast(y, _BYTES)])
    one, two = _halves(V(b, x)).value, _halves(V(b, y)).value
    eight = _half_constant(b, 8)
    low = b.mul(b.and_(one, _half_constant(b, 255)), b.ashr(b.shl(two, eight), eight))
    return b.add(low, b.mul(b.lshr(one, eight), b.ashr(two, eight)))


def _for_two(b, address, offset: int, element, count: int):
    """`count` elements at `address + offset`, shared out: the first half of the lanes has them, or has the first."""
    kind = ir.VectorType(element, count)
    found = b.load(_at(b, address, I64(offset), kind), align=4)
    return b.shuffle_vector(found, found, _mask([i % 8 if count == 8 else i // 8 for i in range(LANES)]))


def _dots(codes, signed: bool):
    """dots(at, step, a, table) -> the lanes of two rows of weights: integer sums over a block, scales and all.

    signed : codes have an offset; behind the codes of a stand the sums of their pairs, times it.
    """

    def dots(typing, at, step, a, table):
        def generate(context, builder, sig, args):
            at, step, a, table = args
            sums = [ir.Constant(WORDS, [I32(0)] * LANES)] * 2
            for j, code in enumerate(codes(builder, at, step)):
                pairs = _byte_pairs(builder, code, _for_two(builder, a, 32 * j, I32, 8))
                if signed:
                    offset = _for_two(builder, a, 256 + 32 * j, I32, 8)
                    pairs = builder.sub(pairs, builder.bitcast(offset, HALVES))
                scale = _for_two(builder, table, 64 * j, I32, 2)
                sums[j % 2] = added_pairs(builder, sums[j % 2], builder.bitcast(pairs, WORDS), scale)
            return builder.add(*sums)

        return signature(int32x16, Address, Address, Address, Address), generate

    dots.__name__ = codes.__name__[1:]
    return intrinsic(dots)


dots_q3_k, dots_q6_k = _dots(_q3_k, True), _dots(_q6_k, True)
dots_q4_k, dots_q5_k = _dots(_q4_k, False), _dots(_q5_k, False)


@intrinsic
def scale_of_two(typing, address):
    """Two float32, each for eight lanes."""

    def generate(context, builder, sig, args):
        return _for_two(builder, args[0], 0, F32, 2)

    return signature(float32x16, Address), generate


@intrinsic
def add_halves(typing, total, x, word):
    """total + x0 w0 + x1 w1: int16 of each word of x by those of one word."""

    def generate(context, builder, sig, args):
        one = builder.insert_element(ir.Constant(WORDS, ir.Undefined), args[2], I32(0))
        return added_pairs(builder, args[0], args[1], builder.shuffle_vector(one, one, _mask([0] * LANES)))

    return signature(int32x16, int32x16, int32x16, types.int32), generate


def _bytes_as_halves(x, places):
    """Bytes `places` of each word above zeros."""
    zeros = ir.Constant(_BYTES, [I8(0)] * 64)
    taken = [byte for word in range(LANES) for place in places for byte in (64, 4 * word + place)]
    return x.b.bitcast(x.b.shuffle_vector(x.b.bitcast(x.value, _BYTES), zeros, _mask(taken)), HALVES)


@function
def bytes_twice(x):
    """Byte 0 of each word, unsigned, in both halves; byte 1, 2 and 3."""
    eight = _half_constant(x.b, 8)
    return tuple(_words(x.b, x.b.lshr(_bytes_as_halves(x, (k, k)), eight)) for k in range(4))


@function
def bytes_by_twos(x):
    """Bytes 0 and 1 of each word, signed, as halves; bytes 2 and 3."""
    eight = _half_constant(x.b, 8)
    return tuple(_words(x.b, x.b.ashr(_bytes_as_halves(x, (k, k + 1)), eight)) for k in (0, 2))


@function
def less_32(x):
    """Each byte less 32."""
    thirty_two = ir.Constant(_BYTES, [I8(32)] * 64)
    return _words(x.b, x.b.sub(x.b.bitcast(x.value, _BYTES), thirty_two))


@function
def as_bits_of_float(x):
    """The same bits as float32."""
    return x.bits(F32)


@inlined
def _put_four(x, table):
    s0, s1, s2, s3 = bytes_twice(x)
    put(s0, table, 0)
    put(s1, table, 16)
    put(s2, table, 32)
    put(s3, table, 48)


_EVEN, _NIBBLES, _TWOS = np.int32(0x00FF00FF), np.int32(0x0F0F0F0F), np.int32(0x03030303)


@inlined
def scales_q4_k(at, step, a, table):
    """Of Q4_K and Q5_K."""
    s_first, s_last, m_first, m_last, both = six_bits(at, step)
    _put_four(s_first, table)
    _put_four(s_last, table + 256)
    low = add_halves(no_words(), m_first & _EVEN, get_i32(a, 128))
    low = add_halves(low, unsigned_right(m_first, 8) & _EVEN, get_i32(a, 129))
    low = add_halves(low, m_last & _EVEN, get_i32(a, 130))
    low = add_halves(low, unsigned_right(m_last, 8) & _EVEN, get_i32(a, 131))
    return low_float16(both), high_float16(both), low


@inlined
def _put_eight(x, y, z, w, table):
    for i, four in enumerate((x, y, z, w)):
        one, two = bytes_by_twos(four)
        put(one, table, 32 * i)
        put(two, table, 32 * i + 16)


@inlined
def scales_q6_k(at, step, a, table):
    """Signed bytes at 192, d at 208."""
    s0, s1, s2, s3 = sixteen_rows(at + 192, step)
    _put_eight(s0, s1, s2, s3, table)
    return float16_of_rows(at + 208, step), zeros(), no_words()


@inlined
def scales_q3_k(at, step, a, table):
    """Six bits at 96, less 32; d at 108."""
    first, second, third, both = sixteen_rows(at + 94, step)
    x = unsigned_right(first, 16) | (second << 16)
    y = unsigned_right(second, 16) | (third << 16)
    top = unsigned_right(third, 16) | (both << 16)
    s0 = less_32((x & _NIBBLES) | ((top & _TWOS) << 4))
    s1 = less_32((y & _NIBBLES) | ((unsigned_right(top, 2) & _TWOS) << 4))
    s2 = less_32((unsigned_right(x, 4) & _NIBBLES) | ((unsigned_right(top, 4) & _TWOS) << 4))
    s3 = less_32((unsigned_right(y, 4) & _NIBBLES) | ((unsigned_right(top, 6) & _TWOS) << 4))
    _put_eight(s0, s1, s2, s3, table)
    return high_float16(both), zeros(), no_words()


@inlined
def sixteen_by_one(dots, scales_of, minimum, size, b, step, blocks, a, a_scales, table):
    """Dot products of sixteen rows of weights with one row of activations; `table` has TABLE bytes a block."""
    sums, low = scratch(128), zeros()
    for i in range(blocks):
        da, scales = spread(get_f32(a_scales, i)), table + TABLE * i
        d, dmin, m = scales_of(b + size * i, step, a + 544 * i, scales)
        if minimum:
            low = low - (dmin * da) * as_float(m)
        put(d * da, scales, 128)
    for p in range(8):
        total, two = zeros(), b + 2 * step * p
        for i in range(blocks):
            for line in range(0, 2 * size, 64):
                ahead(two + 16 * step + 2 * size * i + line)
            scales = table + TABLE * i + 8 * p
            lanes = as_float(dots(two + size * i, step, a + 544 * i, scales))
            total = total + scale_of_two(scales + 512) * lanes
        put(total, sums, 16 * p)
    for k in range(0, 8, 4):
        w, x, y, z = sixteen_rows(sums + 4 * k, 32)
        low = ((low + as_bits_of_float(w)) + as_bits_of_float(x)) + as_bits_of_float(y)
        low = low + as_bits_of_float(z)
    return low
