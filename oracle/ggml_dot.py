"""Dot products of blocks in ggml's order: integers within a block are exact, float32 roundings stand between blocks.

Each function takes the integer sums of every pair of blocks and the scales, block after block along the first axis, and
returns the finished sums. One body serves rows against rows and all against all: what differs is how shapes broadcast.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vtlab.ops.numerics.arithmetic import Mirror

from .ggml_blocks import Parts, blocks_of, take_apart

LANES = 8
_IN_LANES = ("Q3_K", "Q4_K", "Q5_K", "Q6_K")


class OneSum(Mirror):
    """The mirror of kernels that add up a block of 256 in integers, whole, before its one term is scaled.

    ggml's C code keeps eight float32 sums for Q3_K ... Q6_K; integers do not need them, and the terms are an eighth.
    """

    name = "MIRROR, each block of 256 one term: Q3_K and Q6_K as the i-quants, Q4_K and Q5_K as Q2_K"


ONE_SUM = OneSum()


def lanes_of(quant_type: str, nx=None) -> int:
    """How many sums run beside each other: element k of a block belongs to lane k % 8, or all to one."""
    return LANES if quant_type in _IN_LANES and nx is not ONE_SUM else 1


class Sums(NamedTuple):
    """What meets in one product, by block: `integers` int64 [blocks, lanes, ...], scales float32 [blocks, ...].

    w_min : what the minimum is scaled by, and a_sum what it meets: Q8_1's stored sum, or an integer sum of codes.
    """

    integers: np.ndarray
    w_d: np.ndarray
    a_d: np.ndarray
    w_min: np.ndarray | None
    a_sum: np.ndarray | None


def _running(nx, terms, shape) -> np.ndarray:
    """+0 and the terms, one after the other."""
    total = np.zeros(shape, nx.dtype)
    for term in terms:
        total = nx.add(total, term)
    return total


def _codes_first(nx, s: Sums):
    """Q4_0: (sumi * dw) * da."""
    for i, dw, da in zip(s.integers[:, 0], s.w_d, s.a_d):
        yield nx.mul(nx.mul(nx.load(i), nx.load(dw)), nx.load(da))


def _scales_first(nx, s: Sums):
    """Q5_0, Q8_0 and the i-quants: sumi * (dw * da)."""
    for i, dw, da in zip(s.integers[:, 0], s.w_d, s.a_d):
        yield nx.mul(nx.load(i), nx.mul(nx.load(dw), nx.load(da)))


def _with_minimum(nx, s: Sums):
    """Q4_1 and Q5_1: (dw * da) * sumi - (-m) * s, with Q8_1's s; Q2_K: (da * dw) * isum - (da * dmin) * summs."""
    integer = s.a_sum.dtype.kind == "i"
    for i, dw, da, dmin, total in zip(s.integers[:, 0], s.w_d, s.a_d, s.w_min, s.a_sum):
        low = nx.mul(nx.load(da), nx.load(dmin)) if integer else nx.load(dmin)
        yield nx.sub(nx.mul(nx.mul(nx.load(dw), nx.load(da)), nx.load(i)), nx.mul(low, nx.load(total)))


def _in_lanes(nx, s: Sums, shape):
    """Q3_K ... Q6_K: eight running sums of (dw * da) * lane; minimums run by themselves, and the lanes join them."""
    lanes = np.zeros((LANES, *shape), nx.dtype)
    low = np.zeros(shape, nx.dtype)
    for b, i in enumerate(s.integers):
        lanes = nx.add(lanes, nx.mul(nx.mul(nx.load(s.w_d[b]), nx.load(s.a_d[b])), nx.load(i)))
        if s.w_min is not None:
            low = nx.sub(low, nx.mul(nx.mul(nx.load(s.w_min[b]), nx.load(s.a_d[b])), nx.load(s.a_sum[b])))
    total = low
    for lane in lanes:
        total = nx.add(total, lane)
    return total


