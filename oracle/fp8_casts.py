"""DeepGEMM's casts to FP8 and FP4, in groups of neighbours or in tiles, and the layouts of its scales.

Codes are e4m3, one byte each, or e2m1, two to a byte, in uint8 arrays. Every float32 operation on the way to a code is
a rounding point.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import nvfp4
from vtlab.ops.contract import EXACT as MOVED
from vtlab.ops.contract import Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

from .fp8_matmul import draw_codes, scales_are, values
from .fp8_weights import EXACT
from .quant_fp8 import LARGEST, e4m3, in_groups, largest, power_of_two, single, times_reciprocal

_DEEPGEMM = "KERNEL-GEMM-DEEPGEMM"
BLOCK = 128
_LEAST = float(np.float32(1e-4))
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_PASSED = "code 0x7F; passed over in the maximum"
_UE8M0 = Choice(("bits", "log2"))
_CODES = ("uint8",)


def ceil_power_of_two(nx, scale, how):
    """The least power of two not below the scale, by its bits, or as 2^ceil of a float32 logarithm gives it."""
    if how == "log2":  # the logarithm of a float32 within an ulp or so of 2^k is k in float32
        near = nx.load(np.log2(scale.astype(np.float64)).astype(np.float32))
        return nx.load(np.exp2(np.ceil(near).astype(np.float64)).astype(np.float32))
    return power_of_two(nx, scale)


def tiles(nx, value, rows, columns):
    """[M, K] as [M / rows, K / columns, rows * columns], filled up with zeros."""
    high, wide = -(-value.shape[0] // rows), -(-value.shape[1] // columns)
    whole = np.zeros((high * rows, wide * columns), nx.dtype)
    whole[: value.shape[0], : value.shape[1]] = value
    return whole.reshape(high, rows, wide, columns).swapaxes(1, 2).reshape(high, wide, rows * columns)


def cast_scale(nx, grouped, limit, ue8m0):
    """[..., 1]: the scale that brings the largest of each group, or 1e-4, to `limit`."""
    scale = single(nx, nx.div(nx.maximum(largest(nx, grouped), _LEAST), limit))
    return scale if ue8m0 is None else ceil_power_of_two(nx, scale, ue8m0)


def cast_tiles(nx, value, rows, columns, ue8m0):
    """(codes, scales) with one scale for each tile of rows x columns."""
    tiled = tiles(nx, value, rows, columns)
    scale = cast_scale(nx, tiled, LARGEST, ue8m0)
    codes = e4m3(nx, times_reciprocal(nx, tiled, scale))
    high, wide = codes.shape[:2]
    codes = codes.reshape(high, wide, rows, columns).swapaxes(1, 2).reshape(high * rows, wide * columns)
    return np.ascontiguousarray(codes[: value.shape[0], : value.shape[1]]), nx.store(scale[..., 0], np.float32)


_CAST = {
    "rounding": ("scale = f32(max(max|x|, f32(1e-4)) / 448)", "ue8m0: scale = 2^ceil(log2(scale))",
                 "inverse = f32(1 / scale)", "v = f32(x * inverse)", "out = e4m3(v)"),
    "parity": Parity("bytes"),
    "mirror": EXACT,
    "nan": _PASSED,
    "layout": "x may be strided rows",
}  # fmt: skip


@op(
    row=_DEEPGEMM,
    rows="M",
    args={"x": Tensor("M K", layout="rows"), "ue8m0": Choice(("bits", "log2"), optional=True)},
    returns={"out": Tensor("M K", _CODES, holds="float8_e4m3fn"), "scale": Tensor("M G", ("float32",))},
    upstream="deep_gemm: per_token_cast_to_fp8",
    examples=(
        {"M": 5, "K": 256, "G": 2, "x": "bfloat16"},
        {"M": 3, "K": 130, "G": 2, "x": "float32", "ue8m0": "log2"},
        {"M": 0, "K": 128, "G": 1, "ue8m0": "bits"},
    ),
    **_CAST,
)
def per_token_cast_to_fp8(nx, x, *, ue8m0=None):
    """scale[m, g] = max(max|x[m, g]|, 1e-4) / 448 over 128 neighbours; out = e4m3(x * (1 / scale)).

    Shapes: x [M, K]; out codes [M, K]; scale float32 [M, ceil(K / 128)], the last group filled up with zeros.
    Rounding points: the scale, its reciprocal and the product to float32, then the code. ue8m0 "bits" takes the exact
    ceiling of the logarithm, "log2" that of a float32 one, which gives 2^k for a scale an ulp or so above it where
    k < -4 or k >= 4.
    Errors: ContractError for another rank or dtype, an unknown ue8m0.
    Source: DeepGEMM, deep_gemm/utils/math.py.
    """
    return cast_tiles(nx, nx.load(x), 1, BLOCK, ue8m0)


def whole_pairs(arguments, axes):
    """K and group_size are even"""
    for name, size in (("x", axes["K"]), ("group_size", arguments["group_size"])):
        if size % 2:
            raise refuse(name, f"{size} neighbours", "an even number")


def lower_e2m1(value):
    """The codes of values: to nearest, a tie to the smaller size, saturating; no code of -0, a NaN has code 7."""
    code = np.searchsorted(_MIDDLES, np.abs(value)).astype(np.uint8)
    return np.where((value < 0) & (code > 0), code | np.uint8(8), code)


@op(
    row=_DEEPGEMM,
    rows="M",
    args={
        "x": Tensor("M K", layout="rows"),
        "group_size": Scalar(int, minimum=2),
        "ue8m0": Choice(("bits", "log2"), optional=True),
    },
    returns={"out": Tensor("M K/2", ("uint8",), holds="float4_e2m1fn"), "scale": Tensor("M G", ("float32",))},
    rounding=("scale = f32(max(max|x|, f32(1e-4)) / 6)", *_CAST["rounding"][1:-1], "out = e2m1(v), no code of -0"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="code 7; passed over in the maximum",
    ties="to the smaller size",
    layout="x may be strided rows; byte j holds element 2j in its low half",
    upstream="deep_gemm: per_token_cast_to_fp4",
    examples=(
        {"M": 5, "K": 256, "G": 2, "x": "bfloat16"},
        {"M": 3, "K": 70, "G": 3, "x": "float32", "group_size": 32, "ue8m0": "bits"},
        {"M": 2, "K": 64, "G": 4, "x": "float16", "group_size": 16, "ue8m0": "log2"},
    ),
    requires=(whole_pairs,),
)
def per_token_cast_to_fp4(nx, x, *, group_size=BLOCK, ue8m0=None):
    """scale[m, g] = max(max|x[m, g]|, 1e-4) / 6 over group_size neighbours; out = e2m1(x * (1 / scale)), two a byte.

    Shapes: x [M, K]; out uint8 [M, K/2]; scale float32 [M, ceil(K / group_size)], the last group filled up with zeros.
    Rounding points: as `per_token_cast_to_fp8`; the codes differ from those of `scaled_fp4_quant` in their ties, which
    go to the smaller size. DeepGEMM's ue8m0 is "bits"; it packs four scales to a word as `transform_sf_layout` does.
    Errors: ContractError for an odd K or group_size, another rank or dtype, an unknown ue8m0.
    Source: DeepGEMM, deep_gemm/utils/math.py.
    """
    grouped = in_groups(nx, nx.load(x), group_size)
    scale = cast_scale(nx, grouped, 6.0, ue8m0)
    codes = lower_e2m1(times_reciprocal(nx, grouped, scale)).reshape(len(x), scale.shape[1] * group_size)
    return nvfp4.pack(codes[:, : x.shape[1]]), nx.store(scale[..., 0], np.float32)


@op(
    row=_DEEPGEMM,
    args={
        "x": Tensor("M K", layout="rows"),
        "block_m": Scalar(int, minimum=1),
        "block_k": Scalar(int, minimum=1),
        "ue8m0": Choice(("bits", "log2"), optional=True),
    },
    returns={"out": Tensor("M K", _CODES, holds="float8_e4m3fn"), "scale": Tensor("R C", ("float32",))},
    upstream="vllm/utils/deep_gemm.py: per_block_cast_to_fp8",
    examples=(
        {"M": 130, "K": 256, "R": 2, "C": 2, "x": "bfloat16", "ue8m0": "log2"},
        {"M": 5, "K": 7, "R": 2, "C": 3, "x": "float32", "block_m": 4, "block_k": 3},
        {"M": 4, "K": 4, "R": 1, "C": 1, "x": "float16", "ue8m0": "bits"},
    ),
    **_CAST,
)
def per_block_cast_to_fp8(nx, x, *, block_m=128, block_k=128, ue8m0=None):
    """scale[r, c] = max(max|x[r, c]|, 1e-4) / 448 over tiles of block_m x block_k; out = e4m3(x * (1 / scale)).

    Shapes: x [M, K]; out codes [M, K]; scale float32 [ceil(M / block_m), ceil(K / block_k)], tiles at the edges filled
    up with zeros.
    Rounding points: as `per_token_cast_to_fp8`; vLLM's is "log2".
    Errors: ContractError for a block below 1, another rank or dtype, an unknown ue8m0.
    Source: vllm/utils/deep_gemm.py, per_block_cast_to_fp8.
    """
    return cast_tiles(nx, nx.load(x), block_m, block_k, ue8m0)


def blocks_fit(arguments, axes):
    """scales are [ceil(M / block_m), ceil(K / block_k)], positive and finite; on a GPU the host does not read them"""
    scale, want = arguments["scale"], (-(-axes["M"] // arguments["block_m"]), -(-axes["K"] // arguments["block_k"]))
    if tuple(scale.shape) != want:
        raise refuse("scale", f"shape {tuple(scale.shape)}", f"{want}")
    scales_are("scale", scale)


blocks_fit.finite = ("scale",)


@op(
    row=_DEEPGEMM,
    args={
        "weight": Tensor("M K", _CODES, values=draw_codes("M", "K"), holds="float8_e4m3fn"),
        "scale": Tensor("R C", ("float32",), values=lambda rng, axes: rng.uniform(0.01, 0.05, (axes["R"], axes["C"]))),
        "block_m": Scalar(int, minimum=1),
        "block_k": Scalar(int, minimum=1),
        "ue8m0": _UE8M0,
    },
    returns={"out": Tensor("M K", _CODES, holds="float8_e4m3fn"), "new_scale": Tensor("R C", ("float32",))},
    rounding=("x = f32(e4m3(weight) * scale)", *_CAST["rounding"]),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan=_PASSED,
    upstream="vllm/model_executor/layers/quantization/utils/fp8_utils.py: requant_weight_ue8m0_inplace",
    examples=(
        {"M": 130, "K": 256, "R": 2, "C": 2},
        {"M": 5, "K": 7, "R": 2, "C": 3, "block_m": 4, "block_k": 3, "ue8m0": "bits"},
    ),
    requires=(blocks_fit,),
)
def requant_weight_ue8m0(nx, weight, scale, *, block_m=128, block_k=128, ue8m0="log2"):
    """(out, new_scale) = per_block_cast_to_fp8(e4m3(weight) * scale, ue8m0): block scales made powers of two.

    Shapes: weight codes [M, K]; scale and new_scale float32 [ceil(M / block_m), ceil(K / block_k)]; out codes [M, K].
    Rounding points: the dequantised value to float32, then as `per_block_cast_to_fp8`.
    Errors: ContractError for scales of another shape, or not positive and finite.
    Source: vllm/model_executor/layers/quantization/utils/fp8_utils.py, requant_weight_ue8m0_inplace.
    """
    rows, columns = (np.repeat(np.arange(count), size)[:full] for count, size, full in zip(
        scale.shape, (block_m, block_k), weight.shape))  # fmt: skip
    factor = nx.load(scale)[rows[:, None], columns]
    return cast_tiles(nx, single(nx, nx.mul(nx.load(values(weight)), factor)), block_m, block_k, ue8m0)


def powers_of_two(arguments, axes):
    """packed scales that are not powers of two between 2^-127 and 2^127"""
    scale = arguments["scale"]
    if arguments["packed"] and isinstance(scale, np.ndarray) and scale.size:
        fraction, exponent = np.frexp(scale)
        wrong = (fraction != 0.5) | (exponent < -126) | (exponent > 128)
        if wrong.any():
            raise refuse("scale", scale[wrong][0], "powers of two")
    scales_are("scale", scale)


powers_of_two.finite = ("scale",)


@op(
    row=_DEEPGEMM,
    args={
        "scale": Tensor("M G", ("float32",), layout="rows",
                        values=lambda rng, axes: np.exp2(rng.integers(-9, 9, (axes["M"], axes["G"])))),
        "packed": Flag(),
    },
    returns={"out": Tensor("M C", ("float32", "int32"))},
    rounding=("none: floats are moved; packed, their exponents are",),
    parity=Parity("bytes"),
    mirror=MOVED,
    nan="refused",
    layout="out has strides (4, 4 ceil4(M)): columns of neighbours, each from a multiple of 16 bytes on; the rows that "
    "fill a column up are 0. Byte j of word p of a packed row is the exponent of group 4 p + j, 0 past the last",
    upstream="deep_gemm: transform_sf_into_required_layout, get_mn_major_tma_aligned_packed_ue8m0_tensor",
    examples=({"M": 5, "G": 3, "C": 3}, {"M": 6, "G": 5, "C": 2, "packed": True}, {"M": 0, "G": 2, "C": 2}),
    requires=(powers_of_two,),
)  # fmt: skip
def transform_sf_layout(nx, scale, *, packed=False):
    """out = the scales with a column's rows side by side, where packed as exponent bytes, four groups to an int32.

    Shapes: scale float32 [M, G]; out float32 [M, G], or packed int32 [M, ceil(G / 4)]; strides (4, 4 ceil4(M)) bytes,
    M filled up to a multiple of 4.
    Rounding points: none.
    Errors: ContractError for scales that are not positive and finite, packed also for such as are no powers of two.
    Source: DeepGEMM, csrc/utils/layout.hpp; vllm/utils/deep_gemm.py.
    """
    rows, groups = scale.shape
    if packed:
        exponents = np.zeros((rows, -(-groups // 4) * 4), np.uint8)
        exponents[:, :groups] = scale.view(np.uint32) >> np.uint32(23)
        scale = exponents.view("<i4")
    out = np.zeros((scale.shape[1], -(-rows // 4) * 4), scale.dtype)
    out[:, :rows] = scale.T
    return out.T[:rows]
