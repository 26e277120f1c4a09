"""The delta rule of one token, S = S decay; S += beta (v - S k) k^T; o = S q, and how far float32 can be from it."""

from __future__ import annotations

import numpy as np

from vtlab.ops.numerics import Order

from .sequences import rows_and_slots, steps

ORDER = Order("strided_tree(8, vector=4)", lanes=8, vector=4, join=(("tree", 0),))
"""Eight lanes hold a row of the state, four neighbours at a time; each lane one chain of fma, then a tree."""


def repeated(x, heads: int):
    """[..., Hk, D] -> [..., Hv, D]: value head h reads key head h // (Hv / Hk)."""
    return np.repeat(x, heads // x.shape[-2], axis=-2)


def unit_factor(nx, x, eps: float = 1e-6):
    """1 / sqrt(sum x^2 + eps) over the last axis, which stays with size 1."""
    total = nx.dot(x, x, order=ORDER, fused=True)[..., None]
    return nx.div(1, nx.sqrt(nx.add(total, eps)))


def step(nx, S, q, k, v, decay, beta):
    """The state after one token, and its output.

    S [..., Dv, Dk], q and k [..., Dk], v [..., Dv], beta [..., 1]; decay broadcasts against S: one number a head in the
    gated delta rule, one a channel in Kimi delta attention.
    """
    S = nx.mul(S, decay)
    change = nx.mul(nx.sub(v, nx.dot(S, k[..., None, :], order=ORDER, fused=True)), beta)
    S = nx.fma(change[..., None], k[..., None, :], S)
    return S, nx.dot(S, q[..., None, :], order=ORDER, fused=True)


def one_token(nx, parts, state, state_idx, dtype):
    """The rule on one token a row, each against the state of its slot: round(o), zeros for null rows; state in place.

    parts: q, k, v, decay, beta of all rows, as `step` takes them.
    """
    v = parts[2]
    rows, slots = rows_and_slots(state_idx, len(v))
    new, out = step(nx, nx.load(state[slots]), *(part[rows] for part in parts))
    state[slots] = nx.store(new, state.dtype)
    whole = np.zeros(v.shape, dtype)
    whole[rows] = nx.store(out, dtype)
    return whole


def token_by_token(nx, parts, state, starts, dtype):
    """The rule along each sequence from its state [N, ...], which ends as the last one: round(o) of every token."""
    S, v = nx.load(state), parts[2]
    S = S.copy()
    out = np.zeros(v.shape, dtype)
    for active, token in steps(starts):
        S[active], read = step(nx, S[active], *(part[token] for part in parts))
        out[token] = nx.store(read, dtype)
    state[...] = nx.store(S, state.dtype)
    return out


class Spread:
    """How far float32 can be from the truth along the rule, in local magnitudes: what the roundings are relative to.

    For a row s of the state of length R, a step makes errors of at most (roundings) * u * L with
    L = d R (1 + |beta| |k|^2) + |beta| |v| |k|, where d is the largest decay; errors of earlier steps are carried
    by d (I - beta k k^T), whose norm is at most d max(1, |1 - beta |k|^2|). `E` sums up, in units of u.
    """

    def __init__(self, state):
        self.R = np.linalg.norm(state.astype(np.float64), axis=-1)
        self.E = np.zeros_like(self.R)

    def step(self, at, q, k, v, decay, beta, more=1.0, turn=1.0):
        """One token of the states `at`, as `step` takes it. Returns o's scale.

        more : further roundings of the decay, turn : of beta; both multiply what they touch.
        """
        d, strength = decay.max(axis=-1), np.abs(beta)
        length = np.linalg.norm(k, axis=-1, keepdims=True)
        kept, new = d * np.maximum(1, np.abs(1 - beta * length**2)), strength * np.abs(v) * length
        local = (d * self.R[at] * (1 + strength * length**2) * more + new) * turn
        self.E[at] = kept * self.E[at] + local
        self.R[at] = kept * self.R[at] + new
        return np.linalg.norm(q, axis=-1, keepdims=True) * (self.E[at] + self.R[at])


def one_token_scale(parts, state, state_idx, more=1.0, turn=1.0):
    """(o's scale, the state's) of `one_token`."""
    spread, rows = Spread(state), len(parts[2])
    live, slots = rows_and_slots(state_idx, rows)
    out = np.zeros(parts[2].shape)
    further = (np.broadcast_to(extra, parts[4].shape)[live] for extra in (more, turn))
    out[live] = spread.step(slots, *(part[live] for part in parts), *further)
    return out, spread.E[..., None]


def token_by_token_scale(parts, state, starts, more=1.0):
    """(o's scale, the state's) of `token_by_token`."""
    spread, out = Spread(state), np.zeros(parts[2].shape)
    more = np.broadcast_to(more, parts[4].shape)
    for active, token in steps(starts):
        out[token] = spread.step(active, *(part[token] for part in parts), more[token])
    return out, spread.E[..., None]
