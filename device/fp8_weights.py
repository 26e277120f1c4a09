"""FP8 under given scales on a GPU: launchers of cuda/fp8_weights.cu."""

from __future__ import annotations

import itertools

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .early import EARLY
from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, map_rows, results, start, vectors
from .quant_fp8 import CODES, NAN_CODES, SCALES, divider, whole_vectors
from .runtime import current
from .units import unit_of

_FAMILY = "fp8_weights"
_ROWS = 4
"""Rows a thread, as the kernels know."""
_LINE_DEPTH, _BAND = 2, 4
"""Vectors, and rows, a thread of the kernels for bfloat16, as they know."""
_FEW_LINE, _FEW_CHANNELS = 1 << 17, 1 << 15
"""Under so many vectors a thread has but one."""
_LINE_BLOCKS, _CHANNEL_BLOCKS = (256, 128), (64, 128)
_UNIT, _SHARDS = 16, 8
"""Bytes that move at once, and shards of a launch."""
_SHARD_DEPTH, _SHARD_BLOCK = 2, 128
"""Units of _UNIT bytes a thread, as the kernel knows."""


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
    wide = whole_vectors(width, target, (x, stride))
    if wide and kind(x) == KINDS["bfloat16"]:
        if across == width and down == 1 and vectors(across, (scale, 0)):
            return _channels(op, x, rows, stride, scale, target, rounding)
        if stride == width and width // across % VECTOR == 0 and rows * width // VECTOR < 2**31:
            return _line(op, x, rows, scale, target, rounding)
    args = [
        rows, x, stride, kind(x), scale, rows // down, width // across, across, target, NAN_CODES[rounding],
    ]  # fmt: skip
    map_rows(op, _FAMILY, "group_codes", -(-rows // _ROWS), width, wide, args)
    return target


def _line(op: str, x, rows: int, scale, target, rounding: str):
    """Codes where every vector has one scale and they follow each other without gaps."""
    width, (down, across) = x.shape[1], scale.shape
    count, per_row = rows * width // VECTOR, width // VECTOR
    few = count < _FEW_LINE
    divisors = [*divider(per_row), *divider(rows // down), *divider(per_row // across)]
    args = [count, x, scale, per_row, across, *divisors, target, NAN_CODES[rounding]]
    block = _LINE_BLOCKS[not few]
    grid = -(-count // (block * (1 if few else _LINE_DEPTH)))
    start(op, _FAMILY, ("group_line_few" if few else "group_line") + EARLY, grid, (block, 1), args)
    return target


def _channels(op: str, x, rows: int, stride: int, scale, target, rounding: str):
    """Codes under a scale a channel: bands of rows."""
    width = x.shape[1]
    few = rows * width // VECTOR < _FEW_CHANNELS
    kernel, each = ("group_channels_few", 1) if few else ("group_channels", _BAND)
    args = [rows, x, stride, scale, target, NAN_CODES[rounding]]
    map_rows(op, _FAMILY, kernel, -(-rows // each), width, True, args, most=_CHANNEL_BLOCKS[not few], ending=EARLY)
    return target


@providers.provider("requantize_with_max_scale", "cuda", PROVIDER)
def requantize_with_max_scale(weight, weight_scale, logical_widths, *, out=None):
    """oracle.fp8_weights.requantize_with_max_scale: a launch for every eight shards."""
    op, width, shards = "requantize_with_max_scale", weight.shape[1], len(weight_scale)
    target, scale = results(op, out, (weight, weight_scale), (weight.shape, CODES), ((1,), SCALES))
    runtime, begin = current(), 0
    from_place, to_place = runtime.pointer(weight), runtime.pointer(target)
    for first in range(0, shards, _SHARDS):
        ends = [width * rows for rows in itertools.accumulate(logical_widths[first : first + _SHARDS])]
        unit = _UNIT if unit_of((weight, target), (begin, *ends)) == _UNIT else 1
        count, each = ends[-1] // unit, _SHARD_BLOCK * (_SHARD_DEPTH if unit == _UNIT else 1)
        inner = [end // unit for end in ends[:-1]] + [count] * (_SHARDS - len(ends))
        args = [
            count, from_place + begin, weight_scale, shards, first, *inner, to_place + begin, 0 if first else scale,
        ]  # fmt: skip
        start(op, _FAMILY, f"shard_codes_v{unit}{EARLY}", max(1, -(-count // each)), (_SHARD_BLOCK, 1), args)
        begin += ends[-1]
    return target, scale
