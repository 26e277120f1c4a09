"""MXFP4: e2m1 codes, two to a byte, under a power of two (e8m0) for each block of 32; rotations before a quantiser.

A scale byte is an exponent, 2^(byte - 127); 255 is NaN. What is rotated by a Hadamard matrix first has its outliers
spread over a block; the rotation of both operands leaves their product as it is.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from vtlab.ops import nvfp4
from vtlab.ops.contract import EXACT, Bound, Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.numerics import TRUTH, Order, sequential
from vtlab.ops.table import op

from .fp4 import CODES, GLOBAL_SCALE, ROUNDINGS, block_quant, bytes_of_codes, decoded, e2m1, global_scale_is_finite
from .lowbit import STORED_TWICE
from .matmul import ORDER
from .quant_fp8 import in_groups, largest, single

_ROW = "KERNEL-GEMM-QUTLASS-MX"
BLOCK = 32
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
SCALES = Tensor("... C", ("uint8",), holds="float8_e8m0fnu")
QUEST = float(np.float32(2.92247856 / 6))
"""The largest value of a clipped normal distribution in standard deviations, over that of e2m1 (QuEST)."""
TINY = float(np.float32(1e-8))
_SUMS: Order = sequential
LAYOUT = "byte j holds element 2j in its low half"


def _bits(value) -> np.ndarray:
    """The bits of values as float32."""
    return np.asarray(value).astype(np.float32).view(np.uint32)


def power(nx, byte) -> np.ndarray:
    """2^(byte - 127) in the compute dtype; NaN for 255."""
    return nx.load(byte.astype(np.uint8).view(E8M0))


def whole_blocks(arguments, axes):
    """K is a multiple of 32"""
    if axes["K"] % BLOCK:
        raise refuse("x", f"K = {axes['K']}", f"a multiple of {BLOCK}")


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... K", layout="rows"), "rounding": ROUNDINGS},
    returns={"out": CODES, "scale": SCALES},
    rounding={
        "vt": ("scale = 2^(e - 2), e the exponent of f32 max|x| where 1.75 * 2^e counts as 2^(e + 1)",
               "out = e2m1(f32(x / scale)), no code of -0"),
        "vllm_native": ("as vt, but negative values that round to zero keep their sign",),
    },
    parity=Parity("bytes"),
    mirror=Bound(ulps=0, why="a division by a power of two, rounded to float32 by definition"),
    nan="passed over in the maximum of its block, then code 7",
    ties="to the even code; 1.75 * 2^e goes up",
    layout="x may be strided rows; " + LAYOUT,
    upstream="compressed_tensors/quantization/utils/mxfp_utils.py: generate_mx_scales; vllm/_custom_ops.py: "
    "mxfp4_experts_quant",
    examples=(
        {"...": (5,), "K": 64, "x": "bfloat16"},
        {"...": (2, 3), "K": 96, "x": "float32"},
        {"...": (), "K": 32, "x": "float16", "rounding": "vllm_native"},
    ),
    requires=(whole_blocks,),
)  # fmt: skip
def mxfp4_quant(nx, x, *, rounding="vt"):
    """scale[t, b] = 2^(floor(log2(8/7 max|x[t, b]|)) - 2) over blocks of 32; out = e2m1(x / scale).

    Shapes: x [..., K]; out uint8 [..., K/2], two codes a byte; scale uint8 [..., K/32], exponents plus 127.
    Rounding points: the maximum and the quotient to float32, then the codes. The exponent is that of the maximum's bits
    plus 2^21, so that a largest value from 7/8 of a power of two on takes that power and saturates at 6 rather than the
    whole block losing a bit. A block of zeros has scale byte 0.
    Errors: ContractError for a K that is no multiple of 32.
    Source: OCP Microscaling Formats (MX) v1.0; compressed_tensors/quantization/utils/mxfp_utils.py.
    """
    grouped = in_groups(nx, nx.load(x), BLOCK)
    exponent = (_bits(largest(nx, grouped)) + np.uint32(1 << 21)) >> np.uint32(23)
    byte = np.clip(exponent.astype(np.int32) - 2, 0, 254)
    value = single(nx, nx.div(grouped, power(nx, byte))).reshape(x.shape)
    return nvfp4.pack(e2m1(nx, value, rounding)), byte[..., 0].astype(np.uint8)


def is_power_of_two(name: str):
    def check(arguments, axes):
        size = arguments[name] if name == "n" else axes["K"]
        if size < 1 or size & (size - 1) or size > 32768:
            raise refuse(name, size, "a power of two up to 32768")

    check.__doc__ = f"{'n' if name == 'n' else 'the last axis of ' + name} is a power of two up to 32768"
    return check


@op(
    row=_ROW,
    args={"n": Scalar(int, minimum=1, axis="n")},
    returns={"out": Tensor("n n", ("bfloat16",))},
    rounding=("out = bf16(+-n^-0.5)",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="none",
    upstream="compressed_tensors/transform/utils/hadamard.py: deterministic_hadamard_matrix",
    examples=({"n": 32}, {"n": 1}, {"n": 128}),
    requires=(is_power_of_two("n"),),
)
def hadamard(nx, *, n):
    """out[i, j] = (-1)^popcount(i & j) * n^-0.5: Sylvester's Hadamard matrix, its own inverse.

    Shapes: out bfloat16 [n, n].
    Rounding points: one, the store of n^-0.5.
    Errors: ContractError for an n that is no power of two up to 32768.
    Source: Sylvester 1867; compressed_tensors/transform/utils/hadamard.py.
    """
    signs = np.ones((1, 1), np.int8)
    while len(signs) < n:
        signs = np.block([[signs, signs], [signs, -signs]])
    return TRUTH.store(signs * (1 / math.sqrt(n)), ml_dtypes.bfloat16)


def _transform_sizes(arguments, results):
    """n^-0.5 sum |x|, which every element of its row is a sum of, times the levels of sums, and two."""
    x = np.abs(arguments["x"].astype(np.float64))
    width = x.shape[-1]
    return x.sum(axis=-1, keepdims=True) / math.sqrt(width) * (math.log2(width) + 2)


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... K", ("bfloat16", "float16", "float32"))},
    returns={"out": Tensor("... K", like="x")},
    rounding=("out = round(n^-0.5 * sum)",),
    order="butterflies over 1, 2, 4 ... n/2 neighbours, then the product with n^-0.5",
    parity=Parity("bytes"),
    mirror=Bound("1", scale=_transform_sizes, ulps=1, why="log2(n) sums, n^-0.5 and its product"),
    nan="one NaN makes its row NaN",
    upstream="vllm/_custom_ops.py: hadacore_transform",
    examples=({"...": (5,), "K": 64}, {"...": (2, 3), "K": 256, "x": "bfloat16"}, {"...": (), "K": 1}),
    requires=(is_power_of_two("x"),),
)
def hadacore_transform(nx, x):
    """out = x H, H = `hadamard` of the last axis without its rounding; applied twice it gives x back.

    Shapes: x, out [..., K], K a power of two up to 32768.
    Rounding points: one, the store of `out`.
    Errors: ContractError for another K.
    Source: vllm/_custom_ops.py, hadacore_transform (arXiv 2412.08832).
    """
    value, width = nx.load(x), x.shape[-1]
    step = 1
    while step < width:
        pairs = value.reshape(*x.shape[:-1], width // (2 * step), 2, step)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        value = np.stack([nx.add(low, high), nx.sub(low, high)], axis=-2).reshape(x.shape)
        step *= 2
    return nx.store(nx.mul(value, nx.const(1 / math.sqrt(width))), x.dtype)


def _rotation_fits(sizes):
    def check(arguments, axes):
        if axes["R"] not in sizes:
            raise refuse("h", f"R = {axes['R']}", "one of " + ", ".join(map(str, sizes)))
        if axes["K"] % axes["R"]:
            raise refuse("x", f"K = {axes['K']}", f"a multiple of R = {axes['R']}")

    check.__doc__ = f"R is one of {', '.join(map(str, sizes))} and K is a multiple of R"
    return check


def _rotated(nx, x, h):
    """[..., K] in the compute dtype: each R neighbours times h, in float32 or better, never rounded to bfloat16."""
    rows = nx.load(x).reshape(-1, len(h))
    return nx.matmul(rows, np.ascontiguousarray(h.T), order=ORDER, fused=True).reshape(x.shape)


_H = Tensor("R R", ("bfloat16",), values=lambda rng, axes: hadamard(n=axes["R"]).astype(np.float64))
_X = Tensor("... K", ("bfloat16",))
_FLIPS = (
    "the rotation's sum rounds; a code may flip, unless a scale does, for which the statistic of a block has to lie "
    "within some 2^-20 of a power of two, as none of the examples' does"
)


def _shared(nx, grouped, method):
    """The statistic whose power of two is a block's scale."""
    if method == "abs_max":
        return nx.add(largest(nx, grouped, keep_nan=True), TINY)
    mean = nx.div(nx.sum(grouped, order=_SUMS, keepdims=True), float(BLOCK))
    square = nx.div(nx.sum(nx.mul(grouped, grouped), order=_SUMS, keepdims=True), float(BLOCK))
    variance = nx.sub(square, nx.mul(mean, mean))
    deviation = nx.where(variance < 0, 1.0, nx.sqrt(nx.maximum(variance, 0.0)))
    return nx.add(nx.mul(deviation, QUEST), TINY)


