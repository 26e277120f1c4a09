"""Paged writes, gathers and block moves: 8 heads of 128 in pages of 16, in the (NB, BS, H, 2D) layout of vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

BLOCKS, BS = 600, 16


def slots(T):
    return np.random.Generator(np.random.PCG64(3)).permutation(BLOCKS * BS)[:T]


@pytest.mark.parametrize("T", [1, 256, 8192])
@pytest.mark.parametrize("side", SIDES)
def test_reshape_and_cache(benchmark, side, T):
    def ours(key, value, pages, where):
        oracle.reshape_and_cache(key, value, pages[..., :128], pages[..., 128:], where)

    def peer(key, value, pages, where):
        pages[where // BS, where % BS, :, :128], pages[where // BS, where % BS, :, 128:] = key, value

    arrays = normal(T, 8, 128), normal(T, 8, 128, seed=1), normal(BLOCKS, BS, 8, 256, seed=2), slots(T)
    compare(benchmark, side, f"reshape_and_cache {T}x8x128 bf16", ours, peer, *arrays)


@pytest.mark.parametrize("T", [1, 1024])
@pytest.mark.parametrize("side", SIDES)
def test_reshape_and_cache_xpacked(benchmark, side, T):
    def peer(key, value, keys, values, where):
        keys[where // BS, :, :, where % BS] = key.view(T, 8, 16, 8)
        values[where // BS, :, :, where % BS] = value

    pages = normal(BLOCKS, 8, 16, BS, 8, seed=2), normal(BLOCKS, 8, 128, BS, seed=3)
    arrays = normal(T, 8, 128), normal(T, 8, 128, seed=1), *pages, slots(T)
    group = f"reshape_and_cache_xpacked {T}x8x128 bf16"
    compare(benchmark, side, group, oracle.reshape_and_cache_xpacked, peer, *arrays)


@pytest.mark.parametrize("side", SIDES)
def test_cp_gather_cache(benchmark, side):
    lengths = np.int64([4096, 1, 3000, 1000])
    table = np.random.Generator(np.random.PCG64(4)).permutation(1024).reshape(4, 256).astype(np.int32)

    def peer(src, dst, table, bounds):
        import torch

        request = torch.repeat_interleave(torch.arange(4), bounds.diff().long())
        at = torch.arange(request.numel()) - bounds[request]
        dst[: request.numel()] = src[table[request, at // BS].long(), at % BS]

    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    arrays = normal(1024, BS, 576), normal(8192, 576, seed=1), table, bounds
    compare(benchmark, side, "cp_gather_cache 8097x576 bf16", oracle.cp_gather_cache, peer, *arrays)


@pytest.mark.parametrize("op", ["copy_blocks", "swap_blocks", "swap_blocks_batch"])
@pytest.mark.parametrize("side", SIDES)
def test_block_moves(benchmark, side, op):
    """256 blocks of 64 KiB."""
    size = BS * 8 * 256 * 2
    pairs = np.random.Generator(np.random.PCG64(5)).permutation(BLOCKS)[:512].reshape(256, 2)
    src, dst = normal(BLOCKS, BS, 8, 256), normal(BLOCKS, BS, 8, 256, seed=1)

    def copied(cache, pairs):
        cache[pairs[:, 1]] = cache[pairs[:, 0]]

    def swapped(src, dst, pairs, *_):
        dst[pairs[:, 1]] = src[pairs[:, 0]]

    if op == "copy_blocks":
        compare(benchmark, side, "copy_blocks 256 of 64 KiB", oracle.copy_blocks, copied, src, pairs)
    elif op == "swap_blocks":
        ours = lambda src, dst, pairs: oracle.swap_blocks(src, dst, size, pairs)
        compare(benchmark, side, "swap_blocks 256 of 64 KiB", ours, swapped, src, dst, pairs)
    else:
        ours = lambda src, dst, pairs, s, d, n: oracle.swap_blocks_batch(src, dst, s, d, n)
        ranges = *(np.ascontiguousarray(size * column) for column in pairs.T), np.full(256, size)
        compare(benchmark, side, "swap_blocks_batch 256 of 64 KiB", ours, swapped, src, dst, pairs, *ranges)
