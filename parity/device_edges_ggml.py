"""Shapes for GGML blocks: tiles of sixteen rows of weights, rows of a by fours, K beyond one unpacked chunk."""

from vtlab.ops.blocks import WEIGHT_TYPES

_SMALL = [kind for kind in WEIGHT_TYPES if not kind.endswith(("_K", "_XXS"))]
_ROWS = [
    *({"M": 3, "K": 512, "x": kind} for kind in ("float32", "bfloat16", "float16")),
    {"M": 40, "K": 768, "x": "float32"}, {"M": 1, "K": 0}, {"M": 0, "K": 256},
]  # fmt: skip

EDGES: dict[str, list[dict]] = {
    "quantize_row_q8_0": [*_ROWS, {"M": 3, "K": 96, "x": "float32"}],
    "quantize_row_q8_1": [*_ROWS, {"M": 3, "K": 96, "x": "float32"}],
    "quantize_row_q8_k": _ROWS,
    "matmul_bt_quant": [
        *({"M": M, "N": N, "K": 512, "quant_type": kind, "a": "float32"}
          for kind in WEIGHT_TYPES for M, N in ((1, 35), (6, 16), (67, 17))),
        *({"M": 2, "N": 18, "K": 4864, "quant_type": kind, "a": "bfloat16", "out_dtype": "bfloat16"}
          for kind in ("Q4_1", "Q5_0", "Q2_K", "Q4_K", "IQ3_XXS")),
        *({"M": 3, "N": 5, "K": 96, "quant_type": kind, "a": "float16"} for kind in _SMALL),
        {"M": 0, "N": 5, "K": 96, "quant_type": "Q8_0"}, {"M": 2, "N": 0, "K": 96, "quant_type": "Q8_0"},
    ],
    "embedding_quant": [
        *({"V": 5, "T": 7, "elements": 512, "quant_type": kind} for kind in WEIGHT_TYPES),
        {"V": 5, "T": 3, "elements": 256, "quant_type": "Q5_K", "ids": "int64", "out_dtype": "bfloat16"},
        {"V": 5, "T": 3, "elements": 96, "quant_type": "Q5_1", "out_dtype": "float16"},
    ],
}  # fmt: skip
