"""Mamba-2's state space dual in chunks: cumulative decays, the chunks' own states, states passed on, C B^T, outputs.

Chunks are cut by cu_chunk_seqlens, at most Q tokens each, and no sequence shares one. With a the sum of dt A inside a
chunk, a token t adds dt_t exp(a_last - a_t) x_t B_t^T to its chunk's state and reads exp(a_t) of the state before it.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .causal_conv import ROW
from .gdn_chunks import SUBNORMAL, TENSOR_CORES, below
from .sequences import Chunks, flips, products, running
from .ssm import F32, time_step

OPS = "vllm/model_executor/layers/mamba/ops/"
NAN = "propagates within its chunk and head; what lies beyond a short chunk is exact zeros"
INF = float("inf")


def _draw_cuts(rng, axes):
    """Chunks that fill T tokens: whole ones of Q, the first cut short where there is room for one more."""
    tokens, count, size = axes["T"], axes["NC1"] - 1, axes["Q"]
    lengths = [min(size, tokens - size * (count - 1))] + [size] * (count - 1)
    return np.cumsum([0, *lengths])


CUTS = Tensor("NC1", ("int32",), values=_draw_cuts)
STEPS = Tensor("H NC Q", F32, values=lambda rng, axes: rng.uniform(0.01, 0.5, (axes["H"], axes["NC"], axes["Q"])))
SUMS = Tensor(
    "H NC Q", F32, values=lambda rng, axes: -np.cumsum(rng.uniform(0, 0.3, (axes["H"], axes["NC"], axes["Q"])), -1)
)
CHUNK = Scalar(int, minimum=1, axis="Q")
NEGATIVE = Tensor("H", F32, values=lambda rng, axes: -rng.uniform(0.1, 2, axes["H"]))


def chunk_plan(starts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """cu_chunk_seqlens, last_chunk_indices and seq_idx of sequences cut into chunks of `size`."""
    chunks = Chunks(starts, size)
    cuts = np.append(chunks.first, starts[-1]).astype(np.int32)
    return cuts, (chunks.before + chunks.counts - 1).astype(np.int32), chunks.sequence.astype(np.int32)


def cuts_fit(arguments, axes):
    """cu_chunk_seqlens starts at 0 and ends at T; each chunk holds 1 to Q tokens"""
    cuts = arguments["cu_chunk_seqlens"]
    if isinstance(cuts, np.ndarray):
        lengths = np.diff(cuts)
        if not cuts.size or cuts[0] != 0 or cuts[-1] != axes["T"] or (lengths < 1).any() or (lengths > axes["Q"]).any():
            raise refuse("cu_chunk_seqlens", cuts.tolist(), f"0 to {axes['T']} in steps of 1 to {axes['Q']}")
        if axes.get("NC", lengths.size) != lengths.size:
            raise refuse("cu_chunk_seqlens", f"{lengths.size} chunks", f"{axes['NC']}")


def heads_of_groups(arguments, axes):
    """the heads are a multiple of the groups of B and C"""
    if axes["G"] == 0 or axes["H"] % axes["G"]:
        raise refuse("B" if "B" in arguments else "C", f"{axes['G']} groups", f"a divisor of {axes['H']}")


def between(nx, late, early, chosen):
    """exp(min(late - early, 0)) where `chosen`, else 0."""
    return nx.where(chosen, nx.exp(nx.minimum(nx.sub(late, early), 0.0)), 0)


def clamped(nx, dt, dt_bias, dt_softplus, dt_min, dt_max):
    return nx.minimum(nx.maximum(time_step(nx, dt, dt_bias, dt_softplus), dt_min), dt_max)


def _cumsum_scale(arguments, results):
    """|dt A| (1 + |dt + bias|) summed along the chunk, and the same of dt."""
    chunks = Chunks(arguments["cu_chunk_seqlens"], arguments["chunk_size"])
    raw = np.abs(time_step(TRUTH, arguments["dt"], arguments["dt_bias"], False))
    dt = np.abs(clamped(TRUTH, *(arguments[name] for name in ("dt", "dt_bias", "dt_softplus", "dt_min", "dt_max"))))
    moved = chunks.split(dt * (1 + raw))
    sums = np.cumsum(moved, axis=-1) * np.abs(arguments["A"].astype(np.float64))[:, None]
    return np.moveaxis(sums, 0, 1) + SUBNORMAL, np.moveaxis(moved, 0, 1) + SUBNORMAL


@op(
    row=ROW,
    args={
        "dt": Tensor("T H"),
        "A": NEGATIVE,
        "cu_chunk_seqlens": CUTS,
        "dt_bias": Tensor("H", F32, optional=True),
        "chunk_size": CHUNK,
        "dt_softplus": Flag(),
        "dt_min": Scalar(),
        "dt_max": Scalar(),
    },
    returns={"dA_cumsum": Tensor("H NC Q", F32), "dt_out": Tensor("H NC Q", F32)},
    rounding=("dt_out = f32(clamp(softplus(dt + dt_bias)))", "dA_cumsum = f32(sum of the unrounded dt A)"),
    order="sequential",
    parity=Parity("bytes"),
    mirror=Bound("Q + 8", scale=_cumsum_scale, why="softplus within 1 ulp, the product and the sums"),
    nan="propagates to the end of its chunk",
    layout="beyond a short chunk dt_out is 0 and dA_cumsum stays at its last value",
    upstream=OPS + "ssd_chunk_state.py: _chunk_cumsum_fwd (a scan)",
    examples=(
        {"T": 20, "H": 3, "NC1": 3, "Q": 16, "dt_bias": "float32", "dt_softplus": True},
        {"T": 5, "H": 2, "NC1": 2, "Q": 8, "dt": "bfloat16", "dt_min": 0.1, "dt_max": 0.7},
    ),
    requires=(cuts_fit,),
)  # fmt: skip
def ssd_chunk_cumsum(
    nx, dt, A, cu_chunk_seqlens, dt_bias=None, *, chunk_size, dt_softplus=False, dt_min=0.0, dt_max=INF
):
    """dt_out = clamp(softplus(dt + dt_bias), dt_min, dt_max); dA_cumsum = its sum times A from the start of the chunk.

    Shapes: dt [T, H]; A, dt_bias float32 [H]; cu_chunk_seqlens int32 [NC + 1]; dA_cumsum, dt_out float32 [H, NC, Q].
    Rounding points: one each, the stores.
    Errors: ContractError for chunks that are empty, longer than Q, or do not span 0 ... T.
    Source: Dao & Gu 2024 (arXiv 2405.21060); vLLM's ssd_chunk_state.py.
    """
    chunks = Chunks(cu_chunk_seqlens, chunk_size)
    steps = chunks.split(clamped(nx, dt, dt_bias, dt_softplus, dt_min, dt_max))
    sums = running(nx, nx.mul(steps, nx.load(A)[:, None])[..., None])[..., 0]
    return tuple(np.ascontiguousarray(np.moveaxis(nx.store(part, np.float32), 0, 1)) for part in (sums, steps))


def state_factors(nx, chunks, x, B, dt, dA_cumsum):
    """x and the decayed, rounded dt B of each chunk and head: [chunks, H, Q, P] and [chunks, H, Q, N]."""
    heads = x.shape[1]
    sums, steps = (np.moveaxis(nx.load(part), 0, 1) for part in (dA_cumsum, dt))
    weight = nx.mul(between(nx, sums[..., -1:], sums, chunks.valid[:, None]), steps)
    keys = nx.mul(nx.load(chunks.split(B, heads)), weight[..., None])
    return nx.load(chunks.split(x)), nx.load(nx.store(keys, x.dtype))


def _state_scale(arguments, results):
    chunks = Chunks(arguments["cu_chunk_seqlens"], arguments["dt"].shape[2])
    x, keys = state_factors(TRUTH, chunks, *(arguments[name] for name in ("x", "B", "dt", "dA_cumsum")))
    sums = np.abs(np.moveaxis(arguments["dA_cumsum"].astype(np.float64), 0, 1))
    depth = (1 + flips(arguments["x"].dtype) + sums[..., -1:] + sums)[..., None]
    return np.abs(x).swapaxes(-1, -2) @ (np.abs(keys) * depth) + SUBNORMAL


@op(
    row=ROW,
    args={
        "x": Tensor("T H P"),
        "B": Tensor("T G N", like="x"),
        "dt": STEPS,
        "dA_cumsum": SUMS,
        "cu_chunk_seqlens": CUTS,
    },
    returns={"states": Tensor("NC H P N", F32)},
    rounding=("keys = round(B (exp(a_last - a_t) dt_t)) to x's dtype", "states = f32(sum_t x_t keys_t^T)"),
    order="sequential over the chunk",
    parity=TENSOR_CORES,
    mirror=Bound("Q + 8", scale=_state_scale, why="the sum over a chunk, exp within 1 ulp, two products"),
    nan=NAN,
    upstream=OPS + "ssd_chunk_state.py: _chunk_state_fwd",
    examples=(
        {"T": 20, "H": 4, "P": 5, "G": 2, "N": 6, "NC1": 3, "NC": 2, "Q": 16},
        {"T": 5, "H": 2, "P": 4, "G": 1, "N": 4, "NC1": 2, "NC": 1, "Q": 8, "x": "bfloat16"},
    ),
    requires=(cuts_fit, heads_of_groups),
)
def ssd_chunk_state(nx, x, B, dt, dA_cumsum, cu_chunk_seqlens):
    """states_c = sum_t dt_t exp(a_last - a_t) x_t B_t^T over the chunk's tokens: what it adds to the state.

    Shapes: x [T, H, P], B [T, G, N] of one dtype, head h reads group h // (H / G); dt, dA_cumsum float32 [H, NC, Q];
    cu_chunk_seqlens int32 [NC + 1]; states float32 [NC, H, P, N].
    Rounding points: the decayed B to x's dtype; the result.
    Errors: ContractError for chunks that do not fit, H not divisible by G.
    Source: vLLM's ssd_chunk_state.py.
    """
    chunks = Chunks(cu_chunk_seqlens, dt.shape[2])
    left, keys = state_factors(nx, chunks, x, B, dt, dA_cumsum)
    return nx.store(products(nx, left.swapaxes(-1, -2), keys.swapaxes(-1, -2)), np.float32)


def passed_on(nx, states, last, last_chunk_indices, initial, dtype):
    """round(S) after each chunk, S = exp(a_last) S + states_c along the chunks of each sequence."""
    after, begin = [], 0
    for n, end in enumerate(last_chunk_indices):
        S = nx.const(0) if initial is None else initial[n]
        for c in range(begin, end + 1):
            S = nx.add(nx.mul(S, nx.exp(last[c])[..., None, None]), states[c])
            after.append(nx.store(S, dtype))
        begin = max(begin, end + 1)
    return np.stack(after) if after else nx.store(states, dtype)


def _passing_scale(arguments, results):
    """|exp(a) S| (1 + |a|) + |states|, carried along."""
    sums = np.moveaxis(arguments["dA_cumsum"].astype(np.float64), 0, 1)[..., -1]
    states, initial = np.abs(arguments["states"].astype(np.float64)), arguments["initial_states"]
    E, begin = np.zeros(states.shape), 0
    for n, end in enumerate(arguments["last_chunk_indices"]):
        S = np.zeros(states.shape[1:]) if initial is None else np.abs(initial[n].astype(np.float64))
        error = 0.0
        for c in range(begin, end + 1):
            decay, depth = (part[..., None, None] for part in (np.exp(sums[c]), 1 + np.abs(sums[c])))
            error = decay * (error + S * depth) + states[c]
            S = decay * S + states[c]
            E[c] = error + S
        begin = max(begin, end + 1)
    return E + SUBNORMAL


def _indices_ascend(arguments, axes):
    """last_chunk_indices never fall, from -1 (nothing but empty sequences yet) to NC - 1"""
    last = arguments["last_chunk_indices"]
    if isinstance(last, np.ndarray):
        bad = last.size and (last[0] < -1 or last[-1] != axes["NC"] - 1 or (np.diff(last) < 0).any())
        if bad or (not last.size and axes["NC"]):
            raise refuse("last_chunk_indices", last.tolist(), f"never falling, up to {axes['NC'] - 1}")


@op(
    row=ROW,
    args={
        "states": Tensor("NC H P N", F32),
        "dA_cumsum": SUMS,
        "last_chunk_indices": Tensor("R", ("int32",)),
        "initial_states": Tensor("R H P N", optional=True),
        "state_dtype": Choice(FLOATS, optional=True),
    },
    returns={"out": Tensor("NC H P N")},
    rounding=("out = round(S) to state_dtype; S itself stays float32 to the end of its sequence",),
    order="the chunks of a sequence one after the other",
    parity=Parity("bytes"),
    mirror=Bound("6", scale=_passing_scale, why="exp within 1 ulp, a product and a sum a chunk, carried along"),
    nan="propagates to the end of its sequence",
    layout="out_c is the state after chunk c",
    upstream=OPS + "ssd_state_passing.py: _state_passing_fwd",
    examples=(
        {"NC": 4, "H": 2, "P": 3, "N": 5, "Q": 8, "R": 3, "last_chunk_indices": np.int32([1, 1, 3]),
         "initial_states": "float32"},
        {"NC": 2, "H": 1, "P": 3, "N": 2, "Q": 4, "R": 1, "last_chunk_indices": np.int32([1]),
         "state_dtype": "bfloat16"},
    ),
    requires=(_indices_ascend,),
)  # fmt: skip
def ssd_state_passing(nx, states, dA_cumsum, last_chunk_indices, initial_states=None, *, state_dtype=None):
    """S = exp(a_last) S + states_c along each sequence's chunks, from its initial state; out_c = S after chunk c.

    Shapes: states float32 [NC, H, P, N]; dA_cumsum float32 [H, NC, Q]; last_chunk_indices int32 [R], the last chunk of
    each sequence (for an empty one that of the sequence before); initial_states [R, H, P, N] or None: zeros; out
    [NC, H, P, N] in `state_dtype`, by default float32.
    Rounding points: one, the store.
    Errors: ContractError for indices that fall or do not end with the last chunk.
    Source: vLLM's ssd_state_passing.py.
    """
    last = np.moveaxis(nx.load(dA_cumsum), 0, 1)[..., -1]
    initial = None if initial_states is None else nx.load(initial_states)
    return passed_on(nx, nx.load(states), last, last_chunk_indices, initial, state_dtype or np.float32)


def _bmm_scale(arguments, results):
    chunks = Chunks(arguments["cu_chunk_seqlens"], arguments["chunk_size"])
    C, B = (np.abs(chunks.split(arguments[name]).astype(np.float64)) for name in ("C", "B"))
    return C @ B.swapaxes(-1, -2) + SUBNORMAL


@op(
    row=ROW,
    args={"C": Tensor("T G N"), "B": Tensor("T G N", like="C"), "cu_chunk_seqlens": CUTS, "chunk_size": CHUNK},
    returns={"CB": Tensor("NC G Q Q", F32)},
    rounding=("CB = f32(C_i B_j)",),
    order="sequential over N",
    parity=TENSOR_CORES,
    mirror=Bound("N", scale=_bmm_scale, why="the sum over N"),
    nan=NAN,
    layout="all pairs of a chunk, above the diagonal too; zeros beyond a short one",
    upstream=OPS + "ssd_bmm.py: _bmm_chunk_fwd",
    examples=(
        {"T": 20, "G": 2, "N": 6, "NC1": 3, "Q": 16},
        {"T": 5, "G": 1, "N": 4, "NC1": 2, "Q": 8, "C": "bfloat16"},
    ),
    requires=(cuts_fit,),
)
def ssd_bmm_chunk(nx, C, B, cu_chunk_seqlens, *, chunk_size):
    """CB[i, j] = C_i . B_j for the tokens of a chunk.

    Shapes: C, B [T, G, N] of one dtype; cu_chunk_seqlens int32 [NC + 1]; CB float32 [NC, G, Q, Q].
    Rounding points: one, the store.
    Errors: ContractError for chunks that do not fit.
    Source: vLLM's ssd_bmm.py.
    """
    chunks = Chunks(cu_chunk_seqlens, chunk_size)
    return nx.store(products(nx, nx.load(chunks.split(C)), nx.load(chunks.split(B))), np.float32)


def scan_parts(nx, chunks, CB, dt, dA_cumsum):
    """The weights CB exp(a_i - a_j) dt_j, j <= i, unrounded, and exp(a_i)."""
    sums, steps = (np.moveaxis(nx.load(part), 0, 1) for part in (dA_cumsum, dt))
    heads = sums.shape[1]
    fade = between(nx, sums[..., :, None], sums[..., None, :], below(chunks.size, True))
    weights = nx.mul(nx.mul(np.repeat(nx.load(CB), heads // max(CB.shape[1], 1), axis=1), fade), steps[..., None, :])
    return weights, nx.exp(sums)[..., None]


def before_chunks(chunks_of, states, initial):
    """The state before each chunk: the one after the chunk before, or at a sequence's first its initial one."""
    first = np.r_[True, np.diff(chunks_of) != 0] if len(chunks_of) else np.zeros(0, bool)
    before = np.concatenate([states[:1], states[:-1]])
    before[first] = 0 if initial is None else initial[chunks_of[first]]
    return before
