"""Kimi delta attention at the shapes of Kimi-Linear: 32 heads of 128."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .bench_gdn import step
from .peer import SIDES, compare, normal

F32, SCALE, H, D = np.float32, 128**-0.5, 32, 128


def vectors(rows: int):
    """q, k, v, g, beta of `rows` tokens."""
    q, k, v = (normal(rows, H, D, seed=i) for i in (1, 2, 3))
    g, beta = -np.abs(normal(rows, H, D, dtype=F32, seed=4)), 1 / (1 + np.exp(-normal(rows, H, dtype=F32, seed=5)))
    return q, k, v, g, beta


def wide(q, k, v, g, beta):
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q.double(), k.double()))
    return q * SCALE, k, v.double(), g.double().exp()[..., None, :], beta.double()


@pytest.mark.parametrize("side", SIDES)
def test_kda_decode(benchmark, side):
    def ours(*arrays):
        return oracle.kda_decode(*arrays, scale=SCALE)

    def peer(q, k, v, g, beta, state):
        S, out = step(state.double(), *wide(q, k, v, g, beta))
        state.copy_(S)
        return out.bfloat16()

    arrays = *vectors(4), normal(4, H, D, D, dtype=F32, seed=6)
    compare(benchmark, side, "kda_decode 4", ours, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_kda_prefill_recurrent(benchmark, side):
    def ours(*arrays):
        return oracle.kda_prefill_recurrent(*arrays, cu, scale=SCALE)

    def peer(q, k, v, g, beta, state):
        import torch

        S, outs = state[0].double(), []
        for token in zip(*wide(q, k, v, g, beta)):
            S, out = step(S, *token)
            outs.append(out)
        state[0].copy_(S)
        return torch.stack(outs).bfloat16()

    cu = np.int32([0, 16])
    arrays = *vectors(16), normal(1, H, D, D, dtype=F32, seed=6)
    compare(benchmark, side, "kda_prefill_recurrent 16", ours, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_kda_decay_gate(benchmark, side):
    def peer(g1, A_log, dt_bias):
        import torch

        y = g1.double() + dt_bias.double().view(H, D)
        return (-A_log.double().exp()[:, None] * torch.nn.functional.softplus(y)).float()

    arrays = normal(64, H, D), normal(H, dtype=F32, seed=1), normal(H * D, dtype=F32, seed=2)
    compare(benchmark, side, "kda_decay_gate 64", oracle.kda_decay_gate, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_kda_low_rank_decay(benchmark, side):
    def peer(x, f_a, f_b):
        return (x.double() @ f_a.double().T @ f_b.double().T).float()

    arrays = normal(16, 2304), normal(D, 2304, seed=1), normal(H * D, D, seed=2)
    compare(benchmark, side, "kda_low_rank_decay 16", oracle.kda_low_rank_decay, peer, *arrays)


def stages():
    """The whole, and each stage of 128 tokens on the results of the one before."""
    q, k, v, _, beta = vectors(128)
    q, k = oracle.l2norm(q), oracle.l2norm(k)
    cu, state = np.int32([0, 128]), normal(1, H, D, D, dtype=F32, seed=6)
    g1, A_log, bias = normal(128, H, D, seed=7), np.full(H, -3, F32), normal(H * D, dtype=F32, seed=9)
    gc = oracle.kda_decay_gate_chunk_cumsum(g1, A_log, bias, cu)
    Akk, Aqk = oracle.kda_kkt(q, k, gc, beta, cu, scale=SCALE)
    Ai = oracle.gdn_solve_tril(Akk, cu, out_dtype="bfloat16")
    w, u, kg = oracle.kda_recompute_w_u(k, v, beta, gc, Ai, cu)
    h, new = oracle.kda_delta_h(kg, w, u, gc, state.copy(), cu)
    return {
        "kda_decay_gate_chunk_cumsum": lambda: oracle.kda_decay_gate_chunk_cumsum(g1, A_log, bias, cu),
        "kda_kkt": lambda: oracle.kda_kkt(q, k, gc, beta, cu, scale=SCALE),
        "kda_recompute_w_u": lambda: oracle.kda_recompute_w_u(k, v, beta, gc, Ai, cu),
        "kda_delta_h": lambda: oracle.kda_delta_h(kg, w, u, gc, state, cu),
        "kda_chunk_o": lambda: oracle.kda_chunk_o(q, new, h, gc, Aqk, cu, scale=SCALE),
        "kda_chunk_prefill": lambda: oracle.kda_chunk_prefill(q, k, v, g1, beta, A_log, bias, state, cu, scale=SCALE),
    }


STAGES = [
    "kda_decay_gate_chunk_cumsum",
    "kda_kkt",
    "kda_recompute_w_u",
    "kda_delta_h",
    "kda_chunk_o",
    "kda_chunk_prefill",
]


@pytest.mark.parametrize("stage", STAGES)
def test_kda_stages(benchmark, stage):
    benchmark.group = f"{stage} 128"
    benchmark.pedantic(stages()[stage], rounds=5)
