"""The next token of one request from its logits, in the order of vLLM's sampler, over `ops`.

Requests are sampled one by one: the random numbers of `ops.random_sample` depend on the row, and a request's
tokens must not depend on its neighbours.
"""

from __future__ import annotations

import numpy as np

from vtlab import ops
from vtlab.ops.errors import ContractError

from .request import Request, TokenLogprobs

_MASK = 2**64 - 1


def sample(request: Request, logits: np.ndarray) -> tuple[int, TokenLogprobs | None]:
    """The request's next token from logits [1, V], and its log-probabilities where the request asks for them.

    Order: allowed ids, bad words, minimum length, logit bias, penalties; arg-max for temperature 0; else
    temperature, min-p, top-k and top-p, a draw. Log-probabilities are those of the raw logits.
    Errors: ContractError for a NaN logit.
    """
    if np.isnan(logits).any():
        raise ContractError("sample", "logits", f"NaN in the logits of request {request.id}", "numbers")
    raw = ops.cast_f32(logits) if logits.dtype != np.float32 else logits
    params = request.params
    processed = _penalised(request, _masked(request, raw))
    greedy = params.temperature == 0.0
    token = int(ops.greedy_argmax(processed)[0]) if greedy else _drawn(request, processed)
    return token, None if params.logprobs is None else _logprobs(raw, token, params.logprobs)


def step_seed(seed: int, step: int) -> int:
    """A seed for draw number `step` of a request: SplitMix64's output function over seed and step, as int64."""
    x = (seed + 0x9E3779B97F4A7C15 * (step + 1)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def _masked(request: Request, logits: np.ndarray) -> np.ndarray:
    params, vocab = request.params, logits.shape[1]
    if params.allowed_token_ids is not None:
        excluded = np.ones((1, vocab), np.int8)
        excluded[0, list(params.allowed_token_ids)] = 0
        logits = ops.apply_allowed_token_ids(logits, excluded)
    if params.bad_words:
        logits = ops.apply_bad_words(logits, [params.bad_words], [request.generated])
    if len(request.generated) < params.min_tokens:
        counts = (np.array([count], np.int32) for count in (len(request.generated), params.min_tokens))
        logits = ops.apply_min_tokens(logits, [sorted(request.stop_ids)], *counts)
    if params.logit_bias:
        columns = np.array(list(params.logit_bias), np.int32)
        bias = np.array(list(params.logit_bias.values()), np.float32)
        logits = ops.apply_logit_bias(logits, np.zeros(len(columns), np.int32), columns, bias)
    return logits


def _penalised(request: Request, logits: np.ndarray) -> np.ndarray:
    params = request.params
    values = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
    if values == (0.0, 0.0, 1.0):
        return logits
    vocab = logits.shape[1]
    counts = np.bincount(np.asarray(request.generated, np.int64), minlength=vocab).astype(np.int32)[None]
    prompt = np.zeros((1, vocab), np.int8)
    prompt[0, list(request.prompt)] = 1
    columns = [np.array([value], np.float32) for value in values]
    return ops.apply_penalties(logits, prompt, counts, (counts > 0).astype(np.int8), *columns)


def _drawn(request: Request, logits: np.ndarray) -> int:
    params = request.params
    one = lambda value, dtype: np.array([value], dtype)
    logits = ops.apply_temperature(logits, one(params.temperature, np.float32), all_random=True)
    if params.min_p > 0:
        logits = ops.apply_min_p(logits, one(params.min_p, np.float32))
    k = one(params.top_k, np.int32) if params.top_k else None
    p = one(params.top_p, np.float32) if params.top_p < 1 else None
    if k is not None or p is not None:
        logits = ops.apply_top_k_top_p(logits, k, p)
    seeds = one(step_seed(request.seed, len(request.generated)), np.int64)
    return int(ops.random_sample(ops.compute_probs(logits), seeds)[0])


def _logprobs(raw: np.ndarray, token: int, count: int) -> TokenLogprobs:
    ids, values, ranks = ops.gather_logprobs(ops.compute_logprobs(raw), count, np.array([token], np.int64))
    top = tuple((int(i), float(value)) for i, value in zip(ids[0, 1:], values[0, 1:]))
    return TokenLogprobs(float(values[0, 0]), int(ranks[0]), top)
