"""Penalties, temperature, min-p, top-k and top-p against scalar loops in exact fractions, SciPy and vLLM's goldens."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import MIRROR
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw, floats, rounded

F32, INF = np.float32, np.inf
QUICK = settings(max_examples=25, deadline=None, derandomize=True)
BOTH = ("truth", "mirror")
FEW = [case(V=V, R=R) for V in (1, 2, 17, 1000) for R in (1, 3, 32)]


def run_of(name, arithmetic):
    return lookup(name) if arithmetic == "truth" else lookup(name).mirror


def fraction32(x: Fraction) -> float:
    """x to the nearest float32, ties to even, by integer division: no float takes part."""
    if x == 0:
        return 0.0
    unit = Fraction(2) ** max(int(abs(x) * 2**200).bit_length() - 201 - 23, -149)
    return float(round(x / unit) * unit)


def assert_kept(got, logits, kept):
    """Kept logits have the input's bytes, all others are -inf."""
    assert_bytes(got, np.where(kept, logits, F32(-INF)))


@checks("apply_temperature", cases=[case(arithmetic=a, all_random=r) for a in BOTH for r in (False, True)])
def test_temperature_against_fractions(case):
    temperature = F32([0.7, 1.0, 1e-5, 9.9e-6, 0.3, 2.0, np.nextafter(F32(1e-5), F32(1)), -1.5, 3e-39])
    logits = draw((len(temperature), 33), "float32", 1, scale=4.0)
    got = run_of("apply_temperature", case.arithmetic)(logits, temperature, all_random=case.all_random)
    for r, t in enumerate(floats(temperature)):
        divisor = Fraction(1) if t < float(F32(1e-5)) and not case.all_random else Fraction(t)
        want = [Fraction(x) / divisor for x in floats(logits[r])]
        if max(abs(w) for w in want) < 2**127:
            assert_bytes(got[r], F32([fraction32(w) for w in want]), f"temperature {t}")
        else:
            assert case.all_random and t == float(F32(3e-39))


@checks("apply_temperature")
def test_temperature_of_greedy_and_special_rows():
    logits = F32([[1, -INF, np.nan, 0], [1, -INF, -2, 0], [1, -2, 3, INF]])
    assert_bytes(oracle.apply_temperature(logits, F32([0, 0, 0])), logits)
    raw = oracle.apply_temperature(logits, F32([0, 0.0, 0]), all_random=True)
    assert_bytes(raw[2], F32([INF, -INF, INF, INF]))
    assert raw[1, 0] == INF and np.isnan(raw[1, 3])
    assert oracle.apply_temperature(np.zeros((0, 4), F32), np.zeros(0, F32)).shape == (0, 4)


def loop_penalties(logits, prompt, counts, output, frequency, presence, repetition):
    rows = []
    for r, row in enumerate(logits):
        f, p, rep = float(frequency[r]), float(presence[r]), float(repetition[r])
        for v, x in enumerate(floats(row)):
            if prompt[r, v] or output[r, v]:
                x = fraction32(Fraction(x) / Fraction(rep)) if x > 0 else fraction32(Fraction(x) * Fraction(rep))
            count = Fraction(fraction32(Fraction(int(counts[r, v]))))
            x = fraction32(Fraction(x) - Fraction(fraction32(Fraction(f) * count)))
            rows.append(fraction32(Fraction(x) - Fraction(p if output[r, v] else 0.0)))
    return F32(rows).reshape(logits.shape)


@checks("apply_penalties", cases=[case(arithmetic=a) for a in BOTH])
def test_penalties_against_fractions(case):
    """Every combination of masks, signs and counts beside repetition 0.5, 1, 2 and one that divides inexactly."""
    combinations = list(itertools.product((0, 1), (0, 1, 3), (-2.7, -0.1, 0.3, 2.9)))
    logits = F32([[x for _, _, x in combinations]] * 4)
    prompt = np.array([[m for m, _, _ in combinations]] * 4, np.int8)
    counts = np.array([[c for _, c, _ in combinations]] * 4, np.int32)
    output = (counts > 0).astype(np.int8)
    penalties = (F32([0.7, -1.1, 0.0, 0.3]), F32([0.0, 0.9, -2.0, 0.1]), F32([0.5, 1.0, 2.0, 1.3]))
    got = run_of("apply_penalties", case.arithmetic)(logits, prompt, counts, output, *penalties)
    assert_bytes(got, loop_penalties(logits, prompt, counts, output, *penalties))


