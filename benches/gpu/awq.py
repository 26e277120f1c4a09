"""Products with AWQ's words as checkpoints have them, groups of 128, beside vLLM's; their values."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_normal, cupy_words, ours, torch_normal, torch_words, vllm_ops
from .bench import Bench
from .marlin_matmul import GROUP, ROWS, size_of


def benches() -> Iterator[Bench]:
    for M in ROWS:
        yield product(M, 8192, 8192)
    yield values(8192, 8192)


def product(M: int, N: int, K: int) -> Bench:
    def make():
        scales, zeros = cupy_normal(K // GROUP, N, dtype="float16"), cupy_words(K // GROUP, N // 8)
        arguments = cupy_normal(M, K, dtype="float16"), cupy_words(K, N // 8), scales, zeros
        return arguments, {}, cupy_empty(M, N, dtype="float16")

    def vllm():
        call = vllm_ops().awq_gemm
        scales, zeros = torch_normal(K // GROUP, N, dtype="float16"), torch_words(K // GROUP, N // 8)
        a, words = torch_normal(M, K, dtype="float16"), torch_words(K, N // 8)
        return lambda: call(a, words, scales, zeros, 8)

    moved, unit = size_of(M, N, K, 4), "bfloat16 tensor cores"
    return Bench("awq", f"awq {M}x{N}x{K}", ours("awq_gemm", make), {"vllm": vllm}, moved, 2 * M * N * K, unit)


def values(N: int, K: int) -> Bench:
    def make():
        scales, zeros = cupy_normal(K // GROUP, N, dtype="float16"), cupy_words(K // GROUP, N // 8)
        return (cupy_words(K, N // 8), scales, zeros), {}, cupy_empty(K, N, dtype="float16")

    def vllm():
        call = vllm_ops().awq_dequantize
        scales, zeros = torch_normal(K // GROUP, N, dtype="float16"), torch_words(K // GROUP, N // 8)
        words = torch_words(K, N // 8)
        return lambda: call(words, scales, zeros, 0, 0, 0)

    moved = N * K // 2 + 2 * N * K
    return Bench("awq", f"awq values {K}x{N}", ours("awq_dequantize", make), {"vllm": vllm}, moved)
