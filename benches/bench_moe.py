"""Experts at the shapes of Qwen3.5 35B-A3B: 256 of 2048 x 512, eight of them a token; products with 8 of them, also of
4 bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

F32 = np.float32


@pytest.mark.parametrize("T", [1, 512])
@pytest.mark.parametrize("side", SIDES)
def test_moe_router_topk(benchmark, side, T):
    def peer(logits):
        weights, ids = logits.double().softmax(-1).topk(8)
        return (weights / weights.sum(-1, keepdim=True)).float(), ids.int()

    route = lambda logits: oracle.moe_router_topk(logits, top_k=8)
    compare(benchmark, side, f"moe_router_topk {T}x256", route, peer, normal(T, 256))


@pytest.mark.parametrize("T", [1, 512])
@pytest.mark.parametrize("side", SIDES)
def test_moe_sum(benchmark, side, T):
    peer = lambda x: x.double().sum(1).bfloat16()
    compare(benchmark, side, f"moe_sum {T}x8x2048", oracle.moe_sum, peer, normal(T, 8, 2048))


@pytest.mark.parametrize("side", SIDES)
def test_moe_grouped_gemm(benchmark, side):
    def peer(x, weight, ids):
        import torch

        return torch.einsum("k,enk->en", x[0].double(), weight[ids[0].long()].double()).bfloat16()

    ids = np.arange(8, dtype=np.int32)[None]
    arrays = normal(1, 2048), normal(8, 1024, 2048, seed=1), ids
    compare(benchmark, side, "moe_grouped_gemm 1x8 of 1024x2048", oracle.moe_grouped_gemm, peer, *arrays)


def four_bits(q, s):
    """Weights [8, 1024, 2048] in float64 of bytes of two codes and a scale for 128 of them."""
    import torch

    codes = torch.stack((q & 15, q >> 4), -1).flatten(-2).double() - 8
    return codes * s.double().repeat_interleave(128, -1)


def packed(*shape: int):
    """Bytes of codes, and scales."""
    rng = np.random.Generator(np.random.PCG64(2))
    return rng.integers(0, 256, (8, 1024, 1024), np.uint8), rng.uniform(0.004, 0.02, shape).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("side", SIDES)
def test_moe_wna16_gemm(benchmark, side):
    def peer(x, q, s, ids):
        import torch

        return torch.einsum("k,enk->en", x[0].double(), four_bits(q, s)[ids[0].long()]).bfloat16()

    arrays = normal(1, 2048), *packed(8, 1024, 16), np.arange(8, dtype=np.int32)[None]
    compare(benchmark, side, "moe_wna16_gemm 1x8 of 1024x2048", oracle.moe_wna16_gemm, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_moe_wna16_marlin_gemm(benchmark, side):
    """The peer takes the bytes in plain order."""

    def ours(x, q, s, ids):
        words = q.view(np.int32).reshape(8, 128, 2048)
        return oracle.moe_wna16_marlin_gemm(x, words, s.reshape(8, 16, 1024), ids, quant_type="uint4b8")

    def peer(x, q, s, ids):
        import torch

        return torch.einsum("k,enk->en", x[0].double(), four_bits(q, s)[ids[0].long()]).bfloat16()

    arrays = normal(1, 2048), *packed(8, 1024, 16), np.arange(8, dtype=np.int32)[None]
    compare(benchmark, side, "moe_wna16_marlin_gemm 1x8 of 1024x2048", ours, peer, *arrays)
