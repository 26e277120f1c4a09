"""DeepGEMM's casts and scale layouts on a GPU: launchers of cuda/fp8_casts.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .launch import KINDS, PROVIDER, VECTOR, as_rows, check_places, kind, results, start, vectors
from .quant_fp8 import CODES, FEW_BLOCK, FEW_VECTORS, SCALES, TEAM, fits_lanes, lane_shift, start_warps, whole_vectors
from .runtime import current

POWERS = {None: 0, "bits": 1, "log2": 2}
"""How scales are rounded up, as the kernels number it (powers.cuh)."""
BLOCK = 128
_DEPTH = 4
_FAMILY = "fp8_casts"
_WORDS = np.dtype(np.int32)


def _groups(op: str, kernel: str, x, size: int, codes, scale, ue8m0, wide: bool) -> None:
    """Codes and scales of groups of `size` neighbours; wide: rows of x and of the codes may move by vectors."""
    x, rows, stride = as_rows(op, "x", x)
    width = x.shape[-1]
    if not rows or not width:
        return
    count, rule = rows * width // VECTOR, POWERS[ue8m0]
    whole = width % size == 0 and stride == width and count < 2**31 and fits_lanes(size)
    if not (whole and wide and vectors(width, (x, stride))):
        args = [rows, width, x, stride, kind(x), size, codes, scale, rule]
        start_warps(op, _FAMILY, f"{kernel}_any", rows, width, size, args)
        return
    args = [count, x, kind(x), codes, scale, rule, lane_shift(size)]
    if kind(x) == KINDS["bfloat16"] and count >= FEW_VECTORS and size >= _DEPTH * VECTOR:
        start(op, _FAMILY, f"{kernel}_deep", -(-count // (TEAM * _DEPTH)), (TEAM, 1), args)
    else:
        block = TEAM if count >= FEW_VECTORS else FEW_BLOCK
        start(op, _FAMILY, f"{kernel}_v8", -(-count // block), (block, 1), args)


@providers.provider("per_token_cast_to_fp8", "cuda", PROVIDER)
def per_token_cast_to_fp8(x, *, ue8m0=None, out=None):
    """oracle.fp8_casts.per_token_cast_to_fp8."""
    op, (rows, width) = "per_token_cast_to_fp8", x.shape
    codes, scale = results(op, out, (x,), ((rows, width), CODES), ((rows, -(-width // BLOCK)), SCALES))
    _groups(op, "cast_e4m3", x, BLOCK, codes, scale, ue8m0, whole_vectors(width, codes))
    return codes, scale


@providers.provider("per_token_cast_to_fp4", "cuda", PROVIDER)
def per_token_cast_to_fp4(x, *, group_size=BLOCK, ue8m0=None, out=None):
    """oracle.fp8_casts.per_token_cast_to_fp4."""
    op, (rows, width) = "per_token_cast_to_fp4", x.shape
    forms = ((rows, width // 2), CODES), ((rows, -(-width // group_size)), SCALES)
    codes, scale = results(op, out, (x,), *forms)
    words = not codes.size or current().pointer(codes) % 4 == 0
    _groups(op, "cast_e2m1", x, group_size, codes, scale, ue8m0, words)
    return codes, scale


def _tiles(op: str, rows: int, width: int, high: int, wide: int) -> int:
    """How many tiles there are; ContractError where one has more elements than the kernels may count."""
    if min(high, rows) * min(wide, width) >= 2**62:
        raise ContractError(op, "block_m", f"tiles of {high} x {wide}", "under 2**62 elements")
    return -(-rows // high) * -(-width // wide)


@providers.provider("per_block_cast_to_fp8", "cuda", PROVIDER)
def per_block_cast_to_fp8(x, *, block_m=BLOCK, block_k=BLOCK, ue8m0=None, out=None):
    """oracle.fp8_casts.per_block_cast_to_fp8."""
    op, (rows, width) = "per_block_cast_to_fp8", x.shape
    forms = ((rows, width), CODES), ((-(-rows // block_m), -(-width // block_k)), SCALES)
    codes, scale = results(op, out, (x,), *forms)
    if not codes.size:
        return codes, scale
    x, _, stride = as_rows(op, "x", x)
    high, wide = min(block_m, rows), min(block_k, width)
    args = [rows, width, high, wide, x, stride, kind(x), codes, scale, POWERS[ue8m0]]
    kernel = "cast_tile_any_floats"
    if block_m == block_k == BLOCK and whole_vectors(width, codes, (x, stride)):
        kernel = "cast_tile_bf16" if kind(x) == KINDS["bfloat16"] else "cast_tile_v8"
    start(op, _FAMILY, kernel, _tiles(op, rows, width, high, wide), (TEAM, 1), args)
    return codes, scale


@providers.provider("requant_weight_ue8m0", "cuda", PROVIDER)
def requant_weight_ue8m0(weight, scale, *, block_m=BLOCK, block_k=BLOCK, ue8m0="log2", out=None):
    """oracle.fp8_casts.requant_weight_ue8m0."""
    op, (rows, width) = "requant_weight_ue8m0", weight.shape
    codes, new_scale = results(op, out, (weight, scale), ((rows, width), CODES), (scale.shape, SCALES))
    if not codes.size:
        return codes, new_scale
    high, wide = min(block_m, rows), min(block_k, width)
    args = [rows, width, high, wide, weight, scale, codes, new_scale, POWERS[ue8m0]]
    whole = block_m == block_k == BLOCK and whole_vectors(width, codes) and current().pointer(weight) % VECTOR == 0
    twice = whole and not any(n % (2 * VECTOR) for n in (width, current().pointer(weight), current().pointer(codes)))
    kernel = "requant_tile_v16" if twice else "requant_tile_v8" if whole else "requant_tile_any"
    start(op, _FAMILY, kernel, _tiles(op, rows, width, high, wide), (TEAM, 1), args)
    return codes, new_scale


@providers.provider("transform_sf_layout", "cuda", PROVIDER)
def transform_sf_layout(scale, *, packed=False, out=None):
    """oracle.fp8_casts.transform_sf_layout. A given `out` that is C-contiguous gets the same elements in rows."""
    op, (rows, groups) = "transform_sf_layout", scale.shape
    columns, padded = -(-groups // 4) if packed else groups, -(-rows // 4) * 4
    dtype = _WORDS if packed else SCALES
    if out is None:
        (whole,) = results(op, None, (scale,), ((columns, padded), dtype))
        target, steps = whole.T[:rows], (1, padded, padded)
    elif tuple(out.shape) == (rows, columns) and not out.flags.c_contiguous:
        target, steps = _columns(op, scale, out, dtype, padded), (1, padded, padded)
    else:
        (target,) = results(op, out, (scale,), ((rows, columns), dtype))
        steps = (columns, 1, rows)
    if not rows or not columns:
        return target
    scale, _, stride = as_rows(op, "scale", scale)
    wide = not (groups % 4 or stride % 4 or current().pointer(scale) % 16)
    if wide and not packed and steps[0] == 1 and current().pointer(target) % 16 == 0:
        args = [rows, groups, scale, stride, target, padded]
        start(op, _FAMILY, "scale_columns_v4", -(-rows // 32) * -(-groups // 32), (TEAM, 1), args)
        return target
    blocks = -(-steps[2] // 32) * -(-columns // 8)
    args = [rows, groups, columns, scale, stride, target, *steps, int(packed), int(wide)]
    start(op, _FAMILY, "scale_columns", blocks, (TEAM, 1), args)
    return target


def _columns(op: str, scale, out, dtype, padded: int):
    """`out`, columns of `padded` elements, the last one too, where nothing speaks against it."""
    runtime, (rows, columns) = current(), out.shape
    if out.dtype != dtype or tuple(out.strides) != (4, 4 * padded):
        raise ContractError(op, "out", f"{out.dtype} with strides {out.strides}", f"{dtype} with {(4, 4 * padded)}")
    check_places(op, runtime, (scale, out))
    begin, first = runtime.pointer(out), runtime.pointer(scale)
    last = first + 4 * scale.shape[1] + (rows - 1) * scale.strides[0]
    if begin < last and first < begin + 4 * padded * columns:
        raise ContractError(op, "out", "memory shared with another argument", "memory of its own")
    return out
