"""Lightning attention on a GPU: launchers of cuda/linear_attention.cu."""

from __future__ import annotations

from vtlab.ops import providers

from .launch import PROVIDER, kind, results, start, vectors
from .slots import check_slots, check_starts
from .strips import LANES, TURN, VECTOR, lanes_of

_COLUMNS = 8
"""Groups of columns of a block, each of one or of VECTOR."""
_ABREAST = 32
"""Columns of a block along sequences."""
_HELD = (4, 8)
"""Turns that fit into registers."""


@providers.provider("linear_attention_decode", "cuda", PROVIDER)
def linear_attention_decode(q, k, v, kv_state, slope, state_idx=None, *, out=None):
    """oracle.linear_attention.linear_attention_decode."""
    op, (rows, heads, width) = "linear_attention_decode", q.shape
    (target,) = results(op, out, (q, k, v, kv_state, slope, state_idx), ((rows, heads * width), q.dtype))
    check_slots(op, state_idx, len(kv_state))
    if not target.size:
        return target
    wide = width % VECTOR == 0 and vectors(2 * width, (kv_state, width), (q, 2 * width), (k, 2 * width))
    each = VECTOR if wide else 1
    tiles = -(-width // (each * _COLUMNS))
    args = [q, k, v, kind(q), kv_state, len(kv_state), slope, state_idx, heads, width, tiles, lanes_of(width), target]
    start(op, "linear_attention", f"lightning_v{each}", rows * heads * tiles, (_COLUMNS, LANES), args)
    return target


@providers.provider("linear_attention_prefill", "cuda", PROVIDER)
def linear_attention_prefill(q, k, v, kv_state, slope, query_start_loc, *, rounding="vt", out=None):
    """oracle.linear_attention.linear_attention_prefill, for heads of up to 256."""
    op, (tokens, heads, width), states = "linear_attention_prefill", q.shape, len(kv_state)
    held = next((held for held in _HELD if width <= held * TURN), None)
    if held is None:
        return NotImplemented
    (target,) = results(op, out, (q, k, v, kv_state, slope, query_start_loc), ((tokens, heads * width), q.dtype))
    check_starts(op, query_start_loc, tokens)
    tiles = -(-width // _ABREAST)
    args = [q, k, v, kind(q), kv_state, slope, query_start_loc, tokens, heads, width, tiles, lanes_of(width), target]
    name = f"tokens_{held}" + "_young" * (rounding == "vllm")
    start(op, "linear_attention", name, states * heads * tiles, (_ABREAST, LANES), args)
    return target
