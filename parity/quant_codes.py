"""A second opinion on e4m3 codes, from a table of exact fractions, and the comparison of codes with a peer's."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction

import numpy as np

from .scalar import rounded


def _magnitude(code: int) -> Fraction:
    """The value of a code 0 … 0x7E: four exponent bits with bias 7, three of mantissa, subnormals of 2^-9."""
    exponent, mantissa = divmod(code, 8)
    return Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


MAGNITUDES = [_magnitude(code) for code in range(0x7F)]


def code_of(value: float, nan: int = 0x7F) -> int:
    """The e4m3 code nearest to `value`, ties to the even code, saturating."""
    if math.isnan(value):
        return nan
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    if math.isinf(value) or abs(value) >= 448:
        return sign | 0x7E
    size = abs(Fraction(value))
    above = bisect_left(MAGNITUDES, size)
    if above == 0:
        return sign
    low, high = size - MAGNITUDES[above - 1], MAGNITUDES[above] - size
    below = low < high or (low == high and (above - 1) % 2 == 0)
    return sign | (above - 1 if below else above)


def f32(value: float) -> float:
    return rounded(value, "float32")


def divided(a: float, b: float) -> float:
    """float32(a / b) of float32 values, with IEEE's zeros and infinities."""
    with np.errstate(all="ignore"):
        return float(np.float32(a) / np.float32(b))


def times(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(a) * np.float32(b))


def largest(values) -> float:
    return max((abs(v) for v in values if v == v), default=0.0)


def codes(values, like: np.ndarray, nan: int = 0x7F) -> np.ndarray:
    """Codes of float32 values as an array in the shape of `like`."""
    return np.array([code_of(value, nan) for value in values], np.uint8).reshape(like.shape)
