"""Matrices that stay in the blocks of their GGUF file, mapped into memory, from the file to the dot product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import as_strided

from vtlab import ops
from vtlab.ops.blocks import WEIGHT_TYPES, quant_traits
from vtlab.ops.errors import ContractError

from .linear import Linear

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Rows of a matrix in one block type: uint8 [N, bytes of a row]."""

    quant_type: str
    data: np.ndarray

    @property
    def values(self) -> int:
        """Values in a row."""
        traits = quant_traits(self.quant_type)
        return self.data.shape[1] // traits.nbytes * traits.elements


def joined(parts: Sequence[Blocks]) -> tuple[Blocks, ...]:
    """Neighbours of one type below each other in one array, where no copy of a mapped file is made for it.

    Parts that follow each other in memory are one view. Those of which one was copied already (its rows stand in
    another order than in the file) are copied together. What is left stays apart: a copy would cost its memory, and
    the pages of the file around it, which the system maps in larger pieces than are read, would cost theirs.
    """
    runs: list[list[Blocks]] = []
    for part in parts:
        if runs and runs[-1][0].quant_type == part.quant_type:
            runs[-1].append(part)
        else:
            runs.append([part])
    return tuple(whole for run in runs for whole in _one(run))


def _one(run: list[Blocks]) -> list[Blocks]:
    """Parts of one type, as one where that is free."""
    arrays = [part.data for part in run]
    if all(map(_follows, arrays, arrays[1:])):
        shape = sum(map(len, arrays)), arrays[0].shape[1]
        data = as_strided(arrays[0], shape, (shape[1], 1), writeable=False) if len(run) > 1 else arrays[0]
    elif any(array.flags.owndata for array in arrays):
        data = np.concatenate(arrays)
    else:
        return run
    return [Blocks(run[0].quant_type, data)]


def _follows(one: np.ndarray, two: np.ndarray) -> bool:
    """Whether two's bytes begin where one's end, both in one piece of the same memory."""
    begin, end = (array.__array_interface__["data"][0] for array in (one, two))
    return _root(one) is _root(two) and begin + one.nbytes == end and one.flags.c_contiguous and two.flags.c_contiguous


def _root(array: np.ndarray) -> object:
    """What owns the memory."""
    while isinstance(array, np.ndarray) and array.base is not None:
        array = array.base
    return array


@dataclass(frozen=True, eq=False)
class BlockLinear(Linear):
    """y = x W^T + b, W's parts (q, k and v; gate and up) in blocks, one below the other.

    weight : its parts. compute : the model's dtype, float32 or bfloat16, in which lookups come.
    """

    weight: tuple[Blocks, ...] = ()
    bias: np.ndarray | None = None
    compute: np.dtype = _FLOAT32

    @property
    def out_features(self) -> int:
        return sum(part.data.shape[0] for part in self.weight)

    @property
    def in_features(self) -> int:
        return self.weight[0].values

    @property
    def dtype(self) -> np.dtype:
        return self.compute

    def multiplied(self, x, dtype, out=None):
        """x W^T, every part by the product of its type."""
        if len(self.weight) == 1:
            (part,) = self.weight
            return ops.matmul_bt_quant(x, part.data, quant_type=part.quant_type, out_dtype=dtype, out=out)
        out = np.empty((x.shape[0], self.out_features), dtype) if out is None else out
        column = 0
        for part in self.weight:
            beside = out[:, column : column + part.data.shape[0]]
            ops.matmul_bt_quant(x, part.data, quant_type=part.quant_type, out_dtype=dtype, out=beside)
            column += part.data.shape[0]
        return out

    def lookup(self, ids, out=None):
        (part,) = self.weight
        return ops.embedding_quant(part.data, ids, quant_type=part.quant_type, out_dtype=self.compute, out=out)

    def mapped(self, function: Callable[[np.ndarray], object]) -> BlockLinear:
        parts = tuple(replace(part, data=function(part.data)) for part in self.weight)
        return replace(self, weight=parts, bias=None if self.bias is None else function(self.bias))


def stays(types: Sequence[str]) -> bool:
    """Whether a matrix of parts of these types is multiplied as it lies in its file."""
    return all(kind in WEIGHT_TYPES for kind in types)


def check_dtype(dtype: np.dtype) -> None:
    """Refuse the dtypes that products of blocks do not give."""
    if dtype.name not in ("float32", "bfloat16"):
        raise ContractError("load", "dtype", dtype, "float32 or bfloat16 for weights in blocks")


def gguf_quant_compute_available(device: str) -> bool:
    """Whether a device multiplies weights in GGML blocks."""
    return ops.providers.op_registered("matmul_bt_quant", device)
