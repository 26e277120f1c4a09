"""Shapes for the recurrences in chunks: short and empty sequences, chunks on either side of full, tensor cores."""

import ml_dtypes
import numpy as np


def starts(*lengths: int) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


_B, _H = {"k": "bfloat16"}, {"k": "float16"}
_ODD = (1, 0, 15, 16, 17, 33)
_TENSOR = {"Hk": 1, "Dk": 128, "Dv": 128, "C": 64}
_CORES = {"D": 128, "Dv": 128, "C": 64}


def _alike(tokens: int) -> np.ndarray:
    """Keys that hardly differ, [tokens, 1, 128]: what a chunk writes hangs on all of it, through the inverse."""
    keys = 1 + 0.2 * np.random.Generator(np.random.PCG64(0)).standard_normal((tokens, 1, 128))
    return (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).astype(ml_dtypes.bfloat16)


def _slow(tokens: int) -> np.ndarray:
    """Gates that hardly fade, [tokens, 1, 128]."""
    return np.full((tokens, 1, 128), -5, ml_dtypes.bfloat16)


def _abrupt(tokens: int) -> np.ndarray:
    """Gates that forget all at once, 2^-1000 and more, in one token of nine and other channels in each."""
    token, channel = np.ogrid[:tokens, :128]
    return np.where((token + channel) % 9, -6, 900)[:, None].astype(ml_dtypes.bfloat16)


def _whole(*lengths: int, **more) -> dict:
    return {"T": sum(lengths), "N": len(lengths), "query_start_loc": starts(*lengths), **more}


def _alone(*lengths: int, **more) -> dict:
    return {"T": sum(lengths), "S": len(lengths) + 1, "query_start_loc": starts(*lengths), **more}


def _mamba(*lengths: int, **more) -> dict:
    return _alone(*lengths, R=len(lengths), dt_softplus=True, **more)


def _cuts(*lengths: int, **more) -> dict:
    cuts = starts(*lengths)
    return {"T": sum(lengths), "NC1": len(cuts), "NC": len(lengths), "cu_chunk_seqlens": cuts, **more}


_X, _HALF = {"x": "bfloat16"}, {"x": "float16"}
_MAMBA = {"H": 4, "P": 6, "G": 2, "N": 10}
_EACH = {"D": "float32", "dt_bias": "float32", "initial_states": "float32"}


def _rows(heads: int, width: int) -> np.ndarray:
    """D with a number for each channel."""
    return np.linspace(-1, 1, heads * width, dtype=np.float32).reshape(heads, width)


