"""Scales of FP4 weights as Marlin reads them: NVFP4's without a sign bit, MXFP4's exponents, powers of two moved about.

Marlin widens a code of e2m1 by shifting its bits into a 16-bit number, which leaves it a power of two too small; that
goes into the scales.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops import lowbit
from vtlab.ops.contract import EXACT, Bound, Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

from .lowbit import HALVES, multiple_of
from .marlin import ROW

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
