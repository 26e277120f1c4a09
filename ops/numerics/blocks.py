"""Long element-wise formulas run block by block, so that their intermediate arrays stay in cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import numpy as np

BLOCK = 1 << 13


def elementwise(compute: Callable) -> Callable:
    """compute(flat block) -> block of the same dtype, as a function of arrays of any shape; no warnings leave it."""

    @wraps(compute)
    def call(x) -> np.ndarray:
        x = np.asarray(x)
        flat, out = np.ascontiguousarray(x).reshape(-1), np.empty(x.size, x.dtype)
        with np.errstate(all="ignore"):
            for start in range(0, flat.size, BLOCK):
                out[start : start + BLOCK] = compute(flat[start : start + BLOCK])
        return out.reshape(x.shape)

    return call
