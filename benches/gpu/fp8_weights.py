"""FP8 under given scales: a scale a token, a channel or a group of hidden states; shards of a weight under one."""

from __future__ import annotations

from collections.abc import Iterator

from .arrays import cupy_empty, cupy_normal, ours, torch_empty, torch_normal, vllm_ops
from .bench import HIDDEN, TOKENS, Bench
from .kv_quant import cupy_bytes
from .quant_fp8 import U8

SHARDS = 4096, 1024, 1024


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield group(T, "a token", 1, HIDDEN)
        yield group(T, "a channel", T, 1)
        yield group(T, "128 channels", 1, 128)
    yield requantize()


def group(T: int, what: str, rows: int, columns: int, K: int = HIDDEN) -> Bench:
    """A scale for each `rows` x `columns`."""

    def make():
        import cupy

        scale = cupy.random.uniform(0.01, 0.05, (T // rows, K // columns)).astype(cupy.float32)
        return (cupy_normal(T, K), scale), {"rounding": "vllm"}, cupy_empty(T, K, dtype=U8)

    def vllm():
        import torch

        call, x, out = vllm_ops().static_scaled_fp8_quant, torch_normal(T, K), torch_empty(T, K, dtype="float8_e4m3fn")
        scale = torch.rand(T // rows, K // columns, device="cuda") * 0.04 + 0.01
        return lambda: call(out, x, scale, (rows, columns))

    op, size = "scaled_fp8_quant_static_group", 3 * T * K + 4 * (T // rows) * (K // columns)
    return Bench("fp8_weights", f"static, {what} {T}x{K}", ours(op, make), {"vllm": vllm}, size, 2 * T * K)


def requantize(K: int = HIDDEN) -> Bench:
    """Without a peer: vLLM's asks the GPU whether the weight has shards, which a graph cannot capture."""
    N = sum(SHARDS)

    def make():
        import cupy

        scale = cupy.asarray([0.021, 0.034, 0.013], cupy.float32)
        out = cupy_empty(N, K, dtype=U8), cupy.empty(1, cupy.float32)
        return (cupy_bytes(N, K), scale, list(SHARDS)), {}, out

    op = "requantize_with_max_scale"
    return Bench("fp8_weights", f"{op} {N}x{K}", ours(op, make), {}, 2 * N * K)
