"""FP8 (e4m3fn) quantisers: static, dynamic per tensor, per token, per group of neighbours.

Results are codes, one byte each, in uint8 arrays, because CuPy has none of float8: ``codes.view(float8_e4m3fn)`` reads
their values. Scales are float32, and every float32 operation on the way to a code is a rounding point of the
definition, so truth and mirror agree to the byte.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

_ROW = "KERNEL-GEMM-FP8"
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0
SCALE_FLOOR = float(np.float32(1 / (448 * 512)))
"""The least scale of a token: 4.3596542e-06, exactly float32(1/448) / 512."""
NAN_CODES = {"vt": 0x7F, "vllm": 0x7E, "vllm_native": 0x7F}
"""What a NaN becomes: vLLM's CUDA kernels clamp it to +448."""
ROUNDINGS = Choice(("vt", "vllm", "vllm_native"))
SCALE = Tensor("1", ("float32",), values=lambda rng, axes: np.array([0.0321]))
SCALE_UB = Tensor("1", ("float32",), optional=True, values=lambda rng, axes: np.array([1.25]))
_EXACT = Bound(ulps=0, why="float32 roundings are part of the definition: a product or quotient of two float32 rounds "
               "to the same float32 from float64 as directly")  # fmt: skip
_VLLM = "torch.ops._C"


def scale_is_positive(arguments, axes):
    """a static scale is positive and finite; on a GPU the host does not read it, and the arithmetic takes its course"""
    _positive(arguments, "scale")


def bound_is_positive(arguments, axes):
    """the upper bound of the scales is positive; on a GPU the host does not read it"""
    _positive(arguments, "scale_ub")


def _positive(arguments, name):
    value = arguments[name]
    if isinstance(value, np.ndarray) and not (value[0] > 0 and np.isfinite(value[0])):
        raise refuse(name, value[0], "a positive finite number")


def single(nx, value):
    """The value rounded to float32: a rounding point in both arithmetics."""
    return nx.load(nx.store(value, np.float32))


def e4m3(nx, value, nan=0x7F):
    """The codes of float32(value): to nearest even, saturating at +-448; `nan` is the code of a NaN of either sign."""
    value = single(nx, value)
    codes = nx.store(value, E4M3).view(np.uint8)
    return np.where(np.isnan(value), np.uint8(nan), codes)


def largest(nx, value, *, keep_nan=False):
    """max |value| over the last axis, kept; 0 of nothing. NaN elements are passed over, as fmax does, or kept."""
    size = nx.abs(value)
    if not keep_nan:
        size = nx.where(np.isnan(size), 0, size)
    return np.max(size, axis=-1, keepdims=True, initial=0)


def times_reciprocal(nx, value, scale):
    """float32(value * float32(1 / scale))."""
    return single(nx, nx.mul(value, single(nx, nx.div(1, scale))))


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... K", layout="rows"), "scale": SCALE, "rounding": ROUNDINGS},
    returns={"out": Tensor("... K", ("uint8",), holds="float8_e4m3fn")},
    rounding=("inverse = f32(1 / scale)", "v = f32(x * inverse)", "out = e4m3(v)"),
    parity=Parity("bytes"),
    mirror=_EXACT,
    nan='code 0x7F, under "vllm" 0x7E; +-inf becomes +-448',
    layout="x may be strided rows",
    upstream=f"{_VLLM}.static_scaled_fp8_quant; QuantFP8(static=True).forward_native",
    examples=(
        {"...": (5,), "K": 64, "x": "bfloat16"},
        {"...": (2, 3), "K": 33, "x": "float32", "rounding": "vllm"},
        {"...": (), "K": 7, "x": "float16", "rounding": "vllm_native"},
    ),
    requires=(scale_is_positive,),
)
def quant_fp8_static(nx, x, scale, *, rounding="vt"):
    """out = e4m3(x * (1 / scale)): a product with the reciprocal, not a division.

    Shapes: x [..., K]; scale float32 [1]; out codes [..., K].
    Rounding points: the reciprocal and the product to float32, then the code, to nearest even and saturating.
    "vt", "vllm" and "vllm_native" differ in the code of a NaN.
    Errors: ContractError for a scale that is not positive and finite.
    Source: OCP 8-bit floating point v1.0 5.2; vllm/_custom_ops.py, scaled_fp8_quant.
    """
    return e4m3(nx, times_reciprocal(nx, nx.load(x), nx.load(scale)), NAN_CODES[rounding])


