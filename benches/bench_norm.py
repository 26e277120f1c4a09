"""Norms at the widths of Qwen3.5 (hidden 5120; 48 value heads of 128), one token and a batch of prompt tokens."""

from __future__ import annotations

import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 32, 1024]


def inverse_rms(x, eps=1e-6):
    return ((x * x).mean(-1, keepdim=True) + eps).sqrt().reciprocal()


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rms_norm(benchmark, side, T):
    def peer(x, w):
        v = x.double()
        return (v * inverse_rms(v) * w.double()).to(x.dtype)

    compare(benchmark, side, f"rms_norm {T}x5120 bf16", oracle.rms_norm, peer, normal(T, 5120), normal(5120, seed=1))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rms_norm_with_residual(benchmark, side, T):
    def peer(x, w, r):
        r = (x.double() + r.double()).to(r.dtype)
        v = r.double()
        return (v * inverse_rms(v) * (w.double() + 1)).to(x.dtype), r

    def ours(x, w, r):
        return oracle.rms_norm(x, w, residual=r, gemma=True)

    arrays = normal(T, 5120), normal(5120, seed=1), normal(T, 5120, seed=2)
    compare(benchmark, side, f"rms_norm gemma + residual {T}x5120 bf16", ours, peer, *arrays)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rms_norm_gated(benchmark, side, T):
    def peer(x, z, w):
        import torch

        v = x.double()
        return (v * inverse_rms(v) * w.double() * torch.nn.functional.silu(z.double())).to(x.dtype)

    arrays = normal(T, 48, 128), normal(T, 48, 128, seed=1), normal(128, seed=2)
    compare(benchmark, side, f"rms_norm_gated {T}x48x128 bf16", oracle.rms_norm_gated, peer, *arrays)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_l2norm(benchmark, side, T):
    def peer(x):
        v = x.double()
        return (v / ((v * v).sum(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype)

    compare(benchmark, side, f"l2norm {T}x16x128 bf16", oracle.l2norm, peer, normal(T, 16, 128))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_layer_norm(benchmark, side, T):
    def peer(x, w, b):
        import torch

        return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], w.double(), b.double()).to(x.dtype)

    arrays = normal(T, 1280), normal(1280, seed=1), normal(1280, seed=2)
    compare(benchmark, side, f"layer_norm {T}x1280 bf16", oracle.layer_norm, peer, *arrays)
