"""Reproducible draws on a GPU: launchers of cuda/draws.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.contract import refuse

from .faults import first_fault
from .launch import PROVIDER, results
from .runtime import current
from .scratch import scratch
from .vocab import cut, launch_chunks, suffix

_BEST = 16
"""Bytes of a chunk's best score and its column."""


def _draw(op: str, kernel: str, values, more: list, target) -> None:
    """The best of every chunk, from `kernel` with the arguments `more`, then the best of every row."""
    rows, width = values.shape
    if not rows:
        return
    chunks, per = cut(rows, width)
    (bests,) = scratch.parts("draw", _BEST * rows * chunks)
    args = [width, chunks, per, *more, bests]
    launch_chunks(op, "draws", kernel + suffix(width, values), rows * chunks, args)
    launch_chunks(op, "draws", "best_of_rows", rows, [chunks, bests, target])


@providers.provider("random_sample", "cuda", PROVIDER)
def random_sample(probs, seeds, *, out=None):
    """oracle.draws.random_sample in two launches."""
    (target,) = results("random_sample", out, (probs, seeds), ((probs.shape[0],), np.dtype(np.int64)))
    _draw("random_sample", "race", probs, [probs, seeds], target)
    return target


@providers.provider("gumbel_sample", "cuda", PROVIDER)
def gumbel_sample(logits, req_idx, temperature, seed, pos, *, apply_temperature=True, fp64=False, out=None):
    """oracle.draws.gumbel_sample in two launches. A bad request index is only known on the device.

    Without `out` the call waits for the device and raises ContractError naming the first one. With `out` it must not
    wait, so that it can be captured: such a row is taken for padding, a plain arg-max.
    """
    op, requests = "gumbel_sample", len(temperature)
    inputs = (logits, req_idx, temperature, seed, pos)
    (target,) = results(op, out, inputs, ((logits.shape[0],), np.dtype(np.int64)))
    if out is None:
        at = first_fault(op, "draws", "request_fault", len(req_idx), [req_idx, requests])
        if at is not None:
            raise refuse("req_idx", f"{int(current().read(req_idx)[at])} at index {at}", f"index < {requests}")
    args = [requests, logits, req_idx, temperature, seed, pos, int(apply_temperature), int(fp64)]
    _draw(op, "gumbel", logits, args, target)
    return target
