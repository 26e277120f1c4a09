"""Dense products: a decode step's rows against the weights of Qwen3 32B, a batch, a prompt; absorbed projections."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import BF16, F32, cupy_empty, cupy_normal, ours, torch_empty, torch_normal
from .bench import HIDDEN, INTERMEDIATE, VOCABULARY, Bench

_WEIGHTS = ((HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE), (1024, HIDDEN), (VOCABULARY, HIDDEN))


def benches() -> Iterator[Bench]:
    for N, K in _WEIGHTS:
        for M in (1, 2, 4, 8):
            yield linear(M, N, K)
    for M in (1, 16, 64, 256, 2048):
        yield linear(M, 8192, 8192)
    yield linear(8192, HIDDEN, HIDDEN)
    yield linear(1, 128, HIDDEN, "float32")
    yield linear(1024, 2048, 2048, "float32")
    for M in (1, 16, 256):
        yield turned(M, HIDDEN, HIDDEN)
        yield batched(128, M, 512, 128)


def _bytes(batches: int, M: int, N: int, K: int, item: int) -> int:
    return batches * (M * K + N * K + M * N) * item


def linear(M: int, N: int, K: int, kind: str = "bfloat16") -> Bench:
    """Rows against rows of weights, torch's Linear."""
    dtype = BF16 if kind == "bfloat16" else F32

    def torch():
        import torch

        a, b, out = torch_normal(M, K, dtype=kind), torch_normal(N, K, dtype=kind), torch_empty(M, N, dtype=kind)
        return lambda: torch.matmul(a, b.T, out=out)

    make = ours("matmul_bt", lambda: ((cupy_normal(M, K, dtype=dtype), cupy_normal(N, K, dtype=dtype)), {},
                                      cupy_empty(M, N, dtype=dtype)))  # fmt: skip
    moved = _bytes(1, M, N, K, dtype.itemsize)
    return Bench("matmul", f"matmul_bt {kind} {M}x{N}x{K}", make, {"torch": torch}, moved, 2 * M * N * K)


def turned(M: int, N: int, K: int) -> Bench:
    """Weights as [K, N]."""

    def torch():
        import torch

        a, b, out = torch_normal(M, K), torch_normal(K, N), torch_empty(M, N)
        return lambda: torch.matmul(a, b, out=out)

    make = ours("matmul", lambda: ((cupy_normal(M, K), cupy_normal(K, N)), {}, cupy_empty(M, N)))
    return Bench("matmul", f"matmul {M}x{N}x{K}", make, {"torch": torch}, _bytes(1, M, N, K, 2), 2 * M * N * K)


def batched(G: int, M: int, N: int, K: int) -> Bench:
    """The absorbed projection of latent attention, heads as batches."""

    def torch():
        import torch

        a, b, out = torch_normal(G, M, K), torch_normal(G, K, N), torch_empty(G, M, N)
        return lambda: torch.bmm(a, b, out=out)

    make = ours("batched_matmul", lambda: ((cupy_normal(G, M, K), cupy_normal(G, K, N)), {}, cupy_empty(G, M, N)))
    flops = 2 * G * M * N * K
    return Bench("matmul", f"batched_matmul {G}x{M}x{N}x{K}", make, {"torch": torch}, _bytes(G, M, N, K, 2), flops)
