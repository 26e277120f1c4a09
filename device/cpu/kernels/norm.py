"""Norms over rows, with the sums of `block_butterfly(256, vector=8, across=tree)`."""

from __future__ import annotations

import math

import numpy as np

from ..compiling import device, kernel
from .memory import load, put, scratch, store, through
from .reductions import SLOTS, add_step, cleared, joined

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


@kernel("iiaiaiaaaiiiifi")
def rms_norm(
    begin, end, x, x_stride, residual, r_stride, weight, out, new, x_kind, r_kind, w_kind, width, eps, mode
):  # fmt: skip
    """Rows begin ... end of out = x * w / sqrt(mean(x^2) + eps), and of new = x + residual."""
    partials = scratch(SLOTS)
    squares = partials + 1024
    for row in range(begin, end):
        cleared(partials)
        for i in range(0, width, 128):
            for j in range(0, 128, 16):
                at, left = i + j, width - i - j
                value = _value(x, row * x_stride + at, residual, row * r_stride + at, left, x_kind, r_kind, mode)
                put(value * value, squares, j)
            add_step(partials + 4 * (i // 8 % 256), squares)
        mean = joined(partials) / np.float32(max(width, 1))
        inverse = np.float32(1) / math.sqrt(mean + eps)
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
