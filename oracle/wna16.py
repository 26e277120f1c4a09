"""Checkpoint formats of integer weights: the reference quantiser, GPTQ's and AWQ's words, activation order.

GPTQ packs codes along K, AWQ along N and interleaved; zero points are packed along N. Weights of a checkpoint in
activation order have their groups named row by row (g_idx); sorted by group, and the activations' columns with them,
they are plain groups again.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import lowbit
from vtlab.ops.contract import EXACT, Bound, Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.lowbit import QUANT_TYPES
from vtlab.ops.table import op

from .lowbit import BITS, by_groups, codes_in_range, finite, known_bits, rounded, whole_runs, words

ROW = "KERNEL-GEMM-INT-LOWBIT"
_UTILS = "vllm/model_executor/layers/quantization/utils/quant_utils.py"
_LEAST_RANGE = 1e-5


def codes(shape: str = "K N", **more) -> Tensor:
    """Random codes of the call's bits."""

    def draw(rng, axes):
        sizes = tuple(axes[name] for name in shape.split())
        return rng.integers(0, 1 << axes.get("bits", 4), sizes)

    return Tensor(shape, ("int32",), values=draw, **more)


def _group_divides(arguments, axes):
    """group_size is -1 or divides K"""
    size = arguments["group_size"]
    if size == 0 or (size != -1 and axes["K"] % size):
        raise refuse("group_size", size, f"-1, or a divisor of K = {axes['K']}")


def _some_rows(arguments, axes):
    """w has a row"""
    if axes["K"] < 1:
        raise refuse("w", f"shape {tuple(arguments['w'].shape)}", "at least one row")


def _zero_points_fit(arguments, axes):
    """types with a bias have no zero points, so none after the scales"""
    if arguments["zero_points_after_scales"] and QUANT_TYPES[arguments["quant_type"]].bias:
        raise refuse("zero_points_after_scales", True, "a type without a bias, uint4 or uint8")


