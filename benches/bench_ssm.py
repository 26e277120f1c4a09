"""Mamba: Qwen3.5's convolution (10240 channels), Mamba-1 of 4096 channels, Mamba-2's heads of 64, MiniMax's of 96."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

F32 = np.float32


@pytest.mark.parametrize("side", SIDES)
def test_causal_conv1d_fwd(benchmark, side):
    def ours(x, weight, state):
        return oracle.causal_conv1d_fwd(x, weight, state, cu, yes)

    def peer(x, weight, state):
        import torch

        line = torch.cat([state[0].double(), x.double().T], dim=1)
        out = torch.nn.functional.conv1d(line[None], weight.double()[:, None], groups=len(weight))
        state[0].copy_(line[:, -3:])
        return torch.nn.functional.silu(out[0].T).bfloat16()

    cu, yes = np.int32([0, 64]), np.ones(1, np.int32)
    arrays = normal(64, 10240), normal(10240, 4, seed=1), normal(1, 10240, 3, seed=2)
    compare(benchmark, side, "causal_conv1d_fwd 64", ours, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_causal_conv1d_update(benchmark, side):
    def peer(x, weight, state):
        import torch

        window = torch.cat([state.double(), x.double()[..., None]], dim=-1)
        state.copy_(window[..., 1:])
        return torch.nn.functional.silu((window * weight.double()).sum(-1)).bfloat16()

    arrays = normal(16, 10240), normal(10240, 4, seed=1), normal(16, 10240, 3, seed=2)
    compare(benchmark, side, "causal_conv1d_update 16", oracle.causal_conv1d_update, peer, *arrays)


def step(S, dt, A, B, C, x, D):
    """One token in torch: S [..., N]."""
    S = S * (dt[..., None] * A).exp() + B * (dt * x)[..., None]
    return S, (S * C).sum(-1) + D * x


@pytest.mark.parametrize("side", SIDES)
def test_selective_state_update(benchmark, side):
    def ours(state, x, dt, A, B, C, D):
        return oracle.selective_state_update(state, x, dt, A, B, C, D, dt_softplus=True)

    def peer(state, x, dt, A, B, C, D):
        import torch

        B, C = (part.double().repeat_interleave(16, 1)[:, :, None] for part in (B, C))
        dt = torch.nn.functional.softplus(dt.double())
        S, out = step(state.double(), dt, A.double(), B, C, x.double(), D.double())
        state.copy_(S)
        return out.bfloat16()

    arrays = (normal(2, 128, 64, 128, dtype=F32), normal(2, 128, 64, seed=1), normal(2, 128, 64, seed=2),
              -np.abs(normal(128, 64, 128, dtype=F32, seed=3)), normal(2, 8, 128, seed=4), normal(2, 8, 128, seed=5),
              normal(128, 64, dtype=F32, seed=6))  # fmt: skip
    compare(benchmark, side, "selective_state_update 2", ours, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_selective_scan(benchmark, side):
    def ours(u, delta, A, B, C, state, D):
        return oracle.selective_scan(u, delta, A, B, C, state, cu, D, delta_softplus=True)

    def peer(u, delta, A, B, C, state, D):
        import torch

        S, outs, dt = state[0].double(), [], torch.nn.functional.softplus(delta.double())
        for t in range(64):
            S, out = step(
                S, dt[:, t], A.double(), B[0, :, t].double(), C[0, :, t].double(), u[:, t].double(), D.double()
            )
            outs.append(out)
        state[0].copy_(S)
        return torch.stack(outs, 1).bfloat16()

    cu = np.int32([0, 64])
    arrays = (normal(4096, 64), normal(4096, 64, seed=1), -np.abs(normal(4096, 16, dtype=F32, seed=2)),
              normal(1, 16, 64, seed=3), normal(1, 16, 64, seed=4), normal(1, 4096, 16, dtype=F32, seed=5),
              normal(4096, dtype=F32, seed=6))  # fmt: skip
    compare(benchmark, side, "selective_scan 64", ours, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_linear_attention_decode(benchmark, side):
    def peer(q, k, v, state, slope):
        q, k, v = (part.double() for part in (q, k, v))
        S = state.double() * (-slope.double()).exp()[:, None, None] + k[..., :, None] * v[..., None, :]
        state.copy_(S)
        return (q[..., None, :] @ S).bfloat16()

    arrays = *(normal(4, 64, 96, seed=i) for i in range(3)), normal(4, 64, 96, 96, dtype=F32), np.full(64, 0.5, F32)
    compare(benchmark, side, "linear_attention_decode 4", oracle.linear_attention_decode, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_mamba2_rmsnorm_gated(benchmark, side):
    def peer(y, z, weight):
        import torch

        h = y.double() * torch.nn.functional.silu(z.double())
        return (
            (h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt()).bfloat16().double() * weight.double()
        ).bfloat16()

    arrays = normal(64, 8192), normal(64, 8192, seed=1), normal(8192, seed=2)
    compare(benchmark, side, "mamba2_rmsnorm_gated 64x8192", oracle.mamba2_rmsnorm_gated, peer, *arrays)


def others():
    """Ops without a peer: Mamba-2's stages of 256 tokens in one, states, the gated convolution, lightning attention."""
    x, dt = normal(256, 32, 64), (normal(256, 32, dtype=F32, seed=1) / 2 - 4).astype(normal(1).dtype)
    A, (B, C) = -np.abs(normal(32, dtype=F32, seed=2)), (normal(256, 2, 128, seed=i) for i in (3, 4))
    cuts, last, owner = np.int32([0, 256]), np.zeros(1, np.int32), np.zeros(1, np.int32)
    state = normal(1, 32, 64, 128, dtype=F32, seed=5)
    sums, dts = oracle.ssd_chunk_cumsum(dt, A, cuts, chunk_size=256, dt_softplus=True)
    local, CB = oracle.ssd_chunk_state(x, B, dts, sums, cuts), oracle.ssd_bmm_chunk(C, B, cuts, chunk_size=256)
    passed = oracle.ssd_state_passing(local, sums, last, state)
    cache, where, yes = normal(8, 48, 128, 128), np.int32([5, 0, 3]), np.ones(1, np.int32)
    working = oracle.gdn_state_gather(cache, where)
    drafts, filter_, held = normal(4, 3, 10240), normal(10240, 4), normal(4, 10240, 5)
    two = np.full(4, 2, np.int32)
    bcx, weight, taps = normal(64, 3 * 2048), normal(2048, 3), normal(1, 2048, 2)
    q, k, v, kv = *(normal(32, 16, 96, seed=i) for i in range(3)), normal(1, 16, 96, 96, dtype=F32)
    options = {"chunk_size": 256, "dt_softplus": True}
    return {
        "ssd_chunk_cumsum": lambda: oracle.ssd_chunk_cumsum(dt, A, cuts, **options),
        "ssd_chunk_state": lambda: oracle.ssd_chunk_state(x, B, dts, sums, cuts),
        "ssd_state_passing": lambda: oracle.ssd_state_passing(local, sums, last, state),
        "ssd_bmm_chunk": lambda: oracle.ssd_bmm_chunk(C, B, cuts, chunk_size=256),
        "ssd_chunk_scan": lambda: oracle.ssd_chunk_scan(CB, x, dts, sums, C, passed, cuts, owner, initial_states=state),
        "ssd_chunk_prefill": lambda: oracle.ssd_chunk_prefill(x, dt, A, B, C, cuts, **options),
        "ssd_recurrent": lambda: oracle.ssd_recurrent(
            x[:16], dt[:16], A, B[:16], C[:16], state, np.int32([0, 16]), dt_softplus=True
        ),
        "gdn_state_gather": lambda: oracle.gdn_state_gather(cache, where),
        "gdn_state_scatter": lambda: oracle.gdn_state_scatter(cache, working, where),
        "causal_conv1d_update_spec": lambda: oracle.causal_conv1d_update_spec(drafts, filter_, held, two),
        "short_conv": lambda: oracle.short_conv(bcx, weight, taps, np.int32([0, 64]), yes),
        "linear_attention_prefill": lambda: oracle.linear_attention_prefill(
            q, k, v, kv, np.full(16, 0.5, F32), np.int32([0, 32])
        ),
    }


OTHERS = [
    "ssd_chunk_cumsum",
    "ssd_chunk_state",
    "ssd_state_passing",
    "ssd_bmm_chunk",
    "ssd_chunk_scan",
    "ssd_chunk_prefill",
    "ssd_recurrent",
    "gdn_state_gather",
    "gdn_state_scatter",
    "causal_conv1d_update_spec",
    "short_conv",
    "linear_attention_prefill",
]


@pytest.mark.parametrize("name", OTHERS)
def test_others(benchmark, name):
    benchmark.group = name
    benchmark.pedantic(others()[name], rounds=5)
