"""Cutting a merged projection into tensors of their own."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_normal, ours, torch_normal
from .bench import TOKENS, Bench

SIZES = (64 * 128, 8 * 128, 8 * 128)


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield qkv_split(T)


def qkv_split(T: int) -> Bench:
    def torch():
        if T == 1:
            raise NotImplementedError("its parts are contiguous views there: nothing moves")
        x = torch_normal(T, sum(SIZES))
        return lambda: [part.contiguous() for part in x.split(SIZES, -1)]

    def make():
        sizes = dict(zip(("q_size", "k_size", "v_size"), SIZES))
        return (cupy_normal(T, sum(SIZES)),), sizes, tuple(cupy_empty(T, size) for size in SIZES)

    return Bench("splits", f"qkv_split {T}x{sum(SIZES)}", ours("qkv_split", make), {"torch": torch}, 4 * T * sum(SIZES))
