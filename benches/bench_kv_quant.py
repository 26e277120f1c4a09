"""Writes into quantised KV caches and reads of them: 8 heads of 128, pages of 16 tokens; the latent's entries."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 32, 1024]
HEADS, WIDTH, PAGE = 8, 128, 16
SCALE = np.float32([0.0321])


def pages(T, width, dtype=np.uint8):
    return np.zeros((-(-T // PAGE), PAGE, HEADS, width), dtype)


def rows(T):
    return normal(T, HEADS, WIDTH), normal(T, HEADS, WIDTH, seed=1), np.arange(T)


def scattered(cache, slots, codes):
    cache.flatten(0, 1)[slots] = codes


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_fp8_write(benchmark, side, T):
    key, value, slots = rows(T)

    def peer(key, value, key_cache, value_cache, slots, k_scale, v_scale):
        import torch

        for x, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            codes = (x.double() / scale.double()).clamp(-448, 448).float().to(torch.float8_e4m3fn)
            scattered(cache, slots, codes.view(torch.uint8))

    compare(benchmark, side, f"reshape_and_cache_fp8 {T}x8x128 bf16", oracle.reshape_and_cache_fp8, peer, key, value,
            pages(T, WIDTH), pages(T, WIDTH), slots, SCALE, SCALE)  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_int8_write(benchmark, side, T):
    key, value, slots = rows(T)
    scales = [np.ones((-(-T // PAGE), PAGE, HEADS), np.float32) for _ in "kv"]

    def peer(key, value, key_cache, value_cache, k_scales, v_scales, slots):
        for x, cache, scales in ((key, key_cache, k_scales), (value, value_cache, v_scales)):
            v = x.double()
            scale = (v.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
            scattered(cache, slots, (v / scale).round().clamp(-128, 127).char())
            scattered(scales, slots, scale[..., 0].float())

    ours = oracle.reshape_and_cache_per_token_head
    compare(benchmark, side, f"reshape_and_cache_per_token_head {T}x8x128 int8", ours, peer, key, value,
            pages(T, WIDTH, np.int8), pages(T, WIDTH, np.int8), *scales, slots)  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_fp8_read(benchmark, side, T):
    codes = oracle.quant_fp8_static(normal(T, HEADS, WIDTH), SCALE)

    def peer(cache, scale):
        import torch

        return (cache.view(torch.float8_e4m3fn).double() * scale.double()).bfloat16()

    compare(benchmark, side, f"dequantize_kv_fp8 {T}x8x128", oracle.dequantize_kv_fp8, peer, codes, SCALE)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rotation(benchmark, side, T):
    def peer(x):
        import torch

        value, span = x.double(), 1
        while span < WIDTH:
            one, other = value.view(*x.shape[:-1], -1, 2, span).unbind(-2)
            value, span = torch.stack((one + other, one - other), -2).view(x.shape), 2 * span
        return value.bfloat16()

    compare(benchmark, side, f"rht {T}x8x128 bf16", oracle.rht, peer, normal(T, HEADS, WIDTH))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_latent_write(benchmark, side, T):
    cache = np.zeros((-(-T // PAGE), PAGE, 656), np.uint8)

    def peer(kv_c, k_pe, kv_cache, slots):
        import torch

        tiles = kv_c.double().view(-1, 4, 128)
        scale = (tiles.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
        codes = (tiles / scale).float().to(torch.float8_e4m3fn).view(-1, 512).view(torch.uint8)
        parts = codes, scale.float().view(-1, 4).view(torch.uint8), k_pe.view(torch.uint8)
        scattered(kv_cache, slots, torch.cat(parts, -1))

    compare(benchmark, side, f"concat_and_cache_ds_mla {T}x576 bf16", oracle.concat_and_cache_ds_mla, peer,
            normal(T, 512), normal(T, 64, seed=1), cache, np.arange(T))  # fmt: skip


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_nvfp4_write(benchmark, side, T):
    key, value, slots = rows(T)

    def peer(key, value, key_cache, value_cache, slots, k_scale, v_scale):
        import torch

        steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        for x, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            groups = x.float().view(*x.shape[:-1], -1, 16)
            stored = (groups.abs().amax(-1) / 6 / scale).to(torch.float8_e4m3fn)
            v = groups / (stored.float() * scale)[..., None]
            codes = torch.bucketize(v.abs(), steps).byte() | (v < 0).byte() << 3
            packed = codes.view(x.shape)[..., ::2] | codes.view(x.shape)[..., 1::2] << 4
            scattered(cache, slots, torch.cat([packed, stored.view(torch.uint8)], -1))

    caches = [pages(T, WIDTH // 16 * 9) for _ in "kv"]
    compare(benchmark, side, f"reshape_and_cache_nvfp4 {T}x8x128 bf16", oracle.reshape_and_cache_nvfp4, peer, key,
            value, *caches, slots, SCALE, SCALE)  # fmt: skip
