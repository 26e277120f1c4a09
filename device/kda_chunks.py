"""Kimi delta attention in chunks on a GPU, first half: launchers of cuda/kda_chunks.cu, stage by stage."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers

from .gdn_chunks import THREADS, places
from .launch import PROVIDER, kind, results, start
from .slots import check_starts

FAMILY = "kda_chunks"
_FLOAT32 = np.dtype(np.float32)


def run_cumsum(op: str, g1, A_log, dt_bias, starts, slope: float, threshold: float, size: int, gc) -> None:
    tokens, heads, width = g1.shape
    args = [heads, width, g1, kind(g1), A_log, dt_bias, starts, len(starts) - 1, size, np.float32(slope),
            np.float32(threshold), gc]  # fmt: skip
    grid = places(tokens, len(starts) - 1, size) * -(-heads * width // THREADS)
    start(op, FAMILY, "kda_gate_cumsum", grid, (THREADS, 1), args)


def run_kkt(op: str, q, k, gc, beta, starts, scale: float, size: int, Akk, Aqk) -> None:
    tokens, heads, width = k.shape
    args = [tokens, heads, width, q, k, kind(k), gc, beta, starts, len(starts) - 1, size, np.float32(scale), Akk, Aqk]
    start(op, FAMILY, "kda_kkt", -(-tokens * heads * size // THREADS), (THREADS, 1), args)


def run_factors(op: str, k, v, beta, gc, Ai, starts, size: int, w, u, kg) -> None:
    (tokens, heads, width), k_width = v.shape, k.shape[-1]
    args = [heads, k_width, width, k, v, kind(k), beta, gc, Ai, starts, len(starts) - 1, size, w, u, kg]
    grid = places(tokens, len(starts) - 1, size) * heads * -(-(k_width + width) // THREADS)
    start(op, FAMILY, "kda_recompute_w_u", grid, (THREADS, 1), args)


@providers.provider("kda_decay_gate_chunk_cumsum", "cuda", PROVIDER)
def kda_decay_gate_chunk_cumsum(
    g1, A_log, dt_bias, query_start_loc, *, beta=1.0, threshold=20.0, chunk_size=64, out=None
):
    """oracle.kda_chunks.kda_decay_gate_chunk_cumsum."""
    op = "kda_decay_gate_chunk_cumsum"
    (gc,) = results(op, out, (g1, A_log, dt_bias, query_start_loc), (g1.shape, _FLOAT32))
    check_starts(op, query_start_loc, len(g1))
    run_cumsum(op, g1, A_log, dt_bias, query_start_loc, beta, threshold, chunk_size, gc)
    return gc


@providers.provider("kda_kkt", "cuda", PROVIDER)
def kda_kkt(q, k, gc, beta, query_start_loc, *, scale, chunk_size=64, out=None):
    """oracle.kda_chunks.kda_kkt."""
    op, form = "kda_kkt", ((*beta.shape, chunk_size), _FLOAT32)
    Akk, Aqk = results(op, out, (q, k, gc, beta, query_start_loc), form, form)
    check_starts(op, query_start_loc, len(k))
    run_kkt(op, q, k, gc, beta, query_start_loc, scale, chunk_size, Akk, Aqk)
    return Akk, Aqk


@providers.provider("kda_recompute_w_u", "cuda", PROVIDER)
def kda_recompute_w_u(k, v, beta, gc, Ai, query_start_loc, *, out=None):
    """oracle.kda_chunks.kda_recompute_w_u."""
    op, of_k = "kda_recompute_w_u", (k.shape, k.dtype)
    w, u, kg = results(op, out, (k, v, beta, gc, Ai, query_start_loc), of_k, (v.shape, k.dtype), of_k)
    check_starts(op, query_start_loc, len(k))
    run_factors(op, k, v, beta, gc, Ai, query_start_loc, Ai.shape[-1], w, u, kg)
    return w, u, kg
