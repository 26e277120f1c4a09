"""Mamba-2's gated norm on a GPU: the launcher of cuda/mamba_norm.cu."""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops import providers

from .launch import PROVIDER, VECTOR, kind, results, start, vectors

_TEAM, _ROW_BLOCK = 256, 128
"""Threads of the declared order, and of a block that has several rows."""


@providers.provider("mamba2_rmsnorm_gated", "cuda", PROVIDER)
def mamba2_rmsnorm_gated(y, z, weight, *, groups=1, eps=1e-5, rounding="vt", out=None):
    """oracle.mamba_norm.mamba2_rmsnorm_gated."""
    op = "mamba2_rmsnorm_gated"
    (target,) = results(op, out, (y, z, weight), (y.shape, y.dtype))
    if not y.size:
        return target
    width = y.shape[-1] // groups
    rows = math.prod(y.shape) // width
    args = [rows, width, y, z, kind(y), weight, kind(weight), groups, target, np.float32(eps), int(rounding != "vllm")]
    lanes, wide = -(-width // VECTOR), vectors(width, (y, width), (z, width), (weight, width), (target, width))
    if not wide or lanes > 4 * _TEAM:
        start(op, "mamba_norm", f"mamba_norm_v{VECTOR if wide else 1}", rows, (_TEAM, 1), args)
    elif lanes <= 32:
        lanes = 1 << (lanes - 1).bit_length()
        start(op, "mamba_norm", "mamba_norm_rows", -(-rows * lanes // _ROW_BLOCK), (_ROW_BLOCK, 1), [*args, lanes])
    else:
        form = "mamba_norm_block1" if lanes <= _TEAM else "mamba_norm_block4"
        start(op, "mamba_norm", form, rows, (min(_TEAM, -(-lanes // 32) * 32), 1), args)
    return target
