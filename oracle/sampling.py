"""From logits to token ids: arg-max, probabilities, log-probabilities, reproducible draws."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import EXACT, Bound, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

from .logits import SOFTMAX_WHY, VOCAB_ORDER, has_vocabulary, per_row, softmax
from .random_bits import GOLDEN, philox4x32, splitmix64

_ROW = "KERNEL-SAMPLING"
_LOGITS = Tensor("R V", ("float32",))
_IDS = {"ids": Tensor("R", ("int64",))}
_SUM = "V/4096 + 16"


def _probabilities(rng, axes):
    weights = np.exp(rng.standard_normal((axes["R"], axes["V"])) * 2)
    return weights / weights.sum(axis=-1, keepdims=True)


def first_maximum(scores: np.ndarray) -> np.ndarray:
    """Index of the first strictly greatest score of each row, NaN never winning: int64 [R]."""
    return np.argmax(np.where(np.isnan(scores), -np.inf, scores), axis=-1).astype(np.int64)


def ascending_scan(scores: np.ndarray) -> np.ndarray:
    """What a scan from column 0 with strict > finds: the first maximum, but column 0 where that is NaN."""
    return np.where(np.isnan(scores[:, 0]), np.int64(0), first_maximum(scores))


@op(
    row=_ROW,
    args={"logits": _LOGITS},
    returns=_IDS,
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
    row=_ROW,
    args={"logits": _LOGITS},
    returns={"probs": Tensor("R V", ("float32",))},
    rounding=("probs = round(exp(l - max) / sum)",),
    order=str(VOCAB_ORDER),
    parity=Parity("bytes"),
    mirror=Bound(
        f"{_SUM} + 2*20",
        ulps=1,
        why=SOFTMAX_WHY + "; l - max is rounded, and a logit 20 below the maximum carries that error 20-fold",
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
    row=_ROW,
    args={"logits": _LOGITS},
    returns={"logprobs": Tensor("R V", ("float32",))},
    rounding=("logprobs = round((l - max) - log(sum))",),
    order=str(VOCAB_ORDER),
    parity=Parity("bytes"),
    mirror=Bound(
        f"{_SUM} + 4",
        scale=lambda arguments, results: (
            1
            + np.abs(arguments["logits"] - arguments["logits"].max(axis=-1, keepdims=True))
            + np.log(arguments["logits"].shape[1])
        ),
        ulps=1,
        why=SOFTMAX_WHY + "; relative errors of the sum become absolute ones of its logarithm",
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
    value = nx.load(logits)
    shifted = nx.sub(value, nx.max(value, keepdims=True))
    total = nx.sum(nx.exp(shifted), order=VOCAB_ORDER, keepdims=True)
    return nx.store(nx.sub(shifted, nx.log(total)), np.float32)


def _ids_inside(arguments, axes):
    """an id outside the vocabulary, or num_logprobs > V"""
    ids = arguments["ids"]
    outside = (ids < 0) | (ids >= axes["V"])
    if outside.any():
        at = int(np.argmax(outside))
        raise refuse("ids", f"{int(ids[at])} at index {at}", f"0 <= id < {axes['V']}")
    if arguments["num_logprobs"] > axes["V"]:
        raise refuse("num_logprobs", arguments["num_logprobs"], f"at most V = {axes['V']}")


@op(
    row=_ROW,
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
    nan="sorts below every number; the rank of a NaN is 0",
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
    key = np.where(np.isnan(logprobs), -np.inf, logprobs)
    top = _largest_first(key, num_logprobs)
    indices = np.concatenate([ids[:, None], top], axis=1).astype(np.int32)
    values = np.concatenate([chosen, np.take_along_axis(logprobs, top, axis=-1)], axis=1)
    return indices, values, np.count_nonzero(logprobs >= chosen, axis=-1).astype(np.int64)


def _largest_first(key: np.ndarray, n: int) -> np.ndarray:
    """Indices of the n largest of each row, descending, ties to the lowest index; sorts only what reaches the n-th."""
    rows, size = key.shape
    top = np.empty((rows, n), np.int64)
    for row in range(rows if n else 0):
        threshold = np.partition(key[row], size - n)[size - n]
        above = np.flatnonzero(key[row] > threshold)
        equal = np.flatnonzero(key[row] == threshold)[: n - len(above)]
        found = np.sort(np.concatenate([above, equal]))
        top[row] = found[np.argsort(-key[row][found], kind="stable")]
    return top


@op(
    row=_ROW,
    args={
        "probs": Tensor("R V", ("float32",), values=_probabilities),
        "seeds": per_row("int64", lambda rng, n: rng.integers(-(2**63), 2**63 - 1, n)),
    },
    returns=_IDS,
    rounding=("q = round(-log(u)), the logarithm in float64", "score = round(p / q)"),
    parity=Parity("ids"),
    mirror=EXACT,
    nan="a NaN score never wins; a row without a score above -inf gives 0",
    ties="the lowest index",
    upstream="vllm/v1/sample/ops/topk_topp_sampler.py: random_sample (exponential noise; the generator is vt's own)",
    examples=({"R": 3, "V": 40}, {"R": 1, "V": 1}),
    requires=(has_vocabulary,),
)
def random_sample(nx, probs, seeds):
    """ids[r] = argmax over v of probs[r, v] / q[r, v], with q exponentially distributed: a draw from probs.

    key = mix(seed + 0x9E3779B97F4A7C15 * r), bits = mix(key + v), u = ((bits >> 11) + 1) / (2^53 + 1), q = -log(u),
    with mix = SplitMix64's output function, modulo 2^64. The row r counts within the call: the same seed in another
    row gives another draw.
    Shapes: probs [R, V] float32; seeds [R] int64; ids [R] int64.
    Rounding points: q and the score round to float32, so that truth and mirror choose the same id.
    Errors: ContractError for other shapes or dtypes, V = 0.
    Source: exponential race (Gumbel-max in probability space), as vllm/v1/sample/ops/topk_topp_sampler.py uses it.
    """
    rows, vocabulary = probs.shape
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        key = splitmix64(seeds.view(np.uint64) + np.uint64(GOLDEN) * np.arange(rows, dtype=np.uint64))
        bits = splitmix64(key[:, None] + np.arange(vocabulary, dtype=np.uint64))
        u = ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * (1.0 / 9007199254740993.0)
        return first_maximum(probs / (-np.log(u)).astype(np.float32))


def _uniform(word: np.ndarray) -> np.ndarray:
    """Triton's float32 uniform of a 32-bit word: the word as int32, folded to non-negative, times 2^-31 (nearly)."""
    signed = word.view(np.int32)
    return np.where(signed < 0, -signed - 1, signed).astype(np.float32) * _UNIFORM_STEP


