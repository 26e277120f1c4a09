"""RMSNorm and SiLU-and-mul whose result goes straight into an FP8 (or int8) quantiser.

Each op is its norm or activation, rounded as that op rounds its result, followed by the quantiser: not a byte of the
codes changes against the two ops in a row, where nothing else is said. What stands between them never reaches memory.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

from .activation import silu_and_mul
from .norm import rms_norm, rms_norm_gated
from .quant_fp8 import (
    LARGEST,
    NAN_CODES,
    ROUNDINGS,
    SCALE,
    SCALE_FLOOR,
    SCALE_UB,
    bound_is_positive,
    e4m3,
    group_codes,
    in_groups,
    largest,
    lay_out,
    scale_is_positive,
    single,
    times_reciprocal,
    token_quant,
)

_ROW = "KERNEL-EW-NORM-QUANT"
_VLLM = "torch.ops._C"
_INT8_FLOOR = 2.0**-23
_DYNAMIC_NORM = {"vt": "vt", "vllm": "vllm_native", "vllm_native": "vllm_native"}
"""vLLM's dynamic kernels round the normed value before the weight, as its Python form does; the static one does not."""
_CODES = Tensor("... H", ("uint8",), holds="float8_e4m3fn")
_NORM_ARGS = {
    "x": Tensor("... H", layout="rows"),
    "weight": Tensor("H"),
}
_RESIDUAL = Tensor("... H", optional=True, layout="rows")
_NEW_RESIDUAL = Tensor("... H", like="residual", optional=True)
_NORM_WHY = (
    "the normed value differs by the roundings of rms_norm and may flip, up to three storage ulps of x's dtype, which "
    "moves a dynamic scale by as much and a code by one at most: codes are 2^-4 apart, relative to their value"
)


def _residual_has_dtype_of_x(arguments, axes):
    """vLLM's variants take a residual of x's dtype only"""
    x, residual = arguments["x"], arguments["residual"]
    if residual is not None and arguments["rounding"] != "vt" and residual.dtype != x.dtype:
        raise refuse("residual", f"dtype {residual.dtype}", f"dtype {x.dtype}, that of x")


def _sizes(arguments, results):
    """What a code, a scale and a new residual may differ by, in units of 2^-24: see _NORM_WHY."""
    x = arguments["x"]
    roundings = x.shape[-1] / 256 + 24
    flips = 3 * float(ml_dtypes.finfo(x.dtype).eps) * 2.0**24
    sizes = []
    for result in results:
        if result.dtype == np.uint8:
            result = result.view(ml_dtypes.float8_e4m3fn)
        moved = result.ndim and result.dtype == np.float32 and result.shape != x.shape
        sizes.append(np.abs(result.astype(np.float64)) * (roundings + (flips if moved else 0)))
    return tuple(sizes)


_NORM_BOUND = Bound("1", scale=_sizes, ulps=1, why=_NORM_WHY)


def _norm(nx, x, weight, residual, eps, gemma, rounding):
    """(the normed rows as `rms_norm` stores them, loaded; the new residual, or None)."""
    found = rms_norm.body(nx, x, weight, residual=residual, eps=eps, gemma=gemma, rounding=rounding)
    out, residual = found if residual is not None else (found, None)
    return nx.load(out), residual


