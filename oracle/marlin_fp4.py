"""Scales of FP4 weights as Marlin reads them: NVFP4's without a sign bit, MXFP4's exponents, powers of two moved about.

Marlin widens a code of e2m1 by shifting its bits into a 16-bit number, which leaves it a power of two too small; that
goes into the scales. `apply_fp4_marlin_linear` is the product that reads what they become.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from vtlab.ops import lowbit
from vtlab.ops.contract import EXACT, Bound, Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .fp4 import E2M1
from .lowbit import HALVES, ROUNDED_THRICE, WHY, magnitudes, multiple_of, rounded, total, words
from .marlin import ROW, marlin_permute_bias, marlin_unpack
from .matmul import ORDER
from .mxfp4 import power

_UTILS = "vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py"
_LIFT = 128
_LARGEST = 448 * _LIFT
_MIXED = lowbit.interleave(8)
_BIAS = {"float16": 14, "bfloat16": 126}
"""2^4 - 2 and 2^7 - 2: what the exponents of float16 and bfloat16 are above those of e2m1."""


def _e4m3_values(rng, axes):
    codes = rng.integers(0, 0x7F, (axes["R"], axes["N"])).astype(np.uint8)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _are_scales(arguments, axes):
    """scales are 0 to 448; on a GPU the host does not look"""
    scales = arguments["marlin_scales"]
    if isinstance(scales, np.ndarray):
        wide = scales.astype(np.float32)
        if not ((wide >= 0) & (wide <= 448)).all():
            raise refuse("marlin_scales", "a number below 0 or above 448, or a NaN", "0 to 448")


_are_scales.finite = ("marlin_scales",)


def _factor_fits(arguments, axes):
    """scale_factor is a power of two that takes no scale above 448; on a GPU the host does not look at the scales"""
    factor, scales = arguments["scale_factor"], arguments["marlin_scales"]
    if factor is None:
        return
    if factor < 1 or np.frexp(factor)[0] != 0.5:
        raise refuse("scale_factor", factor, "a power of two from 1 on")
    if isinstance(scales, np.ndarray) and scales.size and scales.astype(np.float32).max() * factor > 448:
        raise refuse("scale_factor", factor, "one that takes no scale above 448")


@op(
    row=ROW,
    args={
        "marlin_scales": Tensor("R N", HALVES, values=_e4m3_values),
        "scale_factor": Scalar(float, optional=True),
        "a_dtype": Choice(HALVES),
    },
    returns={"out": Tensor("R N", ("uint8",)), "factor": Tensor("1", ("float32",))},
    rounding=("v = f16(scale) * factor * 128, 0 below 2", "out = bits 7 ... 14 of f16 v: the mantissa cut to 3 bits"),
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="products with powers of two"),
    nan="refused",
    layout="of each 4 columns 0, 2, 1, 3; a byte is five bits of exponent and three of mantissa, without a sign",
    upstream=f"{_UTILS}: nvfp4_marlin_process_scales",
    examples=(
        {"R": 3, "N": 64},
        {"R": 2, "N": 8, "marlin_scales": "float16", "a_dtype": "float16"},
        {"R": 1, "N": 8, "scale_factor": 1.0},
    ),
    requires=(multiple_of("marlin_scales", 1, 4), _are_scales, _factor_fits),
)
def nvfp4_marlin_process_scales(nx, marlin_scales, *, scale_factor=None, a_dtype="bfloat16"):
    """out = the high byte of 2 * bits(f16(128 * factor * scale)); factor = 2^floor(log2(448 / max scale)) for bfloat16.

    Shapes: marlin_scales [R, N], permuted; out uint8 [R, N]; factor float32 [1], which the global scale is divided by.
    With float16 activations, or no scale above 0, factor is 1; experts of one layer share the least of theirs.
    Rounding points: the scale to float16, then cut to 3 bits of mantissa; numbers of e4m3 are exact. What is below 2
    after the product with 128 * factor becomes 0.
    Errors: ContractError for scales that are no numbers from 0 to 448, an N that is no multiple of 4, a factor that is
    no power of two or takes a scale above 448.
    Source: vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py, nvfp4_marlin_process_scales.
    """
    half = nx.load(nx.store(nx.load(marlin_scales), np.float16))
    if scale_factor is None:
        largest = float(half.max(initial=0))
        bfloat16 = np.dtype(a_dtype) != np.float16
        scale_factor = 2.0 ** (np.frexp(448 / largest)[1] - 1) if bfloat16 and 0 < largest < 448 else 1.0
    value = nx.mul(lowbit.reordered(half, _MIXED), nx.const(scale_factor * _LIFT))
    bits = nx.store(nx.where(value < 2, 0, value), np.float16).view(np.uint16)
    return (bits >> 7).astype(np.uint8), np.array([scale_factor], np.float32)


@op(
    row=ROW,
    args={"global_scale": Tensor("...", ("float32",), values="positive"), "a_dtype": Choice(HALVES)},
    returns={"out": Tensor("...", ("float32",))},
    rounding=("out = global_scale * 2^(119 or 7), exact",),
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="a product with a power of two"),
    nan="as in any product; beyond float32 infinite",
    upstream=f"{_UTILS}: nvfp4_marlin_process_global_scale",
    examples=({"...": (4,)}, {"...": (), "a_dtype": "float16"}),
)
def nvfp4_marlin_process_global_scale(nx, global_scale, *, a_dtype="bfloat16"):
    """out = global_scale * 2^(126 - 7) for bfloat16 activations, 2^(14 - 7) for float16.

    Shapes: global_scale, out float32 [...]. Marlin's codes come out 2^126 (2^14) too small, its scales 2^7 too large.
    Rounding points: none but at the ends of float32's range.
    Errors: ContractError for another dtype.
    Source: vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py, nvfp4_marlin_process_global_scale.
    """
    return nx.store(nx.mul(nx.load(global_scale), nx.const(2.0 ** (_BIAS[np.dtype(a_dtype).name] - 7))), np.float32)


def _exponents_fit(arguments, axes):
    """with fp8 activations exponent bytes are at most 249; on a GPU the host does not look"""
    scales = arguments["marlin_scales"]
    if arguments["fp8_activations"] and isinstance(scales, np.ndarray) and scales.size and scales.max() > 249:
        raise refuse("marlin_scales", f"the exponent byte {scales.max()}", "at most 249")


@op(
    row=ROW,
    args={
        "marlin_scales": Tensor("R N", ("uint8",), holds="float8_e8m0fnu",
                                values=lambda rng, axes: rng.integers(100, 140, (axes["R"], axes["N"]))),
        "fp8_activations": Flag(),
    },
    returns={"out": Tensor("R N", ("uint8",), holds="float8_e8m0fnu")},
    rounding=("none: exponents are moved, or raised by 6",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="byte 255 is moved; with fp8 activations refused",
    layout="of each 4 columns 0, 2, 1, 3, but for fp8 activations",
    upstream=f"{_UTILS}: mxfp4_marlin_process_scales; marlin_utils_fp8.py: mxfp8_marlin_process_scales",
    examples=({"R": 2, "N": 64}, {"R": 1, "N": 8, "fp8_activations": True}),
    requires=(multiple_of("marlin_scales", 1, 4), _exponents_fit),
)  # fmt: skip
def mxfp4_marlin_process_scales(nx, marlin_scales, *, fp8_activations=False):
    """out = exponent bytes, of each 4 columns 0, 2, 1, 3; for fp8 activations in place, plus 2^3 - 2^1 = 6.

    Shapes: marlin_scales, out uint8 [R, N], exponents plus 127, permuted as scales of groups; MXFP8's scales go the way
    of 16-bit activations.
    Rounding points: none.
    Errors: ContractError for an N that is no multiple of 4; with fp8 activations, a byte above 249.
    Source: vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py, mxfp4_marlin_process_scales.
    """
    return marlin_scales + np.uint8(6) if fp8_activations else lowbit.reordered(marlin_scales, _MIXED)


_LEAST, _MOST = 0x80, 0xF7
"""What `nvfp4_marlin_process_scales` leaves but for 0: 2 to 61440 of float16, cut to three bits of mantissa."""


def _scale_bytes(rng, axes):
    """Scales around 1: of NVFP4 with 128 and a factor of 64 in them, or powers of two."""
    low, high = (0xD8, 0xE8) if axes["K"] // axes["G"] == 16 else (120, 130)
    return rng.integers(low, high, (axes["G"], axes["N"]))


def _global_scale(rng, axes):
    return np.array([math.ldexp(1.3e-4, 119 if axes["kind"] == "bfloat16" else 7)])


def _product_fits(arguments, axes):
    """K and N are (128, 64) or (64, 128) tiles; groups are of 16 with a global scale, of 32 bfloat16 without one"""
    k, n = axes["K"], axes["N"]
    if not (n % 64 == 0 and k % 128 == 0) and not (n % 128 == 0 and k % 64 == 0):
        raise refuse(
            "input" if n % 64 == 0 else "weight_scale", f"K = {k}, N = {n}", "multiples of 128 and 64, or 64 and 128"
        )
    alone = arguments["weight_global_scale"] is None
    want = (k // 16, 2 * n)
    if tuple(arguments["weight"].shape) != want:
        raise refuse("weight", f"shape {tuple(arguments['weight'].shape)}", f"{want}")
    if axes["G"] * (32 if alone else 16) != k:
        want = f"{k // 32}, of 32: MXFP4, as there is no global scale" if alone else f"{k // 16}, of 16: NVFP4"
        raise refuse("weight_scale", f"{axes['G']} groups", want)
    if alone and arguments["input"].dtype == np.float16:
        raise refuse("input", "float16", "bfloat16, whose range powers of two need, or a global scale")


def _processed(arguments, axes):
    """NVFP4's scales are processed: 0, or 0x80 to 0xF7; on a GPU the host does not look"""
    scales = arguments["weight_scale"]
    if arguments["weight_global_scale"] is None or not isinstance(scales, np.ndarray) or not scales.size:
        return
    if ((scales != 0) & ((scales < _LEAST) | (scales > _MOST))).any():
        raise refuse("weight_scale", "a byte that is no scale", f"0, or {_LEAST:#x} to {_MOST:#x}")


