"""Cosine and sine in float64: the steps of ops/numerics/angles.py, one for one, for the rows of a rotary table."""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from vtlab.ops.numerics import angles

from ..compiling import device, kernel
from .memory import get_f64, get_i32, get_i64, set_at
from .vectors import I64

U = np.uint64
TABLE = angles.TWO_OVER_PI
LOW, MANTISSA, ONE = U(0xFFFFFFFF), U(2**52 - 1), U(2**52)
EIGHTH = U(1 << 61)
PI_2, PI_2_REST = (part * 2.0**-62 for part in (1.5707963267948966, 6.123233995736766e-17))
SIN, COS = tuple(angles.SIN), tuple(angles.COS)


@intrinsic
def bits_of(typing, x):
    """The bits of a float64."""

    def generate(context, builder, sig, args):
        return builder.bitcast(args[0], I64)

    return signature(types.uint64, types.float64), generate


@device
def _upper_product(a, b):
    """The upper 64 of the 128 bits of a * b."""
    a1, a0, b1, b0 = a >> U(32), a & LOW, b >> U(32), b & LOW
    middle = a1 * b0 + (a0 * b0 >> U(32))
    return a1 * b1 + (middle >> U(32)) + ((a0 * b1 + (middle & LOW)) >> U(32))


@device
def _upper_half(x):
    scaled = 134217729.0 * x
    return scaled - (scaled - x)


@device
def _word(at, shift):
    return (TABLE[at] << shift) | (TABLE[at + 1] >> U(1) >> (U(63) - shift))


@device
def _reduced(a):
    """(quarter turns mod 4, r, rest) with a = quarter * pi/2 + r + rest."""
    bits = bits_of(a)
    exponent = np.int64(bits >> U(52))
    if exponent < 1022:
        return np.int64(0), a, 0.0
    m = (bits & MANTISSA) | ONE
    at = min(max(exponent - 1013, 0), 64 * 16 + 9)
    word, shift = at >> 6, U(at & 63)
    high, middle, low = _word(word, shift), _word(word + 1, shift), _word(word + 2, shift)
    below = _upper_product(m, low)
    fraction = below + m * middle
    turn = m * high + _upper_product(m, middle) + U(1 if fraction < below else 0)
    quarter = (turn + EIGHTH) >> U(62)
    signed = np.int64(turn - (quarter << U(62)))
    upper, lower = np.float64(signed >> 32) * 2.0**32, np.float64(signed & 0xFFFFFFFF)
    lead = upper + lower
    beyond = np.float64(fraction >> U(32)) * 2.0**32 + np.float64(fraction & LOW)
    tail = (lower - (lead - upper)) + beyond * 2.0**-64
    product = lead * PI_2
    a1, b1 = _upper_half(lead), _upper_half(PI_2)
    a0, b0 = lead - a1, PI_2 - b1
    lost = ((a1 * b1 - product) + a1 * b0 + a0 * b1) + a0 * b0
    error = lost + (lead * PI_2_REST + tail * PI_2)
    r = product + error
    return np.int64(quarter), r, (product - r) + error


@device
def cos_sin(x):
    """(cos x, sin x); NaN for infinities."""
    a = abs(x)
    if not a < math.inf:
        return math.nan, math.nan
    quarter, r, rest = _reduced(a)
    z = r * r
    series = SIN[7]
    for i in range(6, -1, -1):
        series = series * z + SIN[i]
    sin = r + (r * (z * series) + rest * (1 - 0.5 * z))
    series = COS[7]
    for i in range(6, -1, -1):
        series = series * z + COS[i]
    half = 0.5 * z
    most = 1 - half
    cos = most + (((1 - most) - half) + (z * (z * series) - r * rest))
    if quarter & 1:
        cos, sin = sin, cos
    if (quarter + 1) & 2:
        cos = -cos
    if ((quarter & 2) != 0) != (x < 0):
        sin = -sin
    return cos, sin


@kernel("iiaiaia")
def rows(begin, end, positions, wide, inverse, half, out):
    """Rows begin ... end of [cos(position * inverse) | sin(the same)], rounded to float32."""
    for t in range(begin, end):
        position = get_i64(positions, t) if wide else np.int64(get_i32(positions, t))
        for i in range(half):
            cos, sin = cos_sin(np.float64(position) * get_f64(inverse, i))
            set_at(np.float32(cos), out, 2 * half * t + i)
            set_at(np.float32(sin), out, 2 * half * t + half + i)
