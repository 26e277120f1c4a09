"""Importing this makes Triton's interpreter cast to and from e4m3 and multiply by it as a GPU does.

The interpreter rounds float8 half up. Here PyTorch casts, clamped first as the hardware saturates; everything else of
a kernel stays what vLLM wrote. `round` of the device library, which the interpreter lacks, is C's: halves away from
zero.
"""

from __future__ import annotations

import interpreted  # noqa: F401  (first: it switches Triton on)
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_cast = interpreter._convert_float


def _convert(data, source, target, rounding_mode):
    if "fp8e4nv" not in (source.name, target.name):
        return _cast(data, source, target, rounding_mode)
    if source.name == "fp8e4nv":
        codes = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8))
        wide = codes.view(torch.float8_e4m3fn).float().numpy()
        return wide if target.name == "fp32" else wide.astype(np.float16)
    wide = torch.from_numpy(np.ascontiguousarray(data).astype(np.float32))
    return wide.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _round(x, **_):
    away = np.copysign(np.floor(np.abs(x.handle.data.astype(np.float64)) + 0.5), x.handle.data).astype(np.float32)
    return tl.tensor(interpreter.TensorHandle(away, x.handle.dtype), x.type)


interpreter._convert_float = _convert
tl.extra.cuda.libdevice.round = _round
