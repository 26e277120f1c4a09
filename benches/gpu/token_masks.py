"""Masks and biases over whole vocabularies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import F32, cupy_empty, cupy_normal, ours
from .bench import VOCABULARY, Bench
from .logits import ROWS, cupy_logits, torch_logits

PAIRS = 300
"""Biased tokens in a call."""


def benches() -> Iterator[Bench]:
    for R in ROWS:
        yield allowed(R)
        yield bias(R)


def allowed(R: int, V: int = VOCABULARY) -> Bench:
    def torch():
        import torch

        logits, mask = torch_logits(R), torch.zeros(R, V, dtype=torch.bool, device="cuda")
        return lambda: logits.masked_fill(mask, -float("inf"))

    def operands():
        import cupy

        return (cupy_logits(R), cupy.zeros((R, V), cupy.int8)), {}, cupy_empty(R, V, dtype=F32)

    make = ours("apply_allowed_token_ids", operands)
    return Bench("token_masks", f"apply_allowed_token_ids {R}x{V}", make, {"torch": torch}, 9 * R * V)


def bias(R: int, m: int = PAIRS, V: int = VOCABULARY) -> Bench:
    def torch():
        import torch

        logits, at = torch_logits(R), torch.arange(m, device="cuda")
        rows, columns, values = at % R, at * 101 % V, torch.ones(m, device="cuda")
        return lambda: logits.index_put((rows, columns), values, accumulate=True)

    def operands():
        import cupy

        at = cupy.arange(m)
        pairs = [index.astype(np.int32) for index in (at % R, at * 101 % V)]
        return (cupy_logits(R), *pairs, cupy_normal(m, dtype=F32)), {}, cupy_empty(R, V, dtype=F32)

    make = ours("apply_logit_bias", operands)
    return Bench("token_masks", f"apply_logit_bias {m} of {R}x{V}", make, {"torch": torch}, 8 * R * V)
