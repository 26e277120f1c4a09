"""How products of FP4 codes in rows are launched on Hopper, for more rows than a few: cuda/fp4_loaded.cuh."""

from __future__ import annotations

from .codes import spread
from .fp4_product import CHUNK, COLUMNS, Weights, chains_of
from .launch import VECTOR, kind, on_hopper, start, vectors
from .packed_loaded import Form, form_of
from .scratch import scratch

_LEAST = 17
"""Rows from which on they serve."""
FORMS = {"few rows": Form(64, 1, 2, 2), "few tiles": Form(128, 1, 2, 2), "many tiles": Form(128, 2, 1, 2)}
"""Those that cuda/fp4_loaded.cuh has of every scale."""


def loads(rows: int, columns: int, depth: int) -> bool:
    """Whether a product of these sizes is theirs."""
    return on_hopper() and rows >= _LEAST and columns % COLUMNS == 0 and depth % CHUNK == 0


def turned(op: str, family: str, a):
    """`a`, whose rows stand at multiples of 16 bytes, in the order that `loaded_product` takes it in, in scratch."""
    held = scratch.array("fp4 turned", a.shape, a.dtype)
    spread(op, family, "fp4_rows", a.size // (4 * VECTOR), [a, held])
    return held


def loaded_product(op: str, family: str, a, weights: Weights, out, form: Form | None = None) -> None:
    """out = a by the weights, in `fp4_product.product`'s order; `a` as `turned` gives it."""
    (rows, depth), columns = a.shape, out.shape[1]
    form = form or form_of(rows, columns, FORMS)
    stages, shared = form.shared(COLUMNS * (CHUNK // 4 + CHUNK // weights.group))
    args = [
        form.rows_map(a), rows, columns, depth, weights.words, weights.scales, weights.pitch, weights.step,
        weights.factor, out, kind(out), 2 * chains_of(depth)[0], int(vectors(columns, (out, columns))), stages,
    ]  # fmt: skip
    grid = form.blocks * form.across(columns) * -(-rows // form.rows)
    start(op, family, f"{weights.kernel}_{form.name}", grid, (form.threads, 1), args, shared)
