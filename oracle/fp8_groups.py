"""Products of e4m3 operands in groups: each group with a stretch of K of its own, or each with its matrices."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import Bound, Parity, Tensor, refuse
from vtlab.ops.table import op

from .fp8_blocks import BLOCK, block_sum, deep_sum, draw_scales, magnitude, unpacked, whole_blocks
from .fp8_matmul import NAN, TENSOR_CORES, draw_codes, scales_are
from .matmul import ORDER

_ROW = "KERNEL-GEMM-DEEPGEMM"
_WHY = "in a block a chain of at most 16 fmas and 32 sums; then for each block a product and an fma"
_HALVES = Parity(
    "rel_l2",
    2.0**-18,
    "e4m3 values are float16 values and their products exact; tensor cores sum the 128 of a block in eight steps and "
    "cut each at 2**-23 of its largest part, at worst 2**-20 of a row where they do not cancel. M or N of no whole "
    "sixteens: bytes",
)
"""How stretches of K are judged on a GPU: of float32 results e4m3's own tensor cores would keep half the bits."""
_REFUSED_SCALES = f"{NAN}; a scale that is no number is refused"


def _draw_sizes(rng, axes):
    """K, in blocks, dealt out to the groups; the second has none of it."""
    owners = rng.integers(0, axes["E"], axes["K"] // BLOCK)
    owners[owners == 1] = 0
    return np.bincount(owners, minlength=axes["E"]) * BLOCK


def _groups_fit(arguments, axes):
    """ks are multiples of 128 whose sum is K; scales are [K / 128, M] and [K / 128, N], finite, of b positive"""
    ks = arguments["ks"]
    if axes["K"] % BLOCK:
        raise refuse("a", f"K = {axes['K']}", f"a multiple of {BLOCK}")
    if isinstance(ks, np.ndarray):
        if ks.size and (ks.min() < 0 or (ks % BLOCK).any()):
            raise refuse("ks", f"{ks.tolist()}", f"multiples of {BLOCK}")
        if int(ks.sum()) != axes["K"]:
            raise refuse("ks", f"a sum of {int(ks.sum())}", f"K = {axes['K']}")
    for name, size in (("scale_a", axes["M"]), ("scale_b", axes["N"])):
        if tuple(arguments[name].shape) != (axes["K"] // BLOCK, size):
            raise refuse(name, f"shape {tuple(arguments[name].shape)}", f"{(axes['K'] // BLOCK, size)}")
        scales_are(name, arguments[name], zero=name == "scale_a")


_groups_fit.finite = ("scale_a", "scale_b")


def _groups(ks):
    """Each group's rows, and its rows of scales."""
    ends = np.cumsum(ks)
    for group, (end, size) in enumerate(zip(ends, ks)):
        yield group, slice(end - size, end), slice((end - size) // BLOCK, end // BLOCK)


def _columns(codes, rows):
    """The rows of codes [K, M] as [M, k]."""
    return np.ascontiguousarray(codes[rows].T)


def _group_sizes(arguments, results):
    """|c| + sum_k scale_a |a| scale_b |b|."""
    a, b, scale_a, scale_b, c = (arguments[name] for name in ("a", "b", "scale_a", "scale_b", "c"))
    out = np.zeros((len(arguments["ks"]), a.shape[1], b.shape[1]))
    for group, rows, blocks in _groups(arguments["ks"]):
        out[group] = magnitude(_columns(a, rows), scale_a[blocks].T, _columns(b, rows), scale_b[blocks].T, 1, BLOCK)
    return out if c is None else out + np.abs(c.astype(np.float64))


@op(
    row=_ROW,
    args={
        "a": Tensor("K M", ("uint8",), values=draw_codes("K", "M"), holds="float8_e4m3fn"),
        "scale_a": Tensor("G M", ("float32",), values=draw_scales("G", "M")),
        "b": Tensor("K N", ("uint8",), values=draw_codes("K", "N"), holds="float8_e4m3fn"),
        "scale_b": Tensor("G N", ("float32",), values=draw_scales("G", "N")),
        "ks": Tensor("E", ("int32",), values=_draw_sizes),
        "c": Tensor("E M N", ("float32",), optional=True),
    },
    returns={"out": Tensor("E M N", ("float32",))},
    rounding=("out = f32(c + sum over blocks of 128 of (scale_a * scale_b) * sum_k a * b)",),
    order=f"{ORDER} in a block of K, then block after block, each by one fma, then c",
    parity=_HALVES,
    mirror=Bound("49 + 2 * (K // 128)", scale=_group_sizes, ulps=1, why=_WHY + ", and the sum with c"),
    nan=_REFUSED_SCALES,
    layout="operands lie along K: row k of a and of b; groups are stretches of rows, one after the other",
    upstream="deep_gemm: k_grouped_fp8_gemm_tn_contiguous, recipe (1, 1, 128)",
    examples=(
        {"K": 384, "G": 3, "M": 5, "N": 7, "E": 3, "ks": np.int32([256, 0, 128])},
        {"K": 640, "G": 5, "M": 3, "N": 66, "E": 2, "c": "float32", "ks": np.int32([128, 512])},
        {"K": 0, "G": 0, "M": 2, "N": 3, "E": 1, "c": "float32", "ks": np.int32([0])},
    ),
    requires=(_groups_fit,),
)
def k_grouped_fp8_gemm_tn(nx, a, scale_a, b, scale_b, ks, c=None):
    """out[e, m, n] = c[e, m, n] + sum over blocks g of e's K of scale_a[g, m] scale_b[g, n] sum_k a[k, m] b[k, n].

    Shapes: a codes [K, M], b codes [K, N]; scale_a float32 [K/128, M], scale_b [K/128, N]; ks int32 [E], group e has
    rows ks[0] + ... + ks[e - 1] on, ks[e] of them; c float32 [E, M, N] or None; out float32 [E, M, N], c or zeros for a
    group without rows.
    Rounding points: one, the store of `out`. The mirror rounds the product of the scales and joins a block by one fma;
    c is added to the whole sum, as DeepGEMM's store adds to memory. On a GPU tensor cores may sum the products of a
    block, of codes as float16, which is exact.
    Errors: ContractError for K or a size no multiple of 128, sizes whose sum is not K, scales of another shape, NaN,
    infinite or negative, a scale_b of 0.
    Source: DeepGEMM, k_grouped_fp8_gemm_tn_contiguous; deep_gemm/impls/sm90_fp8_gemm_1d1d.cuh.
    """
    out = np.zeros((len(ks), a.shape[1], b.shape[1]), np.float32)
    left, right = nx.load(scale_a), nx.load(scale_b)
    for group, rows, blocks in _groups(ks):
        total = block_sum(nx, _columns(a, rows), left[blocks].T, _columns(b, rows), right[blocks].T, BLOCK, first=True)
        out[group] = nx.store(total if c is None else nx.add(nx.load(c[group]), total), np.float32)
    return out


def _heads_fit(arguments, axes):
    """R is a multiple of 128, D of 64; scale_a float32 [B, H, R/128] or packed int32, scale_b float32
    [H, ceil(D / 128), R/128]; all finite, of b positive"""
    whole_blocks({"K": axes["R"], "N": axes["D"]})
    groups, scale_a, scale_b = axes["R"] // BLOCK, arguments["scale_a"], arguments["scale_b"]
    wide = groups if scale_a.dtype == np.float32 else -(-groups // 4)
    for name, scale, want in (
        ("scale_a", scale_a, (axes["B"], axes["H"], wide)),
        ("scale_b", scale_b, (axes["H"], -(-axes["D"] // BLOCK), groups)),
    ):
        if tuple(scale.shape) != want:
            raise refuse(name, f"shape {tuple(scale.shape)}", f"{want}")
        scales_are(name, unpacked(scale, groups) if isinstance(scale, np.ndarray) else scale, zero=name == "scale_a")


_heads_fit.finite = ("scale_a", "scale_b")


def _head_sizes(arguments, results):
    a, b, scale_b = (arguments[name] for name in ("a", "b", "scale_b"))
    scale_a = unpacked(arguments["scale_a"], a.shape[-1] // BLOCK)
    each = [magnitude(np.ascontiguousarray(a[:, h]), scale_a[:, h], b[h], scale_b[h], BLOCK, BLOCK)
            for h in range(len(b))]  # fmt: skip
    return np.stack(each, axis=1) if each else np.zeros((len(a), 0, b.shape[1]))


@op(
    row=_ROW,
    args={
        "a": Tensor("B H R", ("uint8",), values=draw_codes("B", "H", "R"), holds="float8_e4m3fn", layout="strided"),
        "scale_a": Tensor("B H G", ("float32", "int32"), values=draw_scales("B", "H", "G"), layout="any"),
        "b": Tensor("H D R", ("uint8",), values=draw_codes("H", "D", "R"), holds="float8_e4m3fn"),
        "scale_b": Tensor("H P Q", ("float32",), values=draw_scales("H", "P", "Q")),
    },
    returns={"out": Tensor("B H D", ("bfloat16",))},
    rounding=("out = bf16(sum over blocks of 128 of (scale_a * scale_b) * sum_r a * b)",),
    order=f"{ORDER} in a block of R, then block after block, each by one fma",
    parity=TENSOR_CORES,
    mirror=Bound("48 + 2 * (R // 128)", scale=_head_sizes, ulps=1, why=_WHY),
    nan=_REFUSED_SCALES,
    layout="a and scale_a in any order of their axes, codes of a row side by side",
    upstream='deep_gemm: fp8_einsum("bhr,hdr->bhd"), recipe (1, 128, 128); vllm/models/deepseek_v4: o_proj.py',
    examples=(
        {"B": 3, "H": 2, "D": 192, "R": 384, "G": 3, "P": 2, "Q": 3},
        {"B": 2, "H": 3, "D": 64, "R": 128, "G": 1, "P": 1, "Q": 1},
        {"B": 0, "H": 2, "D": 64, "R": 128, "G": 1, "P": 1, "Q": 1},
    ),
    requires=(_heads_fit,),
)
def fp8_einsum(nx, a, scale_a, b, scale_b):
    """out[b, h, d] = fp8_gemm_nt of row (b, h) of a with head h's matrix: the equation "bhr,hdr->bhd".

    Shapes: a codes [B, H, R]; scale_a float32 [B, H, R/128], or int32 [B, H, ceil(R/512)] with four exponents a word;
    b codes [H, D, R]; scale_b float32 [H, ceil(D/128), R/128]; out bfloat16 [B, H, D].
    Rounding points: as `fp8_gemm_nt`.
    Errors: ContractError for R no multiple of 128, D no multiple of 64, scales of another shape, NaN, infinite or
    negative, a scale_b of 0.
    Source: DeepGEMM, fp8_einsum; vllm/models/deepseek_v4/nvidia/ops/o_proj.py, the one equation that vLLM has.
    """
    out = np.empty((*a.shape[:2], b.shape[1]), ml_dtypes.bfloat16)
    for head in range(len(b)):
        rows, scales = np.ascontiguousarray(a[:, head]), np.ascontiguousarray(scale_a[:, head])
        out[:, head] = deep_sum(nx, rows, scales, b[head], scale_b[head])
    return out
