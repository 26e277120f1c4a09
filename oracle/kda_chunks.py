"""Kimi delta attention in chunks: sums of decays in base 2, K K^T and Q K^T under them, WY factors, states, outputs.

The stages are those of the gated delta rule with 2^(G_i - G_j) inside the dot products: each channel has its
own decay. Of 16 x 16 blocks those below the diagonal are products of k_i 2^(G_i - G_n) and k_j 2^(G_n - G_j), n the
block's first row, whose exponents are never positive; those on it are formed pair by pair. gdn_solve_tril inverts.
"""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops.contract import Bound, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

from . import kda_spread
from .gdn import unit_rows
from .gdn_chunk_states import between_chunks
from .gdn_chunks import BLOCK, CHUNK_SIZE, TENSOR_CORES, below, gdn_solve_tril
from .kda import F32, GATE, ROW, SCALE, SOFTPLUS, UPSTREAM, draw_strength, softplus_gate
from .sequences import STARTS, STARTS_ALONE, Chunks, products, running, starts_fit, written

_NAN = "propagates within its chunk and head; what lies beyond a short chunk is exact zeros"
_UNIT = {"values": lambda rng, axes: unit_rows(rng, (axes["T"], axes["H"], axes["D"]))}
_SUMS = Tensor(
    "T H D", F32, values=lambda rng, axes: np.cumsum(-rng.exponential(0.2, (axes["T"], axes["H"], axes["D"])), axis=0)
)
_BETA = Tensor("T H", F32, values=draw_strength("T", "H"))


def _exp2(nx, x):
    return nx.exp(nx.mul(x, math.log(2)))


def _whole_blocks(arguments, axes):
    """chunks of 16, 32 or 64 tokens"""
    if axes["C"] not in (16, 32, 64):
        name = "chunk_size" if "chunk_size" in arguments else "Aqk" if "Aqk" in arguments else "Ai"
        raise refuse(name, axes["C"], "16, 32 or 64")


def _sums(nx, chunks, gc):
    """gc in chunks, and its last row; places beyond a short chunk repeat that one."""
    sums = nx.load(chunks.split(gc))
    last = np.take_along_axis(sums, np.maximum(chunks.length - 1, 0)[:, None, None, None], axis=2)
    return np.where(chunks.valid[:, None, :, None], sums, last), last


@op(
    row=ROW,
    args={"g1": Tensor("T H D"), **GATE, "query_start_loc": STARTS_ALONE, **SOFTPLUS, "chunk_size": CHUNK_SIZE},
    returns={"gc": Tensor("T H D", F32)},
    rounding=("gc = f32((sum of kda_decay_gate's unrounded g from the start of the chunk) / ln 2)",),
    order="sequential",
    parity=Parity("bytes"),
    mirror=Bound("C + 12", scale=kda_spread.gate_sums_scale, why="the gates' roundings, the sums', the change of base"),
    nan="propagates to the end of its chunk",
    layout="chunks are aligned to the starts of their sequences",
    upstream=UPSTREAM + "fused_kda_gate_chunk_cumsum",
    examples=(
        {"T": 40, "H": 2, "D": 3, "S": 4, "C": 16, "g1": "bfloat16", "dt_bias": "float32"},
        {"T": 5, "H": 1, "D": 2, "S": 2, "C": 64},
    ),
    requires=(starts_fit,),
)
def kda_decay_gate_chunk_cumsum(nx, g1, A_log, dt_bias, query_start_loc, *, beta=1.0, threshold=20.0, chunk_size=64):
    """gc_t = (g_s + ... + g_t) / ln 2, s the first token of t's chunk, g = -exp(A_log) softplus(g1 + dt_bias).

    Shapes: g1 [T, H, D]; A_log float32 [H]; dt_bias float32 [H * D] or None; query_start_loc int32 [N + 1];
    gc float32 [T, H, D], a logarithm to the base 2.
    Rounding points: one, the store.
    Errors: ContractError for starts that fall or do not span 0 ... T, beta <= 0.
    Source: vLLM's kda.py, which sums by a product with a matrix of ones.
    """
    chunks = Chunks(query_start_loc, chunk_size)
    g, _ = softplus_gate(nx, g1, A_log, dt_bias, beta, threshold)
    total = running(nx, chunks.split(g))
    return chunks.join(nx.store(nx.mul(total, 1.4426950408889634), np.float32))


