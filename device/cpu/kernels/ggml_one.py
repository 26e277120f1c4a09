"""Blocks of 256 of one row of weights, in the order in which one row of activations meets them.

Four vectors of 64 unsigned bytes a block; vector i holds sub-blocks 2 i and 2 i + 1 of 32 values, each as eight words
of elements l, l + 8, l + 16 and l + 24. So a word's two pairs are of one lane, and of the two 16 values that may have
scales of their own: `scales_*` gives each vector's as two int16 a word.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..tier import tier
from .lanes import function, int32x16, lane, spread, zeros
from .memory import Address, get_any, get_f32
from .storage import FLOAT16
from .vectors import F32, I8, I16, I32, I64, LANES, V
from .words import (
    HALVES,
    WORDS,
    _at,
    _half_constant,
    _halves,
    _mask,
    _pairs,
    as_float,
    inlined,
    no_words,
    summed,
)  # fmt: skip

_BYTES, _LONGS = ir.VectorType(I8, 64), ir.VectorType(I64, 8)
_FOUR = types.UniTuple(int32x16, 4)


def _constant(kind, numbers):
    return ir.Constant(kind, [kind.element(int(number)) for number in numbers])


def _loaded(b, address, offset: int, size: int):
    """`size` bytes at `address + offset` as the first ones of 64."""
    kind = ir.VectorType(I8, size)
    found = b.load(_at(b, address, I64(offset), kind), align=1)
    return found if size == 64 else b.shuffle_vector(found, found, _mask([i % size for i in range(64)]))


def _spread(b, x, both: bool):
    """Each 32 bytes in the order of words of lanes; `both`: the first 32 for both halves."""
    places = [32 * (half and not both) + lane + 8 * k for half in (0, 1) for lane in range(8) for k in range(4)]
    return b.shuffle_vector(x, x, _mask(places))


def _shifted(b, x, first: int, last: int, mask: int):
    """Fields of `mask` in the bytes of x, the first half's at bit `first`, the last half's at bit `last`."""
    longs = b.lshr(b.bitcast(x, _LONGS), _constant(_LONGS, [first] * 4 + [last] * 4))
    return b.and_(b.bitcast(longs, _BYTES), _constant(_BYTES, [mask] * 64))


def _raised(b, x, bits: int):
    return b.shl(x, _constant(_BYTES, [bits] * 64))


def _codes(make):
    """make(builder, address) -> four vectors of bytes, as a function of kernels."""

    def typed(typing, address):
        def generate(context, builder, sig, args):
            parts = [builder.bitcast(part, WORDS) for part in make(builder, args[0])]
            return context.make_tuple(builder, sig.return_type, parts)

        return signature(_FOUR, Address), generate

    typed.__name__ = make.__name__
    return intrinsic(typed)


def _nibble_pairs(b, at, offset: int):
    return [_shifted(b, _spread(b, _loaded(b, at, offset + 32 * p, 32), True), 0, 4, 15) for p in range(4)]


@_codes
def row_q4_k(b, at):
    """Nibbles at 16."""
    return _nibble_pairs(b, at, 16)


@_codes
def row_q5_k(b, at):
    """Fifth bits at 16, nibbles at 48."""
    high = _spread(b, _loaded(b, at, 16, 32), True)
    fifth = [_raised(b, _shifted(b, high, 2 * p, 2 * p + 1, 1), 4) for p in range(4)]
    return [b.or_(low, top) for low, top in zip(_nibble_pairs(b, at, 48), fifth)]


@_codes
def row_q6_k(b, at):
    """Low nibbles at 0, upper two bits at 128."""
    parts = []
    for half in range(2):
        low = _spread(b, _loaded(b, at, 64 * half, 64), False)
        high = _spread(b, _loaded(b, at, 128 + 32 * half, 32), True)
        for t in range(2):
            top = _raised(b, _shifted(b, high, 4 * t, 4 * t + 2, 3), 4)
            parts.append(b.or_(_shifted(b, low, 4 * t, 4 * t, 15), top))
    return parts


@_codes
def row_q3_k(b, at):
    """Upper bits at 0, lower two at 32."""
    high, parts = _spread(b, _loaded(b, at, 0, 32), True), []
    for half in range(2):
        low = _spread(b, _loaded(b, at, 32 + 32 * half, 32), True)
        for t in (0, 2):
            bit = 4 * half + t
            top = _raised(b, _shifted(b, high, bit, bit + 1, 1), 2)
            parts.append(b.or_(_shifted(b, low, 2 * t, 2 * t + 2, 3), top))
    return parts


def _widened(b, sixteen, places, signed: bool):
    """Bytes `places` of sixteen as int16."""
    high = [byte for place in places for byte in (16, place)]  # the byte on top, a zero below
    none = ir.Constant(sixteen.type, [I8(0)] * 16)
    halves = b.bitcast(b.shuffle_vector(sixteen, none, _mask(high)), HALVES)
    return (b.ashr if signed else b.lshr)(halves, _half_constant(b, 8))


@intrinsic
def scales_of_32(typing, eight):
    """Four vectors from eight bytes in a number, one scale for each 32 values."""

    def generate(context, builder, sig, args):
        pair = builder.insert_element(ir.Constant(ir.VectorType(I64, 2), [I64(0)] * 2), args[0], I32(0))
        sixteen = builder.bitcast(pair, ir.VectorType(I8, 16))
        parts = [
            builder.bitcast(_widened(builder, sixteen, [2 * i] * 16 + [2 * i + 1] * 16, False), WORDS) for i in range(4)
        ]
        return context.make_tuple(builder, sig.return_type, parts)

    return signature(_FOUR, types.uint64), generate


@intrinsic
def scales_of_16(typing, low, high):
    """Four vectors from sixteen signed bytes in two numbers, one scale for each 16 values."""

    def generate(context, builder, sig, args):
        pair = ir.Constant(ir.VectorType(I64, 2), [I64(0)] * 2)
        for i in range(2):
            pair = builder.insert_element(pair, args[i], I32(i))
        sixteen = builder.bitcast(pair, ir.VectorType(I8, 16))
        parts = []
        for i in range(4):
            places = [4 * i + 2 * half + k for half in range(2) for _ in range(8) for k in range(2)]
            parts.append(builder.bitcast(_widened(builder, sixteen, places, True), WORDS))
        return context.make_tuple(builder, sig.return_type, parts)

    return signature(_FOUR, types.uint64, types.uint64), generate


@intrinsic
def minimums_of_32(typing, eight):
    """Eight bytes in a number as pairs of equal int16 in the first eight words, zeros behind them."""

    def generate(context, builder, sig, args):
        pair = builder.insert_element(ir.Constant(ir.VectorType(I64, 2), [I64(0)] * 2), args[0], I32(0))
        sixteen = builder.bitcast(pair, ir.VectorType(I8, 16))
        places = [j for j in range(8) for _ in range(2)] + [15] * 16
        return builder.bitcast(_widened(builder, sixteen, places, False), WORDS)

    return signature(int32x16, types.uint64), generate


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


@intrinsic
def weighed(typing, total, codes, at, offset, scales):
    """total + codes by the bytes at `at + offset`, pairs by their scales."""

    def generate(context, builder, sig, args):
        total, codes, at, offset, scales = args
        a = builder.load(_at(builder, at, offset, WORDS), align=4)
        pairs = builder.bitcast(_byte_pairs(builder, codes, a), WORDS)
        return builder.add(total, _pairs(builder, pairs, scales))

    return signature(int32x16, int32x16, int32x16, Address, types.int64, int32x16), generate


@intrinsic
def pairs_at(typing, total, at, offset, scales):
    """total + the int16 pairs at `at + offset` by their scales."""

    def generate(context, builder, sig, args):
        total, at, offset, scales = args
        a = builder.load(_at(builder, at, offset, WORDS), align=4)
        return builder.add(total, _pairs(builder, a, scales))

    return signature(int32x16, int32x16, Address, types.int64, int32x16), generate


@function
def swapped(x):
    """The halves of x, the other way round."""
    return x.shuffled(x, [(i + 8) % LANES for i in range(LANES)])


@function
def folded(x):
    """Each lane and the one eight further on."""
    return x + x.shuffled(x, [(i + 8) % LANES for i in range(LANES)])


@intrinsic
def _half_instruction(typing, address):
    """The float16 at `address`, widened by the instruction."""

    def generate(context, builder, sig, args):
        found = builder.load(_at(builder, args[0], I64(0), I16), align=2)
        return builder.fpext(builder.bitcast(found, ir.HalfType()), F32)

    return signature(types.float32, Address), generate


if tier() in ("avx512", "avx2"):
    half_at = _half_instruction
else:

    @inlined
    def half_at(address):
        return get_any(address, 0, FLOAT16)


@intrinsic
def long_at(typing, address):
    """Eight bytes as a number."""

    def generate(context, builder, sig, args):
        return builder.load(_at(builder, args[0], I64(0), I64), align=1)

    return signature(types.uint64, Address), generate


_LOW_FOUR, _SIX, _TOP = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x3F3F3F3F), np.uint64(0x30303030)


@inlined
def six_bits(at):
    """The eight scales and the eight minimums of Q4_K and Q5_K, a byte each, from the twelve bytes at `at`."""
    both, last = long_at(at), long_at(at + 4) >> np.uint64(32)
    first, second = both & np.uint64(0xFFFFFFFF), both >> np.uint64(32)
    s = (first & _SIX) | (((last & _LOW_FOUR) | ((first >> np.uint64(2)) & _TOP)) << np.uint64(32))
    m = (second & _SIX) | ((((last >> np.uint64(4)) & _LOW_FOUR) | ((second >> np.uint64(2)) & _TOP)) << np.uint64(32))
    return s, m


@inlined
def scales_q3_k(at):
    """The sixteen scales of Q3_K, less 32, as two numbers of eight bytes, from the twelve bytes at `at`."""
    low, top = long_at(at), long_at(at + 4) >> np.uint64(32)
    pairs = np.uint64(0x03030303)
    first = ((top & pairs) | (((top >> np.uint64(2)) & pairs) << np.uint64(32))) << np.uint64(4)
    last = (((top >> np.uint64(4)) & pairs) | (((top >> np.uint64(6)) & pairs) << np.uint64(32))) << np.uint64(4)
    return _less_32((low & _LOW_FOUR) | first), _less_32(((low >> np.uint64(4)) & _LOW_FOUR) | last)


@inlined
def _less_32(x):
    """Bytes of at most 63, less 32: bit 5 turned over, and spread over the two above it."""
    turned = x ^ np.uint64(0x2020202020202020)
    negative = turned & np.uint64(0x2020202020202020)
    return turned | (negative << np.uint64(1)) | (negative << np.uint64(2))


@inlined
def scales_q4_k(at):
    """Of Q4_K and Q5_K: the vectors of scales, the minimums, d and dmin."""
    s, m = six_bits(at + 4)
    return scales_of_32(s), minimums_of_32(m), half_at(at), half_at(at + 2)


@inlined
def scales_row_q6_k(at):
    """Of Q6_K; what it lacks is nothing."""
    return scales_of_16(long_at(at + 192), long_at(at + 200)), no_words(), half_at(at + 208), np.float32(0)


@inlined
def scales_row_q3_k(at):
    """Of Q3_K."""
    first, last = scales_q3_k(at + 96)
    return scales_of_16(first, last), no_words(), half_at(at + 108), np.float32(0)


@inlined
def one_by_one(codes, scales_of, shift, minimum, size, w, blocks, a, a_scales):
    """The dot product of one row of weights and one of activations; `shift`: codes are 2^shift too large, or 0."""
    sums, low = zeros(), np.float32(0)
    for i in range(blocks):
        at, here, da = w + size * i, a + 544 * i, get_f32(a_scales, 2 * i)
        c0, c1, c2, c3 = codes(at)
        (s0, s1, s2, s3), m, dw, dmin = scales_of(at)
        one, two = weighed(no_words(), c0, here, 0, s0), weighed(no_words(), c1, here, 64, s1)
        one, two = weighed(one, c2, here, 128, s2), weighed(two, c3, here, 192, s3)
        if shift:
            three, four = pairs_at(no_words(), here, 256, s0), pairs_at(no_words(), here, 320, s1)
            three, four = pairs_at(three, here, 384, s2), pairs_at(four, here, 448, s3)
            one = one - ((three + four) << shift)
        sums = sums + spread(dw * da) * as_float(folded(one + two))
        if minimum:
            total = lane(summed(pairs_at(no_words(), here, 512, m)), 0)
            low = low - (dmin * da) * np.float32(total)
    for k in range(8):
        low = low + lane(sums, k)
    return low
