"""Arg-max, probabilities and log-probabilities against mpmath, SciPy, scalar loops and vLLM's goldens."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import MIRROR
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_ids, assert_ulp, assert_within
from .generic import assert_within_bound
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw, floats, rounded

F32, INF = np.float32, np.inf
QUICK = settings(max_examples=40, deadline=None, derandomize=True)
RUNS = (oracle.greedy_argmax, oracle.greedy_argmax.mirror)
SHAPES = [case(R=R, V=V) for R in (1, 3, 32) for V in (1, 2, 17, 1000)]
WHOLE = [*SHAPES, case(R=1, V=32000), case(R=1, V=151936), case(R=1, V=248320)]


def scan(row: list[float]) -> int:
    """The C++ loop: start at element 0, move on a strictly greater one."""
    best = 0
    for v, x in enumerate(row):
        if x > row[best]:
            best = v
    return best


@checks("greedy_argmax", cases=WHOLE)
def test_argmax_is_the_ascending_scan(case):
    logits = np.round(draw((case.R, case.V), "float32", case.V, scale=2.0))
    want = np.array([scan(floats(row)) for row in logits])
    for run in RUNS:
        assert_ids(run(logits), want)


@checks("greedy_argmax")
@QUICK
@given(st.lists(st.sampled_from([-INF, -1.0, -0.0, 0.0, 1.0, INF, np.nan]), min_size=1, max_size=6))
def test_argmax_of_ties_infinities_and_nan(values):
    row = F32([values, values[::-1]])
    for run in RUNS:
        assert_ids(run(row), np.array([scan(values), scan(values[::-1])]))


@checks("greedy_argmax")
def test_argmax_of_named_rows():
    rows = F32([[1, 3, 3, 2], [np.nan, 9, 1, 2], [1, np.nan, 2, 2], [-INF] * 4, [-0.0, 0.0, 0, 0], [-5, -5, -4, -INF]])
    assert_ids(oracle.greedy_argmax(rows), np.array([1, 0, 2, 0, 0, 2]))
    assert_ids(oracle.greedy_argmax(rows[:0]), np.zeros(0, np.int64))


def exact_rows(logits, log: bool):
    """softmax or its logarithm in 120 bits, each element rounded once."""
    out = []
    with mpmath.workprec(120):
        for row in logits:
            weights = [mpmath.exp(mpmath.mpf(x)) for x in floats(row)]
            total = mpmath.fsum(weights)
            shares = [mpmath.log(w / total) if log else w / total for w in weights]
            out.append([rounded(float(share), "float32") for share in shares])
    return F32(out)


@checks("compute_probs", "compute_logprobs", cases=[case(V=V, scale=s) for V in (1, 2, 17, 200) for s in (1.0, 8.0)])
def test_probabilities_against_mpmath(case):
    logits = draw((3, case.V), "float32", case.V, scale=case.scale)
    assert_bytes(oracle.compute_probs(logits), exact_rows(logits, False))
    assert_bytes(oracle.compute_logprobs(logits), exact_rows(logits, True))


@checks("compute_probs", "compute_logprobs", cases=WHOLE)
def test_probabilities_against_scipy(case):
    """SciPy and truth both err by some 2^-46 of a float32's spacing, so that one store in a million may flip."""
    logits = draw((case.R, case.V), "float32", case.V + 1, scale=4.0)
    wide = logits.astype(np.float64)
    for found, want in (
        (oracle.compute_probs, special.softmax(wide, axis=-1)),
        (oracle.compute_logprobs, special.log_softmax(wide, axis=-1)),
    ):
        truth = found(logits)
        assert_ulp(truth, want.astype(F32), 1, inexact_share=1e-5)
        assert_within_bound(found, {"logits": logits}, (truth,), (found.mirror(logits),), "mirror")


@checks("compute_probs", "compute_logprobs", cases=[case(shift=s) for s in (-1000.0, 0.0, 1000.0, 3e38)])
def test_probabilities_of_shifted_and_deep_rows(case):
    """Only differences count; a logit 100 and more below the maximum keeps a subnormal probability, or none."""
    logits = F32([[0, -1, -50, -95, -100, -103, -104, -200, -INF]])
    logits = logits + F32(case.shift) if abs(case.shift) < 2000 else F32([[case.shift, -case.shift, 0, -INF]])
    wide = logits.astype(np.float64)
    for found, want in (
        (oracle.compute_probs, special.softmax(wide, axis=-1)),
        (oracle.compute_logprobs, special.log_softmax(wide, axis=-1)),
    ):
        with np.errstate(over="ignore"):
            want = want.astype(F32)
        truth = found(logits)
        assert_ulp(truth, want, 0)
        if abs(case.shift) < 2000:
            assert_within_bound(found, {"logits": logits}, (truth,), (found.mirror(logits),), "mirror")


def counted(weights):
    """The declared sum: each weight in units of 2^-42, to nearest even and 1 at least, in Python's integers."""
    unit = Fraction(1, 2**42)
    return sum(max(round(Fraction(w) / unit), 1) for w in floats(weights) if w)


