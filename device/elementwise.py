"""Sums, scalings, casts and the embedding gather on a GPU: launchers of cuda/elementwise.cu."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .launch import PROVIDER, as_rows, kind, map_rows, results, start, vectors
from .runtime import current
from .scratch import scratch

_NONE_BAD = 2**63 - 1


@providers.provider("add", "cuda", PROVIDER)
def add(a, b, *, out=None):
    """oracle.elementwise.add: b of a's shape, or one row."""
    (target,) = results("add", out, (a, b), (a.shape, a.dtype))
    if b.shape == a.shape:
        rows, width = 1, math.prod(a.shape)
        b_stride = width
    else:
        rows, width, b_stride = math.prod(a.shape[:-1]), a.shape[-1], 0
    wide = vectors(width, (a, width), (b, b_stride), (target, width))
    map_rows("add", "elementwise", "add", rows, width, wide, [a, kind(a), b, b_stride, kind(b), target])
    return target


@providers.provider("mul_scalar", "cuda", PROVIDER)
def mul_scalar(x, scale, *, out=None):
    """oracle.elementwise.mul_scalar; a scale beyond float32 is infinite, as there."""
    (target,) = results("mul_scalar", out, (x,), (x.shape, x.dtype))
    width = math.prod(x.shape)
    with np.errstate(over="ignore"):
        factor = np.float32(scale)
    wide = vectors(width, (x, width), (target, width))
    map_rows("mul_scalar", "elementwise", "mul_scalar", 1, width, wide, [x, kind(x), target, factor])
    return target


@providers.provider("mul_col_vec_f32", "cuda", PROVIDER)
def mul_col_vec_f32(x, col, *, out=None):
    """oracle.elementwise.mul_col_vec_f32."""
    (target,) = results("mul_col_vec_f32", out, (x, col), (x.shape, x.dtype))
    x, rows, stride = as_rows("mul_col_vec_f32", "x", x)
    width = x.shape[-1]
    wide = vectors(width, (x, stride), (col, width), (target, width))
    map_rows("mul_col_vec_f32", "elementwise", "mul_col_vec", rows, width, wide, [x, stride, col, target])
    return target


def _cast(op, x, dtype, out):
    (target,) = results(op, out, (x,), (x.shape, np.dtype(dtype)))
    x, rows, stride = as_rows(op, "x", x)
    width = x.shape[-1]
    if x.flags.c_contiguous:
        rows, width, stride = 1, rows * width, rows * width
    wide = vectors(width, (x, stride), (target, width))
    map_rows(op, "elementwise", op, rows, width, wide, [x, stride, target])
    return target


@providers.provider("cast_bf16", "cuda", PROVIDER)
def cast_bf16(x, *, out=None):
    """oracle.elementwise.cast_bf16."""
    return _cast("cast_bf16", x, ml_dtypes.bfloat16, out)


@providers.provider("cast_f32", "cuda", PROVIDER)
def cast_f32(x, *, out=None):
    """oracle.elementwise.cast_f32."""
    return _cast("cast_f32", x, np.float32, out)


@providers.provider("embedding", "cuda", PROVIDER)
def embedding(table, ids, *, out_dtype=None, out=None):
    """oracle.elementwise.embedding. A bad id is only known on the device.

    Without `out` the call waits for the device and raises ContractError naming the first bad id. With `out` it must
    not wait, so that it can be captured: the row of a bad id becomes NaN.
    """
    runtime = current()
    dtype = np.dtype(out_dtype or table.dtype)
    (target,) = results("embedding", out, (table, ids), ((len(ids), table.shape[-1]), dtype))
    entries, width = table.shape
    first_bad = None
    if out is None and len(ids) and width:
        first_bad = scratch.array("embedding", (1,), np.int64)
        start("embedding", "elementwise", "set_i64", 1, (1, 1), [first_bad, _NONE_BAD])
    wide = vectors(width, (table, width), (target, width))
    args = [table, kind(table), entries, ids, int(ids.dtype.itemsize == 8), target, kind(target), first_bad]
    map_rows("embedding", "elementwise", "embedding", len(ids), width, wide, args)
    if first_bad is not None and (at := int(runtime.read(first_bad)[0])) != _NONE_BAD:
        got = f"id {int(runtime.read(ids)[at])} at position {at}"
        raise ContractError("embedding", "ids", got, f"0 <= id < V = {entries}")
    return target
