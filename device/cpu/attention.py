"""Softmax attention over paged and over contiguous keys."""

from __future__ import annotations

import numpy as np

from vtlab.ops.captured import Captured, empty
from vtlab.ops.dtypes import dtype

from .launch import KINDS, Kernels, delivered, provider, results
from .threads import split, threads

K, R, M = Kernels("attention"), Kernels("attention_rows"), Kernels("merging")
_FAR = 1 << 40
_START, _LSE = np.zeros(1, np.int32), np.dtype(np.float32)


def _attend(op, q, k_cache, v_cache, pages, lengths, starts, longest, keys, options, out):
    """Paged attention of requests with at most `longest` new tokens and `keys` keys."""
    scale, causal, window, softcap, sinks, counted, slopes, return_lse, p_round = options
    (tokens, heads, depth), (_, page_size, key_heads, _) = q.shape, k_cache.shape
    forms = ((q.shape, q.dtype), ((heads, tokens), _LSE))
    made = results(op, out, *forms[: 1 + return_lse])
    group, item = heads // key_heads, k_cache.dtype.itemsize
    k_steps, v_steps = ([s // item for s in cache.strides[:3]] for cache in (k_cache, v_cache))
    left, right = (_FAR, _FAR) if window is None else map(int, window)
    several = isinstance(causal, np.ndarray)
    requests, together = len(lengths), max(1, K.ROWS // max(group, 1))  # query rows of a block
    blocks, rows = -(-longest // together), together * max(group, 1)
    if isinstance(starts, Captured) or starts[-1] < tokens:
        size, lse = heads * depth * q.dtype.itemsize, made[1] if return_lse else None
        split(R.unasked, 1, 0, starts, requests, made[0], lse, tokens, heads, size)
    form = group, key_heads, depth
    causals = np.ascontiguousarray(causal).view(np.uint8) if several else None, 0 if several else bool(causal)
    goals = made[0], made[1] if return_lse else None, tokens
    parts, kept, partial = 1, longest * group, None
    if blocks == 1 and requests * key_heads < 2 * threads() > 2:  # few items: a chunk of keys each, merged afterwards
        parts = max(1, -(-keys // R.CHUNK))
        partial = empty((requests * key_heads * kept * parts, R.CELL + depth + 15), np.float32) if parts > 1 else None
    split(
        K.paged, requests * key_heads * blocks * parts if depth else 0, 4 * q.size * keys, q, KINDS[q.dtype], k_cache,
        *k_steps, v_cache, *v_steps, KINDS[k_cache.dtype], pages, pages.shape[1], lengths, starts, *causals, *form,
        page_size, left, right, scale, softcap, sinks, slopes, bool(counted),
        0 if p_round is None else KINDS[dtype(p_round)], *goals, blocks, parts, partial, kept,
        scratch=8 * (R.CHUNK + rows) * (depth + 15) + 8 * rows + 8 * (depth + 15) + 64,
    )  # fmt: skip
    if parts > 1:
        split(
            R.joined, requests * key_heads if depth else 0, 8 * q.size * parts, lengths, starts, *causals, *form, left,
            right, sinks, bool(counted), KINDS[q.dtype], *goals, parts, partial, kept, scratch=4 * (depth + 15) + 128,
        )  # fmt: skip
    return delivered(out, made)


@provider("paged_attention")
def paged_attention(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, *, scale, causal=True, window=None, softcap=0.0,
    sinks=None, lse_includes_sink=True, alibi_slopes=None, return_lse=False, p_round=None, out=None,
):  # fmt: skip
    """oracle.attention.paged_attention."""
    longest, keys = len(q), block_table.shape[1] * k_cache.shape[1]
    if not isinstance(seq_lens, Captured):  # a captured step follows the lengths as they change
        keys = int(seq_lens.max(initial=0))
        if len(seq_lens) != 1:
            longest = int((query_start_loc[1:] - query_start_loc[:-1]).max())
    options = scale, causal, window, softcap, sinks, lse_includes_sink, alibi_slopes, return_lse, p_round
    return _attend(
        "paged_attention", q, k_cache, v_cache, block_table, seq_lens, query_start_loc, longest, keys, options, out
    )


@provider("attention")
def attention(
    q, k, v, *, scale, causal=True, window=None, softcap=0.0, sinks=None, lse_includes_sink=True, alibi_slopes=None,
    return_lse=False, p_round=None, out=None,
):  # fmt: skip
    """oracle.attention.attention: the keys as one page."""
    lengths, starts = np.array([len(k)], np.int32), np.array([0, len(q)], np.int32)
    options = scale, causal, window, softcap, sinks, lse_includes_sink, alibi_slopes, return_lse, p_round
    return _attend("attention", q, k[None], v[None], _START[None], lengths, starts, len(q), len(k), options, out)


@provider("merge_attn_states")
def merge_attn_states(
    prefix_out, prefix_lse, suffix_out, suffix_lse, *, prefill_tokens_with_context=None, empty="prefix",
    output_scale=None, out=None,
):  # fmt: skip
    """oracle.attention_merge.merge_attn_states without the float8 codes, which are declined."""
    if output_scale is not None:
        return NotImplemented
    tokens, heads, width = prefix_out.shape
    made = results("merge_attn_states", out, (prefix_out.shape, prefix_out.dtype), (prefix_lse.shape, _LSE))
    item = prefix_out.dtype.itemsize
    steps = ([stride // item for stride in side.strides[:2]] for side in (prefix_out, suffix_out))
    p_steps, s_steps = steps
    merged = tokens if prefill_tokens_with_context is None else prefill_tokens_with_context
    split(
        M.merge, tokens * heads, prefix_out.size * 16, prefix_out, *p_steps, prefix_lse, suffix_out, *s_steps,
        suffix_lse, *made, KINDS[prefix_out.dtype], heads, tokens, width, merged, empty == "zeros",
    )  # fmt: skip
    return delivered(out, made)
