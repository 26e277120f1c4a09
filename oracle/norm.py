"""Norms over the last axis: RMSNorm (plain, Gemma, with residual), LayerNorm, gated RMSNorm, L2 norm."""

from __future__ import annotations

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor
from vtlab.ops.numerics import strided_tree
from vtlab.ops.table import op

_ROW = "KERNEL-EW-NORM-ACT"
_TREE = strided_tree(256)
# Longest path of a sum of H squares in tree order: ceil(H/256) sequential adds, 8 tree levels; each square rounds once.
_SUM = "H/256 + 10"


@op(
    row=_ROW,
    args={
        "x": Tensor("... H"),
        "weight": Tensor("H"),
        "residual": Tensor("... H", optional=True),
        "eps": Scalar(minimum=0),
        "gemma": Flag(),
        "rounding": Choice(("vt", "vllm_native")),
    },
    returns={"out": Tensor("... H", like="x"), "residual": Tensor("... H", like="residual", optional=True)},
    rounding={
        "vt": ("residual = round(x + residual)", "out = round(residual_or_x * inv * w)"),
        "vllm_native": (
            "residual = round(x + residual), but the unrounded sum is normalised",
            "scaled = round(sum * inv) to the weight's dtype, unless gemma",
            "out = round(scaled * w)",
        ),
    },
    order=str(_TREE),
    parity=Parity("bytes"),
    mirror=Bound(f"({_SUM}) / 2 + 6", ulps=1, why="half the relative error of the sum survives the square root"),
    nan="propagates; a row of zeros gives zeros for eps > 0",
    upstream="vllm/ir/ops/layernorm.py: rms_norm, fused_add_rms_norm; torch.ops._C.rms_norm rounds as vt",
    examples=(
        {"...": (3,), "H": 128, "x": "float32"},
        {"...": (2, 3), "H": 257, "x": "bfloat16", "weight": "bfloat16", "gemma": True},
        {"...": (5,), "H": 64, "x": "bfloat16", "weight": "bfloat16", "residual": "bfloat16"},
        {"...": (2,), "H": 80, "x": "bfloat16", "weight": "bfloat16", "residual": "float32", "rounding": "vllm_native"},
    ),
)
def rms_norm(nx, x, weight, *, residual=None, eps=1e-6, gemma=False, rounding="vt"):
    """out = x * w / sqrt(mean(x^2) + eps), with w = weight, or weight + 1 for Gemma; x becomes x + residual first.

    Shapes: x, residual, out [..., H]; weight [H]. Returns `out`, or `(out, residual)` where a residual is given:
    the new residual is x + residual in the residual's dtype.
    Rounding points: "vt" normalises the *rounded* sum and rounds once, on the store of `out`; "vllm_native"
    (vLLM's forward_native) normalises the unrounded sum and, except for Gemma, rounds before the weight product.
    The statistic is 1 / sqrt(S / H + eps), a division of a square root: no reciprocal square root.
    Errors: ContractError for mismatched shapes or dtypes, eps < 0.
    Source: Zhang & Sennrich 2019 (arXiv 1910.07467); vllm/ir/ops/layernorm.py.
    """
    value = nx.load(x)
    if residual is not None:
        total = nx.add(value, nx.load(residual))
        residual = nx.store(total, residual.dtype)
        value = total if rounding == "vllm_native" else nx.load(residual)
    mean = nx.div(nx.sum(nx.mul(value, value), order=_TREE), nx.const(x.shape[-1]))
    inv = nx.div(nx.const(1), nx.sqrt(nx.add(mean, nx.const(eps))))
    scaled = nx.mul(value, inv[..., None])
    if rounding == "vllm_native" and not gemma:
        scaled = nx.load(nx.store(scaled, weight.dtype))
    factor = nx.add(nx.load(weight), nx.const(1)) if gemma else nx.load(weight)
    out = nx.store(nx.mul(scaled, factor), x.dtype)
    return out if residual is None else (out, residual)
