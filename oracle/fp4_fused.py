"""Activations and RMSNorm whose result goes straight into the NVFP4 quantiser.

Each op is its activation or norm, rounded as that op rounds its result, then `scaled_fp4_quant`: not a byte changes
against the two ops in a row. What stands between them never reaches memory.
"""

from __future__ import annotations

from vtlab.ops.contract import Bound, Flag, Parity, Scalar, Tensor, refuse
from vtlab.ops.nvfp4 import BLOCK
from vtlab.ops.table import op

from .activation import moe_silu_mul, silu_and_mul
from .fp4 import CODES, GLOBAL_SCALE, LAYOUT, NAN, SCALES, block_quant, global_scale_is_finite
from .gates import sigmoid_gate_bf16
from .norm import rms_norm

_ROW = "KERNEL-EW-NORM-QUANT"
_QUANT = {"input_global_scale": GLOBAL_SCALE, "is_sf_swizzled_layout": Flag()}
_RETURNS = {"out": CODES, "scale": SCALES}
_NAN = "as scaled_fp4_quant: " + NAN.partition(";")[0]
_WHY = (
    "y differs by the roundings of its op and may flip by a few storage ulps, which moves a scale by one code at most, "
    "and a code of e2m1 too: both are coarser, and no step of e4m3, an eighth at most, takes a value across two steps "
    "of e2m1, a quarter at least"
)
_BOUND = Bound("0", ulps=1, why=_WHY)
_POINTS = "scale, out as scaled_fp4_quant of y under vt"


def _whole_blocks(argument: str):
    def check(arguments, axes):
        if axes["K"] % BLOCK:
            raise refuse(argument, f"K = {axes['K']}", f"a multiple of {BLOCK}")

    check.__doc__ = "K is a multiple of 16"
    return check


def _quantised(nx, y, global_scale, swizzled):
    return block_quant(nx, nx.load(y), nx.load(global_scale), swizzled, "vt")


@op(
    row=_ROW,
    args={"gate": Tensor("... K"), "up": Tensor("... K", like="gate"), **_QUANT},
    returns=_RETURNS,
    rounding=("y = round(silu(gate) * up) to gate's dtype", _POINTS),
    parity=Parity("bytes"),
    mirror=_BOUND,
    nan=_NAN,
    layout=LAYOUT,
    upstream="vllm/compilation/passes/fusion/act_quant_fusion.py: silu_and_mul_nvfp4_quant, on two tensors",
    examples=(
        {"...": (5,), "K": 64, "gate": "bfloat16", "is_sf_swizzled_layout": False},
        {"...": (2, 3), "K": 48, "gate": "float32", "is_sf_swizzled_layout": True},
    ),
    requires=(_whole_blocks("gate"), global_scale_is_finite),
)
def silu_mul_fp4_quant(nx, gate, up, input_global_scale, *, is_sf_swizzled_layout=True):
    """y = silu(gate) * up, out, scale = scaled_fp4_quant(y).

    Shapes: gate, up [..., K], one dtype; input_global_scale float32 [1]; out uint8 [..., K/2], two codes a byte; scale
    uint8 [..., K/16], or in tiles [R, C].
    Rounding points: y to gate's dtype, as `moe_silu_mul` stores it, then those of `scaled_fp4_quant`.
    Errors: ContractError for mismatched shapes or dtypes, a K that is no multiple of 16, a global scale that is not
    finite.
    Source: vllm/compilation/passes/fusion/act_quant_fusion.py.
    """
    return _quantised(nx, moe_silu_mul.body(nx, gate, up), input_global_scale, is_sf_swizzled_layout)


@op(
    row=_ROW,
    args={"x": Tensor("... 2*K"), **_QUANT},
    returns=_RETURNS,
    rounding=("y = round(silu(gate) * up) to x's dtype", _POINTS),
    parity=Parity("bytes"),
    mirror=_BOUND,
    nan=_NAN,
    layout=LAYOUT,
    upstream="vllm/compilation/passes/fusion/act_quant_fusion.py: silu_and_mul_nvfp4_quant",
    examples=(
        {"...": (5,), "K": 64, "x": "bfloat16", "is_sf_swizzled_layout": False},
        {"...": (3,), "K": 80, "x": "float16", "is_sf_swizzled_layout": True},
    ),
    requires=(_whole_blocks("x"), global_scale_is_finite),
)
def silu_and_mul_fp4_quant(nx, x, input_global_scale, *, is_sf_swizzled_layout=True):
    """y = silu(x[..., :K]) * x[..., K:], out, scale = scaled_fp4_quant(y).

    Shapes: x [..., 2*K], gate half first; input_global_scale float32 [1]; out uint8 [..., K/2], two codes a byte; scale
    uint8 [..., K/16], or in tiles [R, C].
    Rounding points: y to x's dtype, once, as `silu_and_mul` stores it, then those of `scaled_fp4_quant`. vLLM's CUDA op
    takes fast exponentials and divisions on the way to y.
    Errors: ContractError for a K that is no multiple of 16, a global scale that is not finite.
    Source: vllm/compilation/passes/fusion/act_quant_fusion.py.
    """
    return _quantised(nx, silu_and_mul.body(nx, x), input_global_scale, is_sf_swizzled_layout)


