"""Rows of logits before a draw, and the draw itself."""

from __future__ import annotations

import numpy as np

from .launch import Kernels, delivered, provider, results
from .threads import split

K, R, D = Kernels("logits"), Kernels("ranks"), Kernels("draws")
_FLOAT32, _INT32, _INT64 = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.int64)
_ELEMENT = 64  # what an element costs, in the units of `split`


def _rows(op, logits, out, kernel, *arguments):
    """kernel(rows, logits, out, ...)."""
    made = results(op, out, (logits.shape, _FLOAT32))
    split(kernel, len(logits), logits.size * _ELEMENT, logits, made[0], *arguments)
    return delivered(out, made)


@provider("compute_probs")
def compute_probs(logits, *, out=None):
    """oracle.sampling.compute_probs."""
    return _rows("compute_probs", logits, out, K.softmax, logits.shape[1], None, 0)


@provider("compute_logprobs")
def compute_logprobs(logits, *, out=None):
    """oracle.sampling.compute_logprobs."""
    return _rows("compute_logprobs", logits, out, K.softmax, logits.shape[1], None, 1)


@provider("apply_min_p")
def apply_min_p(logits, min_p, *, out=None):
    """oracle.logits.apply_min_p."""
    return _rows("apply_min_p", logits, out, K.softmax, logits.shape[1], min_p, 2)


@provider("apply_temperature")
def apply_temperature(logits, temperature, *, all_random=False, out=None):
    """oracle.logits.apply_temperature."""
    return _rows("apply_temperature", logits, out, K.temperature, temperature, logits.shape[1], bool(all_random))


@provider("apply_penalties")
def apply_penalties(
    logits, prompt_mask, output_counts, output_mask, frequency_penalties, presence_penalties, repetition_penalties, *,
    out=None,
):  # fmt: skip
    """oracle.logits.apply_penalties."""
    penalties = frequency_penalties, presence_penalties, repetition_penalties
    masks = prompt_mask, output_counts, output_mask
    return _rows("apply_penalties", logits, out, K.penalties, *masks, *penalties, logits.shape[1])


@provider("apply_allowed_token_ids")
def apply_allowed_token_ids(logits, mask, *, out=None):
    """oracle.token_masks.apply_allowed_token_ids."""
    return _rows("apply_allowed_token_ids", logits, out, K.masked, mask, logits.shape[1])


def _rank_bytes(width: int) -> int:
    """Memory that the kernels of ranks want."""
    return 8 * R.CELLS + 12 * width + 512


@provider("apply_top_k_top_p")
def apply_top_k_top_p(logits, k=None, p=None, *, out=None):
    """oracle.logits.apply_top_k_top_p."""
    made = results("apply_top_k_top_p", out, (logits.shape, _FLOAT32))
    np.copyto(made[0], logits)
    if k is not None or p is not None:
        cost, width = logits.size * _ELEMENT, logits.shape[1]
        split(R.top_k_top_p, len(logits), cost, made[0], k, p, width, scratch=_rank_bytes(width))
    return delivered(out, made)


@provider("greedy_argmax")
def greedy_argmax(logits, *, out=None):
    """oracle.sampling.greedy_argmax."""
    made = results("greedy_argmax", out, (logits.shape[:1], _INT64))
    split(K.argmax, len(logits), logits.size * 4, logits, made[0], logits.shape[1])
    return delivered(out, made)


@provider("gather_logprobs")
def gather_logprobs(logprobs, num_logprobs, ids, *, out=None):
    """oracle.sampling.gather_logprobs."""
    rows, width = logprobs.shape
    form = rows, num_logprobs + 1
    made = results("gather_logprobs", out, (form, _INT32), (form, _FLOAT32), ((rows,), _INT64))
    cost, memory = logprobs.size * _ELEMENT, _rank_bytes(width)
    split(R.largest, rows, cost, logprobs, ids, *made, width, num_logprobs, scratch=memory)
    return delivered(out, made)


@provider("gumbel_sample")
def gumbel_sample(logits, req_idx, temperature, seed, pos, *, apply_temperature=True, fp64=False, out=None):
    """oracle.draws.gumbel_sample."""
    made = results("gumbel_sample", out, (logits.shape[:1], _INT64))
    kernel = D.gumbel64 if fp64 else D.gumbel
    split(
        kernel, len(logits), logits.size * _ELEMENT, logits, req_idx, temperature, seed, pos, made[0], logits.shape[1],
        bool(apply_temperature),
    )  # fmt: skip
    return delivered(out, made)
