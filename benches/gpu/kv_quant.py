"""FP8 in a paged cache: 8 heads of 128 in pages of 16, keys and values side by side as vLLM 0.26 keeps them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import cupy_empty, cupy_normal, ours, torch_empty, torch_normal
from .bench import TOKENS, Bench
from .kv_cache import HEADS, PAGE, WIDTH, blocks_for, cache_ops, cupy_array, slots, torch_array

SCALE = np.full(1, 0.0321, np.float32)


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield write(T)
        yield write(T, "fp8_e5m2")
    for T in TOKENS[1:]:
        yield read(T)


def cupy_bytes(*shape: int):
    """Codes of small finite numbers in CuPy."""
    import cupy

    return cupy.random.randint(0, 0x59, shape, dtype=np.uint8)


def torch_bytes(*shape: int):
    """The same in torch."""
    import torch

    return torch.randint(0, 0x59, shape, device="cuda", dtype=torch.uint8)


def write(T: int, kind: str = "fp8", H: int = HEADS, D: int = WIDTH) -> Bench:
    blocks = blocks_for(T)
    where = slots(T, blocks)

    def make():
        cache, scale = cupy_bytes(blocks, PAGE, H, 2 * D), cupy_array(SCALE)
        arrays = cupy_normal(T, H, D), cupy_normal(T, H, D), cache[..., :D], cache[..., D:]
        return (*arrays, cupy_array(where), scale, scale), {"kind": kind}, None

    def vllm():
        key, value, cache = torch_normal(T, H, D), torch_normal(T, H, D), torch_bytes(blocks, PAGE, H, 2 * D)
        call, at, scale = cache_ops().reshape_and_cache_flash, torch_array(where), torch_array(SCALE)
        return lambda: call(key, value, cache[..., :D], cache[..., D:], at, kind, scale, scale)

    def triton():
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash as call

        key, value, cache = torch_normal(T, H, D), torch_normal(T, H, D), torch_bytes(blocks, PAGE, H, 2 * D)
        at, scale = torch_array(where), torch_array(SCALE)
        return lambda: call(key, value, cache[..., :D], cache[..., D:], at, kind, scale, scale)

    peers = {"vllm": vllm, "vllm triton": triton} if kind == "fp8" else {"vllm": vllm}
    name = f"reshape_and_cache_fp8{' e5m2' * (kind != 'fp8')} {T}x{H}x{D}"
    return Bench("kv_quant", name, ours("reshape_and_cache_fp8", make), peers, 6 * T * H * D)


def read(T: int, H: int = HEADS, D: int = WIDTH) -> Bench:
    pages = -(-T // PAGE)

    def make():
        return (cupy_bytes(pages, PAGE, H, D), cupy_array(SCALE)), {}, cupy_empty(pages, PAGE, H, D)

    def torch():
        from torch import float8_e4m3fn

        cache, scale = torch_bytes(pages, PAGE, H, D).view(float8_e4m3fn), torch_array(SCALE)
        return lambda: (cache.float() * scale).bfloat16()

    def vllm():
        cache, out, call = torch_bytes(pages, PAGE, H, D), torch_empty(pages, PAGE, H, D), cache_ops().convert_fp8
        return lambda: call(out, cache, float(SCALE[0]), "fp8")

    size = 3 * pages * PAGE * H * D
    name = f"dequantize_kv_fp8 {pages * PAGE}x{H}x{D}"
    return Bench("kv_quant", name, ours("dequantize_kv_fp8", make), {"torch": torch, "vllm": vllm}, size)
