"""Fused chains with vLLM's rounding: what the catalogue's chains of the same steps do in the rounding of vt::.

They differ where a norm's weight has another dtype than its input, as Gemma's float32(1 + w) has in bfloat16.
"""

from __future__ import annotations

from vtlab.ops.fusion import Param, Recipe, declare, step

_DTYPES = ("bfloat16 bfloat16 bfloat16", "float32 float32 float32", "bfloat16 float32 bfloat16")
_HOW = {"eps": Param("eps"), "rounding": "vllm"}

ADD_NORM = declare(Recipe(
    "fused_add_rms_norm_vllm", {"x": "... H", "weight": "H", "residual": "... H"},
    (step("rms_norm", "out residual", x="x", weight="weight", residual="residual", **_HOW),),
    "out residual", {"eps": 1e-6}, dtypes=_DTYPES,
))  # fmt: skip

# The norm after a block, the residual, the norm before the next block.
SANDWICH = declare(Recipe(
    "sandwich_norm_vllm", {"x": "... H", "post_weight": "H", "residual": "... H", "pre_weight": "H"},
    (
        step("rms_norm", "y", x="x", weight="post_weight", **_HOW),
        step("rms_norm", "out residual", x="y", weight="pre_weight", residual="residual", **_HOW),
    ),
    "out residual", {"eps": 1e-6},
    dtypes=("bfloat16 bfloat16 bfloat16 bfloat16", "float32 float32 float32 float32",
            "bfloat16 float32 bfloat16 float32"),
))  # fmt: skip
