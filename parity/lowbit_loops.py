"""A second opinion on low-bit weights: one long integer a column, loops over lanes, sums of exact products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup
from vtlab.oracle.lowbit import STORED_TWICE

from .compare import assert_bytes, assert_nmse
from .goldens import GoldenCase, op_cases
from .scalar import draw, floats, rounded

AWQ = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}


def codes(bits: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Random codes, the extremes among them."""
    q = np.random.Generator(np.random.PCG64([seed, bits, *shape])).integers(0, 1 << bits, shape).astype(np.int32)
    if q.size > 1:
        q.flat[0], q.flat[-1] = (1 << bits) - 1, 0
    return q


def words(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random 32-bit words."""
    rng = np.random.Generator(np.random.PCG64([seed, rows, columns]))
    return rng.integers(-(1 << 31), 1 << 31, (rows, columns)).astype(np.int32)


def scales(rows: int, columns: int, kind: str, seed: int = 0) -> np.ndarray:
    """Scales around 0.01."""
    return (np.abs(draw((rows, columns), "float32", seed, 0.01)) + np.float32(0.002)).astype(
        getattr(ml_dtypes, kind, kind)
    )


def stream(values: Iterable[int], bits: int) -> list[int]:
    """Signed 32-bit words of one long little-endian integer."""
    values = list(values)
    total = sum(int(value) << bits * i for i, value in enumerate(values))
    words = [total >> 32 * i & 0xFFFFFFFF for i in range(len(values) * bits // 32)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def values_of(words: Iterable[int], bits: int) -> list[int]:
    """The codes of a stream of words."""
    words = [int(word) & 0xFFFFFFFF for word in words]
    total = sum(word << 32 * i for i, word in enumerate(words))
    return [total >> bits * i & (1 << bits) - 1 for i in range(len(words) * 32 // bits)]


def packed(q: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The streams of all columns (axis 0) or rows (axis 1)."""
    lines = q.T if axis == 0 else q
    out = np.array([stream(line, bits) for line in lines.tolist()], np.int32).reshape(len(lines), -1)
    return np.ascontiguousarray(out.T) if axis == 0 else out


def unpacked(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The codes of `packed`."""
    lines = words.T if axis == 0 else words
    out = np.array([values_of(line, bits) for line in lines.tolist()], np.int32).reshape(len(lines), -1)
    return np.ascontiguousarray(out.T) if axis == 0 else out


def interleaved(q: np.ndarray, bits: int) -> np.ndarray:
    """AWQ's order of columns, from its table."""
    order, count = AWQ[bits], 32 // bits
    columns = [w * count + order[i] for w in range(q.shape[1] // count) for i in range(count)]
    return q[:, columns]


def weights(q, zero, scale, group_of: Sequence[int]) -> list[list[float]]:
    """rounded((q - zero) * scale) row by row; zero a table or one number."""
    kind = scale.dtype.name
    table = [floats(row) for row in scale]
    rows = []
    for k, row in enumerate(q.tolist()):
        g = group_of[k]
        zeros = [zero] * len(row) if isinstance(zero, int) else zero[g]
        rows.append([rounded((code - int(z)) * s, kind) for code, z, s in zip(row, zeros, table[g])])
    return rows


def as_array(rows, like) -> np.ndarray:
    """Numbers that are of the dtype already, as an array of it."""
    return np.array(rows, np.float32).astype(like.dtype)


def product(x: np.ndarray, w: Sequence[Sequence[float]], finish: Callable[[float, int, int], float]) -> np.ndarray:
    """finish(sum_k x w, m, n), the sum exact but for one rounding to float64."""
    columns = list(zip(*w))
    out = [[finish(math.fsum(a * b for a, b in zip(floats(row), column)), m, n) for n, column in enumerate(columns)]
           for m, row in enumerate(x)]  # fmt: skip
    return np.array(out, np.float32).reshape(len(x), len(columns)).astype(x.dtype)


def both(name: str, *args, **kwargs):
    """Truth's results, which the mirror's equal to the byte."""
    op = getattr(oracle, name)
    one, other = op(*args, **kwargs), op.mirror(*args, **kwargs)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (one, other)), strict=True):
        assert_bytes(b, a, name)
    return one


def _goldens(ops: Sequence[str], build: str | None) -> Iterator[GoldenCase]:
    """The cases of low-bit ops, each of which must have some."""
    for op in ops:
        cases = [*op_cases("wna16", op, build), *op_cases("w4a8_experts", op, build)]
        assert cases, op
        yield from cases


def same_as_goldens(*ops: str, build: str | None = None) -> None:
    """Every golden of these ops, of one build where it is named, to the byte."""
    for golden in _goldens(ops, build):
        results = lookup(golden.op)(**golden.call())
        results = results if isinstance(results, tuple) else (results,)
        for got, want in zip(results, golden.outputs.values(), strict=True):
            assert_bytes(got, want, str(golden))


def neighbours_of_goldens(*ops: str) -> None:
    """An H200's sums of K products, in an order of its own: at most one element in a hundred rounds to a neighbour."""
    for golden in _goldens(ops, "cuda"):
        got, want = lookup(golden.op)(**golden.call()), golden.outputs["out"]
        assert np.count_nonzero(got != want) <= max(1, got.size // 100), golden
        assert_nmse(got, want, float(ml_dtypes.finfo(want.dtype).eps) ** 2 / 100, str(golden))


def near_goldens(*ops: str) -> None:
    """An H200's sums that are rounded or cut on the way: as near as a second store to T would leave them."""
    for golden in _goldens(ops, "cuda"):
        assert_nmse(lookup(golden.op)(**golden.call()), golden.outputs["out"], STORED_TWICE.bound, str(golden))


def refuses(name: str, table: Sequence[tuple[str, Callable]]) -> None:
    """Each call is refused in the name of its argument."""
    for argument, call in table:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)
