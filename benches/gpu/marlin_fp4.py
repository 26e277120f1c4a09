"""Products with NVFP4 and MXFP4 weights in Marlin's tiles, beside vLLM's Marlin and the dense product in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import (
    BF16,
    F32,
    cupy_empty,
    cupy_normal,
    cupy_words,
    ours,
    torch_empty,
    torch_normal,
    torch_words,
    vllm_ops,
)
from .bench import HIDDEN, INTERMEDIATE, Bench

U8 = np.dtype(np.uint8)
ROWS = (1, 16, 64, 256)
SQUARE = 8192


def benches() -> Iterator[Bench]:
    for M in ROWS:
        yield product(M, SQUARE, SQUARE, "nvfp4")
        yield product(M, SQUARE, SQUARE, "mxfp4")
        yield product(M, 2 * INTERMEDIATE, HIDDEN, "nvfp4")
    yield product(16, SQUARE, SQUARE, "nvfp4", "float16")
    yield product(4096, SQUARE, SQUARE, "nvfp4")
    yield scales(SQUARE, SQUARE)


def cupy_bytes(low: int, high: int, *shape: int):
    """Random bytes from `low` to below `high` in CuPy."""
    import cupy

    return cupy.random.randint(low, high, shape, dtype=U8)


def torch_bytes(low: int, high: int, *shape: int):
    """The same in torch."""
    import torch

    return torch.randint(low, high, shape, device="cuda", dtype=torch.uint8)


def size_of(M: int, N: int, K: int, group: int) -> int:
    """Bytes of activations, codes, scales and result."""
    return 2 * M * K + N * K // 2 + N * K // group + 2 * M * N


def dense(M: int, N: int, K: int, kind: str = "bfloat16"):
    """torch's product with weights of 16 bits."""

    def torch():
        import torch

        a, b, out = torch_normal(M, K, dtype=kind), torch_normal(N, K, dtype=kind).t(), torch_empty(M, N, dtype=kind)
        return lambda: torch.matmul(a, b, out=out)

    return torch


def marlin(M: int, N: int, K: int, form: str, kind: str = "bfloat16"):
    """vLLM's Marlin kernel, as its apply_fp4_marlin_linear calls it."""

    def vllm():
        call = vllm_ops().marlin_gemm
        import torch
        from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
        from vllm.scalar_type import scalar_types

        a, words, group = torch_normal(M, K, dtype=kind), torch_words(K // 16, 2 * N), 16 if form == "nvfp4" else 32
        if form == "nvfp4":
            scale, factor = torch_bytes(0xD0, 0xE8, K // group, N).view(torch.float8_e4m3fn), 2.0**110
            given = torch.full((1,), factor if kind == "bfloat16" else 1.0, device="cuda")
        else:
            scale, given = torch_bytes(118, 130, K // group, N).view(torch.float8_e8m0fnu), None
        room, number = marlin_make_workspace_new(a.device), scalar_types.float4_e2m1f.id
        return lambda: call(a, None, words, None, scale, None, given, None, None, None, room, number, M, N, K,
                            True, False, True, False)  # fmt: skip

    return vllm


def product(M: int, N: int, K: int, form: str, kind: str = "bfloat16") -> Bench:
    group = 16 if form == "nvfp4" else 32

    def make():
        import cupy

        dtype = BF16 if kind == "bfloat16" else np.dtype(kind)
        a, words = cupy_normal(M, K, dtype=dtype), cupy_words(K // 16, 2 * N)
        if form == "nvfp4":
            scale, factor = cupy_bytes(0xD0, 0xE8, K // group, N), 2.0**110
            more = {"weight_global_scale": cupy.full(1, factor if kind == "bfloat16" else 1.0, F32)}
        else:
            scale, more = cupy_bytes(118, 130, K // group, N), {}
        return (a, words, scale), more, cupy_empty(M, N, dtype=dtype)

    name = f"marlin {form} {kind} {M}x{N}x{K}"
    peers = {"vllm": marlin(M, N, K, form, kind), "torch": dense(M, N, K, kind)}
    moved, unit = size_of(M, N, K, group), "bfloat16 tensor cores"
    call = ours("apply_fp4_marlin_linear", make)
    return Bench("marlin_fp4", name, call, peers, moved, 2 * M * N * K, unit)


def scales(N: int, K: int) -> Bench:
    """What a weight's scales become, once."""

    def make():
        given = (abs(cupy_normal(K // 16, N, dtype=F32)) * 10).astype("float16")
        return (given,), {}, (cupy_empty(K // 16, N, dtype=U8), cupy_empty(1, dtype=F32))

    call = ours("nvfp4_marlin_process_scales", make)
    return Bench("marlin_fp4", f"nvfp4_marlin_process_scales {N}x{K}", call, bytes=3 * N * K // 16)
