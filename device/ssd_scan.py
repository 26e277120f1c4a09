"""Mamba-2's outputs on a GPU, and the whole of it in chunks: launchers of cuda/ssd_scan.cu.

16-bit heads of 64 channels, or a multiple, run on tensor cores, in three launches; anything else stage by stage to the
mirror's bytes. What passes between the stages lies in scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from vtlab.ops import providers

from .gdn_chunks import fits, places
from .judged import judged_by_norm
from .launch import PROVIDER, kind, results, start, vectors
from .scratch import scratch
from .slots import check_starts
from .ssd import (
    THREADS,
    check_ascent,
    check_cuts,
    run_bmm,
    run_cumsum,
    run_passing,
    run_plan,
    run_states,
    steps_arguments,
)
from .ssd_loop import skip_step

FAMILY = "ssd_scan"
_FLOAT32 = np.dtype(np.float32)
_NAMES = {np.dtype(ml_dtypes.bfloat16): "bf16", np.dtype(np.float16): "f16"}
_PART, _LONGEST, _LARGEST = 64, 128, 1024
"""Channels of a block and tokens of a tile, elements of the longest state, tokens of the longest chunk."""
_SUM_HEADS, _ROWS, _WALKING = 8, 128, 256
"""Heads of a block of time steps, tokens of a block of outputs, threads of a block that walks."""
_TILE = 2 * _PART * _PART
_WALK = 7 * _TILE + 2 * 4 * (_PART + 4)


def on_tensor_cores(x, B, size: int) -> bool:
    """Whether heads of x and groups of B in chunks of `size` tokens are the tensor cores' business."""
    width, length = x.shape[2], B.shape[2]
    heads = width > 0 and width % _PART == 0 and 0 < length <= _LONGEST and length % 16 == 0
    return x.dtype in _NAMES and heads and size % _PART == 0 and size <= _LARGEST


def _judged(arguments: Mapping) -> bool:
    return on_tensor_cores(arguments["x"], arguments["B"], arguments["chunk_size"])


judged_by_norm("ssd_chunk_prefill", _judged)


def _run_scan(op, CB, x, dts, sums, C, states, cuts, owner, chunks, size, D, z, initial, out) -> None:
    tokens, heads, width = x.shape
    args = [
        CB, x, dts, sums, C, kind(x), heads, width, *C.shape[1:], *states, cuts, owner, chunks, size, tokens, D,
        skip_step(D), z, initial, 0 if initial is None else kind(initial), 0 if initial is None else len(initial), out,
    ]  # fmt: skip
    start(op, FAMILY, "ssd_chunk_scan", chunks * size * heads, (THREADS, 1), args, 4 * fits(op, size))


@providers.provider("ssd_chunk_scan", "cuda", PROVIDER)
def ssd_chunk_scan(
    CB, x, dt, dA_cumsum, C, states, cu_chunk_seqlens, seq_idx, D=None, z=None, initial_states=None, *, out=None
):
    """oracle.ssd_scan.ssd_chunk_scan."""
    op, (chunks, _, size, _), cuts = "ssd_chunk_scan", CB.shape, cu_chunk_seqlens
    inputs = (CB, x, dt, dA_cumsum, C, states, cuts, seq_idx, D, z, initial_states)
    (target,) = results(op, out, inputs, (x.shape, x.dtype))
    check_cuts(op, cuts, len(x), size)
    most = 2**31 - 1 if initial_states is None else len(initial_states) - 1
    check_ascent(op, "seq_idx", seq_idx, 0, most, False)
    after = states, kind(states)
    _run_scan(op, CB, x, dt, dA_cumsum, C, after, cuts, seq_idx, chunks, size, D, z, initial_states, target)
    return target


