"""Draws against Python integers (SplitMix64, Philox), published vectors, mpmath, chi-square and vLLM's goldens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from unittest.mock import patch

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import MIRROR, TRUTH
from vtlab.ops.table import lookup
from vtlab.oracle import draws, random_bits

from .compare import assert_bytes, assert_ids, assert_ulp
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw, floats, rounded
from .scalar_bits import GOLDEN, LONG, WORD, signed, splitmix, unsplitmix, words_of

F32, I32, U64, INF = np.float32, np.int32, np.uint64, np.inf
QUICK = settings(max_examples=30, deadline=None, derandomize=True)
SEED = st.integers(-(2**63), 2**63 - 1)
BOTH = (oracle.gumbel_sample, oracle.gumbel_sample.mirror)
STEP = rounded(4.6566127342e-10, "float32")


def q_of(seed: int, row: int, column: int) -> float:
    """The exponential noise in 120 bits, rounded once to float32."""
    bits = splitmix((splitmix((seed + GOLDEN * row) % LONG) + column) % LONG)
    with mpmath.workprec(120):
        return rounded(float(-mpmath.log(mpmath.mpf(bits // 2**11 + 1) / 2**53)), "float32")


VECTORS = json.loads((Path(__file__).parent / "data" / "random_sample_q.json").read_text())["vectors"]


@checks("random_sample")
def test_exponential_noise_is_the_golden_vector():
    assert len(VECTORS) == 16
    for entry in VECTORS:
        seed, row, column = entry["seed"], entry["row"], entry["col"]
        assert q_of(seed, row, column) == entry["q"] and F32(entry["q"]).view(np.uint32) == int(entry["bits"], 16)
        noise = draws.exponential_noise(np.full(row + 1, seed, np.int64), column + 1)
        assert noise[row, column] == F32(entry["q"]), entry


@checks("random_sample")
def test_the_ends_of_the_uniform():
    """u = 1 gives q = -0: no token wins with it; u = 2^-53 gives the largest q."""
    certain, last = signed(unsplitmix(unsplitmix(LONG - 1))), signed(unsplitmix(unsplitmix(0)))
    noise = draws.exponential_noise(np.array([certain], np.int64), 2)
    assert_bytes(noise[:, :1], F32([[-0.0]]))
    assert draws.exponential_noise(np.array([last], np.int64), 1)[0, 0] == F32(53 * math.log(2))
    for probs in (F32([[1, 1e-30]]), F32([[0, 1e-30]])):
        assert_ids(oracle.random_sample(probs, np.array([certain], np.int64)), np.array([1]))


@checks("random_sample", cases=[case(R=R, V=V) for R in (1, 3, 32) for V in (1, 2, 17)] + [case(R=2, V=1000)])
def test_random_sample_against_the_race(case):
    probs = oracle.compute_probs(draw((case.R, case.V), "float32", case.V, scale=2.0))
    seeds = np.random.Generator(np.random.PCG64(case.R)).integers(-(2**63), 2**63 - 1, case.R)
    want = []
    for r, row in enumerate(probs):
        scores = [rounded(p / q_of(int(seeds[r]), r, v), "float32") for v, p in enumerate(floats(row))]
        want.append(max(range(case.V), key=lambda v: (scores[v], -v)))
    for run in (oracle.random_sample, oracle.random_sample.mirror):
        assert_ids(run(probs, seeds), np.array(want))


@checks("random_sample")
def test_random_sample_of_special_rows():
    seeds = np.arange(5) + 99
    rows = F32([[np.nan] * 3, [0, 0, 0], [0, 1, 0], [np.nan, 1e-9, np.nan], [-INF] * 3])
    assert_ids(oracle.random_sample(rows, seeds), np.array([0, 0, 1, 1, 0]))
    assert_ids(oracle.random_sample(rows[:0], seeds[:0]), np.zeros(0, np.int64))
    twins = np.full((1, 4), 0.25, F32)
    with patch.object(draws, "exponential_noise", lambda seeds, vocabulary: F32([[2, 1, 1, 3]])):
        assert_ids(oracle.random_sample(twins, seeds[:1]), np.array([1]))


@checks("random_sample")
@QUICK
@given(SEED, st.integers(0, 40))
def test_random_sample_depends_on_its_seed_and_its_row_alone(seed, row):
    """Row r of seed s draws as row 0 of s + r * 0x9E37..., whoever its neighbours are."""
    probs = oracle.compute_probs(draw((row + 2, 50), "float32", row))
    seeds = np.arange(row + 2) * 7
    seeds[row] = seed
    ids = oracle.random_sample(probs, seeds)
    moved = np.array([signed((seed + GOLDEN * row) % LONG)])
    assert ids[row] == oracle.random_sample(probs[row : row + 1], moved)[0]
    assert_ids(oracle.random_sample(probs, seeds), ids)


@checks("random_sample")
def test_one_seed_in_two_rows_draws_twice():
    probs = np.full((64, 1000), 1e-3, F32)
    assert len(set(oracle.random_sample(probs, np.full(64, 5)).tolist())) > 50


TRIALS = 200_000
LOGITS8 = F32([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.0])


def assert_distributed(ids, weights):
    """Pearson's statistic of 8 classes below the value that chance exceeds once in a thousand; the seed is fixed."""
    from scipy import stats  # half a second of imports

    expected = weights / weights.sum() * len(ids)
    counts = np.bincount(ids, minlength=8)
    assert ((counts - expected) ** 2 / expected).sum() < stats.chi2.isf(1e-3, df=7)