@op(
    row=ROW,
    args={
        "q": Tensor("T H D", **_UNIT),
        "k": Tensor("T H D", like="q", **_UNIT),
        "gc": _SUMS,
        "beta": _BETA,
        "query_start_loc": STARTS_ALONE,
        "scale": SCALE,
        "chunk_size": CHUNK_SIZE,
    },
    returns={"Akk": Tensor("T H C", F32), "Aqk": Tensor("T H C", F32)},
    rounding=("Akk, Aqk = f32(...), their factors stay in the compute type",),
    order="sequential over D",
    parity=TENSOR_CORES,
    mirror=Bound(
        "D + 12", scale=kda_spread.kkt_scale, why="the dot, two factors with exp within 1 ulp, beta or the scale"
    ),
    nan=_NAN,
    layout="rows as in gdn_kkt: Akk is 0 on and above the diagonal, Aqk above it",
    upstream=UPSTREAM + "chunk_kda_scaled_dot_kkt_fwd (TF32 below the diagonal blocks)",
    examples=(
        {"T": 40, "H": 2, "D": 8, "S": 3, "C": 16},
        {"T": 37, "H": 1, "D": 5, "S": 2, "C": 32, "q": "bfloat16"},
    ),
    requires=(starts_fit, _whole_blocks),
)
def kda_kkt(nx, q, k, gc, beta, query_start_loc, *, scale, chunk_size=64):
    """Akk[i, j] = beta_i sum_d k_i k_j 2^(gc_i - gc_j), i > j; Aqk[i, j] = scale sum_d q_i k_j 2^(gc_i - gc_j), i >= j.

    Shapes: q, k [T, H, D] of one dtype with normalised rows; gc float32 [T, H, D]; beta float32 [T, H];
    query_start_loc int32 [N + 1]; Akk, Aqk float32 [T, H, chunk_size].
    Rounding points: one each.
    Errors: ContractError for starts that fall or do not span 0 ... T, another chunk size than 16, 32 or 64.
    Source: Kimi Linear (arXiv 2510.26692); vLLM's kda.py.
    """
    chunks = Chunks(query_start_loc, chunk_size)
    queries, keys = nx.load(chunks.split(q)), nx.load(chunks.split(k))
    sums, _ = _sums(nx, chunks, gc)
    strength = nx.load(chunks.split(beta))[..., None]
    found = np.zeros((2, *keys.shape[:-1], chunk_size), nx.dtype)
    for start in range(0, chunk_size, BLOCK):
        rows, first = slice(start, start + BLOCK), sums[..., start : start + 1, :]
        inside = nx.sub(sums[..., rows, None, :], sums[..., None, rows, :])
        pairs = nx.where(below(BLOCK, True)[..., None], _exp2(nx, nx.minimum(inside, 0.0)), 0)
        columns = nx.mul(keys[..., None, rows, :], pairs)
        fade = _exp2(nx, nx.sub(sums[..., rows, :], first))
        others = nx.mul(keys[..., :start, :], _exp2(nx, nx.sub(first, sums[..., :start, :])))
        for into, left in zip(found, (keys, queries)):
            left = left[..., rows, :]
            into[..., rows, rows] = nx.dot(left[..., None, :], columns, fused=True)
            into[..., rows, :start] = products(nx, nx.mul(left, fade), others)
    valid = chunks.valid[:, None, :, None]
    Akk = nx.where(below(chunk_size, False) & valid, nx.mul(found[0], strength), 0)
    Aqk = nx.where(below(chunk_size, True) & valid, nx.mul(found[1], scale), 0)
    return tuple(chunks.join(nx.store(part, np.float32)) for part in (Akk, Aqk))


