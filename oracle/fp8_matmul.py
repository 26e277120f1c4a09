"""Products of 8-bit operands with one scale a tensor, a row or a column: e4m3 by e4m3, or int8 by int8.

A product of two e4m3 values has at most eight significant bits, so only their sum rounds; a sum of int8 products is
exact. Operands of e4m3 are codes, one byte each, in uint8 arrays.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import Bound, Choice, Parity, Tensor, refuse
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .matmul import ORDER
from .quant_fp8 import E4M3

_ROW = "KERNEL-GEMM-FP8"
LONGEST = 1 << 17
"""K up to which sums of int8 products stay in int32."""
NAN = "a code 0x7F or 0xFF makes its row of a, or column of b, NaN"
STEPS = "(K + 511) // 512 * 16 + 32"
TENSOR_CORES = Parity(
    "rel_l2",
    2.0**-8,
    "the store to bfloat16, at worst 2**-9; tensor cores cut e4m3 products at 2**-13 of the largest of 32, at worst "
    "2**-9 of a row where they do not cancel. Sums of int8, and what ends in float32: bytes",
)
"""How products of e4m3 are judged on a GPU."""
WHY = "a chain of one fma for each of its ceil(K / 512) * 16 products, then at most 32 sums"


def draw_codes(*shape: str):
    """Bytes that are finite e4m3 numbers up to 16 of both signs, or as int8 any, for the named axes."""

    def draw(rng, axes):
        sizes = [axes[name] for name in shape]
        return rng.integers(0, 0x59, sizes) | rng.integers(0, 2, sizes) << 7

    return draw


def as_columns(*shape: str):
    """The same, its last two axes swapped in memory."""
    return lambda rng, axes: draw_codes(*shape[:-2], shape[-1], shape[-2])(rng, axes).swapaxes(-1, -2)


def values(codes):
    """Codes in the storage dtype that they stand for."""
    return codes.view(E4M3) if codes.dtype == np.uint8 else codes


def scales_are(name, value, *, zero=False):
    """Refuse scales that are NaN, infinite, negative, or 0 unless `zero`; on a GPU the host does not read them."""
    if isinstance(value, np.ndarray):
        wrong = ~(np.isfinite(value) & (value >= 0 if zero else value > 0))
        if wrong.any():
            raise refuse(name, value[wrong][0], "finite numbers of at least 0" if zero else "positive finite numbers")


def alpha_is_positive(arguments, axes):
    """alpha is positive and finite; on a GPU the host does not read it"""
    scales_are("alpha", arguments["alpha"])


alpha_is_positive.finite = ("alpha",)


def by_sixteen(arguments, axes):
    """K and N are multiples of 16"""
    for name, size in (("a", axes["K"]), ("b", axes["N"])):
        if size % 16:
            raise refuse(name, f"{'K' if name == 'a' else 'N'} = {size}", "a multiple of 16")


def _fp8_sizes(arguments, results):
    a, b = (np.abs(TRUTH.load(values(arguments[x]))) for x in "ab")
    return float(arguments["alpha"][0]) * (a @ b.T)


def _product_with_alpha(nx, a, b, alpha):
    total = nx.matmul(nx.load(values(a)), values(b), order=ORDER, fused=True)
    return nx.mul(total, nx.load(alpha))


def _fp8_op(**more):
    return op(
        row=_ROW,
        args={
            "a": Tensor("M K", ("uint8",), values=draw_codes("M", "K"), holds="float8_e4m3fn"),
            "b": Tensor("N K", ("uint8",), values=draw_codes("N", "K"), holds="float8_e4m3fn"),
            "alpha": Tensor("1", ("float32",), values=lambda rng, axes: np.array([0.035 * 0.017])),
            "out_dtype": Choice(("bfloat16", "float32")),
        },
        returns={"out": Tensor("M N", ("bfloat16", "float32"))},
        order=str(ORDER),
        parity=TENSOR_CORES,
        mirror=Bound(f"{STEPS} + 1", scale=_fp8_sizes, ulps=1, why=f"{WHY}, and the product with alpha"),
        nan=NAN,
        examples=({"M": 3, "N": 16, "K": 64}, {"M": 1, "N": 32, "K": 528, "out_dtype": "float32"},
                  {"M": 0, "N": 16, "K": 16}),
        requires=(by_sixteen, alpha_is_positive),
        **more,
    )  # fmt: skip


@_fp8_op(
    rounding=("out = bf16(alpha * sum_k a * b), widened to float32 where out_dtype is",),
    upstream="vt::matmul_fp8_cutlass; vllm/_custom_ops.py: cutlass_scaled_mm with scales of one tensor",
)
def matmul_fp8_cutlass(nx, a, b, alpha, *, out_dtype=ml_dtypes.bfloat16):
    """out[m, n] = bf16(alpha * sum_k e4m3(a[m, k]) e4m3(b[n, k])), whatever out_dtype.

    Shapes: a uint8 [M, K], b uint8 [N, K], codes; alpha float32 [1], the product of both scales; out [M, N].
    Rounding points: one, to bfloat16; a float32 result is that one widened.
    Errors: ContractError for K or N no multiple of 16, alpha not positive and finite.
    Source: NVIDIA CUTLASS, sm90 FP8 GEMM; vllm/_custom_ops.py, cutlass_scaled_mm.
    """
    out = nx.store(_product_with_alpha(nx, a, b, alpha), ml_dtypes.bfloat16)
    return nx.store(nx.load(out), out_dtype)


@_fp8_op(
    rounding=("out = round(alpha * sum_k a * b), in out_dtype",),
    upstream="vt::matmul_fp8_cublaslt; torch._scaled_mm",
)
def matmul_fp8_cublaslt(nx, a, b, alpha, *, out_dtype=ml_dtypes.bfloat16):
    """out[m, n] = alpha * sum_k e4m3(a[m, k]) e4m3(b[n, k]).

    Shapes: a uint8 [M, K], b uint8 [N, K], codes; alpha float32 [1], the product of both scales; out [M, N].
    Rounding points: one, the store of `out`.
    Errors: ContractError for K or N no multiple of 16, alpha not positive and finite.
    Source: cuBLASLt matmul, CUDA_R_8F_E4M3 operands; torch._scaled_mm.
    """
    return nx.store(_product_with_alpha(nx, a, b, alpha), out_dtype)


def operands_fit(arguments, axes):
    """b is column-major; K < 2^17 for int8, whose sums are int32"""
    b = arguments["b"]
    rows, columns = b.shape
    if b.size and ((rows > 1 and b.strides[0] != 1) or (columns > 1 and b.strides[1] < rows)):
        raise refuse("b", f"strides {tuple(b.strides)}", "columns of neighbours, at least K bytes apart")
    if b.dtype == np.int8 and axes["K"] >= LONGEST:
        raise refuse("b", f"K = {axes['K']}", f"K < {LONGEST}")


def scales_fit(arguments, axes):
    """scales are [1] or [M, 1] of a, [1] or [1, N] of b: finite; those of b positive, those of a may be 0"""
    for name, one in (("scale_a", (axes["M"], 1)), ("scale_b", (1, axes["N"]))):
        value = arguments[name]
        if tuple(value.shape) not in ((1,), one):
            raise refuse(name, f"shape {tuple(value.shape)}", f"(1,) or {one}")
        scales_are(name, value, zero=name == "scale_a")


scales_fit.finite = ("scale_a", "scale_b")


def exact_sum(a, b):
    """sum_k a[m, k] * b[k, n] of int8: whole numbers, which the truth's float64 holds; both arithmetics take them."""
    return TRUTH.matmul(TRUTH.load(a), b.T)


