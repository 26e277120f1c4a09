"""W4A8's weights made ready for its products, beside vLLM's CUTLASS preparation."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_words, ours, vllm_ops
from .bench import Bench
from .fp8_matmul import U8


def benches() -> Iterator[Bench]:
    yield encode(8192, 8192)
    yield tables(8192, 8192)


def encode(N: int, K: int) -> Bench:
    def make():
        return (cupy_words(K // 8, N),), {}, cupy_empty(K // 8, N, dtype="int32")

    # No peer: vLLM's op cannot be captured into a graph, and after the capture that it breaks torch captures no other
    # peer of the process.
    name = f"cutlass_encode_and_reorder_int4b {K}x{N}"
    return Bench("w4a8", name, ours("cutlass_encode_and_reorder_int4b", make), {}, N * K)


def tables(N: int, K: int) -> Bench:
    shape = K // 128, N

    def make():
        import cupy

        codes = cupy.random.default_rng(2).integers(0x20, 0x60, shape, dtype=cupy.int32).astype(cupy.uint8)
        return (codes,), {}, cupy_empty(*shape, 8, dtype=U8)

    def vllm():
        import torch

        call = vllm_ops().cutlass_pack_scale_fp8
        codes = torch.randint(0x20, 0x60, shape, device="cuda").to(torch.uint8).view(torch.float8_e4m3fn)
        return lambda: call(codes)

    name = f"cutlass_pack_scale_fp8 {shape[0]}x{N}"
    return Bench("w4a8", name, ours("cutlass_pack_scale_fp8", make), {"vllm": vllm}, 9 * shape[0] * N)
