"""Mamba-2's outputs from its chunks, the whole in chunks, the same as a loop over tokens, and its gated norm."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Flag, Scalar, Tensor, refuse
from vtlab.ops.table import op

from . import ssd_spread
from .causal_conv import ROW
from .gdn_chunks import TENSOR_CORES
from .sequences import STARTS, Chunks, products, starts_fit
from .ssd import (
    CHUNK,
    CUTS,
    F32,
    INF,
    NAN,
    NEGATIVE,
    OPS,
    STEPS,
    SUMS,
    before_chunks,
    chunk_plan,
    cuts_fit,
    heads_of_groups,
    scan_parts,
    ssd_bmm_chunk,
    ssd_chunk_cumsum,
    ssd_chunk_state,
    ssd_state_passing,
)

CU = Tensor("S", ("int32",), values=lambda rng, axes: STARTS.values(rng, {**axes, "N": axes["R"]}))
X, BC = Tensor("T H P"), Tensor("T G N", like="x")
OPTIONS = {
    "D": Tensor("* Dw", F32, optional=True, values=lambda rng, axes: rng.standard_normal((axes["H"],))),
    "z": Tensor("T H P", like="x", optional=True),
}
BIAS = {
    "dt_bias": Tensor("H", F32, optional=True),
}
LIMITS = {"dt_softplus": Flag(), "dt_min": Scalar(), "dt_max": Scalar()}


def skip_fits(arguments, axes):
    """D is [H] or [H, P]"""
    D = arguments["D"]
    if D is not None and tuple(D.shape) not in ((axes["H"],), (axes["H"], axes["P"])):
        raise refuse("D", f"shape {tuple(D.shape)}", f"({axes['H']},) or ({axes['H']}, {axes['P']})")


def _finished(nx, y, x, D, z):
    """(y + D x) silu(z), x and z [..., H, P]."""
    if D is not None:
        D = nx.load(D)
        y = nx.add(y, nx.mul(x, D[:, None] if D.ndim == 1 else D))
    return y if z is None else nx.mul(y, nx.silu(nx.load(z)))


def _sequences_counted(arguments, axes):
    """seq_idx ascends, within the initial states"""
    owner, initial = arguments["seq_idx"], arguments["initial_states"]
    if not isinstance(owner, np.ndarray) or not owner.size:
        return
    if (np.diff(owner) < 0).any() or owner[0] < 0 or (initial is not None and owner[-1] >= len(initial)):
        raise refuse("seq_idx", owner.tolist(), "ascending numbers of sequences with an initial state")


@op(
    row=ROW,
    args={
        "CB": Tensor("NC G Q Q", F32),
        "x": X,
        "dt": STEPS,
        "dA_cumsum": SUMS,
        "C": BC,
        "states": Tensor("NC H P N"),
        "cu_chunk_seqlens": CUTS,
        "seq_idx": Tensor("NC", ("int32",), values=lambda rng, axes: np.sort(rng.integers(0, 2, axes["NC"]))),
        **OPTIONS,
        "initial_states": Tensor("R H P N", optional=True),
    },
    returns={"out": Tensor("T H P", like="x")},
    rounding=(
        "before = round(state before the chunk) to C's dtype",
        "P = round((CB exp(a_i - a_j)) dt_j), j <= i, to x's dtype",
        "out = round((exp(a_i) (C_i before^T) + P x + D x) silu(z))",
    ),
    order="sequential over N and over the chunk",
    parity=TENSOR_CORES,
    mirror=Bound("Q + N + 16", scale=ssd_spread.scan_scale, why="two products' sums, exp and SiLU, single ones"),
    nan=NAN,
    layout="states are those after each chunk, of ssd_state_passing",
    upstream=OPS + "ssd_chunk_scan.py: _chunk_scan_fwd",
    examples=(
        {"T": 40, "H": 4, "P": 5, "G": 2, "N": 6, "NC1": 4, "NC": 3, "Q": 16, "R": 2, "D": "float32", "z": "float32",
         "initial_states": "float32"},
        {"T": 5, "H": 2, "P": 4, "G": 1, "N": 4, "NC1": 2, "NC": 1, "Q": 8, "x": "bfloat16"},
    ),
    requires=(cuts_fit, heads_of_groups, skip_fits, _sequences_counted),
)  # fmt: skip
def ssd_chunk_scan(nx, CB, x, dt, dA_cumsum, C, states, cu_chunk_seqlens, seq_idx, D=None, z=None, initial_states=None):
    """out_i = (exp(a_i) S C_i + sum_j (C_i . B_j) exp(a_i - a_j) dt_j x_j + D x_i) silu(z_i), j <= i in the chunk.

    S is the state before the chunk: states of the chunk before, or where seq_idx changes the sequence's initial one.
    Shapes: CB float32 [NC, G, Q, Q]; x, z [T, H, P], C [T, G, N] of one dtype; dt, dA_cumsum float32 [H, NC, Q]; states
    [NC, H, P, N]; cu_chunk_seqlens int32 [NC + 1]; seq_idx int32 [NC]; D float32 [H] or [H, P]; initial_states
    [R, H, P, N] or None: zeros; out [T, H, P] in x's dtype.
    Rounding points: the state before to C's dtype, the weights to x's dtype, the result.
    Errors: ContractError for chunks that do not fit, H not divisible by G, a seq_idx without an initial state.
    Source: vLLM's ssd_chunk_scan.py.
    """
    chunks, heads = Chunks(cu_chunk_seqlens, CB.shape[-1]), x.shape[1]
    weights, fade = scan_parts(nx, chunks, CB, dt, dA_cumsum)
    weights = nx.load(nx.store(weights, x.dtype))
    initial = None if initial_states is None else nx.load(initial_states)
    before = nx.load(nx.store(before_chunks(seq_idx, nx.load(states), initial), C.dtype))
    values = nx.load(chunks.split(x))
    old = nx.mul(products(nx, nx.load(chunks.split(C, heads)), before), fade)
    y = np.swapaxes(nx.add(old, products(nx, weights, values.swapaxes(-1, -2))), 1, 2)
    gate = None if z is None else np.swapaxes(chunks.split(z), 1, 2)
    return chunks.join(np.swapaxes(nx.store(_finished(nx, y, np.swapaxes(values, 1, 2), D, gate), x.dtype), 1, 2))


def initial_for_each(arguments, axes):
    """a state for each sequence"""
    name = "state" if "state" in arguments else "initial_states"
    if arguments[name] is not None and axes["R"] != axes["S"] - 1:
        raise refuse(name, f"{axes['R']} states", f"{axes['S'] - 1}, one a sequence")


WHOLE = {
    "x": X,
    "dt": Tensor("T H", like="x"),
    "A": NEGATIVE,
    "B": BC,
    "C": BC,
}
EXAMPLES = (
    {"T": 40, "H": 4, "P": 5, "G": 2, "N": 6, "R": 4, "S": 5, "Q": 16, "D": "float32", "z": "float32",
     "dt_bias": "float32", "dt_softplus": True},
    {"T": 9, "H": 2, "P": 4, "G": 1, "N": 4, "R": 1, "S": 2, "Q": 8, "x": "bfloat16", "dt_softplus": True},
)  # fmt: skip


@op(
    row=ROW,
    args={
        **WHOLE,
        "query_start_loc": CU,
        **OPTIONS,
        **BIAS,
        "initial_states": Tensor("R H P N", optional=True),
        "chunk_size": CHUNK,
        **LIMITS,
    },
    returns={"out": Tensor("T H P", like="x"), "final_states": Tensor("R_ H P N", F32)},
    rounding=("those of ssd_chunk_cumsum, ssd_chunk_state, ssd_state_passing (to float32), ssd_bmm_chunk and "
              "ssd_chunk_scan, whose chain it is",),
    order="that of its stages",
    parity=TENSOR_CORES,
    mirror=Bound("4 * Q + 2 * N + 32", scale=ssd_spread.prefill_scale, why="a running error analysis of the stages"),
    nan="propagates within its sequence and head, back to the start of its chunk",
    upstream=OPS + "ssd_combined.py: mamba_chunk_scan_combined_varlen",
    examples=({**EXAMPLES[0], "initial_states": "float32"}, EXAMPLES[1]),
    requires=(starts_fit, heads_of_groups, skip_fits, initial_for_each),
)  # fmt: skip
def ssd_chunk_prefill(
    nx, x, dt, A, B, C, query_start_loc, D=None, z=None, dt_bias=None, initial_states=None, *, chunk_size,
    dt_softplus=False, dt_min=0.0, dt_max=INF,
):  # fmt: skip
    """ssd_recurrent in chunks: the same numbers from matrix products, a state formed once a chunk.

    Shapes: x, z [T, H, P], dt [T, H], B, C [T, G, N] of one dtype; A, dt_bias float32 [H]; query_start_loc int32
    [R + 1]; D float32 [H] or [H, P]; initial_states [R, H, P, N] or None: zeros; out [T, H, P]; final_states float32
    [R, H, P, N].
    Rounding points: those of its stages.
    Errors: ContractError for starts that fall or do not span 0 ... T, H not divisible by G.
    Source: Dao & Gu 2024 (arXiv 2405.21060); vLLM's ssd_combined.py, which for an empty sequence returns the state of
    the sequence before it; here it keeps its own.
    """
    cuts, last, owner = chunk_plan(query_start_loc, chunk_size)
    limits = {"dt_softplus": dt_softplus, "dt_min": dt_min, "dt_max": dt_max}
    sums, dts = ssd_chunk_cumsum.body(nx, dt, A, cuts, dt_bias, chunk_size=chunk_size, **limits)
    local = ssd_chunk_state.body(nx, x, B, dts, sums, cuts)
    passed = ssd_state_passing.body(nx, local, sums, last, initial_states)
    CB = ssd_bmm_chunk.body(nx, C, B, cuts, chunk_size=chunk_size)
    out = ssd_chunk_scan.body(nx, CB, x, dts, sums, C, passed, cuts, owner, D, z, initial_states)
    final = np.zeros((len(last), *local.shape[1:]), local.dtype)
    if initial_states is not None:
        final[...] = nx.store(nx.load(initial_states), final.dtype)
    held = np.diff(query_start_loc) > 0
    final[held] = passed[last[held]]
    return out, final
