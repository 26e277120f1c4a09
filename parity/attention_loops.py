"""Attention written twice more for its checks: element by element in Python, and per request with whole matrices."""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops.numerics import MIRROR

from .scalar import draw

F32 = np.float32


def request(L, S, Hq, Hk, D, kind="float32", seed=0, kv=None):
    """(q, k, v) of one request with L new tokens out of S."""
    return (
        draw((L, Hq, D), kind, seed),
        draw((S, Hk, D), kv or kind, seed + 1),
        draw((S, Hk, D), kv or kind, seed + 2),
    )


def sees(i, j, new, total, causal, window):
    """Does query i of `new`, the last of `total` positions, see key j?"""
    position = total - new + i
    if causal and j > position:
        return False
    return window is None or (position - window[0] <= j <= position + window[1])


def loop_attention(q, k, v, *, scale, causal=True, window=None, softcap=0.0, sinks=None, lse_includes_sink=True,
                   alibi_slopes=None):  # fmt: skip
    """(out [T, Hq, D], lse [Hq, T]) in Python floats; zeros and -inf where a row sees no key."""
    (T, Hq, D), S, Hk = q.shape, k.shape[0], k.shape[1]
    out, lse = np.zeros((T, Hq, D)), np.full((Hq, T), -math.inf)
    q, k, v = (x.astype(np.float64).tolist() for x in (q, k, v))
    for i in range(T):
        for h in range(Hq):
            g = h * Hk // Hq
            scores = []
            keys = [j for j in range(S) if sees(i, j, T, S, causal, window)]
            for j in keys:
                s = scale * math.fsum(a * b for a, b in zip(q[i][h], k[j][g]))
                s = softcap * math.tanh(s / softcap) if softcap else s
                scores.append(s if alibi_slopes is None else s + float(alibi_slopes[h]) * (j - (S - T + i)))
            if not keys:
                continue
            weights = [math.exp(s) for s in scores]
            sink = 0.0 if sinks is None else math.exp(float(sinks[h]))
            total = math.fsum([*weights, sink])
            lse[h, i] = math.log(total if lse_includes_sink else math.fsum(weights))
            for d in range(D):
                out[i, h, d] = math.fsum(w * v[j][g][d] for w, j in zip(weights, keys)) / total
    return out, lse


