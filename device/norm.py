"""Norms on a GPU: picks the kernel of cuda/norm.cu that suits the shape; all of them give the mirror's bytes."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers

from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, results, start, vectors

_WIDE = 512
"""From here a block a row beats a warp a row, measured at 1 to 8192 rows of 5120."""
_FEW_ROWS = 1024
"""Up to here one 16-byte load a thread is faster, from here two, which leave room for more rows."""
_BLOCK_SHARED = 48 << 10  # bytes that a block gets without opting in
_SHARE = 24 << 10  # bytes for a block of the *_rows kernels, so that many blocks share a multiprocessor
_GEMMA, _NATIVE = 1, 2


def _all_bf16(*arrays) -> bool:
    """Whether all arrays that are there are bfloat16."""
    return all(array is None or kind(array) == KINDS["bfloat16"] for array in arrays)


def _start(op: str, kernel: str, special: str, wide: bool, row_bytes: int, args: list, block: bool = False) -> None:
    """Launch ``<special>_block``, ``<special>_rows`` or ``<kernel>_any`` over args = [rows, width, …].

    special: the kernel, or its form for the dtypes at hand. wide: 16-byte accesses are allowed. row_bytes: what a row
    stages in shared memory. block: the kernel has that form.
    """
    rows, width = args[:2]
    if not rows or not width:
        return
    lanes = 8 if width <= 64 else 16 if width <= 128 else 32
    per_warp = 32 // lanes
    if wide and block and _WIDE <= width <= 1024 * VECTOR:
        groups = 2 if rows > _FEW_ROWS and special == "layer_norm_bf16" else 1
        threads = max(256, -(-width // (32 * VECTOR * groups)) * 32)
        name = f"{special}_block{'2' * (groups == 2)}"
        start(op, "norm", name, rows, (threads, 1), args, 4 * (width + 256))
    elif wide and per_warp * row_bytes <= _BLOCK_SHARED:
        per_block = per_warp * max(1, min(4, _SHARE // (per_warp * row_bytes)))
        shared = per_block * row_bytes
        start(op, "norm", f"{special}_rows", -(-rows // per_block), (lanes * per_block, 1), [*args, lanes], shared)
    else:
        start(op, "norm", f"{kernel}_any", rows, (256, 1), args)


@providers.provider("rms_norm", "cuda", PROVIDER)
def rms_norm(x, weight, *, residual=None, eps=1e-6, gemma=False, rounding="vt", out=None):
    """oracle.norm.rms_norm: a block a wide row, a warp or less a narrow one, 256 scalar lanes for the rest."""
    forms = [(x.shape, x.dtype)] + ([] if residual is None else [(residual.shape, residual.dtype)])
    written = results("rms_norm", out, (x, weight, residual), *forms)
    x, rows, x_stride = as_rows("rms_norm", "x", x)
    width = x.shape[-1]
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
    row_bytes = width * (x.dtype.itemsize + (0 if residual is None else residual.dtype.itemsize))
    special = "rms_norm"
    if not native and _all_bf16(x, weight, residual):
        special = "rms_norm_bf16" if residual is None else "rms_norm_add_bf16"
    _start("rms_norm", "rms_norm", special, vectors(width, *operands), row_bytes, args, block=True)
    return written[0] if residual is None else written


def _gated(op, x, weight, gate, eps, sigmoid, out_dtype, out):
    (target,) = results(op, out, (x, weight, gate), (x.shape, np.dtype(out_dtype or x.dtype)))
    x, rows, x_stride = as_rows(op, "x", x)
    width = x.shape[-1]
    gate_stride, gate_kind, weight_kind = width, 0, 0
    if gate is not None:
        gate, _, gate_stride = as_rows(op, "gate", gate)
        gate_kind, weight_kind = kind(gate), kind(weight)
    args = [
        rows, width, x, x_stride, kind(x), weight, weight_kind, gate, gate_stride, gate_kind, target, kind(target),
        np.float32(eps), int(sigmoid),
    ]  # fmt: skip
    wide = vectors(width, (x, x_stride), (weight, width), (gate, gate_stride), (target, width))
    row_bytes = width * (x.dtype.itemsize + (0 if gate is None else gate.dtype.itemsize))
    special = "gated_norm"
    if not sigmoid and _all_bf16(x, weight, gate, target):
        special = "l2norm_bf16" if gate is None else "gated_norm_bf16"
    _start(op, "gated_norm", special, wide, row_bytes, args)
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
    width = x.shape[-1]
    weight_kind, bias_kind = (0 if value is None else kind(value) for value in (weight, bias))
    args = [rows, width, x, x_stride, kind(x), weight, weight_kind, bias, bias_kind, target, np.float32(eps)]
    wide = vectors(width, (x, x_stride), (weight, width), (bias, width), (target, width))
    known = weight is not None and bias is not None and _all_bf16(x, weight, bias)
    special = "layer_norm_bf16" if known else "layer_norm"
    _start("layer_norm", "layer_norm", special, wide, width * x.dtype.itemsize, args, block=True)
    return target
