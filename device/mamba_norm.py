"""Mamba-2's gated norm on a GPU: the launcher of cuda/mamba_norm.cu."""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops import providers

from .launch import KINDS, MULTIPROCESSORS, PROVIDER, VECTOR, kind, results, start, vectors

_TEAM, _ROW_BLOCK = 256, 128
"""Threads of the declared order, and of a block that has several rows."""
_TABLE_BLOCK, _TABLE_WIDTH = 512, 1024
"""Threads of a block that tabulates SiLU, and the widest row of a warp of them."""
_TABLE_ROWS = 2 * MULTIPROCESSORS * (_TABLE_BLOCK // 32)
"""Rows from which a table pays: two a warp."""


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
    brain = y.dtype == weight.dtype and kind(y) == KINDS["bfloat16"]
    if not wide or lanes > 4 * _TEAM:
        start(op, "mamba_norm", f"mamba_norm_v{VECTOR if wide else 1}", rows, (_TEAM, 1), args)
    elif brain and rows >= _TABLE_ROWS and width <= _TABLE_WIDTH:
        blocks = min(MULTIPROCESSORS, -(-rows * 32 // _TABLE_BLOCK))
        warps = blocks * _TABLE_BLOCK // 32
        start(op, "mamba_norm", "mamba_norm_table", blocks, (_TABLE_BLOCK, 1), [*args, warps])
    elif lanes <= 32:
        lanes = 1 << (lanes - 1).bit_length()
        start(op, "mamba_norm", "mamba_norm_rows", -(-rows * lanes // _ROW_BLOCK), (_ROW_BLOCK, 1), [*args, lanes])
    else:
        form = f"mamba_norm{'_bf16' * brain}_block{1 if lanes <= _TEAM else 4}"
        start(op, "mamba_norm", form, rows, (min(_TEAM, -(-lanes // 32) * 32), 1), args)
    return target
