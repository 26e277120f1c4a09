"""Integer weights at a layer of 2048 x 2048: quantiser, packings, dequantised weights, products of 1 and 32 tokens."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

K = N = 2048
GROUP = 128
RNG = np.random.Generator(np.random.PCG64(0))


def words(*shape: int) -> np.ndarray:
    return RNG.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)


def scales(dtype) -> np.ndarray:
    return RNG.uniform(0.004, 0.02, (K // GROUP, N)).astype(dtype)


def nibbles(words, dim: int):
    """Codes of 4 bits along an axis of a torch tensor of words."""
    import torch

    parts = [words >> 4 * i & 15 for i in range(8)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


@pytest.mark.parametrize("side", SIDES)
def test_quantise(benchmark, side):
    def peer(w):
        grouped = w.double().view(-1, GROUP, N)
        scale = (grouped.amax(1, keepdim=True) / 7).abs().maximum((grouped.amin(1, keepdim=True) / -8).abs())
        q = (grouped / scale).round().clamp(-8, 7)
        return (q * scale).bfloat16(), q.int() + 8, scale.bfloat16()

    def ours(w):
        return oracle.quantize_weights(w, quant_type="uint4b8", group_size=GROUP)

    compare(benchmark, side, f"quantize_weights {K}x{N}", ours, peer, normal(K, N))


@pytest.mark.parametrize("side", SIDES)
def test_unpack(benchmark, side):
    compare(benchmark, side, f"gptq_unpack {K}x{N}", lambda w: oracle.gptq_unpack(w, bits=4),
            lambda w: nibbles(w, 0).contiguous(), words(K // 8, N))  # fmt: skip


@pytest.mark.parametrize("side", SIDES)
def test_repack(benchmark, side):
    from vtlab.ops.lowbit import marlin_order

    order = marlin_order(4)

    def peer(w):
        import torch

        tiles = nibbles(w, 0).view(K // 16, 16, N // 16, 16).transpose(1, 2).reshape(-1, 1024)
        eights = tiles[:, torch.from_numpy(order)].view(K // 16, -1, 8)
        return sum(eights[..., i] << 4 * i for i in range(8))

    compare(benchmark, side, f"gptq_marlin_repack {K}x{N}", lambda w: oracle.gptq_marlin_repack(w, bits=4), peer,
            words(K // 8, N))  # fmt: skip


@pytest.mark.parametrize("M", [1, 32])
@pytest.mark.parametrize("side", SIDES)
def test_gptq_product(benchmark, side, M):
    def peer(x, w, z, s):
        weights = nibbles(w, 0).view(-1, GROUP, N) - (nibbles(z, 1) + 1)[:, None]
        return (x.double() @ (weights.double() * s.double()[:, None]).view(K, N)).half()

    compare(benchmark, side, f"gptq_gemm {M}x{K}x{N}", oracle.gptq_gemm, peer, normal(M, K, dtype=np.float16),
            words(K // 8, N), words(K // GROUP, N // 8), scales(np.float16))  # fmt: skip


@pytest.mark.parametrize("M", [1, 32])
@pytest.mark.parametrize("side", SIDES)
def test_marlin_product(benchmark, side, M):
    """The peer has its weights in plain order."""

    def ours(x, w, s):
        return oracle.marlin_gemm(x, w.reshape(K // 16, N * 2), s, quant_type="uint4b8")

    def peer(x, w, s):
        weights = nibbles(w, 0).view(-1, GROUP, N) - 8
        return (x.double() @ (weights.double() * s.double()[:, None]).view(K, N)).bfloat16()

    compare(benchmark, side, f"marlin_gemm {M}x{K}x{N}", ours, peer, normal(M, K), words(K // 8, N),
            scales(ml_dtypes.bfloat16))  # fmt: skip


@pytest.mark.parametrize("M", [1, 32])
@pytest.mark.parametrize("side", SIDES)
def test_fp4_marlin_product(benchmark, side, M):
    """MXFP4; the peer has its weights in plain order."""

    def ours(x, w, s):
        return oracle.apply_fp4_marlin_linear(x, w.reshape(K // 16, N * 2), s)

    def peer(x, w, s):
        import torch

        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
        weights = grid[nibbles(w, 0).long()].view(-1, 32, N) * torch.exp2(s.double() - 127)[:, None]
        return (x.double() @ weights.view(K, N)).bfloat16()

    exponents = RNG.integers(110, 130, (K // 32, N)).astype(np.uint8)
    compare(benchmark, side, f"apply_fp4_marlin_linear {M}x{K}x{N}", ours, peer, normal(M, K), words(K // 8, N),
            exponents)  # fmt: skip


@pytest.mark.parametrize("side", SIDES)
def test_w4a8_product(benchmark, side):
    codes = (RNG.integers(-0x7E, 0x7F, (32, K)) % 0xFF).astype(np.uint8)
    tables = oracle.cutlass_pack_scale_fp8(RNG.integers(0, 0x67, (K // GROUP, N)).astype(np.uint8))

    def peer(a, w, t, channel, token):
        import torch

        q = nibbles(w, 0).view(-1, GROUP, N)
        entry = torch.gather(t.transpose(1, 2), 1, (q & 7).long())
        value = torch.where(q > 7, entry, entry ^ 128).view(K, N).view(torch.float8_e4m3fn).double()
        product = a.view(torch.float8_e4m3fn).double() @ value
        return (channel * (token[:, None] * product)).bfloat16()

    compare(benchmark, side, f"cutlass_w4a8_mm 32x{K}x{N}", oracle.cutlass_w4a8_mm, peer, codes, words(K // 8, N),
            tables, np.ones(N, np.float32), np.ones(32, np.float32))  # fmt: skip


@pytest.mark.parametrize("side", SIDES)
def test_w4a8_experts(benchmark, side):
    """Four experts of eight rows, of half the columns."""
    experts, rows, wide = 4, 32, N // 2
    codes = (RNG.integers(-0x7E, 0x7F, (rows, K)) % 0xFF).astype(np.uint8)
    scales_of = RNG.integers(0, 0x67, (experts * K // GROUP, wide)).astype(np.uint8)
    tables = oracle.cutlass_pack_scale_fp8(scales_of).reshape(experts, K // GROUP, wide, 8)
    packed = words(experts * wide, K // 8).reshape(experts, wide, K // 8)
    offsets = np.arange(experts) * (rows // experts)
    sizes = np.array([[wide, rows // experts, K]] * experts, np.int32)

    def peer(a, w, token, channel, t, offsets, sizes):
        import torch

        out = torch.zeros(rows, wide, dtype=torch.bfloat16)
        for e, begin in enumerate(offsets.tolist()):
            own = slice(begin, begin + int(sizes[e, 1]))
            q = nibbles(w[e], 1).t().reshape(-1, GROUP, wide)
            entry = torch.gather(t[e].transpose(1, 2), 1, (q & 7).long())
            value = torch.where(q > 7, entry, entry ^ 128).view(K, wide).view(torch.float8_e4m3fn).double()
            product = a[own].view(torch.float8_e4m3fn).double() @ value
            out[own] = (channel[e] * (token[own, None] * product)).bfloat16()
        return out

    compare(benchmark, side, f"cutlass_w4a8_moe_mm {rows}x{K}x{wide}, {experts} experts", oracle.cutlass_w4a8_moe_mm,
            peer, codes, packed, np.ones(rows, np.float32), np.ones((experts, wide), np.float32), tables, offsets,
            sizes)  # fmt: skip
