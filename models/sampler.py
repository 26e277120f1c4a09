"""The next token of requests from their logits, in the order of vLLM's sampler, over `ops`.

Requests are drawn one by one: the random numbers of `ops.random_sample` depend on the row, and a request's tokens
must not depend on its neighbours. On a device all of a step's tokens are read at once, at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vtlab import ops
from vtlab.ops.arrays import HOST, Arrays
from vtlab.ops.errors import ContractError

from .request import Request, TokenLogprobs
from .runner import Scores
from .sampling_params import SamplingParams

_MASK = 2**64 - 1


def sample_rows(requests: Sequence[Request], scores: Scores) -> list[tuple[int, TokenLogprobs | None]]:
    """What `sample` gives for each request and its row of the step's scores."""
    if scores.report is None:
        return [sample(request, scores.raw[row : row + 1]) for row, request in enumerate(requests)]
    report, others = scores.report, [row for row, request in enumerate(requests) if not _takes_the_arg_max(request)]
    for row in others:  # the step itself has put every row's arg-max there
        _next_token(requests[row], scores.raw[row : row + 1], scores.arrays, report.ids[row : row + 1])
    if others:
        report.gather(scores.logprobs)
    found = []
    for request, (token, logprobs) in zip(requests, report.read()):
        _refuse_unless_finite(request, logprobs.logprob == logprobs.logprob)
        count = request.params.logprobs
        if count is not None and count < report.top:
            logprobs = TokenLogprobs(logprobs.logprob, logprobs.rank, logprobs.top[:count])
        found.append((token, None if count is None else logprobs))
    return found


def sample(request: Request, logits: np.ndarray) -> tuple[int, TokenLogprobs | None]:
    """The request's next token from float32 logits [1, V] on the host, and its log-probabilities where it wants them.

    Order: allowed ids, bad words, minimum length, logit bias, penalties; arg-max for temperature 0; else
    temperature, min-p, top-k and top-p, a draw. Log-probabilities are those of the raw logits.
    Errors: ContractError where the largest logit is not finite, so that no log-probability is a number.
    """
    _refuse_unless_finite(request, np.isfinite(logits.max()))
    token = int(_next_token(request, logits, HOST)[0])
    count = request.params.logprobs
    return token, None if count is None else _logprobs(logits, token, count)


def _refuse_unless_finite(request: Request, finite: bool) -> None:
    if not finite:
        got = f"NaN or infinity in the logits of request {request.id}"
        raise ContractError("sample", "logits", got, "numbers")


def _next_token(request: Request, logits, arrays: Arrays, out=None):
    """The next token, int64 [1], where the logits live."""
    processed = _penalised(request, _masked(request, logits, arrays), arrays)
    if request.params.temperature == 0.0:
        return ops.greedy_argmax(processed, out=out)
    return _drawn(request, processed, arrays, out)


def _takes_the_arg_max(request: Request) -> bool:
    """Whether its next token is the arg-max of the raw logits."""
    params = request.params
    masks = params.allowed_token_ids is not None or params.bad_words or params.logit_bias
    return params.temperature == 0.0 and not (masks or _below_minimum(request) or _penalties(params) != _NO_PENALTIES)


def step_seed(seed: int, step: int) -> int:
    """A seed for draw number `step` of a request: SplitMix64's output function over seed and step, as int64."""
    x = (seed + 0x9E3779B97F4A7C15 * (step + 1)) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


def _masked(request: Request, logits, arrays: Arrays):
    params, vocab = request.params, logits.shape[1]
    if params.allowed_token_ids is not None:
        excluded = np.ones((1, vocab), np.int8)
        excluded[0, list(params.allowed_token_ids)] = 0
        logits = ops.apply_allowed_token_ids(logits, arrays.send(excluded))
    if params.bad_words:
        logits = ops.apply_bad_words(logits, [params.bad_words], [request.generated])
    if _below_minimum(request):
        counts = (arrays.send(np.array([count], np.int32)) for count in (len(request.generated), params.min_tokens))
        logits = ops.apply_min_tokens(logits, [sorted(request.stop_ids)], *counts)
    if params.logit_bias:
        columns = np.array(list(params.logit_bias), np.int32)
        bias = np.array(list(params.logit_bias.values()), np.float32)
        where = (np.zeros(len(columns), np.int32), columns, bias)
        logits = ops.apply_logit_bias(logits, *(arrays.send(array) for array in where))
    return logits


def _below_minimum(request: Request) -> bool:
    return len(request.generated) < request.params.min_tokens


_NO_PENALTIES = (0.0, 0.0, 1.0)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.frequency_penalty, params.presence_penalty, params.repetition_penalty


def _penalised(request: Request, logits, arrays: Arrays):
    values = _penalties(request.params)
    if values == _NO_PENALTIES:
        return logits
    vocab = logits.shape[1]
    counts = np.bincount(np.asarray(request.generated, np.int64), minlength=vocab).astype(np.int32)[None]
    prompt = np.zeros((1, vocab), np.int8)
    prompt[0, list(request.prompt)] = 1
    columns = [np.array([value], np.float32) for value in values]
    seen = (prompt, counts, (counts > 0).astype(np.int8), *columns)
    return ops.apply_penalties(logits, *(arrays.send(array) for array in seen))


def _drawn(request: Request, logits, arrays: Arrays, out=None):
    params = request.params
    one = lambda value, dtype: arrays.send(np.array([value], dtype))
    logits = ops.apply_temperature(logits, one(params.temperature, np.float32), all_random=True)
    if params.min_p > 0:
        logits = ops.apply_min_p(logits, one(params.min_p, np.float32))
    k = one(params.top_k, np.int32) if params.top_k else None
    p = one(params.top_p, np.float32) if params.top_p < 1 else None
    if k is not None or p is not None:
        logits = ops.apply_top_k_top_p(logits, k, p)
    seeds = one(step_seed(request.seed, len(request.generated)), np.int64)
    return ops.random_sample(ops.compute_probs(logits), seeds, out=out)


def _logprobs(raw: np.ndarray, token: int, count: int) -> TokenLogprobs:
    ids, values, ranks = ops.gather_logprobs(ops.compute_logprobs(raw), count, np.array([token], np.int64))
    top = tuple((int(i), float(value)) for i, value in zip(ids[0, 1:], values[0, 1:]))
    return TokenLogprobs(float(values[0, 0]), int(ranks[0]), top)
