"""INT8 quantisers: static, dynamic per token, per group of neighbours, with and without a zero point.

vLLM's CUDA ops, its CPU ops and its Triton kernels place their roundings differently; `rounding` names whose. Every
float32 operation on the way to a code is a rounding point of the definition, so truth and mirror agree to the byte.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

from .quant_fp8 import in_groups, largest, scale_is_positive, single

_ROW = "KERNEL-GEMM-FP8"
STEPS = 127.0
_ROUNDINGS = Choice(("cuda", "cpu"))
_DYNAMIC = Choice(("cuda", "cpu", "triton_token"))
_SCALE = Tensor("1", ("float32",), values=lambda rng, axes: np.array([0.0213]))
_EXACT = Bound(ulps=0, why="float32 roundings are part of the definition: sum, product or quotient of two float32 "
               "rounds to the same float32 by way of float64 as directly")  # fmt: skip
_NAN = 'passed over in extrema, then code 0, under "cuda" with a zero point sat8(azp); unspecified in vLLM'
_X = Tensor("... K", layout="rows")
_OUT = Tensor("... K", ("int8",))


def saturated(value):
    """int8 of whole numbers, clamped to [-128, 127]; a NaN is 0."""
    return np.where(np.isnan(value), 0, np.clip(value, -128, 127)).astype(np.int8)


def nearest(value):
    """Whole numbers in float64: to nearest even, within int32; a NaN is 0, as a GPU's conversion makes it."""
    wide = np.rint(value.astype(np.float64))
    return np.where(np.isnan(wide), 0, np.clip(wide, -(2.0**31), 2.0**31 - 1))


def half_away(value):
    """To the nearest whole number, halves away from zero."""
    whole = np.trunc(value)
    return whole + np.copysign(np.abs(value - whole) >= 0.5, value)


def scaled(nx, x, scale):
    """float32(x * float32(1 / scale))."""
    return single(nx, nx.mul(x, single(nx, nx.div(1, scale))))


def shifted(nx, value, azp, rounding):
    """Codes of scaled values moved by a zero point: after they are rounded, or on the CPU before."""
    if rounding == "cpu":
        return saturated(np.rint(single(nx, nx.add(value, single(nx, nx.load(azp))))))
    return saturated(nearest(value) + azp)


@op(
    row=_ROW,
    rows="...",
    args={
        "x": _X,
        "scale": _SCALE,
        "azp": Tensor("1", ("int32",), optional=True, values=lambda rng, axes: np.array([-17])),
        "rounding": _ROUNDINGS,
    },
    returns={"out": _OUT},
    rounding={
        "cuda": ("without azp: v = f32(x / scale), out = sat8(rint(v))",
                 "with azp: v = f32(x * f32(1 / scale)), out = sat8(rint(v) + azp)"),
        "cpu": ("v = f32(x * f32(1 / scale))", "with azp: v = f32(v + f32(azp))", "out = sat8(rint(v))"),
    },
    parity=Parity("bytes"),
    mirror=_EXACT,
    nan=_NAN,
    ties="to the even number",
    layout="x may be strided rows",
    upstream="vllm/_custom_ops.py: scaled_int8_quant; torch.ops._C.static_scaled_int8_quant",
    examples=(
        {"...": (5,), "K": 64, "x": "bfloat16"},
        {"...": (2, 3), "K": 33, "x": "float32", "azp": "int32"},
        {"...": (4,), "K": 40, "x": "float16", "azp": "int32", "rounding": "cpu"},
        {"...": (), "K": 7, "rounding": "cpu"},
    ),
    requires=(scale_is_positive,),
)  # fmt: skip
def static_scaled_int8_quant(nx, x, scale, *, azp=None, rounding="cuda"):
    """out = sat8(rint(x / scale)), with a zero point sat8(rint(x * (1 / scale)) + azp).

    Shapes: x [..., K]; scale float32 [1]; azp int32 [1] or None; out int8 [..., K].
    Rounding points: "cuda" divides where there is no zero point and multiplies by the reciprocal where there is one,
    which it adds to the rounded number; "cpu" always multiplies, and adds the zero point before it rounds. The sum
    with the zero point does not wrap.
    Errors: ContractError for a scale that is not positive and finite.
    Source: vllm/_custom_ops.py, scaled_int8_quant.
    """
    value, factor = nx.load(x), nx.load(scale)
    if azp is not None:
        return shifted(nx, scaled(nx, value, factor), azp, rounding)
    return saturated(np.rint(scaled(nx, value, factor) if rounding == "cpu" else single(nx, nx.div(value, factor))))