@op(
    row=_ROW,
    rows="...",
    args={
        **_NORM_ARGS,
        "scale": SCALE,
        "residual": _RESIDUAL,
        "eps": Scalar(minimum=0),
        "gemma": Flag(),
        "rounding": ROUNDINGS,
    },
    returns={"out": _CODES, "residual": _NEW_RESIDUAL},
    rounding={
        "vt": ("residual = round(x + residual)", "y = round(residual_or_x * inv * w) to x's dtype",
               "out = e4m3(f32(y * f32(1 / scale)))"),
        "vllm": ('as vt, y as rms_norm under "vllm"',),
        "vllm_native": ('y as rms_norm under "vllm_native"', "out as vt"),
    },
    order="that of rms_norm",
    parity=Parity("bytes"),
    mirror=_NORM_BOUND,
    nan='code 0x7F, under "vllm" 0x7E',
    layout="x and residual may be strided rows",
    upstream=f"{_VLLM}.rms_norm_static_fp8_quant; {_VLLM}.fused_add_rms_norm_static_fp8_quant",
    examples=(
        {"...": (5,), "H": 128, "x": "bfloat16", "weight": "bfloat16"},
        {"...": (2, 2), "H": 33, "x": "float32", "weight": "float32", "residual": "float32", "gemma": True},
        {"...": (3,), "H": 80, "x": "bfloat16", "weight": "bfloat16", "residual": "bfloat16", "rounding": "vllm"},
        {"...": (3,), "H": 80, "x": "float16", "weight": "float16", "rounding": "vllm_native"},
    ),
    requires=(scale_is_positive, _residual_has_dtype_of_x),
)  # fmt: skip
def rms_norm_quant_fp8(nx, x, weight, scale, *, residual=None, eps=1e-6, gemma=False, rounding="vt"):
    """y = rms_norm(x, weight), out = e4m3(y * (1 / scale)); x becomes x + residual first.

    Shapes: x, residual [..., H]; weight [H]; scale float32 [1]; out codes [..., H]. Returns `out`, or `(out, residual)`
    where a residual is given.
    Rounding points: those of `rms_norm` under the same `rounding`, y to x's dtype among them, then those of
    `quant_fp8_static`.
    Errors: ContractError for mismatched shapes or dtypes, eps < 0, a scale that is not positive and finite.
    Source: vllm/compilation/passes/fusion/rms_quant_fusion.py.
    """
    y, residual = _norm(nx, x, weight, residual, eps, gemma, rounding)
    out = e4m3(nx, times_reciprocal(nx, y, nx.load(scale)), NAN_CODES[rounding])
    return out if residual is None else (out, residual)


@op(
    row=_ROW,
    rows="...",
    args={
        "x": Tensor("... D"),
        "gate": Tensor("... D", layout="rows"),
        "weight": Tensor("D"),
        "scale": SCALE,
        "eps": Scalar(minimum=0),
        "sigmoid_gate": Flag(),
    },
    returns={"out": Tensor("... D", ("uint8",), holds="float8_e4m3fn")},
    rounding=("y = bf16(((x * inv) * w) * act(gate))", "out = e4m3(f32(y * f32(1 / scale)))"),
    order="that of rms_norm_gated",
    parity=Parity("bytes"),
    mirror=Bound("1", scale=_sizes, ulps=1, why=_NORM_WHY),
    nan="code 0x7F",
    layout="gate may be a strided view",
    upstream="vllm/model_executor/layers/layernorm.py: RMSNormGated, then QuantFP8",
    examples=(
        {"...": (6, 4), "D": 128, "x": "bfloat16", "gate": "bfloat16", "weight": "bfloat16"},
        {"...": (5,), "D": 8, "sigmoid_gate": True},
    ),
    requires=(scale_is_positive,),
)
def rms_norm_gated_quant_fp8(nx, x, gate, weight, scale, *, eps=1e-6, sigmoid_gate=False):
    """y = rms_norm_gated(x, gate, weight) in bf16, out = e4m3(y * (1 / scale)).

    Shapes: x, gate [..., D]; weight [D]; scale float32 [1]; out codes [..., D].
    Rounding points: y to bf16, whatever x's dtype, then those of `quant_fp8_static`.
    Errors: ContractError for mismatched shapes, eps < 0, a scale that is not positive and finite.
    Source: vllm/model_executor/layers/layernorm.py, RMSNormGated.
    """
    y = rms_norm_gated.body(nx, x, gate, weight, eps=eps, sigmoid_gate=sigmoid_gate, out_dtype=ml_dtypes.bfloat16)
    return e4m3(nx, times_reciprocal(nx, nx.load(y), nx.load(scale)))


