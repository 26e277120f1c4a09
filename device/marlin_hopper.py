"""Products with weights in Marlin's tiles on Hopper: which kernels take how many rows."""

from __future__ import annotations

from . import marlin_few, marlin_loaded, marlin_stream


def product(op: str, family: str, a, weights: marlin_stream.Streamed, out) -> None:
    """out = a by the weights; which parts of K are summed first hangs on the weights' shape alone."""
    (rows, depth), columns = a.shape, out.shape[1]
    if rows <= marlin_few.ROWS and not marlin_stream.runs(columns, depth):
        kernels = marlin_few
    else:
        kernels = marlin_stream if rows <= marlin_stream.ROWS else marlin_loaded
    kernels.product(op, family, a, weights, out, marlin_stream.length_of(columns, depth))