def only_cuda_and_cpu_shift(arguments, axes):
    """a zero point under "triton_token", which has none"""
    if arguments["rounding"] == "triton_token" and not arguments["symmetric"]:
        raise refuse("symmetric", False, 'True under "triton_token"')


def extrema(nx, value):
    """(min, max) over the last axis, kept; NaN passed over, 0 of nothing."""
    isnan = np.isnan(value)
    low = np.min(nx.where(isnan, np.inf, value), axis=-1, keepdims=True, initial=np.inf)
    high = np.max(nx.where(isnan, -np.inf, value), axis=-1, keepdims=True, initial=-np.inf)
    return nx.where(low > high, 0, low), nx.where(low > high, 0, high)


def asymmetric(nx, value, rounding):
    """(codes, scale, zero point) of the range [min, max] spread over 255 steps."""
    low, high = extrema(nx, value)
    scale = single(nx, nx.div(single(nx, nx.sub(high, low)), 255))
    azp = nearest(single(nx, nx.sub(-128, single(nx, nx.div(low, scale))))).astype(np.int32)
    azp = np.where(scale == 0, np.int32(-128), azp)
    codes = shifted(nx, scaled(nx, value, scale), azp, rounding)
    return np.where(scale == 0, np.int8(0), codes), nx.store(scale, np.float32), azp


def symmetric_codes(nx, value, rounding):
    """(codes, scale) of [-max|x|, max|x|] over 127 steps to either side."""
    size = largest(nx, value)
    if rounding == "triton_token":
        size = nx.maximum(size, float(np.float32(1e-10)))
    scale = single(nx, nx.div(size, STEPS))
    factor = nx.div(1, scale) if rounding == "cpu" else nx.div(STEPS, size)
    v = single(nx, nx.mul(value, single(nx, factor)))
    codes = saturated(half_away(v) if rounding == "triton_token" else np.rint(v))
    return np.where(scale == 0, np.int8(0), codes), nx.store(scale, np.float32)


