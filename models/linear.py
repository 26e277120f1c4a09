"""A matrix of a model: what its rows multiply, and what is looked up in them. Every product of a forward is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from vtlab import ops

Buffer = Callable[..., object]
"""(which result, dtype, its shape if that is not [T, N]) -> where to put it, or None for new memory."""
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, eq=False)
class Linear:
    """y = x W^T + b.

    weight : [N, K], its parts (q, k and v; gate and up) one below the other. bias : float32 [N] or None.
    """

    weight: np.ndarray
    bias: np.ndarray | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def dtype(self) -> np.dtype:
        return self.weight.dtype

    def apply(self, x, buffer: Buffer, join: Callable = ops.add):
        """x W^T + b in x's dtype.

        buffer : where to put results; "" is the last one.
        join : (product, bias, out) -> their sum, or what else is made of it.
        Rounding points: the result; with a bias of a bfloat16 model the sum is one of float32 numbers, as in the
        epilogue of a GEMM; with one of a float16 model the product is rounded before.
        """
        if self.bias is None:
            return self.multiplied(x, x.dtype, buffer("", x.dtype))
        wider = x.dtype.name == "bfloat16"
        dtype = _FLOAT32 if wider else x.dtype
        product = self.multiplied(x, dtype, buffer("product", dtype))
        joined = join(product, self.bias, out=buffer("sum" if wider else "", dtype))
        return ops.cast_bf16(joined, out=buffer("", x.dtype)) if wider else joined

    def multiplied(self, x, dtype, out=None):
        """x W^T in `dtype`."""
        return ops.matmul_bt(x, self.weight, out_dtype=dtype, out=out)

    def lookup(self, ids, out=None):
        """The rows of these ids, [T, K]."""
        return ops.embedding(self.weight, ids, out=out)

    def mapped(self, function: Callable[[np.ndarray], object]) -> Linear:
        """The same matrix with every array replaced by function(array)."""
        return replace(self, weight=function(self.weight), bias=None if self.bias is None else function(self.bias))
