"""A second opinion for checks: rounding and float32 sums in plain Python, sharing no code with `ops.numerics`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import ml_dtypes
import numpy as np

_FORMATS = {  # significant bits, exponent of the smallest normal, largest finite value
    "float32": (24, -126, float.fromhex("0x1.fffffep127")),
    "bfloat16": (8, -126, float.fromhex("0x1.fep127")),
    "float16": (11, -14, 65504.0),
}


def rounded(x: float, kind: str) -> float:
    """x to the nearest value of `kind`, ties to even; infinite beyond the largest."""
    if x == 0 or not math.isfinite(x):
        return x
    bits, lowest, largest = _FORMATS[kind]
    unit = max(math.frexp(x)[1] - bits, lowest - bits + 1)
    nearest = math.ldexp(float(round(math.ldexp(x, -unit))), unit)
    return math.copysign(nearest if abs(nearest) <= largest else math.inf, x)


def draw(shape: Sequence[int], kind: str, seed: int, scale: float = 1.0) -> np.ndarray:
    """Normal data of the dtype called `kind`, the same for the same seed."""
    data = np.random.Generator(np.random.PCG64(seed)).standard_normal(shape) * scale
    return data.astype(np.float32).astype(getattr(ml_dtypes, kind, None) or kind)


def floats(row: np.ndarray) -> list[float]:
    """One row as Python floats."""
    return [float(value) for value in row]


def stored(values: Iterable[float], like: np.ndarray, kind: str | None = None) -> np.ndarray:
    """`values`, each rounded once, in the shape of `like` and in `kind` or its dtype."""
    kind = kind or like.dtype.name
    flat = np.array([rounded(float(value), kind) for value in values], np.float32)
    return flat.astype(getattr(ml_dtypes, kind, None) or kind).reshape(like.shape)


def tree256(values: Sequence[np.float32]) -> np.float32:
    """The float32 sum of a block of 256 threads that take eight neighbours at a time: warps, then over the warps."""
    lanes = [np.float32(0)] * 256
    for index, value in enumerate(values):
        thread = index // 8 % 256
        lanes[thread] = np.float32(lanes[thread] + value)
    return _halved([_halved(lanes[first : first + 32]) for first in range(0, 256, 32)])


def _halved(partials: Sequence[np.float32]) -> np.float32:
    """The upper half added to the lower one until one is left."""
    while len(partials) > 1:
        half = len(partials) // 2
        partials = [np.float32(partials[t] + partials[t + half]) for t in range(half)]
    return partials[0]


def flip_share(roundings: float, elements: int) -> float:
    """The share of bfloat16 stores that `roundings` float32 roundings may flip, five deviations above the mean.

    A value flips where it lies within its error, roundings * 2^-24, of a midpoint; midpoints are at least 2^-8 apart,
    both relative to the value. So the mean is at most 2 * roundings * 2^-16 of the elements.
    """
    mean = 2 * roundings * 2.0**-16 * elements
    return (mean + 5 * math.sqrt(mean)) / elements


def f32_inverse_rms(row, eps, mean=True):
    """1 / sqrt(mean or sum of squares + eps) of one row of float32 scalars, each operation rounded."""
    total = tree256([v * v for v in row])
    return np.float32(1) / np.sqrt((total / np.float32(len(row)) if mean else total) + np.float32(eps))
