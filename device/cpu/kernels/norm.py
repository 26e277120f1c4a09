"""Norms over rows, with the sums of `block_butterfly(256, vector=8, across=tree)`."""

from __future__ import annotations

import math

import numpy as np

from ..compiling import device, kernel
from .lanes import lanes_below, spread, where
from .memory import get_any, load, put, scratch, store, through
from .reductions import SLOTS, STEP, add_step, cleared, joined
from .transcendental import sigmoid, silu

RESIDUAL, GEMMA, UNROUNDED, TWICE = 1, 2, 4, 8
"""Bits of rms_norm's `mode`: there is a residual; the weight is weight + 1; the sum is normalised before it is rounded;
what is normalised rounds to the weight's dtype, before and after its product."""


@device
def _value(x, x_at, residual, r_at, count, x_kind, r_kind, mode):
    """x, or the rounded or unrounded x + residual."""
    value = load(x, x_at, count, x_kind)
    if mode & RESIDUAL:
        value = value + load(residual, r_at, count, r_kind)
        if not mode & UNROUNDED:
            value = through(value, r_kind)
    return value


@device
def inverse_root(total, width, eps):
    """1 / sqrt(total / width + eps)."""
    return np.float32(1) / math.sqrt(total / np.float32(max(width, 1)) + eps)


@kernel("iiaiaiaaaiiiifi")
def rms_norm(
    begin, end, x, x_stride, residual, r_stride, weight, out, new, x_kind, r_kind, w_kind, width, eps, mode
):  # fmt: skip
    """Rows begin ... end of out = x * w / sqrt(mean(x^2) + eps), and of new = x + residual."""
    partials = scratch(SLOTS)
    squares = partials + 1024
    for row in range(begin, end):
        cleared(partials, width)
        for i in range(0, width, STEP):
            for j in range(0, STEP, 16):
                at, left = i + j, width - i - j
                value = _value(x, row * x_stride + at, residual, row * r_stride + at, left, x_kind, r_kind, mode)
                put(value * value, squares, j)
            add_step(partials + 4 * (i // 8 % 256), squares)
        inverse = inverse_root(joined(partials, width), width, eps)
        for i in range(0, width, 16):
            left = width - i
            value = _value(x, row * x_stride + i, residual, row * r_stride + i, left, x_kind, r_kind, mode)
            if mode & RESIDUAL:
                store(value, new, row * width + i, left, r_kind)
            w = load(weight, i, left, w_kind)
            if mode & GEMMA:
                w = w + np.float32(1)
            value = value * inverse
            value = through(through(value, w_kind) * w, w_kind) if mode & TWICE else value * w
            store(value, out, row * width + i, left, x_kind)


@device
def row_sum(x, first, width, kind, centre, squared, partials):
    """The sum of a row's x - centre, or of its squares."""
    cleared(partials, width)
    for i in range(0, width, STEP):
        for j in range(0, STEP, 16):
            left = width - i - j
            value = load(x, first + i + j, left, kind)
            if squared:
                value = value - centre
                value = value * value
                if left < 16:
                    value = where(lanes_below(left), value, np.float32(0))
            put(value, partials, 256 + j)
        add_step(partials + 4 * (i // 8 % 256), partials + 1024)
    return joined(partials, width)


@kernel("iiaiaaaiiiiif")
def layer_norm(begin, end, x, x_stride, weight, bias, out, x_kind, w_kind, b_kind, width, given, eps):
    """Rows begin ... end of (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias; `given`: 1 weight, 2 bias."""
    partials = scratch(SLOTS)
    for row in range(begin, end):
        first = row * x_stride
        mean = row_sum(x, first, width, x_kind, np.float32(0), False, partials) / np.float32(width)
        inverse = inverse_root(row_sum(x, first, width, x_kind, mean, True, partials), width, eps)
        for i in range(0, width, 16):
            left = width - i
            value = (load(x, first + i, left, x_kind) - mean) * inverse
            if given & 1:
                value = value * load(weight, i, left, w_kind)
            if given & 2:
                value = value + load(bias, i, left, b_kind)
            store(value, out, row * width + i, left, x_kind)


@kernel("iiaiiaiiif")
def l2norm(begin, end, x, x_stride, heads, out, x_kind, out_kind, width, eps):
    """x / sqrt(sum(x^2) + eps) of `heads` neighbouring rows in each of the rows x_stride apart."""
    partials = scratch(SLOTS)
    for item in range(begin, end):
        first = item // heads * x_stride + item % heads * width
        inverse = inverse_root(row_sum(x, first, width, x_kind, np.float32(0), True, partials), 1, eps)
        for i in range(0, width, 16):
            store(load(x, first + i, width - i, x_kind) * inverse, out, item * width + i, width - i, out_kind)


@kernel("iiaaiaaiiiiifi")
def rms_norm_gated(
    begin, end, x, gate, g_stride, weight, out, x_kind, g_kind, w_kind, out_kind, width, eps, sigmoidal
):  # fmt: skip
    """Rows begin ... end of x * w / sqrt(mean(x^2) + eps) * act(gate)."""
    partials = scratch(SLOTS)
    for row in range(begin, end):
        first = row * width
        inverse = inverse_root(row_sum(x, first, width, x_kind, np.float32(0), True, partials), width, eps)
        for i in range(0, width, 16):
            left = width - i
            z = load(gate, row * g_stride + i, left, g_kind)
            value = (load(x, first + i, left, x_kind) * inverse) * load(weight, i, left, w_kind)
            store(value * (sigmoid(z) if sigmoidal else silu(z)), out, first + i, left, out_kind)


@kernel("iiaaaiiiii")
def row_gate(begin, end, x, gate, out, x_kind, g_kind, out_kind, point, width):
    """Rows begin ... end of x * sigmoid(gate[row])."""
    for row in range(begin, end):
        weight = through(sigmoid(spread(get_any(gate, row, g_kind))), point)
        for i in range(0, width, 16):
            left = width - i
            store(load(x, row * width + i, left, x_kind) * weight, out, row * width + i, left, out_kind)