@op(
    row=_ROW,
    rows="...",
    args={"x": _X, "symmetric": Flag(), "rounding": _DYNAMIC},
    returns={
        "out": _OUT,
        "scale": Tensor("... 1", ("float32",)),
        "azp": Tensor("... 1", ("int32",), optional=True),
    },
    rounding={
        "cuda": ("scale = f32(max|x| / 127)", "v = f32(x * f32(127 / max|x|))", "out = sat8(rint(v))",
                 "asymmetric: scale = f32(f32(max - min) / 255), azp = rint(f32(-128 - f32(min / scale))), "
                 "v = f32(x * f32(1 / scale)), out = sat8(rint(v) + azp)"),
        "cpu": ("as cuda, but v = f32(x * f32(1 / scale))", "asymmetric: out = sat8(rint(f32(v + f32(azp))))"),
        "triton_token": ("m = max(max|x|, f32(1e-10))", "scale = f32(m / 127)", "v = f32(x * f32(127 / m))",
                         "out = sat8(round v, halves away from zero)"),
    },
    parity=Parity("bytes"),
    mirror=_EXACT,
    nan=_NAN,
    ties='to the even number; "triton_token": away from zero',
    layout="x may be strided rows",
    upstream="vllm/_custom_ops.py: scaled_int8_quant; torch.ops._C.dynamic_scaled_int8_quant; int8_utils.py: "
    "per_token_quant_int8",
    examples=(
        {"...": (5,), "K": 64, "x": "bfloat16"},
        {"...": (2, 3), "K": 33, "x": "float32", "symmetric": False},
        {"...": (4,), "K": 40, "x": "float16", "symmetric": False, "rounding": "cpu"},
        {"...": (), "K": 7, "rounding": "triton_token"},
        {"...": (3,), "K": 0, "symmetric": False},
    ),
    requires=(only_cuda_and_cpu_shift,),
)  # fmt: skip
def dynamic_scaled_int8_quant(nx, x, *, symmetric=True, rounding="cuda"):
    """scale[t] = max|x[t]| / 127, out = sat8(rint(x / scale)); asymmetric: [min, max] over 255 steps from azp.

    Shapes: x [..., K]; out int8 [..., K]; scale float32 [..., 1]; asymmetric: also azp int32 [..., 1]. A code stands
    for scale * (out - azp).
    Rounding points: "cuda" multiplies by 127 / max|x|, "cpu" by 1 / scale; "triton_token" rounds halves away from zero
    and has a least maximum. A row whose scale is 0 (all zeros, or where asymmetric a single value) has codes 0, and
    azp -128; vLLM's codes are unspecified there. On a GPU vLLM divides approximately: scales within an ulp.
    Errors: ContractError for an asymmetric "triton_token".
    Source: vllm/_custom_ops.py, scaled_int8_quant; vllm/model_executor/layers/quantization/utils/int8_utils.py.
    """
    value = nx.load(x)
    return symmetric_codes(nx, value, rounding) if symmetric else asymmetric(nx, value, rounding)


def whole_groups(arguments, axes):
    """K is a multiple of group_size"""
    if axes["K"] % arguments["group_size"]:
        raise refuse("x", f"K = {axes['K']}", f"a multiple of {arguments['group_size']}")


@op(
    row=_ROW,
    rows="...",
    args={"x": _X, "group_size": Scalar(int, minimum=1), "eps": Scalar(above=0)},
    returns={"out": _OUT, "scale": Tensor("... G", ("float32",))},
    rounding=("scale = f32(max(max|x|, f32(eps)) / 127)", "v = f32(x / scale)", "out = v cut towards zero"),
    parity=Parity("bytes"),
    mirror=_EXACT,
    nan=_NAN,
    ties="none: everything under the next whole number is cut",
    layout="x may be strided rows",
    upstream="vllm/model_executor/layers/quantization/utils/int8_utils.py: per_token_group_quant_int8",
    examples=(
        {"...": (5,), "K": 256, "G": 2, "x": "bfloat16"},
        {"...": (2, 3), "K": 40, "G": 5, "x": "float32", "group_size": 8},
        {"...": (0,), "K": 16, "G": 1, "x": "float16", "group_size": 16},
    ),
    requires=(whole_groups,),
)
def per_token_group_quant_int8(nx, x, *, group_size=128, eps=1e-10):
    """scale[t, g] = max(max|x[t, g]|, eps) / 127 over groups of neighbours; out = x / scale, cut towards zero.

    Shapes: x [..., K]; out int8 [..., K]; scale float32 [..., K / group_size].
    Rounding points: the scale and the quotient to float32; the code is the quotient's whole part, as a cast makes it,
    so that codes are on average half a step too small.
    Errors: ContractError for group_size < 1, K no multiple of it, eps <= 0.
    Source: vllm/model_executor/layers/quantization/utils/int8_utils.py.
    """
    grouped = in_groups(nx, nx.load(x), group_size)
    scale = single(nx, nx.div(nx.maximum(largest(nx, grouped), float(np.float32(eps))), STEPS))
    codes = saturated(np.trunc(single(nx, nx.div(grouped, scale))))
    return codes.reshape(x.shape), nx.store(scale[..., 0], np.float32)
