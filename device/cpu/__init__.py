"""The CPU tier: Numba kernels whose bytes are the mirror's. Importing it registers a provider of each op that has one.

Numba is imported at the first call of such an op; what was compiled is kept in the cache folder.
"""

from __future__ import annotations

from . import (
    attention,
    elementwise,
    ggml,
    kv_cache,
    logits,
    matmul,
    norm,
    qk_norm,
    quant,
    recurrent,
    replay,
    rope,
    splits,
)

__all__ = [
    "attention", "elementwise", "ggml", "kv_cache", "logits", "matmul", "norm", "qk_norm", "quant", "recurrent",
    "replay", "rope", "splits",
]  # fmt: skip
