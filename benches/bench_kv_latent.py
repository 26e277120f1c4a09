"""The latent cache of MLA in DeepSeek's geometry: entries of 512 + 64 in pages of 64, bf16."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

BLOCKS, BS = 1100, 64


@pytest.mark.parametrize("T", [1, 256, 8192])
@pytest.mark.parametrize("side", SIDES)
def test_concat_and_cache_mla(benchmark, side, T):
    """Both parts are columns of one fused projection."""

    def ours(fused, cache, where):
        oracle.concat_and_cache_mla(fused[:, :512], fused[:, 512:], cache, where)

    def peer(fused, cache, where):
        cache[where // BS, where % BS, :512] = fused[:, :512]
        cache[where // BS, where % BS, 512:] = fused[:, 512:]

    where = np.random.Generator(np.random.PCG64(3)).permutation(BLOCKS * BS)[:T]
    arrays = normal(T, 576), normal(BLOCKS, BS, 576, seed=1), where
    compare(benchmark, side, f"concat_and_cache_mla {T}x(512+64) bf16", ours, peer, *arrays)


@pytest.mark.parametrize("N", [1, 8192, 65536])
@pytest.mark.parametrize("side", SIDES)
def test_gather_mla_cache(benchmark, side, N):
    """Four requests of unequal length, one of them a chunk that begins on its third page."""
    lengths = [N // 2, N // 4, N // 8, N - N // 2 - N // 4 - N // 8]
    table = np.random.Generator(np.random.PCG64(4)).integers(0, BLOCKS, (4, N // BS + 4)).astype(np.int32)

    def ours(cache, dst, table, bounds, owners, starts):
        oracle.gather_mla_cache(dst, cache, table, bounds, owners, num_tokens=N, seq_starts=starts)

    def peer(cache, dst, table, bounds, owners, starts):
        import torch

        token = torch.arange(N)
        at = token - bounds[owners] + starts[owners]
        dst[token] = cache[table[owners, at // BS], at % BS]

    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    owners, starts = np.repeat(np.arange(4, dtype=np.int32), lengths), np.int32([0, 0, 2 * BS, 0])
    arrays = normal(BLOCKS, BS, 576), normal(N, 576, seed=1), table, bounds, owners, starts
    compare(benchmark, side, f"gather_mla_cache {N}x576 bf16", ours, peer, *arrays)
