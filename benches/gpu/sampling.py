"""Arg-max, probabilities, log-probabilities and the 20 largest of them over whole vocabularies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, ours
from .bench import VOCABULARY, Bench
from .logits import ROWS, cupy_logits, torch_logits


def benches() -> Iterator[Bench]:
    for R in ROWS:
        yield argmax(R)
        yield softmax(R, "compute_probs", "softmax")
        yield softmax(R, "compute_logprobs", "log_softmax")
        yield gather(R)


def argmax(R: int, V: int = VOCABULARY) -> Bench:
    def torch():
        import torch

        logits = torch_logits(R)
        return lambda: torch.argmax(logits, dim=-1)

    make = ours("greedy_argmax", lambda: ((cupy_logits(R),), {}, cupy_empty(R, dtype=np.int64)))
    return Bench("sampling", f"greedy_argmax {R}x{V}", make, {"torch": torch}, 4 * R * V)


def softmax(R: int, op: str, function: str, V: int = VOCABULARY) -> Bench:
    def torch():
        import torch

        logits = torch_logits(R)
        return lambda: getattr(torch, function)(logits, dim=-1)

    def flashinfer():
        from flashinfer import sampling

        if op != "compute_probs":
            raise NotImplementedError
        logits = torch_logits(R)
        return lambda: sampling.softmax(logits)

    make = ours(op, lambda: ((cupy_logits(R),), {}, cupy_empty(R, V, dtype=F32)))
    return Bench("sampling", f"{op} {R}x{V}", make, {"torch": torch, "flashinfer": flashinfer}, 8 * R * V)


def gather(R: int, n: int = 20, V: int = VOCABULARY) -> Bench:
    """Beside torch's top-k and count, as vLLM gathers them."""

    def torch():
        import torch

        logprobs = torch.log_softmax(torch_logits(R), dim=-1)
        ids = torch.arange(R, device="cuda")[:, None]

        def call():
            chosen = logprobs.gather(-1, ids)
            values, indices = torch.topk(logprobs, n, dim=-1)
            return torch.cat([ids, indices], -1), torch.cat([chosen, values], -1), (logprobs >= chosen).sum(-1)

        return call

    def operands():
        import cupy

        outs = (cupy_empty(R, n + 1, dtype=np.int32), cupy_empty(R, n + 1, dtype=F32), cupy_empty(R, dtype=np.int64))
        return (cupy_logits(R), n, cupy.arange(R)), {}, outs

    make = ours("gather_logprobs", operands)
    return Bench("sampling", f"gather_logprobs {n} of {R}x{V}", make, {"torch": torch}, 4 * R * V)
