"""Products with weights in Marlin's layouts, and what prepares those weights for 8-bit activations."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops import lowbit
from vtlab.ops.contract import Bound, Choice, Parity, Tensor, refuse
from vtlab.ops.lowbit import QUANT_TYPES
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .lowbit import (
    FINITE_SCALES,
    HALVES,
    ROUNDED_THRICE,
    WHY,
    dequantised,
    finite,
    groups_divide,
    magnitudes,
    permutation,
    positive_scales,
    rounded,
    total,
    words,
)  # fmt: skip
from .marlin import ROW, marlin_permute_bias, marlin_unpack, marlin_unpack_zero_points
from .matmul import ORDER

_UTILS = "vllm/model_executor/layers/quantization/utils/marlin_utils.py"
_INT8_STEPS = 4096


def _largest_is_positive(arguments, axes):
    """the largest scale is above zero; on a GPU the host does not look"""
    s = arguments["s"]
    if isinstance(s, np.ndarray) and not (s.size and s.astype(np.float32).max() > 0):
        raise refuse("s", "no scale above zero", "a largest scale above zero, which all are divided by")


@op(
    row=ROW,
    args={"s": positive_scales("G N", HALVES)},
    returns={"codes": Tensor("G N", ("int16",)), "factor": Tensor("1", ("float32",))},
    rounding=(
        "quotient = T(s / max s)",
        "codes = rint(quotient * 4096), the product exact",
        "factor = max s / 4096, exact",
    ),
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="every operation is rounded to T by definition, float32 to T as float64 to T"),
    nan="refused",
    ties="to even",
    layout="upstream stores the codes in the bits of the scales' dtype",
    upstream=f"{_UTILS}: marlin_act_int8_process_scales",
    examples=({"G": 4, "N": 64, "s": "bfloat16"}, {"G": 2, "N": 8, "s": "float16"}),
    requires=(finite("s"), _largest_is_positive),
)
def marlin_act_int8_process_scales(nx, s):
    """codes = rint(4096 * s / max s): scales of groups as integers, for sums that stay integers; s ~ codes * factor.

    Shapes: s [G, N] bfloat16 or float16; codes int16 [G, N]; factor float32 [1].
    Rounding points: the quotient to the scales' dtype T, then the code.
    Errors: ContractError for a NaN, an infinity, or no scale above zero.
    Source: vllm/model_executor/layers/quantization/utils/marlin_utils.py, marlin_act_int8_process_scales.
    """
    value = nx.load(s)
    largest = value.max()
    share = rounded(nx, nx.div(value, largest), s.dtype)
    steps = np.rint(nx.mul(share, nx.const(_INT8_STEPS)))
    return steps.astype(np.int16), nx.store(nx.div(largest, nx.const(_INT8_STEPS)), np.float32).reshape(1)


def _zeros_fit(arguments, axes):
    """the rows of qzeros divide those of qweight"""
    zeros = arguments["qzeros"]
    if zeros is not None and (zeros.shape[0] < 1 or axes["K"] % zeros.shape[0]):
        raise refuse("qzeros", f"{zeros.shape[0]} groups", f"a number that divides {axes['K']}")


@op(
    row=ROW,
    args={"qweight": words("K", "W"), "qzeros": words("G", "W", optional=True)},
    returns={"out": Tensor("K W", ("int32",))},
    rounding=("none: codes become other codes",),
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="integers"),
    nan="none",
    layout="four bits: sign and magnitude with 15 - q below zero, so that the bits extend to an e4m3 number by a table",
    upstream="vllm/_custom_ops.py: marlin_int4_fp8_preprocess; marlin_utils_test.py: awq_marlin_quantize",
    examples=({"K": 8, "W": 4}, {"K": 8, "W": 4, "G": 2, "qzeros": "int32"}),
    requires=(_zeros_fit,),
)
def marlin_int4_fp8_preprocess(nx, qweight, qzeros=None):
    """Each code q of 4 bits becomes q - zero where q >= zero, else 15 - q; zero is 8 without zero points.

    Shapes: qweight int32 [K, W], in any packing without qzeros; qzeros int32 [G, W], packed along N as qweight is;
    out int32 [K, W]. Scales are multiplied by 512 beside it.
    Rounding points: none.
    Errors: ContractError for groups that do not divide K.
    Source: vllm/_custom_ops.py, marlin_int4_fp8_preprocess; marlin_utils_test.py, awq_marlin_quantize.
    """
    q = lowbit.unpack(qweight, 4, 1)
    zero = 8 if qzeros is None else lowbit.unpack(qzeros, 4, 1).repeat(len(q) // len(qzeros), axis=0)
    return lowbit.pack(np.where(q >= zero, q - zero, 15 - q), 4, 1)


def shapes_fit(arguments, axes):
    """K and N are (128, 64) or (64, 128) tiles; b_q_weight and b_zeros hold as many codes; zero points with uint4"""
    kind = QUANT_TYPES[arguments["quant_type"]]
    k, n, bits = axes["K"], axes["N"], kind.bits
    if not (n % 64 == 0 and k % 128 == 0) and not (n % 128 == 0 and k % 64 == 0):
        raise refuse("a" if n % 64 == 0 else "b_scales", f"K = {k}, N = {n}", "multiples of 128 and 64, or 64 and 128")
    want = (k // 16, n * bits // 2)
    words = tuple(arguments["b_q_weight"].shape)[-2:]
    if words != want:
        raise refuse("b_q_weight", f"shape {words}", f"{want} for {arguments['quant_type']}")
    zeros = arguments["b_zeros"]
    if (zeros is None) != bool(kind.bias):
        want = f"None for {arguments['quant_type']}, whose codes have a bias" if kind.bias else "zero points for uint4"
        raise refuse("b_zeros", "None" if zeros is None else "zero points", want)
    if zeros is not None and tuple(zeros.shape)[-2:] != (axes["G"], n * bits // 32):
        raise refuse("b_zeros", f"shape {tuple(zeros.shape)[-2:]}", f"{(axes['G'], n * bits // 32)}")


def _weights(nx, b_q_weight, b_scales, b_zeros, kind):
    """(weights [K, N] in the scales' dtype, scales [G, N] in the order of columns): scaled under two groups or more."""
    zero = np.int32(kind.bias)
    if b_zeros is not None:
        zero = marlin_unpack_zero_points.body(nx, b_zeros, bits=kind.bits)
    q = marlin_unpack.body(nx, b_q_weight, bits=kind.bits)
    if len(b_scales) == 1:
        return nx.store(nx.load(q - zero), b_scales.dtype), lowbit.reordered(b_scales, lowbit.MARLIN_SINGLE)
    scales = lowbit.reordered(b_scales, lowbit.MARLIN_GROUPED)
    return dequantised(nx, q, zero, scales), scales


def sum_sizes(arguments, results, more=0):
    """sum |a| |w| |scale|, with the roundings to T between the sum and the last store, and `more`, among the float32
    steps."""
    kind, a = QUANT_TYPES[arguments["quant_type"]], arguments["a"]
    weights, scales = _weights(TRUTH, *(arguments[name] for name in ("b_q_weight", "b_scales", "b_zeros")), kind)
    if arguments["perm"] is not None:
        a = a[:, arguments["perm"]]
    sizes = magnitudes(a, weights) * (np.abs(TRUTH.load(scales)) if len(scales) == 1 else 1)
    between = more + (len(scales) == 1 and kind.bits == 4) + (arguments["b_bias"] is not None)
    return sizes * ((a.shape[1] + 511) // 512 * 16 + 33 + between * 2.0**24 * float(ml_dtypes.finfo(a.dtype).eps))


@op(
    row=ROW,
    args={
        "a": Tensor("M K", HALVES),
        "b_q_weight": words("K/16", "N*bits/2"),
        "b_scales": positive_scales("G N", HALVES, like="a"),
        "b_zeros": words("G", "N*bits/32", optional=True),
        "b_bias": Tensor("N", HALVES, like="a", optional=True),
        "perm": Tensor("K", ("int32",), optional=True, values=lambda rng, axes: rng.permutation(axes["K"])),
        "quant_type": Choice(("uint4", "uint4b8", "uint8b128")),
    },
    returns={"out": Tensor("M N", like="a")},
    rounding=(
        "groups: w = T((q - zero) * scale), out = T(sum_k a * w)",
        "one group: q - zero is exact in T; of 8 bits out = T(sum * scale), of 4 bits out = T(T(sum) * scale)",
        "with a bias: out = T(out + bias)",
    ),
    order=str(ORDER),
    parity=ROUNDED_THRICE,
    mirror=Bound("1", scale=sum_sizes, ulps=2, why=WHY + "; a rounding to T between them may take the neighbour"),
    nan=FINITE_SCALES,
    layout="weights as gptq_marlin_repack gives them, scales, zero points and bias permuted; perm as that op's",
    upstream="vllm/_custom_ops.py: marlin_gemm, use_fp32_reduce",
    examples=(
        {"M": 3, "K": 128, "N": 64, "G": 4, "bits": 4, "a": "bfloat16", "quant_type": "uint4b8"},
        {"M": 2, "K": 64, "N": 128, "G": 1, "bits": 4, "a": "float16", "quant_type": "uint4", "b_zeros": "int32"},
        {"M": 2, "K": 64, "N": 128, "G": 2, "bits": 8, "a": "float16", "quant_type": "uint8b128", "b_bias": "float16",
         "perm": "int32"},
        {"M": 1, "K": 128, "N": 64, "G": 1, "bits": 8, "a": "bfloat16", "quant_type": "uint8b128"},
    ),
    requires=(
        shapes_fit,
        groups_divide("b_scales", lambda call: call["a"].shape[1]),
        finite("b_scales"),
        permutation("perm", lambda call: call["a"].shape[1]),
    ),
)  # fmt: skip
def marlin_gemm(nx, a, b_q_weight, b_scales, b_zeros=None, b_bias=None, perm=None, *, quant_type):
    """out[m, n] = sum_k a[m, k] * (q[k, n] - zero[g, n]) * scale[g, n] (+ bias[n]), all of b in Marlin's layouts.

    Shapes: a [M, K] bfloat16 or float16; b_q_weight int32 [K / 16, N * bits / 2]; b_scales [G, N]; b_zeros int32
    [G, N / 8] for uint4; b_bias [N]; perm int32 [K], which a's columns follow; out [M, N].
    Rounding points: with groups the weight to T and the store. With one group a scale meets the sum: of 8 bits before
    the store, of 4 bits after a rounding to T. A bias is added in T, one more rounding.
    Errors: ContractError for other shapes or types, groups that do not divide K, scales that are not finite.
    Source: vllm/_custom_ops.py, marlin_gemm.
    """
    kind = QUANT_TYPES[quant_type]
    weights, scales = _weights(nx, b_q_weight, b_scales, b_zeros, kind)
    out = total(nx, a if perm is None else a[:, perm], weights)
    if len(scales) == 1:
        out = out if kind.bits == 8 else rounded(nx, out, a.dtype)
        out = nx.mul(out, nx.load(scales))
    if b_bias is not None:
        out = nx.add(rounded(nx, out, a.dtype), nx.load(marlin_permute_bias.body(nx, b_bias)))
    return nx.store(out, a.dtype)
