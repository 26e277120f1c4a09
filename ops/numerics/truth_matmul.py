"""A float64 matrix product over weights that stay in their storage dtype."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_TILE = 1 << 15  # weights widened at a time: 256 KiB of float64


def blocked_matmul(a: np.ndarray, b_t: np.ndarray, load: Callable) -> np.ndarray:
    """a @ b_t.T in float64 BLAS. a: float64 [M, K]; b_t: [N, K] in any storage dtype, widened a tile at a time."""
    out = np.empty((a.shape[0], b_t.shape[0]))
    width = max(1, _TILE * max(1, a.shape[0] // 8) // max(1, a.shape[1]))
    for n in range(0, b_t.shape[0], width):
        np.matmul(a, load(b_t[n : n + width]).T, out=out[:, n : n + width])
    return out
