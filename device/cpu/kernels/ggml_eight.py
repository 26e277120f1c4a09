"""Twice sixteen unpacked rows of weights by eight rows of activations, which stand beside each other in memory.

Word l of each sixteen values of a row is at 64 g + 8 row + l of a block of BLOCK words, as `ggml_rows` puts them there,
so that addresses are a register and a constant; each word is spread once for both sixteens; and the products are a
loop, which keeps LLVM from taking one sum after the other. That lets two products start in a cycle.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..tier import tier
from .lanes import zeros
from .memory import Address, load_f32, put
from .vectors import F32, I32, I64, LANES, V, splat
from .words import WORDS, _at, added_pairs, inlined

ROWS, TILES, WIDE = 8, 2, 136
BLOCK = ROWS * WIDE
"""Rows of activations, sixteens of rows of weights; words of a row in a block of 256, and of all those rows."""
_PLACES = [(row, tile) for tile in range(TILES) for row in range(ROWS)]
SUMS = 64 * len(_PLACES)  # bytes
_VECTOR = ir.VectorType(F32, LANES)


def _looped(b, turns: int, a, w, a_step: int, w_step: int, words, places):
    """Sums at `places` over `turns` times `words`, pairs of offsets from the addresses a and w, which move by steps."""
    before, zero = b.block, ir.Constant(WORDS, [I32(0)] * LANES)
    loop, after = b.append_basic_block("dots"), b.append_basic_block("dotted")
    b.branch(loop)
    b.position_at_end(loop)
    turn, here, there = b.phi(I64), b.phi(I64), [b.phi(I64) for _ in w]
    sums = {place: b.phi(WORDS) for place in places}
    found = dict(sums)
    for a_offset, w_offset in words:
        weights = {
            tile: b.load(_at(b, there[tile], I64(w_offset), WORDS), align=64)
            for tile in sorted({tile for _, tile in places})
        }
        for row in sorted({row for row, _ in places}):
            word = splat(b, b.load(_at(b, here, I64(a_offset + 32 * row), I32), align=4)).value
            for tile, weight in weights.items():
                found[row, tile] = added_pairs(b, found[row, tile], weight, word)
    moving = [
        (turn, I64(0), I64(1)),
        (here, a, I64(a_step)),
        *((phi, first, I64(w_step)) for phi, first in zip(there, w)),
    ]
    following = [(phi, first, b.add(phi, step)) for phi, first, step in moving]
    for phi, first, later in following + [(phi, zero, found[place]) for place, phi in sums.items()]:
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)
    b.cbranch(b.icmp_signed("<", following[0][2], I64(turns)), loop, after)
    b.position_at_end(after)
    return found


def _get(b, address, index: int) -> V:
    return V(b, b.load(_at(b, address, I64(64 * index), _VECTOR), align=64))


def _put(b, x: V, address, index: int) -> None:
    b.store(x.value, _at(b, address, I64(64 * index), _VECTOR), align=64)


def _dots(name: str, turns: int, a_step: int, w_step: int, words, after):
    """name(w, apart, a, scales, sums): products of int16 of eight rows at a and the weights at w and w + apart, as
    float32 by the vectors at `scales`; what becomes of the vectors at `sums` then says after(term, sum, index)."""

    def typed(typing, w, apart, a, scales, sums):
        def generate(context, builder, sig, args):
            w, apart, a, scales, sums = args
            tiles, found = [w, builder.add(w, apart)], {}
            together = 16 if tier() == "avx512" else 4  # as many sums as there are registers for
            for first in range(0, len(_PLACES), together):
                places = _PLACES[first : first + together]
                found |= _looped(builder, turns, a, tiles, a_step, w_step, words, places)
            for index, place in enumerate(_PLACES):
                term = _get(builder, scales, index) * V(builder, found[place]).to(F32)
                _put(builder, after(term, lambda more=0, index=index: _get(builder, sums, index + more)), sums, index)
            return context.get_dummy_value()

        return signature(types.void, *[Address] * 5), generate

    typed.__name__ = name
    return intrinsic(typed)


_LANE = 8, 512, 1024, [(0, 0), (256, 512)]
_BLOCK = 16, 256, 512, [(4 * k, 64 * k) for k in range(8)]
_MINIMUMS = 2, 16, 256, [(4 * k, 64 * k) for k in range(4)]
add_lane = _dots("add_lane", *_LANE, lambda term, sum_: sum_() + term)
add_block = _dots("add_block", *_BLOCK, lambda term, sum_: sum_() + term)
add_block_less = _dots("add_block_less", *_BLOCK, lambda term, sum_: sum_() + (term - sum_(len(_PLACES))))
minimums = _dots("minimums", *_MINIMUMS, lambda term, sum_: term)
subtract_minimums = _dots("subtract_minimums", *_MINIMUMS, lambda term, sum_: sum_() - term)


@intrinsic
def scale_by(typing, scales, apart, a_scales, to):
    """Vectors at `to`: sixteen float32 at `scales`, and at `scales + apart`, by each of eight."""

    def generate(context, builder, sig, args):
        scales, apart, a_scales, to = args
        tiles = [V(builder, builder.load(_at(builder, scales, at, _VECTOR), align=64)) for at in (I64(0), apart)]
        for index, (row, tile) in enumerate(_PLACES):
            one = builder.load(_at(builder, a_scales, I64(4 * row), F32), align=4)
            _put(builder, tiles[tile] * splat(builder, one), to, index)
        return context.get_dummy_value()

    return signature(types.void, *[Address] * 4), generate


@inlined
def in_lanes(minimum, blocks, w, scales, apart, a, a_scales, sums):
    """Dot products of eight rows, to the vectors at `sums`, behind which stand those of each lane, and scales."""
    by = sums + 9 * SUMS
    for i in range(16 * 9):
        put(zeros(), sums, 16 * i)
    for i in range(blocks):
        here, there, d, s = a + 4 * BLOCK * i, w + 64 * WIDE * i, scales + 128 * i, a_scales + 32 * i
        if minimum:
            scale_by(d + 64, apart, s, by)
            subtract_minimums(there + 8192, apart, here + 4096, by, sums)
        scale_by(d, apart, s, by)
        for lane in range(8):
            add_lane(there + 64 * lane, apart, here + 4 * lane, by, sums + SUMS * (lane + 1))
    for i in range(16):
        total = load_f32(sums, 16 * i)
        for lane in range(1, 9):
            total = total + load_f32(sums + SUMS * lane, 16 * i)
        put(total, sums, 16 * i)


@inlined
def in_blocks(minimum, blocks, w, scales, apart, a, a_scales, sums):
    """Dot products of eight rows, to the vectors at `sums`, behind which stand those of minimums, and scales."""
    low, by = sums + SUMS, sums + 2 * SUMS
    for i in range(16):
        put(zeros(), sums, 16 * i)
    for i in range(blocks):
        here, there, d, s = a + 4 * BLOCK * i, w + 64 * WIDE * i, scales + 128 * i, a_scales + 32 * i
        if minimum:
            scale_by(d + 64, apart, s, by)
            minimums(there + 8192, apart, here + 4096, by, low)
        scale_by(d, apart, s, by)
        if minimum:
            add_block_less(there, apart, here, by, sums)
        else:
            add_block(there, apart, here, by, sums)
