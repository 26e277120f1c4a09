"""Recurrent states between their cache and float32 rows on a GPU: launchers of cuda/state_cache.cu."""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops import providers

from .launch import PROVIDER, kind, map_rows, results, vectors
from .slots import check_slots

_FAMILY = "state_cache"
_FLOAT32 = np.dtype(np.float32)


def _widths(cache, *others) -> tuple[int, bool]:
    """(elements of a slot, whether eight of them move at a time)."""
    width = math.prod(cache.shape[1:])
    return width, vectors(width, (cache, width), *((other, width) for other in others))


@providers.provider("gdn_state_gather", "cuda", PROVIDER)
def gdn_state_gather(cache, state_idx, has_initial_state=None, *, out=None):
    """oracle.state_cache.gdn_state_gather."""
    op, rows = "gdn_state_gather", len(state_idx)
    inputs = (cache, state_idx, has_initial_state)
    (target,) = results(op, out, inputs, ((rows, *cache.shape[1:]), _FLOAT32))
    check_slots(op, state_idx, len(cache), null=False, shared=True)
    width, wide = _widths(cache, target)
    flag_size = 0 if has_initial_state is None else has_initial_state.dtype.itemsize
    args = [cache, kind(cache), len(cache), state_idx, has_initial_state, flag_size, target]
    map_rows(op, _FAMILY, op, rows, width, wide, args)
    return target


@providers.provider("gdn_state_scatter", "cuda", PROVIDER)
def gdn_state_scatter(cache, working, state_idx, *, out=None):
    """oracle.state_cache.gdn_state_scatter."""
    op, rows = "gdn_state_scatter", len(state_idx)
    results(op, out, (cache, working, state_idx))
    check_slots(op, state_idx, len(cache), null=False)
    width, wide = _widths(cache, working)
    map_rows(op, _FAMILY, op, rows, width, wide, [cache, kind(cache), len(cache), state_idx, working, None])
