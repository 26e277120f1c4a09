"""Bias, masks, allowed ids, bad words and minimum length against scalar loops and vLLM's goldens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw, rounded

F32, I32, INF = np.float32, np.int32, np.inf
OPS = ("apply_logit_bias", "apply_token_mask", "apply_allowed_token_ids", "apply_bad_words", "apply_min_tokens")
QUICK = settings(max_examples=40, deadline=None, derandomize=True)
SHAPES = [case(R=R, V=V) for R in (1, 3, 32) for V in (1, 2, 17, 1000)] + [case(R=2, V=248320)]


def runs(name):
    return lookup(name), lookup(name).mirror


def with_masked(logits, pairs):
    """Logits with -inf at (row, column) pairs."""
    want = logits.copy()
    for r, v in pairs:
        want[r, v] = -INF
    return want


@checks("apply_logit_bias", cases=SHAPES)
def test_bias_adds_in_list_order(case):
    rng = np.random.Generator(np.random.PCG64(case.V))
    logits = draw((case.R, case.V), "float32", 1, scale=3.0)
    rows, cols = (rng.integers(0, size, 40).astype(I32) for size in (case.R, case.V))
    bias = rng.choice([-100.0, 100.0, 0.1, -0.3], 40).astype(F32)
    want = {}
    for r, v, b in zip(rows.tolist(), cols.tolist(), bias.tolist()):
        want[r, v] = rounded(want.get((r, v), float(logits[r, v])) + b, "float32")
    expected = logits.copy()
    for at, value in want.items():
        expected[at] = value
    for run in runs("apply_logit_bias"):
        assert_bytes(run(logits, rows, cols, bias), expected)


@checks("apply_logit_bias")
def test_bias_of_repeated_pairs_and_special_logits():
    logits = F32([[1, -INF, INF, np.nan, 3e38]])
    cols = np.array([0, 0, 0, 1, 2, 3, 4, 4], I32)
    bias = F32([2.0**24, 1, -(2.0**24), 100, -INF, 5, 3e38, -3e38])
    out = oracle.apply_logit_bias(logits, np.zeros(8, I32), cols, bias)
    assert out[0, 0] == 0 and out[0, 1] == -INF and np.isnan(out[0, 2:4]).all() and out[0, 4] == INF


@checks("apply_token_mask", cases=SHAPES)
def test_token_mask_scatters(case):
    rng = np.random.Generator(np.random.PCG64(case.V + 1))
    logits = draw((case.R, case.V), "float32", 2)
    logits[0, 0] = np.nan
    rows, cols = (rng.integers(0, size, 9).astype(I32) for size in (case.R, case.V))
    for run in runs("apply_token_mask"):
        assert_bytes(run(logits, rows, cols), with_masked(logits, zip(rows.tolist(), cols.tolist())))


@checks("apply_token_mask", "apply_logit_bias")
def test_an_empty_list_changes_nothing():
    logits, none = draw((2, 5), "float32", 3), np.zeros(0, I32)
    assert_bytes(oracle.apply_token_mask(logits, none, none), logits)
    assert_bytes(oracle.apply_logit_bias(logits, none, none, np.zeros(0, F32)), logits)
    empty = logits[:0]
    assert oracle.apply_token_mask(empty, none, none).shape == (0, 5)
    assert oracle.apply_allowed_token_ids(empty, np.zeros((0, 5), np.int8)).shape == (0, 5)
    assert oracle.apply_bad_words(empty, [], []).shape == (0, 5)
    assert oracle.apply_min_tokens(empty, [], none, none).shape == (0, 5)


@checks("apply_allowed_token_ids", cases=SHAPES)
def test_a_set_mask_excludes(case):
    logits = draw((case.R, case.V), "float32", 4)
    logits[0, 0] = np.nan
    mask = np.random.Generator(np.random.PCG64(5)).choice(np.array([0, 0, 1, -1, 2], np.int8), logits.shape)
    want = with_masked(logits, zip(*(axis.tolist() for axis in np.nonzero(mask))))
    for run in runs("apply_allowed_token_ids"):
        assert_bytes(run(logits, mask), want)
        assert_bytes(run(logits, np.zeros_like(mask)), logits)
        assert_bytes(run(logits, np.ones_like(mask)), np.full_like(logits, -INF))


@checks("apply_bad_words")
@QUICK
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4), st.lists(st.integers(0, 2), max_size=6)
)
def test_bad_words_by_their_definition(words, past):
    """A word is masked where appending its last token would end the past in the whole word."""
    logits = draw((2, 3), "float32", 6)
    banned = {v for v in range(3) for w in words if [*past, v][-len(w) :] == w}
    for run in runs("apply_bad_words"):
        assert_bytes(run(logits, [[], words], [past, past]), with_masked(logits, [(1, v) for v in banned]))


@checks("apply_bad_words")
def test_bad_words_edges():
    logits = draw((3, 6), "float32", 7)
    words = ([[5]], [[1, 2, 3], [2, 4]], [[0, 0, 1]])
    out = oracle.apply_bad_words(logits, list(words), [[], [9, 1, 2], (0,)])
    assert_bytes(out, with_masked(logits, [(0, 5), (1, 3), (1, 4)]))


@checks("apply_min_tokens", cases=[case(generated=g, least=m) for g in (0, 1, 2, 3) for m in (0, 2, 3)])
def test_min_tokens_masks_until_reached(case):
    logits = draw((3, 6), "float32", 8)
    stops = [[0, 5], [], {2}]
    counts = np.array([case.generated, 0, 1], I32), np.array([case.least, 9, 1], I32)
    hidden = [(0, 0), (0, 5)] if case.generated < case.least else []
    for run in runs("apply_min_tokens"):
        assert_bytes(run(logits, stops, *counts), with_masked(logits, hidden))


@checks(*OPS)
def test_token_masks_against_vllm():
    for golden in op_cases("sampling"):
        if golden.op in OPS:
            assert_bytes(lookup(golden.op)(**golden.call()), golden.outputs["logits"], str(golden))


Z, EMPTY, ONE = np.zeros((2, 3), F32), np.zeros((2, 0), F32), np.zeros(1, I32)
FAR, BELOW, BIAS, COUNT = np.array([3], I32), np.array([-1], I32), np.zeros(1, F32), np.zeros(2, I32)
REFUSED = [
    ("apply_logit_bias", "rows", (Z, FAR, ONE, BIAS)),
    ("apply_logit_bias", "rows", (Z, BELOW, ONE, BIAS)),
    ("apply_logit_bias", "cols", (Z, ONE, FAR, BIAS)),
    ("apply_logit_bias", "cols", (Z, ONE, BELOW, BIAS)),
    ("apply_logit_bias", "bias", (Z, ONE, ONE, np.zeros(2, F32))),
    ("apply_logit_bias", "logits", (EMPTY, ONE[:0], ONE[:0], BIAS[:0])),
    ("apply_token_mask", "rows", (Z, np.array([2], I32), ONE)),
    ("apply_token_mask", "rows", (Z, BELOW, ONE)),
    ("apply_token_mask", "cols", (Z, ONE, FAR)),
    ("apply_token_mask", "cols", (Z, ONE, BELOW)),
    ("apply_token_mask", "logits", (EMPTY, ONE[:0], ONE[:0])),
    ("apply_allowed_token_ids", "mask", (Z, np.zeros((2, 2), np.int8))),
    ("apply_allowed_token_ids", "mask", (Z, np.zeros((2, 3), np.bool_))),
    ("apply_allowed_token_ids", "logits", (EMPTY, np.zeros((2, 0), np.int8))),
    ("apply_bad_words", "bad_words", (Z, [[]], [[], []])),
    ("apply_bad_words", "past_ids", (Z, [[], []], [[]])),
    ("apply_bad_words", "past_ids", (Z, [[], []], [[], None])),
    ("apply_bad_words", "bad_words", (Z, [[[]], []], [[], []])),
    ("apply_bad_words", "bad_words", (Z, [[[0, 3]], []], [[], []])),
    ("apply_bad_words", "bad_words", (Z, [[[-1]], []], [[], []])),
    ("apply_bad_words", "bad_words", (Z, [[["a"]], []], [[], []])),
    ("apply_bad_words", "bad_words", (Z, [[1], []], [[], []])),
    ("apply_bad_words", "bad_words", (Z, {0: [[1]]}, [[], []])),
    ("apply_bad_words", "logits", (EMPTY, [[], []], [[], []])),
    ("apply_min_tokens", "stop_ids", (Z, [[0]], COUNT, COUNT)),
    ("apply_min_tokens", "stop_ids", (Z, [[0], [3]], COUNT, COUNT)),
    ("apply_min_tokens", "stop_ids", (Z, [[0], [True]], COUNT, COUNT)),
    ("apply_min_tokens", "stop_ids", (Z, [[0], 1], COUNT, COUNT)),
    ("apply_min_tokens", "min_tokens", (Z, [[0], [1]], COUNT, COUNT[:1])),
    ("apply_min_tokens", "logits", (EMPTY, [[], []], COUNT, COUNT)),
]


@pytest.mark.parametrize("name, argument, call", REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_calls_are_refused(name, argument, call):
    with pytest.raises(ContractError) as caught:
        lookup(name)(*call)
    assert (caught.value.op, caught.value.argument) == (name, argument)


mutations("apply_logit_bias", {
    "a repeated pair counts once": ("np.add.at(out, (rows, cols), bias)", "out[rows, cols] += bias"),
    "subtract": ("np.add.at", "np.subtract.at"),
    "replace": ("np.add.at(out, (rows, cols), bias)", "out[rows, cols] = bias"),
    "first row only": ("(rows, cols)", "(rows * 0, cols)"),
    "in descending order": ("(rows, cols), bias", "(rows[::-1], cols[::-1]), bias[::-1]"),
})  # fmt: skip
mutations("apply_token_mask", {
    "whole columns": ("out[rows, cols]", "out[:, cols]"),
    "a large negative number": ("= MASKED", "= np.float32(-3e38)"),
    "+inf": ("= MASKED", "= -MASKED"),
})  # fmt: skip
mutations("apply_allowed_token_ids", {
    "a set mask keeps": ("mask != 0", "mask == 0"),
    "positive masks only": ("mask != 0", "mask > 0"),
    "ones only": ("mask != 0", "mask == 1"),
})  # fmt: skip
mutations("apply_bad_words", {
    "prefix anywhere": ("past[len(past) - len(prefix) :]", "past[: len(prefix)]"),
    "the first token goes": ("out[row, last]", "out[row, (prefix or [last])[0]]"),
    "no prefix needed": ("== prefix", "is not None"),
    "single tokens stay": ("if len(prefix) <= len(past)", "if 0 < len(prefix) <= len(past)"),
    "one token short": ("len(prefix) <= len(past)", "len(prefix) < len(past)"),
})  # fmt: skip
mutations("apply_min_tokens", {
    "one token too long": ("num_generated < min_tokens", "num_generated <= min_tokens"),
    "one token short": ("num_generated < min_tokens", "num_generated + 1 < min_tokens"),
    "first stop id only": ("list(stop_ids[row])", "list(stop_ids[row])[:1]"),
    "row 0's stop ids": ("stop_ids[row]", "stop_ids[0]"),
})  # fmt: skip