def _scaled(nx, total, scale_a, scale_b, bias, out_dtype):
    """The epilogue: the scale of b first, then that of a, the bias by one fma."""
    column = nx.mul(nx.load(scale_b), total)
    rows = nx.load(scale_a)
    return nx.store(nx.mul(rows, column) if bias is None else nx.fma(rows, column, nx.load(bias)), out_dtype)


def _sizes(arguments, results):
    """|scale_a| |scale_b| (sum_k |a| |b| + what azp takes away) + |bias|."""
    a, b = (np.abs(TRUTH.load(values(arguments[x]))) for x in "ab")
    size = a @ b
    if arguments.get("azp_adj") is not None:
        azp = arguments["azp"]
        size = size + np.abs(arguments["azp_adj"].astype(np.float64) * (1 if azp is None else azp))
    bias = arguments["bias"]
    scales = arguments["scale_a"].astype(np.float64) * arguments["scale_b"].astype(np.float64)
    return scales * size + (0 if bias is None else np.abs(bias.astype(np.float64)))


def _scales_of(rows: bool):
    def draw(rng, axes):
        shape = axes.get("sa" if rows else "sb", (1,))
        return rng.uniform(0.01, 0.05, shape)

    return draw


_A = Tensor("M K", ("uint8", "int8"), values=draw_codes("M", "K"), holds="float8_e4m3fn")
_B = Tensor("K N", like="a", layout="any", values=as_columns("K", "N"))
_SCALES = {
    "scale_a": Tensor("* Sa", ("float32",), values=_scales_of(True)),
    "scale_b": Tensor("* Sb", ("float32",), values=_scales_of(False)),
}
_HALVES = ("bfloat16", "float16")
_EPILOGUE = "t = scale_b * acc; out = round(scale_a * t), with a bias round(scale_a * t + bias), in out_dtype"


