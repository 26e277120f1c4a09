"""A quantised matrix, and the linear that is made of some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import numpy as np

from vtlab import ops
from vtlab.ops.errors import ContractError

from ..linear import Buffer, Linear
from .stored import Part, Site, Stored

_NO_DTYPE = np.dtype(np.float32)
Room = Callable[[str, tuple[int, ...], np.dtype], object]
"""(which result on the way, shape, dtype) -> where to put it, or None for new memory."""


def new_memory(which: str, shape: tuple[int, ...], dtype) -> None:
    """Room that an op takes by itself."""


def together(*targets):
    """Several `out` as one, or None."""
    return None if targets[0] is None else targets


@dataclass(frozen=True, eq=False)
class Matrix:
    """W [rows, columns] in one format: what a file holds, as its op reads it."""

    @property
    def rows(self) -> int:
        raise NotImplementedError

    @property
    def columns(self) -> int:
        raise NotImplementedError

    def multiply(self, x, out=None, room: Room = new_memory):
        """x W^T in x's dtype, bfloat16 or float16; room : for x quantised."""
        raise NotImplementedError

    def expanded(self) -> np.ndarray:
        """W in the dtype that it was made for; activations that meet it are not quantised."""
        raise NotImplementedError

    def joins(self, other: Self) -> bool:
        """Whether the other's rows may lie below these in one matrix with the same products."""
        return False

    @classmethod
    def stacked(cls, parts: Sequence[Self]) -> Self:
        """The parts below each other."""
        raise NotImplementedError

    def ready(self) -> Self:
        """In the layout of its op, once no more rows join."""
        return self

    def mapped(self, function: Callable[[np.ndarray], object]) -> Self:
        """The same matrix with every array replaced by function(array)."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(array) for name, array in held.items() if hasattr(array, "strides")})


@dataclass(frozen=True, eq=False)
class InRows(Matrix):
    """A matrix whose `weight` has a row for each of W's, `held` values an item."""

    held: ClassVar[int] = 1

    weight: np.ndarray

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        return self.held * self.weight.shape[1]


class Scheme:
    """How one tool's settings store a linear.

    activations : whether its products quantise what they are given. packed : whether an op multiplies what is stored;
    else the matrix is expanded. ops : those that multiply it. dtypes : of what they multiply.
    """

    activations: ClassVar[bool] = False
    packed: ClassVar[bool] = True
    ops: ClassVar[tuple[str, ...]] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    def stored(self, site: Site) -> Mapping[str, Stored]:
        """Its tensors by what follows its name. Errors: FormatError for a shape that the format does not have."""
        raise NotImplementedError

    def matrix(self, part: Part, dtype: np.dtype) -> Matrix:
        """Errors: FormatError for values that contradict the settings, or mean nothing."""
        raise NotImplementedError


def joined(parts: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """Neighbours that may share a matrix in one, the others as they are."""
    runs: list[list[Matrix]] = []
    for part in parts:
        if runs and type(runs[-1][0]) is type(part) and runs[-1][0].joins(part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return tuple((run[0] if len(run) == 1 else type(run[0]).stacked(run)).ready() for run in runs)


@dataclass(frozen=True, eq=False)
class QuantLinear(Linear):
    """y = x W^T + b, W's parts (q, k and v; gate and up) quantised, one below the other.

    weight : its parts. bias : [N] in the model's dtype, or None. compute : that dtype, bfloat16 or float16.
    """

    weight: tuple[Matrix, ...] = ()
    bias: np.ndarray | None = None
    compute: np.dtype = _NO_DTYPE

    @property
    def out_features(self) -> int:
        return sum(part.rows for part in self.weight)

    @property
    def in_features(self) -> int:
        return self.weight[0].columns

    @property
    def dtype(self) -> np.dtype:
        return self.compute

    def apply(self, x, buffer: Buffer, join: Callable = ops.add):
        """x W^T + b in x's dtype.

        Rounding points: the product, and the sum with a bias, as vLLM adds it behind these products.
        """
        if self.bias is None:
            return self.multiplied(x, x.dtype, buffer("", x.dtype), buffer)
        product = self.multiplied(x, x.dtype, buffer("product", x.dtype), buffer)
        return join(product, self.bias, out=buffer("", x.dtype))

    def multiplied(self, x, dtype, out=None, buffer: Buffer | None = None):
        """x W^T, every part by the product of its format."""
        if dtype != x.dtype:
            raise ContractError("quant_linear", "dtype", dtype, f"{x.dtype}, that of x")
        room = new_memory if buffer is None else lambda which, shape, dtype: buffer(which, dtype, shape)
        if len(self.weight) == 1:
            return self.weight[0].multiply(x, out, room)
        out = np.empty((x.shape[0], self.out_features), dtype) if out is None else out
        column = 0
        for part in self.weight:
            beside = room(f"part at {column}", (x.shape[0], part.rows), dtype)
            out[:, column : column + part.rows] = part.multiply(x, beside, room)
            column += part.rows
        return out

    def lookup(self, ids, out=None):
        raise ContractError("lookup", "weight", "a quantised matrix", "an embedding in the model's dtype")

    def mapped(self, function: Callable[[np.ndarray], object]) -> QuantLinear:
        parts = tuple(part.mapped(function) for part in self.weight)
        return replace(self, weight=parts, bias=None if self.bias is None else function(self.bias))
