"""Products with Machete's prepacked weights, groups of 128, beside vLLM's Machete; and the prepacking."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_normal, cupy_words, ours, torch_normal, torch_words, vllm_ops
from .bench import Bench
from .marlin_matmul import GROUP, ROWS, size_of


def benches() -> Iterator[Bench]:
    for M in ROWS:
        yield product(M, 8192, 8192)
    yield prepack(8192, 8192)


def product(M: int, N: int, K: int) -> Bench:
    def make():
        arguments = cupy_normal(M, K), cupy_words(K // 8, N), cupy_normal(K // GROUP, N)
        return arguments, {"quant_type": "uint4b8"}, cupy_empty(M, N)

    def vllm():
        call = vllm_ops().machete_mm
        from vllm.scalar_type import scalar_types

        # Column-major words, as its own prepacking gives them.
        a, words, scales = torch_normal(M, K), torch_words(N, K // 8).t(), torch_normal(K // GROUP, N)
        number = scalar_types.uint4b8.id
        return lambda: call(a, words, number, None, scales, None, GROUP, None, None, None)

    moved, unit = size_of(M, N, K, 4), "bfloat16 tensor cores"
    name = f"machete uint4b8 {M}x{N}x{K}"
    return Bench("machete", name, ours("machete_mm", make), {"vllm": vllm}, moved, 2 * M * N * K, unit)


def prepack(N: int, K: int) -> Bench:
    def make():
        return (cupy_words(K // 8, N),), {"bits": 4}, cupy_empty(K // 8, N, dtype="int32")

    def vllm():
        call = vllm_ops().machete_prepack_B
        import torch
        from vllm.scalar_type import scalar_types

        words, number = torch_words(N, K // 8).t(), scalar_types.uint4b8.id
        return lambda: call(words, torch.bfloat16, number, torch.bfloat16)

    return Bench("machete", f"machete_prepack {K}x{N}", ours("machete_prepack_b", make), {"vllm": vllm}, N * K)
