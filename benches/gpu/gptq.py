"""Products with GPTQ's words as checkpoints have them and as exllama shuffles them, beside vLLM's; their values."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_normal, cupy_words, ours, torch_normal, torch_words, vllm_ops
from .bench import Bench
from .marlin_matmul import GROUP, ROWS, size_of


def benches() -> Iterator[Bench]:
    for M in ROWS:
        for shuffled in (False, True):
            yield product(M, 8192, 8192, shuffled)
    yield values(8192, 8192)


def product(M: int, N: int, K: int, shuffled: bool) -> Bench:
    def make():
        zeros, scales = cupy_words(K // GROUP, N // 8), cupy_normal(K // GROUP, N, dtype="float16")
        arguments = cupy_normal(M, K, dtype="float16"), cupy_words(K // 8, N), zeros, scales
        return arguments, {"use_exllama": shuffled}, cupy_empty(M, N, dtype="float16")

    def vllm():
        if not shuffled:
            raise NotImplementedError("its kernel for words in sequence wants the groups of all rows")
        import torch

        call = vllm_ops().gptq_gemm
        zeros, scales = torch_words(K // GROUP, N // 8), torch_normal(K // GROUP, N, dtype="float16")
        a, words = torch_normal(M, K, dtype="float16"), torch_words(K // 8, N)
        order = torch.empty(0, device="cuda", dtype=torch.int32)
        return lambda: call(a, words, zeros, scales, order, True, False, 4)

    name = f"gptq {'shuffled' if shuffled else 'in sequence'} {M}x{N}x{K}"
    moved, unit = size_of(M, N, K, 4), "bfloat16 tensor cores"
    return Bench("gptq", name, ours("gptq_gemm", make), {"vllm": vllm}, moved, 2 * M * N * K, unit)


def values(N: int, K: int) -> Bench:
    def make():
        zeros, scales = cupy_words(K // GROUP, N // 8), cupy_normal(K // GROUP, N)
        return (cupy_words(K // 8, N), scales, zeros), {}, cupy_empty(K, N)

    return Bench("gptq", f"gptq values {K}x{N}", ours("gptq_dequantize", make), {}, N * K // 2 + 2 * N * K)
