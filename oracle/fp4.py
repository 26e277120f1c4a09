"""NVFP4: e2m1 codes, two to a byte, under an e4m3 scale for each block of 16 neighbours and one float32 for all.

The value of a code is e2m1 * (block scale / global scale); the global scale, 448 * 6 / max|x| in calibrations, brings
the block scales into the range of e4m3. Every float32 operation on the way to a code is a rounding point of the
definition, so truth and mirror agree to the byte.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from vtlab.ops import nvfp4
from vtlab.ops.contract import EXACT as MOVED
from vtlab.ops.contract import Bound, Choice, Flag, Parity, Tensor, refuse
from vtlab.ops.nvfp4 import BLOCK
from vtlab.ops.table import op

from .quant_fp8 import E4M3, e4m3, in_groups, largest, single

_ROW = "KERNEL-GEMM-NVFP4-W4A4"
_EMULATION = "vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py"
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
_PAIRS = nvfp4.unpack(np.arange(256, dtype=np.uint8)[:, None]).view(E2M1).astype(np.float32)
SIXTH = float(np.float32(1 / 6))
ROUNDINGS = Choice(("vt", "vllm_native"))
OF_ZERO = {"vt": 0.0, "vllm_native": float(np.float32(1e-8))}
"""The reciprocal of zero: vLLM's reference divides by 1e8 there."""
GLOBAL_SCALE = Tensor("1", ("float32",), values=lambda rng, axes: np.array([448 * 6 / 3.7]))
CODES = Tensor("... K/2", ("uint8",), holds="float4_e2m1fn")
SCALES = Tensor("... C", ("uint8",), holds="float8_e4m3fn")
EXACT = Bound(ulps=0, why="float32 roundings are part of the definition: a product or quotient of two float32 rounds "
              "to the same float32 from float64 as directly")  # fmt: skip
NAN = ('passed over in the maximum of its block, then code 7; "vllm_native": one NaN makes the scale of its block 0x7F '
       "and its codes 7. A block with an infinity has the largest scale")  # fmt: skip
LAYOUT = (
    "byte j holds element 2j in its low half. Scales are [..., K/16], or with is_sf_swizzled_layout one matrix [R, C] "
    "of all rows in tiles of 128 x 4, R and C filled up with zeros to whole tiles: scale (r, c) is byte "
    "((r//128 * C/4 + c//4) * 32 + r%32) * 16 + r%128//32 * 4 + c%4"
)


def bytes_of_scales(rng, axes):
    """Codes of e4m3 numbers around 100, for axes ... M C."""
    lead = axes.get("...", ()) if "B" not in axes else ()
    return rng.integers(0x60, 0x70, (*lead, axes["M"], axes["C"]))


def bytes_of_codes(rng, axes):
    """Two codes of e2m1 a byte."""
    return rng.integers(0, 256, (*axes["..."], axes["B"]))


def whole_blocks(arguments, axes):
    """K is a multiple of 16"""
    if axes["K"] % BLOCK:
        raise refuse("x", f"K = {axes['K']}", f"a multiple of {BLOCK}")


def global_scale_is_finite(arguments, axes):
    """the global scale is finite, of either sign or zero; on a GPU the host does not read it"""
    value = arguments["input_global_scale"]
    if isinstance(value, np.ndarray) and not np.isfinite(value[0]):
        raise refuse("input_global_scale", value[0], "a finite number")


def reciprocal(nx, value, rounding):
    """float32(1 / value), and of zero what the variant says."""
    return nx.where(value == 0, OF_ZERO[rounding], single(nx, nx.div(1, value)))


def e2m1(nx, value, rounding):
    """The codes of values: to nearest even on 0, .5, 1, 1.5, 2, 3, 4, 6, saturating; a NaN has code 7.

    "vt" has no -0; vLLM's reference leaves the sign on what it rounds to zero, not on a zero.
    """
    if rounding == "vllm_native":
        value = nx.where(value == 0, 0, value)
    codes = nx.store(value, E2M1, nan=6.0).view(np.uint8)
    return nvfp4.positive_zeros(codes) if rounding == "vt" else codes


