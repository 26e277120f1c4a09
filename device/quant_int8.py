"""INT8 quantisers on a GPU: launchers of cuda/quant_int8.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers

from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, map_rows, results, start
from .quant_fp8 import (
    FEW_BLOCK,
    FEW_ROWS,
    FEW_VECTORS,
    LONGEST,
    SCALES,
    TEAM,
    fits_lanes,
    flat,
    lane_shift,
    start_rows,
    start_warps,
    whole_vectors,
)

RULES = {"cuda": 0, "cpu": 1, "triton_token": 2}
"""Whose roundings, as the kernels number them."""
_FAMILY = "quant_int8"
_CODES, _AZP = np.dtype(np.int8), np.dtype(np.int32)
_STATIC_DEPTH, _FEW_DEPTH, _TOKEN_DEPTH, _GROUP_DEPTH = 2, 2, 4, 4
_FLAT_BLOCK = 128
"""Threads of a block of rows that follow each other, as the kernels know."""


@providers.provider("static_scaled_int8_quant", "cuda", PROVIDER)
def static_scaled_int8_quant(x, scale, *, azp=None, rounding="cuda", out=None):
    """oracle.quant_int8.static_scaled_int8_quant."""
    op = "static_scaled_int8_quant"
    (target,) = results(op, out, (x, scale, azp), (x.shape, _CODES))
    x, rows, stride = as_rows(op, "x", x)
    wide = whole_vectors(x.shape[-1], target, (x, stride))
    rows, width, stride = flat(x, rows, stride)
    count = width // VECTOR
    if rows == 1 and wide and 0 < count < 2**31 and kind(x) == KINDS["bfloat16"] and rounding == "cuda":
        kernel, zero = ("int8_static_flat", []) if azp is None else ("int8_azp_flat", [azp])
        grid = -(-count // (_FLAT_BLOCK * _STATIC_DEPTH))
        start(op, _FAMILY, kernel, grid, (_FLAT_BLOCK, 1), [count, x, scale, *zero, target])
    else:
        args = [x, stride, kind(x), scale, azp, target, RULES[rounding]]
        map_rows(op, _FAMILY, "int8_static", rows, width, wide, args, _STATIC_DEPTH)
    return target


@providers.provider("dynamic_scaled_int8_quant", "cuda", PROVIDER)
def dynamic_scaled_int8_quant(x, *, symmetric=True, rounding="cuda", out=None):
    """oracle.quant_int8.dynamic_scaled_int8_quant."""
    op, shape = "dynamic_scaled_int8_quant", (*x.shape[:-1], 1)
    forms = [(x.shape, _CODES), (shape, SCALES), *([] if symmetric else [(shape, _AZP)])]
    target, scale, *azp = results(op, out, (x,), *forms)
    x, rows, stride = as_rows(op, "x", x)
    width = x.shape[-1]
    wide = whole_vectors(width, target, (x, stride))
    args = [rows, width, x, stride, kind(x), target, scale, azp[0] if azp else None, RULES[rounding]]
    kernel, lanes = "symmetric" if symmetric else "asymmetric", -(-width // VECTOR)
    if not wide or not 0 < width <= LONGEST or kind(x) != KINDS["bfloat16"]:
        start(op, _FAMILY, f"{kernel}_v{VECTOR if wide else 1}", rows, (TEAM, 1), args)
    else:
        threads = -(-lanes // (_FEW_DEPTH if rows <= FEW_ROWS else _TOKEN_DEPTH))
        start_rows(op, _FAMILY, kernel, rows, width, args, "block", -(-threads // 32) * 32)
    return (target, scale, *azp)


@providers.provider("per_token_group_quant_int8", "cuda", PROVIDER)
def per_token_group_quant_int8(x, *, group_size=128, eps=1e-10, out=None):
    """oracle.quant_int8.per_token_group_quant_int8."""
    op = "per_token_group_quant_int8"
    shape = (*x.shape[:-1], x.shape[-1] // group_size)
    target, scale = results(op, out, (x,), (x.shape, _CODES), (shape, SCALES))
    x, rows, stride = as_rows(op, "x", x)
    width = x.shape[-1]
    if not rows or not width:
        return target, scale
    args = [rows, width, x, stride, kind(x), group_size, target, scale, np.float32(eps)]
    count = rows * width // VECTOR
    if fits_lanes(group_size) and stride == width and count < 2**31 and whole_vectors(width, target, (x, stride)):
        args, many = [*args, lane_shift(group_size)], count >= FEW_VECTORS
        if many and kind(x) == KINDS["bfloat16"] and group_size >= _GROUP_DEPTH * VECTOR:
            start(op, _FAMILY, "int8_group_deep", -(-count // (TEAM * _GROUP_DEPTH)), (TEAM, 1), args)
        else:
            block, form = TEAM if many else FEW_BLOCK, "v8"
            if kind(x) == KINDS["bfloat16"]:
                form, args[8] = "bf16_early", int(np.float32(eps).view(np.int32))
            start(op, _FAMILY, f"int8_group_{form}", -(-count // block), (block, 1), args)
    else:
        start_warps(op, _FAMILY, "int8_group_any", rows, width, group_size, args)
    return target, scale
