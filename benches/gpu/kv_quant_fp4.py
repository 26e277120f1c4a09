"""NVFP4 in a paged cache: 8 heads of 128 in pages of 16. vLLM's op needs a Blackwell GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import cupy_normal, ours, torch_normal
from .bench import TOKENS, Bench
from .kv_cache import HEADS, PAGE, WIDTH, blocks_for, cache_ops, cupy_array, slots, torch_array
from .kv_quant import cupy_bytes, torch_bytes

SCALE = np.full(1, 4 / (448 * 6), np.float32)


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield write(T)


def write(T: int, H: int = HEADS, D: int = WIDTH) -> Bench:
    """Pages [keys of all heads, values of all heads], head after head."""
    blocks = blocks_for(T)
    where, width = slots(T, blocks), D // 16 * 9

    def make():
        pages, scale = cupy_bytes(blocks, 2 * H, PAGE, width).swapaxes(1, 2), cupy_array(SCALE)
        arrays = cupy_normal(T, H, D), cupy_normal(T, H, D), pages[:, :, :H], pages[:, :, H:]
        return (*arrays, cupy_array(where), scale, scale), {}, None

    def vllm():
        import torch

        if torch.cuda.get_device_capability()[0] != 10:
            raise NotImplementedError("a kernel for sm_100 alone")
        pages, scale = torch_bytes(blocks, 2 * H, PAGE, width).swapaxes(1, 2), torch_array(SCALE)
        call, at, rows = cache_ops().reshape_and_cache_flash, torch_array(where), torch_normal(2, T, H, D)
        return lambda: call(rows[0], rows[1], pages[:, :, :H], pages[:, :, H:], at, "nvfp4", scale, scale)

    op = "reshape_and_cache_nvfp4"
    return Bench("kv_quant_fp4", f"{op} {T}x{H}x{D}", ours(op, make), {"vllm": vllm}, 2 * T * H * (2 * D + width))
