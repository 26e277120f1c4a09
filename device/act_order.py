"""Activation order on a GPU: launchers of cuda/act_order.cu."""

from __future__ import annotations

from vtlab.ops import providers

from .codes import DOWN, PLAIN, SHUFFLED, WORD, moved, spread
from .launch import MULTIPROCESSORS, PROVIDER, results, start
from .runtime import current
from .scratch import scratch

_FAMILY = "act_order"
_MANY_ROWS, _ROW_BYTES = 64, 1 << 16
"""Rows from which a block for each is enough, and bytes of a row that it may hold."""
_SHARED, _MOST_TOGETHER = 192 << 10, 8
"""Bytes of shared memory that blocks of a multiprocessor share, and how many there are at most."""


def gathered(op: str, x, perm, target) -> None:
    """target[m, j] = x[m, perm[j]], or x[m, j] without a perm; elements of 2 or 4 bytes."""
    (rows, width), item = x.shape, x.dtype.itemsize
    whole = perm is not None and not any(current().pointer(array) % 16 for array in (x, perm, target) if array.size)
    if whole and rows >= _MANY_ROWS and not width * item % 16 and width * item <= _ROW_BYTES:
        together = min(_MOST_TOGETHER, _SHARED // (width * item)) if width else 1
        blocks = min(rows, together * MULTIPROCESSORS) if width else 0
        args = [rows, width, blocks, x, perm, target]
        start(op, _FAMILY, f"columns_of_rows_{item}", blocks, (256, 1), args, width * item)
        return
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