@op(
    row=_ROW,
    args={
        "attn": Tensor("... K", ("bfloat16", "float32")),
        "gate": Tensor("... K", ("float32",)),
        **_QUANT,
    },
    returns=_RETURNS,
    rounding=("y = bf16(attn * sigmoid(gate))", _POINTS),
    parity=Parity("bytes"),
    mirror=_BOUND,
    nan=_NAN,
    layout=LAYOUT,
    upstream="vllm/model_executor/models/qwen3_next.py: attn_output * torch.sigmoid(gate), then scaled_fp4_quant",
    examples=(
        {"...": (5,), "K": 64, "attn": "bfloat16", "is_sf_swizzled_layout": False},
        {"...": (2, 3), "K": 48, "attn": "float32", "is_sf_swizzled_layout": True},
    ),
    requires=(_whole_blocks("attn"), global_scale_is_finite),
)
def sigmoid_gate_fp4_quant(nx, attn, gate, input_global_scale, *, is_sf_swizzled_layout=True):
    """y = attn * sigmoid(gate), out, scale = scaled_fp4_quant(y).

    Shapes: attn, gate [..., K]; input_global_scale float32 [1]; out uint8 [..., K/2], two codes a byte; scale uint8
    [..., K/16], or in tiles [R, C].
    Rounding points: y to bfloat16, whatever attn's dtype, as `sigmoid_gate_bf16` stores it, then those of
    `scaled_fp4_quant`.
    Errors: ContractError for mismatched shapes, a rounded gate, a K that is no multiple of 16, a global scale that is
    not finite.
    Source: vllm/model_executor/models/qwen3_next.py, Qwen3NextAttention.forward.
    """
    return _quantised(nx, sigmoid_gate_bf16.body(nx, attn, gate), input_global_scale, is_sf_swizzled_layout)


@op(
    row=_ROW,
    args={
        "x": Tensor("... K", layout="rows"),
        "weight": Tensor("K"),
        "input_global_scale": GLOBAL_SCALE,
        "residual": Tensor("... K", optional=True, layout="rows"),
        "eps": Scalar(minimum=0),
        "is_sf_swizzled_layout": Flag(),
    },
    returns={**_RETURNS, "residual": Tensor("... K", like="residual", optional=True)},
    rounding=("residual = round(x + residual)", "y = round(residual_or_x * inv * w) to x's dtype", _POINTS),
    order="that of rms_norm",
    parity=Parity("bytes"),
    mirror=_BOUND,
    nan=_NAN,
    layout="x and residual may be strided rows; " + LAYOUT,
    upstream="flashinfer: rmsnorm_fp4quant, add_rmsnorm_fp4quant",
    examples=(
        {"...": (5,), "K": 128, "x": "bfloat16", "weight": "bfloat16", "is_sf_swizzled_layout": False},
        {"...": (2, 3), "K": 48, "x": "bfloat16", "weight": "float32", "residual": "bfloat16",
         "is_sf_swizzled_layout": True},
    ),
    requires=(_whole_blocks("x"), global_scale_is_finite),
)  # fmt: skip
def rms_norm_fp4_quant(nx, x, weight, input_global_scale, *, residual=None, eps=1e-6, is_sf_swizzled_layout=True):
    """y = rms_norm(x, weight), out, scale = scaled_fp4_quant(y).

    Shapes: x, residual [..., K]; weight [K]; input_global_scale float32 [1]; out uint8 [..., K/2], two codes a byte;
    scale uint8 [..., K/16], or in tiles [R, C]. Returns `(out, scale)`, or `(out, scale, residual)` where a residual is
    given.
    Rounding points: those of `rms_norm`, then those of `scaled_fp4_quant`.
    Errors: ContractError for mismatched shapes, eps < 0, a K that is no multiple of 16, a global scale that is not
    finite.
    Source: FlashInfer, rmsnorm_fp4quant; Zhang and Sennrich 2019 (arXiv 1910.07467).
    """
    y = rms_norm.body(nx, x, weight, residual=residual, eps=eps)
    y, *new = y if isinstance(y, tuple) else (y,)
    return *_quantised(nx, y, input_global_scale, is_sf_swizzled_layout), *new