def _fp4_weights(nx, weight, weight_scale, nvfp4, dtype):
    """Weights [K, N], exact in `dtype` as long as they are finite there."""
    codes = marlin_unpack.body(nx, weight, bits=4).astype(np.uint8).view(E2M1)
    scales = lowbit.reordered(lowbit.reordered(weight_scale, _MIXED), lowbit.MARLIN_GROUPED)
    if nvfp4:
        scales = nx.mul(nx.load((scales.astype(np.uint16) << 7).view(np.float16)), nx.const(1 / _LIFT))
    else:
        scales = power(nx, scales)
    return nx.store(nx.mul(nx.load(codes.astype(np.float32)), scales.repeat(len(codes) // len(scales), axis=0)), dtype)


def _linear_sizes(arguments, results):
    """sum |a| |w| |global|, and for a bias the rounding to T before it among the float32 steps."""
    x, given = arguments["input"], arguments["weight_global_scale"]
    weights = _fp4_weights(TRUTH, arguments["weight"], arguments["weight_scale"], given is not None, x.dtype)
    factor = 1.0 if given is None else math.ldexp(float(given[0]), -_BIAS[x.dtype.name] + 7)
    between = (arguments["bias"] is not None) * 2.0**24 * float(ml_dtypes.finfo(x.dtype).eps)
    return magnitudes(x, weights) * abs(factor) * ((x.shape[1] + 511) // 512 * 16 + 33 + between)


@op(
    row=ROW,
    args={
        "input": Tensor("M K", HALVES),
        "weight": words("K/16", "N*2"),
        "weight_scale": Tensor("G N", ("uint8",), values=_scale_bytes),
        "weight_global_scale": Tensor("1", ("float32",), optional=True, values=_global_scale),
        "bias": Tensor("N", HALVES, like="input", optional=True),
    },
    returns={"out": Tensor("M N", like="input")},
    rounding=(
        "w = e2m1(code) * scale, exact in T",
        "out = T(sum_k x * w * f32(global / 2^(119 or 7))); without a global scale out = T(sum_k x * w)",
        "with a bias: out = T(out + bias)",
    ),
    order=str(ORDER),
    parity=ROUNDED_THRICE,
    mirror=Bound("1", scale=_linear_sizes, ulps=2, why=WHY + "; a rounding to T before a bias may take the neighbour"),
    nan="an exponent of 255 makes its columns NaN; otherwise as in any product",
    layout="codes as gptq_marlin_repack gives them; scales of groups permuted, then processed; bias permuted",
    upstream=f"{_UTILS}: apply_fp4_marlin_linear; vllm/_custom_ops.py: marlin_gemm of float4_e2m1f, use_fp32_reduce",
    examples=(
        {"M": 3, "K": 128, "N": 64, "G": 8, "input": "bfloat16", "weight_global_scale": "float32", "kind": "bfloat16"},
        {"M": 2, "K": 64, "N": 128, "G": 4, "input": "float16", "weight_global_scale": "float32", "kind": "float16",
         "bias": "float16"},
        {"M": 2, "K": 128, "N": 64, "G": 4, "input": "bfloat16", "bias": "bfloat16"},
    ),
    requires=(_product_fits, _processed),
)  # fmt: skip
def apply_fp4_marlin_linear(nx, input, weight, weight_scale, weight_global_scale=None, bias=None):
    """out[m, n] = global * sum_k input[m, k] * e2m1[k, n] * scale[k / 16, n] (+ bias[n]), all in Marlin's layouts.

    Shapes: input [M, K] bfloat16 or float16; weight int32 [K / 16, 2 N]; weight_scale uint8 [K / 16, N], NVFP4's with
    the factor of `nvfp4_marlin_process_scales` in them, weight_global_scale float32 [1] as
    `nvfp4_marlin_process_global_scale` gives it, over that factor. Without it MXFP4: weight_scale uint8 [K / 32, N],
    exponents plus 127, and bfloat16 input. bias [N]; out [M, N].
    Rounding points: the store of the sum times the global scale; a bias is added in T, one more rounding.
    Errors: ContractError for other shapes or dtypes, scales that were not processed.
    Source: vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py, apply_fp4_marlin_linear.
    """
    nvfp4 = weight_global_scale is not None
    out = total(nx, input, _fp4_weights(nx, weight, weight_scale, nvfp4, input.dtype))
    if nvfp4:
        lowered = nx.mul(nx.load(weight_global_scale), nx.const(2.0 ** (7 - _BIAS[input.dtype.name])))
        out = nx.mul(out, lowered)
    if bias is not None:
        out = nx.add(rounded(nx, out, input.dtype), nx.load(marlin_permute_bias.body(nx, bias)))
    return nx.store(out, input.dtype)
