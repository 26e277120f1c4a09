"""Norms and SiLU-and-mul that quantise, on a GPU: launchers of cuda/norm_quant.cu, or of two kernels in a row.

The fused kernels are for bfloat16 rows of up to 8192 elements that 16-byte loads may touch; elsewhere the norm writes
its result to scratch memory, from which the quantiser reads it. The bytes are the same, by the ops' definition.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from vtlab.ops import providers

from .early import EARLY
from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, map_rows, results, start
from .norm import rms_norm, rms_norm_gated
from .quant_fp8 import (
    CODES,
    FEW_ROWS,
    FEW_VECTORS,
    LONGEST,
    NAN_CODES,
    ROW_BLOCK,
    RULES,
    SCALES,
    TEAM,
    divider,
    fits_lanes,
    floored_codes,
    lane_shift,
    start_rows,
    start_warps,
    static_codes,
    steps,
    token_codes,
    whole_vectors,
    with_scales,
)
from .rings import ring
from .runtime import current
from .scratch import scratch

_GEMMA, _NATIVE = 1, 2
_DEPTH, _GROUP_DEPTH, _KEPT_DEPTH, _GATED_DEPTH = 2, 2, 4, 4
_WARP, _BLOCK5, _HALF3, _BLOCK_GROUP = 32, 5120, 3072, 64
"""The longest rows of the block5 and half3 kernels; the least group of kernels with a row a block or team."""
_RULE, _INT8, _SHIFT, _LEAST_SHIFT, _CODES = 4, 6, 7, 4, 16
"""Where a kernel's own arguments say how codes are rounded, whether they are of int8, and how wide groups are; the
least that a ring takes, and the codes that its threads store at once."""
_RING_ROWS = 512
"""Rows that are too few for a ring."""
_BLOCK, _STATIC_BLOCK = 64, 128
"""Threads of a block of SiLU, as silu_group_bf16_deep knows: small ones share a multiprocessor; of static codes."""
_KEPT_BLOCK = 32
"""And of one of silu_group_kept_bf16_deep."""
_FOUR, _FEW_GROUPS, _FEW_BLOCK = 4, 1 << 14, 128
"""Elements a lane of silu_group_few, the vectors under which it is taken, and its blocks' threads."""
_ALONE, _ALONE_GROUPS = 128, 264
"""The groups of silu_group_alone, and how many are too many."""
_FEW_ELEMENTS = 1 << 16
"""Under this an element a thread and access: it is the functions' own latency that takes the time."""
_DYNAMIC_NORM = {"vt": "vt", "vllm": "vllm_native", "vllm_native": "vllm_native"}
_BF16 = np.dtype(ml_dtypes.bfloat16)


def _scratch(shape, dtype):
    """An array in scratch memory, for what passes between two kernels of one op."""
    return scratch.array("norm_quant between", shape, dtype)


def _normed(op, mode, x, weight, residual, eps, flags, codes, residual_out, extra) -> bool:
    """Launch the fused kernel of `mode` and say whether there is one for these operands."""
    bf16 = all(array is None or kind(array) == KINDS["bfloat16"] for array in (x, weight, residual))
    width = x.shape[-1]
    if not bf16 or not 0 < width <= LONGEST or width % VECTOR or (mode == "static" and flags & _NATIVE):
        return False
    x, rows, stride = as_rows(op, "x", x)
    residual_stride = width
    if residual is not None:
        residual, _, residual_stride = as_rows(op, "residual", residual)
    operands = ((x, stride), (weight, width), (residual, residual_stride), (residual_out, width))
    if not whole_vectors(width, codes, *operands):
        return False
    if rows:
        args = [rows, width, x, stride, weight, residual, residual_stride, residual_out, np.float32(eps), flags, *extra]
        kernel = f"{mode}_{'alone' if residual is None else 'add'}"
        alone = rows > FEW_ROWS and residual is None and width > VECTOR * _WARP
        whole = current().pointer(codes) % _CODES == 0 and (mode != "group" or extra[_SHIFT] >= _LEAST_SHIFT)
        quick = mode != "static" and not extra[_INT8] and extra[_RULE] != RULES["vllm_native"]
        made = ring(rows, width) if alone and rows > _RING_ROWS and whole and quick else None
        if made is not None:
            made.start(op, "norm_quant", kernel, [*args, made.blocks])
        elif alone and mode != "group" and width <= _BLOCK5 and not extra[_INT8]:
            start(op, "norm_quant", f"{kernel}_block5", rows, (128, 1), args)
        elif rows > FEW_ROWS and residual is not None and VECTOR * _WARP < width <= _HALF3:
            start(op, "norm_quant", f"{kernel}_half3", rows, (128, 1), args)
        else:
            form = "block4" if rows > FEW_ROWS and residual is not None else "few4"
            start_rows(op, "norm_quant", kernel, rows, width, args, form, TEAM)
    return True


