"""Sums of a softmax's weights in units of 2^-42, where no order can change them: oracle/fixed_point.py on lanes."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..compiling import device
from .lanes import int64x16, lanes_below, maximum, spread, top_lane, where
from .memory import load, store
from .transcendental import exp
from .vectors import F64, I64, LANES, V, constant

INF = np.float32(np.inf)
_UNIT = np.float32(2.0**-42)
_MAGIC, _MAGIC_BITS = 1.5 * 2.0**52, 0x4338000000000000


@intrinsic
def units(typing, weights):
    """float32 weights in [0, 1] as multiples of 2^-42, to nearest even, but 1 at least where a weight is not 0."""

    def generate(context, builder, sig, args):
        w = V(builder, args[0])
        counted = (w.to(F64) * 2.0**42 + _MAGIC).bits(I64) - _MAGIC_BITS
        least = (w > 0.0).to(I64)
        return (counted > least).where(counted, least).value

    return signature(int64x16, weights), generate


@intrinsic
def no_units(typing):
    """Sixteen sums of nothing."""
    return signature(int64x16), lambda context, builder, sig, args: constant(builder, I64, 0).value


@intrinsic
def added(typing, x):
    """The sum of 16 integers."""

    def generate(context, builder, sig, args):
        total = V(builder, args[0])
        for span in (8, 4, 2, 1):
            total = total + total.shuffled(total, [(i + span) % LANES for i in range(LANES)])
        return total.lane(0)

    return signature(types.int64, int64x16), generate


@device
def peak(x, first, width):
    """The largest of `width` float32; NaN if there is one."""
    a, b = spread(-INF), spread(-INF)
    i = 0
    while i + 32 <= width:
        a, b = maximum(a, load(x, first + i, 16, 0)), maximum(b, load(x, first + i + 16, 16, 0))
        i += 32
    while i < width:
        value = load(x, first + i, width - i, 0)
        a = maximum(a, where(lanes_below(width - i), value, -INF))
        i += 16
    return top_lane(maximum(a, b))


@device
def weigh(x, first, width, top, out, kept):
    """sum_v exp(x_v - top) in units; the weights themselves to `out` where `kept`."""
    total = no_units()
    for i in range(0, width, 16):
        left = width - i
        w = where(lanes_below(left), exp(load(x, first + i, left, 0) - top), np.float32(0))
        total = total + units(w)
        if kept:
            store(w, out, first + i, left, 0)
    return added(total)


@device
def as_float(count):
    """A sum of units as float32, rounded once."""
    return np.float32(count) * _UNIT
