"""Products with AllSpark's weights of 8 bits, a scale a column, beside vLLM's AllSpark (sm_80 to sm_89); packing."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_normal, cupy_words, ours, torch_normal, torch_words, vllm_ops
from .bench import Bench
from .fp8_matmul import U8
from .marlin_matmul import ROWS

_MOST_ROWS = 1024
"""Rows up to which vLLM multiplies packed weights; beyond them it unpacks them and calls cuBLAS."""


def benches() -> Iterator[Bench]:
    for M in ROWS:
        yield product(M, 8192, 8192)
    yield repack(8192, 8192)


def served():
    """vLLM's ops where they have AllSpark's kernels."""
    import torch

    if torch.cuda.get_device_capability()[0] != 8:
        raise NotImplementedError("AllSpark's kernels run on sm_80 to sm_89")
    return vllm_ops()


def product(M: int, N: int, K: int) -> Bench:
    def make():
        words = cupy_words(N, K // 4).view(U8)
        return (cupy_normal(M, K), words, cupy_normal(1, N)), {"n": N}, cupy_empty(M, N)

    def vllm():
        call = served().allspark_w8a16_gemm
        import torch

        facts = torch.cuda.get_device_properties(0)
        count, version = facts.multi_processor_count, 10 * facts.major + facts.minor
        a, words, scales = torch_normal(M, K), torch_words(N, K // 4).view(torch.uint8), torch_normal(1, N)
        return lambda: call(a, words, scales, None, N, -1, count, version, _MOST_ROWS, False, True)

    moved, unit = 2 * M * K + 2 * M * N + N * K, "bfloat16 tensor cores"
    name = f"allspark_w8a16_gemm {M}x{N}x{K}"
    return Bench("allspark", name, ours("allspark_w8a16_gemm", make), {"vllm": vllm}, moved, 2 * M * N * K, unit)


def repack(N: int, K: int) -> Bench:
    def make():
        out = cupy_empty(N, K, dtype=U8), cupy_empty(1, N)
        return (cupy_words(K, N // 4).view(U8), cupy_normal(1, N)), {}, out

    name = f"allspark_repack_weight {K}x{N}"
    return Bench("allspark", name, ours("allspark_repack_weight", make), {}, 2 * N * K)
