"""The fused patterns that models and vLLM's compiler passes name, each a declaration."""

from __future__ import annotations

from .binding import catalogue
from .recipe import Param, Recipe, step

_EPS, _EPS_VALUE = Param("eps"), {"eps": 1e-6}
_ROW, _TWO_ROWS = "... H", "... 2*H"
_NORM = {"x": _ROW, "weight": "H"}
_ADD_NORM = {**_NORM, "residual": _ROW}


def _b(count: int, *more: str) -> str:
    """`count` times bfloat16, then more dtypes."""
    return " ".join(["bfloat16"] * count + list(more))


def _f(count: int) -> str:
    return " ".join(["float32"] * count)


def _norm(to: str, **more):
    return step("rms_norm", to, x="x", weight="weight", eps=_EPS, **more)


def _static(of: str = "y"):
    return step("quant_fp8_static", "out", x=of, scale="scale")


def _per_token(of: str = "y"):
    return step("dynamic_per_token_scaled_fp8_quant", "out scale", x=of)


def _per_group(of: str = "y"):
    return step("per_token_group_quant_fp8", "out scale", x=of, group_size=128)


def _fp4(swizzled: bool, of: str = "y"):
    return step("scaled_fp4_quant", "out scale", x=of, input_global_scale="input_global_scale",
                is_sf_swizzled_layout=swizzled)  # fmt: skip


for _name, _gemma in (("fused_add_rms_norm", True), ("fused_add_rms_norm_std", False)):
    catalogue(Recipe(
        _name, _ADD_NORM, (_norm("out residual", residual="residual", gemma=_gemma),), "out residual", _EPS_VALUE,
        dtypes=(_b(3), _f(3), _b(2, "float32")),
    ))  # fmt: skip

for _name, _gemma in (("rms_norm_quant_fp8", True), ("fused_add_rms_norm_quant_fp8_std", False)):
    catalogue(Recipe(
        _name, {**_ADD_NORM, "scale": "1"}, (_norm("y residual", residual="residual", gemma=_gemma), _static()),
        "out residual", _EPS_VALUE, dtypes=(_b(3, "float32"), _b(2, "float32", "float32"), _f(4)),
        fast=step("rms_norm_quant_fp8", "out residual", x="x", weight="weight", residual="residual", scale="scale",
                  eps=_EPS, gemma=_gemma),
    ))  # fmt: skip

catalogue(Recipe(
    "rms_norm_gated_quant_fp8", {"x": _ROW, "gate": _ROW, "weight": "H", "scale": "1"},
    (step("rms_norm_gated", "y", x="x", gate="gate", weight="weight", eps=_EPS, out_dtype="bfloat16"), _static()),
    "out", _EPS_VALUE, dtypes=(_b(3, "float32"), _f(4)),
    fast=step("rms_norm_gated_quant_fp8", "out", x="x", gate="gate", weight="weight", scale="scale", eps=_EPS),
))  # fmt: skip

catalogue(Recipe(
    "silu_mul_quant_fp8", {"gate": _ROW, "up": _ROW, "scale": "1"},
    (step("moe_silu_mul", "y", gate="gate", up="up"), _static()), "out", dtypes=(_b(2, "float32"), _f(3)),
))  # fmt: skip

catalogue(Recipe(
    "silu_and_mul_quant_fp8", {"x": _TWO_ROWS, "scale": "1"}, (step("silu_and_mul", "y", x="x"), _static()), "out",
    dtypes=(_b(1, "float32"), _f(2)), fast=step("silu_and_mul_quant", "out", x="x", scale="scale"),
))  # fmt: skip

catalogue(Recipe(
    "sigmoid_gate_quant_fp8", {"attn": _ROW, "gate": _ROW, "scale": "1"},
    (step("sigmoid_gate_bf16", "y", attn="attn", gate="gate"), _static()), "out",
    dtypes=(_b(1, "float32", "float32"), _f(3)),
))  # fmt: skip

catalogue(Recipe(
    "rms_norm_quant_per_token", _NORM, (_norm("y"), _per_token()), "out scale", _EPS_VALUE, dtypes=(_b(2), _f(2)),
    fast=step("rms_norm_dynamic_per_token_quant", "out scale", x="x", weight="weight", eps=_EPS,
              quant_dtype="float8_e4m3fn"),
))  # fmt: skip

catalogue(Recipe(
    "fused_add_rms_norm_quant_per_token", _ADD_NORM, (_norm("y residual", residual="residual"), _per_token()),
    "out scale residual", _EPS_VALUE, dtypes=(_b(3), _f(3)),
    fast=step("rms_norm_dynamic_per_token_quant", "out scale residual", x="x", weight="weight", residual="residual",
              eps=_EPS, quant_dtype="float8_e4m3fn"),
))  # fmt: skip

catalogue(Recipe(
    "fused_add_rms_norm_quant_per_group", _ADD_NORM, (_norm("y residual", residual="residual"), _per_group()),
    "out scale residual", _EPS_VALUE, dtypes=(_b(3), _f(3)),
))  # fmt: skip

catalogue(Recipe(
    "silu_and_mul_quant_per_group", {"x": _TWO_ROWS}, (step("silu_and_mul", "y", x="x"), _per_group()), "out scale",
    dtypes=(_b(1), _f(1)),
))  # fmt: skip

