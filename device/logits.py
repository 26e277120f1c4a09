"""Penalties, temperature and truncation on a GPU: launchers of cuda/logits.cu."""

from __future__ import annotations

from vtlab.ops import providers

from .launch import PROVIDER, map_rows, results, start, vectors
from .runtime import current
from .scratch import scratch
from .vocab import check_width, cut, launch_chunks, softmax_of, suffix

_BINS = 2048
"""Bins of the histograms, as in the .cu file."""
_SELECTORS = 512
"""Threads of the blocks that select, as there."""
_BIN_BLOCKS = 384
"""Fewer and larger chunks than elsewhere: each adds its bins to the row's."""


@providers.provider("apply_temperature", "cuda", PROVIDER)
def apply_temperature(logits, temperature, *, all_random=False, out=None):
    """oracle.logits.apply_temperature."""
    (target,) = results("apply_temperature", out, (logits, temperature), (logits.shape, logits.dtype))
    rows, width = logits.shape
    wide = vectors(width, (logits, width), (target, width))
    args = [logits, temperature, int(all_random), target]
    map_rows("apply_temperature", "logits", "temperature", rows, width, wide, args)
    return target


@providers.provider("apply_penalties", "cuda", PROVIDER)
def apply_penalties(
    logits,
    prompt_mask,
    output_counts,
    output_mask,
    frequency_penalties,
    presence_penalties,
    repetition_penalties,
    *,
    out=None,
):
    """oracle.logits.apply_penalties in one pass."""
    operands = (prompt_mask, output_counts, output_mask)
    penalties = (frequency_penalties, presence_penalties, repetition_penalties)
    op = "apply_penalties"
    (target,) = results(op, out, (logits, *operands, *penalties), (logits.shape, logits.dtype))
    rows, width = logits.shape
    wide = vectors(width, (logits, width), (output_counts, width), (target, width))
    wide = wide and not any(current().pointer(mask) % 8 for mask in (prompt_mask, output_mask))
    map_rows(op, "logits", "penalties", rows, width, wide, [logits, *operands, *penalties, target])
    return target


@providers.provider("apply_min_p", "cuda", PROVIDER)
def apply_min_p(logits, min_p, *, out=None):
    """oracle.logits.apply_min_p."""
    (target,) = results("apply_min_p", out, (logits, min_p), (logits.shape, logits.dtype))
    softmax_of("apply_min_p", "logits", logits, "min_p", min_p, target)
    return target


@providers.provider("apply_top_k_top_p", "cuda", PROVIDER)
def apply_top_k_top_p(logits, k=None, p=None, *, out=None):
    """oracle.logits.apply_top_k_top_p without a sort: maxima, histograms, a threshold for each row, the mask."""
    op = "apply_top_k_top_p"
    (target,) = results(op, out, (logits, k, p), (logits.shape, logits.dtype))
    rows, width = logits.shape
    if not rows:
        return target
    check_width(op, width)
    form = suffix(width, logits, target)
    chunks, per = cut(rows, width)
    bin_chunks, bin_per = cut(rows, width, _BIN_BLOCKS)
    maxima, counts, masses, thresholds = scratch.parts(
        "truncate", 4 * rows * chunks, 4 * rows * _BINS, 8 * rows * _BINS, 8 * rows
    )
    blocks, head, wish = rows * chunks, [width, chunks, per, logits], [k, p, maxima]
    histograms = [counts, masses]
    launch_chunks(op, "logits", "truncate_maximum" + form, blocks, [*head, maxima, *histograms])
    if k is not None or p is not None:
        args = [width, bin_chunks, bin_per, chunks, logits, *wish, *histograms]
        launch_chunks(op, "logits", "truncate_bins" + form, rows * bin_chunks, args)
    args = [width, chunks, logits, *wish, *histograms, thresholds]
    start(op, "logits", "truncate_select" + form, rows, (_SELECTORS, 1), args)
    launch_chunks(op, "logits", "truncate_mask" + form, blocks, [*head, *wish, thresholds, target])
    return target
