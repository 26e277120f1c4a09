"""The gated delta rule in chunks on a GPU: launchers of cuda/gdn_chunk_states.cu, and the whole chain in one call.

bfloat16 heads of 128 in chunks of 64 run on tensor cores, in three launches; anything else stage by stage to the
mirror's bytes. What passes between the stages lies in scratch memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from vtlab.ops import providers

from .gdn_chunks import (
    THREADS,
    fits,
    places,
    run_cumsum,
    run_factors,
    run_kkt,
    run_solve,
)
from .judged import judged_by_norm
from .launch import MULTIPROCESSORS, PROVIDER, kind, results, start, vectors
from .runtime import current
from .scratch import scratch
from .slots import check_starts

FAMILY = "gdn_chunk_states"
_FLOAT32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SIZE, _WIDTH = 64, 128
"""Tokens of a chunk and elements of a head on tensor cores, as in gdn_tiles.cuh."""
_TILE = 2 * _SIZE * _WIDTH
_STAGE, _TOP = 2 * _TILE + _TILE // 2, 64
_PREPARE = 3 * _TILE + 4 * 16 * 16 * 4 + 3 * 4 * _SIZE
_OUTPUT = 4 * _TILE + 4 * _SIZE


def on_tensor_cores(k, width: int, size: int) -> bool:
    """Whether heads of k and of values of `width` in chunks of `size` tokens are the tensor cores' business."""
    return k.dtype == _BFLOAT16 and size == _SIZE and k.shape[-1] == width == _WIDTH


def _judged(key: str, value: str):
    def when(arguments: Mapping) -> bool:
        return on_tensor_cores(arguments[key], arguments[value].shape[-1], arguments.get("chunk_size", _SIZE))

    return when


judged_by_norm("gdn_delta_h", _judged("k", "u"))
judged_by_norm("gdn_chunk_o", _judged("k", "v_new"))
judged_by_norm("gdn_chunk_prefill", _judged("k", "v"), coarse=True)  # the inverse: 16 bits in two halves


def _cores(k, width: int, size: int, *arrays) -> bool:
    """Whether tensor cores take these arrays, which they do from addresses of whole vectors alone."""
    return on_tensor_cores(k, width, size) and vectors(_WIDTH, *((array, 0) for array in (k, *arrays)))


def _run_layout(op: str, starts, size: int, first, length, before, chunk) -> None:
    args = [starts, len(starts) - 1, size, first, length, before, chunk]
    start(op, FAMILY, "gdn_chunk_layout", len(starts) - 1, (THREADS, 1), args)


def chunks_before(op: str, starts, size: int) -> int:
    """The chunks before each sequence, in scratch memory."""
    (before,) = scratch.parts("gdn_layout", 4 * len(starts))
    _run_layout(op, starts, size, None, None, before, None)
    return before


