"""Frequency divisors that GGUF files hold as tensors: of llama3 scaling, and of LongRoPE."""

from __future__ import annotations

import numpy as np

from vtlab.gguf.dequant import dequantize
from vtlab.ops.errors import FormatError

from .config import ModelConfig


def divisors(config: ModelConfig, gguf, name: str, pairs: int) -> list[float]:
    """The numbers of the tensor `name`, one for each rotary pair. Errors: FormatError unless all are positive."""
    found = dequantize(gguf.tensors[name])
    if found.shape != (pairs,) or not (np.isfinite(found) & (found > 0)).all():
        got = f"shape {found.shape}, least {found.min(initial=np.inf)}"
        raise FormatError(config.file, None, name, got, f"{pairs} positive numbers")
    return found.tolist()
