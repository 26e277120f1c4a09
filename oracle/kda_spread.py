"""How far float32 can be from chunked Kimi delta attention: the analysis of `chunk_spread` with a decay a channel."""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops.numerics import TRUTH

from .chunk_spread import factors, parts_of, states
from .gdn_chunks import SUBNORMAL, below
from .kda import gate_scale, softplus_gate
from .sequences import Chunks, flips

_GATE = {"beta": 1.0, "threshold": 20.0}


def gate_sums_scale(arguments, results):
    """The running sum of the gates' scales; the sum itself is no larger."""
    chunks = Chunks(arguments["query_start_loc"], arguments["chunk_size"])
    return chunks.join(np.cumsum(chunks.split(gate_scale(arguments, results)), axis=2)) / math.log(2)


def _last(chunks, sums):
    return np.take_along_axis(sums, np.maximum(chunks.length - 1, 0)[:, None, None, None], axis=2)


def _pairs(lefts, right, sums, error):
    """sum_d left_i right_j 2^(G_i - G_j), j <= i, for each of `lefts`: values, and magnitudes times 1 + both errors."""
    values, sizes = np.zeros((2, len(lefts), *right.shape[:-1], right.shape[-2]))
    for j in range(right.shape[-2]):
        below, here = np.s_[..., j:, :], np.s_[..., j : j + 1, :]
        factor = np.exp2(np.minimum(sums[below] - sums[here], 0))
        more = 1 + error[below] + error[here]
        for value, size, left in zip(values, sizes, lefts):
            product = left[below] * factor * right[here]
            value[..., j:, j] = product.sum(-1)
            size[..., j:, j] = np.einsum("...d,...d->...", np.abs(product), more)
    return values, sizes


def kkt_scale(arguments, results):
    size = arguments["chunk_size"]
    chunks, q, k, gc, beta = parts_of(arguments, size, 1, "q", "k", "gc", "beta")
    _, (Akk, Aqk) = _pairs((k, q), k, gc, np.abs(gc))
    Akk = Akk * below(size, False) * np.abs(beta)[..., None]
    return chunks.join(Akk) + SUBNORMAL, chunks.join(Aqk * arguments["scale"]) + SUBNORMAL


def factors_scale(arguments, results):
    chunks, Ai, k, v, beta, gc = parts_of(arguments, arguments["Ai"].shape[-1], 1, "Ai", "k", "v", "beta", "gc")
    last, more = _last(chunks, gc), 1 + flips(arguments["k"].dtype)
    depth = 1 + np.abs(gc)
    keys = np.abs(k * beta[..., None]) * np.exp2(gc) * depth
    w, u = (more * np.abs(Ai) @ part for part in (keys, np.abs(v * beta[..., None])))
    kg = np.abs(k) * np.exp2(np.minimum(last - gc, 0)) * (depth + np.abs(last))
    return tuple(chunks.join(part) + SUBNORMAL for part in (w, u, kg))


def _fades(chunks, gc, error):
    """What `chunk_spread.states` takes: nothing fades within the chunk, the state by 2^gc_last."""
    one = np.ones(gc.shape[:-1])
    return one, 0 * one, np.exp2(_last(chunks, gc)), 1 + _last(chunks, error)


def delta_h_scale(arguments, results):
    chunks, kg, w, u, gc = parts_of(arguments, arguments["chunk_size"], 1, "kg", "w", "u", "gc")
    S0, flip = arguments["state"].astype(np.float64), flips(arguments["kg"].dtype)
    _, (h, new, E) = states(chunks, S0, kg, w, u, _fades(chunks, gc, np.abs(gc)), flip)
    return h, chunks.join(new), E


def _outputs(q, new, h, gc, error, Aqk, scale, flip, Aqk_error=0.0, new_error=0.0, h_error=0.0):
    faded = np.abs(q) * scale * np.exp2(gc)
    before = faded @ (np.abs(h) + h_error).swapaxes(-1, -2) + (faded * (error + 2 * flip)) @ np.abs(h).swapaxes(-1, -2)
    weights = np.abs(Aqk)
    new_error = np.broadcast_to(new_error, new.shape)
    return before + weights @ new_error + (weights * (1 + flip) + Aqk_error) @ np.abs(new)


def chunk_o_scale(arguments, results):
    names = ("q", "v_new", "gc", "Aqk")
    chunks, q, new, gc, Aqk = parts_of(arguments, arguments["Aqk"].shape[-1], 1, *names)
    h, Aqk = arguments["h"].astype(np.float64), Aqk * below(Aqk.shape[-1], True)
    flip = flips(arguments["q"].dtype)
    return chunks.join(_outputs(q, new, h, gc, np.abs(gc), Aqk, arguments["scale"], flip))


def prefill_scale(arguments, results):
    size, flip = arguments["chunk_size"], flips(arguments["q"].dtype)
    chunks, q, k, v, beta = parts_of(arguments, size, 1, "q", "k", "v", "beta")
    given = {**arguments, **_GATE}
    g, _ = softplus_gate(TRUTH, *(given[name] for name in ("g1", "A_log", "dt_bias", "beta", "threshold")))
    gc, error = (np.cumsum(chunks.split(part), axis=2) / math.log(2) for part in (g, gate_scale(given, results)))
    strength, zero = beta[..., None], np.zeros_like(gc)
    (Akk, Aqk), (Akk_error, Aqk_error) = _pairs((k, q), k, gc, error)
    Akk, Akk_error = (
        part * below(size, False) * factor for part, factor in ((Akk, strength), (Akk_error, np.abs(strength)))
    )
    Aqk, Aqk_error = Aqk * arguments["scale"], Aqk_error * arguments["scale"]
    keys = k * strength * np.exp2(gc)
    (w, u), errors = factors(Akk, Akk_error, (keys, np.abs(keys) * error), (v * strength, zero[..., :1]), flip)
    kg = k * np.exp2(np.minimum(_last(chunks, gc) - gc, 0))
    S0 = arguments["state"].astype(np.float64)
    kg_error = np.abs(kg) * (error + _last(chunks, error) + flip)
    (h, new, _), (h_error, new_error, E) = states(
        chunks, S0, kg, w, u, _fades(chunks, gc, error), flip, *errors, kg_error
    )
    out = _outputs(
        q, new, h, gc, error, Aqk, arguments["scale"], flip, Aqk_error, new_error + flip * np.abs(new), h_error
    )
    return chunks.join(out), E
