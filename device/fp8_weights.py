"""FP8 under given scales on a GPU: launchers of cuda/fp8_weights.cu."""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .launch import PROVIDER, as_rows, kind, map_rows, results, start
from .quant_fp8 import CODES, NAN_CODES, SCALES, TEAM, whole_vectors
from .runtime import current
from .units import unit_of

_FAMILY = "fp8_weights"
_ROWS = 4
"""Rows a thread, as the kernels know."""
_UNIT = 16


@providers.provider("scaled_fp8_quant_static_group", "cuda", PROVIDER)
def scaled_fp8_quant_static_group(x, scale, *, rounding="vt", out=None):
    """oracle.fp8_weights.scaled_fp8_quant_static_group."""
    op, (down, across) = "scaled_fp8_quant_static_group", scale.shape
    (target,) = results(op, out, (x, scale), (x.shape, CODES))
    x, rows, stride = as_rows(op, "x", x)
    width = x.shape[1]
    if not rows or not width:
        return target
    if max(x.shape) >= 2**31:
        raise ContractError(op, "x", f"shape {x.shape}", "fewer than 2**31 rows and columns")
    args = [
        rows, x, stride, kind(x), scale, rows // down, width // across, across, target, NAN_CODES[rounding],
    ]  # fmt: skip
    map_rows(op, _FAMILY, "group_codes", -(-rows // _ROWS), width, whole_vectors(width, target, (x, stride)), args)
    return target


@providers.provider("requantize_with_max_scale", "cuda", PROVIDER)
def requantize_with_max_scale(weight, weight_scale, logical_widths, *, out=None):
    """oracle.fp8_weights.requantize_with_max_scale: a launch for the largest scale, one for each shard."""
    op, width, shards = "requantize_with_max_scale", weight.shape[1], len(weight_scale)
    target, scale = results(op, out, (weight, weight_scale), (weight.shape, CODES), ((1,), SCALES))
    start(op, _FAMILY, "largest_of_scales", 1, (32, 1), [weight_scale, shards, scale])
    runtime, begin = current(), 0
    from_place, to_place = runtime.pointer(weight), runtime.pointer(target)
    for shard, rows in enumerate(logical_widths):
        count, offset = rows * width, begin * width
        unit = _UNIT if unit_of((weight, target), (count, offset)) == _UNIT else 1
        args = [count // unit, from_place + offset, weight_scale, shards, shard, to_place + offset]
        start(op, _FAMILY, f"shard_codes_v{unit}", -(-(count // unit) // TEAM), (TEAM, 1), args)
        begin += rows
    return target, scale
