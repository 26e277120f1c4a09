"""Sigmoid gates on attention and shared experts; the gates and the post-convolution step of the gated delta rule."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import Bound, Choice, Parity, Scalar, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.table import op

from .norm import TREE, l2norm
from .splits import gdn_conv_split

_ROW = "KERNEL-EW-NORM-ACT"
_F32 = ("float32",)
_SIGMOID = Bound(
    "3",
    ulps=3,
    why="sigmoid within 1 ulp (2 roundings), the product; the store can flip one ulp, and a flip of "
    "vLLM's rounded sigmoid moves the product by at most two more",
)
_VARIANTS = Choice(("vt", "vllm", "vllm_native"))


def _gate_times(nx, value, gate, dtype, rounding):
    """round(value * sigmoid(gate)), with the sigmoid rounded to `dtype` first in vLLM."""
    weight = nx.sigmoid(nx.load(gate))
    if rounding != "vt":
        weight = nx.load(nx.store(weight, dtype))
    return nx.store(nx.mul(nx.load(value), weight), dtype)


def _dtypes_fit(value, gate, vt_values):
    def check(arguments, axes):
        got, variant = {name: arguments[name].dtype.name for name in (value, gate)}, arguments["rounding"]
        if variant != "vt" and got[gate] != got[value]:
            raise refuse(gate, f"dtype {got[gate]}", f"dtype {got[value]}, that of {value}")
        if variant == "vt" and got[gate] != "float32":
            raise refuse(gate, f"dtype {got[gate]}", "float32, the gate before any rounding")
        if variant == "vt" and got[value] not in vt_values:
            raise refuse(value, f"dtype {got[value]}", " or ".join(vt_values))

    check.__doc__ = f"under vt {gate} is float32 and {value} {' or '.join(vt_values)}; in vLLM's variants one dtype"
    return check


@op(
    row=_ROW,
    rows="...",
    args={
        "attn": Tensor("... N", ("bfloat16", "float32", "float16")),
        "gate": Tensor("... N", ("float32", "bfloat16", "float16")),
        "rounding": _VARIANTS,
    },
    returns={"out": Tensor("... N", ("bfloat16", "float32", "float16"))},
    rounding={
        "vt": ("out = bf16(attn * sigmoid(gate)), gate never rounded",),
        "vllm": ("s = round(sigmoid(gate)) to attn's dtype", "out = round(attn * s) to attn's dtype"),
        "vllm_native": ("s = round(sigmoid(gate)) to attn's dtype", "out = round(attn * s) to attn's dtype"),
    },
    parity=Parity("bytes"),
    mirror=_SIGMOID,
    nan="propagates; a gate of -inf gives 0, of +inf attn",
    upstream="vllm/model_executor/models/qwen3_next.py: attn_output * torch.sigmoid(gate)",
    examples=(
        {"...": (5,), "N": 64, "attn": "bfloat16"},
        {"...": (2, 3), "N": 7, "attn": "float32"},
        {"...": (5,), "N": 64, "attn": "bfloat16", "gate": "bfloat16", "rounding": "vllm_native"},
    ),
    requires=(_dtypes_fit("attn", "gate", ("bfloat16", "float32")),),
)
def sigmoid_gate_bf16(nx, attn, gate, *, rounding="vt"):
    """out = attn * sigmoid(gate), sigmoid(z) = 1 / (1 + exp(-z)).

    Shapes: attn, gate, out [..., N]. "vt": attn bfloat16 or float32, gate float32, out bfloat16; vLLM's
    variants: one dtype for all three, so float32 models stay in float32.
    Rounding points: "vt" rounds once; "vllm" and "vllm_native" (Qwen3-Next's forward) round the sigmoid too.
    Errors: ContractError for mismatched shapes, a rounded gate under "vt".
    Source: vllm/model_executor/models/qwen3_next.py, Qwen3NextAttention.forward.
    """
    return _gate_times(nx, attn, gate, ml_dtypes.bfloat16 if rounding == "vt" else attn.dtype, rounding)


def _one_gate_per_token(arguments, axes):
    """gl is [T] or [T, 1]"""
    shape, rows = arguments["gl"].shape, axes["T"]
    if shape not in ((rows,), (rows, 1)):
        raise refuse("gl", f"shape {tuple(shape)}", f"({rows},) or ({rows}, 1)")


@op(
    row=_ROW,
    args={
        "sd": Tensor("T H", ("float32", "bfloat16", "float16")),
        "gl": Tensor("* G", ("float32", "bfloat16", "float16")),
        "rounding": _VARIANTS,
    },
    returns={"out": Tensor("T H", ("bfloat16", "float32", "float16"))},
    rounding={
        "vt": ("out = bf16(sigmoid(gl) * sd)",),
        "vllm": ("s = round(sigmoid(gl)) to sd's dtype", "out = round(s * sd) to sd's dtype"),
        "vllm_native": ("s = round(sigmoid(gl)) to sd's dtype", "out = round(s * sd) to sd's dtype"),
    },
    parity=Parity("bytes"),
    mirror=_SIGMOID,
    nan="propagates; a gate of -inf gives 0",
    upstream="vllm/model_executor/models/qwen2_moe.py: F.sigmoid(expert_gate(x)) * shared experts' output",
    examples=(
        {"T": 5, "H": 64, "...": (5,), "G": 1},
        {"T": 7, "H": 3, "...": (), "G": 7},
        {"T": 5, "H": 64, "...": (5,), "G": 1, "sd": "bfloat16", "gl": "bfloat16", "rounding": "vllm_native"},
    ),
    requires=(_one_gate_per_token, _dtypes_fit("sd", "gl", _F32)),
)
def shared_expert_gate(nx, sd, gl, *, rounding="vt"):
    """out[t] = sigmoid(gl[t]) * sd[t], sigmoid(z) = 1 / (1 + exp(-z)).

    Shapes: sd, out [T, H]; gl [T] or [T, 1]. "vt": sd and gl float32, out bfloat16; vLLM's variants: one dtype.
    Rounding points: "vt" rounds once; "vllm" and "vllm_native" (Qwen2-MoE's forward) round the sigmoid too.
    Errors: ContractError for any other number of gates, rounded inputs under "vt".
    Source: vllm/model_executor/models/qwen2_moe.py, Qwen2MoeMLP.forward.
    """
    gate = gl.reshape(-1, 1)
    return _gate_times(nx, sd, gate, ml_dtypes.bfloat16 if rounding == "vt" else sd.dtype, rounding)


def _gating_scale(arguments, results):
    """g moves with the rounding of a + dt_bias by at most |a + dt_bias| * sigmoid, under (1 + |y|) * softplus."""
    y = arguments["a"].astype(np.float64) + arguments["dt_bias"].astype(np.float64)
    g, beta = (result.astype(np.float64) for result in results[-2:])
    return np.abs(g) * (1 + np.abs(y)), np.abs(beta)


_GATES = {
    "a": Tensor("T Hv", layout="rows"),
    "b": Tensor("T Hv", layout="rows"),
    "A_log": Tensor("Hv", _F32),
    "dt_bias": Tensor("Hv", _F32),
}
_GATE_WHY = "a + dt_bias, softplus and exp(A_log) within 1 ulp (2 roundings each), a product; the stores flip one"
_GATE_NAN = "propagates; beta(-inf) = 0; a of -inf gives g = -0, of +inf -inf"


@op(
    row=_ROW,
    rows="T",
    args={**_GATES, "rounding": _VARIANTS},
    returns={"g": Tensor("T Hv", _F32), "beta": Tensor("T Hv", FLOATS)},
    rounding={
        "vt": ("g = f32(-exp(A_log) * softplus(a + dt_bias))", "beta = f32(sigmoid(b))"),
        "vllm": ("g = f32(-exp(A_log) * softplus(a + dt_bias))", "beta = round(sigmoid(b)) to b's dtype"),
        "vllm_native": ("g = f32(-exp(A_log) * softplus(a + dt_bias))", "beta = round(sigmoid(b)) to b's dtype"),
    },
    parity=Parity("bytes"),
    mirror=Bound("6", scale=_gating_scale, ulps=1, why=_GATE_WHY),
    nan=_GATE_NAN,
    layout="a and b may be halves of one merged projection (row stride 2 * Hv)",
    upstream="vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py: fused_gdn_gating",
    examples=(
        {"T": 5, "Hv": 16, "a": "bfloat16", "b": "bfloat16"},
        {"T": 3, "Hv": 3},
        {"T": 3, "Hv": 4, "a": np.float32([[20, 20.001, 19.999, -20]] * 3), "b": "bfloat16", "rounding": "vllm"},
    ),
)
def gdn_g_beta(nx, a, b, A_log, dt_bias, *, rounding="vt"):
    """g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b): the decay (a logarithm) and the write strength.

    Shapes: a, b [T, Hv], rows may be strided; A_log, dt_bias float32 [Hv]; g float32 [T, Hv]; beta [T, Hv].
    softplus(y) = log1p(exp(y)); vLLM's threshold (y itself above 20) changes it by less than one part in 10^10.
    Rounding points: one each, g and beta to float32; "vllm" and "vllm_native" round beta to b's dtype,
    as fused_gdn_gating does (its CPU op differs by instruction set and is no reference).
    Errors: ContractError for mismatched shapes, A_log or dt_bias in another dtype.
    Source: Yang et al. 2024 (arXiv 2412.06464); vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py.
    """
    softplus = nx.softplus(nx.add(nx.load(a), nx.load(dt_bias)))
    g = nx.mul(nx.neg(nx.exp(nx.load(A_log))), softplus)
    beta = nx.sigmoid(nx.load(b))
    return nx.store(g, np.float32), nx.store(beta, np.float32 if rounding == "vt" else b.dtype)


def _post_conv_scale(arguments, results):
    return (*(np.abs(result.astype(np.float64)) for result in results[:3]), *_gating_scale(arguments, results))


def _lanes_add_up(arguments, axes):
    """the last axis of conv holds q and k of num_k_heads heads and v of Hv heads, all of them whole"""
    keys, heads = axes["Hk"] * axes["Dk"], axes["Hv"]
    values = axes["C"] - 2 * keys
    width = axes.get("Dv", values // max(heads, 1))
    if values < 0 or values != heads * width:
        want = f"2 * {keys} lanes of q and k, then v in Hv = {heads} heads" + f" of {width}" * ("Dv" in axes)
        raise refuse("conv", f"a last axis of {axes['C']}", want)


@op(
    row=_ROW,
    rows="T",
    args={
        "conv": Tensor("T C", layout="rows"),
        **_GATES,
        "num_k_heads": Scalar(int, minimum=1, axis="Hk", example=2),
        "head_k_dim": Scalar(int, minimum=1, axis="Dk", example=8),
        "head_v_dim": Scalar(int, minimum=0, axis="Dv", optional=True),
        "eps": Scalar(minimum=0),
        "out_dtype": Choice(FLOATS, optional=True),
    },
    returns={
        "q": Tensor("T Hk Dk", FLOATS),
        "k": Tensor("T Hk Dk", FLOATS),
        "v": Tensor("T Hv Dv", FLOATS),
        "g": Tensor("T Hv", _F32),
        "beta": Tensor("T Hv", _F32),
    },
    rounding=(
        "q, k = round(l2norm per head)",
        "v = round(v) where out_dtype is not conv's; else a copy",
        "g, beta as gdn_g_beta",
    ),
    order=str(TREE),
    parity=Parity("bytes"),
    mirror=Bound("max(6, (Dk/256 + 17) / 2 + 5)", scale=_post_conv_scale, ulps=1, why="as l2norm; " + _GATE_WHY),
    nan=_GATE_NAN,
    layout="conv, a and b may have strided rows; the results are contiguous",
    upstream="vllm/third_party/flash_linear_attention/ops/fused_gdn_prefill_post_conv.py: fused_post_conv_prep",
    examples=(
        {"T": 3, "C": 2 * 32 + 4 * 8, "Hv": 4, "num_k_heads": 4, "head_k_dim": 8, "conv": "bfloat16", "a": "bfloat16",
         "b": "bfloat16"},
        {"T": 2, "C": 2 * 6 + 4 * 5, "Hv": 4, "num_k_heads": 2, "head_k_dim": 3, "head_v_dim": 5,
         "out_dtype": "bfloat16"},
    ),
    requires=(_lanes_add_up,),
)  # fmt: skip
def gdn_post_conv(
    nx, conv, a, b, A_log, dt_bias, *, num_k_heads, head_k_dim, head_v_dim=None, eps=1e-6, out_dtype=None
):
    """q, k, v = split(conv) with q and k divided per head by their L2 norm; g, beta = gdn_g_beta(a, b, A_log, dt_bias).

    Shapes: conv [T, 2 * Hk * Dk + Hv * Dv] as [q | k | v]; a, b [T, Hv]; A_log, dt_bias float32 [Hv]; q, k [T, Hk, Dk]
    and v [T, Hv, Dv] in `out_dtype`, by default conv's; g, beta float32 [T, Hv]. Dv follows from the shapes; where
    `head_v_dim` is given it must be that.
    Rounding points: those of the chain gdn_conv_split, l2norm, l2norm, gdn_g_beta, whose bits these are.
    Errors: ContractError where the heads do not fill the last axis of conv.
    Source: vllm/third_party/flash_linear_attention/ops/fused_gdn_prefill_post_conv.py.
    """
    tokens, heads, keys = len(conv), len(A_log), num_k_heads * head_k_dim
    q, k, v = gdn_conv_split.body(nx, conv, key_dim=keys)
    q, k = (
        l2norm.body(nx, part.reshape(tokens, num_k_heads, head_k_dim), eps=eps, out_dtype=out_dtype) for part in (q, k)
    )
    v = v.reshape(tokens, heads, v.shape[-1] // max(heads, 1))
    if out_dtype not in (None, v.dtype):
        v = nx.store(nx.load(v), out_dtype)
    return q, k, v, *gdn_g_beta.body(nx, a, b, A_log, dt_bias)
