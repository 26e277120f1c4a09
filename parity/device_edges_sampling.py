"""Edge shapes of the sampling kernels: widths around vectors and chunks, ties by the thousand, rows without a wish."""

from __future__ import annotations

import numpy as np

_RNG = np.random.Generator(np.random.PCG64(29))
_F32, _I32 = np.float32, np.int32
_WIDTHS = (1, 24, 250, 2052, 3001)


def _logits(rows: int, width: int, scale: float) -> np.ndarray:
    return (_RNG.standard_normal((rows, width)) * scale).astype(_F32)


def _rounded(rows: int, width: int) -> np.ndarray:
    """Small integers: every value some hundred times."""
    return np.round(_logits(rows, width, 3.0))


def _masked(rows: int, width: int, kept: int) -> np.ndarray:
    """All but `kept` of each row is -inf."""
    logits = _logits(rows, width, 2.0)
    for row in logits:
        row[_RNG.permutation(width)[kept:]] = -np.inf
    return logits


def _rows_of_one(width: int) -> np.ndarray:
    """Rows of equal zeros, infinities and NaN; and one of every second NaN."""
    rows = np.repeat(_F32([[0.0], [-np.inf], [np.inf], [np.nan], [1.0]]), width, axis=1)
    rows[4, ::2] = np.nan
    return rows


_K = np.array([1, 0, 3, 50, 2000, 7], _I32)
_P = np.array([0.9, 0.5, 1.0, 0.999, 0.1, 0.0], _F32)


def _truncated(logits: np.ndarray, k=None, p=None) -> dict:
    rows, width = logits.shape
    found = {"R": rows, "V": width, "logits": logits}
    return found | {} if k is None and p is None else found | {"k": k, "p": p}


_SEEDS = np.array([5, -1, 2**62, 7, 7, 0], np.int64)
_PADDED = np.array([0, -1, 2, 1, -7, 0], _I32)

EDGES: dict[str, list[dict]] = {
    "apply_temperature": [*({"R": 3, "V": V} for V in (8, 264)), {"R": 300, "V": 16}, {"R": 0, "V": 8}],
    "apply_penalties": [*({"R": 3, "V": V} for V in (8, 264, 30)), {"R": 300, "V": 16}, {"R": 0, "V": 8}],
    "apply_min_p": [
        *({"R": 3, "V": V} for V in _WIDTHS), {"R": 5, "V": 40, "logits": _rows_of_one(40)}, {"R": 0, "V": 8},
        {"R": 3, "V": 40, "min_p": _F32([1.0, 0.0, -1.0]), "logits": _rounded(3, 40)},
    ],
    "apply_top_k_top_p": [
        _truncated(_logits(6, 2052, 3.0), _K, _P),
        _truncated(_rounded(2, 2050), None, _P[[0, 3]]),
        _truncated(_logits(2, 5200, 20.0), np.array([4500, 3], _I32), _P[:2]),
        _truncated(_logits(2, 5200, 0.001), np.array([4800, 4], _I32), None),
        _truncated(np.zeros((2, 4101), _F32), np.array([0, 4000], _I32), _P[:2]),
        _truncated(_masked(2, 4200, 9), np.array([20, 5], _I32), _P[[0, 3]]),
        _truncated(_rows_of_one(40), np.array([3, 3, 39, 3, 30], _I32), np.full(5, 0.5, _F32)),
        _truncated(_logits(6, 24, 60.0), None, np.full(6, 1.0, _F32)),
        {"R": 3, "V": 1001}, {"R": 0, "V": 8, "k": "int32", "p": "float32"},
    ],
    "greedy_argmax": [
        *({"R": 3, "V": V} for V in _WIDTHS), {"R": 5, "V": 40, "logits": _rows_of_one(40)}, {"R": 0, "V": 8},
        {"R": 2, "V": 3001, "logits": _rounded(2, 3001)},
    ],
    **{
        op: [*({"R": 3, "V": V} for V in _WIDTHS), {"R": 5, "V": 40, "logits": _rows_of_one(40)}, {"R": 0, "V": 8},
             {"R": 2, "V": 1, "logits": _F32([[-0.0], [0.0]])}]
        for op in ("compute_probs", "compute_logprobs")
    },
    "gather_logprobs": [
        *({"R": 3, "V": V, "n": n, "num_logprobs": n, "logprobs": _rounded(3, V)}
          for V, n in ((1, 1), (24, 24), (250, 7), (3100, 4), (5001, 4), (2052, 0), (1100, 2))),
        {"R": 5, "V": 4200, "n": 4, "num_logprobs": 4, "logprobs": _rows_of_one(4200)},
        {"R": 2, "V": 5001, "n": 5, "num_logprobs": 5, "logprobs": _masked(2, 5001, 3)},
        {"R": 0, "V": 8, "n": 3, "num_logprobs": 3},
    ],
    "random_sample": [
        *({"R": 3, "V": V} for V in _WIDTHS), {"R": 0, "V": 8},
        {"R": 6, "V": 500, "probs": np.where(_logits(6, 500, 1.0) > 1.5, _F32(0.01), _F32(0)), "seeds": _SEEDS},
    ],
    "gumbel_sample": [
        *({"T": 3, "V": V, "N": 2, "fp64": fp64} for V in _WIDTHS[1:] for fp64 in (False, True)),
        {"T": 6, "V": 40, "N": 3, "req_idx": _PADDED, "temperature": _F32([0.7, 0, 1]), "apply_temperature": False},
        {"T": 6, "V": 40, "N": 2, "temperature": _F32([0.2, 4]), "apply_temperature": False, "fp64": True},
        {"T": 3, "V": 300, "N": 2, "pos": np.array([2**40 + 3, 2**63 - 1, 2**32], np.int64)}, {"T": 0, "V": 8, "N": 1},
    ],
    "apply_logit_bias": [
        {"R": 3, "V": 40, "m": 600, "rows": _RNG.integers(0, 3, 600).astype(_I32),
         "cols": _RNG.integers(0, 40, 600).astype(_I32)},
        {"R": 2, "V": 5001, "m": 2}, {"R": 0, "V": 8, "m": 0},
    ],
    "apply_token_mask": [{"R": 3, "V": 40, "m": 600}, {"R": 2, "V": 5001, "m": 2}, {"R": 0, "V": 8, "m": 0}],
    "apply_allowed_token_ids": [{"R": 3, "V": 264}, {"R": 3, "V": 33}, {"R": 0, "V": 8}],
    "apply_bad_words": [
        {"R": 3, "V": 64, "bad_words": [[[3], [3], [1, 2, 5], [2, 1, 7]], [], [[9, 9], [4]]],
         "past_ids": [[1, 2], [1], [9]]},
        {"R": 1, "V": 200, "bad_words": [[[i] for i in range(0, 200, 3)]], "past_ids": [[]]},
    ],
    "apply_min_tokens": [
        {"R": 3, "V": 64, "stop_ids": [[1, 2], [3], [63, 0]], "num_generated": np.array([0, 2, 5], _I32),
         "min_tokens": np.array([1, 2, 6], _I32)},
        {"R": 2, "V": 200, "stop_ids": [list(range(0, 200, 3)), [7]], "num_generated": np.array([1, 1], _I32),
         "min_tokens": np.array([3, 3], _I32)},
    ],
}  # fmt: skip