@op(
    row=_ROW,
    rows="...",
    args={
        **_NORM_ARGS,
        "residual": _RESIDUAL,
        "scale_ub": SCALE_UB,
        "eps": Scalar(minimum=0),
        "quant_dtype": Choice(("float8_e4m3fn", "int8")),
        "rounding": ROUNDINGS,
    },
    returns={
        "out": Tensor("... H", ("uint8", "int8"), holds="float8_e4m3fn"),
        "scale": Tensor("... 1", ("float32",)),
        "residual": _NEW_RESIDUAL,
    },
    rounding={
        "vt": ("residual = round(x + residual)", "y = round(residual_or_x * inv * w) to x's dtype",
               "fp8: scale and out as dynamic_per_token_scaled_fp8_quant of y",
               "int8: scale = max(f32(min(max|y|, scale_ub) / 127), 2^-23)",
               "int8: out = nearest even of f32(y / scale)"),
        "vllm": ('y as rms_norm under "vllm_native"', "then as vt, but int8 rounds f32(y * f32(1 / scale))"),
        "vllm_native": ('y as rms_norm under "vllm_native"', "then the quantiser's native form; int8 as vt"),
    },
    order="that of rms_norm",
    parity=Parity("bytes"),
    mirror=_NORM_BOUND,
    nan="as dynamic_per_token_scaled_fp8_quant; int8: a NaN becomes 0",
    layout="x and residual may be strided rows",
    upstream=f"vllm/_custom_ops.py: rms_norm_dynamic_per_token_quant; {_VLLM}.rms_norm_dynamic_per_token_quant",
    examples=(
        {"...": (5,), "H": 128, "x": "bfloat16", "weight": "bfloat16", "quant_dtype": "float8_e4m3fn"},
        {"...": (2, 2), "H": 33, "x": "float32", "residual": "float32", "scale_ub": "float32",
         "quant_dtype": "float8_e4m3fn"},
        {"...": (3,), "H": 80, "x": "bfloat16", "weight": "bfloat16", "residual": "bfloat16", "rounding": "vllm",
         "quant_dtype": "float8_e4m3fn"},
        {"...": (3,), "H": 80, "x": "float32", "weight": "float32", "quant_dtype": "int8"},
    ),
    requires=(bound_is_positive, _residual_has_dtype_of_x),
)  # fmt: skip
def rms_norm_dynamic_per_token_quant(
    nx, x, weight, *, residual=None, scale_ub=None, eps=1e-6, quant_dtype=ml_dtypes.float8_e4m3fn, rounding="vt"
):
    """y = rms_norm(x, weight), scale[t] = max(max|y[t]| / 448, 1 / (448 * 512)), out = e4m3(y / scale).

    Shapes: x, residual [..., H]; weight [H]; scale_ub float32 [1] or None; out codes (uint8) or int8 [..., H]; scale
    float32 [..., 1]. Returns `(out, scale)`, or `(out, scale, residual)` where a residual is given.
    Rounding points: y to x's dtype, the scale and the quotient to float32, then the code. int8 has 127 for 448 and a
    least scale of 2^-23, and rounds to nearest even between -128 and 127; "vllm" (the CUDA op) multiplies by the
    reciprocal of its scale there.
    Errors: ContractError for mismatched shapes or dtypes, eps < 0, a scale_ub that is not positive and finite.
    Source: vllm/_custom_ops.py, rms_norm_dynamic_per_token_quant.
    """
    y, residual = _norm(nx, x, weight, residual, eps, False, _DYNAMIC_NORM[rounding])
    if quant_dtype == np.int8:
        size = largest(nx, y)
        if scale_ub is not None:
            size = nx.minimum(size, nx.load(scale_ub))
        scale = nx.maximum(single(nx, nx.div(size, 127)), _INT8_FLOOR)
        value = times_reciprocal(nx, y, scale) if rounding == "vllm" else single(nx, nx.div(y, scale))
        whole = np.clip(np.rint(value), -128, 127)
        found = np.nan_to_num(whole).astype(np.int8), nx.store(scale, np.float32)
    else:
        found = token_quant(nx, y, scale_ub, rounding)
    return found if residual is None else (*found, residual)


