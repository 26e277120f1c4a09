"""Matrix products at the shapes of Qwen3-4B and Gemma-3-270m: one token, a few, a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

SHAPES = [(1, 262144, 640), (32, 2048, 640), (1, 4096, 4096), (16, 4096, 4096), (512, 2048, 2048)]


def linear(a, b):
    return (a.double() @ b.double().T).to(a.dtype)


@pytest.mark.parametrize("M, N, K", SHAPES)
@pytest.mark.parametrize("side", SIDES)
def test_matmul_bt(benchmark, side, M, N, K):
    arrays = normal(M, K, dtype=np.float32), normal(N, K, dtype=np.float32, seed=1)
    compare(benchmark, side, f"matmul_bt {M}x{N}x{K} f32", oracle.matmul_bt, linear, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_matmul(benchmark, side):
    arrays = normal(64, 2048), normal(2048, 2048, seed=1)
    peer = lambda a, b: (a.double() @ b.double()).to(a.dtype)
    compare(benchmark, side, "matmul 64x2048x2048 bf16", oracle.matmul, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_batched_matmul(benchmark, side):
    """The absorbed projection of latent attention: 16 heads, 128 to 512."""
    arrays = normal(16, 17, 128), normal(16, 128, 512, seed=1)
    peer = lambda a, b: (a.double() @ b.double()).to(a.dtype)
    compare(benchmark, side, "batched_matmul 16x17x512x128 bf16", oracle.batched_matmul, peer, *arrays)
