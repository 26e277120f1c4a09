"""Sums, casts and the embedding gather."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours, torch_normal
from .bench import HIDDEN, TOKENS, VOCABULARY, Bench


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield add(T)
        yield cast_bf16(T)
        yield embedding(T)


def add(T: int, H: int = HIDDEN) -> Bench:
    def torch():
        import torch

        a, b, out = torch_normal(T, H), torch_normal(T, H), torch_normal(T, H)
        return lambda: torch.add(a, b, out=out)

    make = ours("add", lambda: ((cupy_normal(T, H), cupy_normal(T, H)), {}, cupy_empty(T, H)))
    return Bench("elementwise", f"add {T}x{H}", make, {"torch": torch}, 6 * T * H, T * H)


def cast_bf16(T: int, H: int = HIDDEN) -> Bench:
    def torch():
        x, out = torch_normal(T, H, dtype="float32"), torch_normal(T, H)
        return lambda: out.copy_(x)

    make = ours("cast_bf16", lambda: ((cupy_normal(T, H, dtype=F32),), {}, cupy_empty(T, H)))
    return Bench("elementwise", f"cast_bf16 {T}x{H}", make, {"torch": torch}, 6 * T * H)


def embedding(T: int, H: int = HIDDEN, V: int = VOCABULARY) -> Bench:
    def torch():
        import torch

        table, ids = torch_normal(V, H), torch.arange(T, device="cuda") * 97 % V
        return lambda: torch.nn.functional.embedding(ids, table)

    def make():
        import cupy

        return (cupy_normal(V, H), cupy.arange(T, dtype=cupy.int64) * 97 % V), {}, cupy_empty(T, H)

    return Bench("elementwise", f"embedding {T}x{H}", ours("embedding", make), {"torch": torch}, 4 * T * H)