EDGES: dict[str, list[dict]] = {
    "selective_scan": [
        _alone(3, 0, 67, R=3, dim=32, N=16, G=1, slots=4, D="float32", z="bfloat16", delta_bias="float32", u="bfloat16",
               state_idx=np.int32([2, 3, -1]), has_initial_state="int8", delta_softplus=True),
        _alone(4, 33, R=2, dim=64, N=16, G=2, slots=2, u="float16", state="float16", has_initial_state="int32"),
        _alone(9, dim=5, N=33, G=1, slots=1, z="float32"), _alone(4, dim=3, N=800, G=3, slots=1, u="bfloat16"),
        _alone(0, dim=32, N=16, G=1, slots=1),
    ],
    "gdn_chunk_cumsum": [
        _alone(*_ODD, Hv=5, C=16), _alone(0, 64, 65, 200, Hv=3, C=64), _alone(0, 0, Hv=2, C=64),
    ],
    "gdn_kkt": [
        _alone(*_ODD, Hk=2, Hv=4, Dk=6, C=16), _alone(3, 70, Hk=1, Hv=3, Dk=20, C=64, **_B),
        _alone(5, 9, Hk=2, Hv=2, Dk=8, C=7, **_H), _alone(0, Hk=1, Hv=1, Dk=4, C=16),
    ],
    "gdn_solve_tril": [
        *({"T": T, "Hv": 2, "C": C, "S": 2} for T, C in ((65, 64), (31, 32), (17, 16))),
        _alone(32, 33, 0, 1, Hv=2, C=32, out_dtype="float16"), _alone(0, Hv=1, C=64),
    ],
    "gdn_recompute_w_u": [
        _alone(*_ODD, Hk=2, Hv=4, Dk=6, Dv=10, C=16), _alone(3, 37, Hk=1, Hv=3, Dk=20, Dv=8, C=32, **_H),
        _alone(0, Hk=1, Hv=1, Dk=4, Dv=4, C=16),
    ],
    "gdn_chunk_layout": [
        {"query_start_loc": starts(*_ODD, 1000), "num_chunks": 21, "chunk_size": 64},
        {"query_start_loc": starts(*[3, 0] * 150), "num_chunks": 300, "chunk_size": 2},
    ],
    "gdn_delta_h": [
        _whole(*_ODD, Hk=2, Hv=4, Dk=6, Dv=10, C=16), _whole(3, 37, Hk=1, Hv=3, Dk=20, Dv=8, C=32, **_H),
        _whole(0, Hk=1, Hv=1, Dk=4, Dv=4, C=16), _whole(66, Hv=1, **_TENSOR, **_B),
    ],
    "gdn_chunk_o": [
        _alone(*_ODD, NC=8, Hk=2, Hv=4, Dk=6, Dv=10, C=16),
        _alone(3, 37, NC=3, Hk=1, Hv=3, Dk=20, Dv=8, C=32, q="float16"),
        _alone(0, NC=0, Hk=1, Hv=1, Dk=4, Dv=4, C=16), _alone(40, NC=1, Hv=1, q="bfloat16", **_TENSOR),
        _alone(65, 0, 17, NC=3, Hv=2, q="bfloat16", **_TENSOR),
    ],
    "gdn_chunk_prefill": [
        _whole(*_ODD, Hk=2, Hv=4, Dk=6, Dv=10, C=16), _whole(3, 37, Hk=1, Hv=3, Dk=20, Dv=8, C=32, q="float16"),
        _whole(65, 0, 2, Hk=1, Hv=2, Dk=16, Dv=16, C=64, q="bfloat16"),
        _whole(65, 0, 17, Hv=2, q="bfloat16", **_TENSOR),
        _whole(70, Hv=1, q="bfloat16", k=_alike(70), g=np.full((70, 1), -0.01, np.float32), **_TENSOR),
    ],
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
        _mamba(*_ODD, Q=16, **_MAMBA, **_EACH, z="float32", dt_max=0.9), _mamba(0, 9, Q=4, H=2, P=64, G=1, N=64),
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
    ],
    "kda_decay_gate_chunk_cumsum": [
        _alone(*_ODD, H=3, D=7, C=16, g1="float16", dt_bias="float32"), _alone(0, 64, 65, H=2, D=80, C=64),
        _alone(9, 4, H=1, D=5, C=5, beta=2.0, threshold=0.5), _alone(0, 0, H=2, D=4, C=64),
    ],
    "kda_kkt": [
        _alone(*_ODD, H=2, D=6, C=16), _alone(3, 70, H=1, D=20, C=64, q="bfloat16"),
        _alone(0, 37, H=2, D=3, C=32, q="float16"), _alone(0, H=1, D=4, C=16),
    ],
    "kda_recompute_w_u": [
        _alone(*_ODD, H=2, D=6, Dv=10, C=16), _alone(3, 37, H=1, D=20, Dv=136, C=32, k="float16"),
        _alone(65, H=1, D=130, Dv=3, C=64, k="bfloat16"), _alone(0, H=1, D=4, Dv=4, C=16),
    ],
    "kda_delta_h": [
        _whole(*_ODD, H=2, D=6, Dv=10, C=16), _whole(3, 37, H=1, D=20, Dv=8, C=7, kg="float16"),
        _whole(0, H=1, D=4, Dv=4, C=16), _whole(66, H=1, kg="bfloat16", **_CORES),
    ],
    "kda_chunk_o": [
        _alone(*_ODD, NC=8, H=2, D=6, Dv=10, C=16), _alone(3, 37, NC=3, H=1, D=20, Dv=8, C=32, q="float16"),
        _alone(0, NC=0, H=1, D=4, Dv=4, C=16), _alone(65, 0, 17, NC=3, H=1, q="bfloat16", **_CORES),
    ],
    "kda_chunk_prefill": [
        _whole(64, H=1, q="bfloat16", k=_alike(64), g1=_slow(64), **_CORES),
        _whole(65, 0, 17, H=1, q="bfloat16", dt_bias="float32", **_CORES),
        _whole(40, H=1, q="bfloat16", g1=_abrupt(40), **_CORES),
        _whole(*_ODD, H=2, D=6, Dv=10, C=16, dt_bias="float32"), _whole(3, 37, H=1, D=20, Dv=8, C=32, q="float16"),
        _whole(65, 0, 2, H=1, D=16, Dv=16, C=64, q="bfloat16"),
    ],
}  # fmt: skip
