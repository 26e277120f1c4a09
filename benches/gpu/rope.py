"""Rotation of q and k: 32 and 8 heads of 128 whole, Qwen3.5's 24 and 4 of 256 in part, and the rows of one step."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_normal, vllm_ops
from .bench import TOKENS, Bench

POSITIONS = 40960


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield rope_from_cache(T)
        yield rope_from_cache(T, 24, 4, 256, 64)
        yield rope_from_cache(T, is_neox=False)
        yield rope_neox(T)
        yield rope_cos_sin_cache(T)


def cupy_positions(T: int):
    """T positions of a prompt, in int64."""
    import cupy

    return cupy.arange(T, dtype=cupy.int64) * 5 % POSITIONS


def torch_positions(T: int):
    import torch

    return torch.arange(T, device="cuda") * 5 % POSITIONS


def cupy_heads(T: int, Hq: int, Hk: int, D: int):
    """q and k as they lie in a merged projection."""
    qkv = cupy_normal(T, (Hq + 2 * Hk) * D).reshape(T, Hq + 2 * Hk, D)
    return qkv[:, :Hq], qkv[:, Hq : Hq + Hk]


def rope_from_cache(
    T: int, Hq: int = 32, Hk: int = 8, D: int = 128, rotary_dim: int = 128, is_neox: bool = True
) -> Bench:
    def vllm():
        call, qkv, where = vllm_ops().rotary_embedding, torch_normal(T, (Hq + 2 * Hk) * D), torch_positions(T)
        q, k, _ = qkv.split([Hq * D, Hk * D, Hk * D], dim=-1)
        cache = torch_normal(POSITIONS, rotary_dim)
        return lambda: call(where, q, k, D, cache, is_neox)

    def make():
        arguments = *cupy_heads(T, Hq, Hk, D), cupy_positions(T), cupy_normal(POSITIONS, rotary_dim)
        return arguments, {"is_neox": is_neox, "rounding": "vllm"}, (cupy_empty(T, Hq, D), cupy_empty(T, Hk, D))

    moved = T * (4 * (Hq + Hk) * D + 2 * rotary_dim + 8)
    name = f"rope_from_cache {'' if is_neox else 'gptj '}{T}x{Hq}+{Hk}x{D} rot {rotary_dim}"
    flops = 3 * T * (Hq + Hk) * rotary_dim
    return Bench("rope", name, ours("rope_from_cache", make), {"vllm": vllm}, moved, flops)


def rope_neox(T: int, Hq: int = 32, Hk: int = 8, D: int = 128) -> Bench:
    def make():
        arguments = *cupy_heads(T, Hq, Hk, D), cupy_positions(T)
        return arguments, {"base": 1e6, "rotary_dim": D}, (cupy_empty(T, Hq, D), cupy_empty(T, Hk, D))

    moved, flops = T * (4 * (Hq + Hk) * D + 8), 3 * T * (Hq + Hk) * D
    return Bench("rope", f"rope_neox {T}x{Hq}+{Hk}x{D}", ours("rope_neox", make), {}, moved, flops)


def rope_cos_sin_cache(T: int, rotary_dim: int = 128) -> Bench:
    def torch():
        import torch

        where, inv = torch_positions(T), 1e6 ** -(torch.arange(0, rotary_dim, 2, device="cuda").double() / rotary_dim)

        def rows():
            angle = where.double()[:, None] * inv
            return torch.cat([angle.cos(), angle.sin()], dim=-1).float()

        return rows

    def make():
        return (cupy_positions(T),), {"base": 1e6, "rotary_dim": rotary_dim}, cupy_empty(T, rotary_dim, dtype=F32)

    name = f"rope_cos_sin_cache {T}x{rotary_dim}"
    return Bench("rope", name, ours("rope_cos_sin_cache", make), {"torch": torch}, T * (4 * rotary_dim + 8))
