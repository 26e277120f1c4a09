"""Products of e4m3 operands in groups on a GPU: launchers of cuda/fp8_groups.cu. The mirror's bytes."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.dtypes import dtype

from .launch import MULTIPROCESSORS, PROVIDER, results, start
from .tiles import EXACT_SIDE, rows_of

_THREADS = 256
_SUMS = EXACT_SIDE * (EXACT_SIDE + 4) * 4
_BFLOAT16, _FLOAT32 = dtype("bfloat16"), dtype("float32")


def _tiles(matrices: int, rows: int, columns: int) -> int:
    return matrices * -(-rows // EXACT_SIDE) * -(-columns // EXACT_SIDE)


@providers.provider("k_grouped_fp8_gemm_tn", "cuda", PROVIDER)
def k_grouped_fp8_gemm_tn(a, scale_a, b, scale_b, ks, c=None, *, out=None):
    """oracle.fp8_groups.k_grouped_fp8_gemm_tn. Sizes are read on the device, and no row beyond K."""
    op, (depth, rows), columns = "k_grouped_fp8_gemm_tn", a.shape, b.shape[1]
    form = ((len(ks), rows, columns), _FLOAT32)
    (target,) = results(op, out, (a, scale_a, b, scale_b, ks, c), form)
    args = [rows, columns, depth, a, scale_a, b, scale_b, ks, c, target]
    start(op, "fp8_groups", "fp8_stretches", _tiles(len(ks), rows, columns), (_THREADS, 1), args)
    return target


@providers.provider("fp8_einsum", "cuda", PROVIDER)
def fp8_einsum(a, scale_a, b, scale_b, *, out=None):
    """oracle.fp8_groups.fp8_einsum."""
    op, (rows, heads, depth), columns = "fp8_einsum", a.shape, b.shape[1]
    (target,) = results(op, out, (a, scale_a, b, scale_b), ((rows, heads, columns), _BFLOAT16))
    grid = min(_tiles(heads, rows, columns), 16 * MULTIPROCESSORS)
    words = rows_of(a, a.strides[0]).words and a.strides[1] % 4 == 0 and rows_of(b, depth).words
    steps = [step // scale_a.itemsize for step in scale_a.strides]
    args = [
        grid, a, a.strides[0], a.strides[1], b, rows, columns, depth, heads, int(words), scale_a, *steps,
        int(scale_a.dtype != np.float32), scale_b, target,
    ]  # fmt: skip
    start(op, "fp8_groups", "fp8_heads", grid, (_THREADS, 1), args, _SUMS)
    return target