@op(
    row=ROW,
    args={
        "w": Tensor("K N"),
        "quant_type": Choice(tuple(QUANT_TYPES)),
        "group_size": Scalar(int, minimum=-1),
        "zero_points_after_scales": Flag(),
    },
    returns={
        "w_ref": Tensor("K N", like="w"),
        "q": Tensor("K N", ("int32",)),
        "scales": Tensor("G N", like="w"),
        "zero_points": Tensor("G N", ("int32",), optional=True),
    },
    rounding=(
        "with a bias: scale = max(|T(max / high)|, |T(min / low)|)",
        "else scale = T(max(T(max - min), T(1e-5)) / high), zero = min(rint(|T(min / scale)|), high)",
        "q = rint(T(w / scale)) + zero, within the type",
        "w_ref = T((q - zero) * scale), or T(T(q * scale) - T(zero * scale))",
    ),
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="every operation is rounded to T by definition, float32 to T as float64 to T"),
    nan="refused; a range beyond T's makes a scale infinite and w_ref NaN",
    ties="to the even code",
    upstream=f"{_UTILS}: quantize_weights",
    examples=(
        {"K": 64, "N": 5, "quant_type": "uint4b8", "group_size": 32, "w": "bfloat16"},
        {"K": 32, "N": 3, "quant_type": "uint8", "group_size": -1, "w": "float16"},
        {"K": 64, "N": 2, "quant_type": "uint4", "group_size": 16, "w": "float32", "zero_points_after_scales": True},
    ),
    requires=(_some_rows, _group_divides, _zero_points_fit, finite("w")),
)
def quantize_weights(nx, w, *, quant_type, group_size, zero_points_after_scales=False):
    """q = w / scale to the nearest code, scale = the largest |w| of a group over the type's, or its range with a zero.

    Shapes: w [K, N]; w_ref [K, N] what the codes stand for; q int32 [K, N], bias included; scales [K / group_size, N],
    one group for -1; zero_points int32 of that shape, for types without a bias alone.
    Rounding points: every operation to w's dtype T. A group of zeros under a bias has scale 0 and stored codes 0, a
    w_ref of -0. Quotients beyond int32 saturate, which upstream leaves undefined.
    Errors: ContractError for a group size that does not divide K, a NaN or an infinity in w.
    Source: vllm/model_executor/layers/quantization/utils/quant_utils.py, quantize_weights.
    """
    kind, dtype = QUANT_TYPES[quant_type], w.dtype
    groups = 1 if group_size == -1 else len(w) // group_size
    value = by_groups(nx.load(w), groups)
    highest, lowest = value.max(axis=1, keepdims=True), value.min(axis=1, keepdims=True)
    zero = np.zeros(highest.shape, np.int32)
    if kind.bias:
        tops = (nx.abs(rounded(nx, nx.div(end, limit), dtype)) for end, limit in
                ((highest, kind.high), (lowest, kind.low)))  # fmt: skip
        scale = nx.maximum(*tops)
    else:
        spread = nx.maximum(rounded(nx, nx.sub(highest, lowest), dtype), rounded(nx, nx.const(_LEAST_RANGE), dtype))
        scale = rounded(nx, nx.div(spread, kind.high), dtype)
        zero = np.minimum(np.rint(nx.abs(rounded(nx, nx.div(lowest, scale), dtype))), kind.high).astype(np.int32)
    steps = np.clip(np.rint(rounded(nx, nx.div(value, scale), dtype)), -1024, 1024)
    dead = np.broadcast_to(scale == 0, steps.shape)
    q = np.clip(np.where(dead, -1024, steps).astype(np.int32) + zero, kind.low, kind.high)
    if zero_points_after_scales:
        parts = (rounded(nx, nx.mul(nx.load(part), scale), dtype) for part in (q, zero))
        w_ref = nx.sub(*parts)
    else:
        w_ref = nx.mul(nx.load(q - zero), scale)
    results = (nx.store(w_ref, dtype).reshape(w.shape), (q + np.int32(kind.bias)).reshape(w.shape),
               nx.store(scale[:, 0], dtype))  # fmt: skip
    return results if kind.bias else (*results, zero[:, 0])


def _packing(name: str, axis: int, *, packed: bool, allowed=lowbit.BITS):
    checks = (known_bits(*allowed), whole_runs(name, axis, packed=packed))
    return checks if packed else (*checks, codes_in_range(name))


