"""Single tokens moved or forbidden on a GPU: launchers of cuda/token_masks.cu.

Lists of (row, column) pairs live on the device, where only a kernel can see an index outside the logits. Without `out`
a call waits for the device and raises ContractError naming the first one. With `out` it must not wait, so that it can
be captured: such pairs are left out.
"""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.contract import refuse

from .faults import first_fault
from .launch import PROVIDER, map_rows, results, start, vectors
from .runtime import current

_THREADS = 256
_PLACES = 32
"""Places that one launch of `mask_places` takes as arguments, as in the .cu file."""


def _copy(op: str, logits, target) -> None:
    width = logits.shape[0] * logits.shape[1]
    wide = vectors(width, (logits, width), (target, width))
    map_rows(op, "token_masks", "copy_logits", 1, width, wide, [logits, target])


def _pairs(op: str, kernel: str, logits, rows, cols, more: list, out):
    """A copy of the logits, then `kernel` on every pair."""
    (target,) = results(op, out, (logits, rows, cols, *more), (logits.shape, logits.dtype))
    if out is None:
        for name, index, size in (("rows", rows, logits.shape[0]), ("cols", cols, logits.shape[1])):
            at = first_fault(op, "token_masks", "pair_fault", len(index), [index, size])
            if at is not None:
                raise refuse(name, f"{int(current().read(index)[at])} at index {at}", f"0 <= index < {size}")
    _copy(op, logits, target)
    args = [len(rows), *logits.shape, rows, cols, *more, target]
    start(op, "token_masks", kernel, -(-len(rows) // _THREADS), (_THREADS, 1), args)
    return target


@providers.provider("apply_logit_bias", "cuda", PROVIDER)
def apply_logit_bias(logits, rows, cols, bias, *, out=None):
    """oracle.token_masks.apply_logit_bias."""
    return _pairs("apply_logit_bias", "add_bias", logits, rows, cols, [bias], out)


@providers.provider("apply_token_mask", "cuda", PROVIDER)
def apply_token_mask(logits, rows, cols, *, out=None):
    """oracle.token_masks.apply_token_mask."""
    return _pairs("apply_token_mask", "mask_pairs", logits, rows, cols, [], out)


@providers.provider("apply_allowed_token_ids", "cuda", PROVIDER)
def apply_allowed_token_ids(logits, mask, *, out=None):
    """oracle.token_masks.apply_allowed_token_ids in one pass."""
    (target,) = results("apply_allowed_token_ids", out, (logits, mask), (logits.shape, logits.dtype))
    width = logits.shape[0] * logits.shape[1]
    wide = vectors(width, (logits, width), (target, width)) and current().pointer(mask) % 8 == 0
    map_rows("apply_allowed_token_ids", "token_masks", "allowed", 1, width, wide, [logits, mask, target])
    return target


def _places(op: str, logits, places: list[int], generated, minimum, out):
    """A copy of the logits, then -inf at the places (row * width + column), which travel as arguments."""
    (target,) = results(op, out, (logits, generated, minimum), (logits.shape, logits.dtype))
    _copy(op, logits, target)
    for first in range(0, len(places), _PLACES):
        some = places[first : first + _PLACES]
        args = [len(some), logits.shape[1], generated, minimum, target, *some, *[0] * (_PLACES - len(some))]
        start(op, "token_masks", "mask_places", 1, (32, 1), args)
    return target


@providers.provider("apply_bad_words", "cuda", PROVIDER)
def apply_bad_words(logits, bad_words, past_ids, *, out=None):
    """oracle.token_masks.apply_bad_words: the words are compared on the host, where they are."""
    width, places = logits.shape[1], set()
    for row, (words, past) in enumerate(zip(bad_words, past_ids)):
        for *before, last in words:
            if not before or list(past[-len(before) :]) == before:
                places.add(row * width + int(last))
    return _places("apply_bad_words", logits, sorted(places), None, None, out)


@providers.provider("apply_min_tokens", "cuda", PROVIDER)
def apply_min_tokens(logits, stop_ids, num_generated, min_tokens, *, out=None):
    """oracle.token_masks.apply_min_tokens: the stop ids of every row go to the device, which knows whose turn it is."""
    width = logits.shape[1]
    places = sorted({row * width + int(token) for row, ids in enumerate(stop_ids) for token in ids})
    return _places("apply_min_tokens", logits, places, num_generated, min_tokens, out)
