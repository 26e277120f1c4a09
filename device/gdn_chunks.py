"""The gated delta rule in chunks on a GPU, first half: launchers of cuda/gdn_chunks.cu, stage by stage."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .launch import PROVIDER, kind, results, start
from .slots import check_starts

FAMILY = "gdn_chunks"
THREADS = 128
_FLOAT32 = np.dtype(np.float32)
_SOLVING = 256
_LONGEST = 4096
"""Tokens of the longest chunk: two numbers of each fit into a block's shared memory."""


def places(tokens: int, sequences: int, size: int) -> int:
    """Places for chunks whose number only the device knows, as Chunks::place in cuda/chunks.cuh deals them out."""
    return tokens // size + sequences if tokens else 0


def fits(op: str, size: int) -> int:
    """The chunk size; ContractError where a GPU has no room for it."""
    if size > _LONGEST:
        raise ContractError(op, "chunk_size", size, f"at most {_LONGEST} on a GPU")
    return size


def run_cumsum(op: str, g, starts, size: int, gc) -> None:
    tokens, heads = g.shape
    args = [tokens, heads, g, starts, len(starts) - 1, size, gc]
    start(op, FAMILY, "gdn_chunk_cumsum", -(-tokens * heads // THREADS), (THREADS, 1), args)


def run_kkt(op: str, k, beta, gc, starts, size: int, A) -> None:
    tokens, heads = beta.shape
    args = [tokens, heads, *k.shape[1:], k, kind(k), beta, gc, starts, len(starts) - 1, size, A]
    start(op, FAMILY, "gdn_kkt", -(-tokens * heads * size // THREADS), (THREADS, 1), args)


def run_solve(op: str, tokens: int, heads: int, A, starts, size: int, Ai, dtype) -> None:
    args = [heads, A, starts, len(starts) - 1, size, Ai, kind(dtype)]
    start(op, FAMILY, "gdn_solve_tril", places(tokens, len(starts) - 1, size) * heads, (_SOLVING, 1), args)


def run_factors(op: str, k, v, beta, gc, Ai, starts, size: int, w, u) -> None:
    (tokens, heads, width), k_heads, k_width = v.shape, *k.shape[1:]
    args = [heads, k_heads, k_width, width, k, v, kind(k), beta, gc, Ai, starts, len(starts) - 1, size, w, u]
    grid = places(tokens, len(starts) - 1, size) * heads
    start(op, FAMILY, "gdn_recompute_w_u", grid, (THREADS, 1), args, 8 * fits(op, size))


@providers.provider("gdn_chunk_cumsum", "cuda", PROVIDER)
def gdn_chunk_cumsum(g, query_start_loc, *, chunk_size=64, out=None):
    """oracle.gdn_chunks.gdn_chunk_cumsum."""
    op = "gdn_chunk_cumsum"
    (gc,) = results(op, out, (g, query_start_loc), (g.shape, _FLOAT32))
    check_starts(op, query_start_loc, len(g))
    run_cumsum(op, g, query_start_loc, chunk_size, gc)
    return gc


@providers.provider("gdn_kkt", "cuda", PROVIDER)
def gdn_kkt(k, beta, gc, query_start_loc, *, chunk_size=64, out=None):
    """oracle.gdn_chunks.gdn_kkt."""
    op = "gdn_kkt"
    (A,) = results(op, out, (k, beta, gc, query_start_loc), ((*beta.shape, chunk_size), _FLOAT32))
    check_starts(op, query_start_loc, len(k))
    run_kkt(op, k, beta, gc, query_start_loc, chunk_size, A)
    return A


@providers.provider("gdn_solve_tril", "cuda", PROVIDER)
def gdn_solve_tril(A, query_start_loc, *, out_dtype=None, out=None):
    """oracle.gdn_chunks.gdn_solve_tril."""
    op, (tokens, heads, size) = "gdn_solve_tril", A.shape
    (Ai,) = results(op, out, (A, query_start_loc), (A.shape, np.dtype(out_dtype or _FLOAT32)))
    check_starts(op, query_start_loc, tokens)
    run_solve(op, tokens, heads, A, query_start_loc, size, Ai, Ai)
    return Ai


@providers.provider("gdn_recompute_w_u", "cuda", PROVIDER)
def gdn_recompute_w_u(k, v, beta, gc, Ai, query_start_loc, *, out=None):
    """oracle.gdn_chunks.gdn_recompute_w_u."""
    op = "gdn_recompute_w_u"
    forms = ((*v.shape[:2], k.shape[-1]), k.dtype), (v.shape, k.dtype)
    w, u = results(op, out, (k, v, beta, gc, Ai, query_start_loc), *forms)
    check_starts(op, query_start_loc, len(k))
    run_factors(op, k, v, beta, gc, Ai, query_start_loc, Ai.shape[-1], w, u)
    return w, u