def _block_quant(nx, y, group_size, column_major, rounding, size_ub=None, scale_ub=None):
    """(codes, scales [..., G]) of float32 values, one scale a group; y / scale is a true division.

    size_ub bounds max|y|, scale_ub the scale.
    """
    grouped = in_groups(nx, y, group_size)
    size = largest(nx, grouped)
    if size_ub is not None:
        size = nx.minimum(size, nx.load(size_ub))
    scale = single(nx, nx.div(size, LARGEST))
    if scale_ub is not None:
        scale = nx.minimum(scale, nx.load(scale_ub))
    scale = nx.maximum(scale, SCALE_FLOOR)
    codes = group_codes(nx, grouped, scale, y.shape[-1], NAN_CODES[rounding])
    return codes, lay_out(nx.store(scale[..., 0], np.float32), column_major)


_BLOCK_ARGS = {"group_size": Scalar(int, minimum=1), "scale_ub": SCALE_UB, "column_major": Flag()}
_TWO = Choice(("vt", "vllm"))


@op(
    row=_ROW,
    rows="...",
    args={**_NORM_ARGS, "residual": _RESIDUAL, "eps": Scalar(minimum=0), **_BLOCK_ARGS, "rounding": _TWO},
    returns={"out": _CODES, "scale": Tensor("... G", ("float32",)), "residual": _NEW_RESIDUAL},
    rounding={
        "vt": ("residual = round(x + residual)", "y = round(residual_or_x * inv * w) to x's dtype",
               "scale = max(f32(min(max|y|, scale_ub) / 448), f32(1 / (448 * 512)))", "out = e4m3(f32(y / scale))"),
        "vllm": ('y as rms_norm under "vllm_native"', "scale and out as vt"),
    },
    order="that of rms_norm",
    parity=Parity("bytes"),
    mirror=_NORM_BOUND,
    nan='passed over in the maximum, then 0x7F ("vllm": 0x7E)',
    layout="scale is [..., M, G]; column_major swaps these two axes in memory",
    upstream=f"vllm/_custom_ops.py: rms_norm_per_block_quant; {_VLLM}.rms_norm_per_block_quant",
    examples=(
        {"...": (5,), "H": 256, "G": 2, "x": "bfloat16", "weight": "bfloat16"},
        {"...": (2, 2), "H": 33, "G": 3, "x": "float32", "residual": "float32", "group_size": 16},
        {"...": (3,), "H": 128, "G": 2, "x": "bfloat16", "weight": "bfloat16", "residual": "bfloat16",
         "group_size": 64, "column_major": True, "scale_ub": "float32", "rounding": "vllm"},
    ),
    requires=(bound_is_positive, _residual_has_dtype_of_x),
)  # fmt: skip
def rms_norm_per_block_quant(
    nx, x, weight, *, residual=None, eps=1e-6, group_size=128, scale_ub=None, column_major=False, rounding="vt"
):
    """y = rms_norm(x, weight), scale[t, g] = max(max|y[t, g]| / 448, 1 / (448 * 512)), out = e4m3(y / scale).

    Shapes: x, residual [..., H]; weight [H]; scale_ub float32 [1] or None; out codes [..., H]; scale float32 [..., G],
    G = ceil(H / group_size), a last group that is not full counting as filled up with zeros. Returns `(out, scale)`, or
    `(out, scale, residual)` where a residual is given.
    Rounding points: y to x's dtype, the scale and the quotient (a true division) to float32, then the code.
    Errors: ContractError for mismatched shapes or dtypes, eps < 0, group_size < 1, a bad scale_ub.
    Source: vllm/_custom_ops.py, rms_norm_per_block_quant.
    """
    y, residual = _norm(nx, x, weight, residual, eps, False, _DYNAMIC_NORM[rounding])
    found = _block_quant(nx, y, group_size, column_major, rounding, size_ub=scale_ub)
    return found if residual is None else (*found, residual)


