"""Kimi delta attention in chunks on a GPU: launchers of cuda/kda_chunk_states.cu, and the whole chain in one call.

bfloat16 heads of 128 in chunks of 64 run on tensor cores, in three launches; anything else stage by stage to the
mirror's bytes. What passes between the stages lies in scratch memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vtlab.ops import providers

from .gdn_chunk_states import chunks_before, counted, on_tensor_cores
from .gdn_chunks import THREADS, fits, places, run_solve
from .judged import judged_by_norm
from .kda_chunks import run_cumsum, run_factors, run_kkt
from .launch import MULTIPROCESSORS, PROVIDER, kind, results, start, vectors
from .runtime import current
from .scratch import scratch
from .slots import check_starts

FAMILY = "kda_chunk_states"
_SIZE, _WIDTH = 64, 128
"""Tokens of a chunk and elements of a head on tensor cores, as in gdn_tiles.cuh."""
_TILE = 2 * _SIZE * _WIDTH
_STAGE, _TOP = 2 * _TILE + _TILE // 2, 64
_PREPARING = 256
_PREPARE = 4 * _TILE + 4 * _SIZE * (_WIDTH + 8) + 4 * _SIZE
_OUTPUT = 4 * _TILE + 2 * _SIZE * _SIZE


def _judged(key: str, value: str, size_of=lambda arguments: arguments["chunk_size"]):
    def when(arguments: Mapping) -> bool:
        return on_tensor_cores(arguments[key], arguments[value].shape[-1], size_of(arguments))

    return when


judged_by_norm("kda_delta_h", _judged("kg", "u"))
judged_by_norm("kda_chunk_o", _judged("q", "v_new", lambda arguments: arguments["Aqk"].shape[-1]))
judged_by_norm("kda_chunk_prefill", _judged("k", "v"), coarse=True)  # pairs and the inverse: 16 bits in two halves


def _cores(k, width: int, size: int, *arrays) -> bool:
    """Whether tensor cores take these arrays, which they do from addresses of whole vectors alone."""
    return on_tensor_cores(k, width, size) and vectors(_WIDTH, *((array, 0) for array in (k, *arrays)))


def _run_states(op, cores, form, dtype, kg, w, u, sums, last_ones, state, starts, before, size, h, v_new) -> None:
    """form: heads and the width of their values; sums: of all tokens, or where `last_ones` of each chunk's last."""
    (heads, width), k_width, sequences = form, state.shape[-1], len(starts) - 1
    if not cores:
        args = [heads, k_width, width, kg, kind(dtype), w, u, sums, state, starts, before, sequences, size, h, v_new]
        shared = 4 * (2 * k_width + fits(op, size))
        start(op, FAMILY, "kda_delta_h_any", sequences * heads * width, (THREADS, 1), args, shared)
        return
    blocks = sequences * heads * (_WIDTH // _TOP)
    rest = _TOP * 2 * _WIDTH + 2 * 4 * _WIDTH
    deep = blocks <= MULTIPROCESSORS and 3 * _STAGE + rest <= current().shared_memory()
    stages = 3 if deep else 2
    args = [heads, kg, w, u, sums, int(last_ones), state, starts, before, sequences, stages, h, v_new]
    start(op, FAMILY, "kda_delta_h_bf16", blocks, (THREADS, 1), args, stages * _STAGE + rest)


def _run_outputs(op, heads, qg, P, v_new, h, starts, before, chunks, out) -> None:
    """chunks: the places of h."""
    args = [heads, qg, P, v_new, h, starts, before, len(starts) - 1, out]
    start(op, FAMILY, "kda_chunk_o_bf16", chunks * heads, (THREADS, 1), args, _OUTPUT)


def _run_outputs_any(op, form, q, v_new, h, gc, Aqk, starts, before, scale, size, out) -> None:
    (heads, width), (tokens, _, k_width) = form, q.shape
    args = [heads, k_width, width, q, kind(q), v_new, h, gc, Aqk, starts, before, len(starts) - 1, size,
            np.float32(scale), out]  # fmt: skip
    start(op, FAMILY, "kda_chunk_o_any", tokens * heads, (THREADS, 1), args, 4 * (size + k_width))


@providers.provider("kda_delta_h", "cuda", PROVIDER)
def kda_delta_h(kg, w, u, gc, state, query_start_loc, *, chunk_size=64, out=None):
    """oracle.kda_chunk_states.kda_delta_h. Without `out` it waits to learn how many chunks there are."""
    op, starts, size = "kda_delta_h", query_start_loc, chunk_size
    check_starts(op, starts, len(kg))
    chunks = counted(starts, size) if out is None else len(out[0])
    inputs = (kg, w, u, gc, state, starts)
    h, v_new = results(op, out, inputs, ((chunks, *state.shape[1:]), kg.dtype), (u.shape, kg.dtype))
    if len(starts) > 1:
        cores, before = _cores(kg, u.shape[-1], size, w, u, h, v_new), chunks_before(op, starts, size)
        _run_states(op, cores, u.shape[1:], kg.dtype, kg, w, u, gc, False, state, starts, before, size, h, v_new)
    return h, v_new


@providers.provider("kda_chunk_o", "cuda", PROVIDER)
def kda_chunk_o(q, v_new, h, gc, Aqk, query_start_loc, *, scale, out=None):
    """oracle.kda_chunk_states.kda_chunk_o: on tensor cores two launches, the first of which rounds their operands."""
    op, starts, size, form = "kda_chunk_o", query_start_loc, Aqk.shape[-1], v_new.shape[1:]
    (target,) = results(op, out, (q, v_new, h, gc, Aqk, starts), (v_new.shape, q.dtype))
    check_starts(op, starts, len(q))
    if len(starts) == 1:
        return target
    before, rows = chunks_before(op, starts, size), len(q) * form[0]
    if not _cores(q, form[1], size, v_new, h, gc, Aqk, target):
        _run_outputs_any(op, form, q, v_new, h, gc, Aqk, starts, before, scale, size, target)
        return target
    qg, P = scratch.parts("kda_outputs", _WIDTH * rows * 2, _SIZE * rows * 2)
    args = [rows, form[0], q, gc, Aqk, starts, len(starts) - 1, np.float32(scale), qg, P]
    start(op, FAMILY, "kda_chunk_weights", -(-rows * (_WIDTH + _SIZE) // 8 // THREADS), (THREADS, 1), args)
    _run_outputs(op, form[0], qg, P, v_new, h, starts, before, len(h), target)
    return target


@providers.provider("kda_chunk_prefill", "cuda", PROVIDER)
def kda_chunk_prefill(q, k, v, g1, beta, A_log, dt_bias, state, query_start_loc, *, scale, chunk_size=64, out=None):
    """oracle.kda_chunk_states.kda_chunk_prefill: three launches, or one a stage; scratch grows to the largest call."""
    op, (tokens, heads, width), k_width = "kda_chunk_prefill", v.shape, k.shape[-1]
    starts, size, form = query_start_loc, chunk_size, v.shape[1:]
    inputs = (q, k, v, g1, beta, A_log, dt_bias, state, starts)
    (target,) = results(op, out, inputs, (v.shape, q.dtype))
    check_starts(op, starts, tokens)
    if not tokens or not heads:
        return target
    sequences, item, rows = len(starts) - 1, q.dtype.itemsize, tokens * heads
    chunks, cores = places(tokens, sequences, size), _cores(k, width, size, q, v, g1, target)
    keys, states = rows * k_width * item, chunks * heads * width * k_width * item
    factors = keys, rows * width * item, keys, states
    if cores:
        w, u, kg, h, qg, P, ends = scratch.parts(
            "kda_chunks", *factors, keys, rows * size * item, 4 * chunks * heads * k_width
        )
        args = [heads, q, k, v, g1, beta, A_log, dt_bias, starts, sequences, np.float32(scale), ends, w, u, kg, qg, P]
        start(op, FAMILY, "kda_prepare", chunks * heads, (_PREPARING, 1), args, _PREPARE)
        _run_states(op, cores, form, q.dtype, kg, w, u, ends, True, state, starts, None, size, h, u)
        _run_outputs(op, heads, qg, P, u, h, starts, None, chunks, target)
        return target
    square = rows * size
    w, u, kg, h, gc, Akk, Aqk, Ai = scratch.parts(
        "kda_chunks", *factors, 4 * rows * k_width, 4 * square, 4 * square, item * square
    )
    run_cumsum(op, g1, A_log, dt_bias, starts, 1.0, 20.0, size, gc)
    run_kkt(op, q, k, gc, beta, starts, scale, size, Akk, Aqk)
    run_solve(op, tokens, heads, Akk, starts, size, Ai, k.dtype)
    run_factors(op, k, v, beta, gc, Ai, starts, size, w, u, kg)
    _run_states(op, cores, form, q.dtype, kg, w, u, gc, False, state, starts, None, size, h, u)
    _run_outputs_any(op, form, q, u, h, gc, Aqk, starts, None, scale, size, target)
    return target
