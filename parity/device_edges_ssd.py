"""Shapes for Mamba-2 in chunks and as a loop: short and empty sequences, chunks almost full, tensor cores."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .device_edges_chunks import starts


def _mamba(*lengths: int, **more) -> dict:
    cu = {"T": sum(lengths), "S": len(lengths) + 1, "R": len(lengths), "query_start_loc": starts(*lengths)}
    return cu | {"dt_softplus": True} | more


def _cuts(*lengths: int, **more) -> dict:
    cuts = starts(*lengths)
    return {"T": sum(lengths), "NC1": len(cuts), "NC": len(lengths), "cu_chunk_seqlens": cuts, **more}


_X, _HALF = {"x": "bfloat16"}, {"x": "float16"}
_UNEVEN = (1, 0, 15, 16, 17, 33)
_MAMBA = {"H": 4, "P": 6, "G": 2, "N": 10}
_EACH = {"D": "float32", "dt_bias": "float32", "initial_states": "float32"}


def _rows(heads: int, width: int) -> np.ndarray:
    """D with a number for each channel."""
    return np.linspace(-1, 1, heads * width, dtype=np.float32).reshape(heads, width)


def _spoiled(tokens: int) -> np.ndarray:
    """One head's inputs with a NaN in the last token's: for tokens too that are long done."""
    x = np.random.Generator(np.random.PCG64(0)).standard_normal((tokens, 1, 64)).astype(ml_dtypes.bfloat16)
    x[-1, 0, 3] = np.nan
    return x


EDGES: dict[str, list[dict]] = {
    "ssd_chunk_cumsum": [
        _cuts(16, 1, 16, 5, H=5, Q=16, dt="bfloat16", dt_bias="float32", dt_softplus=True, dt_max=0.9),
        _cuts(64, 64, 2, H=70, Q=64, dt="float16", dt_min=0.1), _cuts(H=2, Q=8), _cuts(3, H=1, Q=5000),
    ],
    "ssd_chunk_state": [
        _cuts(16, 1, 9, Q=16, **_MAMBA), _cuts(8, 3, Q=8, H=3, P=5, G=1, N=40, **_X),
        _cuts(7, Q=7, H=2, P=4, G=2, N=4, **_HALF), _cuts(Q=4, **_MAMBA),
    ],
    "ssd_state_passing": [
        {"NC": 5, "H": 3, "P": 5, "N": 9, "Q": 4, "R": 4, "last_chunk_indices": np.int32([-1, 2, 2, 4]),
         "initial_states": "bfloat16", "state_dtype": "float16"},
        {"NC": 2, "H": 1, "P": 16, "N": 16, "Q": 1, "R": 1, "last_chunk_indices": np.int32([1])},
        {"NC": 0, "H": 2, "P": 3, "N": 4, "Q": 8, "R": 2, "last_chunk_indices": np.int32([-1, -1])},
    ],
    "ssd_bmm_chunk": [
        _cuts(16, 1, 9, Q=16, G=3, N=10), _cuts(8, 3, Q=8, G=1, N=40, C="bfloat16"),
        _cuts(7, Q=7, G=2, N=4, C="float16"), _cuts(Q=4, G=2, N=8),
    ],
    "ssd_chunk_scan": [
        _cuts(16, 1, 9, Q=16, R=2, seq_idx=np.int32([0, 0, 1]), D=_rows(4, 6), initial_states="float16", **_MAMBA),
        _cuts(8, 3, 2, Q=8, seq_idx=np.int32([0, 2, 2]), H=3, P=5, G=1, N=40, states="bfloat16", z="bfloat16", **_X),
        _cuts(7, Q=7, H=2, P=4, G=2, N=4, z="float16", D="float32", **_HALF), _cuts(Q=4, **_MAMBA),
    ],
    "ssd_chunk_prefill": [
        _mamba(130, Q=192, x=_spoiled(130), H=1, P=64, G=1, N=16),
        _mamba(*_UNEVEN, Q=16, **_MAMBA, **_EACH, z="float32", dt_max=0.9), _mamba(0, 9, Q=4, H=2, P=64, G=1, N=64),
        _mamba(3, 0, 20, Q=16, H=2, P=64, G=1, N=16, **_X), _mamba(5, Q=64, H=2, P=8, G=2, N=16, **_HALF),
        _mamba(0, 0, Q=64, **_MAMBA, initial_states="bfloat16"), _mamba(70, Q=64, H=1, P=64, G=1, N=24, **_X),
        _mamba(65, 17, Q=64, H=2, P=64, G=2, N=64, **_X, **_EACH),
        _mamba(131, Q=128, H=1, P=64, G=1, N=128, **_X, z="bfloat16", D=_rows(1, 64)),
        _mamba(20, 70, Q=64, H=1, P=128, G=1, N=16, **_HALF, z="float16", initial_states="float16"),
        _mamba(0, 66, Q=192, H=1, P=64, G=1, N=96, **_HALF, D="float32"), _mamba(0, Q=64, H=1, P=64, G=1, N=64, **_X),
    ],
    "ssd_recurrent": [
        _mamba(3, 0, 4, **_MAMBA, D="float32", z="float32", dt_bias="float32", dt_max=0.9),
        _mamba(1, 5, H=2, P=20, G=1, N=128, **_X, D=_rows(2, 20), z="bfloat16"), _mamba(0, **_MAMBA),
        _mamba(0, 6, H=4, P=16, G=2, N=64, **_HALF, dt_min=0.3), _mamba(4, H=1, P=3, G=1, N=9, **_X),
        _mamba(5, H=1, P=5, G=1, N=128),
    ],
}  # fmt: skip
"""Axes as in `Contract.examples`, by op."""
