"""Dense matrix products: plain, by a transposed weight (torch's Linear), and strided batches of them.

A merged projection is one `matmul_bt` over weights stacked along N; its consumers take column slices of the
result. Element (m, n) depends on row m, weight n and K alone, in both arithmetics: merging, splitting, batching
and padding change no byte.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Parity, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.numerics import PLAIN, Order, widen
from vtlab.ops.table import op

_ROW = "KERNEL-GEMM-BF16"
_OUT_DTYPE = Choice(FLOATS, optional=True)
_ROUNDING = ("out = round(sum_k a_k * b_k), in out_dtype",)
_NAN = "propagates; inf * 0 and inf - inf give NaN; a result beyond the storage dtype's range gives infinity"
ORDER = Order("strided(32, vector=16)", lanes=32, vector=16, join=(("sequential", 0),))
"""32 chains: chain l takes k = 16 l ... 16 l + 15, then the sixteen 512 further on, and so on, each step one fma; then
chain after chain. A warp that reads a row of weights, 32 bytes a lane, holds a chain in each lane; a tile of outputs in
registers goes through the chains one by one, and needs one more sum an output."""

_PARITY = Parity("bytes")
_MIRRORS = {"cpu": PLAIN}
"""A CPU takes sixteen columns at once, each a scalar loop over k: the order of KERNEL-GEMM-CPU-ELEM, without fma."""
_WHY = "a chain of one fma for each of its ceil(K / 512) * 16 products, then at most 32 sums"


def _product(nx, a, b_t, dtype):
    """round(sum_k a[m, k] * b_t[n, k]), where a sum of chains that are all -0 is +0: it starts at +0 as they do."""
    return nx.store(nx.add(nx.matmul(a, b_t, order=ORDER, fused=True), 0.0), dtype)


def _magnitudes(a, b):
    """sum_k |a_k| * |b_k|: what the roundings of a sum are relative to."""
    return np.matmul(np.abs(widen(a, np.float64)), np.abs(widen(b, np.float64)))


def _bound(transposed: bool) -> Bound:
    def scale(arguments, results):
        return _magnitudes(arguments["a"], arguments["b"].T if transposed else arguments["b"])

    return Bound("(K + 511) // 512 * 16 + 32", scale=scale, ulps=1, why=_WHY)


def _rows_do_not_overlap(arguments, axes):
    """rows of a and b at least as far apart as they are long; batches may interleave"""
    for name in ("a", "b"):
        value = arguments[name]
        if value.size and value.shape[1] > 1 and value.strides[1] < value.shape[2] * value.itemsize:
            raise refuse(name, f"row stride {value.strides[1] // value.itemsize}", f">= {value.shape[2]}")
        if value.size and value.shape[0] > 1 and value.strides[0] == 0:
            raise refuse(name, "batch stride 0", "> 0")


@op(
    row=_ROW,
    args={"a": Tensor("M K"), "b": Tensor("K N"), "out_dtype": _OUT_DTYPE},
    returns={"out": Tensor("M N")},
    rounding=_ROUNDING,
    order=str(ORDER),
    parity=_PARITY,
    mirrors=_MIRRORS,
    mirror=_bound(transposed=False),
    nan=_NAN,
    upstream="torch.matmul",
    examples=(
        {"M": 3, "K": 65, "N": 33, "a": "float32", "b": "float32"},
        {"M": 1, "K": 300, "N": 17, "a": "bfloat16", "b": "bfloat16"},
        {"M": 2, "K": 129, "N": 1, "a": "float16", "b": "bfloat16", "out_dtype": "float32"},
        {"M": 2, "K": 0, "N": 3, "a": "float32", "b": "float32"},
    ),
)
def matmul(nx, a, b, *, out_dtype=None):
    """out[m, n] = sum_k a[m, k] * b[k, n].

    Shapes: a [M, K], b [K, N], contiguous, each float32, bfloat16 or float16; out [M, N] in `out_dtype`, by default
    that of `a`. K = 0 gives zeros.
    Rounding points: one, the store of `out`. The mirror sums in `ORDER`, from +0, each step one float32 fma: its bytes
    equal those of `matmul_bt` on b.T. CPU kernels
    have a mirror of their own: k ascends, each product and each sum rounds.
    Errors: ContractError for unequal K, other ranks, dtypes or layouts.
    Source: torch.matmul; the order is that of vtlab's own kernels.
    """
    return _product(nx, a, b.T, out_dtype or a.dtype)


@op(
    row=_ROW,
    args={"a": Tensor("M K", layout="rows"), "b": Tensor("N K", layout="rows"), "out_dtype": _OUT_DTYPE},
    returns={"out": Tensor("M N")},
    rounding=_ROUNDING,
    order=str(ORDER),
    parity=_PARITY,
    mirrors=_MIRRORS,
    mirror=_bound(transposed=True),
    nan=_NAN,
    layout="a and b may be row-strided views, such as column slices of a packed tensor; out is contiguous",
    upstream="vllm/model_executor/layers/utils.py: default_unquantized_gemm (torch.nn.functional.linear)",
    examples=(
        {"M": 3, "K": 65, "N": 33, "a": "float32", "b": "float32"},
        {"M": 9, "K": 260, "N": 130, "a": "bfloat16", "b": "bfloat16"},
        {"M": 1, "K": 7, "N": 5, "a": "float32", "b": "bfloat16", "out_dtype": "bfloat16"},
        {"M": 0, "K": 4, "N": 3, "a": "float32", "b": "float16"},
    ),
)
def matmul_bt(nx, a, b, *, out_dtype=None):
    """out[m, n] = sum_k a[m, k] * b[n, k], torch's Linear.

    Shapes: a [M, K], b [N, K], rows of either may be strided, each float32, bfloat16 or float16; out [M, N] in
    `out_dtype`, by default that of `a`. K = 0 gives zeros. Row m of out depends on row m of `a` alone: its bytes
    are the same whatever M is and wherever the row stands, and likewise for the weights.
    Rounding points: one, the store of `out`. The mirror sums in `ORDER`, from +0, each step one float32 fma;
    that of CPU kernels over ascending k, each product and each sum rounded.
    Errors: ContractError for unequal K, other ranks, dtypes or layouts. A weight in a block-quantised format has an
    op of its own.
    Source: vllm/model_executor/layers/utils.py, default_unquantized_gemm.
    """
    return _product(nx, a, b, out_dtype or a.dtype)


@op(
    row=_ROW,
    args={
        "a": Tensor("G M K", layout="strided"),
        "b": Tensor("G K N", like="a", layout="strided"),
        "out_dtype": _OUT_DTYPE,
    },
    returns={"out": Tensor("G M N")},
    rounding=_ROUNDING,
    order=str(ORDER),
    parity=_PARITY,
    mirrors=_MIRRORS,
    mirror=_bound(transposed=False),
    nan=_NAN,
    layout="a and b need unit inner strides and rows that do not overlap; a batch stride below the row stride is fine",
    upstream="torch.bmm, as in vllm/v1/attention/backends/mla",
    examples=(
        {"G": 4, "M": 3, "K": 64, "N": 17, "a": "float32"},
        {"G": 2, "M": 1, "K": 130, "N": 65, "a": "bfloat16"},
        {"G": 2, "M": 5, "K": 3, "N": 4, "a": "float16", "out_dtype": "float32"},
    ),
    requires=(_rows_do_not_overlap,),
)
def batched_matmul(nx, a, b, *, out_dtype=None):
    """out[g, m, n] = sum_k a[g, m, k] * b[g, k, n].

    Shapes: a [G, M, K], b [G, K, N] of one dtype (float32, bfloat16 or float16), unit inner strides, outer strides
    free: a [T, G, K] tensor seen as [G, T, K] passes as it is. out [G, M, N], contiguous, in `out_dtype`, by default
    that of `a`. K = 0 gives zeros.
    Rounding points: one, the store of `out`; the mirror sums as in `matmul`.
    Errors: ContractError for unequal G or K, other ranks, dtypes, a non-unit inner stride, overlapping rows.
    Source: torch.bmm; used for the absorbed projections of multi-head latent attention.
    """
    out = np.empty((a.shape[0], a.shape[1], b.shape[2]), out_dtype or a.dtype)
    for g, (left, right) in enumerate(zip(a, b)):
        out[g] = _product(nx, left, right.T, out.dtype)
    return out