class Factor(NamedTuple):
    """One side of a product: integers float64 [blocks, lanes, rows, elements of a lane], scales by [blocks, rows].

    low : float64 [blocks, rows, sums], the integers that the minimums are summed over: sub-block minimums of a weight,
    sums of 16 codes of an activation; or Q8_1's stored sums [blocks, rows]. Products of these integers are exact.
    """

    lanes: np.ndarray
    d: np.ndarray
    low: np.ndarray | None
    dmin: np.ndarray | None = None
    fold: float = 1.0


def _by_lane(q: np.ndarray, lanes: int) -> np.ndarray:
    rows, blocks, elements = q.shape
    return np.ascontiguousarray(q.reshape(rows, blocks, elements // lanes, lanes).transpose(1, 3, 0, 2), np.float64)


def _by_block(field: np.ndarray | None) -> np.ndarray | None:
    return None if field is None else np.ascontiguousarray(field.swapaxes(0, 1))


def weight(rows: np.ndarray, quant_type: str, nx=None) -> Factor:
    """uint8 [N, bytes] of a weight, as it meets in `nx`; its sub-block scales are multiplied into the codes."""
    parts: Parts = take_apart(rows, quant_type)
    q = parts.q
    if parts.s is not None:
        q = (q.reshape(*parts.s.shape, -1) * parts.s[..., None]).reshape(q.shape)
    low = None
    if parts.m is not None:
        low = _by_block(np.repeat(parts.m, 16 // parts.m.shape[2], axis=2)).astype(np.float64)
    return Factor(_by_lane(q, lanes_of(quant_type, nx)), _by_block(parts.d), low, _by_block(parts.dmin), parts.fold)


def activation(rows: np.ndarray, activation_type: str, lanes: int) -> Factor:
    """uint8 [M, bytes] of a quantised activation."""
    blocks = blocks_of(rows, activation_type)
    low = None
    if activation_type == "Q8_1":
        low = _by_block(blocks["s"].astype(np.float32))
    elif activation_type == "Q8_K":
        low = _by_block(blocks["bsums"]).astype(np.float64)
    return Factor(_by_lane(blocks["qs"], lanes), _by_block(blocks["d"].astype(np.float32)), low)


def products(nx, w: Factor, a: Factor, quant_type: str) -> np.ndarray:
    """[M, N] in the compute dtype: every row of a by every row of w."""
    integers = np.matmul(a.lanes, w.lanes.swapaxes(2, 3)).astype(np.int64)
    total = a.low
    if w.dmin is not None:
        total = a.low[:, :, None] if w.low is None else np.matmul(a.low, w.low.swapaxes(1, 2)).astype(np.int64)
    shape = integers.shape[2:]
    return _finish(nx, Sums(integers, w.d[:, None], a.d[:, :, None], _row(w.dmin), total), w, shape, quant_type)


def pairs(nx, w: Factor, a: Factor, quant_type: str) -> np.ndarray:
    """[R] in the compute dtype: row r of a by row r of w."""
    integers = np.einsum("blrk,blrk->blr", a.lanes, w.lanes).astype(np.int64)
    total = a.low
    if w.low is not None:
        total = np.einsum("brk,brk->br", a.low, w.low).astype(np.int64)
    return _finish(nx, Sums(integers, w.d, a.d, w.dmin, total), w, integers.shape[2:], quant_type)


def _row(field: np.ndarray | None) -> np.ndarray | None:
    return None if field is None else field[:, None]


def _finish(nx, s: Sums, w: Factor, shape, quant_type: str) -> np.ndarray:
    if lanes_of(quant_type, nx) == LANES:
        return _in_lanes(nx, s, shape)
    terms = _codes_first if quant_type == "Q4_0" else _scales_first if s.w_min is None else _with_minimum
    return nx.mul(_running(nx, terms(nx, s), shape), w.fold)