def _run_states(op, cores, form, k, w, u, gc, state, starts, before, size, h, v_new) -> None:
    """form: v's heads and their width."""
    (heads, width), (k_heads, k_width), sequences = form, k.shape[1:], len(starts) - 1
    if not cores:
        args = [heads, k_heads, k_width, width, k, kind(k), w, u, gc, state, starts, before, sequences, size, h, v_new]
        shared = 4 * (2 * k_width + fits(op, size))
        start(op, FAMILY, "gdn_delta_h_any", sequences * heads * width, (THREADS, 1), args, shared)
        return
    blocks = sequences * heads * (_WIDTH // _TOP)
    rest = _TOP * 2 * _WIDTH + 2 * 4 * (_SIZE + 4)
    deep = blocks <= MULTIPROCESSORS and 3 * _STAGE + rest <= current().shared_memory()
    stages = 3 if deep else 2
    args = [heads, k_heads, k, w, u, gc, state, starts, before, sequences, stages, h, v_new]
    start(op, FAMILY, "gdn_delta_h_bf16", blocks, (THREADS, 1), args, stages * _STAGE + rest)


def _run_outputs(op, cores, form, q, k, v_new, h, gc, starts, before, chunks, scale, size, out) -> None:
    """chunks: the places of h."""
    (heads, width), (k_heads, k_width), tokens, sequences = form, k.shape[1:], len(q), len(starts) - 1
    if not cores:
        args = [heads, k_heads, k_width, width, q, k, kind(k), v_new, h, gc, starts, before, sequences, size,
                np.float32(scale), out]  # fmt: skip
        start(op, FAMILY, "gdn_chunk_o_any", tokens * heads, (THREADS, 1), args, 4 * fits(op, size))
        return
    args = [heads, k_heads, q, k, v_new, h, gc, starts, before, sequences, np.float32(scale), out]
    start(op, FAMILY, "gdn_chunk_o_bf16", chunks * heads, (THREADS, 1), args, _OUTPUT)


@providers.provider("gdn_chunk_layout", "cuda", PROVIDER)
def gdn_chunk_layout(query_start_loc, *, num_chunks, chunk_size=64, out=None):
    """oracle.gdn_chunk_states.gdn_chunk_layout."""
    op, sequences, chunks = "gdn_chunk_layout", len(query_start_loc) - 1, (num_chunks,)
    forms = (chunks, _INT32), (chunks, _INT32), ((sequences,), _INT32), ((num_chunks, 2), _INT32)
    written = results(op, out, (query_start_loc,), *forms)
    _run_layout(op, query_start_loc, chunk_size, *written)
    return written


def counted(starts, size: int) -> int:
    """The number of chunks, which only the device knows; waits for it."""
    return int((-(-np.diff(current().read(starts)) // size)).sum())


@providers.provider("gdn_delta_h", "cuda", PROVIDER)
def gdn_delta_h(k, w, u, gc, state, query_start_loc, *, chunk_size=64, out=None):
    """oracle.gdn_chunk_states.gdn_delta_h. Without `out` it waits to learn how many chunks there are."""
    op, starts, size = "gdn_delta_h", query_start_loc, chunk_size
    check_starts(op, starts, len(k))
    chunks = counted(starts, size) if out is None else len(out[0])
    inputs = (k, w, u, gc, state, starts)
    h, v_new = results(op, out, inputs, ((chunks, *state.shape[1:]), k.dtype), (u.shape, k.dtype))
    if len(starts) > 1:
        cores = _cores(k, u.shape[-1], size, w, u, h, v_new)
        _run_states(op, cores, u.shape[1:], k, w, u, gc, state, starts, chunks_before(op, starts, size), size, h, v_new)
    return h, v_new


@providers.provider("gdn_chunk_o", "cuda", PROVIDER)
def gdn_chunk_o(q, k, v_new, h, gc, query_start_loc, *, scale, chunk_size=64, out=None):
    """oracle.gdn_chunk_states.gdn_chunk_o."""
    op, starts, size, form = "gdn_chunk_o", query_start_loc, chunk_size, v_new.shape[1:]
    (target,) = results(op, out, (q, k, v_new, h, gc, starts), (v_new.shape, q.dtype))
    check_starts(op, starts, len(q))
    if len(starts) > 1:
        cores, before = _cores(k, form[1], size, q, v_new, h, target), chunks_before(op, starts, size)
        _run_outputs(op, cores, form, q, k, v_new, h, gc, starts, before, len(h), scale, size, target)
    return target


@providers.provider("gdn_chunk_prefill", "cuda", PROVIDER)
def gdn_chunk_prefill(q, k, v, g, beta, state, query_start_loc, *, scale, chunk_size=64, out=None):
    """oracle.gdn_chunk_states.gdn_chunk_prefill: three launches, or one a stage; scratch grows to the largest call."""
    op, (tokens, heads, width), (k_heads, k_width) = "gdn_chunk_prefill", v.shape, k.shape[1:]
    starts, size, form = query_start_loc, chunk_size, v.shape[1:]
    (target,) = results(op, out, (q, k, v, g, beta, state, starts), (v.shape, q.dtype))
    check_starts(op, starts, tokens)
    if not tokens or not heads:
        return target
    sequences, item, rows = len(starts) - 1, q.dtype.itemsize, tokens * heads
    chunks, cores = places(tokens, sequences, size), _cores(k, width, size, q, v, target)
    square = 0 if cores else rows * size
    sizes = 4 * rows, rows * k_width * item, rows * width * item, chunks * heads * width * k_width * item
    gc, w, u, h, A, Ai = scratch.parts("gdn_chunks", *sizes, 4 * square, item * square)
    if cores:
        args = [heads, k_heads, k, v, g, beta, starts, sequences, gc, w, u]
        start(op, FAMILY, "gdn_prepare", chunks * heads, (THREADS, 1), args, _PREPARE)
    else:
        run_cumsum(op, g, starts, size, gc)
        run_kkt(op, k, beta, gc, starts, size, A)
        run_solve(op, tokens, heads, A, starts, size, Ai, k.dtype)
        run_factors(op, k, v, beta, gc, Ai, starts, size, w, u)
    _run_states(op, cores, form, k, w, u, gc, state, starts, None, size, h, u)
    _run_outputs(op, cores, form, q, k, u, h, gc, starts, None, chunks, scale, size, target)
    return target