@checks("random_sample")
def test_random_sample_draws_from_the_softmax():
    probs = oracle.compute_probs(LOGITS8[None]).repeat(TRIALS, axis=0)
    assert_distributed(oracle.random_sample(probs, np.full(TRIALS, 2024)), np.exp(LOGITS8.astype(np.float64)))


def gumbel_arguments(rows, vocabulary, seed=1):
    rng = np.random.Generator(np.random.PCG64([rows, vocabulary, seed]))
    return {
        "logits": draw((rows, vocabulary), "float32", seed, scale=2.0),
        "req_idx": rng.integers(0, 6, rows).astype(I32),
        "temperature": F32([1.0, 0.0, 0.7, 1.3, 1e-6, 2.5]),
        "seed": np.array([0, 1, -5, 2**40 + 3, -(2**63), 2**63 - 1]),
        "pos": rng.choice([0, 1, 7, 4095, 2**31, 2**32 - 1, 2**32, 2**40 + 9], rows),
    }


@checks("gumbel_sample", cases=[case(fp64=fp64) for fp64 in (False, True)])
def test_gumbel_sample_draws_from_the_softmax(case):
    call = {
        "logits": LOGITS8[None].repeat(TRIALS, axis=0), "req_idx": np.zeros(TRIALS, I32), "temperature": F32([0.5]),
        "seed": np.array([2025]), "pos": np.arange(TRIALS), "fp64": case.fp64,
    }  # fmt: skip
    assert_distributed(oracle.gumbel_sample(**call), np.exp(LOGITS8.astype(np.float64) / 0.5))


def noise_of(words, fp64: bool):
    """Gumbel noise of the Philox words of a column, in 120 bits from the uniform on: an mpmath number."""
    with mpmath.workprec(120):
        if fp64:
            u = mpmath.mpf(max(float(words[1] * WORD + words[0]) / LONG, 2.0**-1022))
            return -mpmath.log(-mpmath.log(u)) if u < 1 else mpmath.inf
        folded = words[0] if words[0] < WORD // 2 else WORD - 1 - words[0]
        u = max(rounded(rounded(float(folded), "float32") * STEP, "float32"), STEP)
        return -mpmath.log(-mpmath.log1p(-mpmath.mpf(u))) if u < 1 else -mpmath.inf


ENDS = (0, 1, 2, 2**30, 2**31 - 1, 2**31 - 65, 2**31, 2**31 + 5, WORD - 2, WORD - 1, 0x9E3779B9, 0x12345678)


@checks("gumbel_sample", cases=[case(fp64=fp64) for fp64 in (False, True)])
def test_gumbel_noise_of_chosen_words(case):
    """The ends of the uniform, where it is clamped, folded, or rounds to 1: truth rounds right, mirror is in 3 ulps."""
    pairs = [(low, high) for low in ENDS for high in ((0, 1, WORD - 1) if case.fp64 else (0,))]
    planted = tuple(np.array([[p[i] for p in pairs]], U64) for i in (0, 1))
    want = [noise_of(p, case.fp64) for p in pairs]
    kind = np.float64 if case.fp64 else F32
    want = np.array([[float(w) if case.fp64 else rounded(float(w), "float32") for w in want]], kind)
    with patch.object(random_bits, "philox4x32", lambda seed, offset: planted), np.errstate(divide="ignore"):
        for nx in (TRUTH, MIRROR):
            noise = draws.gumbel_noise(nx, np.zeros(1, U64), np.zeros(len(pairs), U64), case.fp64)
            assert_ulp(noise, want, 3 if case.fp64 or nx is MIRROR else 0)


