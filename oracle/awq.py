"""AWQ's weights and plain columns of 4 bits: what they stand for, and their products with 16-bit activations.

A weight is rounded to the activations' dtype before it meets one. Kernels that split K in 16 bits round each part.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops import lowbit
from vtlab.ops.contract import Bound, Choice, Parity, Scalar, Tensor, refuse
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .lowbit import (
    FINITE_SCALES,
    HALVES,
    ONCE,
    ROUNDED_THRICE,
    STORED_TWICE,
    WEIGHT_ROUNDS,
    WHY,
    dequantised,
    finite,
    groups_divide,
    magnitudes,
    positive_scales,
    product_bound,
    rounded,
    total,
    words,
)
from .matmul import ORDER
from .wna16 import ROW

_AWQ = "awq_dequantize_kernel, awq_gemm_kernel"


def awq_weights(nx, qweight, scales, zeros, interleaved=True):
    """[K, N] in the scales' dtype, of 4-bit codes."""
    q, zero = (lowbit.unpack(array, 4, 1) for array in (qweight, zeros))
    if interleaved:
        q, zero = (lowbit.reordered(array, lowbit.inverse(lowbit.interleave(4))) for array in (q, zero))
    return dequantised(nx, q, zero, scales)


def _awq_rows(arguments) -> int:
    return arguments["qweight"].shape[0]


@op(
    row=ROW,
    args={
        "qweight": words("K", "N/8"),
        "scales": positive_scales("G N"),
        "zeros": words("G", "N/8"),
    },
    returns={"out": Tensor("K N", like="scales")},
    rounding=("out = T((q - zero) * scale), the difference exact",),
    parity=Parity("bytes"),
    mirror=ONCE,
    nan="NaN and infinite scales are refused",
    layout="qweight and zeros packed along N, interleaved",
    upstream=f"vllm/model_executor/layers/quantization/awq_triton.py: {_AWQ}",
    examples=(
        {"K": 32, "N": 16, "G": 2, "scales": "float16"},
        {"K": 8, "N": 8, "G": 1, "scales": "bfloat16"},
    ),
    requires=(groups_divide("scales", _awq_rows), finite("scales")),
)
def awq_dequantize(nx, qweight, scales, zeros):
    """out[k, n] = (q[k, n] - zero[k / (K / G), n]) * scales[k / (K / G), n].

    Shapes: qweight int32 [K, N / 8], eight interleaved codes of 4 bits a word; scales [G, N]; zeros int32 [G, N / 8];
    out [K, N] in the scales' dtype T.
    Rounding points: one, the product.
    Errors: ContractError for other shapes, groups that do not divide K, scales that are not finite.
    Source: vllm/model_executor/layers/quantization/awq_triton.py, awq_dequantize_kernel.
    """
    return awq_weights(nx, qweight, scales, zeros)


def _parts(nx, x, weights, count: int) -> list:
    """Sums over K by blocks of 32 dealt to `count` parts, each rounded to the storage dtype."""
    block = np.arange(len(weights)) // 32 % count
    return [rounded(nx, total(nx, x[:, block == part], weights[block == part]), x.dtype) for part in range(count)]


def _rounded_blocks(nx, x, weights, count: int) -> list:
    """The same parts, each block's sum rounded, and the part again with every block."""
    parts = [nx.load(np.zeros((len(x), weights.shape[1]), np.float32)) for _ in range(count)]
    for block in range(0, len(weights), 32):
        at, here = block // 32 % count, slice(block, block + 32)
        term = rounded(nx, total(nx, x[:, here], weights[here]), x.dtype)
        parts[at] = rounded(nx, nx.add(parts[at], term), x.dtype)
    return parts


def _split_sizes(arguments, results):
    """sum |x| |w|, with the roundings to T before the last among the float32 steps."""
    x = arguments["input"]
    blocks = x.shape[1] // 32 + 1
    weights = awq_weights(TRUTH, arguments["qweight"], arguments["scales"], arguments["qzeros"])
    between = {"vt": 0, "vllm": 1, "vllm_triton": 2 * blocks}[arguments["rounding"]]
    steps = (x.shape[1] + 511) // 512 * 16 + 33
    return magnitudes(x, weights) * (steps + between * 2.0**24 * float(ml_dtypes.finfo(x.dtype).eps))


def _split_is_a_power_of_two(arguments, axes):
    """split_k_iters is a power of two"""
    parts = arguments["split_k_iters"]
    if parts & (parts - 1):
        raise refuse("split_k_iters", parts, "a power of two up to 32")


