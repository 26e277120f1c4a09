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
