"""Products of NVFP4 and MXFP4 from codes in rows: weights alone, and both sides.

No GPU before Blackwell multiplies four bits; there vLLM serves such checkpoints through Marlin, activations of 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import F32, cupy_empty, cupy_normal, ours
from .bench import HIDDEN, INTERMEDIATE, Bench
from .marlin_fp4 import ROWS, SQUARE, cupy_bytes, dense, marlin, size_of


def benches() -> Iterator[Bench]:
    for M in ROWS:
        yield weights_alone(M, SQUARE, SQUARE, "nvfp4")
        yield weights_alone(M, SQUARE, SQUARE, "mxfp4")
        yield both(M, SQUARE, SQUARE, "nvfp4")
        yield both(M, SQUARE, SQUARE, "mxfp4")
        yield both(M, 2 * INTERMEDIATE, HIDDEN, "nvfp4")
    yield both(4096, SQUARE, SQUARE, "nvfp4")
    yield weights_alone(4096, SQUARE, SQUARE, "nvfp4")


def sides(rows: int, K: int, group: int):
    """Codes, and scales in tiles."""
    from vtlab.ops.nvfp4 import tiled_shape

    low, high = (0x28, 0x48) if group == 16 else (120, 134)
    return cupy_bytes(0, 255, rows, K // 2), cupy_bytes(low, high, *tiled_shape(rows, K // group))


def _bench(op: str, make, M: int, N: int, K: int, form: str, moved: int) -> Bench:
    peers = {"vllm": marlin(M, N, K, form), "torch": dense(M, N, K)}
    return Bench(
        "fp4_matmul", f"{op} {M}x{N}x{K}", ours(op, make), peers, moved, 2 * M * N * K, "bfloat16 tensor cores"
    )


def weights_alone(M: int, N: int, K: int, form: str) -> Bench:
    group = 16 if form == "nvfp4" else 32

    def make():
        import cupy

        more = (cupy.full(1, 0.01, F32),) if form == "nvfp4" else ()
        return (cupy_normal(M, K), *sides(N, K, group), *more), {}, cupy_empty(M, N)

    return _bench(f"matmul_{form}", make, M, N, K, form, size_of(M, N, K, group))


def both(M: int, N: int, K: int, form: str) -> Bench:
    op, group = ("cutlass_scaled_fp4_mm", 16) if form == "nvfp4" else ("matmul_mxf4_bf16_tn", 32)

    def make():
        import cupy

        (a, sa), (b, sb) = sides(M, K, group), sides(N, K, group)
        return (a, b, sa, sb, cupy.full(1, 0.01, F32)), {}, cupy_empty(M, N)

    moved = (M + N) * K // 2 + (M + N) * K // group + 2 * M * N
    return _bench(op, make, M, N, K, form, moved)
