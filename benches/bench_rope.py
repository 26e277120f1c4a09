"""Rotations at the heads of Qwen3 (32 and 8 of 128) and Qwen3.5 (24 and 4 of 256, 64 rotated); caches of 40960 rows."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

TOKENS = [1, 1024]
QWEN3, QWEN35 = (32, 8, 128, 128), (24, 4, 256, 64)


def turned(x, cos, sin):
    """NeoX rotation of the leading lanes in float64."""
    import torch

    half = cos.shape[-1]
    u, v = x[..., :half].double(), x[..., half : 2 * half].double()
    cos, sin = cos[:, None].double(), sin[:, None].double()
    return torch.cat([(u * cos - v * sin).to(x.dtype), (v * cos + u * sin).to(x.dtype), x[..., 2 * half :]], -1)


def rows(T, width):
    return oracle.rope_cos_sin_cache(np.arange(T), base=1e6, rotary_dim=width)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("heads", [QWEN3, QWEN35], ids=["qwen3", "qwen3.5"])
@pytest.mark.parametrize("side", SIDES)
def test_rope_from_cache(benchmark, side, heads, T):
    hq, hk, dim, rotary = heads

    def peer(q, k, positions, cache):
        cos, sin = cache[positions].chunk(2, -1)
        return turned(q, cos, sin), turned(k, cos, sin)

    arrays = normal(T, hq, dim), normal(T, hk, dim, seed=1), np.arange(T), rows(T, rotary)
    group = f"rope_from_cache {T}x({hq}+{hk})x{dim} rot {rotary} bf16"
    compare(benchmark, side, group, oracle.rope_from_cache, peer, *arrays)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rope_three_axes(benchmark, side, T):
    axis = np.zeros(32, np.int64)
    axis[1:31:3], axis[2:30:3] = 1, 2

    def ours(q, k, positions, cache):
        how = {"mrope_section": (11, 11, 10), "mrope_interleaved": True}
        return oracle.rope_from_cache(q, k, positions, cache, **how)

    def peer(q, k, positions, cache):
        import torch

        at = positions[torch.from_numpy(axis)].T
        cos, sin = (half.gather(0, at) for half in cache.chunk(2, -1))
        return turned(q, cos, sin), turned(k, cos, sin)

    arrays = normal(T, 24, 256), normal(T, 4, 256, seed=1), np.tile(np.arange(T), (3, 1)), rows(T, 64)
    compare(benchmark, side, f"rope_from_cache three axes {T}x(24+4)x256 rot 64 bf16", ours, peer, *arrays)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rope_neox(benchmark, side, T):
    def ours(q, k, positions):
        return oracle.rope_neox(q, k, positions, base=1e6, rotary_dim=128)

    def peer(q, k, positions):
        import torch

        inv = 1e6 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
        angle = positions.double()[:, None] * inv
        cos, sin = angle.cos().float(), angle.sin().float()
        return turned(q, cos, sin), turned(k, cos, sin)

    arrays = normal(T, 32, 128), normal(T, 8, 128, seed=1), np.arange(T)
    compare(benchmark, side, f"rope_neox {T}x(32+8)x128 bf16", ours, peer, *arrays)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rope_cos_sin_cache(benchmark, side, T):
    def ours(positions):
        return oracle.rope_cos_sin_cache(positions, base=1e6, rotary_dim=128)

    def peer(positions):
        import torch

        angle = positions.double()[:, None] * 1e6 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
        return torch.cat([angle.cos(), angle.sin()], -1).float()

    compare(benchmark, side, f"rope_cos_sin_cache {T}x128", ours, peer, np.arange(T))


@pytest.mark.parametrize("emulate", [None, "f32"])
@pytest.mark.parametrize("side", SIDES)
def test_rope_build_cache(benchmark, side, emulate):
    def ours(t):
        return oracle.rope_build_cache({"rope_theta": 1e6}, head_size=128, max_position=t.size, emulate=emulate)

    def peer(t):
        import torch

        angle = t[:, None] * 1e6 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
        return torch.cat([angle.cos(), angle.sin()], -1).float()

    compare(benchmark, side, f"rope_build_cache 40960x128 emulate {emulate}", ours, peer, np.arange(40960.0))


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_attn_qk_norm_rope_gate(benchmark, side, T):
    def normed(x, w):
        v = x.double()
        return v * ((v * v).mean(-1, keepdim=True) + 1e-6).rsqrt() * (w.double() + 1)

    def peer(qgate, kf, qw, kw, cos_sin):
        q, gate = qgate.view(T, 24, 2, 256).unbind(2)
        cos, sin = cos_sin.chunk(2, -1)
        k = kf.view(T, 4, 256)
        return *(turned(normed(x, w), cos, sin).to(qgate.dtype) for x, w in ((q, qw), (k, kw))), gate.contiguous()

    weights = normal(256, dtype=np.float32, seed=2), normal(256, dtype=np.float32, seed=3)
    arrays = normal(T, 24 * 512), normal(T, 4 * 256, seed=1), *weights, rows(T, 64)
    compare(
        benchmark, side, f"attn_qk_norm_rope_gate {T}x(24+4)x256 bf16", oracle.attn_qk_norm_rope_gate, peer, *arrays
    )


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_fused_qk_norm_rope(benchmark, side, T):
    def ours(*arrays):
        return oracle.fused_qk_norm_rope(*arrays, num_heads_q=32, num_heads_k=8, num_heads_v=8, head_dim=128)

    def peer(qkv, qw, kw, cache, positions):
        import torch

        out = qkv.clone().view(T, 48, 128)
        cos, sin = cache[positions].chunk(2, -1)
        for w, part in ((qw, slice(0, 32)), (kw, slice(32, 40))):
            v = out[:, part].double()
            v = v * torch.rsqrt((v * v).mean(-1, keepdim=True) + 1e-6) * w.double()
            out[:, part] = turned(v, cos, sin).to(qkv.dtype)
        return out

    arrays = normal(T, 48 * 128), normal(128, seed=1), normal(128, seed=2), rows(T, 128), np.arange(T)
    compare(benchmark, side, f"fused_qk_norm_rope {T}x(32+8+8)x128 bf16", ours, peer, *arrays)


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("side", SIDES)
def test_rope_and_cache(benchmark, side, T):
    def peer(q, k, v, positions, cache, keys, values, slots):
        cos, sin = cache[positions].chunk(2, -1)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        keys[slots // 16, slots % 16], values[slots // 16, slots % 16] = k, v
        return q, k

    slots = np.random.Generator(np.random.PCG64(4)).permutation(2048)[:T]
    pages = normal(128, 16, 8, 128, seed=5), normal(128, 16, 8, 128, seed=6)
    arrays = normal(T, 32, 128), normal(T, 8, 128, seed=1), normal(T, 8, 128, seed=2), np.arange(T), rows(T, 128)
    compare(benchmark, side, f"rope_and_cache {T}x(32+8)x128 bf16", oracle.rope_and_cache, peer, *arrays, *pages, slots)
