"""8-bit products on a GPU: launchers of cuda/fp8_matmul.cu.

On Hopper, products of e4m3 codes that end in 16 bits run on tensor cores, whose sums have fewer bits than float32's.
What ends in float32 would show that, and is summed in the mirror's order. Sums of int8 are exact either way.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.dtypes import dtype

from .judged import judged_by_norm
from .launch import PROVIDER, kind, results, vectors
from .tiles import narrow_form, on_tensor_cores, rows_of, start_exact, start_loaded, start_narrow

_BFLOAT16, _FLOAT32 = dtype("bfloat16"), dtype("float32")
_WIDTHS = {"e4m3": (16, 32, 40, 48, 56, 64), "s8": (16, 32, 48, 64)}
"""Of narrow tiles, as in the .cu file."""


def ends_in_half(arguments) -> bool:
    """Whether a call's result would not show how its e4m3 products were summed."""
    return arguments["a"].dtype == np.uint8 and dtype(arguments["out_dtype"]) != _FLOAT32


for _op in ("matmul_fp8_cutlass", "matmul_fp8_cublaslt", "cutlass_scaled_mm"):
    judged_by_norm(_op, ends_in_half, coarse=True)


def _product(op, a, b, target, scaling: list, through_bf16: bool, corrections: list) -> None:
    """Fill `target` [M, N] with the scaled product of a [M, K] and the rows of b [N, K].

    scaling : scale_a, by row, scale_b, by column, alpha; corrections: azp, azp_adj, bias, its kind.
    """
    (rows, depth), columns = a.shape, b.shape[0]
    if not rows * columns:
        return
    left, right = rows_of(a, depth), rows_of(b, b.strides[0] if columns > 1 else depth)
    moves = vectors(columns, (target, columns))
    args = [
        a, left.stride, b, right.stride, rows, columns, depth, int(left.words and right.words), *scaling,
        int(through_bf16), *corrections, target, kind(target), int(moves),
    ]  # fmt: skip
    name = "s8" if a.dtype == np.int8 else "e4m3"
    shows = name == "e4m3" and target.dtype == _FLOAT32
    if depth and not shows and on_tensor_cores(left, right):
        operands = (a, rows, left.stride), (b, columns, right.stride)
        if narrow := narrow_form(rows, columns, _WIDTHS[name]):
            start_narrow(op, "fp8_matmul", f"narrow_{name}", *narrow, rows, columns, operands, args)
        else:
            start_loaded(op, "fp8_matmul", f"loaded_{name}", 1, rows, rows, columns, operands, args)
    else:
        start_exact(op, "fp8_matmul", f"exact_{name}", 1, rows, rows, columns, args)


def _with_alpha(op, a, b, alpha, out_dtype, out, through_bf16):
    (target,) = results(op, out, (a, b, alpha), ((a.shape[0], b.shape[0]), dtype(out_dtype)))
    _product(op, a, b, target, [None, 0, None, 0, alpha], through_bf16, [None, None, None, 0])
    return target


@providers.provider("matmul_fp8_cutlass", "cuda", PROVIDER)
def matmul_fp8_cutlass(a, b, alpha, *, out_dtype=_BFLOAT16, out=None):
    """oracle.fp8_matmul.matmul_fp8_cutlass."""
    return _with_alpha("matmul_fp8_cutlass", a, b, alpha, out_dtype, out, True)


@providers.provider("matmul_fp8_cublaslt", "cuda", PROVIDER)
def matmul_fp8_cublaslt(a, b, alpha, *, out_dtype=_BFLOAT16, out=None):
    """oracle.fp8_matmul.matmul_fp8_cublaslt."""
    return _with_alpha("matmul_fp8_cublaslt", a, b, alpha, out_dtype, out, False)


def _scaled(op, a, b, scale_a, scale_b, bias, out_dtype, out, azp_adj=None, azp=None):
    inputs = (a, b, scale_a, scale_b, bias, azp_adj, azp)
    (target,) = results(op, out, inputs, ((a.shape[0], b.shape[1]), dtype(out_dtype)))
    scaling = [scale_a, int(scale_a.size > 1), scale_b, int(scale_b.size > 1), None]
    corrections = [azp, azp_adj, bias, 0 if bias is None else kind(bias)]
    _product(op, a, b.T, target, scaling, False, corrections)
    return target


@providers.provider("cutlass_scaled_mm", "cuda", PROVIDER)
def cutlass_scaled_mm(a, b, scale_a, scale_b, *, bias=None, out_dtype=_BFLOAT16, out=None):
    """oracle.fp8_matmul.cutlass_scaled_mm."""
    return _scaled("cutlass_scaled_mm", a, b, scale_a, scale_b, bias, out_dtype, out)


@providers.provider("cutlass_scaled_mm_azp", "cuda", PROVIDER)
def cutlass_scaled_mm_azp(
    a, b, scale_a, scale_b, azp_adj, *, azp=None, bias=None, out_dtype=_BFLOAT16, out=None
):  # fmt: skip
    """oracle.fp8_matmul.cutlass_scaled_mm_azp."""
    return _scaled("cutlass_scaled_mm_azp", a, b, scale_a, scale_b, bias, out_dtype, out, azp_adj, azp)
