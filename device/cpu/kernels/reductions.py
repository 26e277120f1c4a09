"""Sums of a row in the order of a block of 256 threads: eight neighbours each, trees in and across warps."""

from __future__ import annotations

from numba import types
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..compiling import device
from .lanes import float32x16, zeros
from .memory import Address, get_f32, load_f32, put, set_at
from .storage import read, write
from .vectors import F32, I64, LANES, V

SLOTS = 256 + 128
"""float32 that a sum needs: the partial sums of 256 threads, then what they add in one step."""
STEP = 128
"""Elements of a row that sixteen threads add in one step."""


def _halved(vectors):
    """Even and odd elements of a run of vectors: (evens, odds), each half as many."""
    pairs = [(vectors[i], vectors[i + 1]) for i in range(0, len(vectors), 2)]
    return [[a.shuffled(b, range(part, 32, 2)) for a, b in pairs] for part in (0, 1)]


@intrinsic
def add_step(typing, partial, values):
    """partial[t] += v[8 t], v[8 t + 1] ... v[8 t + 7], one after the other, for 16 threads t; v: 128 float32."""

    def generate(context, builder, sig, args):
        partial, values = args
        runs = [[V(builder, read(builder, values, I64(16 * i), None, F32)) for i in range(8)]]
        for _ in range(3):
            runs = [half for run in runs for half in _halved(run)]
        total = V(builder, read(builder, partial, I64(0), None, F32))
        for k in range(8):
            total = total + runs[int(f"{k:03b}"[::-1], 2)][0]
        write(builder, total.value, partial, I64(0), None)
        return context.get_dummy_value()

    return signature(types.void, Address, Address), generate


@intrinsic
def fold(typing, x):
    """x0 ... x15 summed as a tree: lanes 8 apart, then 4, 2 and 1."""

    def generate(context, builder, sig, args):
        total = V(builder, args[0])
        for span in (8, 4, 2, 1):
            total = total + total.shuffled(total, [(i + span) % LANES for i in range(LANES)])
        return total.lane(0)

    return signature(types.float32, float32x16), generate


@device
def cleared(partials, width):
    """The partial sums that a row of `width` elements needs, +0: sixteen where no thread beyond them gets any."""
    put(zeros(), partials, 0)
    if width > STEP:
        for i in range(LANES, 256, LANES):
            put(zeros(), partials, i)


@device
def joined(partials, width):
    """The partial sums as one: a butterfly in each warp of 32 threads, then one over the eight warps."""
    if width <= STEP:
        return fold(load_f32(partials, 0))
    for warp in range(8):
        set_at(fold(load_f32(partials, 32 * warp) + load_f32(partials, 32 * warp + 16)), partials, warp)
    a = get_f32(partials, 0) + get_f32(partials, 4)
    b = get_f32(partials, 1) + get_f32(partials, 5)
    c = get_f32(partials, 2) + get_f32(partials, 6)
    d = get_f32(partials, 3) + get_f32(partials, 7)
    return (a + c) + (b + d)
