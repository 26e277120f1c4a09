"""Norms and SiLU-and-mul that quantise, at the widths of Qwen3.5 (hidden 5120, intermediate 17408)."""

from __future__ import annotations

import pytest

from vtlab import oracle

from .bench_norm import inverse_rms
from .bench_quant_fp8 import SCALE, coded
from .peer import SIDES, compare, normal

TOKENS = [1, 128]


def normed(x, w):
    """RMSNorm in float64, rounded to x's dtype."""
    v = x.double()
    return (v * inverse_rms(v) * w.double()).to(x.dtype).double()


def activated(x):
    """SiLU-and-mul in float64, rounded to x's dtype."""
    import torch

    half = x.shape[-1] // 2
    return (torch.nn.functional.silu(x[:, :half].double()) * x[:, half:].double()).to(x.dtype).double()


def scaled(y, group):
    """Codes of y under a scale for each `group` neighbours."""
    v = y.view(y.shape[0], -1, group)
    scale = (v.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return coded(v / scale).view(y.shape), scale.float()


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rms_norm_static(benchmark, side, T):
    def peer(x, w, scale):
        return coded(normed(x, w) / scale.double())

    arrays = normal(T, 5120), normal(5120, seed=1), SCALE
    compare(benchmark, side, f"rms_norm_quant_fp8 {T}x5120 bf16", oracle.rms_norm_quant_fp8, peer, *arrays)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rms_norm_gated_static(benchmark, side, T):
    def peer(x, z, w, scale):
        import torch

        y = (normed(x, w) * torch.nn.functional.silu(z.double())).to(x.dtype)
        return coded(y.double() / scale.double())

    arrays = normal(T, 48, 128), normal(T, 48, 128, seed=1), normal(128, seed=2), SCALE
    compare(
        benchmark, side, f"rms_norm_gated_quant_fp8 {T}x48x128 bf16", oracle.rms_norm_gated_quant_fp8, peer, *arrays
    )


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rms_norm_per_token(benchmark, side, T):
    compare(benchmark, side, f"rms_norm_dynamic_per_token_quant {T}x5120 bf16", oracle.rms_norm_dynamic_per_token_quant,
            lambda x, w: scaled(normed(x, w), 5120), normal(T, 5120), normal(5120, seed=1))  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rms_norm_per_block(benchmark, side, T):
    compare(benchmark, side, f"rms_norm_per_block_quant {T}x5120 bf16", oracle.rms_norm_per_block_quant,
            lambda x, w: scaled(normed(x, w), 128), normal(T, 5120), normal(5120, seed=1))  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_silu_static(benchmark, side, T):
    def peer(x, scale):
        return coded(activated(x) / scale.double())

    compare(benchmark, side, f"silu_and_mul_quant {T}x17408 bf16", oracle.silu_and_mul_quant, peer,
            normal(T, 2 * 17408), SCALE)  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_silu_per_block(benchmark, side, T):
    compare(benchmark, side, f"silu_and_mul_per_block_quant {T}x17408 bf16", oracle.silu_and_mul_per_block_quant,
            lambda x: scaled(activated(x), 128), normal(T, 2 * 17408))  # fmt: skip