@op(
    row=_ROW,
    args={"a": _A, "b": _B, **_SCALES, "bias": Tensor("N", _HALVES, optional=True), "out_dtype": Choice(_HALVES)},
    returns={"out": Tensor("M N", _HALVES)},
    rounding=("acc = sum_k a * b; of int8: f32 of the exact sum", _EPILOGUE),
    order=str(ORDER),
    parity=TENSOR_CORES,
    mirror=Bound(f"{STEPS} + 3", scale=_sizes, ulps=1, why=f"{WHY}; two products and one sum in the epilogue"),
    nan=f"{NAN}; a scale that is no number is refused",
    layout="b is column-major: strides (1, at least K)",
    upstream="vllm/_custom_ops.py: cutlass_scaled_mm",
    examples=(
        {"M": 3, "N": 16, "K": 64},
        {"M": 2, "N": 7, "K": 530, "a": "int8", "sa": (2, 1), "sb": (1, 7), "bias": "bfloat16", "out_dtype": "float16"},
        {"M": 4, "N": 5, "K": 33, "sa": (4, 1), "bias": "float16"},
        {"M": 0, "N": 2, "K": 8, "a": "int8", "sb": (1, 2)},
    ),
    requires=(operands_fit, scales_fit),
)
def cutlass_scaled_mm(nx, a, b, scale_a, scale_b, *, bias=None, out_dtype=ml_dtypes.bfloat16):
    """out[m, n] = scale_a[m] * (scale_b[n] * sum_k a[m, k] b[k, n]) + bias[n].

    Shapes: a [M, K], b [K, N] column-major, both uint8 (codes of e4m3) or both int8; scale_a float32 [1] or [M, 1];
    scale_b float32 [1] or [1, N]; bias [N] or None; out [M, N].
    Rounding points: of int8, the exact sum to float32; then one, the store. The mirror rounds the product with scale_b,
    then that with scale_a, where a bias enters by fma. A scale_a of 0, which quantisers give to zeros, is taken.
    Errors: ContractError for a b that is not column-major, scales of another shape, NaN, infinite or negative, a
    scale_b of 0, K >= 2^17 for int8.
    Source: vllm/_custom_ops.py, cutlass_scaled_mm.
    """
    if a.dtype == np.int8:
        total = nx.load(exact_sum(a, b).astype(np.float32))
    else:
        total = nx.matmul(nx.load(values(a)), values(b.T), order=ORDER, fused=True)
    return _scaled(nx, total, scale_a, scale_b, bias, out_dtype)


def _adjustments(rng, axes):
    return rng.integers(-4000, 4000, (1, axes["N"]))


@op(
    row=_ROW,
    args={
        "a": Tensor("M K", ("int8",), values=draw_codes("M", "K")),
        "b": _B,
        **_SCALES,
        "azp_adj": Tensor("1 N", ("int32",), values=_adjustments),
        "azp": Tensor("M 1", ("int32",), optional=True, values=lambda rng, axes: rng.integers(-90, 90, (axes["M"], 1))),
        "bias": Tensor("N", _HALVES, optional=True),
        "out_dtype": Choice(_HALVES),
    },
    returns={"out": Tensor("M N", _HALVES)},
    rounding=("acc = f32(sum_k a * b - azp_adj), a token's azp as a factor of azp_adj", _EPILOGUE),
    order="exact sums",
    parity=Parity("bytes"),
    mirror=Bound("3", scale=_sizes, ulps=1, why="the sum is exact; two products and one sum in the epilogue"),
    nan="none in; a scale that is no number is refused",
    layout="b is column-major: strides (1, at least K)",
    upstream="vllm/_custom_ops.py: cutlass_scaled_mm_azp",
    examples=(
        {"M": 3, "N": 16, "K": 64, "a": "int8"},
        {"M": 2, "N": 7, "K": 530, "azp": "int32", "sa": (2, 1), "sb": (1, 7), "bias": "bfloat16",
         "out_dtype": "float16"},
    ),
    requires=(operands_fit, scales_fit),
)  # fmt: skip
def cutlass_scaled_mm_azp(nx, a, b, scale_a, scale_b, azp_adj, *, azp=None, bias=None, out_dtype=ml_dtypes.bfloat16):
    """out[m, n] = scale_a[m] * (scale_b[n] * (sum_k a[m, k] b[k, n] - azp[m] * azp_adj[n])) + bias[n].

    Shapes: a int8 [M, K], b int8 [K, N] column-major; scale_a float32 [1] or [M, 1], scale_b float32 [1] or [1, N];
    azp_adj int32 [1, N], the columns' sums of b, times the zero point where one stands for all; azp int32 [M, 1], one
    a token, or None; bias [N] or None; out [M, N].
    Rounding points: the difference of whole numbers to float32, then as `cutlass_scaled_mm`. It does not wrap, as
    vLLM's does beyond int32.
    Errors: as `cutlass_scaled_mm`.
    Source: vllm/_custom_ops.py, cutlass_scaled_mm_azp.
    """
    moved = azp_adj.astype(np.int64) * (1 if azp is None else azp)
    total = nx.load((exact_sum(a, b).astype(np.int64) - moved).astype(np.float32))
    return _scaled(nx, total, scale_a, scale_b, bias, out_dtype)
