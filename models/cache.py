"""Where the keys and values of a layer live."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of one layer, [num_blocks, block_size, kv heads, head_dim], written in place."""

    key: np.ndarray
    value: np.ndarray