@checks("compute_probs", "compute_logprobs", cases=[case(V=V, scale=s) for V in (5, 4096, 9001) for s in (3.0, 30.0)])
def test_mirror_is_the_declared_sequence(case):
    row = draw((1, case.V), "float32", 9, scale=case.scale)[0]
    shifted = row - max(row)
    weights = MIRROR.exp(shifted)
    total = rounded(math.ldexp(counted(weights), -42), "float32")
    assert_bytes(oracle.compute_probs.mirror(row[None])[0], F32([w / F32(total) for w in weights]))
    log_total = MIRROR.log(F32([total]))[0]
    assert_bytes(oracle.compute_logprobs.mirror(row[None])[0], F32([s - log_total for s in shifted]))


@checks("compute_probs", "compute_logprobs")
def test_the_mirrors_sum_does_not_depend_on_the_order_of_the_columns():
    row = draw((1, 20000), "float32", 12, scale=3.0)
    order = np.random.Generator(np.random.PCG64(13)).permutation(20000)
    for found in (oracle.compute_probs.mirror, oracle.compute_logprobs.mirror):
        assert_bytes(found(row[:, order]), found(row)[:, order])


@checks("compute_probs", "compute_logprobs")
def test_probabilities_of_special_rows():
    rows = F32([[-INF] * 3, [1, np.nan, 2], [INF, 1, 2], [-INF, 5, -INF]])
    for found, ends in ((oracle.compute_probs, (0, 1, 0)), (oracle.compute_logprobs, (-INF, 0, -INF))):
        for run in (found, found.mirror):
            out = run(rows)
            assert np.isnan(out[:2]).all() and np.isnan(out[2, 0])
            assert_bytes(out[3], F32(ends))
            assert run(rows[:0]).shape == (0, 3)


@checks("compute_probs", "compute_logprobs", "greedy_argmax", "gather_logprobs")
def test_a_row_does_not_depend_on_its_neighbours():
    logits = draw((7, 5000), "float32", 10, scale=3.0)
    for name in ("compute_probs", "compute_logprobs", "greedy_argmax"):
        for run in (lookup(name), lookup(name).mirror):
            assert_bytes(run(logits[4:5]), run(logits)[4:5], name)
            assert_bytes(run(logits), run(logits), name)
    ids = np.arange(7)
    for part, whole in zip(oracle.gather_logprobs(logits[4:5], 9, ids[4:5]), oracle.gather_logprobs(logits, 9, ids)):
        assert_bytes(part, whole[4:5])


def loop_gather(row, n, token):
    """By sorting (is a number, -value, index)."""
    order = sorted(range(len(row)), key=lambda v: (row[v] == row[v], 0 if row[v] != row[v] else -row[v], v))[:n]
    ids = [token, *order]
    return ids, [row[v] for v in ids], sum(x >= row[token] for x in row)


