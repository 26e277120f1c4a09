"""Repacking into Marlin's order, once a weight, beside vLLM's kernels."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_words, ours, torch_words, vllm_ops
from .bench import Bench

_N = _K = 8192


def benches() -> Iterator[Bench]:
    yield from (gptq(), awq())


def gptq() -> Bench:
    def make():
        return (cupy_words(_K // 8, _N),), {"bits": 4}, cupy_empty(_K // 16, 2 * _N, dtype="int32")

    def vllm():
        import torch

        call, words = vllm_ops().gptq_marlin_repack, torch_words(_K // 8, _N)
        order = torch.empty(0, device="cuda", dtype=torch.int32)
        return lambda: call(words, order, _K, _N, 4, False)

    return Bench("marlin", f"gptq_marlin_repack {_K}x{_N}", ours("gptq_marlin_repack", make), {"vllm": vllm}, _N * _K)


def awq() -> Bench:
    def make():
        return (cupy_words(_K, _N // 8),), {"bits": 4}, cupy_empty(_K // 16, 2 * _N, dtype="int32")

    def vllm():
        call, words = vllm_ops().awq_marlin_repack, torch_words(_K, _N // 8)
        return lambda: call(words, _K, _N, 4, False)

    return Bench("marlin", f"awq_marlin_repack {_K}x{_N}", ours("awq_marlin_repack", make), {"vllm": vllm}, _N * _K)
