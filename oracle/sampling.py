"""From logits to the most likely tokens: arg-max, probabilities, log-probabilities and their largest."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import EXACT, Bound, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

from . import fixed_point
from .logits import LOGITS, ROW, has_vocabulary, ordered_codes, softmax

_SUM = "V/2**18 + 8"
_SUM_WHY = (
    "a sum of at least 1 of exponentials within 1 ulp (2 roundings) and 2^-42 each, rounded once, under one like them, "
    "then a division, or a logarithm and a difference; l - max rounds, an error relative to its size that the "
    "exponential turns into a relative one, by at most log V on the sum's average"
)


def _distance(logits):
    """1 + log V + (max - l): what the roundings of a softmax in the exponent are relative to."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = wide.max(axis=-1, keepdims=True) - wide
    return 1 + np.log(logits.shape[1]) + np.where(gap < np.inf, gap, 0)


def first_maximum(scores: np.ndarray) -> np.ndarray:
    """Index of the first strictly greatest score of each row, NaN never winning: int64 [R]."""
    return np.argmax(np.where(np.isnan(scores), -np.inf, scores), axis=-1).astype(np.int64)


def ascending_scan(scores: np.ndarray) -> np.ndarray:
    """What a scan from column 0 with strict > finds: the first maximum, but column 0 where that is NaN."""
    return np.where(np.isnan(scores[:, 0]), np.int64(0), first_maximum(scores))


@op(
    row=ROW,
    rows="R",
    args={"logits": LOGITS},
    returns={"ids": Tensor("R", ("int64",))},
    rounding=("none",),
    parity=Parity("ids"),
    mirror=EXACT,
    nan="never wins, but in column 0, where it stays (torch.argmax returns the first NaN instead)",
    ties="the lowest index",
    upstream="vllm/v1/sample/sampler.py: Sampler.greedy_sample",
    examples=({"R": 3, "V": 100}, {"R": 1, "V": 1}),
    requires=(has_vocabulary,),
)
def greedy_argmax(nx, logits):
    """ids[r] = argmax over v of logits[r, v].

    Shapes: logits [R, V] float32; ids [R] int64.
    Rounding points: none.
    Errors: ContractError for other shapes or dtypes, V = 0.
    Source: vllm/v1/sample/sampler.py.
    """
    return ascending_scan(logits)


@op(
    row=ROW,
    rows="R",
    args={"logits": LOGITS},
    returns={"probs": Tensor("R V", ("float32",))},
    rounding=("probs = round(exp(l - max) / sum)",),
    order=fixed_point.ORDER,
    parity=Parity("bytes"),
    mirror=Bound(
        _SUM,
        scale=lambda arguments, results: _distance(arguments["logits"]) * results[0],
        ulps=2,
        why=_SUM_WHY + "; two stores of a subnormal, exp's and the quotient's",
    ),
    nan="a NaN anywhere, or a row of -inf alone, makes the row NaN",
    upstream="vllm/v1/sample/sampler.py (softmax, dtype float32)",
    examples=({"R": 3, "V": 1000}, {"R": 2, "V": 1}),
    requires=(has_vocabulary,),
)
def compute_probs(nx, logits):
    """probs = exp(l - max(l)) / sum(exp(l - max(l))).

    Shapes: logits, probs [R, V] float32.
    Rounding points: the store of probs.
    Errors: ContractError for other shapes or dtypes, V = 0.
    Source: vllm/v1/sample/ops/topk_topp_sampler.py.
    """
    return nx.store(softmax(nx, logits), np.float32)


