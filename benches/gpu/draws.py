"""Seeded draws over whole vocabularies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, ours
from .bench import VOCABULARY, Bench
from .logits import ROWS, cupy_logits, full, torch_logits


def benches() -> Iterator[Bench]:
    for R in ROWS:
        yield race(R)
        yield gumbel(R)


def race(R: int, V: int = VOCABULARY) -> Bench:
    """Beside vLLM's draw in torch, and FlashInfer's, which need not give the same tokens."""

    def torch():
        import torch

        probs = torch.softmax(torch_logits(R), dim=-1)
        noise = torch.empty_like(probs)
        return lambda: probs.div(noise.exponential_()).argmax(dim=-1)

    def flashinfer():
        import torch
        from flashinfer import sampling

        probs = torch.softmax(torch_logits(R), dim=-1)
        return lambda: sampling.sampling_from_probs(probs)

    def operands():
        import cupy

        from vtlab import ops

        return (ops.compute_probs(cupy_logits(R)), cupy.arange(R)), {}, cupy_empty(R, dtype=np.int64)

    peers = {"torch": torch, "flashinfer": flashinfer}
    return Bench("draws", f"random_sample {R}x{V}", ours("random_sample", operands), peers, 4 * R * V)


def gumbel(R: int, V: int = VOCABULARY) -> Bench:
    def vllm():
        import torch
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        logits, rows = torch_logits(R), torch.arange(R, device="cuda", dtype=torch.int32)
        temperature = torch.full((R,), 0.7, device="cuda")
        return lambda: gumbel_sample(logits, rows, temperature, rows.long(), rows.long(), True)

    def operands():
        import cupy

        rows = cupy.arange(R)
        args = (cupy_logits(R), rows.astype(np.int32), full(R, 0.7, F32), rows, rows)
        return args, {}, cupy_empty(R, dtype=np.int64)

    return Bench("draws", f"gumbel_sample {R}x{V}", ours("gumbel_sample", operands), {"vllm": vllm}, 4 * R * V)