def block_quant(nx, value, global_scale, swizzled, rounding):
    """(codes two to a byte, block scales) of values [..., K] in the compute dtype."""
    grouped = in_groups(nx, value, BLOCK)
    size = largest(nx, grouped, keep_nan=rounding == "vllm_native")
    scale = single(nx, nx.mul(global_scale, single(nx, nx.mul(size, SIXTH))))
    stored = nx.load(nx.store(scale, E4M3))
    factor = reciprocal(nx, single(nx, nx.mul(stored, reciprocal(nx, global_scale, rounding))), rounding)
    codes = e2m1(nx, single(nx, nx.mul(grouped, factor)).reshape(value.shape), rounding)
    scales = e4m3(nx, scale[..., 0])
    return nvfp4.pack(codes), nvfp4.tile(scales) if swizzled else scales


@op(
    row=_ROW,
    args={
        "x": Tensor("... K", layout="rows"),
        "input_global_scale": GLOBAL_SCALE,
        "is_sf_swizzled_layout": Flag(),
        "rounding": ROUNDINGS,
    },
    returns={"out": CODES, "scale": SCALES},
    rounding={
        "vt": ("s = f32(g * f32(max|x| * f32(1/6))), g = input_global_scale", "scale = e4m3(s)",
               "b = f32(f32(scale) * f32(1 / g))", "f = f32(1 / b)", "v = f32(x * f)", "out = e2m1(v)",
               "1 / 0 = 0; no code of -0"),
        "vllm_native": ("as vt, but 1 / 0 is f32(1e-8), and negative values that round to zero keep their sign",),
    },
    parity=Parity("bytes"),
    mirror=EXACT,
    nan=NAN,
    ties="to the even code",
    layout="x may be strided rows; " + LAYOUT,
    upstream="vllm/_custom_ops.py: scaled_fp4_quant; nvfp4_emulation_utils.py: ref_nvfp4_quant",
    examples=(
        {"...": (5,), "K": 64, "x": "bfloat16", "is_sf_swizzled_layout": False},
        {"...": (2, 3), "K": 48, "x": "float32", "is_sf_swizzled_layout": True},
        {"...": (), "K": 32, "x": "float16", "is_sf_swizzled_layout": True, "rounding": "vllm_native"},
        {"...": (130,), "K": 80, "x": "bfloat16"},
    ),
    requires=(whole_blocks, global_scale_is_finite),
)  # fmt: skip
def scaled_fp4_quant(nx, x, input_global_scale, *, is_sf_swizzled_layout=True, rounding="vt"):
    """scale[t, b] = e4m3(g * max|x[t, b]| / 6) over blocks of 16; out = e2m1(x / (scale / g)).

    Shapes: x [..., K]; input_global_scale g float32 [1], a factor; out uint8 [..., K/2], two codes a byte; scale uint8
    [..., K/16], or in tiles [R, C], R and C the rows and K/16 filled up to multiples of 128 and 4.
    Rounding points: every product and quotient to float32, in the order of vLLM's Python reference, with true
    divisions; then the codes. The CUDA op, which no GPU before Blackwell runs, takes approximate reciprocals of 6, g
    and b instead, so that its scales and codes may differ where one lies within an ulp or two of a tie, and it keeps
    the sign of zero.
    Errors: ContractError for a K that is no multiple of 16, a global scale that is not finite.
    Source: vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py; PTX ISA, tcgen05, layout
    of scale factors (4X).
    """
    return block_quant(nx, nx.load(x), nx.load(input_global_scale), is_sf_swizzled_layout, rounding)


