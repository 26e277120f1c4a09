"""The gated delta rule token by token on a GPU: launchers of cuda/gdn.cu."""

from __future__ import annotations

from vtlab.ops import providers

from .delta import FACTORED, PROJECTED, Operands, run
from .launch import PROVIDER, as_rows, kind, results, vectors
from .runtime import current
from .slots import check_slots, check_starts


@providers.provider("gdn_packed_decode", "cuda", PROVIDER)
def gdn_packed_decode(mixed_qkv, a, b, A_log, dt_bias, state, state_idx, *, scale, out=None):
    """oracle.gdn.gdn_packed_decode."""
    op, (slots, heads, Dv, Dk) = "gdn_packed_decode", state.shape
    rows, width = mixed_qkv.shape
    inputs = (mixed_qkv, a, b, A_log, dt_bias, state, state_idx)
    (target,) = results(op, out, inputs, ((rows, heads, Dv), mixed_qkv.dtype))
    check_slots(op, state_idx, slots)
    if not target.size:
        return target
    mixed_qkv, _, stride = as_rows(op, "mixed_qkv", mixed_qkv)
    a, _, a_row = as_rows(op, "a", a)
    b, _, b_row = as_rows(op, "b", b)
    keys = (width - heads * Dv) // 2
    first, item = current().pointer(mixed_qkv), mixed_qkv.dtype.itemsize
    operands = Operands(
        q=first, k=first + keys * item, q_row=stride, v=first + 2 * keys * item, v_row=stride, kind=kind(mixed_qkv),
        a=a, a_row=a_row, b=b, b_row=b_row, heads=heads, share=heads // (keys // Dk), Dk=Dk, Dv=Dv,
        flags=FACTORED | PROJECTED, scale=scale, wide=vectors(Dk, (mixed_qkv, stride)), A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    run(op, "gdn", operands, target, state, slots=state_idx, tokens=rows)
    return target


def _given(q, k, v, g, beta, scale) -> Operands:
    (_, keys, Dk), (_, heads, Dv) = q.shape, v.shape
    return Operands(
        q=q, k=k, q_row=keys * Dk, v=v, v_row=heads * Dv, kind=kind(q), a=g, a_row=heads, b=beta, b_row=heads,
        heads=heads, share=heads // keys, Dk=Dk, Dv=Dv, flags=0, scale=scale, wide=vectors(Dk, (q, Dk), (k, Dk)),
    )  # fmt: skip


@providers.provider("gdn_decode", "cuda", PROVIDER)
def gdn_decode(q, k, v, g, beta, state, state_idx=None, *, scale, out=None):
    """oracle.gdn.gdn_decode."""
    op = "gdn_decode"
    (target,) = results(op, out, (q, k, v, g, beta, state, state_idx), (v.shape, q.dtype))
    check_slots(op, state_idx, len(state))
    run(op, "gdn", _given(q, k, v, g, beta, scale), target, state, slots=state_idx, tokens=len(q))
    return target


@providers.provider("gdn_prefill", "cuda", PROVIDER)
def gdn_prefill(q, k, v, g, beta, state, query_start_loc, *, scale, out=None):
    """oracle.gdn.gdn_prefill."""
    op = "gdn_prefill"
    (target,) = results(op, out, (q, k, v, g, beta, state, query_start_loc), (v.shape, q.dtype))
    check_starts(op, query_start_loc, len(q))
    run(op, "gdn", _given(q, k, v, g, beta, scale), target, state, starts=query_start_loc, tokens=len(q))
    return target
