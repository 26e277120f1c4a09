"""Machete's prepacked weights and their product: blocks of 64 x 128, each thread's share of it contiguous.

The order of a block is derived from the layout of the matrix instruction's operand; the bytes of vLLM's own packer on
an H200 are the same.
"""

from __future__ import annotations

from vtlab.ops import lowbit
from vtlab.ops.contract import EXACT, Bound, Choice, Parity, Tensor, refuse
from vtlab.ops.lowbit import QUANT_TYPES
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .lowbit import (
    BITS,
    FINITE_SCALES,
    HALVES,
    STEPS,
    STORED_TWICE,
    WHY,
    by_groups,
    dequantised,
    finite,
    groups_divide,
    known_bits,
    magnitudes,
    multiple_of,
    positive_scales,
    total,
    words,
)  # fmt: skip
from .matmul import ORDER
from .wna16 import ROW


def _whole_blocks(arguments, axes):
    """K is a multiple of 64"""
    rows, unit = arguments["b_q_weight"].shape[0], 2 * arguments["bits"]
    if rows % unit:
        raise refuse("b_q_weight", f"{rows} rows of words", f"a multiple of {unit}: K in blocks of 64")


_FORM = {
    "row": ROW,
    "args": {"b_q_weight": words("W", "N"), "bits": BITS},
    "returns": {"out": Tensor("W N", ("int32",))},
    "rounding": ("none: bits are moved",),
    "parity": Parity("bytes"),
    "mirror": EXACT,
    "nan": "none",
    "layout": "the flat words of the result are those of the blocks, along N first",
    "examples": ({"W": 8, "N": 128, "bits": 4}, {"W": 32, "N": 256, "bits": 8}),
    "requires": (known_bits(4, 8), _whole_blocks, multiple_of("b_q_weight", 1, 128)),
}


@op(upstream="vllm/_custom_ops.py: machete_prepack_B", **_FORM)
def machete_prepack_b(nx, b_q_weight, *, bits):
    """Flat words of blocks of 64 x 128 codes, 32 of each of 256 threads in turn.

    Shapes: b_q_weight int32 [K * bits / 32, N], packed along K; out int32 of that shape in name only: its flat words
    are blocks.
    Rounding points: none.
    Errors: ContractError for bits other than 4 and 8, K no multiple of 64, N no multiple of 128.
    Source: vllm/_custom_ops.py, machete_prepack_B.
    """
    flat = lowbit.machete_blocks(lowbit.unpack(b_q_weight, bits, 0), bits)
    return lowbit.pack(flat, bits, 0).reshape(b_q_weight.shape)