@checks("apply_penalties")
def test_penalties_of_random_rows():
    rng = np.random.Generator(np.random.PCG64(2))
    logits = draw((3, 200), "float32", 3, scale=4.0)
    prompt, counts = rng.integers(0, 2, logits.shape, np.int8), rng.integers(0, 4, logits.shape, np.int32)
    output = (counts > 0).astype(np.int8)
    penalties = [rng.uniform(low, 2, 3).astype(F32) for low in (-2, -2, 0.5)]
    want = loop_penalties(logits, prompt, counts, output, *penalties)
    for run in (oracle.apply_penalties, oracle.apply_penalties.mirror):
        assert_bytes(run(logits, prompt, counts, output, *penalties), want)
    neutral = [np.full(3, value, F32) for value in (0, 0, 1)]
    assert_bytes(oracle.apply_penalties(logits, prompt, counts, output, *neutral), logits)


@checks("apply_penalties")
def test_penalties_with_repetition_zero_and_large_counts():
    logits, seen = F32([[2, -2, 0, -INF, 5]]), np.ones((1, 5), np.int8)
    counts = np.full((1, 5), 2**24 + 1, np.int32)
    zero = np.zeros(1, F32)
    for run in (oracle.apply_penalties, oracle.apply_penalties.mirror):
        out = run(logits, seen, np.zeros_like(counts), seen, zero, zero, zero)
        assert out[0, 0] == out[0, 4] == INF and not out[0, 1:3].any() and np.isnan(out[0, 3])
        finite = [a[:, :3].copy() for a in (logits, seen, counts, seen)]
        assert_bytes(run(*finite, F32([3]), zero, F32([1])), loop_penalties(*finite, F32([3]), zero, F32([1])))


@checks("apply_min_p", cases=[case(**c, min_p=m, arithmetic=a) for c in FEW for m in (0.0, 0.1, 1.0) for a in BOTH])
def test_min_p_against_scipy(case):
    """In the log domain: l - max < log(min_p); no logit lies within float32's error of the threshold."""
    logits = draw((case.R, case.V), "float32", case.V, scale=3.0)
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    margin = (case.V / 2**18 + 8) * 2.0**-24 * (2 + math.log(case.V) - shifted.min())
    threshold = math.log(float(F32(case.min_p))) if case.min_p else -INF
    assert not (np.abs(shifted - threshold) <= margin).any() or case.min_p == 1.0
    got = run_of("apply_min_p", case.arithmetic)(logits, np.full(case.R, case.min_p, F32))
    assert_kept(got, logits, shifted >= threshold)


@checks("apply_min_p")
def test_min_p_ties_masks_and_skipped_rows():
    logits = F32([[0, 0, -1, -INF], [0, 0, -1, -INF], [3, np.nan, 0, -9], [-INF] * 4, [0, -1, -2, -3]])
    out = oracle.apply_min_p(logits, F32([1.0, 0.0, 0.5, 0.5, -1.0]))
    assert_kept(out, logits, np.array([[1, 1, 0, 0], *[[1, 1, 1, 1]] * 4], bool))
    even = np.zeros((1, 4), F32)
    assert_bytes(oracle.apply_min_p(even, F32([1])), even)
    assert oracle.apply_min_p(np.zeros((0, 4), F32), np.zeros(0, F32)).shape == (0, 4)


def loop_top_k(row: list[float], k: int) -> list[bool]:
    """Whether fewer than k logits are larger."""
    if not 1 <= k < len(row):
        return [True] * len(row)
    return [sum(other > x for other in row) < k for x in row]


