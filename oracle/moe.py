"""Products with the matrix of the expert that each row goes to."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.table import op

from .lowbit import STORED_TWICE
from .matmul import ORDER


def draw_experts(rng, axes):
    """Any expert, and none for the first choice of the last token."""
    ids = rng.integers(0, max(axes["E"], 1), (axes["T"], axes["k"]))
    ids[-1:, :1] = -1
    return ids


def rows_and_experts(arguments, axes):
    """a row for each token or for each of its choices; experts from -1 (none) to E - 1"""
    rows, tokens, choices = axes["R"], axes["T"], axes["k"]
    if rows not in (tokens, tokens * choices):
        raise refuse(next(iter(arguments)), f"{rows} rows", f"{tokens} or {tokens * choices}")
    ids = arguments["ids"]
    if isinstance(ids, np.ndarray) and ids.size and (int(ids.min()) < -1 or int(ids.max()) >= axes["E"]):
        raise refuse("ids", f"experts from {int(ids.min())} to {int(ids.max())}", f"-1 to {axes['E'] - 1}")


def _magnitudes(arguments, results):
    """|w| sum_k |x_k| |W_k|."""
    sizes = {name: np.abs(arguments[name].astype(np.float64)) for name in ("x", "weight")}
    ids, scale = arguments["ids"].reshape(-1), arguments["weights"]
    source = source_rows(arguments["x"], arguments["ids"])
    out = np.einsum("pk,pnk->pn", sizes["x"][source], sizes["weight"][np.maximum(ids, 0)])
    return out * (1 if scale is None else np.abs(scale.astype(np.float64)).reshape(-1, 1))


def source_rows(x, ids) -> np.ndarray:
    """The row of x that each choice takes."""
    return np.arange(ids.size) // (1 if len(x) == ids.size else ids.shape[1])


@op(
    row="KERNEL-MOE-UNQUANTIZED",
    args={
        "x": Tensor("R K"),
        "weight": Tensor("E N K"),
        "ids": Tensor("T k", ("int32",), values=draw_experts),
        "weights": Tensor("T k", ("float32",), optional=True),
        "out_dtype": Choice(FLOATS, optional=True),
    },
    returns={"out": Tensor("T*k N")},
    rounding=("out = round(w sum_k x_k W_k), the product with w in float32",),
    order=str(ORDER),
    parity=STORED_TWICE,
    mirror=Bound(
        "(K + 511) // 512 * 16 + 33", scale=_magnitudes, why="as matmul_bt's, and a product; zero rows are exact"
    ),
    nan="propagates within its row, from the expert that it goes to alone",
    layout="choice r of token t is row t k + r of out",
    upstream="vllm/model_executor/layers/fused_moe/fused_moe.py: fused_moe_kernel",
    examples=(
        {"R": 5, "T": 5, "k": 2, "E": 4, "N": 7, "K": 33},
        {"R": 6, "T": 3, "k": 2, "E": 3, "N": 5, "K": 16, "x": "bfloat16", "weight": "bfloat16",
         "weights": "float32"},
        {"R": 2, "T": 2, "k": 3, "E": 2, "N": 4, "K": 8, "x": "bfloat16", "weight": "bfloat16",
         "out_dtype": "float32"},
    ),
    requires=(rows_and_experts,),
)  # fmt: skip
def moe_grouped_gemm(nx, x, weight, ids, weights=None, *, out_dtype=None):
    """out[t k + r] = weights[t, r] * x[t] W_e^T, e = ids[t, r]: every row with the matrix of its expert.

    Shapes: x [T, K], or [T k, K] where each choice has a row of its own; weight [E, N, K]; ids int32 [T, k], -1: a row
    of zeros; weights float32 [T, k] or None; out [T k, N] in `out_dtype`, by default that of x. A row's bytes depend on
    its x and its expert alone; an expert without rows is not read.
    Rounding points: one, after the product with the weight. The mirror sums as matmul_bt.
    Errors: ContractError for an expert that there is not, another number of rows.
    Source: vLLM's fused_moe_kernel, which is this twice, with an activation between; the weights are in the second.
    """
    flat, source = ids.reshape(-1), source_rows(x, ids)
    out = np.zeros((flat.size, weight.shape[1]), out_dtype or x.dtype)
    for expert in np.unique(flat[flat >= 0]):
        rows = np.flatnonzero(flat == expert)
        total = nx.add(nx.matmul(x[source[rows]], weight[expert], order=ORDER, fused=True), 0.0)
        if weights is not None:
            total = nx.mul(total, nx.load(weights.reshape(-1)[rows])[:, None])
        out[rows] = nx.store(total, out.dtype)
    return out
