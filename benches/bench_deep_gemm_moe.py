"""Around grouped products: tokens of width 7168 to eight of 256 experts and back, activations of width 2048 as FP8."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 32, 256]
WIDTH, HALF, EXPERTS, CHOICES, ALIGNMENT = 7168, 2048, 256, 8, 16


def chosen(T: int) -> np.ndarray:
    return np.argsort(np.random.default_rng(0).random((T, EXPERTS)), axis=1)[:, :CHOICES].astype(np.int32)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("side", SIDES)
def test_scatter(benchmark, side, packed, T):
    """Scales of groups of 128 as float32, or exponents of groups of 32, four to a word."""
    rows = T * CHOICES + min(T * CHOICES, EXPERTS) * (ALIGNMENT - 1)
    scales = np.int32 if packed else np.float32
    written = np.zeros((rows, WIDTH), np.uint8), np.zeros((rows, WIDTH // 128), scales)
    x = np.random.default_rng(1).integers(0, 120, (T, WIDTH)).astype(np.uint8)

    def ours(*arrays):
        op = oracle.ep_scatter_ue8m0 if packed else oracle.ep_scatter
        return op(*arrays, num_experts=EXPERTS, alignment=ALIGNMENT)

    def peer(a, a_scale, x, x_scale, ids):
        import torch

        flat = ids.flatten().long()
        counts = torch.bincount(flat, minlength=EXPERTS)
        whole = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        order = torch.argsort(flat, stable=True)
        shift = (whole.cumsum(0) - whole) - (counts.cumsum(0) - counts)
        place = torch.arange(len(flat)) + shift[flat[order]]
        words = x_scale.view(torch.int32) if packed else x_scale
        a[place], a_scale[place] = x[order // CHOICES], words[order // CHOICES]
        return place

    scale = np.full((T, WIDTH // 32), 127, np.uint8) if packed else np.ones((T, WIDTH // 128), np.float32)
    compare(benchmark, side, f"ep_scatter{'_ue8m0' * packed} {T}x{WIDTH}", ours, peer, *written, x, scale, chosen(T))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_gather(benchmark, side, T):
    def peer(a, weights, inverse):
        return (a[inverse.long()].double() * weights[..., None].double()).sum(1).bfloat16()

    inverse = np.random.default_rng(2).permutation(T * CHOICES).reshape(T, CHOICES).astype(np.int32)
    weights = np.full((T, CHOICES), 1 / CHOICES, np.float32)
    compare(benchmark, side, f"ep_gather {T}x{WIDTH}", oracle.ep_gather, peer, normal(T * CHOICES, WIDTH), weights,
            inverse)  # fmt: skip


def quantised(y):
    """Codes of float64 values in groups of 128, and their scales."""
    import torch

    grouped = y.view(*y.shape[:-1], -1, 128)
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return (grouped / scale).float().to(torch.float8_e4m3fn), scale.float()


@pytest.mark.parametrize("M", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_silu_columns(benchmark, side, M):
    def peer(x):
        import torch

        gate, up = x.double().chunk(2, -1)
        return quantised(torch.nn.functional.silu(gate) * up)

    name = f"silu_mul_per_token_group_quant_fp8_colmajor {M}x{HALF}"
    compare(benchmark, side, name, oracle.silu_mul_per_token_group_quant_fp8_colmajor, peer, normal(M, 2 * HALF))


@pytest.mark.parametrize("side", SIDES)
def test_silu_masked(benchmark, side):
    """Eight rows of sixteen of eight experts are real."""
    counts = np.full(8, 8, np.int32)
    codes, scale = np.zeros((8, 16, HALF), np.uint8), np.zeros((8, 16, HALF // 128), np.float32)

    def peer(x, counts, codes, scale):
        import torch

        gate, up = x[:, :8].double().chunk(2, -1)
        return quantised(torch.nn.functional.silu(gate) * up)

    compare(benchmark, side, f"silu_mul_masked_quant 8x8 of 16x{HALF}", oracle.silu_mul_masked_quant, peer,
            normal(8, 16, 2 * HALF), counts, codes, scale)  # fmt: skip