def loop_gumbel(call, apply_temperature, fp64):
    """(ids, the least gap between a row's two best scores)."""
    ids, gaps = [], []
    for t, row in enumerate(call["logits"]):
        request = int(call["req_idx"][t])
        temperature = float(call["temperature"][request]) if request >= 0 else 0.0
        scores = floats(row)
        if temperature != 0:
            if apply_temperature:
                scores = [rounded(x / temperature, "float32") for x in scores]
            stream = words_of(int(call["seed"][request]), int(call["pos"][t]))[0]
            noise = [float(noise_of(words_of(stream, v), fp64)) for v in range(len(scores))]
            scores = [x + n if fp64 else rounded(x + rounded(n, "float32"), "float32") for x, n in zip(scores, noise)]
        best = sorted(range(len(scores)), key=lambda v: (-scores[v], v))
        ids.append(best[0])
        gaps.append((scores[best[0]] - scores[best[1]]) / max(abs(scores[best[0]]), 1) if len(best) > 1 else INF)
    return np.array(ids), min(gaps)


SIZES, CHOICE = ((5, 1), (6, 2), (12, 40)), (False, True)


@checks(
    "gumbel_sample",
    cases=[case(T=T, V=V, fp64=fp64, scaled=scaled) for T, V in SIZES for fp64 in CHOICE for scaled in CHOICE],
)
def test_gumbel_sample_against_scalar_loops(case):
    call = gumbel_arguments(case.T, case.V, seed=3)
    call["req_idx"][0] = -1
    want, gap = loop_gumbel(call, case.scaled, case.fp64)
    assert gap > 8 * 2.0**-24
    for run in BOTH:
        assert_ids(run(**call, apply_temperature=case.scaled, fp64=case.fp64), want)


@checks("gumbel_sample", cases=[case(fp64=fp64) for fp64 in (False, True)])
def test_gumbel_sample_does_not_depend_on_the_batch(case):
    """A row alone, among others, and in blocks of another width: the column of the noise is the vocabulary's."""
    call = gumbel_arguments(40, 3000, seed=4)
    for run in BOTH:
        whole = run(**call, fp64=case.fp64)
        assert_ids(run(**call, fp64=case.fp64), whole)
        assert len(set(whole.tolist())) > 20
        for t in (0, 17, 39):
            alone = {name: call[name][t : t + 1] for name in ("logits", "req_idx", "pos")}
            assert run(**{**call, **alone}, fp64=case.fp64)[0] == whole[t]
    assert_ids(oracle.gumbel_sample.mirror(**call, fp64=case.fp64), oracle.gumbel_sample(**call, fp64=case.fp64))


@checks("gumbel_sample")
def test_gumbel_sample_of_special_rows():
    rows = F32([[1, 3, 3, 0], [-INF] * 4, [np.nan, 1, 9, 2], [-INF, -INF, 5, -INF], [1, np.nan, 2, 0], [1, 2, INF, 0]])
    call = {"temperature": F32([0, 1]), "seed": np.array([3, 4]), "pos": np.arange(6)}
    for run in BOTH:
        for fp64 in (False, True):
            greedy = run(rows, np.zeros(6, I32), **call, fp64=fp64)
            assert_ids(greedy, np.array([1, 0, 0, 2, 2, 2]))
            hot = {**call, "temperature": F32([5, 5])}
            assert_ids(run(rows, np.full(6, -1, I32), **hot, fp64=fp64), greedy)
            drawn = run(rows, np.ones(6, I32), **call, fp64=fp64)
            assert drawn[[1, 2, 3, 5]].tolist() == [0, 0, 2, 2] and drawn[4] != 1
    assert run(rows[:0], np.zeros(0, I32), **{**call, "pos": np.zeros(0, np.int64)}).shape == (0,)


@checks("gumbel_sample")
def test_gumbel_sample_of_padding_is_a_plain_argmax():
    call = {**gumbel_arguments(40, 100), "req_idx": np.full(40, -1, I32)}
    for run in BOTH:
        assert_ids(run(**call), call["logits"].argmax(axis=-1))


@checks("gumbel_sample")
def test_gumbel_sample_of_a_whole_vocabulary():
    """Without noise to speak of (a logit of 1e6) the winner is where it was put, up to the last column."""
    logits = np.zeros((3, 151936), F32)
    at = np.array([0, 70_000, 151_935])
    logits[np.arange(3), at] = 1e6
    call = gumbel_arguments(3, 1)
    assert_ids(oracle.gumbel_sample(**{**call, "logits": logits}), at)


@checks("gumbel_sample")
def test_gumbel_sample_against_vllm():
    """The Triton kernel's ids, from its CPU interpreter and, where there is a golden, from a GPU."""
    found = op_cases("sampling", "gumbel_sample")
    assert found
    for golden in found:
        for run in BOTH:
            assert_ids(run(**golden.call()), golden.outputs["ids"], str(golden))


