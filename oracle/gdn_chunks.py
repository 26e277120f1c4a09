"""The gated delta rule in chunks, first half: cumulative decays, K K^T, its triangular inverse, and the WY factors.

With G the running sum of g inside a chunk, A[i, j] = beta_i (k_i k_j) exp(G_i - G_j) below the diagonal and
T = (I + A)^-1, the changes that a chunk writes are U - W S^T for U = T (beta v) and W = T (beta exp(G) k), where S is
the state before it. exp(-G_j) alone would overflow: only differences i >= j are ever exponentiated.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Parity, Scalar, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .gdn import draw_decay, draw_keys, draw_strength
from .sequences import STARTS_ALONE, Chunks, flips, heads_divide, products, running, starts_fit

ROW = "KERNEL-GDN-AOT-BF16"
F32 = ("float32",)
FLA = "vllm/third_party/flash_linear_attention/ops/"
NAN = "propagates within its chunk and head; what lies beyond a short chunk is exact zeros"
TENSOR_CORES = Parity(
    "rel_l2", 2.0**-8, "tensor cores: both operands of TF32 lose 2^-10, a product 2^-9, its chain as much again"
)
CHUNK_SIZE = Scalar(int, minimum=1, axis="C")
BETA = Tensor("T Hv", F32, values=draw_strength("T"))
SUBNORMAL = 2.0**-126  # below it a rounding is 2^-24 of this, however small the number
SUMS = Tensor("T Hv", F32, values=lambda rng, axes: -np.sort(-draw_decay("T")(rng, axes), axis=0))


def below(size: int, diagonal: bool) -> np.ndarray:
    """[size, size], true below the diagonal, or on it too."""
    return np.tri(size, size, 0 if diagonal else -1, dtype=bool)


def decay_between(nx, gc, chosen):
    """exp(G_i - G_j) where `chosen`, else 0: [..., size] -> [..., size, size]."""
    difference = nx.sub(gc[..., :, None], gc[..., None, :])
    return nx.where(chosen, nx.exp(nx.where(chosen, difference, 0)), 0)


@op(
    row=ROW,
    args={"g": Tensor("T Hv", F32, values=draw_decay("T")), "query_start_loc": STARTS_ALONE, "chunk_size": CHUNK_SIZE},
    returns={"gc": Tensor("T Hv", F32)},
    rounding=("gc = f32(sum of g from the start of the chunk)",),
    order="sequential",
    parity=Parity("bytes"),
    mirror=Bound("C", scale=lambda arguments, results: np.abs(results[0]).astype(np.float64) + 1e-30,
                 why="at most chunk_size - 1 sums of numbers of one sign"),
    nan="propagates to the end of its chunk",
    layout="chunks are aligned to the starts of their sequences",
    upstream=FLA + "cumsum.py: chunk_local_cumsum",
    examples=(
        {"T": 40, "Hv": 3, "S": 5, "C": 16},
        {"T": 5, "Hv": 1, "S": 2, "C": 1},
        {"T": 0, "Hv": 2, "S": 2, "C": 64},
    ),
    requires=(starts_fit,),
)  # fmt: skip
def gdn_chunk_cumsum(nx, g, query_start_loc, *, chunk_size=64):
    """gc_t = g_s + ... + g_t, s the first token of t's chunk.

    Shapes: g, gc float32 [T, Hv]; query_start_loc int32 [N + 1].
    Rounding points: one, the store; the natural logarithm stays (Kimi delta attention changes the base).
    Errors: ContractError for starts that fall or do not span 0 ... T, chunk_size < 1.
    Source: vLLM's cumsum.py, which sums by a scan.
    """
    chunks = Chunks(query_start_loc, chunk_size)
    total = running(nx, nx.load(chunks.split(g))[..., None])[..., 0]
    return chunks.join(nx.store(total, np.float32))


def _as_chunks(arguments, size, *names):
    """The named arguments in chunks, in float64, each head of k given to its value heads."""
    chunks = Chunks(arguments["query_start_loc"], size)
    heads = arguments["beta" if "beta" in arguments else "A"].shape[1]
    return chunks, *(TRUTH.load(chunks.split(arguments[name], heads)) for name in names)


def _kkt_scale(arguments, results):
    """beta |k_i| |k_j| exp(G_i - G_j), and the difference's own rounding."""
    size = arguments["chunk_size"]
    chunks, k, beta, gc = _as_chunks(arguments, size, "k", "beta", "gc")
    dots = np.matmul(np.abs(k), np.abs(k).swapaxes(-1, -2)) * np.abs(beta)[..., None]
    depth = np.abs(gc[..., :, None]) + np.abs(gc[..., None, :])
    return chunks.join(dots * decay_between(TRUTH, gc, below(size, False)) * (1 + depth)) + SUBNORMAL


