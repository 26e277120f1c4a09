"""GPTQ's weights: what they stand for, and their product with 16-bit activations.

A weight is rounded to the activations' dtype before it meets one, as tensor cores take it; the sum is float32, and the
result is rounded once.
"""

from __future__ import annotations

from vtlab.ops import lowbit
from vtlab.ops.contract import Bound, Flag, Parity, Tensor, refuse
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .act_order import gptq_unshuffle
from .lowbit import (
    BITS,
    FINITE_SCALES,
    HALVES,
    ONCE,
    STEPS,
    STORED_TWICE,
    WEIGHT_ROUNDS,
    WHY,
    dequantised,
    finite,
    groups_divide,
    groups_in_range,
    known_bits,
    magnitudes,
    permutation,
    positive_scales,
    total,
    whole_runs,
    words,
)
from .matmul import ORDER
from .wna16 import ROW

_GROUPS = Tensor("W*32/bits", ("int32",), optional=True,
                 values=lambda rng, axes: rng.permutation(axes["K"]) * axes["G"] // axes["K"])  # fmt: skip


def _gptq_checks(qweight: str, scales: str):
    def rows(arguments):
        return arguments[qweight].shape[0] * 32 // arguments["bits"]

    return (known_bits(*lowbit.BITS), whole_runs(qweight, 0, packed=True), whole_runs(scales, 1, packed=False),
            groups_divide(scales, rows), finite(scales))  # fmt: skip


def gptq_weights(nx, qweight, scales, qzeros, g_idx, bits, use_v2_format):
    """[K, N] in the scales' dtype."""
    zero = 1 << (bits - 1)
    if qzeros is not None:
        zero = lowbit.unpack(qzeros, bits, 1) + (0 if use_v2_format else 1)
    return dequantised(nx, lowbit.unpack(qweight, bits, 0), zero, scales, g_idx)


@op(
    row=ROW,
    args={
        "qweight": words("W", "N"),
        "scales": positive_scales("G N"),
        "qzeros": words("G", "N*bits/32", optional=True),
        "g_idx": _GROUPS,
        "bits": BITS,
        "use_v2_format": Flag(),
    },
    returns={"w": Tensor("W*32/bits N", like="scales")},
    rounding=("w = T((q - zero) * scale), the difference exact",),
    parity=Parity("bytes"),
    mirror=ONCE,
    nan="NaN and infinite scales are refused",
    layout="qweight packed along K, qzeros along N, in plain order",
    upstream="vllm/model_executor/layers/quantization/auto_gptq.py; csrc/quantization/gptq: reconstruct_gptq",
    examples=(
        {"W": 8, "N": 8, "G": 2, "bits": 4, "scales": "bfloat16", "qzeros": "int32"},
        {"W": 8, "N": 8, "G": 4, "bits": 4, "scales": "float16", "K": 64, "g_idx": "int32"},
        {"W": 6, "N": 32, "G": 2, "bits": 3, "scales": "float32", "qzeros": "int32", "use_v2_format": True},
        {"W": 8, "N": 4, "G": 1, "bits": 8, "scales": "bfloat16", "qzeros": "int32"},
    ),
    requires=(*_gptq_checks("qweight", "scales"), groups_in_range("g_idx", "scales")),
)
def gptq_dequantize(nx, qweight, scales, qzeros=None, g_idx=None, *, bits=4, use_v2_format=False):
    """w[k, n] = (q[k, n] - zero[g, n]) * scales[g, n], g = g_idx[k], or k / (K / G).

    Shapes: qweight int32 [W, N], K = W * 32 / bits; scales [G, N]; qzeros int32 [G, N * bits / 32]; g_idx int32 [K]; w
    [K, N] in the scales' dtype T. Without qzeros zero is 2^(bits - 1). A checkpoint's first format stores zero - 1:
    what is stored as 15 stands for 16.
    Rounding points: one, the product.
    Errors: ContractError for other bits, ragged words, groups that do not divide K, a g_idx out of range, scales that
    are not finite.
    Source: vllm/model_executor/layers/quantization/auto_gptq.py.
    """
    return gptq_weights(nx, qweight, scales, qzeros, g_idx, bits, use_v2_format)


def _order(nx, a, b_g_idx, use_exllama):
    """Activations whose columns go with shuffled rows."""
    return a[:, b_g_idx] if use_exllama and b_g_idx is not None else a


def _gemm_weights(nx, b_q_weight, b_gptq_qzeros, b_gptq_scales, b_g_idx, use_exllama, use_v2_format, bits):
    """[K, N], of shuffled words or of plain ones."""
    if use_exllama:
        b_q_weight, b_g_idx = gptq_unshuffle.body(nx, b_q_weight, bits=bits), None
    return gptq_weights(nx, b_q_weight, b_gptq_scales, b_gptq_qzeros, b_g_idx, bits, use_v2_format)


def _gptq_sizes(arguments, results):
    names = ("b_q_weight", "b_gptq_qzeros", "b_gptq_scales", "b_g_idx", "use_exllama", "use_v2_format", "bits")
    weights = _gemm_weights(TRUTH, *(arguments[name] for name in names))
    return magnitudes(_order(TRUTH, arguments["a"], arguments["b_g_idx"], arguments["use_exllama"]), weights)


def _whole_k(arguments, axes):
    """b_q_weight holds K = a.shape[1] codes a column"""
    rows = arguments["b_q_weight"].shape[0] * 32 // arguments["bits"]
    if rows != axes["K"]:
        raise refuse("b_q_weight", f"{rows} codes a column", f"K = {axes['K']}")


def _g_idx_fits(arguments, axes):
    """b_g_idx names a group of every row, or is a permutation of the rows under use_exllama"""
    if arguments["use_exllama"]:
        permutation("b_g_idx", lambda call: call["a"].shape[1])(arguments, axes)
    else:
        groups_in_range("b_g_idx", "b_gptq_scales")(arguments, axes)


@op(
    row=ROW,
    args={
        "a": Tensor("M K", HALVES),
        "b_q_weight": words("W", "N"),
        "b_gptq_qzeros": words("G", "N*bits/32"),
        "b_gptq_scales": positive_scales("G N", HALVES, like="a"),
        "b_g_idx": Tensor("K", ("int32",), optional=True,
                          values=lambda rng, axes: rng.permutation(axes["K"]) // axes.get("divide", 1)),
        "use_exllama": Flag(),
        "use_v2_format": Flag(),
        "bits": BITS,
    },
    returns={"out": Tensor("M N", like="a")},
    rounding=WEIGHT_ROUNDS,
    order=str(ORDER),
    parity=STORED_TWICE,
    mirror=Bound(STEPS, scale=_gptq_sizes, ulps=1, why=WHY),
    nan=FINITE_SCALES,
    layout="under use_exllama words as gptq_shuffle gives them, else as gptq_pack does",
    upstream="vllm/_custom_ops.py: gptq_gemm",
    examples=(
        {"M": 3, "K": 64, "W": 8, "N": 16, "G": 2, "bits": 4, "a": "float16"},
        {"M": 2, "K": 64, "W": 8, "N": 8, "G": 4, "bits": 4, "a": "bfloat16", "b_g_idx": "int32", "divide": 16},
        {"M": 1, "K": 32, "W": 3, "N": 32, "G": 1, "bits": 3, "a": "float16", "b_g_idx": "int32", "use_exllama": True},
        {"M": 0, "K": 16, "W": 4, "N": 4, "G": 2, "bits": 8, "a": "float16", "use_v2_format": True},
    ),
    requires=(*_gptq_checks("b_q_weight", "b_gptq_scales"), _whole_k, _g_idx_fits),
)  # fmt: skip
def gptq_gemm(
    nx, a, b_q_weight, b_gptq_qzeros, b_gptq_scales, b_g_idx=None, *, use_exllama=False, use_v2_format=False, bits=4
):
    """out[m, n] = sum_k a[m, k] * (q[k, n] - zero[g, n]) * scale[g, n].

    Shapes: a [M, K] bfloat16 or float16; b_q_weight int32 [K * bits / 32, N]; b_gptq_qzeros int32 [G, N * bits / 32];
    b_gptq_scales [G, N]; b_g_idx int32 [K], the group of every row, or under use_exllama the permutation that
    gptq_shuffle was given, which a's columns then follow; out [M, N].
    Rounding points: the weight to T, then the store of `out`. vLLM's kernels sum eight products at a time in float16
    and add their blocks of K in float16, in no fixed order: their bytes are nobody's.
    Errors: ContractError for other bits, ragged words, K of another length, groups that do not divide it, a g_idx out
    of range, scales that are not finite.
    Source: vllm/_custom_ops.py, gptq_gemm.
    """
    weights = _gemm_weights(nx, b_q_weight, b_gptq_qzeros, b_gptq_scales, b_g_idx, use_exllama, use_v2_format, bits)
    return nx.store(total(nx, _order(nx, a, b_g_idx, use_exllama), weights), a.dtype)
