"""Mamba's selective state space: S = exp(dt A) S + dt x B^T, y = S C + D x, gated by silu(z); one token, and a scan."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Flag, Parity, Tensor, refuse
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .causal_conv import ROW
from .delta_rule import ORDER
from .sequences import SLOTS, STARTS, distinct, flags, rows_and_slots, slots_fit, starts_fit, steps, written

F32 = ("float32",)
_STATE = ("float32", "bfloat16", "float16")
_UPSTREAM = "vllm/model_executor/layers/mamba/ops/mamba_ssm.py: "
_NAN = "propagates along its channel"
_NEGATIVE = {"values": lambda rng, axes: -rng.uniform(0.1, 2, (*(axes[a] for a in ("H", "dim", "N") if a in axes),))}


def _draw_slots(rng, axes):
    return SLOTS.values(rng, {**axes, "B": axes["B_"]})


def _draw_starts(rng, axes):
    return STARTS.values(rng, {**axes, "N": axes["S"] - 1})


def step(nx, S, dt, A, B, C, x, D, z):
    """(new state, y): S [..., N]; dt and x without its last axis; A, B, C broadcast with S, D and z with x.

    One fma into the decayed state, one sum over N, one fma of D, one product with silu(z).
    """
    S = nx.fma(B, nx.mul(dt, x)[..., None], nx.mul(S, nx.exp(nx.mul(dt[..., None], A))))
    y = nx.dot(S, C, order=ORDER, fused=True)
    if D is not None:
        y = nx.fma(x, D, y)
    return S, y if z is None else nx.mul(y, nx.silu(z))


def time_step(nx, dt, bias, softplus):
    """dt + bias, through softplus where asked."""
    dt = nx.load(dt)
    if bias is not None:
        dt = nx.add(dt, nx.load(bias))
    return nx.softplus(dt) if softplus else dt


def step_scale(S, E, dt, A, B, C, x, D, z, raw):
    """Values and errors of `step` in float64: (S, E, y's error), in units of the roundings of one step.

    raw : |dt + bias| before softplus, whose rounding moves dt by (1 + |raw|) of it.
    """
    moved = 1 + np.abs(raw)
    decay, put = np.exp(dt[..., None] * A), np.abs(B) * np.abs(dt * x)[..., None]
    E = decay * (E + np.abs(S) * (1 + np.abs(dt[..., None] * A) * moved[..., None])) + put * moved[..., None]
    S = S * decay + B * (dt * x)[..., None]
    size = ((E + np.abs(S)) * np.abs(C)).sum(-1) + (0 if D is None else np.abs(x * D))
    return S, E, size if z is None else size * np.abs(z) / (1 + np.exp(-z))


def load_all(nx, *parts):
    return (part if part is None else nx.load(part) for part in parts)


def _groups_divide(arguments, axes):
    """channels (heads) are a multiple of the groups of B and C"""
    name = "H" if "H" in axes else "dim"
    if axes["G"] == 0 or axes[name] % axes["G"]:
        raise refuse("B", f"{axes['G']} groups", f"a divisor of {axes[name]}")


def _targets(arguments, axes):
    """a slot that two rows write"""
    name = "dst_idx" if arguments["dst_idx"] is not None else "state_idx"
    slots_fit("B_", name=name)(arguments, axes)


def _rows_fit(arguments, axes):
    """a slot and a flag for each sequence, every slot in the cache and written once"""
    count = axes["S"] - 1
    if axes.get("R", count) != count:
        name = "state_idx" if arguments["state_idx"] is not None else "has_initial_state"
        raise refuse(name, f"{axes['R']} entries", f"{count}, one a sequence")
    slots_fit("rows")(arguments, {**axes, "rows": count})


def _update_parts(nx, x, dt, A, B, C, D, z, dt_bias, dt_softplus):
    B, C = (np.repeat(nx.load(part), x.shape[1] // part.shape[1], axis=1)[:, :, None] for part in (B, C))
    x, D, z = load_all(nx, x, D, z)
    return time_step(nx, dt, dt_bias, dt_softplus), nx.load(A), B, C, x, D, z


def _update_scale(arguments, results):
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus")
    parts = _update_parts(TRUTH, *(arguments[name] for name in names))
    raw = time_step(TRUTH, arguments["dt"], arguments["dt_bias"], False)
    live, slots = rows_and_slots(arguments["state_idx"], len(raw))
    S = np.zeros((len(raw), *arguments["state"].shape[1:]))
    S[live] = arguments["state"][slots].astype(np.float64)
    _, E, y = step_scale(S, 0 * S, *parts, raw)
    state = np.zeros(arguments["state"].shape)
    target = arguments["dst_idx"] if arguments["dst_idx"] is not None else np.full(len(raw), -1)
    if arguments["dst_idx"] is None:
        target[live] = slots
    state[target[live][target[live] >= 0]] = E[live][target[live] >= 0]
    return y, state


@op(
    row=ROW,
    args={
        "state": Tensor("slots H dim N", _STATE),
        "x": Tensor("B_ H dim"),
        "dt": Tensor("B_ H dim", like="x"),
        "A": Tensor("H dim N", F32, layout="any", **_NEGATIVE),
        "B": Tensor("B_ G N", like="x"),
        "C": Tensor("B_ G N", like="x"),
        "D": Tensor("H dim", F32, optional=True),
        "z": Tensor("B_ H dim", like="x", optional=True),
        "dt_bias": Tensor("H dim", F32, optional=True),
        "state_idx": Tensor("B_", ("int32",), optional=True, values=_draw_slots),
        "dst_idx": Tensor("B_", ("int32",), optional=True, values=distinct("B_")),
        "dt_softplus": Flag(),
    },
    returns={"out": Tensor("B_ H dim", like="x")},
    rounding=("out = round(y), y of the unrounded new state", "state = round(S) to the state's dtype"),
    order=str(ORDER),
    parity=Parity("bytes"),
    mirror=Bound("N/8 + 20", scale=_update_scale, why="the sum over N, exp and softplus within 1 ulp, single ones"),
    nan=_NAN,
    layout="Mamba-1 is H = 1; Mamba-2 repeats a head's dt, A, D and dt_bias over its channels, A as a broadcast view",
    mutates=("state",),
    upstream=_UPSTREAM + "selective_state_update",
    examples=(
        {"B_": 3, "H": 4, "dim": 5, "N": 8, "G": 2, "slots": 5, "D": "float32", "z": "float32", "dt_bias": "float32",
         "state_idx": "int32", "dt_softplus": True},
        {"B_": 2, "H": 1, "dim": 6, "N": 3, "G": 1, "slots": 2, "x": "bfloat16", "state": "bfloat16",
         "dt": "bfloat16", "dt_softplus": True},
        {"B_": 2, "H": 2, "dim": 3, "N": 33, "G": 1, "slots": 4, "state_idx": "int32", "dst_idx": "int32",
         "dt_softplus": True},
    ),
    requires=(_groups_divide, slots_fit("B_", shared=True), _targets, written("state")),
)  # fmt: skip
def selective_state_update(
    nx, state, x, dt, A, B, C, D=None, z=None, dt_bias=None, state_idx=None, dst_idx=None, *, dt_softplus=False
):
    """S = exp(dt A) S + dt x B^T; out = (S C + D x) silu(z), dt = softplus(dt + dt_bias): a token a row.

    Shapes: state [slots, H, dim, N], updated in place; x, dt, z [B, H, dim]; A float32 [H, dim, N]; B, C [B, G, N],
    head h reads group h // (H / G); D, dt_bias float32 [H, dim]; state_idx, dst_idx int32 [B]: where the state is read
    and written (the same without dst_idx; without either, row b has slot b). out [B, H, dim] in x's dtype.
    Rounding points: out from the unrounded state; the state.
    Errors: ContractError for a slot out of range, one that two rows write, H not divisible by G.
    Source: Gu & Dao 2023 (arXiv 2312.00752); vLLM's mamba_ssm.py. A null row (state_idx < 0) computes from a zero state
    and stores nothing: its out is not zero, unlike a convolution's or a delta rule's.
    """
    rows, slots = rows_and_slots(state_idx, len(x))
    S = np.zeros((len(x), *state.shape[1:]), nx.dtype)
    S[rows] = nx.load(state[slots])
    new, y = step(nx, S, *_update_parts(nx, x, dt, A, B, C, D, z, dt_bias, dt_softplus))
    target = slots if dst_idx is None else dst_idx[rows]
    stored = target >= 0
    state[target[stored]] = nx.store(new[rows[stored]], state.dtype)
    return nx.store(y, x.dtype)


def _scan_parts(nx, u, delta, A, B, C, D, z, delta_bias, delta_softplus):
    """Everything token first: dt, A, B, C, x, D, z as `step` takes them."""
    channels = u.shape[0]
    B, C = (np.repeat(nx.load(part), channels // part.shape[0], axis=0).transpose(2, 0, 1) for part in (B, C))
    dt = time_step(nx, delta.T, delta_bias, delta_softplus)
    x, z, D = load_all(nx, u.T, None if z is None else z.T, D)
    return dt, nx.load(A), B, C, x, D, z


def _scan_states(arguments, dtype):
    rows, slots = rows_and_slots(arguments["state_idx"], len(arguments["query_start_loc"]) - 1)
    S = np.zeros((len(arguments["query_start_loc"]) - 1, *arguments["state"].shape[1:]), dtype)
    flags = arguments["has_initial_state"]
    begun = np.ones(len(rows), bool) if flags is None else flags[rows] != 0
    S[rows[begun]] = arguments["state"][slots[begun]].astype(dtype)
    return S, rows, slots


def _scan_scale(arguments, results):
    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus")
    dt, A, B, C, x, D, z = _scan_parts(TRUTH, *(arguments[name] for name in names))
    raw = time_step(TRUTH, arguments["delta"].T, arguments["delta_bias"], False)
    S, rows, slots = _scan_states(arguments, np.float64)
    E, out = np.zeros_like(S), np.zeros(x.shape)
    for n, t in steps(arguments["query_start_loc"]):
        S[n], E[n], out[t] = step_scale(S[n], E[n], dt[t], A, B[t], C[t], x[t], D, z if z is None else z[t], raw[t])
    state = np.zeros(arguments["state"].shape)
    state[slots] = E[rows]
    return out.T, state


@op(
    row=ROW,
    args={
        "u": Tensor("dim T"),
        "delta": Tensor("dim T", like="u"),
        "A": Tensor("dim N", F32, **_NEGATIVE),
        "B": Tensor("G N T", like="u"),
        "C": Tensor("G N T", like="u"),
        "state": Tensor("slots dim N", _STATE),
        "query_start_loc": Tensor("S", ("int32",), values=_draw_starts),
        "D": Tensor("dim", F32, optional=True),
        "z": Tensor("dim T", like="u", optional=True),
        "delta_bias": Tensor("dim", F32, optional=True),
        "state_idx": Tensor("R", ("int32",), optional=True, values=distinct("R")),
        "has_initial_state": Tensor("R", ("int8", "int32"), optional=True, values=flags("R")),
        "delta_softplus": Flag(),
    },
    returns={"out": Tensor("dim T", like="u")},
    rounding=("out = round(y), y of the unrounded state", "state = round(S) to its dtype, after the last token"),
    order="tokens one after the other; over N " + str(ORDER),
    parity=Parity("bytes"),
    mirror=Bound("N/8 + 20", scale=_scan_scale, why="a step's roundings, carried along by the decays"),
    nan=_NAN,
    layout="channels first, as Mamba's projections leave them",
    mutates=("state",),
    upstream=_UPSTREAM + "selective_scan_fn; torch.ops._C.selective_scan_fwd",
    examples=(
        {"dim": 4, "T": 9, "N": 8, "G": 2, "S": 5, "R": 4, "slots": 6, "D": "float32", "z": "float32",
         "delta_bias": "float32", "state_idx": "int32", "has_initial_state": "int8", "delta_softplus": True},
        {"dim": 3, "T": 5, "N": 16, "G": 1, "S": 2, "R": 1, "slots": 1, "u": "bfloat16", "state": "bfloat16",
         "delta_softplus": True},
    ),
    requires=(_groups_divide, starts_fit, _rows_fit, written("state")),
)  # fmt: skip
def selective_scan(
    nx, u, delta, A, B, C, state, query_start_loc, D=None, z=None, delta_bias=None, state_idx=None,
    has_initial_state=None, *, delta_softplus=False,
):  # fmt: skip
    """S = exp(dt_t A) S + dt_t u_t B_t^T; out_t = (S C_t + D u_t) silu(z_t), dt = softplus(delta + delta_bias).

    Shapes: u, delta, z, out [dim, T]; A float32 [dim, N]; B, C [G, N, T], channel d reads group d // (dim / G); state
    [slots, dim, N], updated in place; query_start_loc int32 [N + 1]; D, delta_bias float32 [dim]; state_idx int32 [N],
    negative: the sequence is skipped; has_initial_state int8 or int32 [N], without it every state is used.
    Rounding points: out from the unrounded state; the state, once a sequence.
    Errors: ContractError for starts that fall or do not span 0 ... T, a slot out of range or twice, dim % G.
    Source: Gu & Dao 2023 (arXiv 2312.00752); torch.ops._C.selective_scan_fwd, a block scan over 2048 tokens,
    which writes over delta (or z) and takes every state for fresh without has_initial_state.
    """
    dt, A, B, C, x, D, z = _scan_parts(nx, u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    arguments = {"state": state, "state_idx": state_idx, "query_start_loc": query_start_loc,
                 "has_initial_state": has_initial_state}  # fmt: skip
    S, rows, slots = _scan_states(arguments, nx.dtype)
    out = np.zeros(x.shape, u.dtype)
    for n, t in steps(query_start_loc):
        S[n], y = step(nx, S[n], dt[t], A, B[t], C[t], x[t], D, z if z is None else z[t])
        out[t] = nx.store(y, u.dtype)
    lengths = np.diff(query_start_loc)
    out[~np.isin(np.repeat(np.arange(lengths.size), lengths), rows)] = 0
    kept = lengths[rows] > 0
    state[slots[kept]] = nx.store(S[rows[kept]], state.dtype)
    return np.ascontiguousarray(out.T)
