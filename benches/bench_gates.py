"""Gates at the shapes of Qwen3.5: 24 attention heads of 256, a hidden size of 5120, 48 value heads of 128."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 512]
F32 = np.float32


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_sigmoid_gate(benchmark, side, T):
    def peer(attn, gate):
        return (attn.double() * gate.double().sigmoid()).bfloat16()

    arrays = normal(T, 6144), normal(T, 6144, dtype=F32, seed=1)
    compare(benchmark, side, f"sigmoid_gate_bf16 {T}x6144", oracle.sigmoid_gate_bf16, peer, *arrays)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_shared_expert_gate(benchmark, side, T):
    def peer(sd, gl):
        return (gl.double().sigmoid() * sd.double()).bfloat16()

    arrays = normal(T, 5120, dtype=F32), normal(T, 1, dtype=F32, seed=1)
    compare(benchmark, side, f"shared_expert_gate {T}x5120", oracle.shared_expert_gate, peer, *arrays)


def gates_in_torch(a, b, A_log, dt_bias):
    import torch

    g = -A_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double())
    return g.float(), b.double().sigmoid().float()


GATES = [normal(48, dtype=F32, seed=1), normal(48, dtype=F32, seed=2)]


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_gdn_g_beta(benchmark, side, T):
    arrays = normal(T, 48), normal(T, 48, seed=3), *GATES
    compare(benchmark, side, f"gdn_g_beta {T}x48", oracle.gdn_g_beta, gates_in_torch, *arrays)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_gdn_post_conv(benchmark, side, T):
    def ours(conv, a, b, A_log, dt_bias):
        return oracle.gdn_post_conv(conv, a, b, A_log, dt_bias, num_k_heads=16, head_k_dim=128)

    def peer(conv, a, b, A_log, dt_bias):
        q, k, v = conv.split((2048, 2048, 6144), -1)
        parts = []
        for part in (q, k):
            wide = part.reshape(len(conv), 16, 128).double()
            parts.append((wide / ((wide * wide).sum(-1, keepdim=True) + 1e-6).sqrt()).to(conv.dtype))
        return *parts, v.reshape(len(conv), 48, 128).clone(), *gates_in_torch(a, b, A_log, dt_bias)

    arrays = normal(T, 10240), normal(T, 48, seed=3), normal(T, 48, seed=4), *GATES
    compare(benchmark, side, f"gdn_post_conv {T}x10240", ours, peer, *arrays)
