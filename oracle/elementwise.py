"""Elementwise ops around the GEMMs: sums, scalings, casts, and the embedding gather."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import EXACT, Bound, Choice, Parity, Scalar, Tensor, extremes, refuse
from vtlab.ops.dtypes import FLOATS, IDS
from vtlab.ops.numerics import round_to, widen
from vtlab.ops.table import op

_ROW = "KERNEL-EW-NORM-ACT"
_ONE = Bound("1", ulps=1, why="one float32 rounding, which can flip the store's")


def _b_is_like_a_or_one_row(arguments, axes):
    """b has a's shape, or is one row [D]"""
    a, b = arguments["a"], arguments["b"]
    if b.shape not in (a.shape, a.shape[-1:]):
        raise refuse("b", f"shape {tuple(b.shape)}", f"shape {tuple(a.shape)} or {tuple(a.shape[-1:])}")


@op(
    row=_ROW,
    args={"a": Tensor("... D"), "b": Tensor("* D")},
    returns={"out": Tensor("... D", like="a")},
    rounding=("out = round(a + b)",),
    parity=Parity("bytes"),
    mirror=_ONE,
    nan="propagates; inf - inf is NaN",
    upstream="torch.add; the bias add of vllm/model_executor/layers/linear.py",
    examples=(
        {"...": (8,), "D": 64, "a": "bfloat16", "b": "bfloat16"},
        {"...": (2, 3), "D": 5, "a": "bfloat16", "b": "float32"},
        {"...": (4,), "D": 3, "b": np.array([1e30, -0.5, 0.0], np.float32)},
    ),
    requires=(_b_is_like_a_or_one_row,),
)
def add(nx, a, b):
    """out = a + b; b may be one row, a bias.

    Shapes: a, out [..., D], one dtype; b [..., D] or [D].
    Rounding points: one, on the store of `out`.
    Errors: ContractError for a b of any other shape (no general broadcasting).
    Source: torch.add.
    """
    return nx.store(nx.add(nx.load(a), nx.load(b)), a.dtype)


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... D"), "scale": Scalar(example=2.0**0.5)},
    returns={"out": Tensor("... D", like="x")},
    rounding=("s = float32(scale)", "out = round(x * s)"),
    parity=Parity("bytes"),
    mirror=_ONE,
    nan="propagates; inf * 0 is NaN",
    upstream="torch.mul by a Python number; Gemma's embedding scale is bf16(sqrt(hidden_size))",
    examples=({"...": (8,), "D": 64, "x": "bfloat16", "scale": 53.5}, {"...": (3,), "D": 5, "scale": 0.1}),
)
def mul_scalar(nx, x, scale):
    """out = x * float32(scale).

    Shapes: x, out [..., D], one dtype.
    Rounding points: the scale to float32, in truth too; then one, on the store of `out`.
    Errors: ContractError for a scale that is no number.
    Source: torch.mul with a Python number.
    """
    with np.errstate(over="ignore"):
        factor = float(np.float32(scale))
    return nx.store(nx.mul(nx.load(x), factor), x.dtype)


@op(
    row=_ROW,
    rows="M",
    args={"x": Tensor("M N", ("float32",), layout="rows"), "col": Tensor("N", ("float32",))},
    returns={"out": Tensor("M N", ("float32",))},
    rounding=("out = round(x * col)",),
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="the product of two float32 is exact in float64, so both arithmetics round it once"),
    nan="propagates; inf * 0 is NaN",
    layout="x may have padded rows; the result is contiguous",
    upstream="vt::mul_col_vec_f32, the per-channel scale after an int8 or fp8 GEMM",
    examples=({"M": 4, "N": 33}, {"M": 1, "N": 1}),
)
def mul_col_vec_f32(nx, x, col):
    """out[m, n] = x[m, n] * col[n].

    Shapes: x, out float32 [M, N]; col float32 [N].
    Rounding points: one, the float32 product.
    Errors: ContractError for another dtype, a col of another length.
    Source: vt::mul_col_vec_f32.
    """
    return nx.store(nx.mul(nx.load(x), nx.load(col)), np.float32)


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... D", ("float32",), layout="rows")},
    returns={"out": Tensor("... D", ("bfloat16",))},
    rounding=("out = round(x)",),
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="one rounding of a float32 value, the same in both arithmetics"),
    nan="stays NaN (quiet, sign kept); beyond bfloat16's largest value: infinity",
    upstream="torch.Tensor.to(torch.bfloat16)",
    examples=({"...": (4,), "D": 33}, {"...": (), "D": 1}),
)
def cast_bf16(nx, x):
    """out = bf16(x).

    Shapes: x float32 [..., D]; out bfloat16 [..., D].
    Rounding points: one, to nearest, ties to even (never truncated).
    Errors: ContractError for a dtype other than float32.
    Source: IEEE 754-2019 4.3.1; torch.Tensor.to.
    """
    return round_to(x, ml_dtypes.bfloat16)


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... D", ("bfloat16",), layout="rows")},
    returns={"out": Tensor("... D", ("float32",))},
    rounding=("none: every bfloat16 is a float32",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="stays NaN",
    layout="x may be strided rows; the result is contiguous",
    upstream="torch.Tensor.to(torch.float32)",
    examples=({"...": (4,), "D": 33}, {"...": (), "D": 1}),
)
def cast_f32(nx, x):
    """out = float32(x).

    Shapes: x bfloat16 [..., D], rows may be strided; out float32 [..., D].
    Rounding points: none.
    Errors: ContractError for a dtype other than bfloat16.
    Source: torch.Tensor.to.
    """
    return widen(x, np.float32)


def _ids_name_rows(arguments, axes):
    """every id lies in [0, V); host arrays are looked at here, device arrays by the kernel, which reports the first"""
    ids, rows = arguments["ids"], axes["V"]
    if not isinstance(ids, np.ndarray) or not ids.size:
        return
    low, high = extremes(ids)
    if low < 0 or high >= rows:
        at = int(np.argmax((ids < 0) | (ids >= rows)))
        raise refuse("ids", f"id {ids[at]} at position {at}", f"0 <= id < V = {rows}")


@op(
    row=_ROW,
    args={
        "table": Tensor("V H"),
        "ids": Tensor("T", IDS, values=lambda rng, axes: rng.integers(0, axes["V"], axes["T"])),
        "out_dtype": Choice(FLOATS, optional=True),
    },
    returns={"out": Tensor("T H", FLOATS)},
    rounding=("out = round(table[id]) where out_dtype is not the table's; else a copy",),
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="one rounding of a stored value, the same in both arithmetics"),
    nan="copied",
    upstream="vllm/model_executor/layers/vocab_parallel_embedding.py; torch.nn.functional.embedding",
    examples=(
        {"V": 50, "H": 16, "T": 32, "table": "bfloat16", "ids": "int64"},
        {"V": 3, "H": 5, "T": 4, "table": "float32", "out_dtype": "bfloat16"},
        {"V": 1, "H": 2, "T": 0, "table": "bfloat16", "out_dtype": "float32"},
    ),
    requires=(_ids_name_rows,),
)
def embedding(nx, table, ids, *, out_dtype=None):
    """out[t] = table[ids[t]].

    Shapes: table [V, H]; ids int32 or int64 [T]; out [T, H] in `out_dtype`, by default the table's.
    Rounding points: none, or one where `out_dtype` is narrower than the table.
    Errors: ContractError naming the first id outside [0, V), before anything is read; T = 0 is allowed.
    Source: torch.nn.functional.embedding.
    """
    rows = table[ids]
    return rows if out_dtype in (None, table.dtype) else nx.store(nx.load(rows), out_dtype)
