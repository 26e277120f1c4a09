"""Mamba-2's gated norm of 8192 channels, in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_normal, ours, torch_normal
from .bench import TOKENS, Bench


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield gated(T)


def gated(T: int, W: int = 8192, groups: int = 8) -> Bench:
    def make():
        return (cupy_normal(T, W), cupy_normal(T, W), cupy_normal(W)), {"groups": groups}, cupy_empty(T, W)

    def vllm():
        from vllm.model_executor.layers.mamba.ops.layernorm_gated import rms_norm_gated

        y, z, weight = torch_normal(T, W), torch_normal(T, W), torch_normal(W)
        return lambda: rms_norm_gated(y, weight, None, z=z, eps=1e-5, group_size=W // groups, norm_before_gate=False)

    name = f"mamba2_rmsnorm_gated {T}x{W}"
    return Bench("mamba_norm", name, ours("mamba2_rmsnorm_gated", make), {"vllm": vllm}, 6 * T * W, 12 * T * W)