@op(
    row=_ROW,
    rows="...",
    args={"x": _X, "h": _H, "method": Choice(("quest", "abs_max"))},
    returns={"out": CODES, "scale": SCALES},
    rounding=("y = x h in float32", "quest: s = sqrt(mean(y^2) - mean(y)^2) * f32(2.92247856 / 6) + f32(1e-8)",
              "abs_max: s = max|y| + f32(1e-8)", "scale = the power of two under f32(s)",
              "out = e2m1(f32(y / scale)), of 3 y under abs_max; no code of -0"),
    order=f"the rotation: {ORDER}; sums of a block: {_SUMS}",
    parity=Parity("bytes"),
    mirror=Bound("0", ulps=1, why=_FLIPS),
    nan="one NaN or infinity makes the scale of its block NaN, 255, and its codes 7",
    layout=LAYOUT + "; scales are [..., K/32]: upstream writes them so at the front of a filled-up buffer",
    upstream="vllm/_custom_ops.py: fusedQuantizeMx (QuTLASS)",
    examples=(
        {"...": (5,), "K": 128, "R": 32, "method": "quest"},
        {"...": (2, 2), "K": 128, "R": 128, "method": "abs_max"},
        {"...": (3,), "K": 64, "R": 64, "method": "quest"},
    ),
    requires=(_rotation_fits((32, 64, 128)),),
)  # fmt: skip
def fused_quantize_mx(nx, x, h, *, method="quest"):
    """y = x h over each R neighbours; scale = 2^floor(log2 s) of blocks of 32; out = e2m1(y / scale), or of 3 y.

    Shapes: x bfloat16 [..., K]; h bfloat16 [R, R]; out uint8 [..., K/2], two codes a byte; scale uint8 [..., K/32],
    exponents plus 127. A value is code * scale, under "abs_max" a third of it: products of two such operands take the
    ninth into alpha.
    Rounding points: the mirror rounds each operation to float32; the truth, like upstream's test reference, nothing
    before the scale's floor and the quotient.
    Errors: ContractError for an R other than 32, 64, 128, a K that is no multiple of it, a dtype other than bfloat16.
    Source: QuTLASS; Panferov et al. 2025 (arXiv 2502.05003, QuEST); vllm/_custom_ops.py, fusedQuantizeMx.
    """
    grouped = in_groups(nx, _rotated(nx, x, h), BLOCK)
    byte = (_bits(_shared(nx, grouped, method)) >> np.uint32(23)) & np.uint32(0xFF)
    value = nx.mul(grouped, 3.0) if method == "abs_max" else grouped
    value = single(nx, nx.div(value, power(nx, byte))).reshape(x.shape)
    return nvfp4.pack(e2m1(nx, value, "vt")), byte[..., 0].astype(np.uint8)