@op(upstream="vllm/_custom_ops.py: machete_prepack_B, undone", **_FORM)
def machete_unpack_b(nx, b_q_weight, *, bits):
    """Words packed along K of a prepacked weight: the inverse of machete_prepack_b.

    Shapes: b_q_weight, out int32 [K * bits / 32, N].
    Rounding points: none.
    Errors: as machete_prepack_b's.
    Source: vllm/_custom_ops.py, machete_prepack_B.
    """
    rows, columns = b_q_weight.shape
    flat = lowbit.unpack(b_q_weight.reshape(-1), bits, 0)
    return lowbit.pack(lowbit.machete_rows(flat, bits, rows * 32 // bits, columns), bits, 0)


def _shapes_fit(arguments, axes):
    """K is a multiple of 64, N of 128; groups are of 64, 128 or K; zeros with types without a bias alone"""
    kind = QUANT_TYPES[arguments["quant_type"]]
    k, n = axes["K"], axes["N"]
    if k % 64:
        raise refuse("a", f"K = {k}", "a multiple of 64")
    if n % 128:
        raise refuse("b_group_scales", f"N = {n}", "a multiple of 128")
    if tuple(arguments["b_q"].shape) != (k * kind.bits // 32, n):
        raise refuse("b_q", f"shape {tuple(arguments['b_q'].shape)}", f"{(k * kind.bits // 32, n)}")
    if k // max(axes["G"], 1) not in (64, 128, k):
        raise refuse("b_group_scales", f"{axes['G']} groups of K = {k}", "groups of 64, 128 or K")
    if (arguments["b_group_zeros"] is None) != bool(kind.bias):
        name = arguments["quant_type"]
        want = f"None for {name}, whose codes have a bias" if kind.bias else f"zeros for {name}"
        raise refuse("b_group_zeros", "None" if arguments["b_group_zeros"] is None else "zeros", want)


def _weights(nx, b_q, scales, zeros, kind):
    q = lowbit.unpack(machete_unpack_b.body(nx, b_q, bits=kind.bits), kind.bits, 0)
    if zeros is None:
        return dequantised(nx, q, kind.bias, scales)
    of_group = [TRUTH.load(each)[:, None] for each in (scales, zeros)]
    sums = TRUTH.fma(TRUTH.load(by_groups(q, len(scales))), *of_group)
    return TRUTH.store(sums, scales.dtype).reshape(q.shape)  # exact until then: an fma of T


def _sizes(arguments, results):
    names = ("b_q", "b_group_scales", "b_group_zeros")
    weights = _weights(TRUTH, *(arguments[name] for name in names), QUANT_TYPES[arguments["quant_type"]])
    return magnitudes(arguments["a"], weights)


@op(
    row=ROW,
    args={
        "a": Tensor("M K", HALVES),
        "b_q": words("K*bits/32", "N"),
        "b_group_scales": positive_scales("G N", HALVES, like="a"),
        "b_group_zeros": Tensor("G N", HALVES, like="a", optional=True,
                                values=lambda rng, axes: -rng.uniform(0, 0.3, (axes["G"], axes["N"]))),
        "quant_type": Choice(("uint4", "uint8", "uint4b8", "uint8b128")),
    },
    returns={"out": Tensor("M N", like="a")},
    rounding=("w = T((q - bias) * scale); with zeros w = T(q * scale + zero), one rounding", "out = T(sum_k a * w)"),
    order=str(ORDER),
    parity=STORED_TWICE,
    mirror=Bound(STEPS, scale=_sizes, ulps=1, why=WHY),
    nan=FINITE_SCALES + "; so are zeros that are not finite",
    layout="b_q as machete_prepack_b gives it; zeros are -(scale * zero point), in T",
    upstream="vllm/_custom_ops.py: machete_mm",
    examples=(
        {"M": 3, "K": 128, "N": 128, "G": 2, "bits": 4, "a": "bfloat16", "quant_type": "uint4b8"},
        {"M": 1, "K": 64, "N": 128, "G": 1, "bits": 8, "a": "float16", "quant_type": "uint8",
         "b_group_zeros": "float16"},
    ),
    requires=(
        _shapes_fit,
        groups_divide("b_group_scales", lambda call: call["a"].shape[1]),
        finite("b_group_scales"),
        finite("b_group_zeros"),
    ),
)  # fmt: skip
def machete_mm(nx, a, b_q, b_group_scales, b_group_zeros=None, *, quant_type):
    """out[m, n] = sum_k a[m, k] * (q[k, n] * scale[g, n] + zero[g, n]), or (q - bias) * scale without zeros.

    Shapes: a [M, K] bfloat16 or float16; b_q int32 [K * bits / 32, N], prepacked; b_group_scales [G, N]; b_group_zeros
    [G, N], for uint4 and uint8; out [M, N].
    Rounding points: the weight to T, once: an fma. Then the store. (vLLM's reference quantiser rounds the product with
    the scale too; its kernel does not.)
    Errors: ContractError for other shapes, types or group sizes, scales or zeros that are not finite.
    Source: vllm/_custom_ops.py, machete_mm, on an H200.
    """
    weights = _weights(nx, b_q, b_group_scales, b_group_zeros, QUANT_TYPES[quant_type])
    return nx.store(total(nx, a, weights), a.dtype)
