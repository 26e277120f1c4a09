"""INT8 quantisers at the hidden width 5120; 8-bit products with one scale, a scale a row, and scales a block."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 32, 1024]
ROWS = [1, 16]
WIDTH = 5120
SCALE = np.float32([0.0321])


@functools.cache
def weights():
    """Codes of a 5120 x 5120 weight, as numbers too, and its block scales."""
    rng = np.random.Generator(np.random.PCG64(1))
    codes = rng.integers(0, 0x7F, (WIDTH, WIDTH), np.uint8)
    return codes, codes.view(np.int8), rng.uniform(0.01, 0.05, (WIDTH // 128, WIDTH // 128)).astype(np.float32)


def values(codes):
    """float64 values of codes of e4m3."""
    import torch

    return codes.view(torch.float8_e4m3fn).double()


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_int8_static(benchmark, side, T):
    def peer(x, scale):
        return (x.double() / scale.double()).round().clamp(-128, 127).char()

    compare(benchmark, side, f"static_scaled_int8_quant {T}x{WIDTH} bf16", oracle.static_scaled_int8_quant, peer,
            normal(T, WIDTH), SCALE)  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_int8_per_token(benchmark, side, T):
    def peer(x):
        v = x.double()
        scale = v.abs().amax(-1, keepdim=True) / 127
        return (v / scale).round().clamp(-128, 127).char(), scale.float()

    compare(benchmark, side, f"dynamic_scaled_int8_quant {T}x{WIDTH} bf16", oracle.dynamic_scaled_int8_quant, peer,
            normal(T, WIDTH))  # fmt: skip


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_product(benchmark, side, M):
    a, b = oracle.quant_fp8_static(normal(M, WIDTH), SCALE), weights()[0]

    def peer(a, b, alpha):
        return (alpha * (values(a) @ values(b).T)).bfloat16()

    compare(benchmark, side, f"matmul_fp8_cublaslt {M}x{WIDTH}x{WIDTH}", oracle.matmul_fp8_cublaslt, peer, a, b, SCALE)


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_int8_product(benchmark, side, M):
    (a, sa), b = oracle.dynamic_scaled_int8_quant(normal(M, WIDTH)), weights()[1]

    def ours(a, b, sa, sb):
        return oracle.cutlass_scaled_mm(a, b.T, sa, sb)

    def peer(a, b, sa, sb):
        return (sa * (sb * (a.double() @ b.double().T))).bfloat16()

    compare(benchmark, side, f"cutlass_scaled_mm int8 {M}x{WIDTH}x{WIDTH}", ours, peer, a, b, sa, SCALE)


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("side", SIDES)
def test_block_product(benchmark, side, M):
    (a, sa), (b, _, sb) = oracle.per_token_group_quant_fp8(normal(M, WIDTH)), weights()

    def peer(a, b, sa, sb):
        left = values(a) * sa.repeat_interleave(128, 1)
        return (left @ (values(b) * sb.repeat_interleave(128, 0).repeat_interleave(128, 1)).T).bfloat16()

    compare(benchmark, side, f"scaled_mm_block {M}x{WIDTH}x{WIDTH}", oracle.scaled_mm_block, peer, a, b, sa, sb)


@pytest.mark.parametrize("side", SIDES)
def test_stretches_of_k(benchmark, side):
    """Gradients of four experts' weights, 128 tokens each."""
    rng = np.random.Generator(np.random.PCG64(3))
    a, b = (rng.integers(0, 0x7F, (512, 1024), np.uint8) for _ in range(2))
    sa, sb = (rng.uniform(0.01, 0.05, (4, 1024)).astype(np.float32) for _ in range(2))

    def peer(a, sa, b, sb, ks):
        left, right = (
            (values(x) * s.double().repeat_interleave(128, 0)).view(4, 128, -1) for x, s in ((a, sa), (b, sb))
        )
        return (left.transpose(1, 2) @ right).float()

    compare(benchmark, side, "k_grouped_fp8_gemm_tn 4x128 1024x1024", oracle.k_grouped_fp8_gemm_tn, peer, a, sa, b, sb,
            np.full(4, 128, np.int32))  # fmt: skip


@pytest.mark.parametrize("side", SIDES)
def test_heads(benchmark, side):
    """An output projection by groups of heads: 16 tokens, 4 groups of 1024 x 1024."""
    rng = np.random.Generator(np.random.PCG64(4))
    a, b = rng.integers(0, 0x7F, (16, 4, 1024), np.uint8), rng.integers(0, 0x7F, (4, 1024, 1024), np.uint8)
    sa, sb = (rng.uniform(0.01, 0.05, shape).astype(np.float32) for shape in ((16, 4, 8), (4, 8, 8)))

    def peer(a, sa, b, sb):
        import torch

        weights = values(b) * sb.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        return torch.einsum("bhr,hdr->bhd", values(a) * sa.double().repeat_interleave(128, 2), weights).bfloat16()

    compare(benchmark, side, "fp8_einsum 16x4 1024x1024", oracle.fp8_einsum, peer, a, sa, b, sb)