_UNIFORM_STEP = np.float32(4.6566127342e-10)


def _requests_inside(arguments, axes):
    """a request index outside the temperatures"""
    index = arguments["req_idx"]
    outside = (index < 0) | (index >= axes["N"])
    if outside.any():
        at = int(np.argmax(outside))
        raise refuse("req_idx", f"{int(index[at])} at index {at}", f"0 <= index < {axes['N']}")


@op(
    row=_ROW,
    args={
        "logits": Tensor("T V", ("float32",)),
        "req_idx": Tensor("T", ("int32",), values=lambda rng, a: rng.integers(0, a["N"], a["T"])),
        "temperature": Tensor("N", ("float32",), values=lambda rng, a: rng.choice([0, 0.7, 1.0, 1.3], a["N"])),
        "seed": Tensor("N", ("int64",), values=lambda rng, a: rng.integers(-(2**63), 2**63 - 1, a["N"])),
        "pos": Tensor("T", ("int64",), values=lambda rng, a: rng.integers(0, 4096, a["T"])),
        "apply_temperature": Flag(),
        "fp64": Flag(),
    },
    returns={"ids": Tensor("T", ("int64",))},
    rounding=(
        "l / t rounds to float32",
        "the noise rounds to float32 (fp64: stays float64)",
        "l + noise rounds to float32 (fp64: stays float64)",
    ),
    parity=Parity("ids"),
    mirror=Bound(ulps=0, why="equal ids, unless two scores lie within 3 ulps: log and log1p are within 1 ulp each"),
    nan="a NaN score never wins, but in column 0, where it stays",
    ties="the lowest index",
    upstream="vllm/v1/worker/gpu/sample/gumbel.py: gumbel_sample",
    examples=(
        {"T": 4, "V": 300, "N": 3},
        {"T": 3, "V": 50, "N": 2, "apply_temperature": False},
        {"T": 2, "V": 2000, "N": 2, "fp64": True},
    ),
    requires=(has_vocabulary, _requests_inside),
)
def gumbel_sample(nx, logits, req_idx, temperature, seed, pos, *, apply_temperature=True, fp64=False):
    """ids[t] = argmax over v of l[t, v] / temp + noise[t, v], a draw from the softmax; temp = 0 is a plain arg-max.

    s = word 0 of Philox(seed[req], pos[t]); u[v] = uniform(word 0 of Philox(s, v)), at least 4.6566127342e-10;
    noise = -log(-log1p(-u)). fp64: u from words 0 (low) and 1 (high) over 2^64, at least 2.2250738585072014e-308, and
    noise = -log(-log(u)) in float64.
    Shapes: logits [T, V] float32; req_idx [T] int32; temperature [N] float32, seed [N] int64; pos, ids [T] int64.
    Rounding points: quotient, noise and sum round to float32; with fp64 the noise and the sum stay float64.
    Errors: ContractError for a request index outside [0, N), other shapes or dtypes, V = 0.
    Source: vllm/v1/worker/gpu/sample/gumbel.py; Philox4x32-10 of Salmon et al. 2011.
    """
    vocabulary, t = logits.shape[1], temperature[req_idx][:, None]
    random = t != 0
    scores = logits
    if apply_temperature:
        divisor = nx.load(np.where(random, t, np.float32(1)))
        scores = nx.store(nx.div(nx.load(logits), divisor), np.float32)
    start = philox4x32(seed[req_idx].view(np.uint64), pos.view(np.uint64))[0]
    words = philox4x32(start.astype(np.uint64)[:, None], np.arange(vocabulary, dtype=np.uint64))
    if fp64:
        low, high = (word.astype(np.uint64) for word in words[:2])
        u = np.maximum((high << np.uint64(32) | low).astype(np.float64) * 5.421010862427522170037e-20, 2.0**-1022)
        with np.errstate(divide="ignore"):
            noisy = scores.astype(np.float64) - np.log(-np.log(u))
        return ascending_scan(np.where(random, noisy, logits))
    u = np.maximum(_uniform(words[0]), _UNIFORM_STEP)
    noise = nx.store(nx.neg(nx.log(nx.neg(nx.log1p(nx.neg(nx.load(u)))))), np.float32)
    noisy = nx.store(nx.add(nx.load(scores), nx.load(noise)), np.float32)
    return ascending_scan(np.where(random, noisy, logits))
