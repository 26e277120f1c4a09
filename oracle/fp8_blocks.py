"""Products of 8-bit operands with a scale for each stretch of K: activations 1 x 128, weights 128 x 128.

A block's sum of products is scaled before it joins the sum over blocks. The Triton and CUTLASS kernels scale it by one
scale after the other and add; DeepGEMM multiplies the scales first and joins by one fma.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import Bound, Choice, Scalar, Tensor, refuse
from vtlab.ops.numerics import TRUTH
from vtlab.ops.table import op

from .fp8_matmul import NAN, TENSOR_CORES, draw_codes, scales_are, values
from .matmul import ORDER

_ROW, _DEEPGEMM = "KERNEL-GEMM-FP8", "KERNEL-GEMM-DEEPGEMM"
BLOCK = 128
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def draw_scales(*shape: str):
    """Scales around 1/30 for the named axes."""
    return lambda rng, axes: rng.uniform(0.01, 0.05, [axes[name] for name in shape])


def block_sum(nx, a, scale_a, b, scale_b, width, *, first):
    """sum over blocks of K of scale_a * scale_b * sum_k a * b. scale_b has a row for each row of b.

    first: the scales are multiplied first, and the block joins by one fma.
    """
    total = np.zeros((len(a), len(b)), nx.dtype)
    for block, start in enumerate(range(0, a.shape[1], width)):
        part = slice(start, start + width)
        dot = nx.matmul(nx.load(values(a[:, part])), values(b[:, part]), order=ORDER, fused=True)
        row, column = scale_a[:, block, None], scale_b[None, :, block]
        total = nx.fma(nx.mul(row, column), dot, total) if first else nx.add(total, nx.mul(nx.mul(dot, row), column))
    return total


def by_row(nx, scale, height, rows):
    """Block scales [ceil(N / height), G] with a row for each of the N rows."""
    return np.repeat(nx.load(scale), height, axis=-2)[..., :rows, :]


def magnitude(a, scale_a, b, scale_b, height, width):
    """sum_k scale_a |a| scale_b |b| in float64."""
    left = np.abs(TRUTH.load(values(a))) * np.repeat(scale_a, width, axis=1)[:, : a.shape[1]]
    right = np.abs(TRUTH.load(values(b)))
    return left @ (right * np.repeat(by_row(TRUTH, scale_b, height, len(b)), width, axis=1)[:, : b.shape[1]]).T


def _sizes(arguments, results):
    return magnitude(*(arguments[x] for x in ("a", "scale_a", "b", "scale_b")), arguments["block_n"],
                     arguments["block_k"])  # fmt: skip


def block_scales_fit(arguments, axes):
    """scales are [M, ceil(K / block_k)] and [ceil(N / block_n), ceil(K / block_k)], finite; of b positive"""
    blocks = -(-axes["K"] // arguments["block_k"])
    for name, rows in (("scale_a", axes["M"]), ("scale_b", -(-axes["N"] // arguments["block_n"]))):
        value = arguments[name]
        if tuple(value.shape) != (rows, blocks):
            raise refuse(name, f"shape {tuple(value.shape)}", f"{(rows, blocks)}")
        scales_are(name, value, zero=name == "scale_a")


block_scales_fit.finite = ("scale_a", "scale_b")

_OUT = ("bfloat16", "float16", "float32")
_STEPS = "(W + 511) // 512 * 16 + 32 + 3 * ((K + W - 1) // W)"
_WHY = "in a block a chain of fmas and at most 32 sums; then for each block two products and a sum"


@op(
    row=_ROW,
    args={
        "a": Tensor("M K", ("uint8", "int8"), values=draw_codes("M", "K"), holds="float8_e4m3fn", layout="rows"),
        "b": Tensor("N K", like="a", values=draw_codes("N", "K"), layout="rows"),
        "scale_a": Tensor("M G", ("float32",), values=draw_scales("M", "G"), layout="any"),
        "scale_b": Tensor("R G", ("float32",), values=draw_scales("R", "G"), layout="rows"),
        "block_n": Scalar(int, minimum=1),
        "block_k": Scalar(int, minimum=1, axis="W"),
        "out_dtype": Choice(_OUT),
    },
    returns={"out": Tensor("M N", _OUT)},
    rounding=("out = round(sum over blocks of K of (sum_k a * b) * scale_a * scale_b), in out_dtype",),
    order=f"{ORDER} in a block of K, then block after block",
    parity=TENSOR_CORES,
    mirror=Bound(_STEPS, scale=_sizes, ulps=1, why=_WHY),
    nan=f"{NAN}; a scale that is no number is refused",
    layout="scale_a in rows or in columns, as quantisers give it",
    upstream="vllm/model_executor/layers/quantization/utils/fp8_utils.py: w8a8_triton_block_scaled_mm; "
    "int8_utils.py: w8a8_block_int8_matmul",
    examples=(
        {"M": 3, "N": 130, "K": 300, "G": 3, "R": 2},
        {"M": 2, "N": 7, "K": 24, "G": 3, "R": 2, "block_n": 4, "block_k": 8, "a": "int8", "out_dtype": "float32"},
        {"M": 0, "N": 2, "K": 128, "G": 1, "R": 1, "out_dtype": "float16"},
    ),
    requires=(block_scales_fit,),
)
def scaled_mm_block(nx, a, b, scale_a, scale_b, *, block_n=128, block_k=128, out_dtype=ml_dtypes.bfloat16):
    """out[m, n] = sum over blocks g of K of scale_a[m, g] scale_b[n / block_n, g] sum_{k in g} a[m, k] b[n, k].

    Shapes: a [M, K], b [N, K], both uint8 (codes of e4m3) or both int8; G = ceil(K / block_k); scale_a float32 [M, G];
    scale_b float32 [ceil(N / block_n), G]; out [M, N]. N and K need not be whole blocks.
    Rounding points: one, the store of `out`. The mirror sums a block, rounds its products with scale_a and then with
    scale_b, and adds it to the blocks before it. A scale_a of 0, which quantisers give to zeros, is taken.
    Errors: ContractError for scales of another shape, NaN, infinite or negative, a scale_b of 0.
    Source: DeepSeek-V3 (arXiv 2412.19437) 3.3; vllm/model_executor/layers/quantization/utils/fp8_utils.py.
    """
    columns = by_row(nx, scale_b, block_n, len(b))
    return nx.store(block_sum(nx, a, nx.load(scale_a), b, columns, block_k, first=False), out_dtype)


def unpacked(scale, groups):
    """float32 scales [..., G]: those of float32 as they are, of int32 from their exponent bytes."""
    if scale.dtype == np.float32:
        return scale
    return np.ascontiguousarray(scale).view(np.uint8)[..., :groups].view(E8M0).astype(np.float32)


def whole_blocks(axes):
    """Refuse K no multiple of 128, N no multiple of 64."""
    for name, size, unit in (("a", axes["K"], BLOCK), ("b", axes["N"], 64)):
        if size % unit:
            raise refuse(name, f"{'K' if name == 'a' else 'N'} = {size}", f"a multiple of {unit}")


def deep_scales_fit(arguments, axes):
    """K is a multiple of 128, N of 64; scale_a float32 [M, K/128] or packed int32, in rows or in columns from
    multiples of 16 bytes on; scale_b float32 [ceil(N / 128), K/128]; all finite, of b positive"""
    whole_blocks(axes)
    groups, scale_a, scale_b = axes["K"] // BLOCK, arguments["scale_a"], arguments["scale_b"]
    wide = groups if scale_a.dtype == np.float32 else -(-groups // 4)
    for name, scale, want in (
        ("scale_a", scale_a, (*arguments["a"].shape[:-1], wide)),
        ("scale_b", scale_b, (*arguments["b"].shape[:-2], -(-axes["N"] // BLOCK), groups)),
    ):
        if tuple(scale.shape) != want:
            raise refuse(name, f"shape {tuple(scale.shape)}", f"{want}")
        scales_are(name, unpacked(scale, groups) if isinstance(scale, np.ndarray) else scale, zero=name == "scale_a")
    apart = -(-scale_a.shape[-2] // 4) * 16
    if not scale_a.flags.c_contiguous and tuple(scale_a.strides[-2:]) != (4, apart):
        raise refuse("scale_a", f"strides {tuple(scale_a.strides)}", f"rows, or columns {apart} bytes apart")


deep_scales_fit.finite = ("scale_a", "scale_b")


def deep_sum(nx, a, scale_a, b, scale_b):
    """bfloat16(sum over blocks of 128) as DeepGEMM joins them."""
    scales = nx.load(unpacked(scale_a, a.shape[1] // BLOCK))
    total = block_sum(nx, a, scales, b, by_row(nx, scale_b, BLOCK, len(b)), BLOCK, first=True)
    return nx.store(total, ml_dtypes.bfloat16)


def _deep_sizes(arguments, results):
    a, b = arguments["a"], arguments["b"]
    scale_a, scale_b = unpacked(arguments["scale_a"], a.shape[-1] // BLOCK), arguments["scale_b"]
    if a.ndim == 3:
        return np.stack([magnitude(*each, BLOCK, BLOCK) for each in zip(a, scale_a, b, scale_b)])
    if b.ndim == 2:
        return magnitude(a, scale_a, b, scale_b, BLOCK, BLOCK)
    sizes, indices = np.zeros((len(a), b.shape[1])), arguments["m_indices"]
    for expert in range(len(b)):
        rows = indices == expert
        sizes[rows] = magnitude(a[rows], scale_a[rows], b[expert], scale_b[expert], BLOCK, BLOCK)
    return sizes


def _deep(shape_a, shape_b):
    """Arguments of a product whose operands have these shapes."""
    lead_a, lead_b = shape_a.split()[:-1], shape_b.split()[:-2]
    return {
        "a": Tensor(shape_a, ("uint8",), values=draw_codes(*shape_a.split()), holds="float8_e4m3fn"),
        "scale_a": Tensor(" ".join([*lead_a, "G"]), ("float32", "int32"), layout="any",
                          values=draw_scales(*lead_a, "G")),
        "b": Tensor(shape_b, ("uint8",), values=draw_codes(*shape_b.split()), holds="float8_e4m3fn"),
        "scale_b": Tensor(" ".join([*lead_b, "R", "H"]), ("float32",), values=draw_scales(*lead_b, "R", "H")),
    }  # fmt: skip


_DEEP = {
    "row": _DEEPGEMM,
    "rounding": ("out = bf16(sum over blocks of 128 of (scale_a * scale_b) * sum_k a * b)",),
    "order": f"{ORDER} in a block of K, then block after block, each by one fma",
    "parity": TENSOR_CORES,
    "mirror": Bound("48 + 2 * (K // 128)", scale=_deep_sizes, ulps=1,
                    why="in a block a chain of at most 16 fmas and 32 sums; then for each block a product and an fma"),
    "nan": f"{NAN}; a scale that is no number is refused",
    "layout": "scale_a as transform_sf_layout gives it, or in rows",
}  # fmt: skip


@op(
    **_DEEP,
    args=_deep("M K", "N K"),
    returns={"out": Tensor("M N", ("bfloat16",))},
    upstream="deep_gemm: fp8_gemm_nt; vllm/utils/deep_gemm.py",
    examples=(
        {"M": 3, "N": 192, "K": 384, "G": 3, "R": 2, "H": 3},
        {"M": 0, "N": 64, "K": 128, "G": 1, "R": 1, "H": 1},
    ),
    requires=(deep_scales_fit,),
)
def fp8_gemm_nt(nx, a, scale_a, b, scale_b):
    """out[m, n] = sum over g of (scale_a[m, g] * scale_b[n / 128, g]) * sum_{k in block g} a[m, k] b[n, k].

    Shapes: a, b codes [M, K], [N, K]; scale_a float32 [M, K/128], or int32 [M, ceil(K/512)] with four exponents a
    word; scale_b float32 [ceil(N/128), K/128]; out bfloat16 [M, N].
    Rounding points: one, the store of `out`. The mirror rounds the product of the scales and joins a block by one fma.
    Errors: ContractError for K no multiple of 128, N no multiple of 64, scales of another shape or layout, NaN,
    infinite or negative, a scale_b of 0.
    Source: DeepGEMM, fp8_gemm_nt; vllm/utils/deep_gemm.py.
    """
    return deep_sum(nx, a, scale_a, b, scale_b)


def segments_fit(arguments, axes):
    """rows are whole segments of `alignment`; in each, one expert of [0, E) and then only -1"""
    unit, indices = arguments["alignment"], arguments["m_indices"]
    if axes["M"] % unit:
        raise refuse("a", f"{axes['M']} rows", f"a multiple of {unit}")
    if not isinstance(indices, np.ndarray):
        return
    if indices.size and not -1 <= int(indices.min()) <= int(indices.max()) < axes["E"]:
        raise refuse("m_indices", f"experts in [{indices.min()}, {indices.max()}]", f"in [-1, {axes['E']})")
    segments = indices.reshape(-1, unit)
    real = segments >= 0
    if np.any(real & (segments != segments[:, :1])) or np.any(real[:, 1:] & ~real[:, :-1]):
        raise refuse("m_indices", "several experts in a segment", f"one in every {unit} rows, then only -1")


@op(
    **_DEEP,
    args={
        **_deep("M K", "E N K"),
        "m_indices": Tensor("M", ("int32",)),
        "alignment": Scalar(int, minimum=1),
    },
    returns={"out": Tensor("M N", ("bfloat16",))},
    upstream="deep_gemm: m_grouped_fp8_gemm_nt_contiguous; vllm/utils/deep_gemm.py",
    examples=(
        {"M": 8, "E": 3, "N": 64, "K": 256, "G": 2, "R": 1, "H": 2, "alignment": 4,
         "m_indices": np.int32([2, 2, 2, -1, 0, 0, 0, 0])},
        {"M": 128, "E": 2, "N": 64, "K": 128, "G": 1, "R": 1, "H": 1, "m_indices": np.int32([1] * 5 + [-1] * 123)},
    ),
    requires=(deep_scales_fit, segments_fit),
)  # fmt: skip
def m_grouped_fp8_gemm_nt_contiguous(nx, a, scale_a, b, scale_b, m_indices, *, alignment=128):
    """out[m] = fp8_gemm_nt of row m with the weights of expert m_indices[m]; 0 where that is -1.

    Shapes: a codes [M, K], tokens sorted by expert, each expert's rows filled up to a multiple of `alignment`; scale_a
    as in `fp8_gemm_nt`; b codes [E, N, K]; scale_b float32 [E, ceil(N/128), K/128]; m_indices int32 [M], -1 in rows
    that fill up; out bfloat16 [M, N]. DeepGEMM leaves such rows unspecified.
    Rounding points: as `fp8_gemm_nt`.
    Errors: as `fp8_gemm_nt`; M no multiple of `alignment`, two experts in one segment, an expert outside [-1, E).
    Source: DeepGEMM, m_grouped_fp8_gemm_nt_contiguous; vllm/utils/deep_gemm.py.
    """
    out = np.zeros((a.shape[0], b.shape[1]), ml_dtypes.bfloat16)
    for expert in np.unique(m_indices[m_indices >= 0]):
        rows = m_indices == expert
        out[rows] = deep_sum(nx, a[rows], scale_a[rows], b[expert], scale_b[expert])
    return out


def counts_fit(arguments, axes):
    """masked_m is within [0, M]"""
    counts = arguments["masked_m"]
    if isinstance(counts, np.ndarray) and counts.size and not 0 <= counts.min() <= counts.max() <= axes["M"]:
        raise refuse("masked_m", f"counts in [{counts.min()}, {counts.max()}]", f"in [0, {axes['M']}]")


@op(
    **_DEEP,
    args={
        **_deep("E M K", "E N K"),
        "masked_m": Tensor("E", ("int32",), values=lambda rng, axes: rng.integers(0, axes["M"] + 1, axes["E"])),
    },
    returns={"out": Tensor("E M N", ("bfloat16",))},
    upstream="deep_gemm: m_grouped_fp8_gemm_nt_masked; vllm/utils/deep_gemm.py",
    examples=(
        {"E": 3, "M": 4, "N": 64, "K": 256, "G": 2, "R": 1, "H": 2, "masked_m": np.int32([4, 0, 2])},
        {"E": 1, "M": 5, "N": 192, "K": 128, "G": 1, "R": 2, "H": 1},
    ),
    requires=(deep_scales_fit, counts_fit),
)
def m_grouped_fp8_gemm_nt_masked(nx, a, scale_a, b, scale_b, masked_m):
    """out[e, m] = fp8_gemm_nt of row m of expert e with that expert's weights for m < masked_m[e], else 0.

    Shapes: a codes [E, M, K]; scale_a float32 [E, M, K/128], or int32 [E, M, ceil(K/512)]; b codes [E, N, K]; scale_b
    float32 [E, ceil(N/128), K/128]; masked_m int32 [E]; out bfloat16 [E, M, N]. DeepGEMM leaves the other rows as
    they were.
    Rounding points: as `fp8_gemm_nt`.
    Errors: as `fp8_gemm_nt`; a count outside [0, M].
    Source: DeepGEMM, m_grouped_fp8_gemm_nt_masked; vllm/utils/deep_gemm.py.
    """
    out = np.zeros((*a.shape[:2], b.shape[1]), ml_dtypes.bfloat16)
    for expert, count in enumerate(masked_m):
        rows = slice(0, count)
        out[expert, rows] = deep_sum(nx, a[expert, rows], scale_a[expert, rows], b[expert], scale_b[expert])
    return out