@op(
    row=ROW,
    rows="R",
    args={"logits": LOGITS},
    returns={"logprobs": Tensor("R V", ("float32",))},
    rounding=("logprobs = round((l - max) - log(sum))",),
    order=fixed_point.ORDER,
    parity=Parity("bytes"),
    mirror=Bound(
        _SUM,
        scale=lambda arguments, results: _distance(arguments["logits"]),
        ulps=1,
        why=_SUM_WHY + "; relative errors of the sum become absolute ones of its logarithm",
    ),
    lse_base="e",
    nan="a NaN anywhere, or a row of -inf alone, makes the row NaN",
    upstream="vllm/v1/sample/sampler.py: Sampler.compute_logprobs",
    examples=({"R": 3, "V": 1000}, {"R": 2, "V": 1}),
    requires=(has_vocabulary,),
)
def compute_logprobs(nx, logits):
    """logprobs = (l - max(l)) - log(sum(exp(l - max(l)))).

    Shapes: logits, logprobs [R, V] float32.
    Rounding points: the store of logprobs.
    Errors: ContractError for other shapes or dtypes, V = 0.
    Source: vllm/v1/sample/sampler.py (log_softmax). Shifted first, as log_softmax is: large logits lose nothing.
    """
    value = nx.add(nx.load(logits), 0.0)  # no -0: the maximum's zero has no sign of its own
    shifted = nx.sub(value, nx.max(value, keepdims=True))
    total = fixed_point.total(nx, nx.exp(shifted))
    return nx.store(nx.sub(shifted, nx.log(total)), np.float32)


def _ids_inside(arguments, axes):
    """num_logprobs > V, or an id outside the vocabulary (device arrays: found by the kernel, with `out` not at all)"""
    ids = arguments["ids"]
    outside = (ids < 0) | (ids >= axes["V"]) if isinstance(ids, np.ndarray) else np.zeros(0, bool)
    if outside.any():
        at = int(np.argmax(outside))
        raise refuse("ids", f"{int(ids[at])} at index {at}", f"0 <= id < {axes['V']}")
    if arguments["num_logprobs"] > axes["V"]:
        raise refuse("num_logprobs", arguments["num_logprobs"], f"at most V = {axes['V']}")


@op(
    row=ROW,
    rows="R",
    args={
        "logprobs": Tensor("R V", ("float32",)),
        "num_logprobs": Scalar(int, minimum=0, axis="n"),
        "ids": Tensor("R", ("int64",), values=lambda rng, a: rng.integers(0, a["V"], a["R"])),
    },
    returns={
        "indices": Tensor("R n+1", ("int32",)),
        "values": Tensor("R n+1", ("float32",)),
        "ranks": Tensor("R", ("int64",)),
    },
    rounding=("none",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="above +inf among the n largest, as torch.topk has it; no value is >= a NaN, whose rank is 0",
    ties="equal log-probabilities: the lowest id first; every tie counts in the rank",
    upstream="vllm/v1/sample/sampler.py: Sampler.gather_logprobs",
    examples=({"R": 3, "V": 50, "n": 5, "num_logprobs": 5}, {"R": 2, "V": 3, "n": 0, "num_logprobs": 0}),
    requires=(has_vocabulary, _ids_inside),
)
def gather_logprobs(nx, logprobs, num_logprobs, ids):
    """Column 0: ids[r] and its log-probability; columns 1 to n: the n largest; rank = |{v: lp[v] >= lp[ids]}|.

    Shapes: logprobs [R, V] float32; ids [R] int64; indices [R, n+1] int32, values [R, n+1] float32, ranks [R] int64
    with n = num_logprobs. Ranks count from 1.
    Rounding points: none.
    Errors: ContractError for an id outside the vocabulary, num_logprobs > V, other shapes or dtypes, V = 0.
    Source: vllm/v1/sample/sampler.py.
    """
    chosen = np.take_along_axis(logprobs, ids[:, None], axis=-1)
    top = _largest_first(ordered_codes(logprobs), num_logprobs)
    indices = np.concatenate([ids[:, None], top], axis=1).astype(np.int32)
    values = np.concatenate([chosen, np.take_along_axis(logprobs, top, axis=-1)], axis=1)
    return indices, values, np.count_nonzero(logprobs >= chosen, axis=-1).astype(np.int64)


def _largest_first(codes: np.ndarray, n: int) -> np.ndarray:
    """Indices of the n largest of each row, descending, ties to the lowest index; sorts only what reaches the n-th."""
    rows, size = codes.shape
    top = np.empty((rows, n), np.int64)
    for row in range(rows if n else 0):
        threshold = np.partition(codes[row], size - n)[size - n]
        above = np.flatnonzero(codes[row] > threshold)
        equal = np.flatnonzero(codes[row] == threshold)[: n - len(above)]
        found = np.sort(np.concatenate([above, equal]))
        top[row] = found[np.argsort(-codes[row][found], kind="stable")]
    return top
