"""Writes into a paged cache: 8 heads of 128 in pages of 16, keys and values side by side as vLLM 0.26 keeps them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import cupy_normal, ours, torch_normal
from .bench import TOKENS, Bench

PAGE, HEADS, WIDTH = 16, 8, 128


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        yield reshape_and_cache(T)
        yield reshape_and_cache_xpacked(T)


def slots(tokens: int, blocks: int, page: int = PAGE) -> np.ndarray:
    """A prompt's slots: pages anywhere, tokens in order within them."""
    pages = np.random.Generator(np.random.PCG64(3)).permutation(blocks)
    token = np.arange(tokens)
    return pages[token // page] * page + token % page


def blocks_for(tokens: int, page: int = PAGE) -> int:
    """Four times the pages that the tokens fill."""
    return 4 * -(-tokens // page)


def cupy_array(values: np.ndarray):
    import cupy

    return cupy.asarray(values)


def torch_array(values: np.ndarray):
    import torch

    return torch.from_numpy(values).cuda()


def cache_ops():
    """vLLM's cache ops; ImportError where vLLM is not installed."""
    import torch
    import vllm._custom_ops  # noqa: F401  (registers them)

    return torch.ops._C_cache_ops


def reshape_and_cache(T: int, H: int = HEADS, D: int = WIDTH) -> Bench:
    blocks = blocks_for(T)
    where = slots(T, blocks)

    def make():
        cache = cupy_normal(blocks, PAGE, H, 2 * D)
        return (cupy_normal(T, H, D), cupy_normal(T, H, D), cache[..., :D], cache[..., D:], cupy_array(where)), {}, None

    def torch():
        key, value, cache, at = torch_normal(T, H, D), torch_normal(T, H, D), *_torch_pages(blocks, H, D, where)
        block, offset = at // PAGE, at % PAGE

        def call():
            cache[block, offset, :, :D] = key
            cache[block, offset, :, D:] = value

        return call

    def vllm():
        key, value, cache, at = torch_normal(T, H, D), torch_normal(T, H, D), *_torch_pages(blocks, H, D, where)
        call, one = cache_ops().reshape_and_cache_flash, torch_array(np.ones(1, np.float32))
        return lambda: call(key, value, cache[..., :D], cache[..., D:], at, "auto", one, one)

    peers = {"torch": torch, "vllm": vllm}
    return Bench("kv_cache", f"reshape_and_cache {T}x{H}x{D}", ours("reshape_and_cache", make), peers, 8 * T * H * D)


def _torch_pages(blocks: int, H: int, D: int, where: np.ndarray):
    return torch_normal(blocks, PAGE, H, 2 * D), torch_array(where)


def reshape_and_cache_xpacked(T: int, H: int = HEADS, D: int = WIDTH, x: int = 8) -> Bench:
    blocks = blocks_for(T)
    where = slots(T, blocks)
    shapes = (T, H, D), (T, H, D), (blocks, H, D // x, PAGE, x), (blocks, H, D, PAGE)

    def make():
        return (*(cupy_normal(*shape) for shape in shapes), cupy_array(where)), {}, None

    def vllm():
        arrays = [torch_normal(*shape) for shape in shapes]
        call, at, one = cache_ops().reshape_and_cache, torch_array(where), torch_array(np.ones(1, np.float32))
        return lambda: call(*arrays, at, "auto", one, one)

    op = "reshape_and_cache_xpacked"
    return Bench("kv_cache", f"{op} {T}x{H}x{D}", ours(op, make), {"vllm": vllm}, 8 * T * H * D)
