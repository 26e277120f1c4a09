"""Norms over the last axis: RMSNorm (plain, Gemma, with residual), gated RMSNorm, L2 norm, LayerNorm.

All statistics are sums in the order of a block of 256 threads that load eight neighbours each, and all inverse roots
are a division of a square root: the GPU's reciprocal square root is another bit pattern.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import Bound, Choice, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.numerics import block_butterfly
from vtlab.ops.table import op

_ROW = "KERNEL-EW-NORM-ACT"
TREE = block_butterfly(256, vector=8, across="tree")
# Roundings on the longest path of a sum of n squares: the square, 8 ceil(n/2048) adds to a partial, 8 tree levels.
_SUM = "{n}/256 + 17"
_OUT_DTYPE = Choice(("float32", "bfloat16", "float16"), optional=True)


def inverse_rms(nx, value, eps, *, mean=True):
    """1 / sqrt(mean(value^2) + eps) of each row, or of the sum instead of the mean; keeps a last axis of size 1."""
    total = nx.sum(nx.mul(value, value), order=TREE, keepdims=True)
    if mean:
        total = nx.div(total, max(value.shape[-1], 1))
    return nx.div(1, nx.sqrt(nx.add(total, eps)))


def _residual_has_dtype_of_x(arguments, axes):
    """vLLM's variants take a residual of x's dtype only"""
    x, residual = arguments["x"], arguments["residual"]
    if residual is not None and arguments["rounding"] != "vt" and residual.dtype != x.dtype:
        raise refuse("residual", f"dtype {residual.dtype}", f"dtype {x.dtype}, that of x")


@op(
    row=_ROW,
    rows="...",
    args={
        "x": Tensor("... H", layout="rows"),
        "weight": Tensor("H"),
        "residual": Tensor("... H", optional=True, layout="rows"),
        "eps": Scalar(minimum=0),
        "gemma": Flag(),
        "rounding": Choice(("vt", "vllm", "vllm_native")),
    },
    returns={"out": Tensor("... H", like="x"), "residual": Tensor("... H", like="residual", optional=True)},
    rounding={
        "vt": ("residual = round(x + residual)", "out = round(residual_or_x * inv * w)"),
        "vllm": ("as vt where the weight has x's dtype and is not Gemma's; otherwise as vllm_native",),
        "vllm_native": (
            "residual = round(x + residual), but the unrounded sum is normalised",
            "scaled = round(sum * inv) to the weight's dtype, unless gemma",
            "product = round(scaled * w) to the weight's dtype, unless gemma",
            "out = round(product)",
        ),
    },
    order=str(TREE),
    parity=Parity("bytes"),
    mirror=Bound(
        f"({_SUM.format(n='H')}) / 2 + 7",
        ulps=3,
        why="half the relative error of the sum and of the two roundings after it survives the root; then root, "
        "division, w + 1, two products. The store can flip one ulp; a flip of an earlier rounding (the residual, "
        "vllm_native's scaled) by one ulp moves out by at most two more",
    ),
    nan="propagates; a row of zeros gives zeros for eps > 0, NaN for eps = 0",
    layout="x and residual may be strided rows; the results are contiguous; H = 0 and no rows give empty results",
    upstream="vllm/ir/ops/layernorm.py: rms_norm, fused_add_rms_norm; torch.ops._C.{rms_norm, fused_add_rms_norm}; "
    "vllm/kernels/vllm_c.py sends a weight of another dtype, hence every GemmaRMSNorm in bf16, to the native form",
    examples=(
        {"...": (3,), "H": 128, "x": "float32"},
        {"...": (2, 3), "H": 257, "x": "bfloat16", "weight": "bfloat16", "gemma": True},
        {"...": (5,), "H": 64, "x": "bfloat16", "weight": "bfloat16", "residual": "bfloat16"},
        {"...": (4,), "H": 300, "x": "bfloat16", "weight": "float32", "residual": "float32"},
        {
            "...": (2,), "H": 80, "x": "bfloat16", "weight": "bfloat16", "residual": "bfloat16",
            "rounding": "vllm_native",
        },
        {"...": (2,), "H": 80, "x": "bfloat16", "weight": "float32", "residual": "bfloat16", "rounding": "vllm"},
    ),
    requires=(_residual_has_dtype_of_x,),
)  # fmt: skip
def rms_norm(nx, x, weight, *, residual=None, eps=1e-6, gemma=False, rounding="vt"):
    """out = x * w / sqrt(mean(x^2) + eps), with w = weight, or weight + 1 for Gemma; x becomes x + residual first.

    Shapes: x, residual, out [..., H]; weight [H]. Returns `out`, or `(out, residual)` where a residual is given:
    the new residual is x + residual in the residual's dtype.
    Rounding points: "vt" normalises the *rounded* sum and rounds once, on the store of `out`; "vllm_native"
    (vLLM's Python forward_native) normalises the unrounded sum and, except for Gemma, rounds to the weight's dtype
    before and after the weight product; "vllm" (vLLM on CUDA, not compiled) is its CUDA op, which rounds as "vt",
    unless the weight's dtype is not x's, which Gemma's float32 weight + 1 never is in bf16: then the native form.
    Errors: ContractError for mismatched shapes or dtypes, eps < 0.
    Source: Zhang & Sennrich 2019 (arXiv 1910.07467); vllm/ir/ops/layernorm.py.
    """
    native = rounding == "vllm_native" or (rounding == "vllm" and (gemma or weight.dtype != x.dtype))
    value = nx.load(x)
    if residual is not None:
        total = nx.add(value, nx.load(residual))
        residual = nx.store(total, residual.dtype)
        value = total if native else nx.load(residual)
    scaled = nx.mul(value, inverse_rms(nx, value, eps))
    if native and not gemma and weight.dtype != np.float32:
        scaled = nx.load(nx.store(scaled, weight.dtype))
        product = nx.load(nx.store(nx.mul(scaled, nx.load(weight)), weight.dtype))
    else:
        product = nx.mul(scaled, nx.add(nx.load(weight), 1) if gemma else nx.load(weight))
    out = nx.store(product, x.dtype)
    return out if residual is None else (out, residual)


@op(
    row=_ROW,
    rows="...",
    args={
        "x": Tensor("... D"),
        "gate": Tensor("... D", layout="rows"),
        "weight": Tensor("D"),
        "eps": Scalar(minimum=0),
        "sigmoid_gate": Flag(),
        "out_dtype": _OUT_DTYPE,
    },
    returns={"out": Tensor("... D")},
    rounding=("out = round(((x * inv) * w) * act(gate))",),
    order=str(TREE),
    parity=Parity("bytes"),
    mirror=Bound(
        f"({_SUM.format(n='D')}) / 2 + 9",
        ulps=1,
        why="as rms_norm, then the gate within 1 ulp (2 roundings) and its product",
    ),
    nan="propagates; a gate of -inf gives NaN under SiLU (-inf * 0) and 0 under the sigmoid",
    layout="gate may be a strided view, e.g. of padded token rows",
    upstream="vllm/model_executor/layers/layernorm.py: RMSNormGated(norm_before_gate=True, group_size=None); on CUDA "
    "third_party/flash_linear_attention/ops/layernorm_guard.py",
    examples=(
        {"...": (6, 4), "D": 128, "x": "bfloat16", "gate": "bfloat16", "weight": "bfloat16"},
        {"...": (5,), "D": 8, "sigmoid_gate": True},
        {"...": (5,), "D": 130, "x": "float32", "gate": "bfloat16", "out_dtype": "bfloat16"},
    ),
)
def rms_norm_gated(nx, x, gate, weight, *, eps=1e-6, sigmoid_gate=False, out_dtype=None):
    """out = x * w / sqrt(mean(x^2) + eps) * act(gate), act = SiLU, or the sigmoid with `sigmoid_gate`.

    Shapes: x, gate, out [..., D] (rows [R, D], or tokens and heads [T, Hv, D]); weight [D]; gate's outer strides
    are free. `out_dtype` defaults to x's.
    Rounding points: one, on the store of `out`; the products run x * inv, * w, * act(gate) in this order.
    Errors: ContractError for mismatched shapes, eps < 0.
    Source: vllm/model_executor/layers/layernorm.py, RMSNormGated with norm_before_gate=True (not its default).
    """
    value, z = nx.load(x), nx.load(gate)
    normed = nx.mul(nx.mul(value, inverse_rms(nx, value, eps)), nx.load(weight))
    return nx.store(nx.mul(normed, nx.sigmoid(z) if sigmoid_gate else nx.silu(z)), out_dtype or x.dtype)


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... D", layout="rows"), "eps": Scalar(minimum=0), "out_dtype": _OUT_DTYPE},
    returns={"out": Tensor("... D")},
    rounding=("out = round(x * (1 / sqrt(sum(x^2) + eps)))",),
    order=str(TREE),
    parity=Parity("bytes"),
    mirror=Bound(
        f"({_SUM.format(n='D')}) / 2 + 5",
        ulps=1,
        why="as rms_norm without the mean and the weight; holds while sum(x^2) is a finite float32",
    ),
    nan="propagates; a row of zeros gives zeros for eps > 0; a sum that overflows float32 makes the mirror's row 0",
    layout="x may be strided rows; the result is contiguous",
    upstream="vllm/third_party/flash_linear_attention/ops/l2norm.py: l2norm_fwd",
    examples=(
        {"...": (3, 16), "D": 128, "x": "bfloat16"},
        {"...": (4,), "D": 7},
        {"...": (4,), "D": 300, "out_dtype": "bfloat16"},
    ),
)
def l2norm(nx, x, *, eps=1e-6, out_dtype=None):
    """out = x / sqrt(sum(x^2) + eps): a sum, not a mean.

    Shapes: x, out [..., D]; `out_dtype` defaults to x's.
    Rounding points: one, on the store of `out`; the statistic is 1 / sqrt(S + eps), then one product.
    Errors: ContractError for a wrong dtype, eps < 0.
    Source: vllm/third_party/flash_linear_attention/ops/l2norm.py.
    """
    value = nx.load(x)
    return nx.store(nx.mul(value, inverse_rms(nx, value, eps, mean=False)), out_dtype or x.dtype)


def _layer_norm_scale(arguments, results):
    """What the roundings of LayerNorm are relative to: the mean's error is one of max|x|, not of x - mean."""
    x = arguments["x"].astype(np.float64)
    rstd = 1 / np.sqrt(x.var(axis=-1, keepdims=True) + arguments["eps"])
    size = np.abs(x).max(axis=-1, keepdims=True, initial=0) * rstd + np.abs(x - x.mean(axis=-1, keepdims=True)) * rstd
    if arguments["weight"] is not None:
        size = size * np.abs(arguments["weight"].astype(np.float64))
    return size if arguments["bias"] is None else size + np.abs(arguments["bias"].astype(np.float64))


def _rows_have_elements(arguments, axes):
    """the mean of no element does not exist: D >= 1"""
    if axes["D"] == 0:
        raise refuse("x", "D = 0", "D >= 1")


@op(
    row=_ROW,
    rows="...",
    args={
        "x": Tensor("... D", layout="rows"),
        "weight": Tensor("D", optional=True),
        "bias": Tensor("D", optional=True),
        "eps": Scalar(minimum=0),
    },
    returns={"out": Tensor("... D", like="x")},
    rounding=("out = round((x - mean) * rstd * weight + bias)",),
    order=str(TREE),
    parity=Parity("bytes"),
    mirror=Bound(
        f"1.5 * ({_SUM.format(n='D')}) + 8",
        scale=_layer_norm_scale,
        ulps=1,
        why="the mean's sum, half of the variance's sum, and eight single roundings, all relative to max|x| * rstd",
    ),
    nan="propagates; a constant row gives the bias for eps > 0",
    layout="x may be strided rows; the result is contiguous",
    upstream="vllm/model_executor/layers/layernorm.py: LayerNorm; torch.nn.functional.layer_norm",
    examples=(
        {"...": (3,), "D": 768, "x": "bfloat16", "weight": "bfloat16", "bias": "bfloat16"},
        {"...": (2, 2), "D": 1, "weight": "float32", "bias": "float32"},
        {"...": (4,), "D": 7},
        {"...": (2,), "D": 257, "x": "bfloat16", "weight": "float32"},
    ),
    requires=(_rows_have_elements,),
)
def layer_norm(nx, x, weight=None, bias=None, *, eps=1e-5):
    """out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias; the variance is the biased one, two-pass.

    Shapes: x, out [..., D] with D >= 1; weight, bias [D] or None.
    Rounding points: one, on the store of `out`; each product and sum is an operation of its own (no fma).
    Errors: ContractError for D = 0, mismatched shapes, eps < 0.
    Source: Ba, Kiros & Hinton 2016 (arXiv 1607.06450); vllm/model_executor/layers/layernorm.py, LayerNorm.
    """
    value = nx.load(x)
    mean = nx.div(nx.sum(value, order=TREE, keepdims=True), x.shape[-1])
    centred = nx.sub(value, mean)
    out = nx.mul(centred, inverse_rms(nx, centred, eps))
    if weight is not None:
        out = nx.mul(out, nx.load(weight))
    if bias is not None:
        out = nx.add(out, nx.load(bias))
    return nx.store(out, x.dtype)
