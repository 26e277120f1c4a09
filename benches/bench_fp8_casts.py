"""DeepGEMM's casts at the width 7168: tokens in groups to FP8 and FP4, a weight in tiles."""

from __future__ import annotations

import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 32, 1024]


def powers(scale):
    import torch

    return torch.exp2(torch.ceil(torch.log2(scale)))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_tokens(benchmark, side, T):
    def peer(x):
        import torch

        value = x.double().view(T, -1, 128)
        scale = value.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
        return (value / scale).float().to(torch.float8_e4m3fn), scale.float()

    compare(benchmark, side, f"per_token_cast_to_fp8 {T}x7168", oracle.per_token_cast_to_fp8, peer, normal(T, 7168))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_fp4(benchmark, side, T):
    def ours(x):
        return oracle.per_token_cast_to_fp4(x, group_size=32, ue8m0="bits")

    def peer(x):
        import torch

        value = x.double().view(T, -1, 32)
        scale = powers(value.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 6)
        steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
        value = (value / scale).view(T, -1)
        codes = torch.bucketize(value.abs(), steps, out_int32=True) | (value < 0).int() << 3
        return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scale.float()

    compare(benchmark, side, f"per_token_cast_to_fp4 {T}x7168", ours, peer, normal(T, 7168))


@pytest.mark.parametrize("side", SIDES)
def test_tiles(benchmark, side):
    def ours(x):
        return oracle.per_block_cast_to_fp8(x, ue8m0="log2")

    def peer(x):
        import torch

        value = x.double().view(8, 128, 16, 128)
        scale = powers(value.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) / 448)
        return (value / scale).float().to(torch.float8_e4m3fn), scale.float()

    compare(benchmark, side, "per_block_cast_to_fp8 1024x2048", ours, peer, normal(1024, 2048))
