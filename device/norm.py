"""Norms on a GPU: picks the kernel of cuda/norm.cu that suits the shape; all of them give the mirror's bytes."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers

from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, results, start, vectors

_TEAM = 256
"""Threads of the declared order; each takes VECTOR neighbours at a time."""
_ROW_BLOCK = 128
_FEW_ROWS = 264
"""Up to here (two rows a multiprocessor of an H200) the weights are sent for together with the row."""
_WIDE = ("rms_norm_bf16", "rms_norm_add_bf16", "layer_norm_bf16")
"""The kernels that have forms for more than one load a thread."""
_TEAMED = ("rms_norm_bf16", "gated_norm_bf16", "l2norm_bf16")
"""The kernels that have forms for several narrow rows a team."""
_SEVERAL = ((4, "four", 1 << 18), (2, "two", 1 << 16))
"""(rows a team, form, lanes of work from which on)."""
_GEMMA, _NATIVE = 1, 2


def _all_bf16(*arrays) -> bool:
    """Whether all arrays that are there are bfloat16."""
    return all(array is None or kind(array) == KINDS["bfloat16"] for array in arrays)


def _start(op: str, kernel: str, special: str, wide: bool, args: list) -> None:
    """Launch the form of `kernel` that suits args = [rows, width, …].

    special: the kernel, or its form for the dtypes at hand. wide: 16-byte accesses are allowed.
    """
    rows, width = args[:2]
    if not rows or not width:
        return
    lanes = -(-width // VECTOR)
    if not wide or lanes > (4 if special in _WIDE else 1) * _TEAM:
        start(op, "norm", f"{kernel}_v{VECTOR if wide else 1}", rows, (_TEAM, 1), args)
    elif lanes <= 32:
        shift = (lanes - 1).bit_length()
        lanes = 1 << shift
        ways = _SEVERAL if special in _TEAMED else ()
        each, form = next(((each, form) for each, form, least in ways if rows * lanes >= least), (1, "rows"))
        if lanes < each:
            each, form = 1, "rows"
        blocks = -(-(-(-rows // each) * lanes) // _ROW_BLOCK)
        last = lanes if form == "rows" else shift
        start(op, "norm", f"{special}_{form}", blocks, (_ROW_BLOCK, 1), [*args, last])
    else:
        form = "block1" if lanes <= _TEAM else "few4" if rows <= _FEW_ROWS else "block4"
        start(op, "norm", f"{special}_{form}", rows, (min(_TEAM, -(-lanes // 32) * 32), 1), args)


@providers.provider("rms_norm", "cuda", PROVIDER)
def rms_norm(x, weight, *, residual=None, eps=1e-6, gemma=False, rounding="vt", out=None):
    """oracle.norm.rms_norm."""
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
    special = "rms_norm"
    if not native and _all_bf16(x, weight, residual):
        special = "rms_norm_bf16" if residual is None else "rms_norm_add_bf16"
    _start("rms_norm", "rms_norm", special, vectors(width, *operands), args)
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
    special = "gated_norm"
    if not sigmoid and _all_bf16(x, weight, gate, target):
        special = "l2norm_bf16" if gate is None else "gated_norm_bf16"
    _start(op, "gated_norm", special, wide, args)
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
    _start("layer_norm", "layer_norm", special, wide, args)
    return target