for _swizzled in (False, True):
    _scale = {"input_global_scale": "1"}
    _layout, _more = ("_swizzled", ()) if _swizzled else ("", (_f(3),))
    catalogue(Recipe(
        "silu_mul_fp4_quant" + _layout, {"gate": _ROW, "up": _ROW, **_scale},
        (step("moe_silu_mul", "y", gate="gate", up="up"), _fp4(_swizzled)), "out scale",
        dtypes=(_b(2, "float32"), *_more),
    ))  # fmt: skip
    catalogue(Recipe(
        "sigmoid_gate_fp4_quant" + _layout, {"attn": _ROW, "gate": _ROW, **_scale},
        (step("sigmoid_gate_bf16", "y", attn="attn", gate="gate"), _fp4(_swizzled)), "out scale",
        dtypes=(_b(1, "float32", "float32"), *_more),
    ))  # fmt: skip
    catalogue(Recipe(
        "silu_and_mul_fp4_quant" + _layout, {"x": _TWO_ROWS, **_scale},
        (step("silu_and_mul", "y", x="x"), _fp4(_swizzled)), "out scale", dtypes=(_b(1, "float32"),),
    ))  # fmt: skip
    catalogue(Recipe(
        "rms_norm_fp4_quant" + _layout, {**_NORM, **_scale}, (_norm("y"), _fp4(_swizzled)), "out scale", _EPS_VALUE,
        dtypes=(_b(2, "float32"),),
    ))  # fmt: skip
    catalogue(Recipe(
        "fused_add_rms_norm_fp4_quant" + _layout, {**_ADD_NORM, **_scale},
        (_norm("y residual", residual="residual"), _fp4(_swizzled)), "out scale residual", _EPS_VALUE,
        dtypes=(_b(3, "float32"),),
    ))  # fmt: skip

catalogue(Recipe(  # Gemma 2 and 3: the norm after a block, the residual, the norm before the next block
    "sandwich_norm", {"x": _ROW, "post_weight": "H", "residual": _ROW, "pre_weight": "H"},
    (
        step("rms_norm", "y", x="x", weight="post_weight", eps=_EPS, gemma=True),
        step("rms_norm", "out residual", x="y", weight="pre_weight", residual="residual", eps=_EPS, gemma=True),
    ),
    "out residual", _EPS_VALUE, dtypes=(_b(4), _f(4)),
))  # fmt: skip

# The same two where vLLM rounds, which shows where a weight has another dtype than the rows, as Gemma's float32(1 + w)
# has in bfloat16. Models take these.
_VLLM = {"eps": _EPS, "rounding": "vllm"}
catalogue(Recipe(
    "fused_add_rms_norm_vllm", _ADD_NORM,
    (step("rms_norm", "out residual", x="x", weight="weight", residual="residual", **_VLLM),),
    "out residual", _EPS_VALUE, dtypes=(_b(3), _f(3), "bfloat16 float32 bfloat16"),
))  # fmt: skip

catalogue(Recipe(
    "sandwich_norm_vllm", {"x": _ROW, "post_weight": "H", "residual": _ROW, "pre_weight": "H"},
    (
        step("rms_norm", "y", x="x", weight="post_weight", **_VLLM),
        step("rms_norm", "out residual", x="y", weight="pre_weight", residual="residual", **_VLLM),
    ),
    "out residual", _EPS_VALUE, dtypes=(_b(4), _f(4), "bfloat16 float32 bfloat16 float32"),
))  # fmt: skip

catalogue(Recipe(  # OPT's MLP after its first product
    "bias_relu", {"x": _ROW, "bias": "H"}, (step("add", "y", a="x", b="bias"), step("relu", "out", x="y")), "out",
    dtypes=(_b(2), _f(2)),
))  # fmt: skip

catalogue(Recipe(
    "attn_qk_norm_rope_gate",
    {"qgate": "T Hq*2*D", "kf": "T Hk*D", "q_norm": "D", "k_norm": "D", "cos_sin": "T R"},
    (step("attn_qk_norm_rope_gate", "q k gate", qgate="qgate", kf="kf", q_norm="q_norm", k_norm="k_norm",
          cos_sin="cos_sin", eps=_EPS),),
    "q k gate", _EPS_VALUE, examples=(
        {"T": 3, "Hq": 2, "Hk": 1, "D": 64, "R": 16, "q_norm": "float32", "k_norm": "float32"},
    ),
))  # fmt: skip

catalogue(Recipe(
    "attn_qk_norm_rope",
    {"q": "T Hq D", "q_norm": "D", "k": "T Hk D", "k_norm": "D", "positions": "T", "cos_sin_cache": "P R"},
    (
        step("rms_norm", "q", x="q", weight="q_norm", eps=_EPS),
        step("rms_norm", "k", x="k", weight="k_norm", eps=_EPS),
        step("rope_from_cache", "q k", q="q", k="k", positions="positions", cos_sin_cache="cos_sin_cache"),
    ),
    "q k", _EPS_VALUE, examples=({"T": 3, "Hq": 2, "Hk": 1, "D": 64, "P": 20, "R": 64, "positions": "int64"},),
))  # fmt: skip
