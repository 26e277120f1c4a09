"""The delta rule on a GPU: what the launchers of cuda/gdn.cu and cuda/kda.cu share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .launch import KINDS, kind, start, vectors
from .strips import LANES, lanes_of

DIVIDED, FACTORED, PROJECTED = 1, 2, 4
_THREADS = 128
_GROUPS = _THREADS // LANES
"""Rows that a block works on at a time."""
_WIDTH = 128
"""Elements of the rows that kernels hold in registers."""
_ROWS = {"gdn_rows": 1, "gdn_narrow": 2, "gdn_tokens": 2, "kda_rows": 2, "kda_tokens": 2}
"""Rows of a state that a thread has, by kernel."""
_FLOAT32 = KINDS["float32"]


@dataclass(frozen=True)
class Operands:
    """What `Rule` in delta.cuh takes. q, k: (array, elements between tokens); v likewise; a and b: (array, elements).

    q, k and v may be addresses into one array; `first` is what the alignment of all three hangs on.
    """

    q: object
    k: object
    q_row: int
    v: object
    v_row: int
    kind: int
    a: object
    a_row: int
    b: object
    b_row: int
    heads: int
    share: int
    Dk: int
    Dv: int
    flags: int
    scale: float
    wide: bool
    A_log: object = None
    dt_bias: object = None

    def args(self, out) -> list:
        given = ((array, row, kind(array)) for array, row in ((self.a, self.a_row), (self.b, self.b_row)))
        weights = ((array, 0 if array is None else kind(array)) for array in (self.A_log, self.dt_bias))
        return [
            self.q, self.k, self.q_row, self.v, self.v_row, self.kind, *(part for three in given for part in three),
            *(part for two in weights for part in two), out, self.heads, self.share, self.Dk, self.Dv, self.flags,
            lanes_of(self.Dk), np.float32(self.scale),
        ]  # fmt: skip


def run(op: str, family: str, operands: Operands, out, state, *, slots=None, starts=None, tokens: int) -> None:
    """One token a row against the state of its slot; with `starts`, sequences against states of their own."""
    states = len(starts) - 1 if starts is not None else tokens
    units = states * operands.heads
    args = [*operands.args(out), state, kind(state), len(state), slots, starts, tokens]
    kept = operands.Dk == _WIDTH and operands.wide and vectors(_WIDTH, (state, _WIDTH))
    if kept:
        form = "tokens" if starts is not None else "rows" if kind(state) == _FLOAT32 else "narrow"
        whole = _ROWS[f"{family}_{form}"] * _GROUPS
        if operands.Dv % whole == 0:
            return start(op, family, f"{family}_{form}", units * (operands.Dv // whole), (_THREADS, 1), args)
    start(op, family, f"{family}_any", units * -(-operands.Dv // _GROUPS), (_THREADS, 1), args)
