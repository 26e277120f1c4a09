"""Experts of 4-bit weights by groups of 128, bytes along K: Qwen3 30B-A3B's two products and Mixtral 8x7B's first one.

Beside vLLM's Triton kernel and, up to 64 tokens, its CUDA kernel; both are given the pairs in order at no cost. What
puts them in order there is in "vllm sorted".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .arrays import BF16, F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal
from .bench import Bench
from .moe import CHOICES, EXPERTS, HIDDEN, INNER, TOKENS, chosen

GROUP = 128
UNIT = "bfloat16 tensor cores"


class Product(NamedTuple):
    """One product of a model: `each`, a row for each choice and its router's weight on the result."""

    name: str
    experts: int
    choices: int
    N: int
    K: int
    each: bool = False

    def chosen(self, T: int) -> np.ndarray:
        return chosen(T, self.experts, self.choices)

    def rows(self, T: int) -> int:
        return T * self.choices if self.each else T

    def moved(self, T: int, bits: int) -> int:
        """Bytes of the experts that some row goes to, with their scales, of activations and results."""
        used = len(np.unique(self.chosen(T)))
        weights = self.N * self.K * bits // 8 + 2 * self.N * self.K // GROUP
        return used * weights + 2 * self.rows(T) * self.K + 2 * T * self.choices * self.N

    def flops(self, T: int) -> int:
        return 2 * T * self.choices * self.N * self.K

    def cupy_routed(self, T: int) -> tuple:
        """(ids,) or (ids, weights) on the device."""
        import cupy

        ids = cupy.asarray(self.chosen(T))
        return (ids, abs(cupy_normal(T, self.choices, dtype=F32))) if self.each else (ids,)

    def torch_ids(self, T: int):
        import torch

        return torch.from_numpy(self.chosen(T)).cuda()


UP = Product("up", EXPERTS, CHOICES, 2 * INNER, HIDDEN)
DOWN = Product("down", EXPERTS, CHOICES, HIDDEN, INNER, each=True)
MIXTRAL = Product("mixtral", 8, 2, 28672, 4096)
CALLS = [
    *((UP, T) for T in (*TOKENS, 8192)), *((DOWN, T) for T in (1, 64, 2048)),
    *((MIXTRAL, T) for T in (1, 16, 64, 256, 2048)),
]  # fmt: skip
"""What is timed of experts with packed weights: a decode step's tokens to a prompt's."""


def benches() -> Iterator[Bench]:
    for of, T in CALLS:
        yield product(of, T, 4)
    yield product(UP, 64, 8)


def product(of: Product, T: int, bits: int) -> Bench:
    def make():
        import cupy

        from vtlab import ops

        words = cupy.random.randint(0, 256, (of.experts, of.N, of.K * bits // 8), dtype=np.uint8)
        scales = ops.cast_bf16(abs(cupy_normal(of.experts, of.N, of.K // GROUP, dtype=F32)) / 100)
        arguments = cupy_normal(of.rows(T), of.K), words, scales, *of.cupy_routed(T)
        return arguments, {"bits": bits}, cupy_empty(T * of.choices, of.N, dtype=BF16)

    peers = {"vllm": lambda: peer(of, T, bits)}
    if bits == 4 and T <= 64:
        peers["vllm cuda"] = lambda: peer(of, T, bits, cuda=True)
    name = f"moe_wna16_gemm {bits} bits {of.name} {T}"
    call = ours("moe_wna16_gemm", make)
    return Bench("moe_wna16", name, call, peers, of.moved(T, bits), of.flops(T), UNIT)


def peer(of: Product, T: int, bits: int, cuda: bool = False):
    """vLLM's kernel with its own choice of tiles."""
    import torch
    from vllm.model_executor.layers.fused_moe.fused_moe import (
        _prepare_expert_assignment,
        invoke_fused_moe_wna16_cuda_kernel,
        invoke_fused_moe_wna16_triton_kernel,
        try_get_optimal_moe_config,
    )
    from vllm.triton_utils import tl

    inner, hidden = (of.K, of.N) if of.each else (of.N // 2, of.K)
    sizes = (of.experts, 2 * inner, hidden * bits // 8), (of.experts, hidden, inner * bits // 8)
    config = try_get_optimal_moe_config(*sizes, of.choices, f"int{bits}_w{bits}a16", T, block_shape=[0, GROUP])
    if not cuda and "GROUP_SIZE_M" not in config:
        raise NotImplementedError("vLLM leaves so few pairs an expert to its CUDA kernel")
    x = torch_normal(of.rows(T), of.K)
    words = torch.randint(0, 256, (of.experts, of.N, of.K * bits // 8), device="cuda", dtype=torch.uint8)
    scales = (torch_normal(of.experts, of.N, of.K // GROUP, dtype="float32").abs() / 100).bfloat16()
    weights = torch_normal(T, of.choices, dtype="float32").abs() if of.each else None
    out, choices = torch_empty(T, of.choices, of.N), 1 if of.each else of.choices
    kinds = {"use_int8_w8a16": bits == 8, "use_int4_w4a16": bits == 4, "block_shape": [0, GROUP]}
    order = _prepare_expert_assignment(of.torch_ids(T), config, T, of.choices, of.experts, None, **kinds)
    given = x, words, out, scales, None, weights, *order, of.each, choices, config
    if cuda:
        return lambda: invoke_fused_moe_wna16_cuda_kernel(*given, [0, GROUP])
    return lambda: invoke_fused_moe_wna16_triton_kernel(*given, tl.bfloat16, bits == 8, bits == 4, [0, GROUP])
