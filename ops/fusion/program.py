"""Row programs: what a chain computes for one row, as straight-line code over numbers and rows of numbers.

A program is read off the oracle's bodies (trace.py). It is evaluated here, in either arithmetic, and printed as a
kernel by a device tier; both do the operations that the standalone ops do, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..numerics import Order
from ..nvfp4 import pack, positive_zeros, tile, tiled_shape

ONE, ROW, COLUMN, GROUP, ELEMENT = "one", "row", "column", "group", "element"
"""A node is one number of the call, or of each row, column, group of neighbours in a row, or element."""
E4M3, E2M1 = "float8_e4m3fn", "float4_e2m1fn"


@dataclass(frozen=True)
class Node:
    """One operation: `args` are numbers of earlier nodes. The ops are those of the arithmetic contexts, and:

    load : data = (operand, part); part 0 or 1 for the halves of a ``2*H`` operand.
    param, const, count : data = its name, the number in hexadecimal, the multiple of the row's width.
    round : stored as data = a dtype and loaded again.
    sum : over the row, in data = its order. max : over the row, and data = the number to start from.
    group_max : over each group of data = (its size, the number to start from).
    gt, lt, ge, le, eq, ne : comparisons, for `where`.
    """

    op: str
    args: tuple[int, ...]
    extent: str
    data: object = None


@dataclass(frozen=True)
class Source:
    """An operand: its extent, its width in rows' widths, its dtype."""

    name: str
    extent: str
    factor: int
    dtype: str


@dataclass(frozen=True)
class Target:
    """A result: node `node` stored once as `dtype`. nan: the results are codes of `dtype`, this one those of NaN.

    Codes of e2m1 stand two to a byte, without one for -0. tiled: the rows' scales stand in tiles (nvfp4.py).
    """

    slot: str
    node: int
    dtype: str
    extent: str
    nan: int | None = None
    tiled: bool = False

    def columns(self, width: int, group: int) -> int:
        """The numbers that a row has of it."""
        return {ELEMENT: width, GROUP: width // max(group, 1), ROW: 1}[self.extent]

    def shape(self, lead: tuple[int, ...], width: int, group: int) -> tuple[int, ...]:
        columns = self.columns(width, group)
        if self.tiled:
            return tiled_shape(math.prod(lead), columns)
        return (*lead, columns // 2 if self.dtype == E2M1 else columns)

    def stored(self, nx, value: np.ndarray) -> np.ndarray:
        """The numbers [..., columns] as the result holds them."""
        if self.dtype == E2M1:
            return pack(positive_zeros(nx.store(value, self.dtype, nan=6.0).view(np.uint8)))
        stored = nx.store(value, self.dtype)
        if self.nan is not None:
            stored = np.where(np.isnan(value), np.uint8(self.nan), stored.view(np.uint8))
        return tile(stored) if self.tiled else stored


_COMPARE = {"gt": np.greater, "lt": np.less, "ge": np.greater_equal, "le": np.less_equal, "eq": np.equal,
            "ne": np.not_equal}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """nodes in order, sources and targets. steps: the dtypes of every step's results. `str` tells programs apart."""

    nodes: tuple[Node, ...]
    sources: tuple[Source, ...]
    targets: tuple[Target, ...]
    params: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]

    @property
    def reductions(self) -> tuple[int, ...]:
        """The nodes that need a whole row."""
        return tuple(number for number, node in enumerate(self.nodes) if node.op in ("sum", "max"))

    @property
    def group(self) -> int:
        """The size of its groups, of which a row must hold whole ones; 0 where there are none."""
        return next((node.data[0] for node in self.nodes if node.op == "group_max"), 0)

    def rows_of(self, operands: Mapping[str, object]) -> tuple[tuple[int, ...], int]:
        """(the leading axes of the rows, their width)."""
        first = next(source for source in self.sources if source.extent == ELEMENT)
        *lead, width = operands[first.name].shape
        return tuple(lead), width // first.factor

    def __str__(self) -> str:
        lines = [f"%{i} = {node.op} {' '.join(f'%{a}' for a in node.args)} {node.data}" for i, node in
                 enumerate(self.nodes)]  # fmt: skip
        return "\n".join([*map(str, self.sources), *lines, *map(str, self.targets)])

    def evaluate(self, nx, operands: Mapping[str, np.ndarray], params: Mapping[str, float]) -> tuple[np.ndarray, ...]:
        """The targets in the arithmetic `nx`."""
        sources = {source.name: source for source in self.sources}
        lead, width = self.rows_of(operands)
        values: list[object] = []
        for node in self.nodes:
            values.append(_evaluate(nx, node, [values[a] for a in node.args], operands, sources, params, width))
        results = []
        for target in self.targets:
            shape = (*lead, target.columns(width, self.group))
            value = values[target.node]
            if target.extent == GROUP:
                value = value[..., :: self.group]
            results.append(target.stored(nx, np.ascontiguousarray(np.broadcast_to(value, shape))))
        return tuple(results)


def _evaluate(nx, node: Node, args: list, operands: Mapping, sources: Mapping, params: Mapping, width: int):
    if node.op == "load":
        name, part = node.data
        value = operands[name]
        if sources[name].factor > 1:
            value = value[..., part * width : (part + 1) * width]
        return nx.load(value)
    if node.op == "param":
        return float(params[node.data])
    if node.op == "const":
        return float.fromhex(node.data)
    if node.op == "count":
        return max(node.data * width, 1)
    if node.op == "round":
        return nx.load(nx.store(args[0], node.data))
    if node.op == "sum":
        return nx.sum(args[0], order=node.data, keepdims=True)
    if node.op == "max":
        return np.max(args[0], axis=-1, keepdims=True, initial=float.fromhex(node.data))
    if node.op == "group_max":
        size, start = node.data
        parts = args[0].reshape(*args[0].shape[:-1], -1, size)
        return np.repeat(np.max(parts, axis=-1, initial=float.fromhex(start)), size, axis=-1)
    if node.op in _COMPARE:
        return _COMPARE[node.op](*(nx.const(a) if isinstance(a, (int, float)) else a for a in args))
    return getattr(nx, node.op)(*args)


__all__ = ["COLUMN", "E2M1", "E4M3", "ELEMENT", "GROUP", "ONE", "ROW", "Node", "Order", "Program", "Source", "Target"]
