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


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_silu_and_quantise(benchmark, side, T):
    def peer(x, scale_of_all):
        import torch

        gate, up = x.double().chunk(2, dim=-1)
        return quantised((torch.nn.functional.silu(gate) * up).bfloat16(), scale_of_all)

    compare(benchmark, side, f"silu_and_mul_fp4_quant {T}x5120", oracle.silu_and_mul_fp4_quant, peer,
            normal(T, 10240), GLOBAL)  # fmt: skip


@pytest.mark.parametrize("M", [1, 16])
@pytest.mark.parametrize("side", SIDES)
def test_product(benchmark, side, M):
    """Both operands in NVFP4, of a 5120 x 5120 weight."""
    (a, sa), (b, sb) = (
        oracle.scaled_fp4_quant(normal(rows, 5120, seed=rows), GLOBAL, is_sf_swizzled_layout=False)
        for rows in (M, 5120)
    )

    def ours(*arrays):
        return oracle.cutlass_scaled_fp4_mm(*arrays, is_sf_swizzled_layout=False)

    def peer(a, b, scale_a, scale_b, alpha):
        import torch

        one = torch.ones(1)
        left, right = (values(codes, scale, one) for codes, scale in ((a, scale_a), (b, scale_b)))
        return (left.double() @ right.double().T * alpha).bfloat16()

    compare(benchmark, side, f"cutlass_scaled_fp4_mm {M}x5120x5120", ours, peer, a, b, sa, sb, GLOBAL**-2)