@op(
    row=ROW,
    args={
        "input": Tensor("M K", HALVES),
        "qweight": words("K", "N/8"),
        "scales": positive_scales("G N", HALVES, like="input"),
        "qzeros": words("G", "N/8"),
        "split_k_iters": Scalar(int, minimum=1, maximum=32),
        "rounding": Choice(("vt", "vllm", "vllm_triton")),
    },
    returns={"out": Tensor("M N", like="input")},
    rounding={
        "vt": WEIGHT_ROUNDS,
        "vllm": (WEIGHT_ROUNDS[0], "part = T(sum over the blocks of 32 k of one split), block t to t % split_k_iters",
                 "out = T(sum of the parts)"),
        "vllm_triton": ("as vllm, but each block's sum is rounded to T, and its part again with every block",),
    },
    order=str(ORDER) + " over K, or over each part's k, or a block's; parts ascending",
    parity=ROUNDED_THRICE,
    mirror=Bound("1", scale=_split_sizes, ulps=1, why=WHY + "; what is rounded to T before may take the neighbour"),
    nan=FINITE_SCALES,
    layout="qweight and qzeros packed along N, interleaved",
    upstream=f"vllm/_custom_ops.py: awq_gemm; vllm/model_executor/layers/quantization/awq_triton.py: {_AWQ}",
    examples=(
        {"M": 3, "K": 64, "N": 16, "G": 2, "input": "float16"},
        {"M": 2, "K": 160, "N": 8, "G": 1, "input": "bfloat16", "split_k_iters": 4, "rounding": "vllm"},
        {"M": 2, "K": 160, "N": 8, "G": 5, "input": "float16", "split_k_iters": 2, "rounding": "vllm_triton"},
    ),
    requires=(groups_divide("scales", _awq_rows), _split_is_a_power_of_two, finite("scales")),
)  # fmt: skip
def awq_gemm(nx, input, qweight, scales, qzeros, *, split_k_iters=8, rounding="vt"):
    """out[m, n] = sum_k input[m, k] * (q[k, n] - zero[g, n]) * scale[g, n], g = k / (K / G).

    Shapes: input [M, K] bfloat16 or float16; qweight int32 [K, N / 8], interleaved; scales [G, N]; qzeros int32
    [G, N / 8]; out [M, N].
    Rounding points: the weight to T, then the store of `out`. Under "vllm", the CUDA kernel, K is dealt to
    split_k_iters parts, each rounded to T before their sum; "vllm_triton", the Triton kernel as its interpreter
    runs it, also rounds within a part, block by block. Under "vt" split_k_iters changes nothing.
    Errors: ContractError for other shapes, groups that do not divide K, a split that is no power of two, scales that
    are not finite.
    Source: vllm/model_executor/layers/quantization/awq_triton.py, awq_gemm_kernel.
    """
    weights = awq_weights(nx, qweight, scales, qzeros)
    if rounding == "vt":
        return nx.store(total(nx, input, weights), input.dtype)
    out = nx.load(np.zeros((len(input), weights.shape[1]), np.float32))
    for part in (_parts if rounding == "vllm" else _rounded_blocks)(nx, input, weights, split_k_iters):
        out = nx.add(out, part)
    return nx.store(out, input.dtype)


def _plain_weights(nx, b_q, scales, qzeros, zp_bias):
    if qzeros is not None:
        return awq_weights(nx, b_q, scales, qzeros, interleaved=False)
    return dequantised(nx, lowbit.unpack(b_q, 4, 1), zp_bias, scales)


@op(
    row=ROW,
    args={
        "a": Tensor("M K", HALVES),
        "b_q": words("K", "N/8"),
        "scales": positive_scales("G N", HALVES, like="a"),
        "qzeros": words("G", "N/8", optional=True),
        "zp_bias": Scalar(int, minimum=0, maximum=15),
    },
    returns={"out": Tensor("M N", like="a")},
    rounding=WEIGHT_ROUNDS,
    order=str(ORDER),
    parity=STORED_TWICE,
    mirror=product_bound(
        lambda nx, call: _plain_weights(nx, call["b_q"], call["scales"], call["qzeros"], call["zp_bias"]), "a"
    ),
    nan=FINITE_SCALES,
    layout="b_q and qzeros packed along N in plain order",
    upstream="vllm/model_executor/kernels/linear/mixed_precision/triton_w4a16.py: triton_w4a16_gemm",
    examples=(
        {"M": 3, "K": 64, "N": 16, "G": 2, "a": "bfloat16"},
        {"M": 1, "K": 96, "N": 8, "G": 3, "a": "float16", "qzeros": "int32"},
    ),
    requires=(groups_divide("scales", lambda call: call["b_q"].shape[0]), finite("scales")),
)
def triton_w4a16_gemm(nx, a, b_q, scales, qzeros=None, *, zp_bias=8):
    """out[m, n] = sum_k a[m, k] * (q[k, n] - zero[g, n]) * scale[g, n], zero = zp_bias where there are no zero points.

    Shapes: a [M, K] bfloat16 or float16; b_q int32 [K, N / 8]; scales [G, N]; qzeros int32 [G, N / 8]; out [M, N].
    Rounding points: the weight to T, then the store of `out`.
    Errors: ContractError for other shapes, groups that do not divide K, scales that are not finite.
    Source: vllm/model_executor/kernels/linear/mixed_precision/triton_w4a16.py, triton_w4a16_gemm_kernel.
    """
    return nx.store(total(nx, a, _plain_weights(nx, b_q, scales, qzeros, zp_bias)), a.dtype)
