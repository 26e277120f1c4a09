"""Activation order: activations' columns at every step, words and rows once a weight, beside vLLM's kernels."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_normal, cupy_words, ours, torch_normal, torch_words, vllm_ops
from .bench import Bench

_N = _K = 8192


def benches() -> Iterator[Bench]:
    for M in (1, 256, 8192):
        yield columns(M, _K)
    yield shuffle()


def columns(M: int, K: int) -> Bench:
    def make():
        import cupy

        return (cupy_normal(M, K), cupy.random.permutation(K).astype("int32")), {}, cupy_empty(M, K)

    def torch():
        import torch

        x, order = torch_normal(M, K), torch.randperm(K, device="cuda")
        return lambda: torch.index_select(x, 1, order)

    def vllm():
        import torch

        call = vllm_ops().permute_cols
        x, order = torch_normal(M, K), torch.randperm(K, device="cuda").int()
        return lambda: call(x, order)

    peers = {"torch": torch, "vllm": vllm}
    return Bench("act_order", f"permute_cols {M}x{K}", ours("permute_cols", make), peers, 4 * M * K)


def shuffle() -> Bench:
    def make():
        return (cupy_words(_K // 8, _N),), {"bits": 4}, cupy_empty(_K // 8, _N, dtype="int32")

    def vllm():
        import torch

        call, words = vllm_ops().gptq_shuffle, torch_words(_K // 8, _N)
        order = torch.empty(0, device="cuda", dtype=torch.int32)
        return lambda: call(words, order, 4)

    return Bench("act_order", f"gptq_shuffle {_K}x{_N}", ours("gptq_shuffle", make), {"vllm": vllm}, _N * _K)
