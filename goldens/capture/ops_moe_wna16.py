"""Experts of packed weights: vLLM's Triton kernel fused_moe_kernel_gptq_awq, interpreted, in float16 alone.

OMP_NUM_THREADS=1 python goldens/capture/ops_moe_wna16.py --out goldens/ops
"""

from __future__ import annotations

import interpreted  # noqa: F401  must come before anything of vLLM
import torch
from record import Record, generator, normal, run
from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_wna16_triton_kernel
from vllm.triton_utils import tl

F16, HIGH = torch.float16, 16
IDS = torch.tensor([[2, 0], [0, 1], [-1, 2], [2, 0], [0, -1]], dtype=torch.int32)
EXPERTS = 3


def aligned(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What moe_align_block_size makes of ids: pairs by expert, filled up with a pair that there is not; experts."""
    order, owners = [], []
    flat = ids.reshape(-1).tolist()
    for expert in (-1, *range(EXPERTS)):
        pairs = [pair for pair, own in enumerate(flat) if own == expert]
        blocks = -(-len(pairs) // HIGH)
        order += pairs + [len(flat)] * (blocks * HIGH - len(pairs))
        owners += [expert] * blocks
    return tuple(torch.tensor(part, dtype=torch.int32) for part in (order, owners, [len(order)]))


def capture(record: Record) -> None:
    T, k = IDS.shape
    for name, bits, N, K, G, zeros, each, weighted in (
        ("4bit_zeros", 4, 34, 128, 4, True, False, True), ("4bit", 4, 32, 160, 5, False, True, False),
        ("8bit_zeros", 8, 32, 128, 2, True, True, True), ("8bit", 8, 36, 64, 1, False, False, True),
    ):  # fmt: skip
        random = generator(name)
        packed = lambda *shape, r=random: torch.randint(0, 256, shape, generator=r, dtype=torch.uint8)
        x = normal(f"{name}x", T * k if each else T, K, dtype=F16)
        qweight, qzeros = packed(EXPERTS, N, K * bits // 8), packed(EXPERTS, N * bits // 8, G) if zeros else None
        scales = (torch.rand(EXPERTS, N, G, generator=random) * 0.016 + 0.004).to(F16)
        weights = torch.rand(T, k, generator=random)
        out = torch.empty(T, k, N, dtype=F16)
        config = {"BLOCK_SIZE_M": HIGH, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1, "SPLIT_K": 1}
        with record.attempt(name):
            invoke_fused_moe_wna16_triton_kernel(
                x, qweight, out, scales, qzeros, weights, *aligned(IDS), weighted, 1 if each else k, config, tl.float16,
                bits == 8, bits == 4, [0, K // G],
            )  # fmt: skip
            record.case("moe_wna16_gemm", name, "invoke_fused_moe_wna16_triton_kernel", {"bits": bits},
                        {"x": x, "qweight": qweight, "scales": scales, "ids": IDS, "qzeros": qzeros,
                         "weights": weights if weighted else None}, {"out": out.view(T * k, N)})  # fmt: skip


if __name__ == "__main__":
    run("moe_wna16", __file__, capture)
