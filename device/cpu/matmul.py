"""Matrix products in a CPU's own order: ascending k, product and sum rounded, no fused step."""

from __future__ import annotations

import numpy as np

from .elementwise import cast_f32
from .launch import KINDS, Kernels, delivered, provider, results
from .threads import split

K = Kernels("matmul")
_FLOAT32 = np.dtype(np.float32)


def product(a, b, transposed: bool, target) -> None:
    """target[M, N] = a[M, K] @ b, b [N, K] where `transposed` and [K, N] otherwise, rows of both possibly strided."""
    (rows, depth), columns = a.shape, target.shape[1]
    if a.dtype != _FLOAT32:
        a = cast_f32(a)
    split(
        K.matmul, -(-columns // (16 * K.PANELS)), (rows + 1) * depth * columns, a, a.strides[0] // 4, b,
        b.strides[0] // b.dtype.itemsize, KINDS[b.dtype], transposed, rows, depth, target, KINDS[target.dtype], columns,
        scratch=64 * K.PANELS * (K.DEPTH + rows) + 64,
    )  # fmt: skip


@provider("matmul_bt")
def matmul_bt(a, b, *, out_dtype=None, out=None):
    """oracle.matmul.matmul_bt, in this tier's order."""
    made = results("matmul_bt", out, ((a.shape[0], b.shape[0]), out_dtype or a.dtype))
    product(a, b, True, made[0])
    return delivered(out, made)


@provider("matmul")
def matmul(a, b, *, out_dtype=None, out=None):
    """oracle.matmul.matmul, in this tier's order."""
    made = results("matmul", out, ((a.shape[0], b.shape[1]), out_dtype or a.dtype))
    product(a, b, False, made[0])
    return delivered(out, made)


@provider("batched_matmul")
def batched_matmul(a, b, *, out_dtype=None, out=None):
    """oracle.matmul.batched_matmul, in this tier's order."""
    made = results("batched_matmul", out, ((*a.shape[:2], b.shape[2]), out_dtype or a.dtype))
    for left, right, target in zip(a, b, made[0]):
        product(left, right, False, target)
    return delivered(out, made)
