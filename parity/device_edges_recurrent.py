"""Edge shapes of the recurrent kernels: rows of every form, null slots, groups of heads, sequences cut anywhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def _starts(*lengths: int) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


_CODES = np.arange(1 << 16, dtype=np.uint16)
_CODES[_CODES & 0x7FFF > 0x7F80] |= 0x40  # NaN that do not signal: those would be events to NumPy
_CODES = _CODES.view(ml_dtypes.bfloat16).reshape(256, 256)
"""Every bfloat16 number, each in a sequence's first token."""
_FINITE = np.where(np.isfinite(_CODES.astype(np.float32)), _CODES, ml_dtypes.bfloat16(1.0))
_16 = {"mixed_qkv": "bfloat16", "dt_bias": "bfloat16"}


def _packed(B: int, Hk: int, Hv: int, Dk: int, Dv: int, **more) -> dict:
    return {"B": B, "C": 2 * Hk * Dk + Hv * Dv, "Hv": Hv, "Dv": Dv, "Dk": Dk, "slots": B + 2, **more}


def _heads(B: int, Hk: int, Hv: int, Dk: int, Dv: int, **more) -> dict:
    return {"B": B, "Hk": Hk, "Hv": Hv, "Dk": Dk, "Dv": Dv, "slots": B + 1, "state_idx": "int32", **more}


def _channels(B: int, H: int, D: int, Dv: int, **more) -> dict:
    return {"B": B, "H": H, "D": D, "Dv": Dv, "slots": B + 1, "state_idx": "int32", **more}


def _conv(T: int, C: int, K: int, lengths: tuple[int, ...], **more) -> dict:
    return {"T": T, "C": C, "K": K, "Km1": K - 1, "N": len(lengths), "slots": len(lengths) + 1,
            "query_start_loc": _starts(*lengths), **more}  # fmt: skip


def _mamba(B: int, H: int, dim: int, N: int, G: int = 1, **more) -> dict:
    return {"B_": B, "H": H, "dim": dim, "N": N, "G": G, "slots": B + 1, "dt_softplus": True, **more}


def _tied(H: int, dim: int, N: int) -> np.ndarray:
    """One number a head, as Mamba-2 has them."""
    return np.broadcast_to(-np.linspace(0.1, 2, H, dtype=np.float32)[:, None, None], (H, dim, N))


