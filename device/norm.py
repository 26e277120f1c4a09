"""Norms on a GPU: picks the kernel of cuda/norm.cu that suits the shape; all of them give the mirror's bytes."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers

from .launch import PROVIDER, VECTOR, as_rows, kind, results, start, vectors

_FEW_ROWS = 1024
"""Up to here a block a row is faster than a warp a row, which leaves multiprocessors without enough loads."""
_STASH = 48 << 10  # bytes of shared memory that need no opting in
_GEMMA, _NATIVE = 1, 2


def _lanes(width: int, item: int) -> tuple[int, int] | None:
    """(lanes a row, rows a block) of the *_rows kernels, or None where not even one row fits."""
    lanes = 8 if width <= 64 else 16 if width <= 128 else 32
    rows = 128 // lanes
    while rows * width * item > _STASH and rows * lanes > 32:
        rows //= 2
    return (lanes, rows) if rows * width * item <= _STASH else None


def _start_rows(op: str, kernel: str, plan: tuple[int, int], item: int, args: list, *more) -> None:
    (lanes, per_block), rows, width = plan, args[0], args[1]
    grid = -(-rows // per_block)
    start(op, "norm", kernel, grid, (lanes * per_block, 1), [*args, lanes, *more], per_block * width * item)


@providers.provider("rms_norm", "cuda", PROVIDER)
def rms_norm(x, weight, *, residual=None, eps=1e-6, gemma=False, rounding="vt", out=None):
    """oracle.norm.rms_norm: one block a row for few rows, one warp a row for many, 256 scalar lanes for the rest."""
    forms = [(x.shape, x.dtype)] + ([] if residual is None else [(residual.shape, residual.dtype)])
    written = results("rms_norm", out, (x, weight, residual), *forms)
    x, rows, x_stride = as_rows("rms_norm", "x", x)
    width, item = x.shape[-1], x.dtype.itemsize
    residual_stride, residual_kind = width, 0
    if residual is not None:
        residual, _, residual_stride = as_rows("rms_norm", "residual", residual)
        residual_kind = kind(residual)
    native = rounding == "vllm_native" or (rounding == "vllm" and (gemma or weight.dtype != x.dtype))
    residual_out = written[1] if residual is not None else None
    args = [
        rows, width, x, x_stride, kind(x), weight, kind(weight), residual, residual_stride, residual_kind,
        residual_out, written[0], np.float32(eps), _GEMMA * gemma + _NATIVE * native,
    ]  # fmt: skip
    operands = ((x, x_stride), (weight, width), (residual, residual_stride), (residual_out, width), (written[0], width))
    if rows and width:
        if not vectors(width, *operands):
            start("rms_norm", "norm", "rms_norm_any", rows, (256, 1), args)
        elif rows <= _FEW_ROWS and 512 <= width <= 1024 * VECTOR:
            threads = max(256, -(-width // (32 * VECTOR)) * 32)
            start("rms_norm", "norm", "rms_norm_block", rows, (threads, 1), args, 4 * (width + 256))
        elif plan := _lanes(width, item):
            # The row can wait in x's dtype unless what is normalised is a sum that is no value of that dtype.
            stashed = residual is None or (residual.dtype == x.dtype and not native)
            _start_rows("rms_norm", "rms_norm_rows", plan, item, args, int(stashed))
        else:
            start("rms_norm", "norm", "rms_norm_any", rows, (256, 1), args)
    return written[0] if residual is None else written


def _gated(op, x, weight, gate, eps, sigmoid, out_dtype, out):
    (target,) = results(op, out, (x, weight, gate), (x.shape, np.dtype(out_dtype or x.dtype)))
    x, rows, x_stride = as_rows(op, "x", x)
    width, item = x.shape[-1], x.dtype.itemsize
    gate_stride, gate_kind, weight_kind = width, 0, 0
    if gate is not None:
        gate, _, gate_stride = as_rows(op, "gate", gate)
        gate_kind, weight_kind = kind(gate), kind(weight)
    args = [
        rows, width, x, x_stride, kind(x), weight, weight_kind, gate, gate_stride, gate_kind, target, kind(target),
        np.float32(eps), int(sigmoid),
    ]  # fmt: skip
    plan = _lanes(width, item)
    if rows and width:
        if plan and vectors(width, (x, x_stride), (weight, width), (gate, gate_stride), (target, width)):
            _start_rows(op, "gated_norm_rows", plan, item, args)
        else:
            start(op, "norm", "gated_norm_any", rows, (256, 1), args)
    return target


@providers.provider("rms_norm_gated", "cuda", PROVIDER)
def rms_norm_gated(x, gate, weight, *, eps=1e-6, sigmoid_gate=False, out_dtype=None, out=None):
    """oracle.norm.rms_norm_gated."""
    return _gated("rms_norm_gated", x, weight, gate, eps, sigmoid_gate, out_dtype, out)


@providers.provider("l2norm", "cuda", PROVIDER)
def l2norm(x, *, eps=1e-6, out_dtype=None, out=None):
    """oracle.norm.l2norm: the gated kernel without weight and gate."""
    return _gated("l2norm", x, None, None, eps, False, out_dtype, out)


@providers.provider("layer_norm", "cuda", PROVIDER)
def layer_norm(x, weight=None, bias=None, *, eps=1e-5, out=None):
    """oracle.norm.layer_norm."""
    (target,) = results("layer_norm", out, (x, weight, bias), (x.shape, x.dtype))
    x, rows, x_stride = as_rows("layer_norm", "x", x)
    width, item = x.shape[-1], x.dtype.itemsize
    weight_kind, bias_kind = (0 if value is None else kind(value) for value in (weight, bias))
    args = [
        rows, width, x, x_stride, kind(x), weight, weight_kind, bias, bias_kind, target, np.float32(eps),
    ]  # fmt: skip
    plan = _lanes(width, item)
    if rows:
        if plan and vectors(width, (x, x_stride), (weight, width), (bias, width), (target, width)):
            _start_rows("layer_norm", "layer_norm_rows", plan, item, args)
        else:
            start("layer_norm", "norm", "layer_norm_any", rows, (256, 1), args)
    return target
