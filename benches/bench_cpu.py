"""What the CPU tier makes of a machine: weights against its memory, prompts against its BLAS, calls of small ops.

python -m vtlab.benches.bench_cpu [TOKENS …]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from vtlab import ops
from vtlab.device.cpu import threads
from vtlab.device.cpu.tier import tier

from .peer import normal

LAYERS = {
    "SmolLM2-135M": {
        "qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576),
    },
    "Gemma-3-270m": {
        "qkv": (1536, 640), "o": (640, 1024), "gate_up": (4096, 640), "down": (640, 2048), "head": (262144, 640),
    },
}  # fmt: skip
"""[N, K] of the weights of a layer, and the head's."""


def seconds(call: Callable[[], object], tries: int = 40, most: float = 1.0) -> float:
    """The shortest of several runs, for at most about `most` seconds."""
    call()
    best, end = float("inf"), time.perf_counter() + most
    for _ in range(tries):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return best


def reading() -> float:
    """Bytes a second of NumPy's sum over float32 that no cache holds, by one thread."""
    far = np.ones(1 << 26, np.float32)
    return far.nbytes / seconds(lambda: far.sum(), 5)


def weights(tokens: int) -> Iterator[tuple]:
    """(model, weight, dtype, seconds, GB/s of the weights, GFLOP/s, GFLOP/s of NumPy's BLAS in float32)."""
    for model, shapes in LAYERS.items():
        for name, (N, K) in shapes.items():
            for dtype in (np.float32, ml_dtypes.bfloat16):
                a, b = normal(tokens, K, dtype=dtype), normal(N, K, dtype=dtype, seed=1)
                took, flops = seconds(lambda a=a, b=b: ops.matmul_bt(a, b)), 2 * tokens * N * K
                blas = flops / seconds(lambda a=a, b=b: a @ b.T) / 1e9 if dtype is np.float32 else float("nan")
                yield model, name, np.dtype(dtype).name, took, b.nbytes / took / 1e9, flops / took / 1e9, blas


def calls() -> Iterator[tuple[str, float]]:
    """Seconds of one call of each small op of a decode step, whose arrays are in the caches."""
    x, w, table = normal(1, 640), normal(640, seed=1), normal(64, 256, dtype=np.float32)
    q, k = normal(1, 4, 256), normal(1, 1, 256, seed=1)
    cache = [normal(64, 16, 1, 256, seed=seed) for seed in (2, 3)]
    at, pages = np.array([37]), np.arange(64, dtype=np.int32)[None]
    lengths, starts = np.array([38], np.int32), np.array([0, 1], np.int32)
    qkv, gate_up = normal(1, 1536), normal(1, 4096)
    for name, call in {
        "embedding": lambda: ops.embedding(table, at),
        "mul_scalar": lambda: ops.mul_scalar(x, 25.25),
        "rms_norm": lambda: ops.rms_norm(x, w),
        "rms_norm with residual": lambda: ops.rms_norm(x, w, residual=x, rounding="vllm"),
        "qkv_split": lambda: ops.qkv_split(qkv, q_size=1024, k_size=256, v_size=256),
        "rope_and_cache": lambda: ops.rope_and_cache(q, k, k, at, table, *cache, at),
        "paged_attention, 38 keys": lambda: ops.paged_attention(q, *cache, pages, lengths, starts, scale=0.0625),
        "gelu_and_mul": lambda: ops.gelu_and_mul(gate_up, rounding="vllm"),
    }.items():
        yield name, seconds(call, 2000)


def main(tokens: list[int]) -> None:
    print(f"{tier()}, {threads.threads()} threads; memory {reading() / 1e9:.1f} GB/s (one thread)")
    for name, took in calls():
        print(f"  {name:28s} {took * 1e6:8.1f} us")
    for count in tokens:
        print(f"{count} tokens")
        for model, name, dtype, took, rate, flops, blas in weights(count):
            print(
                f"  {model:14s} {name:8s} {dtype:9s} {took * 1e6:9.0f} us {rate:6.1f} GB/s {flops:7.1f} GFLOP/s"
                + (f"  BLAS {blas:7.1f}" if blas == blas else "")
            )


def test_bench_cpu(benchmark):
    """A decode step's largest weight of a layer."""
    a, b = normal(1, 640), normal(4096, 640, seed=1)
    benchmark.group = "matmul_bt 1x4096x640 bf16"
    benchmark(lambda: ops.matmul_bt(a, b))


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [1, 128])
