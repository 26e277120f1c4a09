"""Packing and unpacking of codes of 4 bits, once a weight."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_words, ours
from .bench import Bench

_N = _K = 8192


def benches() -> Iterator[Bench]:
    for op, form, packed in (
        ("gptq_pack", (_K, _N), (_K // 8, _N)), ("awq_pack", (_K, _N), (_K, _N // 8)),
        ("gptq_unpack", (_K // 8, _N), (_K, _N)), ("awq_unpack", (_K, _N // 8), (_K, _N)),
    ):  # fmt: skip
        yield move(op, form, packed)


def move(op: str, form: tuple[int, int], packed: tuple[int, int]) -> Bench:
    def make():
        words = cupy_words(*form)
        return (words & 15 if op.endswith("_pack") else words,), {"bits": 4}, cupy_empty(*packed, dtype="int32")

    return Bench("wna16", f"{op} {_K}x{_N}", ours(op, make), {}, 4 * _N * _K + _N * _K // 2)