_SILU_WHY = "silu_and_mul's roundings (3 in float32) and flips of its stores (up to three), as in " + _NORM_WHY


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... 2*D"), "scale": SCALE, "rounding": ROUNDINGS},
    returns={"out": Tensor("... D", ("uint8",), holds="float8_e4m3fn")},
    rounding={
        "vt": ("y = round(silu(gate) * up) to x's dtype", "out = e4m3(f32(y * f32(1 / scale)))"),
        "vllm": ("a = round(silu(gate))", "y = round(a * up)", "out as vt"),
        "vllm_native": ("as vllm",),
    },
    parity=Parity("bytes"),
    mirror=Bound("1", scale=_sizes, ulps=1, why=_SILU_WHY),
    nan='code 0x7F, under "vllm" 0x7E; silu(-inf) is NaN',
    upstream=f"{_VLLM}.silu_and_mul_quant; vllm/compilation/passes/fusion/act_quant_fusion.py",
    examples=(
        {"...": (5,), "D": 64, "x": "bfloat16"},
        {"...": (2, 3), "D": 33, "x": "float32"},
        {"...": (4,), "D": 40, "x": "bfloat16", "rounding": "vllm"},
    ),
    requires=(scale_is_positive,),
)
def silu_and_mul_quant(nx, x, scale, *, rounding="vt"):
    """y = silu(x[..., :D]) * x[..., D:], out = e4m3(y * (1 / scale)).

    Shapes: x [..., 2*D], gate half first; scale float32 [1]; out codes [..., D].
    Rounding points: those of `silu_and_mul` under the same `rounding`, then those of `quant_fp8_static`.
    Errors: ContractError for an odd last axis, a scale that is not positive and finite.
    Source: vllm/compilation/passes/fusion/act_quant_fusion.py.
    """
    y = nx.load(silu_and_mul.body(nx, x, rounding=rounding))
    return e4m3(nx, times_reciprocal(nx, y, nx.load(scale)), NAN_CODES[rounding])


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... 2*D"), **_BLOCK_ARGS, "rounding": _TWO},
    returns={"out": Tensor("... D", ("uint8",), holds="float8_e4m3fn"), "scale": Tensor("... G", ("float32",))},
    rounding={
        "vt": ("y = round(silu(gate) * up) to x's dtype",
               "scale = max(min(f32(max|y| / 448), scale_ub), f32(1 / (448 * 512)))", "out = e4m3(f32(y / scale))"),
        "vllm": ("y = f32(silu(gate) * up), never rounded to x's dtype", "scale and out as vt"),
    },
    parity=Parity("bytes"),
    mirror=Bound("1", scale=_sizes, ulps=1, why=_SILU_WHY),
    nan='passed over in the maximum, then 0x7F ("vllm": 0x7E)',
    layout="scale is [..., M, G]; column_major swaps these two axes in memory",
    upstream=f"vllm/_custom_ops.py: silu_and_mul_per_block_quant; {_VLLM}.silu_and_mul_per_block_quant",
    examples=(
        {"...": (5,), "D": 256, "G": 2, "x": "bfloat16"},
        {"...": (2, 3), "D": 33, "G": 3, "x": "float32", "group_size": 16},
        {"...": (4,), "D": 128, "G": 2, "x": "bfloat16", "group_size": 64, "column_major": True,
         "scale_ub": "float32", "rounding": "vllm"},
    ),
    requires=(bound_is_positive,),
)  # fmt: skip
def silu_and_mul_per_block_quant(nx, x, *, group_size=128, scale_ub=None, column_major=False, rounding="vt"):
    """y = silu(x[..., :D]) * x[..., D:], scale[t, g] = max(max|y[t, g]| / 448, 1 / (448 * 512)), out = e4m3(y / scale).

    Shapes: x [..., 2*D], gate half first; scale_ub float32 [1] or None; out codes [..., D]; scale float32 [..., G],
    G = ceil(D / group_size), a last group that is not full counting as filled up with zeros. Unlike elsewhere, scale_ub
    bounds the scale, not max|y|.
    Rounding points: "vt" rounds y to x's dtype, as `silu_and_mul` stores it; "vllm" keeps float32. Then the scale and
    the quotient (a true division) to float32, then the code.
    Errors: ContractError for an odd last axis, group_size < 1, a bad scale_ub.
    Source: vllm/_custom_ops.py, silu_and_mul_per_block_quant.
    """
    if rounding == "vllm":
        half = x.shape[-1] // 2
        y = single(nx, nx.mul(nx.silu(nx.load(x[..., :half])), nx.load(x[..., half:])))
    else:
        y = nx.load(silu_and_mul.body(nx, x, rounding="vt"))
    return _block_quant(nx, y, group_size, column_major, rounding, scale_ub=scale_ub)
