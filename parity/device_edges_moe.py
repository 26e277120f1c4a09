"""Shapes for experts: around a warp's registers, tiles of pairs, columns and stages; experts without rows and rows
without experts."""

from __future__ import annotations

import numpy as np

_KINDS = ("bfloat16", "float16", "float32")
_SCORES, _F32, _NONE = ("softmax", "sigmoid"), "float32", -np.inf
_GROUPED = {"num_expert_group": 8, "topk_group": 4, "scoring": "sigmoid", "bias": _F32, "top_k": 8}


def _same(T: int, E: int) -> np.ndarray:
    """Logits that many experts share."""
    return (np.arange(T * E, dtype=np.float32).reshape(T, E) % 3) / 4


def _few_numbers(T: int, E: int) -> np.ndarray:
    """Logits of which most are NaN or -infinity."""
    logits = np.random.default_rng(E).standard_normal((T, E)).astype(np.float32)
    logits[0, 5:], logits[1, ::3], logits[2, 40:], logits[3, 1:] = np.nan, np.nan, -np.inf, np.nan
    return logits


def _cores(R: int, T: int, k: int, E: int, N: int, K: int, kind: str = "bfloat16", **more) -> dict:
    return {"R": R, "T": T, "k": k, "E": E, "N": N, "K": K, "x": kind, "weight": kind, **more}


def _one_sided(T: int, k: int, E: int) -> np.ndarray:
    """Nearly all to the last expert, some to the first, none between."""
    ids = np.full((T, k), E - 1, np.int32)
    ids[:: max(T // 3, 1), 0] = 0
    return ids


EDGES: dict[str, list[dict]] = {
    "moe_router_topk": [
        *({"T": 6, "E": E, "top_k": 8, "logits": kind} for E, kind in zip((64, 65, 160, 256, 512, 513), _KINDS * 2)),
        *({"T": 9, "E": E, "top_k": 6, "logits": _same(9, E), "scoring": s} for E in (72, 600) for s in _SCORES),
        {"T": 5, "E": 256, **_GROUPED, "routed_scaling_factor": 2.5},
        {"T": 3, "E": 64, **_GROUPED, "logits": "bfloat16"}, {"T": 5, "E": 24, **_GROUPED},
        *({"T": 5, "E": 256, **_GROUPED, "logits": _few_numbers(5, 256), "topk_group": kept} for kept in (4, 5)),
        {"T": 5, "E": 160, "top_k": 6, "num_expert_group": 8, "topk_group": 3, "scoring": "sigmoid",
         "logits": _few_numbers(5, 160)},
        {"T": 4, "E": 256, **_GROUPED, "bias": np.where(np.arange(256) < 250, -np.inf, 0).astype(np.float32)},
        {"T": 4, "E": 256, **_GROUPED, "bias": np.full(256, -0.75, np.float32), "logits": _same(4, 256)},
        {"T": 20, "E": 512, "top_k": 5, "bias": _F32, "num_expert_group": 16, "topk_group": 3, "logits": "float16",
         "scoring": "sigmoid"},
        {"T": 3, "E": 640, "top_k": 3, "bias": _F32, "num_expert_group": 20, "topk_group": 2, "scoring": "sigmoid"},
        {"T": 4, "E": 96, "top_k": 3, "num_expert_group": 48, "topk_group": 40},
        {"T": 4, "E": 120, "top_k": 30, "num_expert_group": 4, "topk_group": 1, "renormalize": False},
        {"T": 3, "E": 64, "top_k": 40, "bias": _F32, "scoring": "softmax", "logits": "float16"},
        {"T": 3, "E": 120, "top_k": 20}, {"T": 1100, "E": 8, "top_k": 2}, {"T": 2, "E": 1, "top_k": 1},
        {"T": 0, "E": 8, "top_k": 2},
        *({"T": 3, "E": 32, "top_k": 2, "scoring": s, "logits": np.full((3, 32), _NONE, np.float32)} for s in _SCORES),
    ],
    "moe_sum": [
        *({"T": 3, "k": k, "H": H, "x": kind} for k, H in ((8, 264), (5, 17), (1, 8)) for kind in _KINDS),
        {"T": 300, "k": 2, "H": 136, "x": "bfloat16"}, {"T": 2, "k": 0, "H": 8}, {"T": 2, "k": 4, "H": 0},
    ],
    "moe_grouped_gemm": [
        # Tensor cores: tiles of 16, 32, 64 and 128 pairs.
        *(_cores(25, 25, 2, 1, 264, 72, kind, weights=_F32) for kind in _KINDS[:2]),
        *(_cores(200, 200, 1, 1, 12, 72, kind) for kind in _KINDS[:2]),
        _cores(3, 3, 2, 300, 8, 88), _cores(80, 80, 2, 300, 8, 80), _cores(260, 260, 1, 1030, 4, 80),
        *(_cores(9, 9, 2, 5, 72, 136, kind, weights=w) for kind in _KINDS[:2] for w in (None, _F32)),
        _cores(1, 1, 8, 8, 136, 72), _cores(0, 0, 2, 3, 8, 64), _cores(70, 35, 2, 3, 5, 96, weights=_F32),
        *(_cores(19, 19, 2, 2, 133, 200, kind) for kind in _KINDS[:2]), _cores(9, 9, 2, 3, 4, 56),
        _cores(80, 40, 2, 4, 64, 128, weights=_F32, ids=_one_sided(40, 2, 4)),
        _cores(4200, 2100, 2, 5, 4, 64, ids=_one_sided(2100, 2, 5)),  # pairs in parts
        _cores(70, 70, 1, 1, 12, 320), _cores(130, 65, 2, 5, 257, 104, ids=_one_sided(65, 2, 5)),
        # The mirror's order.
        {"R": 5, "T": 5, "k": 2, "E": 4, "N": 9, "K": 528}, {"R": 1, "T": 1, "k": 3, "E": 3, "N": 17, "K": 1040},
        {"R": 24, "T": 12, "k": 2, "E": 2, "N": 10, "K": 48, "weights": _F32, "out_dtype": "bfloat16"},
        _cores(20, 20, 2, 3, 9, 537, weights=_F32), _cores(7, 7, 2, 3, 8, 64, out_dtype=_F32),
        {"R": 4, "T": 4, "k": 2, "E": 3, "N": 5, "K": 520, "x": "float16", "weight": "bfloat16", "out_dtype": _F32},
        {"R": 3, "T": 3, "k": 2, "E": 2, "N": 4, "K": 0, "weights": _F32},
        {"R": 3, "T": 3, "k": 1, "E": 2, "N": 0, "K": 8},
        {"R": 4, "T": 4, "k": 1, "E": 0, "N": 4, "K": 8, "ids": np.full((4, 1), -1, np.int32)},
    ],
}  # fmt: skip
"""Axes as in `Contract.examples`, by op."""