@op(
    row=_ROW,
    rows="...",
    args={"x": _X, "h": _H, "input_global_scale": GLOBAL_SCALE},
    returns={"out": CODES, "scale": Tensor("... C", ("uint8",), holds="float8_e4m3fn")},
    rounding=("y = x h in float32", "scale, out as scaled_fp4_quant of y under vt"),
    order=f"the rotation: {ORDER}",
    parity=Parity("bytes"),
    mirror=Bound("0", ulps=1, why="the rotation's sum rounds, which moves a scale or a code by one at most"),
    nan="as scaled_fp4_quant",
    layout=LAYOUT + "; scales are [..., K/16]: upstream writes them so at the front of a filled-up buffer",
    upstream="vllm/_custom_ops.py: fusedQuantizeNv (QuTLASS)",
    examples=({"...": (5,), "K": 128, "R": 32}, {"...": (2, 2), "K": 48, "R": 16}, {"...": (), "K": 128, "R": 128}),
    requires=(_rotation_fits((16, 32, 64, 128)), global_scale_is_finite),
)
def fused_quantize_nv(nx, x, h, input_global_scale):
    """y = x h over each R neighbours; out, scale = scaled_fp4_quant(y).

    Shapes: x bfloat16 [..., K]; h bfloat16 [R, R]; input_global_scale float32 [1]; out uint8 [..., K/2], two codes a
    byte; scale uint8 [..., K/16].
    Rounding points: y in float32 (the truth: not at all), then those of `scaled_fp4_quant`; upstream takes approximate
    reciprocals.
    Errors: ContractError for an R other than 16, 32, 64, 128, a K that is no multiple of it, a dtype other than
    bfloat16, a global scale that is not finite.
    Source: QuTLASS; vllm/_custom_ops.py, fusedQuantizeNv.
    """
    return block_quant(nx, _rotated(nx, x, h), nx.load(input_global_scale), False, "vt")


