"""FP8 quantisers of activations, alone and behind the norms and activations that feed them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from . import elementwise, norm
from .launch import KINDS, Kernels, delivered, provider, results, rows_of
from .threads import split

K = Kernels("quant")
_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
_CODES, _E4M3 = np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e4m3fn)
_FLOOR = float(np.float32(1 / (448 * 512)))
_NAN = {"vt": 0x7F, "vllm": 0x7E, "vllm_native": 0x7F}
_DYNAMIC_NORM = {"vt": "vt", "vllm": "vllm_native", "vllm_native": "vllm_native"}
_RECIPROCAL, _KEEP_NAN, _POWERS, _FLOOR_LAST, _ZERO_INVERSE = 1, 2, 4, 8, 16  # as the kernels number them


def _groups(x, codes, scale, group, *, size_bound=None, scale_bound=None, least=0.0, floor=_FLOOR, mode=0, nan=0x7F):
    """Codes [..., K] and scales [..., G] of groups of neighbours, into the arrays."""
    array, rows, stride = rows_of(x)
    width, groups = x.shape[-1], scale.shape[-1]
    if scale.flags.c_contiguous:
        steps = 1 << 32 | groups
    elif scale.ndim == 2:
        steps = scale.strides[1] // 4 << 32 | scale.strides[0] // 4
    else:  # column-major in each of several matrices
        for part in np.ndindex(scale.shape[:-2]):
            _groups(x[part], codes[part], scale[part], group, size_bound=size_bound, scale_bound=scale_bound,
                    least=least, floor=floor, mode=mode, nan=nan)  # fmt: skip
        return
    split(
        K.grouped, rows * groups, x.size * 16, array, stride, KINDS[x.dtype], codes, scale, size_bound, scale_bound,
        width, group, groups, steps, least, floor, nan << 8 | mode,
    )  # fmt: skip


def _static(x, scale, rounding, codes) -> None:
    x, rows, stride = rows_of(x)
    split(K.scaled, rows, x.size * 16, x, stride, KINDS[x.dtype], codes, scale, True, x.shape[-1], _NAN[rounding])


@provider("quant_fp8_static")
def quant_fp8_static(x, scale, *, rounding="vt", out=None):
    """oracle.quant_fp8.quant_fp8_static."""
    made = results("quant_fp8_static", out, (x.shape, _CODES))
    _static(x, scale, rounding, made[0])
    return delivered(out, made)


@provider("dynamic_scaled_fp8_quant")
def dynamic_scaled_fp8_quant(x, *, rounding="vt", out=None):
    """oracle.quant_fp8.dynamic_scaled_fp8_quant."""
    made = results("dynamic_scaled_fp8_quant", out, (x.shape, _CODES), ((1,), _FLOAT32))
    x, rows, stride = rows_of(x)
    sizes, inverse = results("", None, ((rows,), _FLOAT32), ((1,), _FLOAT32))
    native, kind, width = rounding == "vllm_native", KINDS[x.dtype], x.shape[-1]
    mode = _KEEP_NAN * native + _ZERO_INVERSE * (rounding == "vt")
    split(K.sizes, rows, x.size * 4, x, stride, kind, sizes, width, native)
    split(K.tensor_scale, 1, 1, sizes, made[1], inverse, rows, _FLOOR if native else 0.0, mode)
    split(K.scaled, rows, x.size * 16, x, stride, kind, made[0], inverse, False, width, _NAN[rounding])
    return delivered(out, made)


def _token(x, scale_ub, rounding, codes, scale) -> None:
    mode = _RECIPROCAL | _KEEP_NAN if rounding == "vllm_native" else 0
    _groups(x, codes, scale, max(x.shape[-1], 1), size_bound=scale_ub, mode=mode, nan=_NAN[rounding])


@provider("dynamic_per_token_scaled_fp8_quant")
def dynamic_per_token_scaled_fp8_quant(x, *, scale_ub=None, rounding="vt", out=None):
    """oracle.quant_fp8.dynamic_per_token_scaled_fp8_quant."""
    form = (*x.shape[:-1], 1), _FLOAT32
    made = results("dynamic_per_token_scaled_fp8_quant", out, (x.shape, _CODES), form)
    _token(x, scale_ub, rounding, *made)
    return delivered(out, made)


def _in_groups(op, out, shape, group_size, column_major, *more):
    """(codes, scales, what else there is) to write; fresh scales are column-major where that is asked for."""
    form = (*shape[:-1], -(-shape[-1] // group_size))
    if out is not None or not column_major or len(shape) < 2:
        return results(op, out, (shape, _CODES), (form, _FLOAT32), *more)
    swapped = (*form[:-2], form[-1], form[-2])
    codes, scale, *rest = results(op, None, (shape, _CODES), (swapped, _FLOAT32), *more)
    return codes, scale.swapaxes(-1, -2), *rest


@provider("per_token_group_quant_fp8")
def per_token_group_quant_fp8(
    x, *, group_size=128, eps=1e-10, ue8m0=False, column_major=False, rounding="vt", out=None
):  # fmt: skip
    """oracle.quant_fp8.per_token_group_quant_fp8."""
    made = _in_groups("per_token_group_quant_fp8", out, x.shape, group_size, column_major)
    if rounding == "vllm_native":
        options = {"mode": _KEEP_NAN | _FLOOR_LAST | _POWERS * bool(ue8m0)}
    else:
        options = {"least": eps, "floor": 1e-10 if ue8m0 else 0.0, "mode": _POWERS * bool(ue8m0)}
    _groups(x, *made, group_size, nan=0xFE if rounding == "vllm" else 0x7F, **options)
    return delivered(out, made)


def _normed(x, weight, residual, eps, gemma, rounding, made):
    """rms_norm's result, in memory of its own; the new residual, the last of `made`, is written."""
    options = {"eps": eps, "gemma": gemma, "rounding": rounding}
    if residual is None:
        return norm.rms_norm(x, weight, **options)
    (y,) = results("", None, (x.shape, x.dtype))
    norm.rms_norm(x, weight, residual=residual, out=(y, made[-1]), **options)
    return y


