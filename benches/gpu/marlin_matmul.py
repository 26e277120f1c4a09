"""Products with weights in Marlin's layouts, groups of 128, beside vLLM's Marlin: a decode step to a prompt."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import BF16, cupy_empty, cupy_normal, cupy_words, ours, torch_normal, torch_words, vllm_ops
from .bench import HIDDEN, INTERMEDIATE, Bench

ROWS = (1, 16, 64, 256)
GROUP = 128


def benches() -> Iterator[Bench]:
    for M in ROWS:
        for kind in ("bfloat16", "float16"):
            yield product(M, 8192, 8192, "uint4b8", kind)
        yield product(M, 8192, 8192, "uint8b128")
        yield product(M, 2 * INTERMEDIATE, HIDDEN, "uint4b8")
        yield product(M, 4096, 4096, "uint4b8")
    yield product(4096, 8192, 8192, "uint4b8")


def size_of(M: int, N: int, K: int, bits: int) -> int:
    """Bytes of activations, packed weights, scales and result."""
    return 2 * M * K + N * K * bits // 8 + 2 * N * K // GROUP + 2 * M * N


def product(M: int, N: int, K: int, quant_type: str, kind: str = "bfloat16") -> Bench:
    bits = 8 if quant_type.startswith("uint8") else 4

    def make():
        dtype = BF16 if kind == "bfloat16" else "float16"
        a, scales = (cupy_normal(rows, n, dtype=dtype) for rows, n in ((M, K), (K // GROUP, N)))
        arguments = a, cupy_words(K // 16, N * bits // 2), scales
        return arguments, {"quant_type": quant_type}, cupy_empty(M, N, dtype=dtype)

    def vllm():
        call = vllm_ops().marlin_gemm
        from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
        from vllm.scalar_type import scalar_types

        a, scales = torch_normal(M, K, dtype=kind), torch_normal(K // GROUP, N, dtype=kind)
        words, room = torch_words(K // 16, N * bits // 2), marlin_make_workspace_new(a.device)
        number = getattr(scalar_types, quant_type).id
        return lambda: call(a, None, words, None, scales, None, None, None, None, None, room, number, M, N, K,
                            True, False, True, False)  # fmt: skip

    name = f"marlin {quant_type} {kind} {M}x{N}x{K}"
    moved = size_of(M, N, K, bits)
    unit = "bfloat16 tensor cores"
    return Bench("marlin_matmul", name, ours("marlin_gemm", make), {"vllm": vllm}, moved, 2 * M * N * K, unit)