def _exponents(name: str, low: int = 120):
    """Bytes of powers of two, around 1 or from `low`, where `name` has rows, in whichever shape the call has."""

    def draw(rng, axes):
        return rng.integers(low, low + 14, axes.get(f"{name}_scales", (axes[name], axes["B"] // 16)))

    return draw


def _scales_fit(arguments, axes):
    """K is a multiple of 32, and scales are [rows, K/32], or whole tiles [R, C]"""
    if axes["B"] % (BLOCK // 2):
        raise refuse("b", f"{2 * axes['B']} codes a row", f"a multiple of {BLOCK}")
    blocks = 2 * axes["B"] // BLOCK
    for name, rows in (("a_sf", axes["M"]), ("b_sf", axes["N"])):
        if name in arguments:
            nvfp4.check_scales(name, arguments[name].shape, (rows,), blocks, arguments["is_sf_swizzled_layout"])


def _values(nx, packed, scale, swizzled):
    """e2m1 * 2^e [rows, K]."""
    value = decoded(nx, packed)
    rows, width = value.shape
    if swizzled:
        scale = nvfp4.untile(scale, rows, width // BLOCK)
    return nx.mul(in_groups(nx, value, BLOCK), power(nx, scale)[..., None]).reshape(rows, width)


def _product_sizes(arguments, results):
    """alpha * sum_k |a_k| |b_k|."""
    swizzled = arguments["is_sf_swizzled_layout"]
    a, b = (np.abs(_values(TRUTH, arguments[x], arguments[f"{x}_sf"], swizzled)) for x in "ab")
    return np.abs(float(arguments["alpha"][0])) * (a @ b.T)


@op(
    row=_ROW,
    args={
        "a": Tensor("M B", ("uint8",), holds="float4_e2m1fn",
                    values=lambda rng, axes: bytes_of_codes(rng, {"...": (axes["M"],), "B": axes["B"]})),
        "b": Tensor("N B", ("uint8",), holds="float4_e2m1fn",
                    values=lambda rng, axes: bytes_of_codes(rng, {"...": (axes["N"],), "B": axes["B"]})),
        "a_sf": Tensor("* Ca", ("uint8",), values=_exponents("M"), holds="float8_e8m0fnu"),
        "b_sf": Tensor("* Cb", ("uint8",), values=_exponents("N"), holds="float8_e8m0fnu"),
        "alpha": Tensor("1", ("float32",), values=lambda rng, axes: np.array([1 / 9])),
        "is_sf_swizzled_layout": Flag(),
    },
    returns={"out": Tensor("M N", ("bfloat16",))},
    rounding=("out = bf16(alpha * sum_k (e2m1(a) * 2^a_sf) * (e2m1(b) * 2^b_sf))",),
    order=str(ORDER),
    parity=STORED_TWICE,
    mirror=Bound("(2 * B + 511) // 512 * 16 + 33", scale=_product_sizes, ulps=1,
                 why="as matmul, and the product with alpha; scaled values and their products are exact"),
    nan="a scale of 255 makes its row of a, or column of b, NaN",
    layout="tiles as `swizzle_blockscale` makes them (upstream: to_blocked)",
    upstream="vllm/_custom_ops.py: matmul_mxf4_bf16_tn, matmul_ada_mxf4_bf16_tn",
    examples=(
        {"M": 3, "N": 5, "B": 32, "is_sf_swizzled_layout": False},
        {"M": 2, "N": 130, "B": 80, "M_scales": (128, 8), "N_scales": (256, 8), "is_sf_swizzled_layout": True},
    ),
    requires=(_scales_fit,),
)  # fmt: skip
def matmul_mxf4_bf16_tn(nx, a, b, a_sf, b_sf, alpha, *, is_sf_swizzled_layout=True):
    """out[m, n] = alpha * sum_k e2m1(a[m, k]) 2^(a_sf[m, k / 32] - 127) e2m1(b[n, k]) 2^(b_sf[n, k / 32] - 127).

    Shapes: a uint8 [M, B], b uint8 [N, B], two codes a byte, K = 2 * B; a_sf, b_sf uint8 [M, B/16] and [N, B/16], or in
    tiles; alpha float32 [1]; out bfloat16 [M, N].
    Rounding points: one, the store of `out`. The mirror sums in float32, in which exponents far from 127 overflow.
    Errors: ContractError for mismatched shapes, K no multiple of 32, scales of another shape.
    Source: QuTLASS; vllm/_custom_ops.py, matmul_mxf4_bf16_tn.
    """
    left, right = _values(nx, a, a_sf, is_sf_swizzled_layout), _values(nx, b, b_sf, is_sf_swizzled_layout)
    total = nx.matmul(left, right, order=ORDER, fused=True)
    return nx.store(nx.mul(total, nx.load(alpha)), ml_dtypes.bfloat16)


def _weights(nx, b, b_sf, swizzled):
    """bfloat16 weights [N, K], exact below 2^128."""
    return nx.store(_values(nx, b, b_sf, swizzled), ml_dtypes.bfloat16)


def _weight_sizes(arguments, results):
    """sum_k |x_k| |w_k|."""
    w = _weights(TRUTH, arguments["b"], arguments["b_sf"], arguments["is_sf_swizzled_layout"])
    return np.abs(arguments["x"].astype(np.float64)) @ np.abs(w.astype(np.float64)).T


@op(
    row=_ROW,
    args={
        "x": Tensor("M 2*B", ("bfloat16", "float32")),
        "b": Tensor("N B", ("uint8",), holds="float4_e2m1fn",
                    values=lambda rng, axes: bytes_of_codes(rng, {"...": (axes["N"],), "B": axes["B"]})),
        "b_sf": Tensor("* Cb", ("uint8",), values=_exponents("N", 108), holds="float8_e8m0fnu"),
        "out_dtype": Choice(("bfloat16", "float16", "float32"), optional=True),
        "is_sf_swizzled_layout": Flag(),
    },
    returns={"out": Tensor("M N", ("bfloat16", "float16", "float32"))},
    rounding=("w = bf16(e2m1(code) * 2^(b_sf - 127)), exact", "out = round(sum_k x * w), in out_dtype"),
    order=str(ORDER),
    parity=STORED_TWICE,
    mirror=Bound("(2 * B + 511) // 512 * 16 + 32", scale=_weight_sizes, ulps=1, why="as matmul"),
    nan="a scale of 255 makes its column NaN; otherwise as in any product",
    layout="tiles as `swizzle_blockscale` makes them",
    upstream="vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py: apply_fp4_marlin_linear without a "
    "global scale",
    examples=(
        {"M": 3, "N": 5, "B": 32, "x": "bfloat16", "is_sf_swizzled_layout": False},
        {"M": 2, "N": 130, "B": 80, "N_scales": (256, 8), "x": "float32", "is_sf_swizzled_layout": True},
    ),
    requires=(_scales_fit,),
)  # fmt: skip
def matmul_mxfp4(nx, x, b, b_sf, *, out_dtype=None, is_sf_swizzled_layout=True):
    """out[m, n] = sum_k x[m, k] * e2m1(b[n, k]) 2^(b_sf[n, k / 32] - 127): weights alone in MXFP4.

    Shapes: x [M, 2 * B]; b uint8 [N, B], two codes a byte; b_sf uint8 [N, B/16], exponents plus 127, or in tiles;
    out [M, N] in out_dtype, by default that of x.
    Rounding points: the weights to bfloat16, which changes nothing but what 2^128 and more is; then the store of `out`.
    Errors: ContractError for mismatched shapes, K no multiple of 32, scales of another shape.
    Source: OCP Microscaling Formats (MX) v1.0; vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py.
    """
    weights = _weights(nx, b, b_sf, is_sf_swizzled_layout)
    return nx.store(nx.add(nx.matmul(nx.load(x), weights, order=ORDER, fused=True), 0.0), out_dtype or x.dtype)