@op(
    row=ROW,
    args={
        "k": Tensor("T H D", **_UNIT),
        "v": Tensor("T H Dv", like="k"),
        "beta": _BETA,
        "gc": _SUMS,
        "Ai": Tensor("T H C", like="k"),
        "query_start_loc": STARTS_ALONE,
    },
    returns={"w": Tensor("T H D", like="k"), "u": Tensor("T H Dv", like="k"), "kg": Tensor("T H D", like="k")},
    rounding=(
        "factors round((k beta) 2^gc) and round(v beta), each once",
        "w = round(Ai factor), u = round(Ai factor)",
        "kg = round(k 2^(gc_last - gc))",
    ),
    order="sequential over the chunk",
    parity=TENSOR_CORES,
    mirror=Bound(
        "C + 8", scale=kda_spread.factors_scale, why="the sum over a chunk, the factor's products, exp within 1 ulp"
    ),
    nan=_NAN,
    layout="rows of Ai as in gdn_kkt",
    upstream=UPSTREAM + "recompute_w_u_fwd",
    examples=(
        {"T": 40, "H": 2, "D": 8, "Dv": 6, "S": 3, "C": 16},
        {"T": 7, "H": 1, "D": 5, "Dv": 5, "S": 2, "C": 32, "k": "bfloat16"},
    ),
    requires=(starts_fit, _whole_blocks),
)
def kda_recompute_w_u(nx, k, v, beta, gc, Ai, query_start_loc):
    """w = Ai (beta 2^gc k), u = Ai (beta v), kg = 2^(gc_last - gc) k, chunk by chunk.

    Shapes: k [T, H, D], v [T, H, Dv], Ai [T, H, C] of one dtype; beta float32 [T, H]; gc float32 [T, H, D];
    query_start_loc int32 [N + 1]; w, kg [T, H, D] and u [T, H, Dv] in k's dtype.
    Rounding points: both factors to k's dtype, then the results.
    Errors: ContractError for starts that fall or do not span 0 ... T, mixed dtypes, another C than 16, 32 or 64.
    Source: vLLM's kda.py.
    """
    chunks, dtype = Chunks(query_start_loc, Ai.shape[-1]), k.dtype
    sums, last = _sums(nx, chunks, gc)
    matrix, keys, strength = (nx.load(chunks.split(part)) for part in (Ai, k, beta))
    strength = strength[..., None]
    results = []
    for factor in (nx.mul(nx.mul(keys, strength), _exp2(nx, sums)), nx.mul(nx.load(chunks.split(v)), strength)):
        rounded = nx.load(nx.store(factor, dtype))
        results.append(nx.store(products(nx, matrix, rounded.swapaxes(-1, -2)), dtype))
    kg = nx.store(nx.mul(keys, _exp2(nx, nx.sub(last, sums))), dtype)
    return tuple(chunks.join(part) for part in (*results, kg))


@op(
    row=ROW,
    args={
        "kg": Tensor("T H D", **_UNIT),
        "w": Tensor("T H D", like="kg", **_UNIT),
        "u": Tensor("T H Dv", like="kg"),
        "gc": _SUMS,
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
    nan=_NAN,
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
    _, last = _sums(nx, chunks, gc)
    keys, keep = nx.load(chunks.split(kg)), _exp2(nx, last)

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
        "q": Tensor("T H D", **_UNIT),
        "v_new": Tensor("T H Dv", like="q"),
        "h": Tensor("NC H Dv D", like="q"),
        "gc": _SUMS,
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
    nan=_NAN,
    upstream=UPSTREAM + "chunk_gla_fwd_o_gk",
    examples=(
        {"T": 40, "S": 2, "NC": 3, "H": 2, "D": 8, "Dv": 6, "C": 16},
        {"T": 20, "S": 2, "NC": 1, "H": 1, "D": 5, "Dv": 5, "C": 32, "q": "bfloat16"},
    ),
    requires=(starts_fit, _whole_blocks, _chunks_counted),
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
    sums, _ = _sums(nx, chunks, gc)
    scaled = nx.load(nx.store(nx.mul(nx.load(chunks.split(q)), scale), dtype))
    faded = nx.load(nx.store(nx.mul(scaled, _exp2(nx, sums)), dtype))
    weights = nx.load(nx.store(nx.where(below(chunks.size, True), nx.load(chunks.split(Aqk)), 0), dtype))
    before = products(nx, faded, nx.load(h))
    inside = products(nx, weights, nx.load(chunks.split(v_new)).swapaxes(-1, -2))
    return chunks.join(nx.store(nx.add(before, inside), dtype))


@op(
    row=ROW,
    args={
        "q": Tensor("T H D", **_UNIT),
        "k": Tensor("T H D", like="q", **_UNIT),
        "v": Tensor("T H Dv", like="q"),
        "g1": Tensor("T H D", like="q"),
        "beta": _BETA,
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
    requires=(starts_fit, written("state"), _whole_blocks),
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
