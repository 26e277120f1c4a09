"""8-bit products: a scale a row and a column, e4m3 and int8; decode steps, batches, prompts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import BF16, F32, cupy_empty, ours, torch_empty, vllm_ops
from .bench import HIDDEN, Bench

U8 = np.dtype(np.uint8)
SQUARE = 8192


def benches() -> Iterator[Bench]:
    for M in (1, 16, 64, 128, 256, 2048, 8192):
        yield scaled(M, SQUARE, SQUARE)
    yield scaled(16, HIDDEN, HIDDEN)
    for M in (1, 256, 8192):
        yield scaled(M, SQUARE, SQUARE, "int8")
    yield scaled(256, 1024, 2048, out="float16")


def cupy_codes(*shape: int, kind: str = "e4m3"):
    """Random finite codes: both signs and every size of e4m3 up to 16, or any int8."""
    import cupy

    random = cupy.random.default_rng(0)
    if kind == "int8":
        return random.integers(-127, 128, shape, dtype=cupy.int32).astype(cupy.int8)
    sizes = random.integers(0, 0x59, shape, dtype=cupy.int32)
    return (sizes | random.integers(0, 2, shape, dtype=cupy.int32) << 7).astype(cupy.uint8)


def torch_codes(*shape: int, kind: str = "e4m3"):
    """The same in torch."""
    import torch

    if kind == "int8":
        return torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8)
    codes = torch.randint(0, 0x59, shape, device="cuda") | torch.randint(0, 2, shape, device="cuda") << 7
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def cupy_scales(*shape: int):
    """Positive scales in CuPy."""
    import cupy

    return cupy.random.default_rng(1).random(shape, dtype=F32) * 0.04 + 0.01


def torch_scales(*shape: int):
    """The same in torch."""
    import torch

    return torch.rand(shape, device="cuda") * 0.04 + 0.01


def scaled(M: int, N: int, K: int, kind: str = "e4m3", out: str = "bfloat16") -> Bench:
    def make():
        operands = cupy_codes(M, K, kind=kind), cupy_codes(N, K, kind=kind).T
        target = cupy_empty(M, N, dtype=BF16 if out == "bfloat16" else np.dtype(out))
        return (*operands, cupy_scales(M, 1), cupy_scales(1, N)), {"out_dtype": target.dtype}, target

    def torch():
        import torch

        a, b, sa, sb = torch_codes(M, K), torch_codes(N, K).t(), torch_scales(M, 1), torch_scales(1, N)
        target = torch_empty(M, N, dtype=out)
        dtype = target.dtype
        return lambda: torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=dtype, out=target)

    def vllm():
        call = vllm_ops().cutlass_scaled_mm
        a, b = torch_codes(M, K, kind=kind), torch_codes(N, K, kind=kind).t()
        sa, sb, target = torch_scales(M, 1), torch_scales(1, N), torch_empty(M, N, dtype=out)
        return lambda: call(target, a, b, sa, sb, None)

    peers = {"vllm": vllm} | ({"torch": torch} if kind == "e4m3" and out == "bfloat16" else {})
    name = f"cutlass_scaled_mm {kind} {M}x{N}x{K}{'' if out == 'bfloat16' else f' to {out}'}"
    return Bench("fp8_matmul", name, ours("cutlass_scaled_mm", make), peers, M * K + N * K + 2 * M * N, 2 * M * N * K)
