"""Lightning attention: S = exp(-slope) S + k v^T, o = q S, with one fixed decay a head, no scale and no softmax.

States are [slots, H, D, D], rows of keys and columns of values: the transpose of a delta rule's.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Parity, Tensor
from vtlab.ops.table import op

from .causal_conv import ROW
from .delta_rule import ORDER
from .sequences import SLOTS, STARTS, flips, rows_and_slots, slots_fit, starts_fit, steps, written

_F32 = ("float32",)
_BLOCK = 256
_UPSTREAM = "vllm/model_executor/layers/lightning_attn.py: "
_SLOPE = Tensor("H", _F32, values=lambda rng, axes: rng.uniform(0.05, 2, axes["H"]))
_NAN = "propagates within its sequence and head; a null row is zero whatever it holds"


def _step(nx, S, q, k, v, keep, dtype, before=None):
    """The new state, and q S; k v^T rounded to `dtype` where that is given.

    before : the part of S that comes from before the block, which is then read without this step's decay.
    """
    outer = nx.mul(k[..., :, None], v[..., None, :])
    if dtype is not None:
        outer = nx.load(nx.store(outer, dtype))
    S = nx.add(nx.mul(S, keep), outer)
    seen = S if before is None else nx.add(S, nx.sub(before, nx.mul(before, keep)))
    return S, nx.dot(np.swapaxes(seen, -1, -2), q[..., None, :], order=ORDER, fused=True)


def _keep(nx, slope):
    return nx.exp(nx.neg(nx.load(slope)))[:, None, None]


def _vectors(rows: str) -> dict[str, Tensor]:
    return {"q": Tensor(f"{rows} H D"), "k": Tensor(f"{rows} H D", like="q"), "v": Tensor(f"{rows} H D", like="q")}


def _spread(S, E, q, k, v, keep, more):
    """(S, E, o's error): the decay's exponent and exp, the product, the sum; `more` for a flip of the product."""
    put = np.abs(k)[..., :, None] * np.abs(v)[..., None, :]
    E = keep[0] * (E + S * keep[1]) + put * more
    S = keep[0] * S + put
    return S, E, np.einsum("...k,...kv->...v", np.abs(q), S + E)


def _wide(arguments):
    q, k, v = (arguments[name].astype(np.float64) for name in "qkv")
    slope = arguments["slope"].astype(np.float64)[:, None, None]
    return q, k, v, (np.exp(-slope), 1 + np.abs(slope))


def _decode_scale(arguments, results):
    *vectors, keep = _wide(arguments)
    rows, slots = rows_and_slots(arguments["state_idx"], len(vectors[0]))
    state, out = np.zeros(arguments["kv_state"].shape), np.zeros(vectors[0].shape)
    S = np.abs(arguments["kv_state"][slots].astype(np.float64))
    _, state[slots], out[rows] = _spread(
        S, 0 * S, *(part[rows] for part in vectors), keep, 1 + flips(arguments["k"].dtype)
    )
    return out.reshape(len(out), -1), state


@op(
    row=ROW,
    args={
        **_vectors("B"),
        "kv_state": Tensor("slots H D D", _F32),
        "slope": _SLOPE,
        "state_idx": SLOTS,
    },
    returns={"out": Tensor("B H*D", like="q")},
    rounding=("kv = round(k v^T) to k's dtype", "out = round(q S), S unrounded", "state = f32(S)"),
    order=str(ORDER),
    parity=Parity("bytes"),
    mirror=Bound(
        "D/8 + 10", scale=_decode_scale, why="the sum over D, exp within 1 ulp, single ones; the product may flip"
    ),
    nan=_NAN,
    mutates=("kv_state",),
    upstream=_UPSTREAM + "linear_decode_forward_triton",
    examples=(
        {"B": 3, "H": 2, "D": 8, "slots": 5, "q": "bfloat16", "state_idx": "int32"},
        {"B": 2, "H": 1, "D": 33, "slots": 2},
    ),
    requires=(slots_fit(), written("kv_state")),
)
def linear_attention_decode(nx, q, k, v, kv_state, slope, state_idx=None):
    """S = exp(-slope_h) S + k v^T; out = q S for one token a row.

    Shapes: q, k, v [B, H, D] of one dtype; kv_state float32 [slots, H, D, D], rows of keys, updated in place; slope
    float32 [H]; state_idx int32 [B], negative: a null row; without it row b has slot b; out [B, H * D].
    Rounding points: k v^T to k's dtype, since it is formed there; out from the unrounded state; the state.
    Errors: ContractError for a slot out of range or twice.
    Source: Qin et al. 2024 (arXiv 2401.04658); vLLM's lightning_attn.py, which leaves null rows of out as they were.
    """
    rows, slots = rows_and_slots(state_idx, len(q))
    parts = (nx.load(part[rows]) for part in (q, k, v))
    S, o = _step(nx, nx.load(kv_state[slots]), *parts, _keep(nx, slope), k.dtype)
    kv_state[slots] = nx.store(S, kv_state.dtype)
    out = np.zeros(q.shape, q.dtype)
    out[rows] = nx.store(o, q.dtype)
    return out.reshape(len(q), q.shape[1] * q.shape[2])


def _prefill_scale(arguments, results):
    q, k, v, keep = _wide(arguments)
    S, out = np.abs(arguments["kv_state"].astype(np.float64)), np.zeros(q.shape)
    E = np.zeros_like(S)
    for n, t in steps(arguments["query_start_loc"]):
        S[n], E[n], out[t] = _spread(S[n], E[n], q[t], k[t], v[t], keep, 1)
    more = 1 / keep[0][:, 0] if arguments["rounding"] == "vllm" else 1  # it reads its blocks' states one decay younger
    return (out * more).reshape(len(out), -1), E


@op(
    row=ROW,
    args={
        **_vectors("T"),
        "kv_state": Tensor("N H D D", _F32),
        "slope": _SLOPE,
        "query_start_loc": STARTS,
        "rounding": Choice(("vt", "vllm")),
    },
    returns={"out": Tensor("T H*D", like="q")},
    rounding={
        "vt": ("out = round(q S), S unrounded", "state = f32(S), once, after the last token"),
        "vllm": ("as vt; but token i of a block of 256 reads the state before its block as exp(-slope i) S",),
    },
    order="tokens one after the other; over D " + str(ORDER),
    parity=Parity("bytes"),
    mirror=Bound("D/8 + 12", scale=_prefill_scale, why="a step's roundings, carried along by the decays"),
    nan=_NAN,
    mutates=("kv_state",),
    upstream=_UPSTREAM + "lightning_attention (head widths up to 128)",
    examples=(
        {"T": 9, "N": 4, "H": 2, "D": 8, "q": "bfloat16"},
        {"T": 5, "N": 1, "H": 1, "D": 12},
        {"T": 260, "N": 1, "H": 1, "D": 3, "rounding": "vllm"},
    ),
    requires=(starts_fit, written("kv_state")),
)
def linear_attention_prefill(nx, q, k, v, kv_state, slope, query_start_loc, *, rounding="vt"):
    """S = exp(-slope_h) S + k_t v_t^T; out_t = q_t S, along each sequence from its state.

    Shapes: q, k, v [T, H, D] of one dtype; kv_state float32 [N, H, D, D], rows of keys, updated in place; slope float32
    [H]; query_start_loc int32 [N + 1]; out [T, H * D].
    Rounding points: out from the unrounded state; the state, once: under "vt" the mirror's bytes are the same however a
    sequence is cut into calls. k v^T is not rounded, unlike in linear_attention_decode.
    Errors: ContractError for starts that fall or do not span 0 ... T.
    Source: Qin et al. 2024 (arXiv 2401.04658); vLLM's lightning_attn.py. Its blocks of 256 tokens, counted from the
    start of the call, read the state before them a decay too young ("vllm"), its own decode and its last state do not.
    """
    q, k, v, dtype = nx.load(q), nx.load(k), nx.load(v), q.dtype
    S, keep = nx.load(kv_state).copy(), _keep(nx, slope)
    out, before = np.zeros(q.shape, dtype), S.copy()
    for n, t in steps(query_start_loc):
        young = before[n] if rounding == "vllm" else None
        S[n], o = _step(nx, S[n], q[t], k[t], v[t], keep, None, young)
        out[t] = nx.store(o, dtype)
        if rounding == "vllm":
            place = (t - query_start_loc[n])[0] % _BLOCK
            before[n] = S[n] if place == _BLOCK - 1 else nx.mul(before[n], keep)
    kv_state[...] = nx.store(S, kv_state.dtype)
    return out.reshape(len(out), q.shape[1] * q.shape[2])
