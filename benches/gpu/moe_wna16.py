"""Experts of 4-bit weights by groups of 128 at Qwen3 30B-A3B's shapes, the first product: bytes along K, beside vLLM's
Triton kernel and, up to 64 tokens, its CUDA kernel; both with the pairs in order at no cost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import BF16, cupy_empty, cupy_normal, ours, torch_empty, torch_normal
from .bench import Bench
from .moe import CHOICES, EXPERTS, HIDDEN, INNER, TOKENS, chosen, cupy_chosen, torch_chosen

N, K, GROUP = 2 * INNER, HIDDEN, 128
_UNIT = "bfloat16 tensor cores"


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield product(T, 4)
    yield product(64, 8)


def moved(T: int, bits: int) -> int:
    """Bytes of the experts that some row goes to, with their scales, of activations and results."""
    used = len(np.unique(chosen(T)))
    return used * (N * K * bits // 8 + 2 * N * K // GROUP) + 2 * T * K + 2 * T * CHOICES * N


def product(T: int, bits: int) -> Bench:
    pairs = T * CHOICES

    def make():
        import cupy

        words = cupy.random.randint(0, 256, (EXPERTS, N, K * bits // 8)).astype(cupy.uint8)
        scales = abs(cupy_normal(EXPERTS, N, K // GROUP, dtype=np.float32)) / 100
        from vtlab import ops

        arguments = cupy_normal(T, K), words, ops.cast_bf16(scales), cupy_chosen(T)
        return arguments, {"bits": bits}, cupy_empty(pairs, N, dtype=BF16)

    peers = {"vllm": lambda: triton(T, bits)}
    if bits == 4 and T <= 64:
        peers["vllm cuda"] = lambda: cuda(T)
    name = f"moe_wna16_gemm {bits} bits {T}"
    return Bench("moe_wna16", name, ours("moe_wna16_gemm", make), peers, moved(T, bits), 2 * pairs * N * K, _UNIT)


def _operands(T: int, bits: int):
    import torch

    words = torch.randint(0, 256, (EXPERTS, N, K * bits // 8), device="cuda", dtype=torch.uint8)
    scales = (torch_normal(EXPERTS, N, K // GROUP, dtype="float32").abs() / 100).bfloat16()
    return torch_normal(T, K), words, torch_empty(T, CHOICES, N), scales


def _config(optimal, T: int, bits: int) -> dict:
    """vLLM's own choice of tiles for these experts."""
    sizes = (EXPERTS, 2 * INNER, HIDDEN * bits // 8), (EXPERTS, HIDDEN, INNER * bits // 8)
    return optimal(*sizes, CHOICES, f"int{bits}_w{bits}a16", T, block_shape=[0, GROUP])


def _aligned(bits: int) -> dict:
    return {"use_int8_w8a16": bits == 8, "use_int4_w4a16": bits == 4, "block_shape": [0, GROUP]}


def triton(T: int, bits: int):
    from vllm.model_executor.layers.fused_moe.fused_moe import (
        _prepare_expert_assignment,
        invoke_fused_moe_wna16_triton_kernel,
        try_get_optimal_moe_config,
    )
    from vllm.triton_utils import tl

    config = _config(try_get_optimal_moe_config, T, bits)
    x, words, out, scales = _operands(T, bits)
    order = _prepare_expert_assignment(torch_chosen(T), config, T, CHOICES, EXPERTS, None, **_aligned(bits))
    return lambda: invoke_fused_moe_wna16_triton_kernel(
        x, words, out, scales, None, None, *order, False, CHOICES, config, tl.bfloat16, bits == 8, bits == 4, [0, GROUP]
    )


def cuda(T: int):
    from vllm.model_executor.layers.fused_moe.fused_moe import (
        _prepare_expert_assignment,
        invoke_fused_moe_wna16_cuda_kernel,
        try_get_optimal_moe_config,
    )

    config = _config(try_get_optimal_moe_config, T, 4)
    x, words, out, scales = _operands(T, 4)
    order = _prepare_expert_assignment(torch_chosen(T), config, T, CHOICES, EXPERTS, None, **_aligned(4))
    return lambda: invoke_fused_moe_wna16_cuda_kernel(
        x, words, out, scales, None, None, *order, False, CHOICES, config, [0, GROUP]
    )