EDGES: dict[str, list[dict]] = {
    "gdn_packed_decode": [
        *(_packed(3, 1, 2, 128, Dv, **_16, scale=128**-0.5) for Dv in (16, 128)),
        _packed(2, 1, 1, 128, 64, **_16, state="bfloat16"), _packed(3, 1, 2, 128, 24, mixed_qkv="float16"),
        _packed(8, 2, 2, 40, 17, scale=0.1), _packed(2, 1, 1, 128, 128, state="float16"), _packed(2, 1, 2, 3, 2),
        _packed(2, 2, 2, 64, 5, **_16, state="bfloat16"), _packed(0, 1, 1, 8, 8),
    ],
    "gdn_decode": [
        _heads(3, 1, 2, 128, 128, q="bfloat16"), _heads(2, 2, 2, 128, 48), _heads(5, 2, 2, 128, 32, q="float16"),
        _heads(2, 1, 1, 128, 64, state="float16"), _heads(3, 1, 2, 5, 7, q="bfloat16"), _heads(2, 1, 1, 128, 0),
        {"B": 2, "Hk": 1, "Hv": 1, "Dk": 0, "Dv": 3, "slots": 2},
    ],
    "gdn_prefill": [
        {"T": 6, "N": 4, "Hk": 1, "Hv": 2, "Dk": 128, "Dv": 64, "q": "bfloat16",
         "query_start_loc": _starts(3, 0, 1, 2)},
        {"T": 4, "N": 1, "Hk": 1, "Hv": 1, "Dk": 128, "Dv": 16}, {"T": 7, "N": 2, "Hk": 1, "Hv": 1, "Dk": 7, "Dv": 19},
    ],
    "kda_decay_gate": [
        {"T": 5, "H": 3, "D": 128, "g1": "bfloat16", "dt_bias": "float32"},
        {"T": 300, "H": 2, "D": 16, "g1": "float16"}, {"T": 256, "H": 2, "D": 128, "g1": _CODES.reshape(256, 2, 128)},
        {"T": 1032, "H": 2, "D": 128, "g1": np.resize(_CODES, (1032, 2, 128)), "dt_bias": "float32"},
        {"T": 4, "H": 2, "D": 24, "beta": 0.5, "threshold": 0.25, "dt_bias": "float32"}, {"T": 0, "H": 2, "D": 8},
    ],
    "kda_low_rank_decay": [
        {"T": 5, "Hid": 264, "R": 16, "E": 72, "x": "bfloat16"}, {"T": 33, "Hid": 40, "R": 24, "E": 8},
        {"T": 2, "Hid": 7, "R": 3, "E": 5, "x": "float16", "rounding": "vllm"}, {"T": 0, "Hid": 8, "R": 4, "E": 4},
        {"T": 3, "Hid": 64, "R": 0, "E": 4},
    ],
    "kda_decode": [
        _channels(3, 2, 128, 128, q="bfloat16", scale=128**-0.5), _channels(2, 2, 128, 48, qk_l2norm=False),
        _channels(5, 2, 128, 32, q="float16"),
        _channels(3, 2, 20, 7, q="bfloat16", scale=0.1), _channels(2, 1, 128, 40),
    ],
    "kda_prefill_recurrent": [
        {"T": 6, "N": 4, "H": 2, "D": 128, "Dv": 64, "q": "bfloat16", "query_start_loc": _starts(3, 0, 1, 2)},
        {"T": 4, "N": 1, "H": 1, "D": 128, "Dv": 16}, {"T": 7, "N": 2, "H": 1, "D": 7, "Dv": 19, "qk_l2norm": False},
    ],
    "causal_conv1d_fwd": [
        *(_conv(T, C, 4, lengths, x="bfloat16", conv_state=kind, **more)
          for T, C, lengths, kind, more in (
              (40, 16, (40,), "bfloat16", {}), (41, 8, (1, 2, 0, 3, 9, 26), "float32", {"bias": "bfloat16"}),
              (70, 24, (7, 2, 61), "bfloat16", {"state_idx": np.int32([2, -1, 0]), "weight": "bfloat16"}),
              (40, 16, (5, 2, 33), "bfloat16", {"has_initial_state": np.ones(3, np.int8)}),
              (40, 15, (7, 2, 31), "bfloat16", {"has_initial_state": np.ones(3, np.int8)}),
              (40, 1032, (9, 31), "bfloat16", {"weight": "bfloat16", "rounding": "vllm", "silu": False}),
              (37, 8, (37,), "bfloat16", {"rounding": "vllm_native", "bias": "float32"}))),
        _conv(40, 16, 3, (8, 32), x="float16", conv_state="float16", bias="float16", rounding="vllm", weight="float16"),
        _conv(19, 5, 4, (18, 1), x="bfloat16", conv_state="bfloat16"), _conv(9, 12, 4, (2, 7), bias="float32"),
        *(_conv(256, 256, 4, (1,) * 256, x=_CODES, weight=np.float32([[9, 9, 9, last]]).repeat(256, 0),
                conv_state="bfloat16", has_initial_state=np.zeros(256, np.int8)) for last in (1.0, 0.7109375)),
        *(_conv(256, 256, 4, (256,), x=_FINITE, conv_state="bfloat16", rounding=rounding,
                weight=np.float32([[0, 0, 0, last]]).repeat(256, 0).astype(ml_dtypes.bfloat16))
          for last, rounding in ((1.0, "vt"), (0.7109375, "vt"), (0.7109375, "vllm"))),
        _conv(2100, 8, 4, (2100,), x="bfloat16", conv_state="float32", weight="float32"), _conv(0, 8, 4, (0, 0)),
        _conv(15900, 8, 4, (13, 15860, 27), x="bfloat16", conv_state="bfloat16"),  # tiles of two turns
    ],
    "causal_conv1d_update": [
        {"B": 3, "C": 24, "K": 4, "Km1": 3, "slots": 4, "x": "bfloat16", "conv_state": kind, "weight": weight,
         "state_idx": "int32", "bias": "float32", "silu": silu}
        for kind, weight, silu in (
            ("bfloat16", "bfloat16", True), ("float32", "float32", False), ("float16", "float16", True))
    ] + [
        {"B": 2, "C": 16, "K": 4, "Km1": 3, "slots": 2, "x": "bfloat16", "conv_state": "bfloat16", "weight": "bfloat16",
         "rounding": rounding} for rounding in ("vllm", "vllm_native")
    ] + [
        {"B": 2, "C": 12, "K": 4, "Km1": 3, "slots": 3, "bias": "float32"},
        {"B": 3, "C": 8, "K": 5, "Km1": 4, "slots": 4},
        {"B": 1, "C": 2056, "K": 4, "Km1": 3, "slots": 1, "x": "bfloat16", "conv_state": "bfloat16",
         "weight": "bfloat16"},
        {"B": 9, "C": 264, "K": 4, "Km1": 3, "slots": 12, "x": "bfloat16", "conv_state": "bfloat16",
         "weight": "bfloat16", "state_idx": np.int32([3, -1, 0, 11, 2, 7, 10, -5, 9]), "bias": "bfloat16"},
        *({"B": 531, "C": 264, "K": 4, "Km1": 3, "slots": 531, "x": "bfloat16", "conv_state": "bfloat16",
           "weight": "bfloat16", "rounding": rounding} for rounding in ("vt", "vllm")),
        {"B": 0, "C": 8, "K": 4, "Km1": 3, "slots": 1},
    ],
    "causal_conv1d_update_spec": [
        {"B": 4, "M": 4, "C": 33, "K": 4, "L": 6, "slots": 5, "x": "bfloat16", "conv_state": "bfloat16",
         "weight": "bfloat16", "state_idx": "int32", "rounding": "vllm", "num_accepted_tokens": np.int32([1, 4, 2, 3])},
        {"B": 2, "M": 5, "C": 8, "K": 2, "L": 5, "slots": 2, "x": "float16", "rounding": "vt"},
        {"B": 2, "M": 2, "C": 8, "K": 4, "L": 4, "slots": 2, "x": "bfloat16", "conv_state": "bfloat16",
         "rounding": "vllm_native", "silu": False},
    ],
    "short_conv": [
        {"T": 41, "C": 8, "K": 3, "Km1": 2, "N": 5, "bcx": "bfloat16", "conv_state": "bfloat16",
         "query_start_loc": _starts(1, 0, 2, 30, 8), "bias": "bfloat16"},
        {"T": 40, "C": 264, "K": 3, "Km1": 2, "N": 1, "bcx": "bfloat16", "weight": "bfloat16"},
        {"T": 12, "C": 5, "K": 3, "Km1": 2, "N": 2, "bcx": "float16", "conv_state": "float16"},
    ],
    "selective_state_update": [
        _mamba(3, 4, 64, 128, x="bfloat16", A=_tied(4, 64, 128), D="float32", z="bfloat16", dt_bias="float32"),
        _mamba(3, 2, 32, 128, x="bfloat16", A=_tied(2, 32, 128), state_idx="int32", dst_idx="int32"),
        _mamba(3, 4, 64, 128, x="bfloat16", A=_tied(4, 64, 128), state="bfloat16", G=2),
        _mamba(3, 4, 64, 128, x="bfloat16", dt_bias="float32", z="bfloat16", G=4, state_idx="int32"),
        _mamba(3, 1, 128, 16, x="bfloat16", D="float32", z="bfloat16", state="bfloat16", state_idx="int32",
               dst_idx="int32"),
        _mamba(2, 1, 256, 16, D="float32", dt_softplus=False), _mamba(2, 3, 5, 9, A=_tied(3, 5, 9), state="float16"),
        _mamba(2, 2, 16, 64, x="float16", A=_tied(2, 16, 64), state_idx="int32", dst_idx="int32"),
        _mamba(264, 1, 128, 16, x="bfloat16", z="bfloat16", dt_bias="float32"), _mamba(0, 1, 8, 16),
    ],
    "linear_attention_decode": [
        {"B": 3, "H": 2, "D": 128, "slots": 4, "q": "bfloat16", "state_idx": "int32"},
        {"B": 2, "H": 2, "D": 68, "slots": 2, "q": "float16"}, {"B": 2, "H": 1, "D": 160, "slots": 3},
        {"B": 2, "H": 1, "D": 9, "slots": 3, "q": "bfloat16"}, {"B": 0, "H": 1, "D": 8, "slots": 1},
    ],
    "linear_attention_prefill": [
        {"T": 6, "N": 4, "H": 2, "D": 64, "q": "bfloat16", "query_start_loc": _starts(3, 0, 1, 2)},
        {"T": 5, "N": 2, "H": 1, "D": 132}, {"T": 5, "N": 2, "H": 1, "D": 132, "rounding": "vllm"},
        {"T": 5, "N": 1, "H": 1, "D": 9, "q": "float16"},
    ],
    "mamba2_rmsnorm_gated": [
        *({"...": (3,), "W": W, "groups": groups, "y": "bfloat16", "weight": "bfloat16", "rounding": rounding}
          for W, groups, rounding in ((64, 1, "vllm"), (512, 2, "vt"), (2560, 2, "vt"), (4096, 1, "vllm_native"))),
        {"...": (2,), "W": 8200, "y": "float16"}, {"...": (2,), "W": 33, "groups": 3}, {"...": (0,), "W": 8},
        {"...": (2,), "W": 16400, "groups": 2, "weight": "bfloat16"},
        {"...": (2,), "W": 1032, "y": "float16"}, {"...": (2,), "W": 4096, "weight": "float16"},
        {"...": (256,), "W": 256, "z": _CODES.astype(np.float32)},
        {"...": (2112,), "W": 16, "groups": 2, "y": "bfloat16", "weight": "bfloat16"},
    ],
    "gdn_state_gather": [
        {"slots": 9, "W": 264, "N": 5, "cache": "bfloat16", "has_initial_state": "int8"},
        {"slots": 4, "W": 3, "N": 4, "cache": "float16", "has_initial_state": "int32"}, {"slots": 4, "W": 0, "N": 2},
    ],
    "gdn_state_scatter": [
        {"slots": 9, "W": 264, "N": 5, "cache": "float16"}, {"slots": 4, "W": 3, "N": 4, "cache": "bfloat16"},
        {"slots": 4, "W": 8, "N": 0},
    ],
}  # fmt: skip
"""Axes as in `Contract.examples`, by op."""
