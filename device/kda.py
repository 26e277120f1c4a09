"""Kimi delta attention token by token on a GPU: launchers of cuda/kda.cu, and two of cuda/matmul.cu's products."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers

from .delta import DIVIDED, Operands, run
from .launch import PROVIDER, kind, map_rows, results, vectors
from .matmul import matmul_bt
from .scratch import scratch
from .slots import check_slots, check_starts

_FLOAT32 = np.dtype(np.float32)
_FEW = 1 << 18
"""Elements up to which a thread has one: the softplus of eight is a long way for the few warps of a short call."""


@providers.provider("kda_low_rank_decay", "cuda", PROVIDER)
def kda_low_rank_decay(x, f_a, f_b, *, rounding="vt", out=None):
    """oracle.kda.kda_low_rank_decay: two products, the bottleneck in scratch memory."""
    dtype = _FLOAT32 if rounding == "vt" else x.dtype
    (target,) = results("kda_low_rank_decay", out, (x, f_a, f_b), ((len(x), len(f_b)), dtype))
    narrow = scratch.array("kda bottleneck", (len(x), len(f_a)), dtype)
    matmul_bt(x, f_a, out_dtype=dtype, out=narrow)
    return matmul_bt(narrow, f_b, out_dtype=dtype, out=target)


@providers.provider("kda_decay_gate", "cuda", PROVIDER)
def kda_decay_gate(g1, A_log, dt_bias=None, *, beta=1.0, threshold=20.0, out=None):
    """oracle.kda.kda_decay_gate."""
    tokens, heads, width = g1.shape
    (target,) = results("kda_decay_gate", out, (g1, A_log, dt_bias), (g1.shape, _FLOAT32))
    wide = g1.size > _FEW and vectors(width, (g1, width), (dt_bias, width), (target, width))
    args = [g1, kind(g1), A_log, dt_bias, heads, np.float32(beta), np.float32(threshold), target]
    map_rows("kda_decay_gate", "kda", "kda_decay_gate", tokens * heads, width, wide, args)
    return target


def _given(q, k, v, g, beta, scale, qk_l2norm) -> Operands:
    (_, heads, Dk), Dv = q.shape, v.shape[-1]
    return Operands(
        q=q, k=k, q_row=heads * Dk, v=v, v_row=heads * Dv, kind=kind(q), a=g, a_row=heads * Dk, b=beta, b_row=heads,
        heads=heads, share=1, Dk=Dk, Dv=Dv, flags=DIVIDED * qk_l2norm, scale=scale,
        wide=vectors(Dk, (q, Dk), (k, Dk), (g, Dk)),
    )  # fmt: skip


@providers.provider("kda_decode", "cuda", PROVIDER)
def kda_decode(q, k, v, g, beta, state, state_idx=None, *, scale, qk_l2norm=True, out=None):
    """oracle.kda.kda_decode."""
    op = "kda_decode"
    (target,) = results(op, out, (q, k, v, g, beta, state, state_idx), (v.shape, q.dtype))
    check_slots(op, state_idx, len(state))
    run(op, "kda", _given(q, k, v, g, beta, scale, qk_l2norm), target, state, slots=state_idx, tokens=len(q))
    return target


@providers.provider("kda_prefill_recurrent", "cuda", PROVIDER)
def kda_prefill_recurrent(q, k, v, g, beta, state, query_start_loc, *, scale, qk_l2norm=True, out=None):
    """oracle.kda.kda_prefill_recurrent."""
    op = "kda_prefill_recurrent"
    (target,) = results(op, out, (q, k, v, g, beta, state, query_start_loc), (v.shape, q.dtype))
    check_starts(op, query_start_loc, len(q))
    run(op, "kda", _given(q, k, v, g, beta, scale, qk_l2norm), target, state, starts=query_start_loc, tokens=len(q))
    return target
