"""Products with weights in GGML blocks, beside a bfloat16 product of the same size; bytes are the packed weight's."""

from __future__ import annotations

from collections.abc import Iterator

from vtlab.ops.blocks import WEIGHT_TYPES, row_size_bytes

from .arrays import cupy_empty, cupy_normal, ours, torch_normal
from .bench import Bench
from .ggml import cupy_blocks

ONE_ROW = ((14336, 4096), (4096, 14336), (8192, 8192), (34816, 5120))
"""N and K of a decoder's layers: up, down, square, and the two projections of an up layer as one."""
OFTEN = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")


def benches() -> Iterator[Bench]:
    for kind in WEIGHT_TYPES:
        for columns, depth in ONE_ROW:
            yield product(kind, 1, columns, depth)
        for rows in (4, 16, 64, 512) if kind in OFTEN else (16, 512):
            yield product(kind, rows, 14336, 4096)
    yield product("Q6_K", 1, 151936, 4096)


def product(kind: str, M: int, N: int, K: int) -> Bench:
    def make():
        given = {"quant_type": kind, "out_dtype": "bfloat16"}
        return (cupy_normal(M, K), cupy_blocks(kind, N, K)), given, cupy_empty(M, N)

    def torch_bf16():
        import torch

        a, b = torch_normal(M, K), torch_normal(N, K)
        return lambda: torch.nn.functional.linear(a, b)

    moved = N * row_size_bytes(kind, K) + 2 * M * (N + K)
    return Bench("ggml_matmul", f"{kind} {M}x{N}x{K}", ours("matmul_bt_quant", make), {"torch bf16": torch_bf16}, moved)
