"""Sums, scalings, casts and activations, and the embedding gather."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .launch import KINDS, Kernels, contiguous, delivered, provider, results, rows_of
from .threads import split

K = Kernels("elementwise")
_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
_CHUNK = 2048


def _limits(rows: int, width: int, alone: bool) -> tuple[int, int, int]:
    """(rows, width, chunks a row) of what a kernel sees: one long row where nothing separates the rows."""
    if alone:
        rows, width = 1, rows * width
    return rows, width, -(-width // _CHUNK)


def _unary(op, x, out, dtype, what, point=0, a=0.0):
    made = results(op, out, (x.shape, dtype))
    alone = x.flags.c_contiguous
    source, rows, stride = (x, 1, 0) if alone else rows_of(x)
    rows, width, chunks = _limits(rows, x.size if alone else x.shape[-1], alone)
    split(
        K.unary, rows * chunks, rows * width * 8, source, stride, made[0], KINDS[x.dtype], KINDS[made[0].dtype], width,
        chunks, what, point, a,
    )  # fmt: skip
    return delivered(out, made)


@provider("relu")
def relu(x, *, out=None):
    """oracle.activation.relu."""
    return _unary("relu", x, out, x.dtype, 1)


@provider("mul_scalar")
def mul_scalar(x, scale, *, out=None):
    """oracle.elementwise.mul_scalar."""
    return _unary("mul_scalar", x, out, x.dtype, 2, a=scale)


@provider("soft_cap")
def soft_cap(x, cap, *, rounding="vt", out=None):
    """oracle.activation.soft_cap."""
    return _unary("soft_cap", x, out, x.dtype, 3, 0 if rounding == "vt" else KINDS[x.dtype], cap)


@provider("cast_bf16")
def cast_bf16(x, *, out=None):
    """oracle.elementwise.cast_bf16."""
    return _unary("cast_bf16", x, out, _BFLOAT16, 0)


@provider("cast_f32")
def cast_f32(x, *, out=None):
    """oracle.elementwise.cast_f32."""
    return _unary("cast_f32", x, out, _FLOAT32, 0)


def _binary(op, form, x, y, out, dtype, what, point=0, act_point=0, a=0.0, b=0.0, c=0.0, y_first=0):
    """f(x, y) for x, y = (array, stride) over rows of form[-1] elements; a stride of None: all is contiguous."""
    made = results(op, out, (form, dtype))
    target, alone = made[0], x[1] is None
    width = form[-1] if form else 1
    rows, width, chunks = _limits(target.size // width if width else 0, width, alone)
    split(
        K.binary, rows * chunks, rows * width * 16, x[0], x[1] or 0, y[0], y_first, y[1] or 0, target,
        KINDS[x[0].dtype], KINDS[y[0].dtype], KINDS[target.dtype], width, chunks, what, point, act_point, a, b, c,
    )  # fmt: skip
    return delivered(out, made)


@provider("add")
def add(a, b, *, out=None):
    """oracle.elementwise.add."""
    if b.shape == a.shape:
        return _binary("add", a.shape, (a, None), (b, None), out, a.dtype, 0)
    return _binary("add", a.shape, (a, a.shape[-1]), (b, 0), out, a.dtype, 0)


@provider("mul_col_vec_f32")
def mul_col_vec_f32(x, col, *, out=None):
    """oracle.elementwise.mul_col_vec_f32."""
    rows, _, stride = rows_of(x)
    return _binary("mul_col_vec_f32", x.shape, (rows, stride), (col, 0), out, _FLOAT32, 1)


def _halves(op, x, out, what, point=0, act_point=0, a=0.0, b=0.0, c=0.0):
    """An activation of the first half of each row, times the second."""
    width = x.shape[-1] // 2
    sides = (x, 2 * width), (x, 2 * width)
    return _binary(op, (*x.shape[:-1], width), *sides, out, x.dtype, what, point, act_point, a, b, c, y_first=width)


@provider("silu_and_mul")
def silu_and_mul(x, *, rounding="vt", out=None):
    """oracle.activation.silu_and_mul."""
    return _halves("silu_and_mul", x, out, 2, act_point=0 if rounding == "vt" else KINDS[x.dtype])


def silu_and_mul_unrounded(x):
    """silu(gate) * up in float32."""
    width = x.shape[-1] // 2
    sides = (x, 2 * width), (x, 2 * width)
    return _binary("silu_and_mul", (*x.shape[:-1], width), *sides, None, _FLOAT32, 2, y_first=width)


@provider("gelu_and_mul")
def gelu_and_mul(x, *, rounding="vt", out=None):
    """oracle.activation.gelu_and_mul."""
    return _halves("gelu_and_mul", x, out, 3, act_point=0 if rounding == "vt" else KINDS[x.dtype])


@provider("silu_and_mul_clamp")
def silu_and_mul_clamp(x, *, limit, alpha=1.0, beta=0.0, rounding="vt", out=None):
    """oracle.activation.silu_and_mul_clamp."""
    kind = KINDS[x.dtype]
    points = kind if rounding == "vllm_native" else 0, 0 if rounding == "vt" else kind
    return _halves("silu_and_mul_clamp", x, out, 4, *points, limit, alpha, beta)


@provider("moe_silu_mul")
def moe_silu_mul(gate, up, *, out=None):
    """oracle.activation.moe_silu_mul."""
    return _binary("moe_silu_mul", gate.shape, (gate, None), (up, None), out, gate.dtype, 2)


@provider("sigmoid_gate_bf16")
def sigmoid_gate_bf16(attn, gate, *, rounding="vt", out=None):
    """oracle.gates.sigmoid_gate_bf16."""
    vt = rounding == "vt"
    dtype, point = (_BFLOAT16, 0) if vt else (attn.dtype, KINDS[attn.dtype])
    return _binary("sigmoid_gate_bf16", attn.shape, (attn, None), (gate, None), out, dtype, 5, act_point=point)


@provider("embedding")
def embedding(table, ids, *, out_dtype=None, out=None):
    """oracle.elementwise.embedding."""
    count, width = len(ids), table.shape[1]
    made = results("embedding", out, ((count, width), out_dtype or table.dtype))
    ids = contiguous(ids)
    if width:
        split(
            K.gather, count, count * width * 4, table, KINDS[table.dtype], ids, ids.dtype.itemsize == 8, made[0],
            KINDS[made[0].dtype], width, table.dtype.itemsize,
        )  # fmt: skip
    return delivered(out, made)