Z, P, ONE, SEEDS = np.zeros((2, 3), F32), np.zeros((2, 0), F32), np.zeros(1, F32), np.zeros(2, np.int64)
REQ, SEED1 = np.zeros(2, I32), np.zeros(1, np.int64)
REFUSED = [
    ("random_sample", "probs", (P, SEEDS)),
    ("random_sample", "seeds", (Z, SEEDS[:1])),
    ("random_sample", "seeds", (Z, SEEDS.astype(U64))),
    ("random_sample", "probs", (Z.astype(np.float64), SEEDS)),
    ("gumbel_sample", "logits", (P, REQ, ONE, SEED1, SEEDS)),
    ("gumbel_sample", "req_idx", (Z, REQ + I32(1), ONE, SEED1, SEEDS)),
    ("gumbel_sample", "req_idx", (Z, REQ - I32(1), ONE[:0], SEED1[:0], SEEDS)),
    ("gumbel_sample", "req_idx", (Z, REQ[:1], ONE, SEED1, SEEDS)),
    ("gumbel_sample", "seed", (Z, REQ, ONE, SEEDS, SEEDS)),
    ("gumbel_sample", "pos", (Z, REQ, ONE, SEED1, SEEDS.astype(I32))),
]


@pytest.mark.parametrize("name, argument, call", REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_calls_are_refused(name, argument, call):
    with pytest.raises(ContractError) as caught:
        lookup(name)(*call)
    assert (caught.value.op, caught.value.argument) == (name, argument)


mutations("random_sample", {
    "the row left out": ("* np.arange(len(seeds), dtype=np.uint64)", "* np.uint64(0)", "exponential_noise"),
    "one mix": ("random_bits.splitmix64(start)[:, None]", "start[:, None]", "exponential_noise"),
    "u from 52 bits": ("bits >> np.uint64(11)", "bits >> np.uint64(12)", "exponential_noise"),
    "u can be 0": (" + np.uint64(1)", "", "exponential_noise"),
    "the logarithm in float32": ("-np.log(u)).astype(np.float32)", "-np.log(u.astype(np.float32)))",
                                 "exponential_noise"),
    "p times q": ("probs / exponential", "probs * exponential"),
    "a NaN in column 0 wins": ("first_maximum(", "ascending_scan("),
    "columns from 1": ("np.arange(vocabulary, dtype=np.uint64)", "np.arange(1, vocabulary + 1, dtype=np.uint64)",
                       "exponential_noise"),
    "a shift of 29": ("np.uint64(30)", "np.uint64(29)", "random_bits.splitmix64"),
    "the last mix left out": ("return x ^ (x >> np.uint64(31))", "return x", "random_bits.splitmix64"),
})  # fmt: skip
mutations("gumbel_sample", {
    "noise from block-local columns": ("np.arange(first, min(first + width, logits.shape[1]), dtype=np.uint64)",
                                       "np.arange(min(width, logits.shape[1] - first), dtype=np.uint64)"),
    "the position left out": ("pos.view(np.uint64)", "pos.view(np.uint64) * np.uint64(0)"),
    "the request's seed is row 0's": ("seed[request]", "seed[request * 0]"),
    "temperature 0 draws": ("random = t != 0", "random = t == t"),
    "1e-6 is greedy": ("random = t != 0", "random = t > 1e-5"),
    "padding draws": ("np.where(req_idx < 0, np.float32(0), temperature[request])", "temperature[request]"),
    "multiply by the temperature": ("nx.div(nx.load(logits)", "nx.mul(nx.load(logits)"),
    "-log(-log u)": ("nx.log1p(nx.neg(nx.load(u)))", "nx.log(nx.load(u))", "gumbel_noise"),
    "u is not clamped": ("np.maximum(_uniform(words[0].astype(np.uint32)), _UNIFORM_STEP)",
                         "_uniform(words[0].astype(np.uint32))", "gumbel_noise"),
    "fp64 words swapped": ("(words[1] << np.uint64(32)) | words[0]", "(words[0] << np.uint64(32)) | words[1]",
                           "gumbel_noise"),
    "fp64 of one word": ("(words[1] << np.uint64(32)) | words[0]", "words[0] << np.uint64(32)", "gumbel_noise"),
    "unfolded": ("np.where(signed < 0, ~signed, signed)", "np.abs(signed)", "_uniform"),
    "2^-31 exactly": ("* _UNIFORM_STEP", "* np.float32(2.0**-31)", "_uniform"),
    "nine rounds": ("range(10)", "range(9)", "random_bits.philox4x32"),
    "keys swapped": ("k0, k1 = seed & _LOW, seed >> _HALF", "k1, k0 = seed & _LOW, seed >> _HALF",
                     "random_bits.philox4x32"),
    "32-bit offsets": ("offset & _LOW, offset >> _HALF", "offset & _LOW, offset & np.uint64(0)",
                       "random_bits.philox4x32"),
})  # fmt: skip
