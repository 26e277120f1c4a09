"""The rotation element by element in Python floats, and random caches for it: the second opinion of the rope checks."""

from __future__ import annotations

import numpy as np

from .scalar import draw, rounded


def table(rows, width, kind="float32", seed=5):
    """A cache of unit pairs [cos | sin] at random angles."""
    angle = np.random.Generator(np.random.PCG64(seed)).uniform(-9, 9, (rows, width // 2))
    return np.concatenate([np.cos(angle), np.sin(angle)], -1).astype(np.float32).astype(draw((1,), kind, 0).dtype)


def lanes(i, half, offset, is_neox):
    return (offset + i, offset + half + i) if is_neox else (offset + 2 * i, offset + 2 * i + 1)


def loop(x, cos_sin, *, is_neox=True, offset=0, inverse=False, product=None, step="float64"):
    """Rotate element by element; cos_sin(t, i) gives one pair's cosine and sine, `step` rounds every operation."""
    step_to = (lambda v: v) if step == "float64" else (lambda v: rounded(v, step))
    keep = (lambda v: v) if product is None else (lambda v: rounded(v, product))
    out = x.copy()
    half = cos_sin.half
    for t, h in np.ndindex(x.shape[:2]):
        for i in range(half):
            a, b = lanes(i, half, offset, is_neox)
            c, s = cos_sin(t, i)
            s = -s if inverse else s
            u, v = float(x[t, h, a]), float(x[t, h, b])
            ahead = step_to(keep(step_to(u * c)) - keep(step_to(v * s)))
            behind = step_to(keep(step_to(v * c)) + keep(step_to(u * s)))
            out[t, h, a], out[t, h, b] = (np.float32(rounded(y, x.dtype.name)) for y in (ahead, behind))
    return out


class Rows:
    """cos_sin of `loop`: pair i of token t from row rows(t, i) of a cache."""

    def __init__(self, cache, row):
        self.cache, self.row, self.half = cache, row, cache.shape[1] // 2

    def __call__(self, t, i):
        at = self.cache[self.row(t, i)]
        return float(at[i]), float(at[self.half + i])
