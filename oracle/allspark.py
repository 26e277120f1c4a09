"""AllSpark's weights of 8 bits, one scale a column: their n32k16 order and their product.

The kernels run on sm_80 to sm_89 alone.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import lowbit
from vtlab.ops.contract import EXACT, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

from .lowbit import (
    FINITE_SCALES,
    HALVES,
    STORED_TWICE,
    WEIGHT_ROUNDS,
    dequantised,
    finite,
    multiple_of,
    positive_scales,
    product_bound,
    total,
)  # fmt: skip
from .matmul import ORDER
from .wna16 import ROW

_BIAS = lowbit.QUANT_TYPES["uint8b128"].bias
_LAYOUT = ("weight (k, n) at byte ((n / 32 * 8 + n % 8) * 4 K) + k / 16 * 64 + (2 (k % 8 / 2) + n % 32 / 16) * 8 + "
           "n % 16 / 8 * 4 + 2 (k % 16 / 8) + k % 2; scale n at n / 32 * 32 + n % 8 * 4 + n % 32 / 8")  # fmt: skip


def _bytes(name: str, shape: str) -> Tensor:
    def draw(rng, axes):
        from vtlab.ops.shapes import sizes

        return rng.integers(0, 256, sizes(shape, {k: v for k, v in axes.items() if isinstance(v, int)}))

    return Tensor(shape, ("uint8",), values=draw)


def _places(k: int, n: int) -> np.ndarray:
    rows, columns = np.indices((k, n), sparse=True)
    return lowbit.allspark_place(rows, columns, k)


def _spread(row, width: int) -> np.ndarray:
    out = np.zeros((1, width), row.dtype)
    out[0, lowbit.allspark_scale_place(np.arange(row.shape[1]))] = row[0]
    return out


@op(
    row=ROW,
    args={
        "qweight": _bytes("qweight", "K N"),
        "scale": positive_scales("1 N", HALVES),
        "zero_point": Tensor("1 N", HALVES, like="scale", optional=True),
    },
    returns={
        "out": Tensor("P K", ("uint8",)),
        "scale_out": Tensor("1 P", like="scale"),
        "zero_point_out": Tensor("1 P", like="scale", optional=True),
    },
    rounding=("none: bytes are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="moved, payload and all",
    layout=_LAYOUT,
    upstream="vllm/_custom_ops.py: allspark_repack_weight",
    examples=(
        {"K": 32, "N": 48, "scale": "bfloat16"},
        {"K": 16, "N": 32, "scale": "float16", "zero_point": "float16"},
    ),
    requires=(multiple_of("qweight", 0, 16), multiple_of("qweight", 1, 16)),
)
def allspark_repack_weight(nx, qweight, scale, zero_point=None):
    """out = qweight in n32k16 order, columns filled up to 32 with zeros; scales and zero points as a lane reads them.

    Shapes: qweight uint8 [K, N]; scale, zero_point [1, N]; out uint8 [P, K], P = N up to a multiple of 32; scale_out,
    zero_point_out [1, P].
    Rounding points: none.
    Errors: ContractError for a K or N that is no multiple of 16.
    Source: vllm/_custom_ops.py, allspark_repack_weight.
    """
    k, n = qweight.shape
    width = -(-n // 32) * 32
    out = np.zeros(width * k, np.uint8)
    out[_places(k, n)] = qweight
    results = (out.reshape(width, k), _spread(scale, width))
    return results if zero_point is None else (*results, _spread(zero_point, width))


def _columns_fit(arguments, axes):
    """n fills the rows of the weight up to less than 32"""
    n, rows = arguments["n"], axes["P"]
    if -(-n // 32) * 32 != rows:
        raise refuse("n", n, f"{max(rows - 31, 1)} to {rows}, for {rows} rows")


def _unpacked(nx, qweight, scale, n):
    """(codes [K, n], scales [1, n])."""
    return (qweight.reshape(-1)[_places(qweight.shape[1], n)],
            np.take(scale, lowbit.allspark_scale_place(np.arange(n)), axis=1))  # fmt: skip


@op(
    row=ROW,
    args={
        "qweight": _bytes("qweight", "P K"),
        "scale": positive_scales("1 P", HALVES),
        "n": Scalar(int, minimum=1, axis="n"),
    },
    returns={"q": Tensor("K n", ("uint8",)), "scale_out": Tensor("1 n", like="scale")},
    rounding=("none: bytes are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="moved, payload and all",
    layout=_LAYOUT,
    upstream="vllm/_custom_ops.py: allspark_repack_weight, undone",
    examples=({"P": 64, "K": 32, "n": 48}, {"P": 32, "K": 16, "n": 32, "scale": "float16"}),
    requires=(multiple_of("qweight", 1, 16), _columns_fit),
)
def allspark_unpack_weight(nx, qweight, scale, *, n):
    """q[k, j], j < n, and the scales in the order of columns: the inverse of allspark_repack_weight.

    Shapes: qweight uint8 [P, K]; scale [1, P], or zero points in its stead; q uint8 [K, n]; scale_out [1, n].
    Rounding points: none.
    Errors: ContractError for an n that does not fill P up to less than 32, a K that is no multiple of 16.
    Source: vllm/_custom_ops.py, allspark_repack_weight.
    """
    return _unpacked(nx, qweight, scale, n)


def _weights(nx, call):
    q, scales = _unpacked(nx, call["b_qweight"], call["b_scales"], call["n"])
    return dequantised(nx, q.astype(np.int32), _BIAS, scales)


@op(
    row=ROW,
    args={
        "a": Tensor("M K", HALVES),
        "b_qweight": _bytes("b_qweight", "P K"),
        "b_scales": positive_scales("1 P", HALVES, like="a"),
        "n": Scalar(int, minimum=1, axis="n"),
    },
    returns={"out": Tensor("M n", like="a")},
    rounding=WEIGHT_ROUNDS,
    order=str(ORDER),
    parity=STORED_TWICE,
    mirror=product_bound(_weights, "a"),
    nan=FINITE_SCALES,
    layout="b_qweight and b_scales as allspark_repack_weight gives them",
    upstream="vllm/_custom_ops.py: allspark_w8a16_gemm",
    examples=(
        {"M": 3, "P": 64, "K": 32, "n": 48, "a": "bfloat16"},
        {"M": 1, "P": 32, "K": 48, "n": 32, "a": "float16"},
    ),
    requires=(multiple_of("b_qweight", 1, 16), _columns_fit, finite("b_scales")),
)
def allspark_w8a16_gemm(nx, a, b_qweight, b_scales, *, n):
    """out[m, j] = sum_k a[m, k] * (q[k, j] - 128) * scale[j].

    Shapes: a [M, K] bfloat16 or float16; b_qweight uint8 [P, K] in n32k16 order; b_scales [1, P]; out [M, n].
    Rounding points: the weight to T, then the store of `out`.
    Errors: ContractError for other shapes, an n that does not fill P up to less than 32, scales that are not finite.
    Source: vllm/_custom_ops.py, allspark_w8a16_gemm.
    """
    weights = _weights(nx, {"b_qweight": b_qweight, "b_scales": b_scales, "n": n})
    return nx.store(total(nx, a, weights), a.dtype)