def _apart(x, weight, residual, eps, gemma, rounding, residual_out):
    """y of the norm in scratch memory, the new residual in its place."""
    y = _scratch(x.shape, x.dtype)
    out = y if residual is None else (y, residual_out)
    rms_norm(x, weight, residual=residual, eps=eps, gemma=gemma, rounding=rounding, out=out)
    return y


def _new(residual):
    """The form of a new residual, where there is one."""
    return [] if residual is None else [(residual.shape, residual.dtype)]


@providers.provider("rms_norm_quant_fp8", "cuda", PROVIDER)
def rms_norm_quant_fp8(x, weight, scale, *, residual=None, eps=1e-6, gemma=False, rounding="vt", out=None):
    """oracle.norm_quant.rms_norm_quant_fp8."""
    op = "rms_norm_quant_fp8"
    written = results(op, out, (x, weight, scale, residual), (x.shape, CODES), *_new(residual))
    target, residual_out = written[0], written[1] if residual is not None else None
    native = rounding == "vllm_native" or (rounding == "vllm" and (gemma or weight.dtype != x.dtype))
    nan = NAN_CODES[rounding]
    extra = [scale, None, target, None, RULES[rounding], nan, 0, 0, 0, 0]
    flags = _GEMMA * gemma + _NATIVE * native
    if not _normed(op, "static", x, weight, residual, eps, flags, target, residual_out, extra):
        static_codes(op, _apart(x, weight, residual, eps, gemma, rounding, residual_out), scale, nan, target)
    return target if residual is None else written


