"""Weights of 4 bits under e4m3 scales of groups, times e4m3 activations: the product is rounded to e4m3 first.

A scale is kept as the eight codes of its products with -8 ... -1; a code of a weight picks one of them and its sign, so
that a kernel multiplies nothing to dequantise.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import lowbit
from vtlab.ops.contract import EXACT, Bound, Choice, Parity, Tensor, refuse
from vtlab.ops.table import op

from .lowbit import words
from .quant_fp8 import E4M3, dynamic_per_token_scaled_fp8_quant, e4m3

ROW = "KERNEL-GEMM-W4A8"
GROUP = 128
_UTILS = "vllm/model_executor/layers/quantization/utils/quant_utils.py"
_DIVISOR = 8.0
"""|q| <= 8 times a scale of at most 448 / 8 is at most 448."""


def no_nan(name: str):
    """A check that e4m3 codes hold no NaN; on a GPU the host does not look."""

    def check(arguments, axes):
        value = arguments[name]
        if isinstance(value, np.ndarray) and (value & 0x7F == 0x7F).any():
            raise refuse(name, "a code of NaN", "codes of numbers")

    check.__doc__ = f"{name} holds no NaN; on a GPU the host does not look"
    return check


def _scale_codes(shape: str, **more) -> Tensor:
    """Codes of e4m3 scales of at most 56."""

    def draw(rng, axes):
        from vtlab.ops.shapes import sizes

        return rng.integers(0, 0x67, sizes(shape, {k: v for k, v in axes.items() if isinstance(v, int)}))

    return Tensor(shape, ("uint8",), values=draw, holds="float8_e4m3fn", **more)


def value_of(nx, codes) -> np.ndarray:
    """The numbers that e4m3 codes stand for."""
    return nx.load(codes.view(E4M3))


def _finite_groups(arguments, axes):
    """scales are finite and their last axis has a group; on a GPU the host does not look at them"""
    s = arguments["scales"]
    if axes["C"] < 1:
        raise refuse("scales", f"shape {tuple(s.shape)}", "a group or more in the last axis")
    if isinstance(s, np.ndarray) and not np.isfinite(s.astype(np.float32)).all():
        raise refuse("scales", "a NaN or an infinity", "finite numbers")


_finite_groups.finite = ("scales",)


@op(
    row=ROW,
    rows="...",
    args={
        "scales": Tensor("... C", ("bfloat16",), values="positive"),
        "rounding": Choice(("vllm", "vllm_native")),
    },
    returns={
        "out": Tensor("... C", ("uint8",), holds="float8_e4m3fn"),
        "channel_scale": Tensor("... 1", ("float32",)),
    },
    rounding={
        "vllm": ("p, c = dynamic_per_token_scaled_fp8_quant(scales), as vLLM's CUDA op rounds",
                 "out = e4m3(value(p) / 8), exact but for subnormal codes", "channel_scale = 8 c, exact"),
        "vllm_native": ("as vllm, with p and c as vLLM's Python rounds them",),
    },
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="float32 roundings are part of the definition, see dynamic_per_token_scaled_fp8_quant"),
    nan="refused",
    ties="to the even code",
    upstream=f"{_UTILS}: convert_bf16_scales_to_fp8",
    examples=({"...": (5,), "C": 8}, {"...": (2, 3), "C": 3, "rounding": "vllm_native"}),
    requires=(_finite_groups,),
)  # fmt: skip
def w4a8_quantize_scales(nx, scales, *, rounding="vllm"):
    """out = e4m3(e4m3(scales / c) / 8), channel_scale = 8 c, c the dynamic scale of one output channel's groups.

    Shapes: scales bfloat16 [..., C], C groups of a channel; out codes uint8 [..., C]; channel_scale float32 [..., 1].
    Rounding points: those of the quantiser by token, then an eighth of its value, to e4m3: codes in or into the
    subnormal range round again.
    Errors: ContractError for a NaN or an infinity.
    Source: vllm/model_executor/layers/quantization/utils/quant_utils.py, convert_bf16_scales_to_fp8.
    """
    codes, channel = dynamic_per_token_scaled_fp8_quant.body(nx, scales, rounding=rounding)
    out = e4m3(nx, nx.div(value_of(nx, codes), _DIVISOR))
    return out, nx.store(nx.mul(nx.load(channel), nx.const(_DIVISOR)), np.float32)


@op(
    row=ROW,
    args={"t": words("R", "C")},
    returns={"out": Tensor("R C", ("int32",))},
    rounding=("none: bits are moved",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="none",
    upstream=f"{_UTILS}: convert_packed_uint4b8_to_signed_int4_inplace",
    examples=({"R": 3, "C": 5},),
)
def convert_packed_uint4b8_to_signed_int4(nx, t):
    """Each code q of 4 bits becomes q - 8 in two's complement: its highest bit flips.

    Shapes: t, out int32 [R, C], eight codes a word.
    Rounding points: none.
    Errors: ContractError for another dtype or rank.
    Source: vllm/model_executor/layers/quantization/utils/quant_utils.py.
    """
    return (t.view(np.uint32) ^ np.uint32(0x88888888)).view(np.int32)


def _whole_tiles(arguments, axes):
    """K is a multiple of 32, N of 16"""
    rows, columns = arguments["b"].shape
    if rows % 4 or columns % 16:
        raise refuse("b", f"shape {(rows, columns)}", "rows in fours, K = 32, and columns in sixteens")


_WORDS = {
    "row": ROW,
    "args": {"b": words("W", "N")},
    "returns": {"out": Tensor("W N", ("int32",))},
    "rounding": ("none: codes become other codes and are moved",),
    "parity": Parity("bytes"),
    "mirror": EXACT,
    "nan": "none",
    "layout": "column after column (vLLM's result is column-major), the words are tiles of 32 (k) x 16 (n), along n "
    "first: value v of lane l is k = 4 (l % 4) + v % 4 + 16 (v / 8), n = l / 4 + 8 (v / 4 % 2)",
    "examples": ({"W": 4, "N": 32}, {"W": 16, "N": 16}),
    "requires": (_whole_tiles,),
}


def encoded(q: np.ndarray) -> np.ndarray:
    """Codes whose bit 3 says below zero and whose low bits name an entry of a scale's table: 1 ... 7 become 7 ... 1."""
    return np.where((q > 0) & (q < 8), 8 - q, q).astype(np.int32)


