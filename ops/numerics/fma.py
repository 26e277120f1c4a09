"""Exact float32 fused multiply-add in NumPy."""

from __future__ import annotations

import numpy as np

_LOW = np.int64(0x1FFF_FFFF)  # the 29 bits that float64 -> float32 drops
_TIE = np.int64(0x1000_0000)
_NORMAL = 2.0**-126


def fma_f32(a, b, c) -> np.ndarray:
    """RN_float32(a * b + c) with one rounding, as C's fmaf and CUDA's __fmaf_rn.

    a, b, c: float32, broadcast together. Infinities, NaN (of unspecified payload), subnormals and signed zeros as
    IEEE 754 says.
    Rounding: the product of two float32 is exact in float64. The sum is rounded to float64 and then to float32; the
    second rounding is wrong only where the float64 lands on a midpoint of float32 (or, for subnormal results, maybe)
    without being exact. There the float64 is first rounded to odd, with the error of its sum from TwoSum (Boldo &
    Melquiond 2008: round to odd with two extra bits, then to nearest, is one rounding).
    Errors: TypeError for anything but float32 and Python scalars.
    """
    a, b, c = (single(v).astype(np.float64) for v in (a, b, c))
    with np.errstate(all="ignore"):
        product = a * b
        total = product + c
        doubtful = (total.view(np.int64) & _LOW) == _TIE
        if (small := np.abs(total) < _NORMAL).any():
            doubtful |= small & (total != 0)
        if doubtful.any():
            total, doubtful = np.asarray(total), np.asarray(doubtful)
            product, c = (np.broadcast_to(x, total.shape) for x in (product, c))
            total[doubtful] = _round_to_odd(product[doubtful], c[doubtful], total[doubtful])
        return total.astype(np.float32)


def _round_to_odd(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """a + b rounded to odd, given total = RN(a + b), all float64: an inexact even total moves towards the truth."""
    back = total - a
    error = (a - (total - back)) + (b - back)  # TwoSum: a + b = total + error
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where((error != 0) & (bits & 1 == 0), bits + step, bits).view(np.float64)


def single(x) -> np.ndarray:
    """x as float32, refusing what would silently round: only float32 arrays and Python numbers pass."""
    if isinstance(x, (float, int)) and not isinstance(x, (bool, np.generic)):
        return np.float32(x)
    x = np.asarray(x)
    if x.dtype != np.float32:
        raise TypeError(f"float32 arithmetic on {x.dtype}: load() or store() it first")
    return x
