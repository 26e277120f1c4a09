"""Arg-max, probabilities and their largest on a GPU: launchers of cuda/sampling.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.contract import refuse

from .faults import first_fault
from .launch import PROVIDER, results, start
from .runtime import current
from .scratch import scratch
from .vocab import cut, launch_chunks, softmax_of, suffix

_FEW = 128
"""Up to so many largest log-probabilities one block selects and orders."""
_CHUNKS = 1024
"""Chunks of a row at most where the largest are selected, as in the .cu file."""
_RANKED = 256
"""Elements that a block of `gather_all` ranks, as there."""


@providers.provider("greedy_argmax", "cuda", PROVIDER)
def greedy_argmax(logits, *, out=None):
    """oracle.sampling.greedy_argmax in two launches."""
    rows, width = logits.shape
    (target,) = results("greedy_argmax", out, (logits,), ((rows,), np.dtype(np.int64)))
    if rows:
        chunks, per = cut(rows, width)
        (keys,) = scratch.parts("argmax", 8 * rows * chunks)
        args = [width, chunks, per, logits, keys]
        launch_chunks("greedy_argmax", "sampling", "argmax_chunks" + suffix(width, logits), rows * chunks, args)
        launch_chunks("greedy_argmax", "sampling", "argmax_rows", rows, [chunks, keys, target])
    return target


def _softmax(op, kernel, logits, out):
    (target,) = results(op, out, (logits,), (logits.shape, logits.dtype))
    softmax_of(op, "sampling", logits, kernel, target)
    return target


@providers.provider("compute_probs", "cuda", PROVIDER)
def compute_probs(logits, *, out=None):
    """oracle.sampling.compute_probs in three launches."""
    return _softmax("compute_probs", "probs", logits, out)


@providers.provider("compute_logprobs", "cuda", PROVIDER)
def compute_logprobs(logits, *, out=None):
    """oracle.sampling.compute_logprobs in three launches."""
    return _softmax("compute_logprobs", "logprobs", logits, out)


@providers.provider("gather_logprobs", "cuda", PROVIDER)
def gather_logprobs(logprobs, num_logprobs, ids, *, out=None):
    """oracle.sampling.gather_logprobs. A bad id is only known on the device.

    Without `out` the call waits for the device and raises ContractError naming the first bad id. With `out` it must
    not wait, so that it can be captured: a bad id is written as it is, its value as NaN and its rank as 0.
    """
    op, (rows, width), n = "gather_logprobs", logprobs.shape, num_logprobs
    forms = [((rows, n + 1), np.dtype(np.int32)), ((rows, n + 1), logprobs.dtype), ((rows,), np.dtype(np.int64))]
    indices, values, ranks = results(op, out, (logprobs, ids), *forms)
    if out is None and (at := first_fault(op, "sampling", "gather_fault", rows, [ids, width])) is not None:
        raise refuse("ids", f"{int(current().read(ids)[at])} at index {at}", f"0 <= id < {width}")
    if not rows:
        return indices, values, ranks
    chunks, per = cut(1, width, _CHUNKS)
    maxima, reach = scratch.parts("gather", 4 * rows * chunks, 4 * rows * chunks)
    args = [width, chunks, per, logprobs, ids, maxima, reach]
    launch_chunks(op, "sampling", "gather_chunks" + suffix(width, logprobs), rows * chunks, args)
    select = int(0 < n <= min(_FEW, chunks))
    args = [width, chunks, per, n, select, logprobs, ids, maxima, reach, indices, values, ranks]
    start(op, "sampling", "gather_rows", rows, (512, 1), args)
    if n and not select:
        blocks = -(-width // _RANKED)
        start(op, "sampling", "gather_all", rows * blocks, (_RANKED, 1), [width, blocks, n, logprobs, indices, values])
    return indices, values, ranks
