"""Products of NVFP4 operands, both sides in blocks of 16 with e4m3 scales, or the weights alone.

A value under its block's scale has at most six significant bits, a product of two at most twelve: in float32, and from
bfloat16 operands, all of them are exact, and only the sum rounds. So one product of bfloat16 matrices with a float32
factor is the block-scaled product, up to the order of its sum.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops import nvfp4
from vtlab.ops.contract import Bound, Choice, Flag, Tensor, refuse
from vtlab.ops.numerics import TRUTH
from vtlab.ops.nvfp4 import BLOCK
from vtlab.ops.table import op

from .fp4 import block_scales, bytes_of_codes, bytes_of_scales, decoded, in_groups, single
from .lowbit import STORED_TWICE
from .matmul import ORDER

_ROW = "KERNEL-GEMM-NVFP4-W4A4"
_ALPHA = Tensor("1", ("float32",), values=lambda rng, axes: np.array([3.7e-6]))
_OUT = Choice(("bfloat16", "float16", "float32"))
_NAN = "a scale of 0x7F makes its row of a, or column of b, NaN; otherwise as in any product"
_STEPS = "(2 * B + 511) // 512 * 16 + 33"
_WHY = (
    "a chain of one fma for each of its ceil(K / 512) * 16 products, then at most 32 sums, and the product with alpha"
)


def _codes(name: str):
    return lambda rng, axes: bytes_of_codes(rng, {"...": (axes[name],), "B": axes["B"]})


def _scales(name: str):
    """Codes of e4m3 numbers around 100 where `name` has rows, in whichever shape the call has."""

    def draw(rng, axes):
        shape = axes.get(f"{name}_scales", (axes[name], axes["B"] // 8))
        return bytes_of_scales(rng, {"...": (), "M": shape[0], "C": shape[1]})

    return draw


def scales_fit(arguments, axes):
    """K is a multiple of 16, and scales are [rows, K/16], or whole tiles [R, C]"""
    if axes["B"] % (BLOCK // 2):
        raise refuse("b", f"{2 * axes['B']} codes a row", f"a multiple of {BLOCK}")
    blocks = 2 * axes["B"] // BLOCK
    for name, rows in (("block_scale_a", axes["M"]), ("block_scale_b", axes["N"])):
        if name in arguments:
            nvfp4.check_scales(name, arguments[name].shape, (rows,), blocks, arguments["is_sf_swizzled_layout"])


def scaled_values(nx, packed, scale, swizzled):
    """e2m1 * e4m3 [rows, K], exact in float32."""
    value = decoded(nx, packed)
    rows, width = value.shape
    scales = block_scales(nx, scale, (rows,), width // BLOCK, swizzled)
    return nx.mul(in_groups(nx, value, BLOCK), scales[..., None]).reshape(rows, width)


def _sizes(arguments, results):
    """alpha * sum_k |a_k| |b_k|."""
    swizzled = arguments["is_sf_swizzled_layout"]
    a, b = (np.abs(scaled_values(TRUTH, arguments[x], arguments[f"block_scale_{x}"], swizzled)) for x in "ab")
    return np.abs(float(arguments["alpha"][0])) * (a @ b.T)


@op(
    row=_ROW,
    args={
        "a": Tensor("M B", ("uint8",), values=_codes("M"), holds="float4_e2m1fn"),
        "b": Tensor("N B", ("uint8",), values=_codes("N"), holds="float4_e2m1fn"),
        "block_scale_a": Tensor("* Ca", ("uint8",), values=_scales("M"), holds="float8_e4m3fn"),
        "block_scale_b": Tensor("* Cb", ("uint8",), values=_scales("N"), holds="float8_e4m3fn"),
        "alpha": _ALPHA,
        "out_dtype": _OUT,
        "is_sf_swizzled_layout": Flag(),
    },
    returns={"out": Tensor("M N", ("bfloat16", "float16", "float32"))},
    rounding=("out = round(alpha * sum_k (e2m1(a) * e4m3(scale_a)) * (e2m1(b) * e4m3(scale_b))), in out_dtype",),
    order=str(ORDER),
    parity=STORED_TWICE,
    mirror=Bound(_STEPS, scale=_sizes, ulps=1, why=_WHY),
    nan=_NAN,
    layout="scales as scaled_fp4_quant gives them",
    upstream="vllm/_custom_ops.py: cutlass_scaled_fp4_mm; nvfp4_emulation_utils.py: run_nvfp4_emulations",
    examples=(
        {"M": 3, "N": 5, "B": 32, "is_sf_swizzled_layout": False, "out_dtype": "float32"},
        {"M": 2, "N": 130, "B": 40, "M_scales": (128, 8), "N_scales": (256, 8), "is_sf_swizzled_layout": True},
        {"M": 0, "N": 2, "B": 8, "is_sf_swizzled_layout": False},
    ),
    requires=(scales_fit,),
)
def cutlass_scaled_fp4_mm(
    nx, a, b, block_scale_a, block_scale_b, alpha, *, out_dtype=ml_dtypes.bfloat16, is_sf_swizzled_layout=True
):
    """out[m, n] = alpha * sum_k e2m1(a[m, k]) e4m3(scale_a[m, k / 16]) e2m1(b[n, k]) e4m3(scale_b[n, k / 16]).

    Shapes: a uint8 [M, B], b uint8 [N, B], two codes a byte, K = 2 * B; block_scale_a, block_scale_b uint8 [M, B/8] and
    [N, B/8], or in tiles; alpha float32 [1], the product of both operands' 1 / global scale; out [M, N].
    Rounding points: one, the store of `out`; scaled values and their products are exact. vLLM's emulation rounds each
    operand, its global scale included, to out_dtype instead, and has no alpha.
    Errors: ContractError for mismatched shapes, K no multiple of 16, scales of another shape.
    Source: vllm/_custom_ops.py, cutlass_scaled_fp4_mm; PTX ISA, tcgen05.mma.block_scale.
    """
    left = scaled_values(nx, a, block_scale_a, is_sf_swizzled_layout)
    right = scaled_values(nx, b, block_scale_b, is_sf_swizzled_layout)
    total = nx.matmul(left, right.astype(np.float32), order=ORDER, fused=True)
    return nx.store(nx.mul(total, nx.load(alpha)), out_dtype)


def _weight_sizes(arguments, results):
    """sum_k |x_k| |w_k|."""
    w = np.abs(_weights(TRUTH, arguments["b"], arguments["block_scale_b"], arguments["global_scale"],
                        arguments["is_sf_swizzled_layout"]).astype(np.float64))  # fmt: skip
    return np.abs(arguments["x"].astype(np.float64)) @ w.T


def _weights(nx, b, scale, global_scale, swizzled):
    """bfloat16 weights [N, K]."""
    factor = single(nx, nx.mul(block_scales(nx, scale, b.shape[:1], b.shape[1] // 8, swizzled), nx.load(global_scale)))
    value = in_groups(nx, decoded(nx, b), BLOCK)
    return nx.store(single(nx, nx.mul(value, factor[..., None])).reshape(len(b), 2 * b.shape[1]), ml_dtypes.bfloat16)


@op(
    row=_ROW,
    args={
        "x": Tensor("M 2*B", ("bfloat16", "float32")),
        "b": Tensor("N B", ("uint8",), values=_codes("N"), holds="float4_e2m1fn"),
        "block_scale_b": Tensor("* Cb", ("uint8",), values=_scales("N"), holds="float8_e4m3fn"),
        "global_scale": Tensor("1", ("float32",), values=lambda rng, axes: np.array([3.7 / (448 * 6)])),
        "out_dtype": Choice(("bfloat16", "float16", "float32"), optional=True),
        "is_sf_swizzled_layout": Flag(),
    },
    returns={"out": Tensor("M N", ("bfloat16", "float16", "float32"))},
    rounding=("b = f32(e4m3(scale) * global_scale)", "w = bf16(f32(e2m1(code) * b))",
              "out = round(sum_k x * w), in out_dtype"),
    order=str(ORDER),
    parity=STORED_TWICE,
    mirror=Bound("(2 * B + 511) // 512 * 16 + 32", scale=_weight_sizes, ulps=1, why=_WHY.partition(", and")[0]),
    nan=_NAN,
    layout="scales as scaled_fp4_quant gives them",
    upstream="vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py",
    examples=(
        {"M": 3, "N": 5, "B": 32, "x": "bfloat16", "is_sf_swizzled_layout": False},
        {"M": 2, "N": 130, "B": 40, "N_scales": (256, 8), "x": "float32", "is_sf_swizzled_layout": True},
    ),
    requires=(scales_fit,),
)  # fmt: skip
def matmul_nvfp4(nx, x, b, block_scale_b, global_scale, *, out_dtype=None, is_sf_swizzled_layout=True):
    """out[m, n] = sum_k x[m, k] * bf16(e2m1(b[n, k]) e4m3(scale_b[n, k / 16]) global_scale): weights alone in NVFP4.

    Shapes: x [M, 2 * B]; b uint8 [N, B], two codes a byte; block_scale_b uint8 [N, B/8], or in tiles; global_scale
    float32 [1], the reciprocal of what the quantiser was given; out [M, N] in out_dtype, by default that of x.
    Rounding points: the weights to bfloat16, through float32 products, then the store of `out`.
    Errors: ContractError for mismatched shapes, K no multiple of 16, scales of another shape.
    Source: vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py.
    """
    weights = _weights(nx, b, block_scale_b, global_scale, is_sf_swizzled_layout)
    return nx.store(nx.matmul(nx.load(x), weights, order=ORDER, fused=True), out_dtype or x.dtype)
