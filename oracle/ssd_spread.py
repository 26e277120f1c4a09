"""How far float32 can be from Mamba-2's chunks and from its loop: magnitudes and errors in units of 2^-24.

A time step dt = softplus(raw) moves by (1 + |raw|) of it, a decay exp(a) by what its exponent moves, and a rounded
operand may flip by an ulp of its dtype.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.numerics import TRUTH

from .sequences import Chunks, flips, steps
from .ssd import before_chunks, between, chunk_plan, clamped, scan_parts
from .ssm import step_scale, time_step


def _size(array):
    return None if array is None else np.abs(array.astype(np.float64))


def _gated(total, x, D, z):
    """(total + |D x|) |silu(z)|, all [..., H, P]."""
    if D is not None:
        total = total + np.abs(x) * (D[:, None] if D.ndim == 1 else D)
    return total if z is None else total * z / (1 + np.exp(-z))


def _reads(chunks, arguments, weights, fade, S, E, flip):
    """The outputs' error: old states of size S and error E, weights [chunks, H, Q, Q], fade [chunks, H, Q]."""
    heads = arguments["x"].shape[1]
    x, C = (_size(chunks.split(arguments[name], heads)) for name in ("x", "C"))
    old = (C @ (S * (1 + flip) + E).swapaxes(-1, -2)) * fade[..., None]
    total = chunks.join(old + weights @ x)
    return _gated(total, _size(arguments["x"]), _size(arguments["D"]), _size(arguments["z"]))


def scan_scale(arguments, results):
    chunks, flip = Chunks(arguments["cu_chunk_seqlens"], arguments["CB"].shape[-1]), flips(arguments["x"].dtype)
    given = (_size(arguments["CB"]), _size(arguments["dt"]), arguments["dA_cumsum"].astype(np.float64))
    weights, fade = scan_parts(TRUTH, chunks, *given)
    sums = np.abs(np.moveaxis(given[2], 0, 1))
    depth = 1 + flip + sums[..., :, None] + sums[..., None, :]
    S = before_chunks(arguments["seq_idx"], _size(arguments["states"]), _size(arguments["initial_states"]))
    return _reads(chunks, arguments, weights * depth, fade[..., 0] * (1 + sums), S, 0.0, flip)


def _time_steps(arguments):
    """dt, |raw|, both [T, H]."""
    raw = np.abs(time_step(TRUTH, arguments["dt"], arguments["dt_bias"], False))
    names = ("dt", "dt_bias", "dt_softplus", "dt_min", "dt_max")
    return clamped(TRUTH, *(arguments[name] for name in names)), raw


def prefill_scale(arguments, results):
    size, flip = arguments["chunk_size"], flips(arguments["x"].dtype)
    cuts, last, _ = chunk_plan(arguments["query_start_loc"], size)
    chunks, heads = Chunks(cuts, size), arguments["x"].shape[1]
    dt, raw = (chunks.split(part) for part in _time_steps(arguments))
    A = arguments["A"].astype(np.float64)[:, None]
    sums, moved = np.cumsum(dt * A, axis=-1), np.cumsum(np.abs(dt * A) * (1 + raw), axis=-1)
    x, B, C = (_size(chunks.split(arguments[name], heads)) for name in ("x", "B", "C"))
    weight = between(TRUTH, sums[..., -1:], sums, chunks.valid[:, None]) * np.abs(dt)
    depth = 1 + flip + raw + moved[..., -1:] + moved
    local, local_error = (x.swapaxes(-1, -2) @ (B * part[..., None]) for part in (weight, weight * depth))
    first = _size(arguments["initial_states"])
    S, E = np.zeros((2, len(chunks), *local.shape[1:]))
    final = np.zeros((2, len(last), *local.shape[1:]))
    begin = 0
    for n, end in enumerate(last):
        now, error = (np.zeros(local.shape[1:]) if first is None else first[n]), np.zeros(local.shape[1:])
        for c in range(begin, end + 1):
            S[c], E[c] = now, error
            decay, more = (part[c, :, -1, None, None] for part in (np.exp(sums), 1 + moved))
            now, error = decay * now + local[c], decay * (error + now * more) + local_error[c]
        final[:, n] = now, error
        begin = max(begin, end + 1)
    below = np.tri(size, dtype=bool)
    weights = C @ B.swapaxes(-1, -2) * between(TRUTH, sums[..., :, None], sums[..., None, :], below)
    depth = 1 + flip + raw[..., None, :] + moved[..., :, None] + moved[..., None, :]
    weights = weights * np.abs(dt)[..., None, :] * depth
    out = _reads(chunks, arguments, weights, np.exp(sums) * (1 + moved), S, E, flip)
    return out, final[0] + final[1]


def recurrent_scale(arguments, results):
    dt, raw = (part[..., None] for part in _time_steps(arguments))
    heads, groups = arguments["x"].shape[1], arguments["B"].shape[1]
    B, C = (np.repeat(_size(arguments[name]), heads // max(groups, 1), axis=1)[:, :, None] for name in ("B", "C"))
    A, x, S = arguments["A"].astype(np.float64)[:, None, None], _size(arguments["x"]), _size(arguments["state"])
    E, out = np.zeros_like(S), np.zeros(x.shape)
    for n, t in steps(arguments["query_start_loc"]):
        S[n], E[n], out[t] = step_scale(S[n], E[n], np.abs(dt[t]), A, B[t], C[t], x[t], None, None, raw[t])
    return _gated(out, x, _size(arguments["D"]), _size(arguments["z"])), E