def _new(residual) -> tuple:
    return () if residual is None else ((residual.shape, residual.dtype),)


@provider("rms_norm_quant_fp8")
def rms_norm_quant_fp8(x, weight, scale, *, residual=None, eps=1e-6, gemma=False, rounding="vt", out=None):
    """oracle.norm_quant.rms_norm_quant_fp8."""
    made = results("rms_norm_quant_fp8", out, (x.shape, _CODES), *_new(residual))
    _static(_normed(x, weight, residual, eps, gemma, rounding, made), scale, rounding, made[0])
    return delivered(out, made)


@provider("rms_norm_gated_quant_fp8")
def rms_norm_gated_quant_fp8(x, gate, weight, scale, *, eps=1e-6, sigmoid_gate=False, out=None):
    """oracle.norm_quant.rms_norm_gated_quant_fp8."""
    made = results("rms_norm_gated_quant_fp8", out, (x.shape, _CODES))
    y = norm.rms_norm_gated(x, gate, weight, eps=eps, sigmoid_gate=sigmoid_gate, out_dtype=_BFLOAT16)
    _static(y, scale, "vt", made[0])
    return delivered(out, made)


@provider("rms_norm_dynamic_per_token_quant")
def rms_norm_dynamic_per_token_quant(
    x, weight, *, residual=None, scale_ub=None, eps=1e-6, quant_dtype=_E4M3, rounding="vt", out=None
):  # fmt: skip
    """oracle.norm_quant.rms_norm_dynamic_per_token_quant, but for int8."""
    if np.dtype(quant_dtype) == np.int8:
        return NotImplemented
    form = (*x.shape[:-1], 1), _FLOAT32
    made = results("rms_norm_dynamic_per_token_quant", out, (x.shape, _CODES), form, *_new(residual))
    y = _normed(x, weight, residual, eps, False, _DYNAMIC_NORM[rounding], made)
    _token(y, scale_ub, rounding, *made[:2])
    return delivered(out, made)


@provider("rms_norm_per_block_quant")
def rms_norm_per_block_quant(
    x, weight, *, residual=None, eps=1e-6, group_size=128, scale_ub=None, column_major=False, rounding="vt", out=None
):
    """oracle.norm_quant.rms_norm_per_block_quant."""
    made = _in_groups("rms_norm_per_block_quant", out, x.shape, group_size, column_major, *_new(residual))
    y = _normed(x, weight, residual, eps, False, _DYNAMIC_NORM[rounding], made)
    _groups(y, *made[:2], group_size, size_bound=scale_ub, nan=_NAN[rounding])
    return delivered(out, made)


@provider("silu_and_mul_quant")
def silu_and_mul_quant(x, scale, *, rounding="vt", out=None):
    """oracle.norm_quant.silu_and_mul_quant."""
    made = results("silu_and_mul_quant", out, ((*x.shape[:-1], x.shape[-1] // 2), _CODES))
    _static(elementwise.silu_and_mul(x, rounding=rounding), scale, rounding, made[0])
    return delivered(out, made)


@provider("silu_and_mul_per_block_quant")
def silu_and_mul_per_block_quant(
    x, *, group_size=128, scale_ub=None, column_major=False, rounding="vt", out=None
):  # fmt: skip
    """oracle.norm_quant.silu_and_mul_per_block_quant."""
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    made = _in_groups("silu_and_mul_per_block_quant", out, shape, group_size, column_major)
    y = elementwise.silu_and_mul_unrounded(x) if rounding == "vllm" else elementwise.silu_and_mul(x)
    _groups(y, *made, group_size, scale_bound=scale_ub, nan=_NAN[rounding])
    return delivered(out, made)
