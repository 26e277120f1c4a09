"""The gated delta rule in chunks, second half: the states between chunks, the outputs, and the whole of it."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import EXACT, Bound, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

from .chunk_spread import chunk_o_scale, delta_h_scale, prefill_scale
from .gdn import draw_decay, draw_keys
from .gdn_chunks import (
    BETA,
    CHUNK_SIZE,
    F32,
    FLA,
    NAN,
    ROW,
    SUMS,
    TENSOR_CORES,
    below,
    decay_between,
    gdn_chunk_cumsum,
    gdn_kkt,
    gdn_recompute_w_u,
    gdn_solve_tril,
)
from .sequences import STARTS, STARTS_ALONE, Chunks, heads_divide, products, starts_fit, written

_STATE = Tensor("N Hv Dv Dk", F32)
_SCALE = Scalar(above=0.0, example=0.25)


def _layout_holds(arguments, axes):
    """query_start_loc starts at 0 and never falls, and num_chunks is what it comes to"""
    starts = arguments["query_start_loc"]
    if isinstance(starts, np.ndarray):
        if starts.size == 0 or starts[0] != 0 or (np.diff(starts) < 0).any():
            raise refuse("query_start_loc", starts.tolist(), "0, never falling")
        count = len(Chunks(starts, arguments["chunk_size"]))
        if count != arguments["num_chunks"]:
            raise refuse("num_chunks", arguments["num_chunks"], count)


def _chunks_counted(arguments, axes):
    """h has a state for each chunk"""
    starts = arguments["query_start_loc"]
    if isinstance(starts, np.ndarray) and axes["NC"] != (count := len(Chunks(starts, arguments["chunk_size"]))):
        raise refuse("h", f"{axes['NC']} states", f"{count}, one for each chunk")


def _chunk_fits(arguments, axes):
    """chunks of 16, 32 or 64 tokens"""
    if arguments["chunk_size"] not in (16, 32, 64):
        raise refuse("chunk_size", arguments["chunk_size"], "16, 32 or 64")


@op(
    row="KERNEL-GDN-SCRATCH",
    args={
        "query_start_loc": STARTS_ALONE,
        "num_chunks": Scalar(int, minimum=0, axis="NC"),
        "chunk_size": Scalar(int, minimum=1, example=64),
    },
    returns={
        "first": Tensor("NC", ("int32",)),
        "length": Tensor("NC", ("int32",)),
        "before": Tensor("N", ("int32",)),
        "chunk": Tensor("NC 2", ("int32",)),
    },
    rounding=("none: integers",),
    parity=Parity("ids"),
    mirror=EXACT,
    nan="there are no floats",
    upstream=FLA + "index.py: prepare_chunk_indices, prepare_chunk_offsets",
    examples=(
        {"query_start_loc": np.int32([0, 64, 64, 65, 200]), "num_chunks": 5},
        {"query_start_loc": np.int32([0]), "num_chunks": 0},
        {"query_start_loc": np.int32([0, 5]), "num_chunks": 5, "chunk_size": 1},
    ),
    requires=(_layout_holds,),
)
def gdn_chunk_layout(nx, query_start_loc, *, num_chunks, chunk_size=64):
    """Where chunk c stands: its first token, its length, and (sequence, place in it); the chunks before each sequence.

    Shapes: query_start_loc int32 [N + 1]; first, length int32 [num_chunks]; before int32 [N]; chunk int32
    [num_chunks, 2]. num_chunks = sum over the sequences of ceil(length / chunk_size) fixes the shapes beforehand.
    Rounding points: none.
    Errors: ContractError for starts that do not begin at 0 or fall, another num_chunks.
    Source: vLLM's index.py, whose sequence numbers skip empty sequences: it must not be given any.
    """
    chunks = Chunks(query_start_loc, chunk_size)
    pairs = np.stack([chunks.sequence, chunks.local], axis=-1)
    return tuple(part.astype(np.int32) for part in (chunks.first, chunks.length, chunks.before, pairs))


@op(
    row=ROW,
    args={
        "k": Tensor("T Hk Dk", values=draw_keys("T")),
        "w": Tensor("T Hv Dk", like="k", values=draw_keys("T", "Hv")),
        "u": Tensor("T Hv Dv", like="k"),
        "gc": SUMS,
        "state": _STATE,
        "query_start_loc": STARTS,
        "chunk_size": CHUNK_SIZE,
    },
    returns={"h": Tensor("NC Hv Dv Dk", like="k"), "v_new": Tensor("T Hv Dv", like="k")},
    rounding=(
        "h = round(S) before each chunk; the product with w takes this rounded one",
        "v_new = round(u - w h^T), which is then used unrounded",
        "written = round(v_new exp(gc_last - gc)); S itself stays float32",
    ),
    order="sequential over Dk and over the chunk; chunks of a sequence one after the other",
    parity=TENSOR_CORES,
    mirror=Bound("C + Dk + 8", scale=delta_h_scale, why="both products' sums, exp and single roundings, carried along"),
    nan=NAN,
    layout="states of h are in the order of the chunks, those of sequence 0 first",
    mutates=("state",),
    upstream=FLA + "chunk_delta_h.py: chunk_gated_delta_rule_fwd_h",
    examples=(
        {"T": 40, "N": 3, "Hk": 1, "Hv": 2, "Dk": 8, "Dv": 6, "C": 16},
        {"T": 20, "N": 1, "Hk": 2, "Hv": 2, "Dk": 5, "Dv": 5, "C": 8, "k": "bfloat16"},
    ),
    requires=(heads_divide, starts_fit, written("state")),
)
def gdn_delta_h(nx, k, w, u, gc, state, query_start_loc, *, chunk_size=64):
    """v_new = u - w S^T; S = exp(gc_last) S + (v_new exp(gc_last - gc))^T k, chunk after chunk; h holds every S before.

    Shapes: k [T, Hk, Dk], w [T, Hv, Dk], u [T, Hv, Dv] of one dtype; gc float32 [T, Hv]; state float32 [N, Hv, Dv, Dk],
    updated in place; query_start_loc int32 [N + 1]; h [NC, Hv, Dv, Dk], NC the number of chunks; v_new [T, Hv, Dv].
    Rounding points: h, v_new and the decayed v_new to k's dtype.
    Errors: ContractError for starts that fall or do not span 0 ... T, Hv not divisible by Hk.
    Source: vLLM's chunk_delta_h.py.
    """
    chunks, dtype, heads = Chunks(query_start_loc, chunk_size), k.dtype, u.shape[1]
    sums = nx.load(chunks.split(gc))
    last = np.take_along_axis(sums, (chunks.length - 1)[:, None, None], axis=2) if len(chunks) else sums[..., :1]
    fade = nx.where(chunks.valid[:, None], nx.exp(nx.where(chunks.valid[:, None], nx.sub(last, sums), 0)), 0)
    keys, factors, values = nx.load(chunks.split(k, heads)), nx.load(chunks.split(w)), nx.load(chunks.split(u))
    keep = nx.exp(last)[..., None]

    def write(S, c, new):
        decayed = nx.load(nx.store(nx.mul(new, fade[c][..., None]), dtype))
        return nx.add(nx.mul(S, keep[c]), products(nx, decayed.swapaxes(-1, -2), keys[c].swapaxes(-1, -2)))

    return between_chunks(nx, chunks, state, factors, values, write, dtype)


def between_chunks(nx, chunks, state, w, u, write, dtype):
    """h, v_new and the state in place: S = write(S, c, u - w round(S)^T) along the chunks of every sequence."""
    S = nx.load(state).copy()
    h = np.zeros((len(chunks), *state.shape[1:]), dtype)
    new = np.zeros(u.shape, dtype)
    for sequence, c in chunks.steps():
        h[c] = nx.store(S[sequence], dtype)
        change = nx.sub(u[c], products(nx, w[c], nx.load(h[c])))
        new[c] = nx.store(change, dtype)
        S[sequence] = write(S[sequence], c, change)
    state[...] = nx.store(S, state.dtype)
    return h, chunks.join(new)


@op(
    row=ROW,
    args={
        "q": Tensor("T Hk Dk", values=draw_keys("T")),
        "k": Tensor("T Hk Dk", like="q", values=draw_keys("T")),
        "v_new": Tensor("T Hv Dv", like="q"),
        "h": Tensor("NC Hv Dv Dk", like="q"),
        "gc": SUMS,
        "query_start_loc": STARTS_ALONE,
        "scale": _SCALE,
        "chunk_size": CHUNK_SIZE,
    },
    returns={"out": Tensor("T Hv Dv", like="q")},
    rounding=(
        "P = round((q_i k_j) exp(gc_i - gc_j)), j <= i, to q's dtype",
        "out = round((q h^T) exp(gc) scale + (P v_new) scale); q is not scaled beforehand",
    ),
    order="sequential over Dk and over the chunk",
    parity=TENSOR_CORES,
    mirror=Bound("C + 2 * Dk + 12", scale=chunk_o_scale, why="three products' sums, exp and single roundings"),
    nan=NAN,
    upstream=FLA + "chunk_o.py: chunk_fwd_o",
    examples=(
        {"T": 40, "S": 2, "NC": 3, "Hk": 1, "Hv": 2, "Dk": 8, "Dv": 6, "C": 16},
        {"T": 20, "S": 2, "NC": 3, "Hk": 2, "Hv": 2, "Dk": 5, "Dv": 5, "C": 8, "q": "bfloat16"},
    ),
    requires=(heads_divide, starts_fit, _chunks_counted),
)
def gdn_chunk_o(nx, q, k, v_new, h, gc, query_start_loc, *, scale, chunk_size=64):
    """out_i = scale (exp(gc_i) S q_i + sum_j (q_i . k_j) exp(gc_i - gc_j) v_new_j), j <= i in the chunk, S = its h.

    Shapes: q, k [T, Hk, Dk], v_new [T, Hv, Dv], h [NC, Hv, Dv, Dk] of one dtype; gc float32 [T, Hv]; query_start_loc
    int32 [N + 1]; out [T, Hv, Dv].
    Rounding points: the weights P to q's dtype; out.
    Errors: ContractError for another number of states than chunks, starts that fall or do not span 0 ... T, scale <= 0.
    Source: vLLM's chunk_o.py.
    """
    chunks, dtype, heads = Chunks(query_start_loc, chunk_size), q.dtype, v_new.shape[1]
    queries, keys, sums = nx.load(chunks.split(q, heads)), nx.load(chunks.split(k, heads)), nx.load(chunks.split(gc))
    kept = below(chunk_size, True) & chunks.valid[:, None, :, None]
    weights = nx.mul(products(nx, queries, keys), decay_between(nx, sums, kept))
    weights = nx.load(nx.store(nx.where(kept, weights, 0), dtype))
    before = nx.mul(nx.mul(products(nx, queries, nx.load(h)), nx.exp(sums)[..., None]), scale)
    inside = nx.mul(products(nx, weights, nx.load(chunks.split(v_new)).swapaxes(-1, -2)), scale)
    return chunks.join(nx.store(nx.add(before, inside), dtype))


@op(
    row=ROW,
    args={
        "q": Tensor("T Hk Dk", values=draw_keys("T")),
        "k": Tensor("T Hk Dk", like="q", values=draw_keys("T")),
        "v": Tensor("T Hv Dv", like="q"),
        "g": Tensor("T Hv", F32, values=draw_decay("T")),
        "beta": BETA,
        "state": _STATE,
        "query_start_loc": STARTS,
        "scale": _SCALE,
        "chunk_size": Scalar(int, minimum=16, maximum=64, axis="C"),
    },
    returns={"out": Tensor("T Hv Dv", like="q")},
    rounding=("those of gdn_chunk_cumsum, gdn_kkt, gdn_solve_tril (to q's dtype), gdn_recompute_w_u, gdn_delta_h, "
              "gdn_chunk_o, whose chain it is",),
    order="that of its stages",
    parity=TENSOR_CORES,
    mirror=Bound("8 * C + 4 * Dk + 32", scale=prefill_scale, why="a running error analysis of the six stages"),
    nan="propagates within its sequence and head, back to the start of its chunk",
    mutates=("state",),
    upstream=FLA + "chunk.py: chunk_gated_delta_rule",
    examples=(
        {"T": 40, "N": 4, "Hk": 1, "Hv": 2, "Dk": 8, "Dv": 6, "C": 16},
        {"T": 35, "N": 1, "Hk": 2, "Hv": 2, "Dk": 16, "Dv": 16, "C": 32, "q": "bfloat16"},
        {"T": 0, "N": 2, "Hk": 1, "Hv": 1, "Dk": 4, "Dv": 4, "C": 64},
    ),
    requires=(heads_divide, starts_fit, written("state"), _chunk_fits),
)  # fmt: skip
def gdn_chunk_prefill(nx, q, k, v, g, beta, state, query_start_loc, *, scale, chunk_size=64):
    """gdn_prefill in chunks: the same numbers from matrix products, a state read and written once a chunk.

    Shapes: q, k [T, Hk, Dk] with normalised rows, v [T, Hv, Dv]; g, beta float32 [T, Hv]; state float32
    [N, Hv, Dv, Dk], updated in place; query_start_loc int32 [N + 1]; out [T, Hv, Dv]. Chunks of 16, 32 or 64 tokens.
    Rounding points: those of its stages; in float32 inputs none but the results', and it equals gdn_prefill.
    Errors: ContractError for starts that fall or do not span 0 ... T, Hv not divisible by Hk, another chunk size.
    Source: Yang et al. 2024 (arXiv 2412.06464); vLLM's chunk.py.
    """
    size = {"chunk_size": chunk_size}
    gc = gdn_chunk_cumsum.body(nx, g, query_start_loc, **size)
    A = gdn_kkt.body(nx, k, beta, gc, query_start_loc, **size)
    Ai = gdn_solve_tril.body(nx, A, query_start_loc, out_dtype=k.dtype)
    w, u = gdn_recompute_w_u.body(nx, k, v, beta, gc, Ai, query_start_loc)
    h, new = gdn_delta_h.body(nx, k, w, u, gc, state, query_start_loc, **size)
    return gdn_chunk_o.body(nx, q, k, new, h, gc, query_start_loc, scale=scale, **size)
