"""Norms over the last axis."""

from __future__ import annotations

import numpy as np

from .launch import KINDS, Kernels, delivered, provider, results, rows_of
from .threads import split

K = Kernels("norm")
_FLOAT32 = np.dtype(np.float32)


@provider("rms_norm")
def rms_norm(x, weight, *, residual=None, eps=1e-6, gemma=False, rounding="vt", out=None):
    """oracle.norm.rms_norm."""
    native = rounding == "vllm_native" or (rounding == "vllm" and (gemma or weight.dtype != x.dtype))
    twice = native and not gemma and weight.dtype != _FLOAT32
    forms = ((x.shape, x.dtype),) if residual is None else ((x.shape, x.dtype), (x.shape, residual.dtype))
    made = results("rms_norm", out, *forms)
    x, rows, stride = rows_of(x)
    other, other_stride, kind = None, 0, 0
    if residual is not None:
        other, _, other_stride = rows_of(residual)
        kind = KINDS[residual.dtype]
    width = x.shape[-1]
    split(
        K.rms_norm, rows, rows * width * 8, x, stride, other, other_stride, weight, made[0], made[-1], KINDS[x.dtype],
        kind, KINDS[weight.dtype], width, eps, (residual is not None) + 2 * bool(gemma) + 4 * native + 8 * twice,
    )  # fmt: skip
    return delivered(out, made)
