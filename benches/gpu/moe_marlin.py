"""Experts of 4-bit weights in Marlin's layouts by groups of 128 at Qwen3 30B-A3B's shapes, the first product, beside
vLLM's Marlin for experts, which has the pairs in order at no cost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import BF16, cupy_empty, cupy_normal, cupy_words, ours, torch_empty, torch_normal, torch_words
from .bench import Bench
from .moe import CHOICES, EXPERTS, TOKENS, cupy_chosen, torch_chosen
from .moe_wna16 import GROUP, K, N, moved

_UNIT = "bfloat16 tensor cores"


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield product(T)


def product(T: int) -> Bench:
    pairs = T * CHOICES

    def make():
        from vtlab import ops

        scales = ops.cast_bf16(abs(cupy_normal(EXPERTS, K // GROUP, N, dtype=np.float32)) / 100)
        arguments = cupy_normal(T, K), cupy_words(EXPERTS, K // 16, 2 * N), scales, cupy_chosen(T)
        return arguments, {"quant_type": "uint4b8"}, cupy_empty(pairs, N, dtype=BF16)

    call, peers = ours("moe_wna16_marlin_gemm", make), {"vllm": lambda: marlin(T)}
    name = f"moe_wna16_marlin_gemm {T}"
    return Bench("moe_marlin", name, call, peers, moved(T, 4), 2 * pairs * N * K, _UNIT)


def marlin(T: int):
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.scalar_type import scalar_types

    x, words, out = torch_normal(T, K), torch_words(EXPERTS, K // 16, 2 * N), torch_empty(T * CHOICES, N)
    scales = (torch_normal(EXPERTS, K // GROUP, N, dtype="float32").abs() / 100).bfloat16()
    high = next((each for each in (8, 16, 32, 48, 64) if T * CHOICES / EXPERTS / each < 0.9), 64)
    ids, weights, room = (
        torch_chosen(T),
        torch_normal(T, CHOICES, dtype="float32"),
        marlin_make_workspace_new(x.device, 4),
    )
    order = moe_align_block_size(ids, high, EXPERTS, None, ignore_invalid_experts=True)
    return lambda: ops.moe_wna16_marlin_gemm(
        x, out, words, None, scales, None, None, None, None, None, room, *order, weights, moe_block_size=high,
        top_k=CHOICES, mul_topk_weights=False, b_q_type=scalar_types.uint4b8, size_m=T, size_n=N, size_k=K,
        is_k_full=True, use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False,
    )  # fmt: skip
