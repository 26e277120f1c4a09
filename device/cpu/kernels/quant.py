"""FP8 (e4m3fn) codes of rows: the scale of a group of neighbours, and what float32 values are under it."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..compiling import device, kernel
from .lanes import absolute, function, int32x16, lane, maximum, spread, top_lane, where, zeros
from .memory import Address, get_f32, given, load, set_at
from .storage import write
from .vectors import F32, I8, I32, V

RECIPROCAL, KEEP_NAN, POWERS, FLOOR_LAST = 1, 2, 4, 8
"""Bits of `mode`: times 1 / scale, not over the scale; a NaN is the maximum; the scale is a power of two, and the floor
comes after that, not before."""
ZERO_INVERSE = 16
"""Of `tensor_scale`: a scale of 0 has the inverse 0."""
LARGEST = np.float32(448)


@function
def _e4m3(x):
    """float32 as e4m3 codes in int32: to nearest even, saturating; that of a NaN is unspecified."""
    bits = x.bits(I32)
    size = bits & 0x7FFFFFFF
    size = (size > 0x43E00000).where(x.of(448.0).bits(I32), size)
    tiny = (size.bits(F32) + 16384.0).bits(I32) - 0x46800000  # the sum rounds at 2^-9, the unit of the subnormals
    normal = (size - 0x3C000000 + 0x7FFFF + (size.shifted_down(20) & 1)).shifted_down(20)
    return (size < 0x3C800000).where(tiny, normal) | (bits.shifted_down(24) & 0x80)


@function
def _power_of_two(x):
    """The least power of two that is not below a positive normal number."""
    return ((x.bits(I32) + 0x7FFFFF) & 0x7F800000).bits(F32)


@intrinsic
def _store_bytes(typing, codes, address, index, count):
    """Write int32 lanes as bytes to elements index ..., `count` at most."""

    def generate(context, builder, sig, args):
        write(builder, V(builder, args[0]).to(I8).value, args[1], args[2], args[3])
        return context.get_dummy_value()

    return signature(types.void, int32x16, Address, types.int64, types.int64), generate


@device
def _largest(x, first, count, kind, keep):
    """max |x| of `count` neighbours, 0 of none; NaN is passed over, or is the maximum where it is kept."""
    top = zeros()
    for i in range(0, count, 16):
        size = absolute(load(x, first + i, count - i, kind))
        top = maximum(top, size if keep else where(size == size, size, np.float32(0)))
    return top_lane(top)


@device
def _store_codes(value, out, at, left, nan):
    codes = _e4m3(value)
    _store_bytes(where(value == value, codes, (codes & 0) | nan), out, at, left)


@device
def _bounded(size, bound):
    """The smaller of the two; NaN stays."""
    return bound if size > bound else size


@device
def _floored(size, floor):
    """The larger of the two; NaN stays."""
    return floor if size < floor else size


@kernel("iiaiiaaaaiiiiffi")
def grouped(
    begin, end, x, x_stride, kind, out, scales, size_bound, scale_bound, width, group, groups, steps, least, floor,
    mode_and_nan,
):  # fmt: skip
    """Groups begin ... end, `groups` of them a row: scales and codes.

    size = max(min(max|x|, size_bound), least), scale = max(min(size / 448, scale_bound), floor), out = e4m3(x / scale).
    steps: elements between the scales of rows, and in the upper half between those of groups.
    """
    mode, nan = mode_and_nan & 0xFF, mode_and_nan >> 8
    group_step, row_step = steps >> 32, steps & 0xFFFFFFFF
    for item in range(begin, end):
        row, g = item // groups, item % groups
        count = min(group, width - g * group)
        first, to = row * x_stride + g * group, row * width + g * group
        size = _largest(x, first, count, kind, mode & KEEP_NAN)
        if given(size_bound):
            size = _bounded(size, get_f32(size_bound, 0))
        scale = _floored(size, least) / LARGEST
        if given(scale_bound):
            scale = _bounded(scale, get_f32(scale_bound, 0))
        if not mode & FLOOR_LAST:
            scale = _floored(scale, floor)
        if mode & POWERS and scale > 0 and scale < np.float32(np.inf):
            scale = lane(_power_of_two(spread(scale)), 0)
        if mode & FLOOR_LAST:
            scale = _floored(scale, floor)
        set_at(scale, scales, row * row_step + g * group_step)
        inverse = np.float32(1) / scale
        for i in range(0, count, 16):
            value = load(x, first + i, count - i, kind)
            value = value * inverse if mode & RECIPROCAL else value / scale
            _store_codes(value, out, to + i, count - i, nan)


@kernel("iiaiiaii")
def sizes(begin, end, x, x_stride, kind, out, width, keep):
    """max |x| of rows begin ... end."""
    for row in range(begin, end):
        set_at(_largest(x, row * x_stride, width, kind, keep), out, row)


@kernel("iiaaaifi")
def tensor_scale(begin, end, sizes, scale, inverse, rows, floor, mode):
    """The scale of the largest of `rows` sizes, and its inverse."""
    for _ in range(begin, end):
        value = _floored(_largest(sizes, 0, rows, 0, mode & KEEP_NAN) / LARGEST, floor)
        set_at(value, scale, 0)
        reciprocal = np.float32(1) / value
        if mode & ZERO_INVERSE and value == np.float32(0):
            reciprocal = np.float32(0)
        set_at(reciprocal, inverse, 0)


@kernel("iiaiiaaiii")
def scaled(begin, end, x, x_stride, kind, out, factor, inverted, width, nan):
    """Rows begin ... end of e4m3(x * factor), or of x * (1 / factor) where the factor is to be `inverted`."""
    for row in range(begin, end):
        by = get_f32(factor, 0)
        if inverted:
            by = np.float32(1) / by
        for i in range(0, width, 16):
            value = load(x, row * x_stride + i, width - i, kind) * by
            _store_codes(value, out, row * width + i, width - i, nan)
