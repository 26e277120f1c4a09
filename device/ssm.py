"""Mamba's state update on a GPU: launchers of cuda/ssm.cu."""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops import providers

from .launch import MULTIPROCESSORS, PROVIDER, kind, map_rows, results, start, vectors
from .scratch import scratch
from .slots import check_slots
from .strips import LANES, lanes_of

_THREADS = 128
_FORMS = {16: ("update_16", 4), 128: ("update_128", 2)}
"""By elements of a row: the kernel that holds such rows, and how many of them a thread has."""
_MANY_ROWS = 2 * MULTIPROCESSORS * 4 * (_THREADS // 4)
"""Rows of 16 from which on four a thread give every multiprocessor two blocks."""
_TIED = {True: ("tied", 1), False: ("tied_narrow", 2)}
"""The same for rows of 128 whose A is one number, by whether the state is float32."""


def _form(rows: int, heads: int, dim: int, length: int, tied: bool, wide: bool) -> tuple[str, int] | None:
    """(kernel, its blocks), or None where none of them holds such rows."""
    name, held = _TIED[wide] if tied and length == 128 else _FORMS.get(length, (None, 0))
    if name == "update_128" and not wide:
        return None
    groups = _THREADS // (LANES if length == 128 else LANES // 2)
    if name == "update_16" and rows * heads * dim < _MANY_ROWS:
        name, held = "update_16_few", 1
    if not held or dim % (held * groups):
        return None
    return name, rows * heads * (dim // (held * groups))


@providers.provider("selective_state_update", "cuda", PROVIDER)
def selective_state_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, state_idx=None, dst_idx=None, *, dt_softplus=False, out=None
):
    """oracle.ssm.selective_state_update.

    With dst_idx new states wait in scratch memory: a row may write the slot that another one reads.
    """
    op, (rows, heads, dim), length = "selective_state_update", x.shape, A.shape[2]
    (target,) = results(op, out, (state, x, dt, A, B, C, D, z, dt_bias, state_idx, dst_idx), (x.shape, x.dtype))
    check_slots(op, state_idx, len(state), shared=True)
    name, targets = ("state_idx", state_idx) if dst_idx is None else ("dst_idx", dst_idx)
    check_slots(op, targets, len(state), name=name)
    if not target.size:
        return target
    fresh = None if dst_idx is None else scratch.array("new states", (rows, heads, dim, length), np.float32)
    steps = [stride // A.dtype.itemsize for stride in A.strides]
    tied = steps[1:] == [0, 0] or (dim == length == 1)
    plain = all(vectors(length, (array, length)) for array in (state, B, C))
    form = None
    if plain and (tied or (steps[2] == 1 and vectors(length, (A, steps[0]), (A, steps[1])))):
        form = _form(rows, heads, dim, length, tied, state.dtype == np.float32)
    args = [
        rows, state, kind(state), len(state), x, dt, kind(x), A, *steps, B, C, B.shape[1], D, z, dt_bias, state_idx,
        dst_idx, target, fresh, heads, dim, length, int(dt_softplus),
        lanes_of(length),
    ]  # fmt: skip
    name, blocks = form or ("update_any", -(-rows * heads * dim // (_THREADS // LANES)))
    start(op, "ssm", name, blocks, (_THREADS, 1), args)
    if fresh is not None:
        width = math.prod(state.shape[1:])
        wide = vectors(width, (state, width), (fresh, width))
        where = [state, kind(state), len(state), dst_idx, fresh, state_idx]
        map_rows(op, "state_cache", "gdn_state_scatter", rows, width, wide, where)
    return target