def loop_top_p(row: list[float], kept: list[bool], p: float) -> tuple[list[bool], float]:
    """Which survive, walking up from the least; and how close a cumulative sum came to 1 - p."""
    order = sorted(range(len(row)), key=lambda v: (row[v] if kept[v] else -INF, v))
    weights = [math.exp(row[v] - max(row)) if kept[v] else 0.0 for v in order]
    total, limit = math.fsum(weights), rounded(1.0 - p, "float32")
    kept, mass, nearest = list(kept), Fraction(0), INF
    for v, weight in zip(order[:-1], weights):
        mass += Fraction(weight)
        share = float(mass) / total
        nearest = min(nearest, abs(share - limit)) if share else nearest
        if share <= limit:
            kept[v] = False
    return kept, nearest


K, P = (None, 0, 1, 50, "V", "V + 1"), (None, 0.0, 0.1, 0.9, 1.0)
TRUNCATIONS = [case(V=V, R=R, k=k, p=p) for V, R in ((1, 1), (2, 3), (17, 3), (300, 2)) for k in K for p in P]


def arguments_of(case):
    k = None if case.k is None else np.full(case.R, eval(str(case.k), {"V": case.V}), np.int32)
    return k, None if case.p is None else np.full(case.R, case.p, F32)


@checks("apply_top_k_top_p", cases=TRUNCATIONS)
def test_truncation_against_loops(case):
    logits = draw((case.R, case.V), "float32", case.V + 1, scale=2.0)
    k, p = arguments_of(case)
    want = []
    for r, row in enumerate(logits):
        kept = loop_top_k(floats(row), 0 if k is None else int(k[r]))
        if p is not None:
            kept, nearest = loop_top_p(floats(row), kept, float(p[r]))
            assert nearest > (case.V + 20) * 2.0**-24 or case.p in (0.0, 1.0)
        want.append(kept)
    for run in (oracle.apply_top_k_top_p, oracle.apply_top_k_top_p.mirror):
        assert_kept(run(logits, k, p), logits, np.array(want))


@checks("apply_top_k_top_p", cases=[case(V=32000, R=3), case(V=151936, R=2)])
def test_truncation_of_whole_vocabularies(case):
    """Against SciPy's log-softmax: a kept set is an upper set, reaches p, and would not without its least."""
    logits = draw((case.R, case.V), "float32", 5, scale=3.0)
    k, p = np.array([50, 0, 1][: case.R], np.int32), F32([0.9, 0.5, 0.9][: case.R])
    out = oracle.apply_top_k_top_p(logits, k, p)
    slack = (case.V + 20) * 2.0**-24
    for r, row in enumerate(logits.astype(np.float64)):
        among = np.sort(row)[-int(k[r]) :] if k[r] else np.sort(row)
        mass = np.exp(special.log_softmax(among))
        kept = np.flatnonzero(out[r] > -INF)
        assert_bytes(out[r, kept], logits[r, kept])
        assert_bytes(np.sort(logits[r, kept]), among[-len(kept) :].astype(F32))
        tail = mass[-len(kept) :]
        assert tail.sum() >= p[r] - slack and tail[1:].sum() <= p[r] + slack


@checks("apply_top_k_top_p")
def test_truncation_keeps_ties_as_the_contract_says():
    run = oracle.apply_top_k_top_p
    tied = F32([[1, 3, 3, 2, 3, -0.0, 0.0, -INF]])
    for k, kept in ((1, [1, 2, 4]), (2, [1, 2, 4]), (4, [1, 2, 3, 4]), (6, [0, 1, 2, 3, 4, 5, 6])):
        assert np.flatnonzero(run(tied, np.array([k], np.int32))[0] > -INF).tolist() == kept
    for p, kept in ((0.0, [4]), (0.27, [4]), (0.3, [2, 4]), (0.6, [1, 2, 4]), (1.0, [0, 1, 2, 3, 4, 5, 6])):
        assert np.flatnonzero(run(tied, None, F32([p]))[0] > -INF).tolist() == kept
    zeros = F32([[0.0, -0.0, 0.0, -0.0]])
    for p, first in ((0.0, 3), (0.25, 3), (0.5, 2), (0.51, 1), (0.75, 1), (1.0, 0)):
        for arithmetic in (run, run.mirror):
            assert np.flatnonzero(arithmetic(zeros, None, F32([p]))[0] > -INF).tolist() == list(range(first, 4))


