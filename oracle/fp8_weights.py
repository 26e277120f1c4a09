"""FP8 under given scales: one for each group, or shards of a weight brought to a common one.

Codes are e4m3, one byte each, in uint8 arrays. Every float32 operation on the way to a code is a rounding point.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Parity, Tensor, Value, refuse
from vtlab.ops.table import op

from .fp8_matmul import draw_codes, scales_are, values
from .quant_fp8 import LARGEST, NAN_CODES, ROUNDINGS, e4m3, single, times_reciprocal

_ROW = "KERNEL-GEMM-FP8"
_UNSET = -LARGEST
EXACT = Bound(ulps=0, why="float32 roundings are part of the definition: a product or quotient of two float32 rounds "
               "to the same float32 from float64 as directly")  # fmt: skip
_CODES = ("uint8",)


def spread(nx, scale, shape):
    """Scales [R, C] over `shape`, each over a whole number of rows and columns."""
    rows, columns = (-(-size // count) if count else 0 for size, count in zip(shape, scale.shape))
    return np.repeat(np.repeat(scale, rows, 0), columns, 1)[: shape[0], : shape[1]]


def groups_fit(arguments, axes):
    """scales [R, C] divide [M, K] evenly, and are positive and finite; on a GPU the host does not read them"""
    scale = arguments["scale"]
    for size, count in zip(arguments["x"].shape, scale.shape):
        if count < 1 or size % count:
            raise refuse("scale", f"shape {tuple(scale.shape)}", f"divisors of {tuple(arguments['x'].shape)}")
    scales_are("scale", scale)


groups_fit.finite = ("scale",)


@op(
    row=_ROW,
    args={
        "x": Tensor("M K", layout="rows"),
        "scale": Tensor("R C", ("float32",), values=lambda rng, axes: rng.uniform(0.01, 0.05, (axes["R"], axes["C"]))),
        "rounding": ROUNDINGS,
    },
    returns={"out": Tensor("M K", _CODES, holds="float8_e4m3fn")},
    rounding=("inverse = f32(1 / scale)", "v = f32(x * inverse)", "out = e4m3(v)"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan='code 0x7F, under "vllm" 0x7E; +-inf becomes +-448',
    layout="x may be strided rows; [1, 1] is a scale for all, [M, 1] one a token, [1, K] one a channel",
    upstream="vllm/_custom_ops.py: scaled_fp8_quant with a group_shape",
    examples=(
        {"M": 4, "K": 256, "R": 4, "C": 2, "x": "bfloat16"},
        {"M": 6, "K": 10, "R": 1, "C": 10, "x": "float32", "rounding": "vllm"},
        {"M": 6, "K": 9, "R": 2, "C": 3, "x": "float16"},
    ),
    requires=(groups_fit,),
)
def scaled_fp8_quant_static_group(nx, x, scale, *, rounding="vt"):
    """out[m, k] = e4m3(x[m, k] * (1 / scale[m / (M/R), k / (K/C)])): the static quantiser with one scale a group.

    Shapes: x [M, K]; scale float32 [R, C], R a divisor of M and C of K; out codes [M, K].
    Rounding points: the reciprocal and the product to float32, then the code. "vt", "vllm" and "vllm_native" differ in
    the code of a NaN.
    Errors: ContractError for scales that do not divide x evenly, or are not positive and finite.
    Source: vllm/_custom_ops.py, scaled_fp8_quant.
    """
    return e4m3(nx, times_reciprocal(nx, nx.load(x), spread(nx, nx.load(scale), x.shape)), NAN_CODES[rounding])


def shards_fit(arguments, axes):
    """widths of shards add up to N, one a scale; scales are positive and finite, but the last may be -448, unset"""
    widths, scale = arguments["logical_widths"], arguments["weight_scale"]
    if not isinstance(widths, (list, tuple)) or not all(type(w) is int and w >= 0 for w in widths):
        raise refuse("logical_widths", widths, "a list of widths of at least 0")
    if len(widths) != axes["S"] or sum(widths) != axes["N"]:
        raise refuse(
            "logical_widths", f"{len(widths)} widths, {sum(widths)} rows", f"{axes['S']} widths, {axes['N']} rows"
        )
    if isinstance(scale, np.ndarray):
        if not scale.size:
            raise refuse("weight_scale", "no scale", "one a shard")
        scales_are("weight_scale", scale[:1] if scale[-1] <= _UNSET else scale)


shards_fit.finite = ("weight_scale",)


@op(
    row=_ROW,
    args={
        "weight": Tensor("N K", _CODES, values=draw_codes("N", "K"), holds="float8_e4m3fn"),
        "weight_scale": Tensor("S", ("float32",), values=lambda rng, axes: rng.uniform(0.01, 0.05, axes["S"])),
        "logical_widths": Value("a list of S widths whose sum is N"),
    },
    returns={
        "out": Tensor("N K", _CODES, holds="float8_e4m3fn"),
        "scale": Tensor("1", ("float32",)),
    },
    rounding=("w = f16(f32(e4m3(weight) * s)), s the shard's scale", "inverse = f32(1 / max s)",
              "v = f32(w * inverse)", "out = e4m3(v)"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="stays, as code 0x7F; a value beyond float16 becomes +-448",
    upstream="vllm/model_executor/layers/quantization/utils/w8a8_utils.py: requantize_with_max_scale",
    examples=(
        {"N": 7, "K": 16, "S": 3, "logical_widths": [4, 0, 3]},
        {"N": 2, "K": 5, "S": 1, "logical_widths": [2]},
        {"N": 4, "K": 5, "S": 2, "logical_widths": [2, 2], "weight_scale": np.float32([0.03, -448])},
    ),
    requires=(shards_fit,),
)  # fmt: skip
def requantize_with_max_scale(nx, weight, weight_scale, logical_widths):
    """scale = max(weight_scale); out = e4m3(f16(e4m3(weight) * its shard's scale) / scale).

    Shapes: weight codes [N, K], shards stacked along N; weight_scale float32 [S]; logical_widths S widths; out codes
    [N, K]; scale float32 [1].
    Rounding points: the dequantised value to float32 and then to float16, the reciprocal and the product to float32,
    then the code. Where the last scale is still -448, its value before loading, the checkpoint was fused already and
    the codes stay.
    Errors: ContractError for widths that do not add up to N, scales that are not positive and finite.
    Source: vllm/model_executor/layers/quantization/utils/w8a8_utils.py, requantize_with_max_scale.
    """
    scales = nx.load(weight_scale)
    most = np.max(scales, keepdims=True)
    if weight_scale[-1] <= _UNSET:
        return weight.copy(), nx.store(most, np.float32)
    shard = np.repeat(scales, logical_widths)[:, None]
    half = nx.load(nx.store(single(nx, nx.mul(nx.load(values(weight)), shard)), np.float16))
    return e4m3(nx, times_reciprocal(nx, half, most)), nx.store(most, np.float32)
