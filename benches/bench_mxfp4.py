"""MXFP4 at the hidden width 5120: the quantiser, and rotated by 32 x 32 matrices before it."""

from __future__ import annotations

import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 32, 1024]


def codes_of(grouped, scale, shape):
    """Codes of float64 values over powers of two."""
    import torch

    value = (grouped / scale).view(shape)
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    codes = torch.bucketize(value.abs(), steps, out_int32=True) | (value < 0).int() << 3
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), scale


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_quantise(benchmark, side, T):
    def peer(x):
        import torch

        grouped = x.double().view(x.shape[0], -1, 32)
        exponent = torch.floor(torch.log2(grouped.abs().amax(-1, keepdim=True) * (8 / 7))) - 2
        return codes_of(grouped, torch.exp2(exponent), x.shape)

    compare(benchmark, side, f"mxfp4_quant {T}x5120 bf16", oracle.mxfp4_quant, peer, normal(T, 5120))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rotate_and_quantise(benchmark, side, T):
    def peer(x, h):
        import torch

        grouped = x.double().view(x.shape[0], -1, 32) @ h.double()
        statistic = grouped.std(-1, correction=0, keepdim=True) * (2.92247856 / 6) + 1e-8
        return codes_of(grouped, torch.exp2(torch.floor(torch.log2(statistic))), x.shape)

    compare(benchmark, side, f"fused_quantize_mx {T}x5120", oracle.fused_quantize_mx, peer, normal(T, 5120),
            oracle.hadamard(n=32))  # fmt: skip


@pytest.mark.parametrize("M", [1, 16])
@pytest.mark.parametrize("side", SIDES)
def test_weights_alone(benchmark, side, M):
    """A 5120 x 5120 weight."""
    codes, scale = oracle.mxfp4_quant(normal(5120, 5120, seed=1))

    def ours(x, b, b_sf):
        return oracle.matmul_mxfp4(x, b, b_sf, is_sf_swizzled_layout=False)

    def peer(x, b, b_sf):
        import torch

        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
        weights = grid[torch.stack([b & 15, b >> 4], dim=-1).view(b.shape[0], -1, 32).int()]
        return (x.double() @ (weights * torch.exp2(b_sf.double() - 127)[..., None]).view(b.shape[0], -1).T).bfloat16()

    compare(benchmark, side, f"matmul_mxfp4 {M}x5120x5120", ours, peer, normal(M, 5120), codes, scale)


@pytest.mark.parametrize("side", SIDES)
def test_transform(benchmark, side):
    def peer(x, h):
        return (x.double() @ h.double()).bfloat16()

    def ours(x, h):
        return oracle.hadacore_transform(x)

    compare(benchmark, side, "hadacore_transform 1024x1024", ours, peer, normal(1024, 1024), oracle.hadamard(n=1024))