@checks("apply_top_k_top_p")
def test_truncation_of_special_rows():
    run = oracle.apply_top_k_top_p
    none, k, p = np.full(1, -INF, F32)[None].repeat(3, axis=1), np.array([2], np.int32), F32([0.5])
    for arguments in ((k, None), (None, p), (k, p)):
        assert_bytes(run(none, *arguments), none)
        assert run(np.zeros((0, 3), F32), *(None if a is None else a[:0] for a in arguments)).shape == (0, 3)
    assert_bytes(run(none), none)
    holed = F32([[1, np.nan, 3, 2]])
    assert_kept(run(holed, k, None), holed, np.array([[0, 1, 1, 0]], bool))
    assert_kept(run(holed, k, p), holed, np.array([[0, 1, 1, 0]], bool))
    assert_bytes(run(holed, None, p), holed)
    deep = F32([[0, -200, -1, -INF]])
    assert_kept(run(deep, None, F32([1])), deep, np.array([[1, 0, 1, 0]], bool))
    assert_bytes(run(deep, np.array([4], np.int32)), deep)


@checks("apply_top_k_top_p")
@QUICK
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(-1, 42), st.floats(0, 1, width=32))
def test_truncation_of_tied_rows(values, k, p):
    """Small integers tie often: the loop decides, but for a cumulative sum at the threshold."""
    logits, n = F32([values]), len(values)
    kept, nearest = loop_top_p(floats(logits[0]), loop_top_k(floats(logits[0]), k), p)
    got = oracle.apply_top_k_top_p(logits, np.array([k], np.int32), F32([p]))
    if nearest > 2 * n * 2.0**-24:
        assert_kept(got, logits, np.array([kept]))
    assert got[0].max() == logits.max()
    assert_bytes(oracle.apply_top_k_top_p(got, np.array([k], np.int32)), got)


@checks("apply_top_k_top_p")
def test_top_p_rounds_where_it_says():
    """Ten tokens of float32(0.1): the rounding of a cumulative sum and of 1 - p decides at every tenth."""
    logits = np.zeros((1, 10), F32)
    for tenths in range(1, 10):
        p = F32(tenths / 10)
        share, limit = Fraction(float(F32(0.1))), Fraction(rounded(1.0 - float(p), "float32"))
        dropped = sum(Fraction(fraction32(share * (i + 1))) <= limit for i in range(9))
        kept = oracle.apply_top_k_top_p(logits, None, F32([p])) > -INF
        assert kept.tolist() == [[i >= dropped for i in range(10)]]


@checks("apply_top_k_top_p", cases=[case(scale=s, k=k) for s in (0.3, 3.0, 40.0) for k in (None, 90)])
def test_the_mirrors_top_p_is_the_declared_sequence(case):
    """Weights in units of 2^-42, 1 at least where they are not 0; both sums round, then their quotient."""
    logits = draw((8, 300), "float32", 8, scale=case.scale)
    p = np.linspace(0.05, 1, 8).astype(F32)
    got = oracle.apply_top_k_top_p.mirror(logits, None if case.k is None else np.full(8, case.k, np.int32), p)
    for row, kept, limit in zip(logits, got, F32(1) - p):
        order = np.argsort(row, kind="stable")[-(case.k or 300) :]
        weights = MIRROR.exp(row[order] - row.max())
        counts = [max(round(Fraction(w) * 2**42), 1) if w else 0 for w in floats(weights)]
        whole, sums = F32(rounded(float(sum(counts)), "float32")), list(itertools.accumulate(counts))
        stays = [F32(rounded(float(c), "float32")) / whole > limit for c in sums[:-1]] + [True]
        assert_kept(kept[None], row[None], np.isin(np.arange(300), order[stays])[None])


