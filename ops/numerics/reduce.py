"""Float32 sums, dot products and matrix products in a declared order, vectorised over everything but the order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .fma import fma_f32
from .orders import Order

_TILE = 1 << 16  # float32 numbers that stay in cache


def ordered_sum(x: np.ndarray, order: Order) -> np.ndarray:
    """sum_k x[..., k] in float32, in `order`: [..., K] -> [...]; each addition rounds. An empty sum is +0."""
    if not x.size:
        return np.zeros(x.shape[:-1], np.float32)
    rows = x.reshape(-1, x.shape[-1])
    if order.layout(x.shape[-1])[1] == 1:
        return _running(rows).reshape(x.shape[:-1])
    steps = _steps(rows, order)
    partial = np.zeros(steps.shape[1:], np.float32)
    for step in steps:
        partial += step
    return _join(partial, order).reshape(x.shape[:-1])


def _running(rows: np.ndarray) -> np.ndarray:
    """One accumulator a row: NumPy's running sum is sequential by definition; + 0 as if it had started there."""
    total, height = np.empty(len(rows), np.float32), max(1, _TILE // rows.shape[1])
    for m in range(0, len(rows), height):
        total[m : m + height] = np.add.accumulate(rows[m : m + height], axis=1, dtype=np.float32)[:, -1]
    return total + np.float32(0)


def ordered_dot(a: np.ndarray, b: np.ndarray, order: Order, fused: bool) -> np.ndarray:
    """sum_k a[..., k] * b[..., k] in float32, in `order`; a, b broadcast together.

    fused: each accumulation is one fma; otherwise the product rounds, then the sum.
    """
    a, b = np.broadcast_arrays(a, b)
    if not fused or not a.size:
        return ordered_sum(a * b, order)
    left, right = (_steps(v.reshape(-1, v.shape[-1]), order) for v in (a, b))
    partial = np.zeros(left.shape[1:], np.float32)
    for x, y in zip(left, right):
        partial = fma_f32(x, y, partial)
    return _join(partial, order).reshape(a.shape[:-1])


def ordered_matmul(a: np.ndarray, b_t: np.ndarray, order: Order, fused: bool, load: Callable) -> np.ndarray:
    """out[m, n] = sum_k a[m, k] * b_t[n, k] in float32, each sum in `order`.

    a: float32 [M, K]. b_t: [N, K] in any storage dtype; `load` widens it a tile at a time.
    """
    (rows, length), columns = a.shape, b_t.shape[0]
    out = np.zeros((rows, columns), np.float32)
    if not out.size or not length:
        return out
    left = _steps(a, order)[:, :, None, :]
    lanes = left.shape[-1]
    width = max(1, min(columns, _TILE // lanes))
    height = max(1, _TILE // (width * lanes))
    for n in range(0, columns, width):
        block = load(b_t[n : n + width])
        right = _steps(block, order)[:, None, :, :]
        exact = _exact_steps(left[:, :, 0], block) if fused else np.ones(left.shape[:2], np.bool_)
        plain = exact.all(axis=0)
        for chosen in (np.flatnonzero(plain), np.flatnonzero(~plain)):
            for m in range(0, len(chosen), height):
                some = chosen[m : m + height]
                part = left[:, some[0] : some[0] + len(some)] if some[-1] - some[0] < len(some) else left[:, some]
                out[some, n : n + width] = _join(_accumulated(part, right, exact[:, some].all(axis=1)), order)
    return out


def _accumulated(left: np.ndarray, right: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The running sums of left * right over the first axis, from +0: product and sum of a step that is exact, one fma
    of another."""
    total = np.zeros(np.broadcast_shapes(left.shape[1:], right.shape[1:]), np.float32)
    product = np.empty_like(total)
    for x, y, plain in zip(left, right, exact.tolist()):
        if plain:
            np.multiply(x, y, out=product)
            total += product
        else:
            total = fma_f32(x, y, total)
    return total


def _steps(x: np.ndarray, order: Order) -> np.ndarray:
    """[R, K] -> [S, R, L]: what each of the L lanes of each row adds in step s."""
    rows, length = x.shape
    steps, lanes, vector = order.layout(length)
    if (pad := steps * lanes * vector - length) > 0:
        x = np.concatenate([x, np.zeros((rows, pad), x.dtype)], axis=1)
    if vector == 1:
        x = x.reshape(rows, steps, lanes).transpose(1, 0, 2)
        return np.ascontiguousarray(x) if lanes < 16 else x
    return np.ascontiguousarray(x.reshape(rows, steps, lanes, vector).transpose(1, 3, 0, 2)).reshape(-1, rows, lanes)


def _join(partial: np.ndarray, order: Order) -> np.ndarray:
    """[..., L] -> [...]: the stages of the order, one after the other."""
    for how, group in order.join:
        lead, lanes = partial.shape[:-1], partial.shape[-1]
        group = min(group or lanes, lanes)
        partial = _JOINS[how](partial.reshape(*lead, lanes // group, group))
    return partial[..., 0]


def _join_sequential(partial: np.ndarray) -> np.ndarray:
    total = partial[..., 0].copy()
    for lane in range(1, partial.shape[-1]):
        total += partial[..., lane]
    return total


def _join_tree(partial: np.ndarray) -> np.ndarray:
    partial = partial.copy()
    span = 1 << (partial.shape[-1] - 1).bit_length() >> 1
    while span:
        pairs = partial.shape[-1] - span if partial.shape[-1] > span else 0
        partial[..., :pairs] += partial[..., span : span + pairs]
        partial = partial[..., :span]
        span >>= 1
    return partial[..., 0]


def _join_pairwise(partial: np.ndarray) -> np.ndarray:
    while (lanes := partial.shape[-1]) > 1:
        even, odd = partial[..., 0::2], partial[..., 1::2]
        partial = even.copy()
        partial[..., : lanes // 2] += odd
    return partial[..., 0]


_JOINS = {"sequential": _join_sequential, "tree": _join_tree, "pairwise": _join_pairwise}


def _exact_steps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """For which steps and rows of a [S, R, L] every finite product with a number of b is a float32: then an fma is a
    product and a sum.

    Operands that came from 16 bits or fewer have few significant bits, and where these make at most 24 together, and
    the products neither overflow nor fall under 2^-126, nothing is left to round. What is not finite needs no rounding.
    """
    (bits, small, large), (more, least, most) = _extent(a, -1), _extent(b, None)
    if bits + more > 24:
        return np.zeros(a.shape[:-1], np.bool_)
    return (large * float(most) < 2.0**127) & (small * float(least) >= 2.0**-126)


def _extent(v: np.ndarray, axis: int | None) -> tuple[int, np.ndarray, np.ndarray]:
    """The most significant bits that a number of v can have; along an axis, or all, the least and the largest finite
    magnitude in float64, zeros aside: infinity and 0 where there is none."""
    v = np.ascontiguousarray(v)
    fraction = int(np.bitwise_or.reduce(v.view(np.uint32), axis=None)) & 0x7F_FFFF | 0x80_0000
    size = np.abs(v)
    usable = (size > 0) & (size < np.inf)
    small, large = size.min(axis, initial=np.inf, where=usable), size.max(axis, initial=0, where=usable)
    return 25 - (fraction & -fraction).bit_length(), small.astype(np.float64), large.astype(np.float64)
