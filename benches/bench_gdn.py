"""The gated delta rule at the shapes of Qwen3.5-27B: 16 key heads, 48 value heads, both of 128."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

F32, SCALE = np.float32, 128**-0.5


def vectors(rows: int):
    """q, k, v, g, beta of `rows` tokens."""
    q, k = (normal(rows, 16, 128, seed=i) / 11 for i in (1, 2))
    g, beta = -np.abs(normal(rows, 48, dtype=F32, seed=4)), 1 / (1 + np.exp(-normal(rows, 48, dtype=F32, seed=5)))
    return q, k, normal(rows, 48, 128, seed=3), g, beta


def step(S, q, k, v, decay, beta):
    """One token of the rule in torch: S [..., Dv, Dk]."""
    S = S * decay
    change = (v - (S @ k[..., None])[..., 0]) * beta[..., None]
    S = S + change[..., None] * k[..., None, :]
    return S, (S @ q[..., None])[..., 0]


def wide(q, k, v, g, beta):
    q, k = (part.double().repeat_interleave(3, 1) for part in (q, k))
    return q * SCALE, k, v.double(), g.double().exp()[..., None, None], beta.double()


@pytest.mark.parametrize("B", [1, 8])
@pytest.mark.parametrize("side", SIDES)
def test_gdn_packed_decode(benchmark, side, B):
    def ours(mixed, a, b, A_log, dt_bias, state):
        return oracle.gdn_packed_decode(mixed, a, b, A_log, dt_bias, state, slots, scale=SCALE)

    def peer(mixed, a, b, A_log, dt_bias, state):
        import torch

        q, k, v = mixed.double().split((2048, 2048, 6144), -1)
        q, k = (x.view(B, 16, 128) for x in (q, k))
        q, k = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(3, 1) for x in (q, k))
        g = -A_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double())
        beta = b.double().sigmoid().bfloat16().double()
        S, out = step(state.double(), q * SCALE, k, v.view(B, 48, 128), g.exp()[..., None, None], beta)
        state.copy_(S)
        return out.bfloat16()

    slots = np.arange(B, dtype=np.int32)
    arrays = (normal(B, 10240), normal(B, 48), normal(B, 48, seed=1), normal(48, dtype=F32),
              normal(48, dtype=F32, seed=2), normal(B, 48, 128, 128, dtype=F32, seed=3))  # fmt: skip
    compare(benchmark, side, f"gdn_packed_decode {B}", ours, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_gdn_decode(benchmark, side):
    def ours(*arrays):
        return oracle.gdn_decode(*arrays, scale=SCALE)

    def peer(q, k, v, g, beta, state):
        S, out = step(state.double(), *wide(q, k, v, g, beta))
        state.copy_(S)
        return out.bfloat16()

    arrays = *vectors(4), normal(4, 48, 128, 128, dtype=F32, seed=6)
    compare(benchmark, side, "gdn_decode 4", ours, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_gdn_prefill(benchmark, side):
    def ours(*arrays):
        return oracle.gdn_prefill(*arrays, cu, scale=SCALE)

    def peer(q, k, v, g, beta, state):
        import torch

        S, outs, parts = state[0].double(), [], wide(q, k, v, g, beta)
        for token in zip(*parts):
            S, out = step(S, *token)
            outs.append(out)
        state[0].copy_(S)
        return torch.stack(outs).bfloat16()

    cu = np.int32([0, 16])
    arrays = *vectors(16), normal(1, 48, 128, 128, dtype=F32, seed=6)
    compare(benchmark, side, "gdn_prefill 16", ours, peer, *arrays)


def chunked(q, k, v, g, beta, state):
    """The six stages of 64 tokens each in torch, float64 but for the roundings to bfloat16."""
    import torch

    q, k, v, _, beta = (part.movedim(0, -2 if part.ndim == 3 else -1) for part in wide(q, k, v, g, beta))
    gc = g.double().T.unflatten(-1, (-1, 64)).cumsum(-1)
    q, k, v = (part.unflatten(-2, (-1, 64)) for part in (q, k, v))
    beta = beta.unflatten(-1, (-1, 64))[..., None]
    fade = (gc[..., :, None] - gc[..., None, :]).tril().exp().tril()
    A = ((k * beta) @ k.mT * fade).tril(-1).float().double()
    eye = torch.eye(64, dtype=torch.float64)
    Ai = torch.linalg.solve_triangular(eye + A, eye.expand_as(A), upper=False, unitriangular=True).bfloat16().double()
    u = (Ai @ (v * beta).bfloat16().double()).bfloat16().double()
    w = (Ai @ (k * beta * gc[..., None].exp()).bfloat16().double()).bfloat16().double()
    S, outs = state[0].double(), []
    for c in range(q.shape[1]):
        h = S.bfloat16().double()
        new = u[:, c] - w[:, c] @ h.mT
        last = gc[:, c, -1:, None]
        put = (new * (last - gc[:, c, :, None]).exp()).bfloat16().double()
        P = (q[:, c] @ k[:, c].mT * fade[:, c]).bfloat16().double()
        outs.append(q[:, c] @ h.mT * gc[:, c, :, None].exp() + P @ new.bfloat16().double())
        S = S * last.exp() + put.mT @ k[:, c]
    state[0].copy_(S)
    return torch.cat(outs, 1).movedim(0, 1).bfloat16()


@pytest.mark.parametrize("side", SIDES)
def test_gdn_chunk_prefill(benchmark, side):
    def ours(*arrays):
        return oracle.gdn_chunk_prefill(*arrays, cu, scale=SCALE)

    cu = np.int32([0, 128])
    arrays = *vectors(128), normal(1, 48, 128, 128, dtype=F32, seed=6)
    compare(benchmark, side, "gdn_chunk_prefill 128", ours, chunked, *arrays)


def stages():
    """Each stage of 128 tokens, on the results of the one before."""
    q, k, v, g, beta = vectors(128)
    cu, state = np.int32([0, 128]), normal(1, 48, 128, 128, dtype=F32, seed=6)
    gc = oracle.gdn_chunk_cumsum(g, cu)
    A = oracle.gdn_kkt(k, beta, gc, cu)
    Ai = oracle.gdn_solve_tril(A, cu, out_dtype="bfloat16")
    w, u = oracle.gdn_recompute_w_u(k, v, beta, gc, Ai, cu)
    h, new = oracle.gdn_delta_h(k, w, u, gc, state.copy(), cu)
    return {
        "gdn_chunk_cumsum": lambda: oracle.gdn_chunk_cumsum(g, cu),
        "gdn_kkt": lambda: oracle.gdn_kkt(k, beta, gc, cu),
        "gdn_solve_tril": lambda: oracle.gdn_solve_tril(A, cu, out_dtype="bfloat16"),
        "gdn_recompute_w_u": lambda: oracle.gdn_recompute_w_u(k, v, beta, gc, Ai, cu),
        "gdn_delta_h": lambda: oracle.gdn_delta_h(k, w, u, gc, state, cu),
        "gdn_chunk_o": lambda: oracle.gdn_chunk_o(q, k, new, h, gc, cu, scale=SCALE),
        "gdn_chunk_layout": lambda: oracle.gdn_chunk_layout(cu, num_chunks=2),
    }


STAGES = [
    "gdn_chunk_cumsum",
    "gdn_kkt",
    "gdn_solve_tril",
    "gdn_recompute_w_u",
    "gdn_delta_h",
    "gdn_chunk_o",
    "gdn_chunk_layout",
]


@pytest.mark.parametrize("stage", STAGES)
def test_gdn_stages(benchmark, stage):
    benchmark.group = f"{stage} 128"
    benchmark.pedantic(stages()[stage], rounds=5)