@checks("apply_temperature", "apply_penalties", "apply_min_p", "apply_top_k_top_p")
def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.Generator(np.random.PCG64(6))
    logits = draw((7, 700), "float32", 7, scale=3.0)
    masks = rng.integers(0, 2, (3, *logits.shape)).astype(np.int8)
    row = lambda low, high: rng.uniform(low, high, 7).astype(F32)
    calls = {
        "apply_temperature": (row(0.3, 2),),
        "apply_penalties": (masks[0], masks[1].astype(np.int32), masks[2], row(-2, 2), row(-2, 2), row(0.5, 2)),
        "apply_min_p": (row(0, 0.3),),
        "apply_top_k_top_p": (rng.integers(0, 90, 7).astype(np.int32), row(0, 1)),
    }
    for name, more in calls.items():
        for arithmetic in BOTH:
            run = run_of(name, arithmetic)
            whole, part = run(logits, *more), run(logits[4:5], *(a[4:5] for a in more))
            assert_bytes(part, whole[4:5], name)
            assert_bytes(run(logits, *more), whole, name)


@checks("apply_temperature", "apply_min_p", "apply_top_k_top_p", "apply_penalties")
def test_logits_against_vllm():
    """To the byte: no golden comes near a threshold, or ties in top-p.

    But for penalties on the CPU: vLLM's product with 1 / rep there lies 3 roundings from l / rep, and each difference
    after it can round apart. Its CUDA kernel divides.
    """
    for golden in op_cases("sampling"):
        if golden.op not in ("apply_temperature", "apply_min_p", "apply_top_k_top_p", "apply_penalties"):
            continue
        want, call = golden.outputs["logits"], golden.call()
        got = lookup(golden.op)(**call)
        if golden.op == "apply_penalties" and golden.build == "cpu":
            logits = np.abs(call["logits"].astype(np.float64))
            scaled = logits / np.minimum(1, call["repetition_penalties"][:, None])
            moved = np.abs(call["frequency_penalties"][:, None] * call["output_counts"])
            size = (
                3 * scaled + 2 * (scaled + moved) + 2 * (scaled + moved + np.abs(call["presence_penalties"][:, None]))
            )
            assert_within(got, want, size * 2.0**-24, str(golden))
        else:
            assert_bytes(got, want, str(golden))


Z, I1, F1 = np.zeros((2, 3), F32), np.zeros(2, np.int32), np.zeros(2, F32)
M = np.zeros((2, 3), np.int8)
EMPTY, NONE8, NONE32 = np.zeros((2, 0), F32), np.zeros((2, 0), np.int8), np.zeros((2, 0), np.int32)
REFUSED = [
    ("apply_temperature", "logits", (EMPTY, F1)),
    ("apply_temperature", "temperature", (Z, F1[:1])),
    ("apply_temperature", "temperature", (Z, F1.astype(np.float64))),
    ("apply_penalties", "logits", (EMPTY, NONE8, NONE32, NONE8, F1, F1, F1)),
    ("apply_penalties", "output_counts", (Z, M, M, M, F1, F1, F1)),
    ("apply_penalties", "output_mask", (Z, M, M.astype(np.int32), M[:, :2].copy(), F1, F1, F1)),
    ("apply_min_p", "logits", (EMPTY, F1)),
    ("apply_min_p", "min_p", (Z, F1[:1])),
    ("apply_top_k_top_p", "logits", (EMPTY,)),
    ("apply_top_k_top_p", "k", (Z, I1.astype(np.int64))),
    ("apply_top_k_top_p", "p", (Z, I1, F1[:1])),
    ("apply_top_k_top_p", "logits", (Z.astype(np.float64), I1)),
]