@op(upstream="vllm/_custom_ops.py: cutlass_encode_and_reorder_int4b", **_WORDS)
def cutlass_encode_and_reorder_int4b(nx, b):
    """Codes v = 1 ... 7 become 8 - v, others stay, and codes are in the order in which a warp's lanes multiply them.

    Shapes: b int32 [K / 8, N], two's complement of 4 bits packed along K; out int32 of that shape in name only: its
    words, column after column, are tiles.
    Rounding points: none.
    Errors: ContractError for K no multiple of 32, N no multiple of 16.
    Source: vllm/_custom_ops.py, cutlass_encode_and_reorder_int4b, its results on an H200.
    """
    flat = lowbit.fragments(encoded(lowbit.unpack(b, 4, 0)))
    return np.ascontiguousarray(lowbit.pack(flat, 4, 0).reshape(b.shape[::-1]).T)


def encoded_rows(b: np.ndarray) -> np.ndarray:
    """Encoded codes [K, N] of reordered words [K / 8, N]."""
    return encoded_columns(b.T)


def encoded_columns(b: np.ndarray) -> np.ndarray:
    """Encoded codes [K, N] of reordered words [N, K / 8], a column's words side by side."""
    return lowbit.fragment_rows(lowbit.unpack(b.reshape(-1), 4, 0), 8 * b.shape[1], b.shape[0])


@op(upstream="vllm/_custom_ops.py: cutlass_encode_and_reorder_int4b, undone", **_WORDS)
def cutlass_decode_int4b(nx, b):
    """The words packed along K that cutlass_encode_and_reorder_int4b made `b` of; the code is its own inverse.

    Shapes: b, out int32 [K / 8, N].
    Rounding points: none.
    Errors: as cutlass_encode_and_reorder_int4b's.
    Source: vllm/_custom_ops.py, cutlass_encode_and_reorder_int4b.
    """
    return lowbit.pack(encoded(encoded_rows(b)), 4, 0)


@op(
    row=ROW,
    args={"scales": _scale_codes("G N")},
    returns={"out": Tensor("G N 8", ("uint8",), holds="float8_e4m3fn")},
    rounding=("out[..., i] = e4m3(value(scale) * (i - 8))",),
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="a product of at most 8 bits is exact in float32"),
    nan="refused",
    ties="to the even code",
    upstream="vllm/_custom_ops.py: cutlass_pack_scale_fp8",
    examples=({"G": 2, "N": 16}, {"G": 1, "N": 3}),
    requires=(no_nan("scales"),),
)
def cutlass_pack_scale_fp8(nx, scales):
    """out[g, n, i] = e4m3(scale[g, n] * (i - 8)), i = 0 ... 7.

    Shapes: scales codes uint8 [G, N]; out codes uint8 [G, N, 8].
    Rounding points: one, the code, saturating: of scales above 56 the largest products.
    Errors: ContractError for a code of NaN.
    Source: vllm/_custom_ops.py, cutlass_pack_scale_fp8.
    """
    return e4m3(nx, nx.mul(value_of(nx, scales)[..., None], nx.load(np.arange(-8, 0))))


def _groups_of_128(arguments, axes):
    """K is 128 for every group of the scales"""
    rows = arguments["q"].shape[0]
    if axes["G"] < 1 or 8 * rows != GROUP * axes["G"]:
        raise refuse("q", f"K = {8 * rows}", f"{GROUP * axes['G']}: groups of {GROUP}")


@op(
    row=ROW,
    args={"q": words("16*G", "N"), "scales": _scale_codes("G N")},
    returns={"out": Tensor("128*G N", ("uint8",), holds="float8_e4m3fn")},
    rounding=("out = e4m3(q * value(scale))",),
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="a product of at most 8 bits is exact in float32"),
    nan="refused",
    ties="to the even code",
    upstream="vllm/model_executor/kernels/linear/mixed_precision/cutlass.py",
    examples=({"G": 2, "N": 16}, {"G": 1, "N": 3}),
    requires=(_groups_of_128, no_nan("scales")),
)
def w4a8_dequantize(nx, q, scales):
    """out[k, n] = e4m3(q[k, n] * scale[k / 128, n]), +0 for a q of zero.

    Shapes: q int32 [K / 8, N], two's complement of 4 bits packed along K; scales codes uint8 [K / 128, N]; out codes
    uint8 [K, N].
    Rounding points: one, the code.
    Errors: ContractError for groups that are not of 128, a code of NaN.
    Source: vllm/model_executor/kernels/linear/mixed_precision/cutlass.py.
    """
    value = lowbit.unpack(q, 4, 0)
    value = (value - 16 * (value > 7)).reshape(len(scales), GROUP, scales.shape[1])
    out = e4m3(nx, nx.mul(nx.load(value), value_of(nx, scales)[:, None]))
    return np.where(value == 0, np.uint8(0), out).reshape(-1, scales.shape[1])