@checks("gather_logprobs", cases=[case(V=V, n=n) for V in (1, 2, 17, 1000) for n in (0, 1, 5, 17, V) if n <= V])
def test_gather_against_sorting(case):
    rows = np.round(draw((4, case.V), "float32", case.V, scale=2.0), 1)
    rows[2, ::3], rows[3, ::4], rows[3, 1::4], rows[1, 2::5] = -INF, INF, np.nan, -0.0
    ids = np.array([0, case.V - 1, case.V // 2, min(1, case.V - 1)])
    want = [loop_gather(floats(row), case.n, int(token)) for row, token in zip(rows, ids)]
    for run in (oracle.gather_logprobs, oracle.gather_logprobs.mirror):
        indices, values, ranks = run(rows, case.n, ids)
        assert_ids(indices, np.array([w[0] for w in want], np.int32))
        assert_bytes(values, F32([w[1] for w in want]))
        assert_ids(ranks, np.array([w[2] for w in want]))


@checks("gather_logprobs")
def test_gather_of_a_whole_vocabulary():
    logprobs = draw((2, 151936), "float32", 11)
    ids = np.array([7, 151935])
    indices, values, ranks = oracle.gather_logprobs(logprobs, 20, ids)
    for r, row in enumerate(logprobs):
        order = np.lexsort((np.arange(len(row)), -row))
        assert indices[r].tolist() == [ids[r], *order[:20]]
        assert_bytes(values[r], row[indices[r]])
        assert ranks[r] == order.tolist().index(ids[r]) + 1 + np.count_nonzero(row == row[ids[r]]) - 1
    assert [a.shape for a in oracle.gather_logprobs(logprobs[:0], 3, ids[:0])] == [(0, 4), (0, 4), (0,)]


@checks("greedy_argmax", "compute_probs", "compute_logprobs", "gather_logprobs")
def test_most_likely_tokens_against_vllm():
    """Ids, gathers and ranks to the byte; sums of V exponentials in any float32 order lie within V + 20 roundings."""
    for golden in op_cases("sampling"):
        call = golden.call()
        if golden.op == "gather_logprobs":
            for got, (name, want) in zip(oracle.gather_logprobs(**call), golden.outputs.items()):
                assert_bytes(got, want, f"{golden} {name}")
        elif golden.op == "greedy_argmax":
            assert_ids(oracle.greedy_argmax(**call), golden.outputs["ids"], str(golden))
        elif golden.op in ("compute_probs", "compute_logprobs"):
            logits = call["logits"].astype(np.float64)
            size = 1 + np.log(logits.shape[1]) + np.where(logits > -INF, logits.max(axis=-1, keepdims=True) - logits, 0)
            truth, (want,) = lookup(golden.op)(**call), golden.outputs.values()
            size = size * truth if golden.op == "compute_probs" else size
            assert_within(want, truth, (logits.shape[1] + 20) * 2.0**-24 * size + 2.0**-149, str(golden))


Z, EMPTY, IDS = np.zeros((2, 3), F32), np.zeros((2, 0), F32), np.zeros(2, np.int64)
REFUSED = [
    ("greedy_argmax", "logits", (EMPTY,)),
    ("greedy_argmax", "logits", (Z.astype(np.float64),)),
    ("compute_probs", "logits", (EMPTY,)),
    ("compute_probs", "logits", (Z.astype(np.float16),)),
    ("compute_logprobs", "logits", (EMPTY,)),
    ("compute_logprobs", "logits", (Z[0],)),
    ("gather_logprobs", "logprobs", (EMPTY, 0, IDS)),
    ("gather_logprobs", "ids", (Z, 1, IDS + 3)),
    ("gather_logprobs", "ids", (Z, 1, IDS - 1)),
    ("gather_logprobs", "ids", (Z, 1, IDS.astype(np.int32))),
    ("gather_logprobs", "num_logprobs", (Z, 4, IDS)),
    ("gather_logprobs", "num_logprobs", (Z, -1, IDS)),
    ("gather_logprobs", "num_logprobs", (Z, 1.5, IDS)),
]


@pytest.mark.parametrize("name, argument, call", REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_calls_are_refused(name, argument, call):
    with pytest.raises(ContractError) as caught:
        lookup(name)(*call)
    assert (caught.value.op, caught.value.argument) == (name, argument)


_SCORES = "np.where(np.isnan(scores), -np.inf, scores)"
mutations("greedy_argmax", {
    "the last of equals": (f"np.argmax({_SCORES}, axis=-1)",
                           f"scores.shape[1] - 1 - np.argmax({_SCORES}[:, ::-1], axis=-1)", "first_maximum"),
    "the first NaN wins": (_SCORES, "scores", "first_maximum"),
    "a NaN in column 0 loses": ("ascending_scan(logits)", "first_maximum(logits)"),
    "magnitudes": ("ascending_scan(logits)", "ascending_scan(abs(logits))"),
})  # fmt: skip
mutations("compute_probs", {
    "2^l": ("softmax(nx, logits)", "softmax(nx, nx.store(nx.mul(nx.load(logits), nx.const(0.6931)), np.float32))"),
    "rounded to half": ("nx.store(softmax(nx, logits), np.float32)",
                        "nx.store(softmax(nx, logits), np.float16).astype(np.float32)"),
    "no shift": ("softmax(nx, logits)",
                 "nx.div(nx.exp(nx.load(logits)), nx.sum(nx.exp(nx.load(logits)), keepdims=True))"),
    "stored twice": ("nx.store(softmax(nx, logits), np.float32)", "nx.store(nx.const(1) - nx.load(nx.store("
                     "nx.const(1) - softmax(nx, logits), np.float32)), np.float32)"),
})  # fmt: skip
mutations("compute_logprobs", {
    "added before it is subtracted": ("nx.sub(shifted, nx.log(total))",
                                      "nx.sub(value, nx.add(nx.max(value, keepdims=True), nx.log(total)))"),
    "log2": ("nx.log(total)", "nx.mul(nx.log(total), nx.const(1.4427))"),
    "half the sum": ("fixed_point.total(nx, nx.exp(shifted))", "fixed_point.total(nx, nx.exp(shifted)[:, ::2])"),
    "the sum alone": ("nx.sub(shifted, nx.log(total))", "nx.sub(value, nx.log(total))"),
    "the mean": ("nx.log(total)", "nx.log(nx.div(total, nx.const(value.shape[-1])))"),
})  # fmt: skip
_CODES = "ordered_codes(logprobs)"
mutations("gather_logprobs", {
    "rank from 0": ("logprobs >= chosen", "logprobs > chosen"),
    "NaN beside +inf": (_CODES, "ordered_codes(np.where(np.isnan(logprobs), np.float32(np.inf), logprobs))"),
    "NaN last": (_CODES, "ordered_codes(np.where(np.isnan(logprobs), np.float32(-np.inf), logprobs))"),
    "highest id of equals": ("[: n - len(above)]", "[::-1][: n - len(above)]", "_largest_first"),
    "ascending": ("np.argsort(-codes[row][found]", "np.argsort(codes[row][found]", "_largest_first"),
    "the first token's": ("take_along_axis(logprobs, ids[:, None]", "take_along_axis(logprobs, ids[:, None] * 0"),
    "ties unsorted": ("np.sort(np.concatenate([above, equal]))", "np.concatenate([equal, above])[::-1]",
                      "_largest_first"),
})  # fmt: skip
