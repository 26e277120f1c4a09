"""Packing and unpacking of codes of 4 bits, and the reference quantiser: once a weight."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_normal, cupy_words, ours, torch_normal
from .bench import Bench

_N = _K = 8192


def benches() -> Iterator[Bench]:
    for op, form, packed in (
        ("gptq_pack", (_K, _N), (_K // 8, _N)), ("awq_pack", (_K, _N), (_K, _N // 8)),
        ("gptq_unpack", (_K // 8, _N), (_K, _N)), ("awq_unpack", (_K, _N // 8), (_K, _N)),
    ):  # fmt: skip
        yield move(op, form, packed)
    for quant_type in ("uint4b8", "uint4"):
        yield quantise(quant_type)


def quantise(quant_type: str, group: int = 128) -> Bench:
    biased = quant_type == "uint4b8"

    def make():
        scales, zeros = cupy_empty(_K // group, _N), () if biased else (cupy_empty(_K // group, _N, dtype="int32"),)
        out = cupy_empty(_K, _N), cupy_empty(_K, _N, dtype="int32"), scales, *zeros
        return (cupy_normal(_K, _N),), {"quant_type": quant_type, "group_size": group}, out

    def vllm():
        from vllm.model_executor.layers.quantization.utils.quant_utils import quantize_weights
        from vllm.scalar_type import scalar_types

        w, kind = torch_normal(_K, _N), getattr(scalar_types, quant_type)
        return lambda: quantize_weights(w, kind, group, zero_points=not biased)

    return Bench("wna16", f"quantize_weights {quant_type} {_K}x{_N}", ours("quantize_weights", make), {"vllm": vllm},
                 8 * _N * _K, 12 * _N * _K)  # fmt: skip


def move(op: str, form: tuple[int, int], packed: tuple[int, int]) -> Bench:
    def make():
        words = cupy_words(*form)
        return (words & 15 if op.endswith("_pack") else words,), {"bits": 4}, cupy_empty(*packed, dtype="int32")

    return Bench("wna16", f"{op} {_K}x{_N}", ours(op, make), {}, 4 * _N * _K + _N * _K // 2)
