"""Mamba-2's gated norm over groups of channels."""

from __future__ import annotations

from vtlab.ops.contract import Bound, Choice, Parity, Scalar, Tensor, refuse
from vtlab.ops.table import op

from .causal_conv import ROW
from .norm import TREE, inverse_rms
from .ssd import OPS


def _groups_divide(arguments, axes):
    """the last axis is a multiple of the groups"""
    if axes["W"] % arguments["groups"]:
        raise refuse("groups", arguments["groups"], f"a divisor of {axes['W']}")


@op(
    row=ROW,
    rows="...",
    args={
        "y": Tensor("... W"),
        "z": Tensor("... W", like="y"),
        "weight": Tensor("W"),
        "groups": Scalar(int, minimum=1),
        "eps": Scalar(minimum=0),
        "rounding": Choice(("vt", "vllm", "vllm_native")),
    },
    returns={"out": Tensor("... W", like="y")},
    rounding={
        "vt": ("scaled = round(y silu(z) / rms) to y's dtype", "out = round(scaled weight) to y's dtype"),
        "vllm": ("out = round(y silu(z) / rms weight)",),
        "vllm_native": ("as vt",),
    },
    order=str(TREE),
    parity=Parity("bytes"),
    mirror=Bound(
        "(W/256 + 17) / 2 + 12", ulps=3, why="SiLU within 1 ulp twice, the norm as rms_norm; a flip before weight"
    ),
    nan="propagates within its row's group",
    upstream=OPS + "layernorm_gated.py: rms_norm_gated; mamba_mixer2.py: Mixer2RMSNormGated",
    examples=(
        {"...": (3,), "W": 24, "groups": 3},
        {"...": (2, 2), "W": 32, "y": "bfloat16", "weight": "bfloat16", "rounding": "vllm"},
        {"...": (2,), "W": 40, "y": "bfloat16", "weight": "bfloat16", "groups": 2, "rounding": "vllm_native"},
    ),
    requires=(_groups_divide,),
)
def mamba2_rmsnorm_gated(nx, y, z, weight, *, groups=1, eps=1e-5, rounding="vt"):
    """out = h / sqrt(mean(h^2) + eps) weight, h = y silu(z), the mean over each of `groups` parts of the last axis.

    Shapes: y, z, out [..., W] of one dtype; weight [W]; W a multiple of `groups`.
    Rounding points: "vt" and "vllm_native" (several groups in vLLM) round before the weight; "vllm" (its kernel, for
    one group) rounds once.
    Errors: ContractError for W not divisible by groups, eps < 0.
    Source: vLLM's layernorm_gated.py and mamba_mixer2.py.
    """
    gate = nx.load(z)
    gated = nx.mul(nx.load(y), nx.silu(gate))
    parts = gated.reshape(*gated.shape[:-1], groups, gated.shape[-1] // groups)
    scaled = nx.mul(parts, inverse_rms(nx, parts, eps)).reshape(gated.shape)
    if rounding != "vllm":
        scaled = nx.load(nx.store(scaled, y.dtype))
    return nx.store(nx.mul(scaled, nx.load(weight)), y.dtype)
