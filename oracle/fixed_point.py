"""Sums of a softmax's weights: in float64 for TRUTH, and for MIRROR in fixed point, where no order can change them.

A weight is exp(l - max), in [0, 1]. In units of 2^-42 a float32 of 2^-18 or more is exact, and fewer than 2^21 weights
fit in 63 bits. Integers add up to the same sum in any order, so a GPU may cut a row as it likes, and add with atomics.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.numerics import MIRROR

UNIT = 2.0**-42
ORDER = "integers, in units of 2^-42: any"


def units(weights: np.ndarray) -> np.ndarray:
    """float32 weights in [0, 1] as int64 multiples of UNIT, to nearest even, but 1 at least where a weight is not 0."""
    return np.maximum(np.rint(weights / np.float64(UNIT)).astype(np.int64), weights > 0)


def total(nx, weights: np.ndarray) -> np.ndarray:
    """The sum over the last axis, which stays: rounded once from the exact sum of `units`, or float64 for TRUTH."""
    if nx is not MIRROR:
        return nx.sum(weights, keepdims=True)
    bad = np.isnan(weights).any(axis=-1, keepdims=True)
    counted = units(np.where(bad, np.float32(0), weights)).sum(axis=-1, keepdims=True)
    return np.where(bad, np.float32(np.nan), counted.astype(np.float32) * np.float32(UNIT))


def running_shares(weights: np.ndarray) -> np.ndarray:
    """round(c) / round(C), float32, for MIRROR's cumulative sums c of `units` along a row and their last, C."""
    bad = np.isnan(weights).any(axis=-1, keepdims=True)
    cumulative = units(np.where(bad, np.float32(1), weights)).cumsum(axis=-1).astype(np.float32)
    return np.where(bad, np.float32(np.nan), cumulative / cumulative[:, -1:])