@op(
    row=ROW,
    args={
        "k": Tensor("T Hk Dk", values=draw_keys("T")),
        "beta": BETA,
        "gc": SUMS,
        "query_start_loc": STARTS_ALONE,
        "chunk_size": CHUNK_SIZE,
    },
    returns={"A": Tensor("T Hv C", F32)},
    rounding=("A = f32((beta k_i) k_j exp(gc_i - gc_j)); beta k stays in the compute type",),
    order="sequential over Dk",
    parity=TENSOR_CORES,
    mirror=Bound("Dk + 8", scale=_kkt_scale, why="the dot, beta's product, exp of a rounded difference, its product"),
    nan=NAN,
    layout="row t holds the chunk of t: column j is its j-th token; on and above the diagonal zeros",
    upstream=FLA + "chunk_scaled_dot_kkt.py: chunk_scaled_dot_kkt_fwd (TF32)",
    examples=(
        {"T": 40, "Hk": 1, "Hv": 2, "Dk": 8, "S": 4, "C": 16},
        {"T": 7, "Hk": 2, "Hv": 2, "Dk": 5, "S": 2, "C": 16, "k": "bfloat16"},
    ),
    requires=(heads_divide, starts_fit),
)
def gdn_kkt(nx, k, beta, gc, query_start_loc, *, chunk_size=64):
    """A[i, j] = beta_i (k_i . k_j) exp(gc_i - gc_j) for i > j of one chunk, else 0.

    Shapes: k [T, Hk, Dk]; beta, gc float32 [T, Hv]; query_start_loc int32 [N + 1]; A float32 [T, Hv, chunk_size].
    Rounding points: one, the store.
    Errors: ContractError for starts that fall or do not span 0 ... T, Hv not divisible by Hk.
    Source: vLLM's chunk_scaled_dot_kkt.py, whose tensor cores take TF32 operands; beyond a short sequence's last
    column it stores what was in its registers, here zeros.
    """
    chunks = Chunks(query_start_loc, chunk_size)
    heads = beta.shape[1]
    keys, gates = nx.load(chunks.split(k, heads)), nx.load(chunks.split(gc))
    scaled = nx.mul(keys, nx.load(chunks.split(beta))[..., None])
    kept = below(chunk_size, False) & chunks.valid[:, None, :, None]
    A = nx.mul(products(nx, scaled, keys), decay_between(nx, gates, kept))
    return chunks.join(nx.store(nx.where(kept, A, 0), np.float32))


BLOCK = 16


def inverse(nx, A):
    """(I + A)^-1 for A strictly lower: blocks of 16 by forward substitution, then the blocks below them.

    Row i of a block is e_i - sum_j A[i, j] X[j], j ascending; block (i, j) is -X_ii (sum_l A_il X_lj), l ascending.
    """
    size = A.shape[-1]
    X = np.zeros(A.shape, nx.dtype)
    spans = [slice(start, start + BLOCK) for start in range(0, size, BLOCK)]
    for span in spans:
        block = np.zeros((*A.shape[:-2], BLOCK, BLOCK), nx.dtype)
        part = A[..., span, span]
        for i in range(BLOCK):
            total = np.zeros((*A.shape[:-2], BLOCK), nx.dtype)
            for j in range(i):
                total = nx.fma(part[..., i, j, None], block[..., j, :], total)
            block[..., i, :] = nx.sub(np.eye(BLOCK, dtype=nx.dtype)[i], total)
        X[..., span, span] = block
    for i, rows in enumerate(spans):
        for j in range(i - 1, -1, -1):
            columns = spans[j]
            total = nx.const(0)
            for between in spans[j:i]:
                total = nx.add(total, products(nx, A[..., rows, between], X[..., between, columns].swapaxes(-1, -2)))
            X[..., rows, columns] = nx.neg(products(nx, X[..., rows, rows], total.swapaxes(-1, -2)))
    return X


def _inverse_scale(arguments, results):
    """|X| |I + A| |X|: by how much the errors of a substitution are multiplied."""
    chunks, A = _as_chunks(arguments, arguments["A"].shape[-1], "A")
    X = np.abs(inverse(TRUTH, A))
    return chunks.join(X @ ((np.abs(A) + np.eye(A.shape[-1])) @ X)) + SUBNORMAL


def _chunk_of_blocks(arguments, axes):
    """chunks of 16, 32 or 64 tokens"""
    if axes["C"] not in (16, 32, 64):
        raise refuse("A", f"rows of {axes['C']}", "16, 32 or 64 columns")


def _draw_lower(rng, axes):
    """Entries of the size of beta k k^T, below the diagonal of chunks that start with the tokens."""
    place = np.arange(axes["T"]) % axes["C"]
    lower = np.arange(axes["C"]) < place[:, None, None]
    return rng.standard_normal((axes["T"], axes["Hv"], axes["C"])) * 0.2 * lower


