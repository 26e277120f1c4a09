"""FP8 quantisers at the hidden width 5120 and, in groups of 128, at 7168."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 32, 1024]
SCALE = np.float32([0.0321])


def coded(v):
    """Codes of float64 values."""
    import torch

    return v.clamp(-448, 448).float().to(torch.float8_e4m3fn)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_static(benchmark, side, T):
    def peer(x, scale):
        return coded(x.double() * (1 / scale.double()))

    compare(benchmark, side, f"quant_fp8_static {T}x5120 bf16", oracle.quant_fp8_static, peer, normal(T, 5120), SCALE)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_per_tensor(benchmark, side, T):
    def peer(x):
        v = x.double()
        scale = v.abs().max() / 448
        return coded(v / scale), scale.float()

    compare(benchmark, side, f"dynamic_scaled_fp8_quant {T}x5120 bf16", oracle.dynamic_scaled_fp8_quant, peer,
            normal(T, 5120))  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_per_token(benchmark, side, T):
    def peer(x):
        v = x.double()
        scale = v.abs().amax(-1, keepdim=True) / 448
        return coded(v / scale), scale.float()

    compare(benchmark, side, f"dynamic_per_token_scaled_fp8_quant {T}x5120 bf16",
            oracle.dynamic_per_token_scaled_fp8_quant, peer, normal(T, 5120))  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_per_group(benchmark, side, T):
    def peer(x):
        v = x.double().view(x.shape[0], -1, 128)
        scale = v.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
        return coded(v / scale).view(x.shape), scale.float()

    compare(benchmark, side, f"per_token_group_quant_fp8 {T}x7168 bf16", oracle.per_token_group_quant_fp8, peer,
            normal(T, 7168))  # fmt: skip
