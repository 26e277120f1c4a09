"""Softmax over chunks of CHUNK keys, each with a maximum of its own, merged one after the other."""

from __future__ import annotations

import numpy as np

from vtlab.ops.dtypes import dtype
from vtlab.ops.numerics import sequential, warp_butterfly
from vtlab.ops.numerics.orders import Order

CHUNK = 64
DOT_ORDER = Order("8 lanes of 8 neighbours, joined in sequence", lanes=8, vector=8, join=(("sequential", 0),))
"""The order of q . k: lane t takes dims 8 t ... 8 t + 7, then those 64 further on."""


def _finite(nx, top):
    """What to subtract from scores up to `top`: 0 where there is no score, for exp(-inf - 0) = 0."""
    return nx.where(top == -np.inf, nx.const(0), top)


def lse(nx, top, total):
    """m + log(l), -inf where l is 0."""
    return nx.add(_finite(nx, top), nx.log(total))


def attend(nx, scores, values, visible, p_round):
    """(m_c [n, G, chunks], l_c, [o_c [n, G, D], ...]) for scores [n, G, w], where -inf masks, and values [w, D]."""
    scores = scores.reshape(*scores.shape[:-1], -1, CHUNK)
    top = nx.max(scores)
    p = nx.exp(nx.sub(scores, _finite(nx, top)[..., None]))
    total = nx.sum(p, order=warp_butterfly)
    if p_round is not None:
        p = nx.load(nx.store(p, dtype(p_round)))
    cuts = [slice(at, at + CHUNK) for at in range(0, len(values), CHUNK)]
    return top, total, [_weigh(nx, p[..., c, :], values[cut], visible[..., cut]) for c, cut in enumerate(cuts)]


def merge(nx, tops, totals, parts):
    """(m, l, o) over all chunks, one after the other."""
    top = nx.const(-np.inf)
    total = mixed = nx.const(0)
    for c, part in enumerate(parts):
        larger = nx.maximum(top, tops[..., c])
        base = _finite(nx, larger)
        a, b = nx.exp(nx.sub(top, base)), nx.exp(nx.sub(tops[..., c], base))
        total = nx.fma(total, a, nx.mul(totals[..., c], b))
        mixed = nx.fma(mixed, a[..., None], nx.mul(part, b[..., None]))
        top = larger
    return top, total, mixed


def with_sink(nx, top, total, mixed, sink):
    """(m, l, o) with one more logit that has no value."""
    larger = nx.maximum(top, sink)
    base = _finite(nx, larger)
    a, b = nx.exp(nx.sub(top, base)), nx.exp(nx.sub(sink, base))
    return larger, nx.fma(total, a, b), nx.mul(mixed, a[..., None])


def _weigh(nx, p, values, visible):
    """sum_j p[n, G, j] * values[j]; a key that is not finite reaches only the rows that see it."""
    loaded = nx.load(values)
    wild = ~np.isfinite(loaded)
    tame = np.where(wild, 0, loaded) if wild.any() else loaded
    mixed = nx.matmul(p.reshape(-1, p.shape[-1]), tame.T, order=sequential, fused=True).reshape(*p.shape[:-1], -1)
    if not wild.any():
        return mixed
    reached = (visible.astype(np.float32) @ wild.astype(np.float32)) > 0  # [n, 1, D]
    slow = nx.const(0)
    for j, value in enumerate(loaded):
        slow = nx.where(visible[..., j, None], nx.fma(p[..., j, None], value, slow), slow)
    return nx.where(reached, slow, mixed)
