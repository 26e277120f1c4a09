"""From logits to a token: a batch of 32 over Qwen3's vocabulary of 151,936, and one request's whole chain."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

V = 151_936
ROWS = [1, 32]


def logits_of(R, size=V):
    return normal(R, size, dtype=np.float32) * np.float32(3)


def seeds_of(R):
    return np.random.Generator(np.random.PCG64(1)).integers(-(2**63), 2**63 - 1, R)


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_greedy_argmax(benchmark, side, R):
    peer = lambda x: x.double().argmax(-1)
    compare(benchmark, side, f"greedy_argmax {R}x{V}", oracle.greedy_argmax, peer, logits_of(R))


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_probs(benchmark, side, R):
    peer = lambda x: x.double().softmax(-1).float()
    compare(benchmark, side, f"compute_probs {R}x{V}", oracle.compute_probs, peer, logits_of(R))


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_logprobs(benchmark, side, R):
    peer = lambda x: x.double().log_softmax(-1).float()
    compare(benchmark, side, f"compute_logprobs {R}x{V}", oracle.compute_logprobs, peer, logits_of(R))


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_gather_logprobs(benchmark, side, R):
    def peer(x, ids):
        top, own = x.double().topk(20), x.double().gather(1, ids[:, None])
        return ids, top.indices, top.values, own, (x.double() >= own).sum(-1)

    ids = np.random.Generator(np.random.PCG64(2)).integers(0, V, R)
    ours = lambda x, ids: oracle.gather_logprobs(x, 20, ids)
    compare(benchmark, side, f"gather_logprobs n=20 {R}x{V}", ours, peer, logits_of(R), ids)


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_random_sample(benchmark, side, R):
    """The peer draws from torch's own generator."""

    def peer(probs, seeds):
        wide = probs.double()
        return (wide / wide.new_empty(wide.shape).exponential_()).argmax(-1)

    arrays = oracle.compute_probs(logits_of(R)), seeds_of(R)
    compare(benchmark, side, f"random_sample {R}x{V}", oracle.random_sample, peer, *arrays)


@pytest.mark.parametrize("R", ROWS)
@pytest.mark.parametrize("fp64", [False, True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("side", SIDES)
def test_gumbel_sample(benchmark, side, fp64, R):
    """The peer draws from torch's own generator, where ours runs ten rounds of Philox for each column."""

    def peer(x, requests, t, seeds, pos):
        import torch

        u = torch.rand(x.shape, dtype=torch.float64)
        return (x.double() / t.double()[:, None] - torch.log(-torch.log1p(-u))).argmax(-1)

    ours = lambda *arrays: oracle.gumbel_sample(*arrays, fp64=fp64)
    arrays = logits_of(R), np.arange(R, dtype=np.int32), np.full(R, 0.7, np.float32), seeds_of(R), np.arange(R)
    compare(benchmark, side, f"gumbel_sample {'fp64' if fp64 else 'fp32'} {R}x{V}", ours, peer, *arrays)


def test_one_request_of_a_large_vocabulary(benchmark):
    """Temperature, min-p, top-k and top-p, probabilities, a draw: what an engine adds to each token of Gemma 3."""
    logits, size = logits_of(1, 262_144), 262_144
    one = lambda value, dtype=np.float32: np.array([value], dtype)

    def chain():
        x = oracle.apply_min_p(oracle.apply_temperature(logits, one(0.8), all_random=True), one(0.02))
        x = oracle.apply_top_k_top_p(x, one(64, np.int32), one(0.95))
        return oracle.random_sample(oracle.compute_probs(x), one(7, np.int64))

    benchmark.group = f"temperature to draw, 1x{size}"
    benchmark.pedantic(chain, rounds=15, warmup_rounds=1)
