"""Rotation fused with its surroundings: Qwen3.5's gated front, Qwen3's packed QK norm, and the paged write."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_normal, vllm_ops
from .bench import TOKENS, Bench
from .rope import POSITIONS, cupy_heads, cupy_positions, torch_positions


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield attn_qk_norm_rope_gate(T)
        yield fused_qk_norm_rope(T)
        yield rope_and_cache(T)


def attn_qk_norm_rope_gate(T: int, Hq: int = 24, Hk: int = 4, D: int = 256, rotary_dim: int = 64) -> Bench:
    def vllm():
        from vllm.model_executor.layers.fused_qk_norm_rope import fused_qk_rmsnorm_rope_gate as call

        qgate, kf, where = torch_normal(T, 2 * Hq * D), torch_normal(T, Hk * D), torch_positions(T)
        weights, cache = (torch_normal(D), torch_normal(D)), torch_normal(POSITIONS, rotary_dim)
        return lambda: call(qgate, kf, *weights, cache, where, 1e-6, Hq, Hk, D, rotary_dim)

    def make():
        weights = cupy_normal(D, dtype=F32), cupy_normal(D, dtype=F32)
        arguments = cupy_normal(T, 2 * Hq * D), cupy_normal(T, Hk * D), *weights, cupy_normal(T, rotary_dim, dtype=F32)
        return arguments, {"rounding": "vllm"}, (cupy_empty(T, Hq, D), cupy_empty(T, Hk, D), cupy_empty(T, Hq, D))

    moved, flops = T * (4 * (2 * Hq + Hk) * D + 4 * rotary_dim), T * (Hq + Hk) * (5 * D + 3 * rotary_dim)
    name = f"attn_qk_norm_rope_gate {T}x{Hq}+{Hk}x{D} rot {rotary_dim}"
    return Bench("rope_fused", name, ours("attn_qk_norm_rope_gate", make), {"vllm": vllm}, moved, flops)


def fused_qk_norm_rope(T: int, Hq: int = 32, Hk: int = 8, D: int = 128) -> Bench:
    def vllm():
        call, qkv, where = vllm_ops().fused_qk_norm_rope, torch_normal(T, (Hq + 2 * Hk) * D), torch_positions(T)
        weights, cache = (torch_normal(D), torch_normal(D)), torch_normal(POSITIONS, D)
        return lambda: call(qkv, Hq, Hk, Hk, D, 1e-6, *weights, cache, True, where, -1)

    def make():
        weights, cache = (cupy_normal(D), cupy_normal(D)), cupy_normal(POSITIONS, D)
        arguments = cupy_normal(T, (Hq + 2 * Hk) * D), *weights, cache, cupy_positions(T)
        options = {"num_heads_q": Hq, "num_heads_k": Hk, "num_heads_v": Hk, "head_dim": D}
        return arguments, options, cupy_empty(T, (Hq + 2 * Hk) * D)

    moved, flops = T * (4 * (Hq + 2 * Hk) * D + 2 * D + 8), 8 * T * (Hq + Hk) * D
    name = f"fused_qk_norm_rope {T}x{Hq}+{Hk}+{Hk}x{D}"
    return Bench("rope_fused", name, ours("fused_qk_norm_rope", make), {"vllm": vllm}, moved, flops)


def rope_and_cache(T: int, Hq: int = 32, Hk: int = 8, D: int = 128, BS: int = 16) -> Bench:
    NB = -(-T // BS) + 7

    def vllm():
        import torch

        rotate, store = vllm_ops().rotary_embedding, torch.ops._C_cache_ops.reshape_and_cache_flash
        qkv, where, cache = torch_normal(T, (Hq + 2 * Hk) * D), torch_positions(T), torch_normal(POSITIONS, D)
        q, k, v = qkv.split([Hq * D, Hk * D, Hk * D], dim=-1)
        pages, slots = torch_normal(2, NB, BS, Hk, D), torch.arange(T, device="cuda")
        scale = torch.ones(1, device="cuda")
        heads = k.view(T, Hk, D), v.view(T, Hk, D)

        def both():
            rotate(where, q, k, D, cache, True)
            store(*heads, *pages, slots, "auto", scale, scale)

        return both

    def make():
        import cupy

        (q, k), v, where = cupy_heads(T, Hq, Hk, D), cupy_normal(T, Hk, D), cupy_positions(T)
        pages = cupy_normal(2, NB, BS, Hk, D)
        arguments = q, k, v, where, cupy_normal(POSITIONS, D), pages[0], pages[1], cupy.arange(T, dtype=cupy.int64)
        return arguments, {}, (cupy_empty(T, Hq, D), cupy_empty(T, Hk, D))

    moved, flops = T * (4 * (Hq + Hk) * D + 6 * Hk * D + 2 * D + 16), 3 * T * (Hq + Hk) * D
    name = f"rope_and_cache {T}x{Hq}+{Hk}x{D}"
    return Bench("rope_fused", name, ours("rope_and_cache", make), {"vllm": vllm}, moved, flops)