@op(
    row=_ROW,
    args={"scale": Tensor("... M C", ("uint8",), values=bytes_of_scales, holds="float8_e4m3fn")},
    returns={"out": Tensor("... R Q", ("uint8",), holds="float8_e4m3fn")},
    rounding=("none: bytes are moved",),
    parity=Parity("bytes"),
    mirror=MOVED,
    nan="moved like any byte",
    layout=LAYOUT,
    upstream="vllm/model_executor/layers/quantization/utils/nvfp4_utils.py: swizzle_blockscale",
    examples=({"M": 130, "C": 5, "...": ()}, {"M": 3, "C": 8, "...": (2,)}, {"M": 128, "C": 4, "...": (1, 2)}),
)
def swizzle_blockscale(nx, scale):
    """out = the scales of each matrix [M, C] in tiles of 128 x 4.

    Shapes: scale uint8 [..., M, C]; out [..., R, Q], M and C filled up with zeros to multiples of 128 and 4.
    Rounding points: none.
    Errors: ContractError for fewer than two axes, a dtype other than uint8.
    Source: vllm/model_executor/layers/quantization/utils/nvfp4_utils.py.
    """
    *lead, rows, blocks = scale.shape
    out = np.empty((math.prod(lead), *nvfp4.tiled_shape(rows, blocks)), np.uint8)
    for target, one in zip(out, scale.reshape(len(out), rows, blocks)):
        target[...] = nvfp4.tile(one)
    return out.reshape(*lead, *out.shape[1:])


def scales_fit(arguments, axes):
    """packed and scale are of the same blocks: [..., K/16], or whole tiles [R, C]"""
    packed, scale = arguments["packed"], arguments["scale"]
    *lead, half = packed.shape
    if half % (BLOCK // 2):
        raise refuse("packed", f"{2 * half} codes a row", f"a multiple of {BLOCK}")
    blocks = 2 * half // BLOCK
    nvfp4.check_scales("scale", scale.shape, tuple(lead), blocks, arguments["is_sf_swizzled_layout"])


def decoded(nx, packed):
    """The values [..., K] of codes two to a byte."""
    *lead, half = packed.shape
    return nx.load(_PAIRS.take(packed, axis=0).reshape(*lead, 2 * half))


def block_scales(nx, scale, lead, blocks, swizzled):
    """float32 values [..., K/16] of e4m3 scales in either layout."""
    if swizzled:
        scale = nvfp4.untile(scale, math.prod(lead), blocks).reshape(*lead, blocks)
    return nx.load(scale.view(E4M3))


@op(
    row=_ROW,
    args={
        "packed": Tensor("... B", ("uint8",), values=bytes_of_codes, holds="float4_e2m1fn"),
        "scale": Tensor("* C", ("uint8",), values=bytes_of_scales, holds="float8_e4m3fn"),
        "global_scale": Tensor("1", ("float32",), values=lambda rng, axes: np.array([3.7 / (448 * 6)])),
        "out_dtype": Choice(("bfloat16", "float32", "float16")),
        "is_sf_swizzled_layout": Flag(),
    },
    returns={"out": Tensor("... 2*B", ("bfloat16", "float32", "float16"))},
    rounding=("b = f32(e4m3(scale) * global_scale)", "v = f32(e2m1(code) * b)", "out = round(v) to out_dtype"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="a scale of 0x7F makes its block NaN",
    layout=LAYOUT,
    upstream=f"{_EMULATION}: dequantize_to_dtype",
    examples=(
        {"...": (5,), "B": 32, "M": 5, "C": 4, "is_sf_swizzled_layout": False},
        {"...": (130,), "B": 40, "M": 256, "C": 8, "is_sf_swizzled_layout": True, "out_dtype": "float32"},
    ),
    requires=(scales_fit,),
)
def dequantize_nvfp4(nx, packed, scale, global_scale, *, out_dtype=ml_dtypes.bfloat16, is_sf_swizzled_layout=True):
    """out[t, k] = e2m1(packed[t, k]) * e4m3(scale[t, k / 16]) * global_scale.

    Shapes: packed uint8 [..., B], two codes a byte; scale uint8 [..., B/8], or in tiles [R, C]; global_scale float32
    [1], the reciprocal of what the quantiser was given; out [..., 2 * B].
    Rounding points: both products to float32, the scales' first, then the store. The code of -0 stays -0, as in vLLM's
    reference; its Triton kernel gives 0.
    Errors: ContractError for B no multiple of 8, scales of another shape.
    Source: vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py, dequantize_to_dtype.
    """
    value = decoded(nx, packed)
    *lead, width = value.shape
    scales = block_scales(nx, scale, lead, width // BLOCK, is_sf_swizzled_layout)
    factor = single(nx, nx.mul(scales, nx.load(global_scale)))
    value = in_groups(nx, value, BLOCK)
    return nx.store(single(nx, nx.mul(value, factor[..., None])).reshape(*lead, width), out_dtype)