def _on_cores(op: str, steps: list, A, x, B, C, starts, size: int, D, z, initial, out, final) -> None:
    (tokens, heads, width), (groups, length), sequences = x.shape, B.shape[1:], len(starts) - 1
    chunks, name, tops = places(tokens, sequences, size), _NAMES[np.dtype(x.dtype)], width // _PART
    parts, own = -(-length // _PART), 4 * tokens * heads
    sizes = own, own, 2 * chunks * heads * width * length, _WALKING // 8 * chunks * heads * tops * parts
    sums, dts, before, loud = scratch.parts("ssd_chunks", *sizes)
    args = [*steps, A, starts, sequences, size, tokens, sums, dts]
    start(op, FAMILY, "ssd_sums", chunks * -(-heads // _SUM_HEADS), (32 * _SUM_HEADS, 1), args)
    shape = [heads, width, groups, length]
    args = [
        *shape, x, B, sums, dts, starts, sequences, size, tokens, initial, 0 if initial is None else kind(initial),
        before, loud, final,
    ]  # fmt: skip
    start(op, FAMILY, f"ssd_walk_{name}", sequences * heads * tops * parts, (_WALKING, 1), args, _WALK)
    held, tiles = parts * _PART, -(-size // _ROWS)
    args = [
        *shape, x, B, C, sums, dts, before, loud, starts, sequences, size, tokens, D, skip_step(D), z, out,
    ]  # fmt: skip
    shared = 2 * held * (_ROWS + 2 * _PART) + 2 * _TILE + 8 * tiles * _ROWS
    start(op, FAMILY, f"ssd_outputs_{name}_{held}", chunks * tiles * tops * heads, (THREADS, 1), args, shared)


def _by_stages(op: str, steps: list, A, x, B, C, starts, size: int, D, z, initial, out, final) -> None:
    (tokens, heads, width), (groups, length), sequences = x.shape, B.shape[1:], len(starts) - 1
    chunks, states = places(tokens, sequences, size), heads * width * length
    rows = 4 * heads * chunks * size
    cuts, last, owner, sums, dts, local, passed, CB = scratch.parts(
        "ssd_stages", 4 * (chunks + 1), 4 * sequences, 4 * chunks, rows, rows, 4 * chunks * states, 4 * chunks * states,
        4 * chunks * groups * size * size,
    )  # fmt: skip
    run_plan(op, starts, size, chunks, cuts, last, owner)
    run_cumsum(op, steps, A, cuts, chunks, size, tokens, sums, dts)
    run_states(op, x, B, dts, sums, cuts, chunks, size, local)
    form = (chunks, heads, width * length)
    run_passing(op, form, local, sums, last, sequences, size, initial, passed, _FLOAT32, final)
    run_bmm(op, C, B, cuts, chunks, size, CB)
    _run_scan(op, CB, x, dts, sums, C, (passed, 0), cuts, owner, chunks, size, D, z, initial, out)


@providers.provider("ssd_chunk_prefill", "cuda", PROVIDER)
def ssd_chunk_prefill(
    x, dt, A, B, C, query_start_loc, D=None, z=None, dt_bias=None, initial_states=None, *, chunk_size,
    dt_softplus=False, dt_min=0.0, dt_max=math.inf, out=None,
):  # fmt: skip
    """oracle.ssd_scan.ssd_chunk_prefill: three launches, or one a stage; scratch grows to the largest call."""
    op, starts, size = "ssd_chunk_prefill", query_start_loc, chunk_size
    inputs = (x, dt, A, B, C, starts, D, z, dt_bias, initial_states)
    states = (len(starts) - 1, *x.shape[1:], B.shape[2])
    target, final = results(op, out, inputs, (x.shape, x.dtype), (states, _FLOAT32))
    check_starts(op, starts, len(x))
    steps = steps_arguments(dt, dt_bias, dt_softplus, dt_min, dt_max)
    aligned = ((array, 0) for array in (x, B, C, z, target))
    cores = on_tensor_cores(x, B, size) and vectors(_PART, *aligned)
    run = _on_cores if cores else _by_stages
    run(op, steps, A, x, B, C, starts, size, D, z, initial_states, target, final)
    return target, final