@op(
    row=_ROW,
    args={"x": Tensor("... K", layout="rows"), "rounding": ROUNDINGS},
    returns={
        "out": Tensor("... K", ("uint8",), holds="float8_e4m3fn"),
        "scale": Tensor("1", ("float32",)),
    },
    rounding={
        "vt": ("scale = f32(max|x| / 448)", "inverse = f32(1 / scale), 0 for scale 0", "v = f32(x * inverse)",
               "out = e4m3(v)"),
        "vllm": ("as vt, but 1 / 0 is infinite",),
        "vllm_native": ("as vt, but the scale is at least f32(1 / (448 * 512))",),
    },
    parity=Parity("bytes"),
    mirror=_EXACT,
    nan='passed over in the maximum, then 0x7F ("vllm": 0x7E); "vllm_native": one NaN makes all codes NaN. An '
    "infinity makes the scale infinite, every finite code 0 and its own NaN",
    layout="x may be strided rows",
    upstream=f"{_VLLM}.dynamic_scaled_fp8_quant; QuantFP8(static=False, PER_TENSOR).forward_native",
    examples=(
        {"...": (5,), "K": 64, "x": "bfloat16"},
        {"...": (2, 3), "K": 33, "x": "float32", "rounding": "vllm_native"},
        {"...": (0,), "K": 8},
    ),
)  # fmt: skip
def dynamic_scaled_fp8_quant(nx, x, *, rounding="vt"):
    """scale = max|x| / 448 over all of x; out = e4m3(x * (1 / scale)).

    Shapes: x [..., K]; out codes [..., K]; scale float32 [1].
    Rounding points: the scale, its reciprocal and the product to float32, then the code. An x of zeros has scale 0 and
    codes 0 under "vt"; "vllm" (the CUDA op) divides by that zero, so its codes are those of NaN; "vllm_native" has a
    least scale.
    Errors: ContractError for a dtype that is no float.
    Source: vllm/_custom_ops.py, scaled_fp8_quant; vllm/model_executor/layers/quantization/input_quant_fp8.py.
    """
    native, value = rounding == "vllm_native", nx.load(x)
    scale = single(nx, nx.div(largest(nx, value.reshape(-1), keep_nan=native), LARGEST))
    if native:
        scale = nx.maximum(scale, SCALE_FLOOR)
    inverse = single(nx, nx.div(1, scale))
    if rounding == "vt":
        inverse = nx.where(scale == 0, 0, inverse)
    return e4m3(nx, nx.mul(value, inverse), NAN_CODES[rounding]), nx.store(scale, np.float32)


def token_quant(nx, value, scale_ub, rounding):
    """(codes, scales [..., 1]) of float32 values, one scale a row."""
    native = rounding == "vllm_native"
    size = largest(nx, value, keep_nan=native)
    if scale_ub is not None:
        size = nx.minimum(size, nx.load(scale_ub))
    scale = nx.maximum(single(nx, nx.div(size, LARGEST)), SCALE_FLOOR)
    v = times_reciprocal(nx, value, scale) if native else nx.div(value, scale)
    return e4m3(nx, v, NAN_CODES[rounding]), nx.store(scale, np.float32)


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... K", layout="rows"), "scale_ub": SCALE_UB, "rounding": ROUNDINGS},
    returns={
        "out": Tensor("... K", ("uint8",), holds="float8_e4m3fn"),
        "scale": Tensor("... 1", ("float32",)),
    },
    rounding={
        "vt": ("scale = max(f32(min(max|x|, scale_ub) / 448), f32(1 / (448 * 512)))", "v = f32(x / scale)",
               "out = e4m3(v)"),
        "vllm": ("as vt",),
        "vllm_native": ("as vt, but v = f32(x * f32(1 / scale))",),
    },
    parity=Parity("bytes"),
    mirror=_EXACT,
    nan='passed over in the maximum, then 0x7F ("vllm": 0x7E); "vllm_native": one NaN makes its row NaN. A row with an '
    "infinity and no scale_ub has an infinite scale, codes 0 and NaN for the infinity",
    layout="x may be strided rows",
    upstream=f"{_VLLM}.dynamic_per_token_scaled_fp8_quant; QuantFP8(static=False, PER_TOKEN).forward_native",
    examples=(
        {"...": (5,), "K": 64, "x": "bfloat16"},
        {"...": (2, 3), "K": 33, "x": "float32", "scale_ub": "float32"},
        {"...": (4,), "K": 40, "x": "bfloat16", "rounding": "vllm"},
        {"...": (3,), "K": 0, "x": "float16", "scale_ub": "float32", "rounding": "vllm_native"},
    ),
    requires=(bound_is_positive,),
)  # fmt: skip
def dynamic_per_token_scaled_fp8_quant(nx, x, *, scale_ub=None, rounding="vt"):
    """scale[t] = max(min(max|x[t]|, scale_ub) / 448, 1 / (448 * 512)); out = e4m3(x / scale).

    Shapes: x [..., K]; scale_ub float32 [1] or None; out codes [..., K]; scale float32 [..., 1].
    Rounding points: the scale and the quotient to float32, then the code. "vllm" (the CUDA op) differs in the code of
    a NaN only; "vllm_native" multiplies by the scale's reciprocal for the code.
    Errors: ContractError for a scale_ub that is not positive and finite.
    Source: vllm/_custom_ops.py, scaled_fp8_quant; vllm/model_executor/layers/quantization/input_quant_fp8.py.
    """
    return token_quant(nx, nx.load(x), scale_ub, rounding)


