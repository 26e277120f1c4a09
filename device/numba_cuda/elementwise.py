"""The embedding gather: the second provider of device/elementwise.py's op."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from ..launch import results
from ..runtime import current
from .launch import PRIORITY, PROVIDER, first_fault, installed, launch_rows, number, words


@providers.provider("embedding", "cuda", PROVIDER, priority=PRIORITY, supports=installed)
def embedding(table, ids, *, out_dtype=None, out=None):
    """oracle.elementwise.embedding without a conversion; others are declined. Bad ids as in device/elementwise.py."""
    op, (entries, width), item = "embedding", table.shape, table.dtype.itemsize
    if out_dtype is not None and np.dtype(out_dtype) != table.dtype:
        return NotImplemented
    (target,) = results(op, out, (table, ids), ((len(ids), width), table.dtype))
    if out is None and (at := first_fault("ids_fit", len(ids), [ids, entries])) is not None:
        got = f"id {int(current().read(ids)[at])} at position {at}"
        raise ContractError(op, "ids", got, f"0 <= id < V = {entries}")
    if target.size:
        held = words(item, (table, target), (width * item,))
        nan = number("numba nan", -1).view(held[0].dtype)[:1]
        launch_rows(op, len(ids), held[0].shape[1], [held[0], ids, held[1], nan])
    return target
