"""How far float32 can be from the chunked delta rule: a running error analysis of its stages, in units of 2^-24.

Each function follows its stage in float64 with magnitudes beside the values: what is added up, and what an error of an
operand becomes. A rounding of an operand may flip, which moves it by an ulp of its dtype (`flips`).
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.numerics import TRUTH

from .gdn_chunks import below, decay_between, inverse
from .sequences import Chunks, flips


def parts_of(arguments, size, heads, *names):
    chunks = Chunks(arguments["query_start_loc"], size)
    return chunks, *(TRUTH.load(chunks.split(arguments[name], heads)) for name in names)


def _fades(chunks, gc):
    """exp(gc_last - gc) and exp(gc_last) of each chunk, with the roundings of the exponents' differences."""
    last = np.take_along_axis(gc, np.maximum(chunks.length - 1, 0)[:, None, None], axis=2)
    fade = np.where(chunks.valid[:, None], np.exp(np.where(chunks.valid[:, None], last - gc, 0)), 0)
    return fade, fade * (1 + np.abs(last) + np.abs(gc)), np.exp(last)[..., None], 1 + np.abs(last)[..., None]


def states(chunks, S0, k, w, u, fades, flip, w_error=0.0, u_error=0.0, k_error=0.0):
    """(values, errors) of h, v_new and the last states; `fades` as of `_fades`."""
    fade, fade_error, keep, keep_error = fades
    S, E = S0.copy(), np.zeros_like(S0)
    h, h_error = np.zeros((2, len(chunks), *S0.shape[1:]))
    new, new_error = np.zeros((2, *u.shape))
    w_error, u_error, k_error = (np.broadcast_to(e, x.shape) for e, x in ((w_error, w), (u_error, u), (k_error, k)))
    for n, c in chunks.steps():
        h[c], h_error[c] = S[n], E[n] + flip * np.abs(S[n])
        new[c] = u[c] - w[c] @ S[n].swapaxes(-1, -2)
        size = np.abs(S[n]).swapaxes(-1, -2)
        new_error[c] = (
            np.abs(u[c]) + u_error[c] + w_error[c] @ size + np.abs(w[c]) @ (h_error[c].swapaxes(-1, -2) + size)
        )
        put = new[c] * fade[c][..., None]
        error = new_error[c] * fade[c][..., None] + np.abs(new[c]) * (fade_error[c] + flip * fade[c])[..., None]
        total = (np.abs(put) + error).swapaxes(-1, -2) @ np.abs(k[c]) + np.abs(put).swapaxes(-1, -2) @ k_error[c]
        E[n] = keep[c] * (E[n] + np.abs(S[n]) * keep_error[c]) + total
        S[n] = S[n] * keep[c] + put.swapaxes(-1, -2) @ k[c]
    return (h, new, S), (h_error, new_error, E)


def outputs(q, k, new, h, gc, scale, flip, new_error=0.0, h_error=0.0):
    """The error of gdn_chunk_o."""
    kept = below(gc.shape[-1], True)
    weights = np.abs(q) @ np.abs(k).swapaxes(-1, -2) * decay_between(TRUTH, gc, kept)
    depth = 1 + np.abs(gc[..., :, None]) + np.abs(gc[..., None, :])
    inside = weights @ np.broadcast_to(new_error, new.shape) + (weights * (depth + flip)) @ np.abs(new)
    before = np.abs(q) @ (np.abs(h) + h_error).swapaxes(-1, -2) * (np.exp(gc) * (1 + np.abs(gc)))[..., None]
    return scale * (inside + before)


def delta_h_scale(arguments, results):
    heads = arguments["u"].shape[1]
    chunks, k, w, u, gc = parts_of(arguments, arguments["chunk_size"], heads, "k", "w", "u", "gc")
    S0 = arguments["state"].astype(np.float64)
    _, (h, new, E) = states(chunks, S0, k, w, u, _fades(chunks, gc), flips(arguments["k"].dtype))
    return h, chunks.join(new), E


def chunk_o_scale(arguments, results):
    heads = arguments["v_new"].shape[1]
    chunks, q, k, new, gc = parts_of(arguments, arguments["chunk_size"], heads, "q", "k", "v_new", "gc")
    h = arguments["h"].astype(np.float64)
    return chunks.join(outputs(q, k, new, h, gc, arguments["scale"], flips(arguments["q"].dtype)))


def factors(A, A_error, keys, values, flip):
    """(X keys, X values) for X = (I + A)^-1 and their errors, X and both factors rounded."""
    X = inverse(TRUTH, A)
    size = np.abs(X)
    X_error = size @ (A_error + np.abs(A) + np.eye(A.shape[-1])) @ size + flip * size
    found, errors = [], []
    for factor, error in (keys, values):
        found.append(X @ factor)
        errors.append(
            X_error @ np.abs(factor) + size @ (error + (1 + flip) * np.abs(factor)) + flip * np.abs(found[-1])
        )
    return found, errors


def prefill_scale(arguments, results):
    heads, size = arguments["v"].shape[1], arguments["chunk_size"]
    chunks, q, k, v, g, beta = parts_of(arguments, size, heads, "q", "k", "v", "g", "beta")
    gc, flip = np.cumsum(g, axis=-1), flips(arguments["q"].dtype)
    between = decay_between(TRUTH, gc, below(size, False))
    depth = 1 + np.abs(gc[..., :, None]) + np.abs(gc[..., None, :])
    dots, strength = k @ k.swapaxes(-1, -2), beta[..., None]
    A_error = np.abs(strength) * (np.abs(k) @ np.abs(k).swapaxes(-1, -2)) * between * depth
    keys = k * strength * np.exp(gc)[..., None]
    (w, u), errors = factors(
        strength * dots * between, A_error, (keys, np.abs(keys) * (1 + np.abs(gc))[..., None]), (v * strength, 0), flip
    )
    S0 = arguments["state"].astype(np.float64)
    (h, new, _), (h_error, new_error, E) = states(chunks, S0, k, w, u, _fades(chunks, gc), flip, *errors)
    new_error = new_error + flip * np.abs(new)
    out = chunks.join(outputs(q, k, new, h, gc, arguments["scale"], flip, new_error, h_error))
    return out, E