@op(
    row=ROW,
    args={"q": codes(), "bits": BITS},
    returns={"out": Tensor("K*bits/32 N", ("int32",))},
    rounding=("none: bits are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="none",
    layout="word row r of column n: codes r * 32 / bits on, the first lowest; of 3 bits, 32 codes in three words",
    upstream=f"{_UTILS}: gptq_pack",
    examples=({"K": 32, "N": 3, "bits": 4}, {"K": 64, "N": 5, "bits": 3}, {"K": 4, "N": 1, "bits": 8}),
    requires=_packing("q", 0, packed=False),
)
def gptq_pack(nx, q, *, bits):
    """Bit bits * k + b of column n's stream = bit b of q[k, n]; word r holds bits 32 r ... 32 r + 31, low first.

    Shapes: q int32 [K, N], codes of `bits` bits; out int32 [K * bits / 32, N].
    Rounding points: none.
    Errors: ContractError for bits other than 2, 3, 4, 8, a K that fills no whole words, a code out of range.
    Source: vllm/model_executor/layers/quantization/utils/quant_utils.py, gptq_pack.
    """
    return lowbit.pack(q, bits, 0)


@op(
    row=ROW,
    args={"qweight": words("W", "N"), "bits": BITS},
    returns={"q": Tensor("W*32/bits N", ("int32",))},
    rounding=("none: bits are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="none",
    upstream=f"{_UTILS}: unpack_quantized_values_into_int32",
    examples=({"W": 4, "N": 3, "bits": 4}, {"W": 6, "N": 5, "bits": 3}, {"W": 1, "N": 1, "bits": 2}),
    requires=_packing("qweight", 0, packed=True),
)
def gptq_unpack(nx, qweight, *, bits):
    """q[k, n] = bits bits * k ... bits * k + bits - 1 of column n's words: the inverse of gptq_pack.

    Shapes: qweight int32 [W, N]; q int32 [W * 32 / bits, N].
    Rounding points: none.
    Errors: ContractError for bits other than 2, 3, 4, 8; of 3 bits, a W that is no multiple of three.
    Source: vllm/model_executor/layers/quantization/utils/quant_utils.py, unpack_quantized_values_into_int32.
    """
    return lowbit.unpack(qweight, bits, 0)


_INTERLEAVED = Flag()
_AWQ_LAYOUT = (
    "interleaved, place i of a word is column 8 w + (0, 2, 4, 6, 1, 3, 5, 7)[i], of 8 bits 4 w + (0, 2, 1, 3)[i]"
)


def _interleave_fits(arguments, axes):
    """interleaved words are of 4 or 8 bits"""
    if arguments["interleaved"] and arguments["bits"] not in (4, 8):
        raise refuse("bits", arguments["bits"], "4 or 8 for interleaved words")


@op(
    row=ROW,
    args={"q": codes(), "bits": BITS, "interleaved": _INTERLEAVED},
    returns={"out": Tensor("K N*bits/32", ("int32",))},
    rounding=("none: bits are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="none",
    layout=_AWQ_LAYOUT,
    upstream=f"{_UTILS}: awq_pack, pack_cols",
    examples=(
        {"K": 3, "N": 32, "bits": 4},
        {"K": 2, "N": 8, "bits": 8},
        {"K": 2, "N": 64, "bits": 3, "interleaved": False},
    ),
    requires=(*_packing("q", 1, packed=False), _interleave_fits),
)
def awq_pack(nx, q, *, bits=4, interleaved=True):
    """Place i of word w in row k = q[k, 32 / bits * w + order[i]], AWQ's order, or i itself, as GPTQ's zero points.

    Shapes: q int32 [K, N], codes of `bits` bits; out int32 [K, N * bits / 32].
    Rounding points: none.
    Errors: ContractError for other bits (interleaved: 4 and 8), an N that fills no whole words, a code out of range.
    Source: vllm/model_executor/layers/quantization/utils/quant_utils.py, awq_pack, pack_cols.
    """
    return lowbit.pack(lowbit.reordered(q, lowbit.interleave(bits)) if interleaved else q, bits, 1)


@op(
    row=ROW,
    args={"qweight": words("K", "W"), "bits": BITS, "interleaved": _INTERLEAVED},
    returns={"q": Tensor("K W*32/bits", ("int32",))},
    rounding=("none: bits are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="none",
    layout=_AWQ_LAYOUT,
    upstream=f"{_UTILS}: unpack_cols",
    examples=(
        {"K": 3, "W": 4, "bits": 4},
        {"K": 2, "W": 3, "bits": 8},
        {"K": 2, "W": 6, "bits": 3, "interleaved": False},
    ),
    requires=(*_packing("qweight", 1, packed=True), _interleave_fits),
)
def awq_unpack(nx, qweight, *, bits=4, interleaved=True):
    """q[k, 32 / bits * w + order[i]] = place i of word w in row k: the inverse of awq_pack.

    Shapes: qweight int32 [K, W]; q int32 [K, W * 32 / bits].
    Rounding points: none.
    Errors: ContractError for other bits (interleaved: 4 and 8); of 3 bits, a W that is no multiple of three.
    Source: vllm/model_executor/layers/quantization/utils/quant_utils.py, unpack_cols.
    """
    q = lowbit.unpack(qweight, bits, 1)
    return lowbit.reordered(q, lowbit.inverse(lowbit.interleave(bits))) if interleaved else q