@op(
    row=ROW,
    args={
        "A": Tensor("T Hv C", F32, values=_draw_lower),
        "query_start_loc": STARTS_ALONE,
        "out_dtype": Choice(FLOATS, optional=True),
    },
    returns={"Ai": Tensor("T Hv C", FLOATS)},
    rounding=("Ai = round((I + A)^-1), the diagonal of ones included",),
    order="forward substitution in blocks of 16, then block rows; sums ascend",
    parity=TENSOR_CORES,
    mirror=Bound("4 * C", scale=_inverse_scale, why="C roundings of a substitution, C of each of three products"),
    nan=NAN,
    layout="rows as in gdn_kkt; zeros above the diagonal and beyond a short chunk",
    upstream=FLA + "solve_tril.py: solve_tril",
    examples=(
        {"T": 70, "Hv": 2, "C": 64, "S": 2},
        {"T": 33, "Hv": 1, "C": 32, "S": 2, "out_dtype": "bfloat16"},
        {"T": 5, "Hv": 3, "C": 16, "S": 2},
    ),
    requires=(starts_fit, _chunk_of_blocks),
)
def gdn_solve_tril(nx, A, query_start_loc, *, out_dtype=None):
    """Ai = (I + A)^-1 of each chunk; what A has on and above the diagonal is not looked at.

    Shapes: A float32 [T, Hv, C], C = 16, 32 or 64; query_start_loc int32 [N + 1]; Ai [T, Hv, C] in `out_dtype`, by
    default float32.
    Rounding points: one, the store.
    Errors: ContractError for another C, starts that fall or do not span 0 ... T.
    Source: vLLM's solve_tril.py, which multiplies (X_ii A_ij) X_jj where here it is X_ii (A_ij X_jj).
    """
    chunks = Chunks(query_start_loc, A.shape[-1])
    return chunks.join(nx.store(inverse(nx, nx.load(chunks.split(A))), out_dtype or np.float32))


def _factors_scale(arguments, results):
    """|Ai| |beta exp(G) k| and |Ai| |beta v|; a flip of the rounded factor is an ulp of it."""
    names = ("Ai", "k", "v", "beta", "gc")
    chunks, Ai, k, v, beta, gc = _as_chunks(arguments, arguments["Ai"].shape[-1], *names)
    factor = np.abs(k * (beta * np.exp(gc))[..., None]) * (1 + np.abs(gc))[..., None]
    more = 1 + flips(arguments["k"].dtype)
    return tuple(more * chunks.join(np.abs(Ai) @ np.abs(part)) for part in (factor, v * beta[..., None]))


@op(
    row=ROW,
    args={
        "k": Tensor("T Hk Dk", values=draw_keys("T")),
        "v": Tensor("T Hv Dv", like="k"),
        "beta": BETA,
        "gc": SUMS,
        "Ai": Tensor("T Hv C", like="k", values=_draw_lower),
        "query_start_loc": STARTS_ALONE,
    },
    returns={"w": Tensor("T Hv Dk", like="k"), "u": Tensor("T Hv Dv", like="k")},
    rounding=(
        "factors round((k beta) exp(gc)) and round(v beta), each once",
        "w = round(Ai factor), u = round(Ai factor)",
    ),
    order="sequential over the chunk",
    parity=TENSOR_CORES,
    mirror=Bound("C + 6", scale=_factors_scale, why="the sum over a chunk, the factor's product, exp within 1 ulp"),
    nan=NAN,
    layout="rows of Ai as in gdn_kkt",
    upstream=FLA + "wy_fast.py: recompute_w_u_fwd",
    examples=(
        {"T": 40, "Hk": 1, "Hv": 2, "Dk": 8, "Dv": 6, "S": 4, "C": 16},
        {"T": 7, "Hk": 2, "Hv": 2, "Dk": 5, "Dv": 5, "S": 2, "C": 32, "k": "bfloat16"},
    ),
    requires=(heads_divide, starts_fit),
)
def gdn_recompute_w_u(nx, k, v, beta, gc, Ai, query_start_loc):
    """w = Ai (beta exp(gc) k), u = Ai (beta v), chunk by chunk.

    Shapes: k [T, Hk, Dk], v [T, Hv, Dv], Ai [T, Hv, C] of one dtype; beta, gc float32 [T, Hv]; query_start_loc int32
    [N + 1]; w [T, Hv, Dk] and u [T, Hv, Dv] in k's dtype.
    Rounding points: both factors to k's dtype, then the results.
    Errors: ContractError for starts that fall or do not span 0 ... T, Hv not divisible by Hk, mixed dtypes.
    Source: vLLM's wy_fast.py.
    """
    chunks, dtype = Chunks(query_start_loc, Ai.shape[-1]), k.dtype
    heads = v.shape[1]
    matrix, strength = nx.load(chunks.split(Ai)), nx.load(chunks.split(beta))[..., None]
    decay = nx.exp(nx.load(chunks.split(gc)))[..., None]
    keys = nx.mul(nx.mul(nx.load(chunks.split(k, heads)), strength), decay)
    results = []
    for factor in (keys, nx.mul(nx.load(chunks.split(v)), strength)):
        rounded = nx.load(nx.store(factor, dtype))
        results.append(chunks.join(nx.store(products(nx, matrix, rounded.swapaxes(-1, -2)), dtype)))
    return tuple(results)
