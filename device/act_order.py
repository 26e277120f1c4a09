"""Activation order on a GPU: launchers of cuda/act_order.cu."""

from __future__ import annotations

from vtlab.ops import providers

from .codes import DOWN, PLAIN, SHUFFLED, WORD, moved, spread
from .launch import PROVIDER, results, start
from .scratch import scratch

_FAMILY = "act_order"


def gathered(op: str, x, perm, target) -> None:
    """target[m, j] = x[m, perm[j]], or x[m, j] without a perm; elements of 2 or 4 bytes."""
    spread(op, _FAMILY, "columns", target.size, [x.shape[1], x, perm, target, x.dtype.itemsize])


@providers.provider("permute_cols", "cuda", PROVIDER)
def permute_cols(x, perm, *, out=None):
    """oracle.act_order.permute_cols."""
    (target,) = results("permute_cols", out, (x, perm), (x.shape, x.dtype))
    gathered("permute_cols", x, perm, target)
    return target


@providers.provider("gptq_shuffle", "cuda", PROVIDER)
def gptq_shuffle(qweight, q_perm=None, *, bits, out=None):
    """oracle.act_order.gptq_shuffle."""
    sizes = qweight.shape[0] * 32 // bits, qweight.shape[1]
    return moved("gptq_shuffle", _FAMILY, qweight, sizes, bits, (DOWN, SHUFFLED), qweight.shape, out, q_perm)


@providers.provider("gptq_unshuffle", "cuda", PROVIDER)
def gptq_unshuffle(qweight, q_perm=None, *, bits, out=None):
    """oracle.act_order.gptq_unshuffle."""
    op, rows = "gptq_unshuffle", qweight.shape[0] * 32 // bits
    if q_perm is not None:
        back = scratch.array("act_order inverse", (rows,), WORD)
        spread(op, _FAMILY, "inverse_order", rows, [q_perm, back])
        q_perm = back
    sizes = rows, qweight.shape[1]
    return moved(op, _FAMILY, qweight, sizes, bits, (SHUFFLED, DOWN), qweight.shape, out, q_perm)


@providers.provider("sort_weights", "cuda", PROVIDER)
def sort_weights(q, g_idx, *, out=None):
    """oracle.act_order.sort_weights."""
    op, (rows, columns) = "sort_weights", q.shape
    forms = ((q.shape, WORD), (g_idx.shape, WORD), (g_idx.shape, WORD))
    rows_sorted, groups_sorted, perm = results(op, out, (q, g_idx), *forms)
    start(op, _FAMILY, "sort_rows", rows, (256, 1), [rows, g_idx, groups_sorted, perm])
    spread(op, _FAMILY, "act_order_codes", q.size, [rows, columns, 8, PLAIN, PLAIN, q, perm, rows_sorted])
    return rows_sorted, groups_sorted, perm
