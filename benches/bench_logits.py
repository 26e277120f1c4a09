"""Logits processing of a batch of 32 over Qwen3's vocabulary of 151,936, and of one request."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

V = 151_936
ROWS = [1, 32]
BANNED = 1000


def logits_of(R):
    return normal(R, V, dtype=np.float32) * np.float32(3)


def column(R, value, dtype=np.float32):
    return np.full(R, value, dtype)


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_temperature(benchmark, side, R):
    def peer(x, t):
        return (x.double() / t.double()[:, None]).float()

    compare(benchmark, side, f"apply_temperature {R}x{V}", oracle.apply_temperature, peer, logits_of(R), column(R, 0.7))


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_penalties(benchmark, side, R):
    def peer(x, prompt, counts, output, frequency, presence, repetition):
        import torch

        value, rep = x.double(), repetition.double()[:, None]
        scaled = torch.where(value > 0, value / rep, value * rep)
        value = torch.where((prompt | output) != 0, scaled, value)
        value -= frequency.double()[:, None] * counts
        return (value - presence.double()[:, None] * output).float()

    rng = np.random.Generator(np.random.PCG64(1))
    counts = rng.integers(0, 3, (R, V), np.int32)
    prompt, output = rng.integers(0, 2, (R, V), np.int8), (counts > 0).astype(np.int8)
    arrays = logits_of(R), prompt, counts, output, column(R, 0.5), column(R, 0.3), column(R, 1.2)
    compare(benchmark, side, f"apply_penalties {R}x{V}", oracle.apply_penalties, peer, *arrays)


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_min_p(benchmark, side, R):
    def peer(x, m):
        probs = x.double().softmax(-1)
        return x.masked_fill(probs < probs.amax(-1, keepdim=True) * m.double()[:, None], -float("inf"))

    compare(benchmark, side, f"apply_min_p {R}x{V}", oracle.apply_min_p, peer, logits_of(R), column(R, 0.05))


def truncated(x, k=None, p=None):
    """The sort-based form of vLLM in float64."""
    value = x.double()
    if p is None:
        return x.masked_fill(value < value.topk(int(k.max()), dim=-1).values[:, -1:], -float("inf"))
    ascending, index = value.sort(dim=-1, stable=True)
    if k is not None:
        least = ascending.gather(1, (x.shape[1] - k.long())[:, None])
        ascending = ascending.masked_fill(ascending < least, -float("inf"))
    dropped = ascending.softmax(-1).cumsum(-1) <= 1 - p.double()[:, None]
    dropped[:, -1] = False
    return value.scatter_(1, index, ascending.masked_fill(dropped, -float("inf"))).float()


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_top_k(benchmark, side, R):
    arrays = logits_of(R), column(R, 50, np.int32)
    compare(benchmark, side, f"apply_top_k_top_p k=50 {R}x{V}", oracle.apply_top_k_top_p, truncated, *arrays)


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_top_p(benchmark, side, R):
    ours = lambda x, p: oracle.apply_top_k_top_p(x, None, p)
    peer = lambda x, p: truncated(x, None, p)
    compare(benchmark, side, f"apply_top_k_top_p p=0.9 {R}x{V}", ours, peer, logits_of(R), column(R, 0.9))


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_top_k_top_p(benchmark, side, R):
    arrays = logits_of(R), column(R, 50, np.int32), column(R, 0.9)
    compare(benchmark, side, f"apply_top_k_top_p k=50 p=0.9 {R}x{V}", oracle.apply_top_k_top_p, truncated, *arrays)


def pairs(R):
    rng = np.random.Generator(np.random.PCG64(2))
    return rng.integers(0, R, BANNED).astype(np.int32), rng.integers(0, V, BANNED).astype(np.int32)


@pytest.mark.parametrize("side", SIDES)
def test_logit_bias(benchmark, side):
    def peer(x, rows, cols, bias):
        return x.double().index_put_((rows.long(), cols.long()), bias.double(), accumulate=True).float()

    arrays = logits_of(32), *pairs(32), column(BANNED, 5)
    compare(benchmark, side, f"apply_logit_bias of {BANNED} in 32x{V}", oracle.apply_logit_bias, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_token_mask(benchmark, side):
    def peer(x, rows, cols):
        out = x.clone()
        out[rows.long(), cols.long()] = -float("inf")
        return out

    arrays = logits_of(32), *pairs(32)
    compare(benchmark, side, f"apply_token_mask of {BANNED} in 32x{V}", oracle.apply_token_mask, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_allowed_token_ids(benchmark, side):
    mask = np.random.Generator(np.random.PCG64(3)).integers(0, 2, (32, V), np.int8)
    peer = lambda x, m: x.masked_fill(m != 0, -float("inf"))
    ours = oracle.apply_allowed_token_ids
    compare(benchmark, side, f"apply_allowed_token_ids 32x{V}", ours, peer, logits_of(32), mask)


def test_bad_words_and_min_tokens(benchmark):
    """Lists in Python: no tensor peer. 50 words of 3 tokens, a past of 2000, for 32 rows."""
    logits, past = logits_of(32), [list(range(2000))] * 32
    words = [[[1997, 1998, i] for i in range(50)]] * 32
    counts = column(32, 0, np.int32), column(32, 9, np.int32)
    benchmark.group = f"apply_bad_words and apply_min_tokens 32x{V}"
    benchmark.pedantic(
        lambda: oracle.apply_min_tokens(oracle.apply_bad_words(logits, words, past), [[0, 5]] * 32, *counts), rounds=9
    )
