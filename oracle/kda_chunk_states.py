"""Kimi delta attention in chunks, second half: the states between chunks, the outputs, and the whole of it."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Scalar, Tensor, refuse
from vtlab.ops.table import op

from . import kda_spread
from .gdn_chunk_states import between_chunks
from .gdn_chunks import CHUNK_SIZE, TENSOR_CORES, below, gdn_solve_tril
from .kda import F32, GATE, ROW, SCALE, UPSTREAM
from .kda_chunks import (
    BETA,
    NAN,
    SUMS,
    UNIT,
    exp2,
    kda_decay_gate_chunk_cumsum,
    kda_kkt,
    kda_recompute_w_u,
    sums_of,
    whole_blocks,
)
from .sequences import STARTS, STARTS_ALONE, Chunks, products, starts_fit, written


@op(
    row=ROW,
    args={
        "kg": Tensor("T H D", **UNIT),
        "w": Tensor("T H D", like="kg", **UNIT),
        "u": Tensor("T H Dv", like="kg"),
        "gc": SUMS,
        "state": Tensor("N H Dv D", F32),
        "query_start_loc": STARTS,
        "chunk_size": CHUNK_SIZE,
    },
    returns={"h": Tensor("NC H Dv D", like="kg"), "v_new": Tensor("T H Dv", like="kg")},
    rounding=(
        "h = round(S) before each chunk; the product with w takes this rounded one",
        "v_new = round(u - w h^T), which is then written to the state; S itself stays float32",
    ),
    order="sequential over D and over the chunk; chunks of a sequence one after the other",
    parity=TENSOR_CORES,
    mirror=Bound(
        "C + D + 8", scale=kda_spread.delta_h_scale, why="both products' sums, exp and single roundings, carried along"
    ),
    nan=NAN,
    layout="states of h are in the order of the chunks, those of sequence 0 first",
    mutates=("state",),
    upstream="vllm/third_party/flash_linear_attention/ops/chunk_delta_h.py: chunk_gated_delta_rule_fwd_h(gk=)",
    examples=(
        {"T": 40, "N": 3, "H": 2, "D": 8, "Dv": 6, "C": 16},
        {"T": 20, "N": 1, "H": 1, "D": 5, "Dv": 5, "C": 32, "kg": "bfloat16"},
    ),
    requires=(starts_fit, written("state")),
)
def kda_delta_h(nx, kg, w, u, gc, state, query_start_loc, *, chunk_size=64):
    """v_new = u - w S^T; S = S diag(2^gc_last) + v_new^T kg, chunk after chunk; h holds every S before.

    Shapes: kg, w [T, H, D], u [T, H, Dv] of one dtype; gc float32 [T, H, D]; state float32 [N, H, Dv, D], updated in
    place; query_start_loc int32 [N + 1]; h [NC, H, Dv, D], NC the number of chunks; v_new [T, H, Dv].
    Rounding points: h and v_new to kg's dtype; unlike in gdn_delta_h no decay is applied to v_new, kg holds it.
    Errors: ContractError for starts that fall or do not span 0 ... T.
    Source: vLLM's chunk_delta_h.py.
    """
    chunks, dtype = Chunks(query_start_loc, chunk_size), kg.dtype
    _, last = sums_of(nx, chunks, gc)
    keys, keep = nx.load(chunks.split(kg)), exp2(nx, last)

    def write(S, c, new):
        rounded = nx.load(nx.store(new, dtype))
        return nx.add(nx.mul(S, keep[c]), products(nx, rounded.swapaxes(-1, -2), keys[c].swapaxes(-1, -2)))

    return between_chunks(nx, chunks, state, nx.load(chunks.split(w)), nx.load(chunks.split(u)), write, dtype)


def _chunks_counted(arguments, axes):
    """h has a state for each chunk"""
    starts = arguments["query_start_loc"]
    if isinstance(starts, np.ndarray) and axes["NC"] != (count := len(Chunks(starts, axes["C"]))):
        raise refuse("h", f"{axes['NC']} states", f"{count}, one for each chunk")


@op(
    row=ROW,
    args={
        "q": Tensor("T H D", **UNIT),
        "v_new": Tensor("T H Dv", like="q"),
        "h": Tensor("NC H Dv D", like="q"),
        "gc": SUMS,
        "Aqk": Tensor("T H C", F32),
        "query_start_loc": STARTS_ALONE,
        "scale": SCALE,
    },
    returns={"out": Tensor("T H Dv", like="q")},
    rounding=(
        "qs = round(q scale), qg = round(qs 2^gc), both to q's dtype",
        "P = round(Aqk) to q's dtype, what is above the diagonal left out",
        "out = round(qg h^T + P v_new)",
    ),
    order="sequential over D and over the chunk",
    parity=TENSOR_CORES,
    mirror=Bound("C + D + 8", scale=kda_spread.chunk_o_scale, why="two products' sums, exp and single roundings"),
    nan=NAN,
    upstream=UPSTREAM + "chunk_gla_fwd_o_gk",
    examples=(
        {"T": 40, "S": 2, "NC": 3, "H": 2, "D": 8, "Dv": 6, "C": 16},
        {"T": 20, "S": 2, "NC": 1, "H": 1, "D": 5, "Dv": 5, "C": 32, "q": "bfloat16"},
    ),
    requires=(starts_fit, whole_blocks, _chunks_counted),
)
def kda_chunk_o(nx, q, v_new, h, gc, Aqk, query_start_loc, *, scale):
    """out_i = S (scale 2^gc_i q_i) + sum_j Aqk[i, j] v_new_j, j <= i in the chunk, S = its h.

    Shapes: q [T, H, D], v_new [T, H, Dv], h [NC, H, Dv, D] of one dtype; gc float32 [T, H, D]; Aqk float32 [T, H, C];
    query_start_loc int32 [N + 1]; out [T, H, Dv].
    Rounding points: q after each of its two products, Aqk, and out.
    Errors: ContractError for another number of states than chunks, starts that fall or do not span 0 ... T, scale <= 0.
    Source: vLLM's kda.py, which writes out over v.
    """
    chunks, dtype = Chunks(query_start_loc, Aqk.shape[-1]), q.dtype
    sums, _ = sums_of(nx, chunks, gc)
    scaled = nx.load(nx.store(nx.mul(nx.load(chunks.split(q)), scale), dtype))
    faded = nx.load(nx.store(nx.mul(scaled, exp2(nx, sums)), dtype))
    weights = nx.load(nx.store(nx.where(below(chunks.size, True), nx.load(chunks.split(Aqk)), 0), dtype))
    before = products(nx, faded, nx.load(h))
    inside = products(nx, weights, nx.load(chunks.split(v_new)).swapaxes(-1, -2))
    return chunks.join(nx.store(nx.add(before, inside), dtype))


@op(
    row=ROW,
    args={
        "q": Tensor("T H D", **UNIT),
        "k": Tensor("T H D", like="q", **UNIT),
        "v": Tensor("T H Dv", like="q"),
        "g1": Tensor("T H D", like="q"),
        "beta": BETA,
        **GATE,
        "state": Tensor("N H Dv D", F32),
        "query_start_loc": STARTS,
        "scale": SCALE,
        "chunk_size": Scalar(int, minimum=16, maximum=64, axis="C"),
    },
    returns={"out": Tensor("T H Dv", like="q")},
    rounding=("those of kda_decay_gate_chunk_cumsum, kda_kkt, gdn_solve_tril (to q's dtype), kda_recompute_w_u, "
              "kda_delta_h, kda_chunk_o, whose chain it is",),
    order="that of its stages",
    parity=TENSOR_CORES,
    mirror=Bound("8 * C + 4 * D + 48", scale=kda_spread.prefill_scale, why="a running error analysis of the stages"),
    nan="propagates within its sequence and head, back to the start of its chunk",
    mutates=("state",),
    upstream=UPSTREAM + "chunk_kda_with_fused_gate",
    examples=(
        {"T": 40, "N": 4, "H": 2, "D": 8, "Dv": 6, "C": 16, "dt_bias": "float32"},
        {"T": 35, "N": 1, "H": 1, "D": 16, "Dv": 16, "C": 32, "q": "bfloat16"},
        {"T": 0, "N": 2, "H": 1, "D": 4, "Dv": 4, "C": 64},
    ),
    requires=(starts_fit, written("state"), whole_blocks),
)  # fmt: skip
def kda_chunk_prefill(nx, q, k, v, g1, beta, A_log, dt_bias, state, query_start_loc, *, scale, chunk_size=64):
    """kda_prefill_recurrent in chunks, with the gate -exp(A_log) softplus(g1 + dt_bias) inside.

    Shapes: q, k [T, H, D] with normalised rows, v [T, H, Dv], g1 [T, H, D] of one dtype; beta float32 [T, H]; A_log
    float32 [H]; dt_bias float32 [H * D] or None; state float32 [N, H, Dv, D], updated in place; query_start_loc int32
    [N + 1]; out [T, H, Dv]. Chunks of 16, 32 or 64 tokens.
    Rounding points: those of its stages.
    Errors: ContractError for starts that fall or do not span 0 ... T, another chunk size.
    Source: Kimi Linear (arXiv 2510.26692); vLLM's kda.py.
    """
    cu, size = query_start_loc, {"chunk_size": chunk_size}
    gc = kda_decay_gate_chunk_cumsum.body(nx, g1, A_log, dt_bias, cu, **size)
    Akk, Aqk = kda_kkt.body(nx, q, k, gc, beta, cu, scale=scale, **size)
    Ai = gdn_solve_tril.body(nx, Akk, cu, out_dtype=k.dtype)
    w, u, kg = kda_recompute_w_u.body(nx, k, v, beta, gc, Ai, cu)
    h, new = kda_delta_h.body(nx, kg, w, u, gc, state, cu, **size)
    return kda_chunk_o.body(nx, q, new, h, gc, Aqk, cu, scale=scale)
