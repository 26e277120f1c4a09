"""Moves of whole blocks, 64 KiB each, and gathers of tokens by block table."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .arrays import cupy_empty, cupy_normal, ours, torch_empty, torch_normal
from .bench import Bench
from .kv_cache import cache_ops, cupy_array, torch_array

BLOCKS, BLOCK = 1024, (16, 8, 256)


def benches() -> Iterator[Bench]:
    for count in (1, 16, 256):
        yield copy_blocks(count)
        yield swap_blocks(count)
        yield swap_blocks_batch(count)
    for tokens in (256, 8192, 65536):
        yield cp_gather_cache(tokens)


def pairs(count: int) -> np.ndarray:
    """Pairs of blocks, none twice."""
    return np.random.Generator(np.random.PCG64(5)).permutation(BLOCKS)[: 2 * count].reshape(-1, 2)


def _bytes(count: int) -> int:
    return 2 * count * int(np.prod(BLOCK)) * 2


def copy_blocks(count: int) -> Bench:
    def torch():
        cache, ids = torch_normal(BLOCKS, *BLOCK), torch_array(pairs(count))
        source, target = ids[:, 0].contiguous(), ids[:, 1].contiguous()

        def call():
            cache[target] = cache[source]

        return call

    make = ours("copy_blocks", lambda: ((cupy_normal(BLOCKS, *BLOCK), cupy_array(pairs(count))), {}, None))
    return Bench("kv_blocks", f"copy_blocks {count} of 64 KiB", make, {"torch": torch}, _bytes(count))


def _vllm_swap(count: int):
    src, dst = torch_normal(BLOCKS, *BLOCK), torch_normal(BLOCKS, *BLOCK)
    call, ids = cache_ops().swap_blocks, torch_array(pairs(count)).cpu()
    return lambda: call(src, dst, src[0].nbytes, ids)


def swap_blocks(count: int) -> Bench:
    def make():
        src, dst = cupy_normal(BLOCKS, *BLOCK), cupy_normal(BLOCKS, *BLOCK, seed=1)
        return (src, dst, src[0].nbytes, cupy_array(pairs(count))), {}, None

    peers = {"vllm": lambda: _vllm_swap(count)}
    return Bench("kv_blocks", f"swap_blocks {count} of 64 KiB", ours("swap_blocks", make), peers, _bytes(count))


def swap_blocks_batch(count: int) -> Bench:
    def make():
        src, dst = cupy_normal(BLOCKS, *BLOCK), cupy_normal(BLOCKS, *BLOCK, seed=1)
        begins = (cupy_array(np.ascontiguousarray(column * src[0].nbytes)) for column in pairs(count).T)
        return (src, dst, *begins, cupy_array(np.full(count, src[0].nbytes))), {}, None

    peers = {"vllm swap_blocks": lambda: _vllm_swap(count)}
    name = f"swap_blocks_batch {count} of 64 KiB"
    return Bench("kv_blocks", name, ours("swap_blocks_batch", make), peers, _bytes(count))


def tables(tokens: int, page: int, requests: int = 4) -> tuple[int, np.ndarray, np.ndarray]:
    """(blocks, block table, bounds) of requests of unequal length with `tokens` in all."""
    lengths = [tokens // 2, tokens // 4, tokens // 8, tokens - tokens // 2 - tokens // 4 - tokens // 8]
    width = lengths[0] // page + 2
    ids = np.random.Generator(np.random.PCG64(4)).permutation(requests * width)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    return requests * width, ids.reshape(requests, width).astype(np.int32), bounds.astype(np.int32)


def cp_gather_cache(N: int, width: int = 576, page: int = 64) -> Bench:
    blocks, table, bounds = tables(N, page)

    def make():
        src, dst = cupy_normal(blocks, page, width), cupy_empty(N, width)
        return (src, dst, cupy_array(table), cupy_array(bounds)), {}, None

    def vllm():
        src, dst = torch_normal(blocks, page, width), torch_empty(N, width)
        call, ids, starts = cache_ops().cp_gather_cache, torch_array(table), torch_array(bounds)
        return lambda: call(src, dst, ids, starts, len(table), None)

    name = f"cp_gather_cache {N}x{width}"
    return Bench("kv_blocks", name, ours("cp_gather_cache", make), {"vllm": vllm}, 4 * N * width)