def in_groups(nx, value, group_size):
    """[..., K] as [..., G, group_size], the last group filled up with zeros."""
    *lead, width = value.shape
    groups = -(-width // group_size)
    if rest := groups * group_size - width:
        value = np.concatenate([value, np.zeros((*lead, rest), nx.dtype)], axis=-1)
    return value.reshape(*lead, groups, group_size)


def power_of_two(nx, scale):
    """The least power of two that is not below the scale; 0, infinity and NaN stay."""
    power = nx.load(nx.store(scale, ml_dtypes.float8_e8m0fnu, rule="up"))
    return nx.where((scale > 0) & np.isfinite(scale), power, scale)


def group_codes(nx, grouped, scale, width, nan):
    """Codes [..., width] of e4m3(grouped / scale); scale [..., G, 1]."""
    codes = e4m3(nx, nx.div(grouped, scale), nan)
    return codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])[..., :width]


def lay_out(scale, column_major):
    """Scales [..., M, G] as they are, or with their last two axes swapped in memory."""
    if column_major and scale.ndim > 1:
        return np.ascontiguousarray(scale.swapaxes(-1, -2)).swapaxes(-1, -2)
    return scale


@op(
    row=_ROW,
    rows="...",
    args={
        "x": Tensor("... K", layout="rows"),
        "group_size": Scalar(int, minimum=1),
        "eps": Scalar(above=0),
        "ue8m0": Flag(),
        "column_major": Flag(),
        "rounding": ROUNDINGS,
    },
    returns={
        "out": Tensor("... K", ("uint8",), holds="float8_e4m3fn"),
        "scale": Tensor("... G", ("float32",)),
    },
    rounding={
        "vt": ("scale = f32(max(max|x|, f32(eps)) / 448)", "ue8m0: scale = 2^ceil(log2(max(scale, 1e-10)))",
               "v = f32(x / scale)", "out = e4m3(v)"),
        "vllm": ("as vt",),
        "vllm_native": ("as vt, but without eps and 1e-10; the scale is at least f32(1 / (448 * 512)), after ue8m0",),
    },
    parity=Parity("bytes"),
    mirror=_EXACT,
    nan='passed over in the maximum, then 0x7F ("vllm": -448, 0xFE); "vllm_native": one NaN makes its group NaN. A '
    "group with an infinity has an infinite scale, codes 0 and NaN for the infinity",
    layout="scale is [..., M, G]; column_major swaps these two axes in memory: strides (4, 4 M), what block-scaled "
    "GEMMs on Hopper read",
    upstream=f"{_VLLM}.per_token_group_fp8_quant; fp8_utils.py: per_token_group_quant_fp8; "
    "QuantFP8(static=False, GroupShape(1, 128)).forward_native",
    examples=(
        {"...": (5,), "K": 256, "G": 2, "x": "bfloat16"},
        {"...": (2, 3), "K": 33, "G": 5, "x": "float32", "group_size": 8, "ue8m0": True},
        {"...": (4,), "K": 48, "G": 3, "x": "bfloat16", "group_size": 16, "column_major": True, "rounding": "vllm"},
        {"...": (3,), "K": 40, "G": 2, "x": "float16", "group_size": 32, "ue8m0": True, "rounding": "vllm_native"},
    ),
)  # fmt: skip
def per_token_group_quant_fp8(nx, x, *, group_size=128, eps=1e-10, ue8m0=False, column_major=False, rounding="vt"):
    """scale[t, g] = max(max|x[t, g]|, eps) / 448 over each group of neighbours; out = e4m3(x / scale).

    Shapes: x [..., K]; out codes [..., K]; scale float32 [..., G], G = ceil(K / group_size), a last group that is not
    full counting as filled up with zeros. `ue8m0` rounds scales up to powers of two.
    Rounding points: the scale and the quotient (a true division) to float32, then the code. ue8m0 takes the exact
    ceiling of the logarithm: for a scale a few ulps above 2^k, vLLM's float32 log2 gives 2^k.
    Errors: ContractError for group_size < 1, eps <= 0.
    Source: DeepSeek-V3 (arXiv 2412.19437) 3.3; vllm/model_executor/layers/quantization/utils/fp8_utils.py.
    """
    native = rounding == "vllm_native"
    grouped = in_groups(nx, nx.load(x), group_size)
    size = largest(nx, grouped, keep_nan=native)
    if not native:
        size = nx.maximum(size, float(np.float32(eps)))
    scale = single(nx, nx.div(size, LARGEST))
    if ue8m0:
        scale = power_of_two(nx, scale if native else nx.maximum(scale, float(np.float32(1e-10))))
    if native:
        scale = nx.maximum(scale, SCALE_FLOOR)
    codes = group_codes(nx, grouped, scale, x.shape[-1], 0xFE if rounding == "vllm" else 0x7F)
    return codes, lay_out(nx.store(scale[..., 0], np.float32), column_major)
