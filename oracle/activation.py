"""Activations: gated products of an MLP's two halves, ReLU, and the tanh soft cap of logits."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import EXACT, Bound, Choice, Parity, Scalar, Tensor
from vtlab.ops.table import op

_ROW = "KERNEL-EW-NORM-ACT"
_ROOT_2_OVER_PI = 0.7978845608028654
_VARIANTS = Choice(("vt", "vllm", "vllm_native"))
_FLIPS = "; the store can flip one ulp, and a flip of vLLM's rounded act(gate) moves the product by at most two more"


def _halves(nx, x):
    """The gate and the up half of [..., 2*D]."""
    wide, half = nx.load(x), x.shape[-1] // 2
    return wide[..., :half], wide[..., half:]


def _through(nx, value, dtype):
    """The value after a store to `dtype` and a load: one rounding point."""
    return nx.load(nx.store(value, dtype))


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... 2*D"), "rounding": _VARIANTS},
    returns={"out": Tensor("... D", like="x")},
    rounding={
        "vt": ("out = round(silu(gate) * up)",),
        "vllm": ("a = round(silu(gate))", "out = round(a * up)"),
        "vllm_native": ("a = round(silu(gate))", "out = round(a * up)"),
    },
    parity=Parity("bytes"),
    mirror=Bound("3", ulps=3, why="silu within 1 ulp (2 roundings), the product" + _FLIPS),
    nan="propagates; silu(-inf) = -inf / (1 + inf) = NaN",
    upstream="vllm/model_executor/layers/activation.py: SiluAndMul; torch.ops._C.silu_and_mul",
    examples=(
        {"...": (8,), "D": 128, "x": "bfloat16"},
        {"...": (2, 3), "D": 5},
        {"...": (4,), "D": 33, "x": "bfloat16", "rounding": "vllm"},
        {"...": (4,), "D": 33, "x": "float16", "rounding": "vllm_native"},
    ),
)
def silu_and_mul(nx, x, *, rounding="vt"):
    """out = silu(x[..., :D]) * x[..., D:], silu(g) = g / (1 + exp(-g)).

    Shapes: x [..., 2*D], gate half first; out [..., D] in x's dtype.
    Rounding points: "vt" rounds once, on the store of `out`; "vllm" (the CUDA op) and "vllm_native" (the Python
    forward_native) both round silu(gate) to x's dtype before the product.
    Errors: ContractError for an odd last axis.
    Source: Shazeer 2020 (arXiv 2002.05202); vllm/model_executor/layers/activation.py, SiluAndMul.
    """
    gate, up = _halves(nx, x)
    act = nx.silu(gate)
    return nx.store(nx.mul(act if rounding == "vt" else _through(nx, act, x.dtype), up), x.dtype)


@op(
    row=_ROW,
    rows="...",
    args={"gate": Tensor("... D"), "up": Tensor("... D", like="gate")},
    returns={"out": Tensor("... D", like="gate")},
    rounding=("out = round(silu(gate) * up)",),
    parity=Parity("bytes"),
    mirror=Bound("3", ulps=1, why="silu within 1 ulp (2 roundings), the product; the store"),
    nan="propagates; silu(-inf) = -inf / (1 + inf) = NaN",
    upstream="vllm/model_executor/layers/activation.py: SiluAndMul, on two tensors",
    examples=({"...": (8,), "D": 128, "gate": "bfloat16"}, {"...": (), "D": 3}),
)
def moe_silu_mul(nx, gate, up):
    """out = silu(gate) * up: `silu_and_mul` of two tensors, as an expert's two GEMMs leave them.

    Shapes: gate, up, out [..., D], one dtype.
    Rounding points: one, on the store of `out`.
    Errors: ContractError for mismatched shapes or dtypes.
    Source: Shazeer 2020 (arXiv 2002.05202).
    """
    return nx.store(nx.mul(nx.silu(nx.load(gate)), nx.load(up)), gate.dtype)


def _clamp_scale(arguments, results):
    """|g * sigmoid(z)| * (1 + |z|) * (|u| + |beta|), z = alpha * g: z moves the sigmoid, u + beta may cancel.

    Under vllm_native the roundings in between are the storage's, each of which can flip.
    """
    x, limit, half = arguments["x"].astype(np.float64), arguments["limit"], arguments["x"].shape[-1] // 2
    gate, up = np.minimum(x[..., :half], limit), np.clip(x[..., half:], -limit, limit)
    z = arguments["alpha"] * gate
    size = np.abs(gate / (1 + np.exp(np.minimum(-z, 700)))) * (1 + np.abs(z)) * (np.abs(up) + abs(arguments["beta"]))
    if arguments["rounding"] != "vllm_native":
        return size
    return size * float(ml_dtypes.finfo(arguments["x"].dtype).eps) * 2.0**23


@op(
    row=_ROW,
    rows="...",
    args={
        "x": Tensor("... 2*D"),
        "limit": Scalar(above=0, example=1.5),
        "alpha": Scalar(),
        "beta": Scalar(),
        "rounding": _VARIANTS,
    },
    returns={"out": Tensor("... D", like="x")},
    rounding={
        "vt": ("out = round(gate * sigmoid(alpha * gate) * (up + beta)), gate and up clamped in float32",),
        "vllm": ("a = round(gate * sigmoid(alpha * gate))", "out = round(a * (up + beta))"),
        "vllm_native": (
            "gate = round(min(gate, limit))", "up = round(clamp(up, -limit, limit))", "z = round(alpha * gate)",
            "s = round(sigmoid(z))", "a = round(gate * s)", "b = round(up + beta)", "out = round(a * b)",
        ),
    },
    parity=Parity("bytes"),
    mirror=Bound(
        "11",
        scale=_clamp_scale,
        ulps=3,
        why="limit in gate and up 2, in z with alpha and the product 3, sigmoid within 1 ulp (2 roundings), gate * "
        "sigmoid, beta, up + beta, the last product" + _FLIPS,
    ),
    nan="propagates through both clamps",
    upstream="vllm/model_executor/layers/activation.py: SiluAndMulWithClamp; torch.ops._C.silu_and_mul_with_clamp",
    examples=(
        {"...": (8,), "D": 64, "x": "bfloat16"},
        {"...": (3,), "D": 7, "limit": 7.0, "alpha": 1.702, "beta": 1.0},
        {"...": (4,), "D": 33, "x": "bfloat16", "rounding": "vllm"},
        {"...": (4,), "D": 33, "x": "bfloat16", "alpha": 1.702, "beta": 1.0, "rounding": "vllm_native"},
    ),
)  # fmt: skip
def silu_and_mul_clamp(nx, x, *, limit, alpha=1.0, beta=0.0, rounding="vt"):
    """out = g * sigmoid(alpha * g) * (u + beta), g = min(x[..., :D], limit), u = clamp(x[..., D:], -limit, limit).

    Shapes: x [..., 2*D], gate half first; out [..., D] in x's dtype. The gate is clamped on its upper side only.
    Rounding points: "vt" rounds once; "vllm" (the CUDA op) rounds the gated half before the product;
    "vllm_native" (the Python forward_native) rounds after every operation.
    Errors: ContractError for an odd last axis, limit <= 0.
    Source: vllm/model_executor/layers/activation.py, SiluAndMulWithClamp (gpt-oss, DeepSeek-V4).
    """
    point = (lambda value: _through(nx, value, x.dtype)) if rounding == "vllm_native" else (lambda value: value)
    gate, up = _halves(nx, x)
    gate = point(nx.minimum(gate, limit))
    up = point(nx.minimum(nx.maximum(up, -limit), limit))
    act = nx.mul(gate, point(nx.sigmoid(point(nx.mul(alpha, gate)))))
    if rounding != "vt":
        act = _through(nx, act, x.dtype)
    return nx.store(nx.mul(act, point(nx.add(up, beta))), x.dtype)


def _gelu_scale(arguments, results):
    """|gate * up|: 1 + tanh cancels for a gate far below zero, so the error is one of the gate, not of the result."""
    x, half = arguments["x"].astype(np.float64), arguments["x"].shape[-1] // 2
    return np.abs(x[..., :half] * x[..., half:])


_TANH = "t = f32(tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3)))"


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... 2*D"), "rounding": _VARIANTS},
    returns={"out": Tensor("... D", like="x")},
    rounding={
        "vt": (_TANH, "out = round(gate / 2 * (1 + t) * up)"),
        "vllm": (_TANH, "a = round(gate / 2 * (1 + t))", "out = round(a * up)"),
        "vllm_native": (_TANH, "a = round(gate / 2 * (1 + t))", "out = round(a * up)"),
    },
    parity=Parity("bytes"),
    mirror=Bound(
        "7",
        scale=_gelu_scale,
        ulps=3,
        why="relative to |gate * up|: five roundings and two constants in the argument of tanh, whose slope times its "
        "argument stays under 0.45; tanh within 1 ulp and t's own rounding; half of that; then 1 +, three products"
        + _FLIPS,
    ),
    nan="propagates; gelu(-inf) = -inf * 0 = NaN",
    upstream='vllm/model_executor/layers/activation.py: GeluAndMul(approximate="tanh"); torch.ops._C.gelu_tanh_and_mul',
    examples=(
        {"...": (8,), "D": 128, "x": "bfloat16"},
        {"...": (2, 3), "D": 5},
        {"...": (4,), "D": 33, "x": "bfloat16", "rounding": "vllm"},
        {"...": (4,), "D": 33, "x": "float16", "rounding": "vllm_native"},
        {"...": (249,), "D": 264, "x": "float16"},
    ),
)
def gelu_and_mul(nx, x, *, rounding="vt"):
    """out = gelu(x[..., :D]) * x[..., D:], gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3))).

    Shapes: x [..., 2*D], gate half first; out [..., D] in x's dtype.
    Rounding points: tanh to float32 in every variant: below g = -4 the 1 + tanh cancels and shows it, down to a
    result of -0 below g = -5.2, in vLLM as here. Then "vt" rounds once, on the store of `out`; "vllm" (the CUDA op)
    and "vllm_native" (the Python forward_native) both round gelu(gate) to x's dtype before the product.
    Errors: ContractError for an odd last axis.
    Source: Hendrycks & Gimpel 2016 (arXiv 1606.08415); vllm/model_executor/layers/activation.py, GeluAndMul.
    """
    gate, up = _halves(nx, x)
    cube = nx.mul(nx.mul(nx.mul(0.044715, gate), gate), gate)
    t = _through(nx, nx.tanh(nx.mul(_ROOT_2_OVER_PI, nx.add(gate, cube))), np.float32)
    act = nx.mul(nx.mul(0.5, gate), nx.add(1.0, t))
    return nx.store(nx.mul(act if rounding == "vt" else _through(nx, act, x.dtype), up), x.dtype)


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... D")},
    returns={"out": Tensor("... D", like="x")},
    rounding=("none: out is x or 0",),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="NaN becomes 0 (x where x > 0, else 0), unlike torch.relu, which keeps it; -0 becomes +0",
    upstream="torch.nn.functional.relu; vllm/model_executor/models/opt.py",
    examples=({"...": (4,), "D": 33, "x": "bfloat16"}, {"...": (), "D": 1}, {"...": (0,), "D": 3, "x": "float16"}),
)
def relu(nx, x):
    """out = x where x > 0, else 0.

    Shapes: x, out [..., D], one dtype.
    Rounding points: none. NaN gives 0: a recorded deviation from torch.relu.
    Errors: ContractError for a wrong dtype.
    Source: vllm/model_executor/models/opt.py, its MLP's activation.
    """
    return np.where(nx.load(x) > 0, x, x.dtype.type(0))


@op(
    row=_ROW,
    rows="...",
    args={"x": Tensor("... V"), "cap": Scalar(above=0, example=30.0), "rounding": _VARIANTS},
    returns={"out": Tensor("... V", like="x")},
    rounding={
        "vt": ("out = round(cap * tanh(x / cap))",),
        "vllm": ("y = round(x / cap)", "t = round(tanh(y))", "out = round(t * cap)"),
        "vllm_native": ("y = round(x / cap)", "t = round(tanh(y))", "out = round(t * cap)"),
    },
    parity=Parity("bytes"),
    mirror=Bound(
        "6",
        ulps=5,
        why="cap rounds to float32 (it acts twice), a division, tanh within 1 ulp (2 roundings), a product; tanh "
        "carries at most its argument's relative error. The store flips one ulp, a flip of vLLM's y or t "
        "moves out by two each",
    ),
    nan="propagates; +-inf gives +-cap",
    upstream="vllm/model_executor/layers/logits_processor.py: LogitsProcessor.forward with soft_cap",
    examples=(
        {"...": (3,), "V": 64, "cap": 30.0},
        {"...": (3,), "V": 65, "x": "bfloat16", "cap": 0.5},
        {"...": (2,), "V": 64, "x": "bfloat16", "cap": 50.0, "rounding": "vllm"},
    ),
)
def soft_cap(nx, x, cap, *, rounding="vt"):
    """out = cap * tanh(x / cap).

    Shapes: x, out [..., V], one dtype.
    Rounding points: "vt" rounds once; "vllm" and "vllm_native" (one and the same: vLLM's logits processor works in
    the logits' dtype) round after the division, after tanh and after the product. x / cap is a division, not a
    product with 1 / cap.
    Errors: ContractError for cap <= 0.
    Source: Gemma 2 (arXiv 2408.00118); vllm/model_executor/layers/logits_processor.py.
    """
    point = (lambda value: _through(nx, value, x.dtype)) if rounding != "vt" else (lambda value: value)
    return nx.store(nx.mul(point(nx.tanh(point(nx.div(nx.load(x), cap)))), cap), x.dtype)
