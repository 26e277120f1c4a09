"""The merge of two partial attention results on a GPU: launchers of cuda/attention_merge.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .launch import KINDS, PROVIDER, kind, map_rows, results, vectors

_MOST_ROWS = 1 << 31


@providers.provider("merge_attn_states", "cuda", PROVIDER)
def merge_attn_states(
    prefix_out, prefix_lse, suffix_out, suffix_lse, *, prefill_tokens_with_context=None, empty="prefix",
    output_scale=None, out=None,
):  # fmt: skip
    """oracle.attention_merge.merge_attn_states."""
    op, (tokens, heads, width) = "merge_attn_states", prefix_out.shape
    rows = tokens * heads
    if rows >= _MOST_ROWS:
        raise ContractError(op, "prefix_out", f"{rows} heads of tokens", f"less than {_MOST_ROWS}")
    stored = prefix_out.dtype if output_scale is None else np.dtype(np.uint8)
    inputs = (prefix_out, prefix_lse, suffix_out, suffix_lse)
    target, lse = results(op, out, inputs, (prefix_out.shape, stored), (prefix_lse.shape, np.dtype(np.float32)))
    item = prefix_out.dtype.itemsize
    sides, steps = [], []
    for side in (prefix_out, suffix_out):
        by_token, by_head = side.strides[0] // item, side.strides[1] // item
        sides += [side, by_token, by_head]
        steps += [(side, by_token), (side, by_head)]
    wide = vectors(width, *steps) and vectors(width, (target, width if output_scale is None else 0))
    factor = np.float32(1) if output_scale is None else np.float32(1) / np.float32(output_scale)
    merged = tokens if prefill_tokens_with_context is None else prefill_tokens_with_context
    args = [
        *sides, kind(prefix_out), prefix_lse, suffix_lse, heads, merged, int(empty == "zeros"),
        int(output_scale is not None), factor, target, lse,
    ]  # fmt: skip
    narrow = "merge_attn_states_f32" if wide and kind(prefix_out) == KINDS["float32"] else "merge_attn_states"
    map_rows(op, "attention_merge", narrow, rows, width, wide, args)
    return target, lse