def step_attention(q, k, v, *, scale, causal=True, window=None, softcap=0.0, sinks=None, lse_includes_sink=True,
                   alibi_slopes=None, p_round=None):  # fmt: skip
    """The float32 steps one scalar after the other, over the keys a row sees; fma, exp, tanh, log are the mirror's."""
    (T, Hq, D), S, Hk = q.shape, k.shape[0], k.shape[1]
    out, lse = np.zeros((T, Hq, D), F32), np.full((Hq, T), -np.inf, F32)
    q, k, v = (x.astype(F32) for x in (q, k, v))
    exp, fma, one, none = (lambda x: MIRROR.exp(np.asarray(x))[()]), MIRROR.fma, F32(1), F32(-np.inf)
    for i in range(T):
        for h in range(Hq):
            g = h * Hk // Hq
            m, total, mixed = none, F32(0), np.zeros(D, F32)
            chunks = {}
            for j in range(S):
                if sees(i, j, T, S, causal, window):
                    chunks.setdefault(j // 64, []).append(j)
            for keys in chunks.values():
                scores = [_step_score(q[i, h], k[j, g], scale, softcap) for j in keys]
                if alibi_slopes is not None:
                    scores = [s + F32(alibi_slopes[h]) * F32(j - (S - T + i)) for s, j in zip(scores, keys)]
                own = max(scores)
                weights = [exp(s - own) for s in scores]
                lanes, part = [F32(0)] * 32, np.zeros(D, F32)
                for w, j in zip(weights, keys):
                    lanes[j % 32] = lanes[j % 32] + w
                    part = fma(w if p_round is None else w.astype(p_round).astype(F32), v[j, g], part)
                while len(lanes) > 1:
                    lanes = [x + y for x, y in zip(lanes, lanes[len(lanes) // 2 :])]
                larger = max(m, own)
                a, b = exp(m - larger), exp(own - larger)
                m, total, mixed = larger, _fma(total, a, lanes[0] * b), fma(mixed, a, part * b)
            if not chunks:
                continue
            before = m + MIRROR.log(np.asarray(total))[()]
            if sinks is not None:
                larger = max(m, sinks[h])
                a = exp(m - larger)
                m, total, mixed = larger, _fma(total, a, exp(sinks[h] - larger)), mixed * a
            lse[h, i] = m + MIRROR.log(np.asarray(total))[()] if lse_includes_sink else before
            out[i, h] = mixed * (one / total)
    return out, lse


def _fma(a, b, c):
    return MIRROR.fma(np.array([a]), np.array([b]), np.array([c]))[0]


def _step_score(query, key, scale, softcap):
    lanes = [F32(0)] * 8
    for d, (a, b) in enumerate(zip(query, key)):
        lanes[d // 8 % 8] = _fma(a, b, lanes[d // 8 % 8])
    s = lanes[0]
    for lane in lanes[1:]:
        s = s + lane
    s = s * F32(scale)
    return F32(softcap) * MIRROR.tanh(np.asarray(s / F32(softcap)))[()] if softcap else s


def matrix_attention(q, k, v, *, scale, causal=True, window=None, softcap=0.0):
    """out [T, Hq, D] in float64 with whole score matrices, for sizes that a loop is too slow for."""
    T, S, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    q, k, v = q.astype(np.float64), *(np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    ahead = np.arange(S)[None] - (np.arange(T)[:, None] + S - T)
    seen = np.ones((T, S), bool)
    if causal:
        seen &= ahead <= 0
    if window is not None:
        seen &= (-ahead <= window[0]) & (ahead <= window[1])
    with np.errstate(all="ignore"):
        weights = np.where(seen, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
        return np.nan_to_num(np.einsum("hij,jhd->ihd", weights, v) / weights.sum(axis=-1).T[..., None])


LAYOUTS = ("pages", "unbind", "nhd", "hnd", "rows")


def empty_caches(layout, NB, BS, H, D, dtype):
    """(k_cache, v_cache) views [NB, BS, H, D] of one NaN-filled allocation, laid out as an engine lays it out."""
    nan = lambda *shape: np.full(shape, np.nan, dtype)
    if layout == "pages":
        return nan(NB, BS, H, D), nan(NB, BS, H, D)
    if layout == "unbind":  # (NB, 2, BS, H, D), K and V one after the other in each page
        both = nan(NB, 2, BS, H, D)
        return both[:, 0], both[:, 1]
    if layout == "nhd":  # K and V side by side in the last axis
        both = nan(NB, BS, H, 2 * D)
        return both[..., :D], both[..., D:]
    if layout == "hnd":
        both = nan(NB, H, BS, 2 * D).transpose(0, 2, 1, 3)
        return both[..., :D], both[..., D:]
    both = nan(NB, H, 2 * BS, D).transpose(0, 2, 1, 3)  # a head's K rows, then its V rows
    return both[:, :BS], both[:, BS:]


def paged(requests, BS, layout="pages", seed=0, spare=3, garbage=-9):
    """Arguments of paged_attention for requests of (q [L, Hq, D], k [S, Hk, D], v [S, Hk, D]).

    Pages are shuffled, what no key fills is NaN, and table entries that no key needs are `garbage`.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    used = [-(-k.shape[0] // BS) for _, k, _ in requests]
    NB = sum(used) + spare
    _, H, D = requests[0][1].shape
    k_cache, v_cache = empty_caches(layout, NB, BS, H, D, requests[0][1].dtype)
    table = np.full((len(requests), max(used) + 1), garbage, np.int32)
    order = iter(rng.permutation(NB).tolist())
    for r, (_, k, v) in enumerate(requests):
        for n in range(used[r]):
            page = table[r, n] = next(order)
            some = slice(n * BS, (n + 1) * BS)
            k_cache[page, : len(k[some])], v_cache[page, : len(v[some])] = k[some], v[some]
    return {
        "q": np.concatenate([q for q, _, _ in requests]), "k_cache": k_cache, "v_cache": v_cache, "block_table": table,
        "seq_lens": np.array([len(k) for _, k, _ in requests], np.int32),
        "query_start_loc": np.cumsum([0, *(len(q) for q, _, _ in requests)]).astype(np.int32),
    }  # fmt: skip
