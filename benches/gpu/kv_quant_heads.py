"""Caches with a scale for each head of each token, 8 heads of 128: pages whose rows are a key, its scale, a value, its
scale, as vLLM allocates them; and the rotation before codes of four bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import cupy_empty, cupy_normal, ours, torch_normal
from .bench import TOKENS, Bench
from .kv_cache import HEADS, PAGE, WIDTH, blocks_for, cupy_array, slots, torch_array
from .kv_quant import cupy_bytes, torch_bytes

SCALE = 4
"""Bytes of a scale."""


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield write(T, "int8")
        yield write(T, "uint8")
        yield write_int4(T)
        yield rht(T)
        yield rht(T, inverse=True)
    for T in TOKENS[1:]:
        yield read(T)
        yield read_int4(T)


def views(pages, floats, stored: int, dtype):
    """(key cache, value cache, key scales, value scales), [NB, BS, H, …], of pages [NB, H, BS, 2 * (stored + 4)]."""
    rows, scales, half = pages.swapaxes(1, 2), floats.swapaxes(1, 2), stored + SCALE
    keys, values = rows[..., :stored].view(dtype), rows[..., half : half + stored].view(dtype)
    return keys, values, scales[..., stored // SCALE], scales[..., -1]


def cupy_views(blocks: int, stored: int, dtype, H: int = HEADS):
    pages = cupy_bytes(blocks, H, PAGE, 2 * (stored + SCALE))
    return views(pages, pages.view(np.float32), stored, np.dtype(dtype))


def torch_views(blocks: int, stored: int, dtype: str, H: int = HEADS):
    import torch

    pages = torch_bytes(blocks, H, PAGE, 2 * (stored + SCALE))
    return views(pages, pages.view(torch.float32), stored, getattr(torch, dtype))


def write(T: int, kind: str, H: int = HEADS, D: int = WIDTH) -> Bench:
    blocks = blocks_for(T)
    where = slots(T, blocks)

    def make():
        return (cupy_normal(T, H, D), cupy_normal(T, H, D), *cupy_views(blocks, D, kind), cupy_array(where)), {}, None

    def vllm():
        from vllm.v1.attention.ops import triton_reshape_and_cache_flash as module
        from vllm.v1.kv_cache_interface import KVQuantMode

        mode = KVQuantMode.INT8_PER_TOKEN_HEAD if kind == "int8" else KVQuantMode.FP8_PER_TOKEN_HEAD
        arrays = torch_normal(T, H, D), torch_normal(T, H, D)
        caches, at = torch_views(blocks, D, "int8" if kind == "int8" else "float8_e4m3fn"), torch_array(where)
        return lambda: module.triton_reshape_and_cache_flash_per_token_head_quant(*arrays, *caches, at, mode)

    op = "reshape_and_cache_per_token_head"
    name = f"per token head {'int8' if kind == 'int8' else 'fp8'} {T}x{H}x{D}"
    return Bench("kv_quant_heads", name, ours(op, make), {"vllm": vllm}, T * H * (6 * D + 2 * SCALE))


def write_int4(T: int, H: int = HEADS, D: int = WIDTH) -> Bench:
    """Of rows that are rotated already."""
    blocks = blocks_for(T)
    where = slots(T, blocks)

    def make():
        caches = cupy_views(blocks, D // 2, "uint8")
        return (cupy_normal(T, H, D), cupy_normal(T, H, D), *caches, cupy_array(where)), {}, None

    def vllm():
        from vllm.v1.attention.ops import int4_per_token_head as module

        names = "key", "value", "key_cache", "value_cache", "k_scale_cache", "v_scale_cache", "slot_mapping"
        arrays = torch_normal(T, H, D), torch_normal(T, H, D), *torch_views(blocks, D // 2, "uint8"), torch_array(where)
        given = dict(zip(names, arrays))
        return lambda: module._run_reshape_kernel(module._reshape_cache_int4_kernel, **given, packing_factor=2)

    size = T * H * (5 * D + 2 * SCALE)
    return Bench("kv_quant_heads", f"int4 {T}x{H}x{D}", ours("reshape_and_cache_int4", make), {"vllm": vllm}, size)


def rht(T: int, inverse: bool = False, H: int = HEADS, D: int = WIDTH) -> Bench:
    def make():
        return (cupy_normal(T, H, D),), {"inverse": inverse}, cupy_empty(T, H, D)

    def vllm():
        from vllm.v1.attention.ops.int4_per_token_head import single_rht

        x = torch_normal(T, H, D)
        return lambda: single_rht(x.float(), inverse).to(x.dtype)

    name = f"rht{' inverse' * inverse} {T}x{H}x{D}"
    return Bench("kv_quant_heads", name, ours("rht", make), {"vllm": vllm}, 4 * T * H * D, T * H * D * 8)


def read(T: int, H: int = HEADS, D: int = WIDTH) -> Bench:
    pages = -(-T // PAGE)

    def make():
        cache, _, scales, _ = cupy_views(pages, D, "int8")
        return (cache, scales), {}, cupy_empty(pages, PAGE, H, D)

    def torch():
        cache, _, scales, _ = torch_views(pages, D, "int8")
        return lambda: (cache.float() * scales[..., None]).bfloat16()

    rows = pages * PAGE * H
    name = f"dequantize_kv_heads {pages * PAGE}x{H}x{D}"
    return Bench("kv_quant_heads", name, ours("dequantize_kv_heads", make), {"torch": torch}, rows * (3 * D + SCALE))


def read_int4(T: int, H: int = HEADS, D: int = WIDTH) -> Bench:
    pages = -(-T // PAGE)

    def make():
        cache, _, scales, _ = cupy_views(pages, D // 2, "uint8")
        return (cache, scales), {}, cupy_empty(pages, PAGE, H, D)

    rows = pages * PAGE * H
    name = f"dequantize_kv_int4 {pages * PAGE}x{H}x{D}"
    return Bench("kv_quant_heads", name, ours("dequantize_kv_int4", make), {}, rows * (5 * D // 2 + SCALE))
