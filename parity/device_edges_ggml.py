"""Shapes for GGML blocks: tiles of rows of weights, rows of a by eights, K beyond one unpacked chunk or some turns."""

import numpy as np

from vtlab.ops.blocks import LAYOUTS, WEIGHT_TYPES

_SMALL = [kind for kind in WEIGHT_TYPES if not kind.endswith(("_K", "_XXS"))]
_HALVES = (np.arange(256) % 253 - 126.5).astype(np.float32)[None]  # whose codes are halfway between two integers
_HALVES[0, 0] = 127


def _large_sums() -> dict:
    """Q4_0 whose codes are all of one sign, by rows that are too: integers that no longer fit 24 bits with a scale."""
    rng = np.random.Generator(np.random.PCG64(4))
    b = np.zeros((18, 2), LAYOUTS["Q4_0"].block)
    b["d"], b["qs"] = 0.0125 * rng.uniform(0.5, 1.5, b.shape), rng.integers(0, 4, (*b.shape, 16)) * 17
    a = rng.uniform(0.8, 1, (3, 64)).astype(np.float32)
    return {"M": 3, "N": 18, "K": 64, "quant_type": "Q4_0", "a": a, "b": b.view(np.uint8).reshape(18, -1)}


def _special(quant_type: str) -> dict:
    """Blocks of 256 of one row with equal extrema of both signs, NaN, zeros and sizes whose inverse is infinite."""
    a = np.random.Generator(np.random.PCG64(5)).standard_normal((1, 1536)).astype(np.float32)
    a[0, 3:5], a[0, 254] = (-9, 9), -9
    a[0, 258], a[0, 300] = 9, -9
    a[0, [520, 700]], a[0, 768:1024] = np.nan, 0
    a[0, 1024:1280] *= 1e-37
    a[0, 1280:1536] *= 1e-39
    return {"M": 1, "N": 18, "K": 1536, "quant_type": quant_type, "a": a}


_ROWS = [
    {"M": 1, "K": 256, "x": _HALVES},
    *({"M": 3, "K": 512, "x": kind} for kind in ("float32", "bfloat16", "float16")),
    {"M": 40, "K": 768, "x": "float32"}, {"M": 1, "K": 0}, {"M": 0, "K": 256},
]  # fmt: skip

EDGES: dict[str, list[dict]] = {
    "quantize_row_q8_0": [*_ROWS, {"M": 3, "K": 96, "x": "float32"}],
    "quantize_row_q8_1": [*_ROWS, {"M": 3, "K": 96, "x": "float32"}],
    "quantize_row_q8_k": _ROWS,
    "matmul_bt_quant": [
        _large_sums(), *(_special(kind) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q6_K")),
        *({"M": 2, "N": 18, "K": 4864, "quant_type": kind, "a": "bfloat16", "out_dtype": "bfloat16"}
          for kind in ("Q4_1", "Q5_0", "Q2_K", "Q4_K", "IQ3_XXS")),
        *({"M": M, "N": N, "K": 512, "quant_type": kind, "a": "float32"}
          for kind in WEIGHT_TYPES for M, N in ((1, 35), (6, 16), (67, 17))),
        *({"M": M, "N": 5, "K": 96, "quant_type": kind, "a": "float16"} for kind in _SMALL for M in (1, 3)),
        *({"M": 1, "N": 2120, "K": 4864, "quant_type": kind, "a": "bfloat16", "out_dtype": "bfloat16"}
          for kind in ("Q4_K", "Q6_K", "Q2_K", "IQ2_XXS")),  # slots with blocks of two tiles
        *({"M": 1, "N": 17000, "K": 256, "quant_type": kind, "a": "float16"} for kind in ("Q4_0", "Q8_0")),  # a warp's
        *({"M": 1, "N": 9, "K": 25088, "quant_type": kind, "a": "float16"}
          for kind in ("Q4_0", "Q4_K", "Q6_K", "Q2_K", "IQ3_XXS")),  # slots of a ring used again, a in several times
        {"M": 1, "N": 75, "K": 4096, "quant_type": "IQ3_XXS", "a": "float32"},  # lanes with blocks eight apart
        {"M": 1, "N": 26000, "K": 256, "quant_type": "IQ2_XXS", "a": "float16"},  # more stretches than slots
        {"M": 1, "N": 40, "K": 4864, "quant_type": "Q5_0", "a": "float16"},
        *({"M": M, "N": N, "K": 1312, "quant_type": kind, "a": "bfloat16", "out_dtype": "bfloat16"}
          for kind in ("Q4_0", "Q5_1") for M, N in ((11, 21), (20, 140))),  # a part of a stage, an odd number of eights
        *({"M": M, "N": N, "K": 1280, "quant_type": kind, "a": "float32"}
          for kind in ("Q4_K", "Q6_K", "Q2_K", "IQ2_XXS") for M, N in ((11, 21), (20, 70))),
        {"M": 2, "N": 33805, "K": 32, "quant_type": "Q8_0", "a": "float32"},  # shares of rows in two parts
        {"M": 2, "N": 14805, "K": 256, "quant_type": "Q4_K", "a": "float32"},
        {"M": 0, "N": 5, "K": 96, "quant_type": "Q8_0"}, {"M": 2, "N": 0, "K": 96, "quant_type": "Q8_0"},
    ],
    "embedding_quant": [
        *({"V": 5, "T": 7, "elements": 512, "quant_type": kind} for kind in WEIGHT_TYPES),
        {"V": 5, "T": 3, "elements": 256, "quant_type": "Q5_K", "ids": "int64", "out_dtype": "bfloat16"},
        {"V": 5, "T": 3, "elements": 96, "quant_type": "Q5_1", "out_dtype": "float16"},
    ],
}  # fmt: skip
