"""Reproducible draws: the exponential race over probabilities, and the Gumbel arg-max over logits."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Flag, Parity, Tensor, refuse
from vtlab.ops.table import op

from . import random_bits
from .logits import ROW, has_vocabulary, per_row
from .sampling import ascending_scan, first_maximum


def _probabilities(rng, axes):
    weights = np.exp(rng.standard_normal((axes["R"], axes["V"])) * 2)
    return weights / weights.sum(axis=-1, keepdims=True)


def exponential_noise(seeds: np.ndarray, vocabulary: int) -> np.ndarray:
    """q[r, v] = round(-log(u[r, v])) of `random_sample`: float32 [R, vocabulary]; -0 where u is 1."""
    with np.errstate(over="ignore"):
        start = seeds.view(np.uint64) + random_bits.GOLDEN * np.arange(len(seeds), dtype=np.uint64)
        bits = random_bits.splitmix64(random_bits.splitmix64(start)[:, None] + np.arange(vocabulary, dtype=np.uint64))
        u = ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53
    return (-np.log(u)).astype(np.float32)


@op(
    row=ROW,
    args={
        "probs": Tensor("R V", ("float32",), values=_probabilities),
        "seeds": per_row("int64", lambda rng, n: rng.integers(-(2**63), 2**63 - 1, n)),
    },
    returns={"ids": Tensor("R", ("int64",))},
    rounding=("q = round(-log(u)), the logarithm in float64", "score = round(p / q)"),
    parity=Parity(
        "ids",
        why="a float64 logarithm that is an ulp off moves one q in 2^28 by a float32 ulp: an id may then differ where "
        "the two best scores are within 2 ulps",
    ),
    mirror=Bound(
        ulps=0, why="one computation: both take the logarithm in float64 and round q and the score to float32"
    ),
    nan="a NaN score never wins; a row without a score above -inf gives 0",
    ties="the lowest index",
    upstream="vllm/v1/sample/ops/topk_topp_sampler.py: random_sample (exponential noise; the generator is vt's own)",
    examples=({"R": 3, "V": 40}, {"R": 1, "V": 1}),
    requires=(has_vocabulary,),
)
def random_sample(nx, probs, seeds):
    """ids[r] = argmax over v of probs[r, v] / q[r, v], with q exponentially distributed: a draw from probs.

    key = mix(seed + 0x9E3779B97F4A7C15 * r), bits = mix(key + v), u = ((bits >> 11) + 1) / 2^53, q = -log(u), with
    mix = SplitMix64's output function, modulo 2^64. The row r counts within the call: the same seed in another row
    gives another draw. vt:: writes 1 / 9007199254740993.0, which is 2^-53 in float64, so u = 1 happens (once in 2^53):
    then q = -0, the score is -inf or NaN, and the token does not win.
    Shapes: probs [R, V] float32; seeds [R] int64; ids [R] int64.
    Rounding points: q and the score round to float32, so that truth and mirror choose the same id.
    Errors: ContractError for other shapes or dtypes, V = 0.
    Source: exponential race (Gumbel-max in probability space), as vllm/v1/sample/ops/topk_topp_sampler.py uses it.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return first_maximum(probs / exponential_noise(seeds, probs.shape[1]))


_UNIFORM_STEP = np.float32(4.6566127342e-10)
_BLOCK = 1 << 14  # noise at a time: a block of Philox words that stays in cache


def _uniform(word: np.ndarray) -> np.ndarray:
    """Triton's float32 uniform of a 32-bit word: the word as int32, folded to non-negative, times 2^-31 (nearly)."""
    signed = word.view(np.int32)
    return np.where(signed < 0, ~signed, signed).astype(np.float32) * _UNIFORM_STEP


def gumbel_noise(nx, start: np.ndarray, columns: np.ndarray, fp64: bool) -> np.ndarray:
    """Standard Gumbel noise of Philox streams `start` [T] at global columns: [T, columns], float32 or float64."""
    words = random_bits.philox4x32(start[:, None], columns)
    if fp64:
        u = ((words[1] << np.uint64(32)) | words[0]).astype(np.float64) * 2.0**-64
        return -np.log(-np.log(np.maximum(u, 2.0**-1022)))
    u = np.maximum(_uniform(words[0].astype(np.uint32)), _UNIFORM_STEP)
    return nx.store(nx.neg(nx.log(nx.neg(nx.log1p(nx.neg(nx.load(u)))))), np.float32)


def _requests_inside(arguments, axes):
    """a request index beyond the temperatures (device arrays: found by the kernel, with `out` not at all)"""
    index = arguments["req_idx"]
    if not isinstance(index, np.ndarray):
        return
    outside = np.maximum(index, 0) >= axes["N"]
    if outside.any():
        at = int(np.argmax(outside))
        raise refuse("req_idx", f"{int(index[at])} at index {at}", f"index < {axes['N']}")


@op(
    row=ROW,
    rows="T",
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
    mirror=Bound(
        ulps=0,
        why="equal ids, unless two scores lie within 2^-22 + 3 ulps: log1p is within 1 ulp, which log turns into 2^-23",
    ),
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
    A negative req_idx marks a row of padding: a plain arg-max.
    Rounding points: quotient, noise and sum round to float32; with fp64 the noise and the sum stay float64.
    Errors: ContractError for a request index of N or more, other shapes or dtypes, V = 0.
    Source: vllm/v1/worker/gpu/sample/gumbel.py; Philox4x32-10 of Salmon et al. 2011.
    """
    request = np.maximum(req_idx, 0)
    t = np.where(req_idx < 0, np.float32(0), temperature[request])[:, None]
    random = t != 0
    scores = logits
    if apply_temperature:
        scores = nx.store(nx.div(nx.load(logits), nx.load(np.where(random, t, np.float32(1)))), np.float32)
    start = random_bits.philox4x32(seed[request].view(np.uint64), pos.view(np.uint64))[0]
    noisy = np.empty(logits.shape, np.float64 if fp64 else np.float32)
    width = max(1, _BLOCK // max(len(pos), 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        for first in range(0, logits.shape[1], width):
            columns = np.arange(first, min(first + width, logits.shape[1]), dtype=np.uint64)
            noise = gumbel_noise(nx, start, columns, fp64)
            np.add(scores[:, first : first + width], noise, out=noisy[:, first : first + width])
    return ascending_scan(np.where(random, noisy, logits))
