"""Ops whose rows stand alone, evaluated some rows at a time: temporaries stay small, and every core gets a piece.

Because a row's result depends on that row only, the pieces' bytes are those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .contract import Contract, Tensor
from .numerics import parallel

_ELEMENTS = 1 << 19
"""Elements of the largest argument in one piece: in smaller ones the interpreter's lock and fresh pages cost more."""


def evaluate(contract: Contract, body: Callable, nx, arguments: Mapping[str, object]):
    """body(nx, **arguments), cut along the axis `contract.rows` where there is enough of it."""
    axes = {} if contract.rows is None else _axes_of_rows(contract, arguments)
    count = next((arguments[name].shape[axis] for name, axis in axes.items()), 0)
    size = max((arguments[name].size for name in axes), default=0)
    step = max(1, count * _ELEMENTS // size) if size else count
    if count <= step:
        return body(nx, **arguments)

    def piece(start: int):
        rows = slice(start, min(start + step, count))
        cut = {name: _take(arguments[name], axis, rows) for name, axis in axes.items()}
        return body(nx, **{**arguments, **cut})

    first = piece(0)
    several = isinstance(first, tuple)
    specs = list(contract.returns.values())
    targets = []
    for spec, result in zip(specs, first if several else (first,)):
        axis = _axis(spec.shape, contract.rows, result.ndim)
        shape = (*result.shape[:axis], count, *result.shape[axis + 1 :])
        targets.append((axis, np.empty_like(result, shape=shape)))

    def fill(start: int, results) -> None:
        for (axis, target), result in zip(targets, results if several else (results,)):
            _take(target, axis, slice(start, start + step), copy=False)[...] = result

    fill(0, first)
    parallel(lambda start: fill(start, piece(start)), range(step, count, step), work=size)
    whole = tuple(target for _, target in targets)
    return whole if several else whole[0]


def _axes_of_rows(contract: Contract, arguments: Mapping[str, object]) -> dict[str, int]:
    """The axis along which each tensor is cut, for those that have rows; none where the rows are a single one."""
    axes = {}
    for name, spec in contract.args.items():
        value = arguments[name]
        if isinstance(spec, Tensor) and value is not None:
            axis = _axis(spec.shape, contract.rows, value.ndim)
            if axis is not None:
                axes[name] = axis
    return axes


def _axis(shape: str, rows: str, ndim: int) -> int | None:
    """Where `rows` stands in a tensor of this shape text; "..." is its first axis, if it has leading ones."""
    tokens = shape.split()
    if rows not in tokens or (rows == "..." and ndim < len(tokens)):
        return None
    return 0 if rows == "..." else ndim - len(tokens) + tokens.index(rows)


def _take(array: np.ndarray, axis: int, rows: slice, copy: bool = True) -> np.ndarray:
    part = array[(slice(None),) * axis + (rows,)]
    return np.ascontiguousarray(part) if copy and axis else part
