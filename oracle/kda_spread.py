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


def _pairs(left, right, sums, error, kept):
    """sum_d |left_i| |right_j| 2^(G_i - G_j) (1 + the errors of both G), i and j as `kept` says."""
    out = np.zeros((*left.shape[:-1], left.shape[-2]))
    for j in range(left.shape[-2]):
        exponent = np.minimum(sums - sums[..., j : j + 1, :], 0)
        factor = np.exp2(exponent) * (1 + error + error[..., j : j + 1, :])
        out[..., j] = np.einsum("...id,...d->...i", np.abs(left) * factor, np.abs(right[..., j, :]))
    return out * kept


def kkt_scale(arguments, results):
    size = arguments["chunk_size"]
    chunks, q, k, gc, beta = parts_of(arguments, size, 1, "q", "k", "gc", "beta")
    Akk = _pairs(k, k, gc, np.abs(gc), below(size, False)) * np.abs(beta)[..., None]
    Aqk = _pairs(q, k, gc, np.abs(gc), below(size, True)) * arguments["scale"]
    return chunks.join(Akk) + SUBNORMAL, chunks.join(Aqk) + SUBNORMAL


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
    signed = np.stack([_signed(left, k, gc) for left in (k, q)])
    Akk, Aqk = signed[0] * strength * below(size, False), signed[1] * arguments["scale"] * below(size, True)
    Akk_error = _pairs(k, k, gc, error, below(size, False)) * np.abs(strength)
    Aqk_error = _pairs(q, k, gc, error, below(size, True)) * arguments["scale"]
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


def _signed(left, right, sums):
    """sum_d left_i right_j 2^(G_i - G_j), exponents above 0 (j > i) cut off."""
    out = np.zeros((*left.shape[:-1], left.shape[-2]))
    for j in range(left.shape[-2]):
        factor = np.exp2(np.minimum(sums - sums[..., j : j + 1, :], 0))
        out[..., j] = np.einsum("...id,...d->...i", left * factor, right[..., j, :])
    return out
