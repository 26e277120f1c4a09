"""The NVFP4 quantiser at the hidden width 5120, and back."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 32, 1024]
GLOBAL = np.float32([448 * 6 / 5])


def quantised(x, scale_of_all):
    """Codes of float64 values, and their scales."""
    import torch

    value = x.double().view(x.shape[0], -1, 16)
    scale = (scale_of_all * value.abs().amax(-1, keepdim=True) / 6).clamp(max=448).float().to(torch.float8_e4m3fn)
    value = (value * (scale_of_all / scale.double())).view(x.shape)
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    codes = torch.bucketize(value.abs(), steps, out_int32=True) | (value < 0).int() << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scale


def values(packed, scale, scale_of_all):
    """float64 values of codes in rows, as bfloat16."""
    import torch

    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(packed.shape[0], -1, 16)
    factor = scale.view(torch.float8_e4m3fn).double() * scale_of_all.double()
    return (grid[codes.int()] * factor[..., None]).view(packed.shape[0], -1).bfloat16()


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_quantise(benchmark, side, T):
    compare(benchmark, side, f"scaled_fp4_quant {T}x5120 bf16", oracle.scaled_fp4_quant, quantised, normal(T, 5120),
            GLOBAL)  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_dequantise(benchmark, side, T):
    packed, scale = oracle.scaled_fp4_quant(normal(T, 5120), GLOBAL, is_sf_swizzled_layout=False)

    def ours(*arrays):
        return oracle.dequantize_nvfp4(*arrays, is_sf_swizzled_layout=False)

    compare(benchmark, side, f"dequantize_nvfp4 {T}x5120", ours, values, packed, scale, 1 / GLOBAL)