@pytest.mark.parametrize("name, argument, call", REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_calls_are_refused(name, argument, call):
    with pytest.raises(ContractError) as caught:
        lookup(name)(*call)
    assert (caught.value.op, caught.value.argument) == (name, argument)


mutations("apply_temperature", {
    "divide greedy rows too": ("temperature if all_random else", "temperature if True else"),
    "the threshold itself is greedy": ("temperature < np.float32(1e-5)", "temperature <= np.float32(1e-5)"),
    "multiply by the reciprocal": (
        "nx.div(nx.load(logits), nx.load(divisor)[:, None])",
        "nx.mul(nx.load(logits), nx.load(nx.store(nx.div(1.0, nx.load(divisor)[:, None]), np.float32)))",
    ),
    "a threshold of 1e-6": ("np.float32(1e-5)", "np.float32(1e-6)"),
})  # fmt: skip
_FREQUENCY = "value -= frequency_penalties[:, None] * output_counts.astype(np.float32)\n        "
_PRESENCE = "value -= presence_penalties[:, None] * (output_mask != 0)\n    "
mutations("apply_penalties", {
    "multiply positive logits": ("logits / repetition", "logits * repetition"),
    "multiply by the reciprocal": ("logits / repetition", "logits * (1 / repetition)"),
    "zero is positive": ("logits > 0, logits / repetition", "logits >= 0, logits / repetition"),
    "prompt tokens are not repeated": ("(prompt_mask != 0) | (output_mask != 0)", "output_mask != 0"),
    "output tokens are not repeated": ("(prompt_mask != 0) | (output_mask != 0)", "prompt_mask != 0"),
    "presence counts the prompt": ("* (output_mask != 0)", "* (prompt_mask != 0)"),
    "presence counts": ("presence_penalties[:, None] * (output_mask != 0)",
                        "presence_penalties[:, None] * output_counts.astype(np.float32)"),
    "frequency once": ("output_counts.astype(np.float32)", "(output_counts > 0)"),
    "counts unrounded": ("output_counts.astype(np.float32)", "output_counts.astype(np.float64)"),
    "presence first": (_FREQUENCY + _PRESENCE, _PRESENCE + "    " + _FREQUENCY[:-4]),
})  # fmt: skip
mutations("apply_min_p", {
    "threshold kept out": ("probabilities < threshold", "probabilities <= threshold"),
    "absolute threshold": ("nx.mul(nx.load(min_p), peak)", "nx.load(min_p)"),
    "relative to the mean": ("probabilities.max(axis=-1)", "probabilities.mean(axis=-1)"),
    "softmax without its sum": ("nx.div(weights, fixed_point.total(nx, weights))", "nx.exp(value)",
                                "softmax"),
})  # fmt: skip
mutations("apply_top_k_top_p", {
    "exactly k, ties dropped": ("logits[row] < threshold", "logits[row] <= threshold"),
    "one more than k": (
        "np.partition(logits[row], vocabulary - k[row])[vocabulary - k[row]]",
        "np.partition(logits[row], vocabulary - k[row] - 1)[vocabulary - k[row] - 1]",
    ),
    "k = 1 keeps all": ("(k >= 1)", "(k > 1)"),
    "the threshold stays": ("cumulative <= (np", "cumulative < (np"),
    "the last can go": ("dropped[:, -1] = False", "pass"),
    "p instead of 1 - p": ("(np.float32(1) - p)[:, None]", "p[:, None]"),
    "top-p before top-k": ("order = ascending_order(kept)\n    ascending = np.take_along_axis(kept,",
                           "order = ascending_order(logits)\n    ascending = np.take_along_axis(logits,"),
    "tiny weights lost": ("np.maximum(np.rint(weights / np.float64(UNIT)).astype(np.int64), weights > 0)",
                          "np.rint(weights / np.float64(UNIT)).astype(np.int64)", "fixed_point.units"),
    "sums not rounded": ("nx.store(np.add.accumulate(probabilities, axis=-1), np.float32)",
                         "np.add.accumulate(probabilities, axis=-1)"),
    "-0 under 0": ("values + np.float32(0)", "values", "ordered_codes"),
    "highest index first": ("| np.arange(values.shape[1], dtype=np.int64)",
                            "| np.arange(values.shape[1], dtype=np.int64)[::-1]", "ascending_order"),
    "negatives descend": ("code ^ np.int32(0x7FFFFFFF)", "code", "ordered_codes"),
})  # fmt: skip
