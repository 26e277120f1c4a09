"""Activations at the widths of Qwen3.5 (intermediate 17408) and the soft cap over a vocabulary of 151936."""

from __future__ import annotations

import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 128]
WIDTH = 17408


def halves(x):
    half = x.shape[-1] // 2
    return x[..., :half].double(), x[..., half:].double()


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("rounding", ["vt", "vllm"])
@pytest.mark.parametrize("side", SIDES)
def test_silu_and_mul(benchmark, side, rounding, T):
    def peer(x):
        import torch

        g, u = halves(x)
        act = torch.nn.functional.silu(g)
        return ((act if rounding == "vt" else act.to(x.dtype).double()) * u).to(x.dtype)

    def ours(x):
        return oracle.silu_and_mul(x, rounding=rounding)

    compare(benchmark, side, f"silu_and_mul {rounding} {T}x{WIDTH} bf16", ours, peer, normal(T, 2 * WIDTH))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_gelu_and_mul(benchmark, side, T):
    def peer(x):
        import torch

        g, u = halves(x)
        return (torch.nn.functional.gelu(g, approximate="tanh") * u).to(x.dtype)

    compare(benchmark, side, f"gelu_and_mul {T}x{WIDTH} bf16", oracle.gelu_and_mul, peer, normal(T, 2 * WIDTH))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_silu_and_mul_clamp(benchmark, side, T):
    def peer(x):
        g, u = halves(x)
        g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
        return (g * (1.702 * g).sigmoid() * (u + 1)).to(x.dtype)

    def ours(x):
        return oracle.silu_and_mul_clamp(x, limit=7.0, alpha=1.702, beta=1.0)

    compare(benchmark, side, f"silu_and_mul_clamp {T}x{WIDTH} bf16", ours, peer, normal(T, 2 * WIDTH))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_moe_silu_mul(benchmark, side, T):
    def peer(gate, up):
        import torch

        return (torch.nn.functional.silu(gate.double()) * up.double()).to(gate.dtype)

    arrays = normal(T, 8, 768), normal(T, 8, 768, seed=1)
    compare(benchmark, side, f"moe_silu_mul {T}x8x768 bf16", oracle.moe_silu_mul, peer, *arrays)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_relu(benchmark, side, T):
    compare(
        benchmark, side, f"relu {T}x3072 bf16", oracle.relu, lambda x: x.double().relu().to(x.dtype), normal(T, 3072)
    )


@pytest.mark.parametrize("T", [1, 16])
@pytest.mark.parametrize("side", SIDES)
def test_soft_cap(benchmark, side, T):
    def ours(x):
        return oracle.soft_cap(x, 30.0)

    def peer(x):
        return ((x.double() / 30).tanh() * 30).to(x.dtype)

    compare(benchmark, side, f"soft_cap {T}x151936 bf16", ours, peer, normal(T, 151936))
