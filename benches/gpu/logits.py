"""Penalties, temperature, min-p, top-k and top-p over whole vocabularies."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_normal
from .bench import VOCABULARY, Bench

ROWS = (1, 16, 32, 64)
K, P = 50, 0.9
SPREAD = 3.0
"""Standard deviation of the logits: what top-k and top-p keep, and so what they cost, hangs on it."""


def benches() -> Iterator[Bench]:
    for R in ROWS:
        yield temperature(R)
        yield penalties(R)
        yield min_p(R)
        yield truncation(R, K, None)
        yield truncation(R, None, P)
        yield truncation(R, K, P)


def cupy_logits(R: int, V: int = VOCABULARY):
    return cupy_normal(R, V, dtype=F32) * F32.type(SPREAD)


def torch_logits(R: int, V: int = VOCABULARY):
    return torch_normal(R, V, dtype="float32") * SPREAD


def full(R: int, value, dtype):
    """One number for each row, in CuPy."""
    import cupy

    return cupy.full(R, value, dtype)


def temperature(R: int, V: int = VOCABULARY) -> Bench:
    def torch():
        import torch

        logits, t = torch_logits(R), torch.full((R, 1), 0.7, device="cuda")
        out = torch.empty_like(logits)
        return lambda: torch.div(logits, t, out=out)

    make = ours("apply_temperature", lambda: ((cupy_logits(R), full(R, 0.7, F32)), {}, cupy_empty(R, V, dtype=F32)))
    return Bench("logits", f"apply_temperature {R}x{V}", make, {"torch": torch}, 8 * R * V, R * V)


def penalties(R: int, V: int = VOCABULARY) -> Bench:
    def torch():
        import torch

        logits = torch_logits(R)
        prompt, output = (torch.zeros(R, V, dtype=torch.bool, device="cuda") for _ in range(2))
        counts = torch.zeros(R, V, dtype=torch.int32, device="cuda")
        f, p, r = (torch.full((R, 1), value, device="cuda") for value in (0.3, 0.2, 1.3))

        def call():
            scale = torch.where(prompt | output, r, torch.ones_like(r))
            scaled = torch.where(logits > 0, logits / scale, logits * scale)
            return scaled - f * counts - p * output

        return call

    def operands():
        import cupy

        prompt, output = (cupy.zeros((R, V), cupy.int8) for _ in range(2))
        values = [full(R, value, F32) for value in (0.3, 0.2, 1.3)]
        counts = cupy.zeros((R, V), cupy.int32)
        return (cupy_logits(R), prompt, counts, output, *values), {}, cupy_empty(R, V, dtype=F32)

    name = f"apply_penalties {R}x{V}"
    return Bench("logits", name, ours("apply_penalties", operands), {"torch": torch}, 14 * R * V, 5 * R * V)


def min_p(R: int, V: int = VOCABULARY) -> Bench:
    def torch():
        import torch

        logits, least = torch_logits(R), torch.full((R, 1), 0.05, device="cuda")

        def call():
            probs = torch.softmax(logits, dim=-1)
            return logits.masked_fill(probs < probs.amax(dim=-1, keepdim=True) * least, -float("inf"))

        return call

    make = ours("apply_min_p", lambda: ((cupy_logits(R), full(R, 0.05, F32)), {}, cupy_empty(R, V, dtype=F32)))
    return Bench("logits", f"apply_min_p {R}x{V}", make, {"torch": torch}, 8 * R * V)


def truncation(R: int, k: int | None, p: float | None, V: int = VOCABULARY) -> Bench:
    """Beside vLLM's own function, by sort below 8 rows and in Triton from there, and FlashInfer's renormalisation."""

    def vllm():
        import torch
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        logits = torch_logits(R)
        ks = None if k is None else torch.full((R,), k, device="cuda", dtype=torch.int32)
        ps = None if p is None else torch.full((R,), p, device="cuda")
        return lambda: apply_top_k_top_p(logits, ks, ps)

    def flashinfer():
        import torch
        from flashinfer import sampling

        logits = torch_logits(R)
        if p is None:
            return lambda: sampling.top_k_mask_logits(logits, k)
        probs = torch.softmax(logits, dim=-1)
        if k is None:
            return lambda: sampling.top_p_renorm_probs(probs, p)
        return lambda: sampling.top_p_renorm_probs(sampling.top_k_renorm_probs(probs, k), p)

    def operands():
        import numpy as np

        ks = None if k is None else full(R, k, np.int32)
        ps = None if p is None else full(R, p, F32)
        return (cupy_logits(R), ks, ps), {}, cupy_empty(R, V, dtype=F32)

    peers = {"vllm": vllm, "flashinfer": flashinfer}
    return Bench("logits", f"top_k {k} top_p {p} {R}x{V}", ours("apply_top_k_top_p", operands), peers, 8 * R * V)
