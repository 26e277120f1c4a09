"""Kimi delta attention in chunks, first half: sums of decays in base 2, K K^T and Q K^T under them, the WY factors.

The stages are those of the gated delta rule with 2^(G_i - G_j) inside the dot products: each channel has its
own decay. Of 16 x 16 blocks those below the diagonal are products of k_i 2^(G_i - G_n) and k_j 2^(G_n - G_j), n the
block's first row, whose exponents are never positive; those on it are formed pair by pair. gdn_solve_tril inverts.
"""

from __future__ import annotations

import math

import numpy as np

from vtlab.ops.contract import Bound, Parity, Tensor, refuse
from vtlab.ops.table import op

from . import kda_spread
from .gdn import unit_rows
from .gdn_chunks import BLOCK, CHUNK_SIZE, TENSOR_CORES, below
from .kda import F32, GATE, ROW, SCALE, SOFTPLUS, UPSTREAM, draw_strength, softplus_gate
from .sequences import STARTS_ALONE, Chunks, products, running, starts_fit

NAN = "propagates within its chunk and head; what lies beyond a short chunk is exact zeros"
UNIT = {"values": lambda rng, axes: unit_rows(rng, (axes["T"], axes["H"], axes["D"]))}
SUMS = Tensor(
    "T H D", F32, values=lambda rng, axes: np.cumsum(-rng.exponential(0.2, (axes["T"], axes["H"], axes["D"])), axis=0)
)
BETA = Tensor("T H", F32, values=draw_strength("T", "H"))


def exp2(nx, x):
    return nx.exp(nx.mul(x, math.log(2)))


def whole_blocks(arguments, axes):
    """chunks of 16, 32 or 64 tokens"""
    if axes["C"] not in (16, 32, 64):
        name = "chunk_size" if "chunk_size" in arguments else "Aqk" if "Aqk" in arguments else "Ai"
        raise refuse(name, axes["C"], "16, 32 or 64")


def sums_of(nx, chunks, gc):
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
        "q": Tensor("T H D", **UNIT),
        "k": Tensor("T H D", like="q", **UNIT),
        "gc": SUMS,
        "beta": BETA,
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
    nan=NAN,
    layout="rows as in gdn_kkt: Akk is 0 on and above the diagonal, Aqk above it",
    upstream=UPSTREAM + "chunk_kda_scaled_dot_kkt_fwd (TF32 below the diagonal blocks)",
    examples=(
        {"T": 40, "H": 2, "D": 8, "S": 3, "C": 16},
        {"T": 37, "H": 1, "D": 5, "S": 2, "C": 32, "q": "bfloat16"},
    ),
    requires=(starts_fit, whole_blocks),
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
    sums, _ = sums_of(nx, chunks, gc)
    strength = nx.load(chunks.split(beta))[..., None]
    found = np.zeros((2, *keys.shape[:-1], chunk_size), nx.dtype)
    for start in range(0, chunk_size, BLOCK):
        rows, first = slice(start, start + BLOCK), sums[..., start : start + 1, :]
        inside = nx.sub(sums[..., rows, None, :], sums[..., None, rows, :])
        pairs = nx.where(below(BLOCK, True)[..., None], exp2(nx, nx.minimum(inside, 0.0)), 0)
        columns = nx.mul(keys[..., None, rows, :], pairs)
        fade = exp2(nx, nx.sub(sums[..., rows, :], first))
        others = nx.mul(keys[..., :start, :], exp2(nx, nx.sub(first, sums[..., :start, :])))
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
        "k": Tensor("T H D", **UNIT),
        "v": Tensor("T H Dv", like="k"),
        "beta": BETA,
        "gc": SUMS,
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
    nan=NAN,
    layout="rows of Ai as in gdn_kkt",
    upstream=UPSTREAM + "recompute_w_u_fwd",
    examples=(
        {"T": 40, "H": 2, "D": 8, "Dv": 6, "S": 3, "C": 16},
        {"T": 7, "H": 1, "D": 5, "Dv": 5, "S": 2, "C": 32, "k": "bfloat16"},
    ),
    requires=(starts_fit, whole_blocks),
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
    sums, last = sums_of(nx, chunks, gc)
    matrix, keys, strength = (nx.load(chunks.split(part)) for part in (Ai, k, beta))
    strength = strength[..., None]
    results = []
    for factor in (nx.mul(nx.mul(keys, strength), exp2(nx, sums)), nx.mul(nx.load(chunks.split(v)), strength)):
        rounded = nx.load(nx.store(factor, dtype))
        results.append(nx.store(products(nx, matrix, rounded.swapaxes(-1, -2)), dtype))
    kg = nx.store(nx.mul(keys, exp2(nx, nx.sub(last, sums))), dtype)
    return tuple(chunks.join(part) for part in (*results, kg))
