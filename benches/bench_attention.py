"""Attention at 32/8 heads of 128: a prompt, a batch of single tokens over long contexts, a merge of two halves."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .peer import SIDES, compare, normal

HQ, HK, D, BS = 32, 8, 128, 16
SCALE = D**-0.5


def sdpa(q, k, v, causal):
    import torch

    q, k, v = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE, enable_gqa=True)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("T", [32, 1024, 4096])
@pytest.mark.parametrize("side", SIDES)
def test_prefill(benchmark, side, T):
    arrays = normal(T, HQ, D), normal(T, HK, D, seed=1), normal(T, HK, D, seed=2)
    ours = lambda q, k, v: oracle.attention(q, k, v, scale=SCALE)
    compare(
        benchmark, side, f"attention {T} tokens bf16", ours, lambda q, k, v: sdpa(q, k, v, True).to(q.dtype), *arrays
    )


@pytest.mark.parametrize("R, S", [(1, 4096), (8, 1024)])
@pytest.mark.parametrize("side", SIDES)
def test_decode(benchmark, side, R, S):
    pages = S // BS
    table = np.random.Generator(np.random.PCG64(3)).permutation(R * pages).astype(np.int32).reshape(R, pages)
    lengths, starts = np.full(R, S, np.int32), np.arange(R + 1, dtype=np.int32)

    def ours(q, k, v):
        return oracle.paged_attention(q, k, v, table, lengths, starts, scale=SCALE)

    def peer(q, k, v):
        import torch

        keys = ((x[torch.from_numpy(row).long()].reshape(S, HK, D) for x in (k, v)) for row in table)
        return torch.cat([sdpa(q[r : r + 1], *each, False) for r, each in enumerate(keys)]).to(q.dtype)

    cache = [normal(R * pages, BS, HK, D, seed=seed) for seed in (1, 2)]
    compare(benchmark, side, f"paged_attention decode {R} x {S} bf16", ours, peer, normal(R, HQ, D), *cache)


@pytest.mark.parametrize("side", SIDES)
def test_merge(benchmark, side):
    T = 1024
    lses = [normal(HQ, T, dtype=np.float32, seed=seed) for seed in (3, 4)]

    def ours(prefix, suffix):
        return oracle.merge_attn_states(prefix, lses[0], suffix, lses[1])

    def peer(prefix, suffix):
        import torch

        p, s = (torch.from_numpy(lse).double() for lse in lses)
        total = torch.logaddexp(p, s)
        mixed = sum(x.double() * (lse - total).exp().T[..., None] for x, lse in ((prefix, p), (suffix, s)))
        return mixed.to(prefix.dtype), total.float()

    compare(
        benchmark, side, f"merge_attn_states {T} tokens bf16", ours, peer, normal(T, HQ, D), normal(T, HQ, D, seed=1)
    )
