"""Mamba-2 as a loop over tokens."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Parity, Tensor
from vtlab.ops.table import op

from . import ssd_spread
from .causal_conv import ROW
from .delta_rule import ORDER
from .sequences import starts_fit, steps, written
from .ssd import F32, INF, OPS, clamped, heads_of_groups
from .ssd_scan import BIAS, CU, EXAMPLES, LIMITS, OPTIONS, WHOLE, initial_for_each, skip_fits
from .ssm import step


@op(
    row=ROW,
    args={
        **WHOLE,
        "state": Tensor("R H P N", F32),
        "query_start_loc": CU,
        **OPTIONS,
        **BIAS,
        **LIMITS,
    },
    returns={"out": Tensor("T H P", like="x")},
    rounding=("out = round(y), y of the unrounded state", "state = f32(S), once, after the last token"),
    order="tokens one after the other; over N " + str(ORDER),
    parity=Parity("bytes"),
    mirror=Bound("N/8 + 24", scale=ssd_spread.recurrent_scale, why="a step's roundings, carried along by the decays"),
    nan="propagates within its sequence and head",
    mutates=("state",),
    upstream=OPS + "mamba_ssm.py: selective_state_update, token by token",
    examples=EXAMPLES,
    requires=(starts_fit, heads_of_groups, skip_fits, initial_for_each, written("state")),
)
def ssd_recurrent(
    nx,
    x,
    dt,
    A,
    B,
    C,
    state,
    query_start_loc,
    D=None,
    z=None,
    dt_bias=None,
    *,
    dt_softplus=False,
    dt_min=0.0,
    dt_max=INF,
):
    """S = exp(dt_t A) S + dt_t x_t B_t^T; out_t = (S C_t + D x_t) silu(z_t), dt = clamp(softplus(dt + dt_bias)).

    Shapes: x, z [T, H, P], dt [T, H], B, C [T, G, N] of one dtype, head h reads group h // (H / G); A, dt_bias float32
    [H]; state float32 [R, H, P, N], updated in place; query_start_loc int32 [R + 1]; D float32 [H] or [H, P]; out
    [T, H, P].
    Rounding points: out from the unrounded state; the state, once. So the mirror's bytes are the same however a
    sequence is cut into calls; an empty sequence keeps its state.
    Errors: ContractError for starts that fall or do not span 0 ... T, H not divisible by G.
    Source: Dao & Gu 2024 (arXiv 2405.21060). The chunked form is ssd_chunk_prefill.
    """
    heads, groups = x.shape[1], B.shape[1]
    values, S = nx.load(x), nx.load(state).copy()
    dts = clamped(nx, dt, dt_bias, dt_softplus, dt_min, dt_max)[..., None]
    keys, queries = (np.repeat(nx.load(part), heads // max(groups, 1), axis=1)[:, :, None] for part in (B, C))
    skip = None if D is None else nx.load(D)[:, None] if D.ndim == 1 else nx.load(D)
    gate = None if z is None else nx.load(z)
    out = np.zeros(x.shape, x.dtype)
    for n, t in steps(query_start_loc):
        S[n], y = step(
            nx, S[n], dts[t], nx.load(A)[:, None, None], keys[t], queries[t], values[t], skip,
            None if gate is None else gate[t],
        )  # fmt: skip
        out[t] = nx.store(y, x.dtype)
    state[...] = nx.store(S, state.dtype)
    return out