@providers.provider("rms_norm_gated_quant_fp8", "cuda", PROVIDER)
def rms_norm_gated_quant_fp8(x, gate, weight, scale, *, eps=1e-6, sigmoid_gate=False, out=None):
    """oracle.norm_quant.rms_norm_gated_quant_fp8."""
    op, width, nan = "rms_norm_gated_quant_fp8", x.shape[-1], NAN_CODES["vt"]
    (target,) = results(op, out, (x, gate, weight, scale), (x.shape, CODES))
    gate, rows, gate_stride = as_rows(op, "gate", gate)
    shift = (-(-width // VECTOR) - 1).bit_length()
    wide = 2 * VECTOR <= width <= 32 * VECTOR and whole_vectors(
        width, target, (x, width), (gate, gate_stride), (weight, width)
    )
    if wide and all(kind(array) == KINDS["bfloat16"] for array in (x, gate, weight)):
        deep = rows << shift >= FEW_VECTORS and 1 << shift >= _GATED_DEPTH
        teams = -(-rows // _GATED_DEPTH) if deep else rows
        args = [
            rows, width, x, weight, gate, gate_stride, np.float32(eps), int(sigmoid_gate), scale, target, shift,
        ]  # fmt: skip
        kernel = "gated_rows" + "_deep" * deep
        start(op, "norm_quant", kernel, -(-(teams << shift) // ROW_BLOCK), (ROW_BLOCK, 1), args)
        return target
    y = _scratch(x.shape, _BF16)
    rms_norm_gated(x, gate, weight, eps=eps, sigmoid_gate=sigmoid_gate, out_dtype=_BF16, out=y)
    static_codes(op, y, scale, nan, target)
    return target


@providers.provider("rms_norm_dynamic_per_token_quant", "cuda", PROVIDER)
def rms_norm_dynamic_per_token_quant(
    x, weight, *, residual=None, scale_ub=None, eps=1e-6, quant_dtype=ml_dtypes.float8_e4m3fn, rounding="vt", out=None
):
    """oracle.norm_quant.rms_norm_dynamic_per_token_quant."""
    op, int8 = "rms_norm_dynamic_per_token_quant", np.dtype(quant_dtype) == np.int8
    forms = (x.shape, np.dtype(np.int8) if int8 else CODES), ((*x.shape[:-1], 1), SCALES)
    written = results(op, out, (x, weight, residual, scale_ub), *forms, *_new(residual))
    target, scale = written[:2]
    residual_out = written[2] if residual is not None else None
    norm = _DYNAMIC_NORM[rounding]
    extra = [None, scale_ub, target, scale, RULES[rounding], NAN_CODES[rounding], int(int8), 0, 0, 0]
    if not _normed(op, "token", x, weight, residual, eps, _NATIVE * (norm != "vt"), target, residual_out, extra):
        y = _apart(x, weight, residual, eps, False, norm, residual_out)
        token_codes(op, y, scale_ub, rounding, int8, target, scale)
    return written


@providers.provider("rms_norm_per_block_quant", "cuda", PROVIDER)
def rms_norm_per_block_quant(
    x, weight, *, residual=None, eps=1e-6, group_size=128, scale_ub=None, column_major=False, rounding="vt", out=None
):
    """oracle.norm_quant.rms_norm_per_block_quant."""
    op = "rms_norm_per_block_quant"
    shape = (*x.shape[:-1], -(-x.shape[-1] // group_size))
    inputs = (x, weight, residual, scale_ub)
    (target, *rest), scale = with_scales(op, out, inputs, (x.shape, CODES), shape, column_major, _new(residual))
    residual_out = rest[0] if rest else None
    norm, fused = _DYNAMIC_NORM[rounding], False
    if fits_lanes(group_size) and group_size >= _BLOCK_GROUP and scale.size:
        extra = [None, scale_ub, target, scale, RULES[rounding], NAN_CODES[rounding], 0, lane_shift(group_size)]
        extra += steps(op, scale)
        fused = _normed(op, "group", x, weight, residual, eps, _NATIVE * (norm != "vt"), target, residual_out, extra)
    if not fused:
        y = _apart(x, weight, residual, eps, False, norm, residual_out)
        floored_codes(op, y, group_size, scale_ub, rounding, target, scale)
    return (target, scale, *rest)


@providers.provider("silu_and_mul_quant", "cuda", PROVIDER)
def silu_and_mul_quant(x, scale, *, rounding="vt", out=None):
    """oracle.norm_quant.silu_and_mul_quant."""
    op, half = "silu_and_mul_quant", x.shape[-1] // 2
    (target,) = results(op, out, (x, scale), ((*x.shape[:-1], half), CODES))
    rows, rounded = math.prod(x.shape[:-1]), rounding != "vt"
    wide, count = rows * half >= _FEW_ELEMENTS and whole_vectors(half, target, (x, 2 * half)), rows * half // VECTOR
    if wide and kind(x) == KINDS["bfloat16"] and count < 2**31:
        kernel = f"silu_static{'_rounded' * rounded}_bf16{EARLY}"
        args = [rows, half // VECTOR, x, scale, target, NAN_CODES[rounding], *divider(half // VECTOR)]
        start(op, "norm_quant", kernel, -(-count // (_STATIC_BLOCK * _DEPTH)), (_STATIC_BLOCK, 1), args)
    else:
        args = [x, kind(x), scale, target, NAN_CODES[rounding], int(rounded)]
        map_rows(op, "norm_quant", "silu_static", rows, half, wide, args, _DEPTH)
    return target


@providers.provider("silu_and_mul_per_block_quant", "cuda", PROVIDER)
def silu_and_mul_per_block_quant(x, *, group_size=128, scale_ub=None, column_major=False, rounding="vt", out=None):
    """oracle.norm_quant.silu_and_mul_per_block_quant."""
    op, half = "silu_and_mul_per_block_quant", x.shape[-1] // 2
    shape = (*x.shape[:-1], -(-half // group_size))
    (target,), scale = with_scales(op, out, (x, scale_ub), ((*x.shape[:-1], half), CODES), shape, column_major)
    rows = math.prod(x.shape[:-1])
    if not rows or not half:
        return target, scale
    row_step, group_step = steps(op, scale)
    group_size = min(group_size, half)
    args = [
        rows, half, x, kind(x), group_size, scale_ub, target, scale, row_step, group_step, RULES[rounding],
        NAN_CODES[rounding],
    ]  # fmt: skip
    count = rows * half // VECTOR
    whole = half % group_size == 0 and fits_lanes(group_size) and count < 2**31
    if whole and whole_vectors(half, target, (x, 2 * half)):
        kernel, depth, block = "silu_group_v8", 1, _BLOCK
        if kind(x) == KINDS["bfloat16"]:
            kernel = "silu_group_kept_bf16" if rounding == "vllm" else "silu_group_bf16"
            deep = _KEPT_DEPTH if rounding == "vllm" else _GROUP_DEPTH
            if count >= FEW_VECTORS and group_size >= deep * VECTOR:
                kernel, depth = f"{kernel}_deep", deep
                block = _KEPT_BLOCK if rounding == "vllm" else _BLOCK
            kernel += EARLY
        if group_size == _ALONE and rows * half < _ALONE * _ALONE_GROUPS and kind(x) == KINDS["bfloat16"]:
            args += [lane_shift(group_size), *divider(half // _ALONE)]
            start(op, "norm_quant", "silu_group_alone" + EARLY, rows * half // _ALONE, (_ALONE, 1), args)
        elif count < _FEW_GROUPS and kind(x) == KINDS["bfloat16"] and group_size <= _FOUR * _WARP:
            args += [lane_shift(group_size) + 1, *divider(half // _FOUR)]
            start(op, "norm_quant", "silu_group_few" + EARLY, -(-2 * count // _FEW_BLOCK), (_FEW_BLOCK, 1), args)
        else:
            args += [lane_shift(group_size), *divider(half // VECTOR)]
            start(op, "norm_quant", kernel, -(-count // (block * depth)), (block, 1), args)
    else:
        start_warps(op, "norm_quant", "silu_group_any", rows, half, group_size, args)
    return target, scale
