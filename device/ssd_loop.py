"""Mamba-2 as a loop over tokens on a GPU: launchers of cuda/ssd_loop.cu."""

from __future__ import annotations

import math

from vtlab.ops import providers

from .launch import PROVIDER, kind, results, start, vectors
from .slots import check_starts
from .ssd import steps_arguments
from .strips import LANES, lanes_of

_THREADS = 128
_ROWS = _THREADS // LANES
_IN_REGISTERS = (64, 128)
"""Elements of a row of the state that a kernel holds in registers."""


def skip_step(D) -> int:
    """What lies between the heads of D where each of a head's channels has its own, else 0."""
    return D.shape[1] if D is not None and D.ndim == 2 else 0


@providers.provider("ssd_recurrent", "cuda", PROVIDER)
def ssd_recurrent(
    x, dt, A, B, C, state, query_start_loc, D=None, z=None, dt_bias=None, *, dt_softplus=False, dt_min=0.0,
    dt_max=math.inf, out=None,
):  # fmt: skip
    """oracle.ssd_loop.ssd_recurrent."""
    op, (tokens, heads, width), (groups, length) = "ssd_recurrent", x.shape, B.shape[1:]
    (target,) = results(op, out, (x, dt, A, B, C, state, query_start_loc, D, z, dt_bias), (x.shape, x.dtype))
    check_starts(op, query_start_loc, tokens)
    if not target.size:
        return target
    args = [
        *steps_arguments(dt, dt_bias, dt_softplus, dt_min, dt_max), x, B, C, kind(x), A, width, groups, length, state,
        query_start_loc, tokens, D, skip_step(D), z, target, lanes_of(length),
    ]  # fmt: skip
    blocks = (len(query_start_loc) - 1) * heads * -(-width // _ROWS)
    if length in _IN_REGISTERS and all(vectors(length, (array, length)) for array in (B, C, state)):
        start(op, "ssd_loop", f"ssd_recurrent_{length}", blocks, (_THREADS, 1), args)
    else:
        start(op, "ssd_loop", "ssd_recurrent_any", blocks, (_THREADS, 1), args, 4 * _ROWS * length)
    return target
