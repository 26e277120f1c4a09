"""Shapes for GGML blocks: tiles of rows of weights, rows of a by eights, K beyond one unpacked chunk or some turns."""

import numpy as np

from vtlab.ops import dtypes
from vtlab.ops.blocks import LAYOUTS, WEIGHT_TYPES

_SMALL = [kind for kind in WEIGHT_TYPES if not kind.endswith(("_K", "_XXS"))]
_HALVES = (np.arange(256) % 253 - 126.5).astype(np.float32)[None]  # whose codes are halfway between two integers
_HALVES[0, 0] = 127


def _large_sums(N: int = 18, M: int = 3) -> dict:
    """Q4_0 whose codes are all of one sign, by rows that are too: integers that no longer fit 24 bits with a scale."""
    rng = np.random.Generator(np.random.PCG64(4))
    b = np.zeros((N, 8), LAYOUTS["Q4_0"].block)
    b["d"], b["qs"] = 0.0125 * rng.uniform(0.5, 1.5, b.shape), rng.integers(0, 4, (*b.shape, 16)) * 17
    a = rng.uniform(0.8, 1, (M, 256)).astype(np.float32)
    return {"M": M, "N": N, "K": 256, "quant_type": "Q4_0", "a": a, "b": b.view(np.uint8).reshape(N, -1)}


def _special(quant_type: str) -> dict:
    """Blocks of 256 of one row with equal extrema of both signs, NaN, zeros and sizes whose inverse is infinite."""
    a = np.random.Generator(np.random.PCG64(5)).standard_normal((1, 1536)).astype(np.float32)
    a[0, 3:5], a[0, 254] = (-9, 9), -9
    a[0, 258], a[0, 300] = 9, -9
    a[0, [520, 700]], a[0, 768:1024] = np.nan, 0
    a[0, 1024:1280] *= 1e-37
    a[0, 1280:1536] *= 1e-39
    return {"M": 1, "N": 18, "K": 1536, "quant_type": quant_type, "a": a}


def _many(kind: str) -> dict:
    """More than a few vectors: halves between two codes, equal extrema of both signs, what is not of the middle."""
    x = np.random.Generator(np.random.PCG64(6)).standard_normal((65, 4096)).astype(np.float32)
    x[0] = np.tile(_HALVES[0], 16)
    x[1] = -x[0]
    x[2, 3:5], x[2, 254], x[2, 258], x[2, 300] = (-9, 9), -9, 9, -9
    x[3, [40, 600]], x[3, [300, 900]], x[3, 1100], x[4, :512] = np.nan, np.inf, -np.inf, 0
    x[4, 512:1024] *= 1e-37
    x[4, 1024:1536] *= 1e-39
    x[4, 1536:2048] *= 1e37
    return {"M": 65, "K": 4096, "x": x.astype(dtypes.dtype(kind))}


_ROWS = [
    {"M": 1, "K": 256, "x": _HALVES},
    *({"M": 3, "K": 512, "x": kind} for kind in ("float32", "bfloat16", "float16")),
    {"M": 40, "K": 768, "x": "float32"}, {"M": 1, "K": 0}, {"M": 0, "K": 256},
    _many("float32"), _many("bfloat16"), {"M": 353, "K": 768, "x": "float16"},
]  # fmt: skip

_GROUPS = [kind for kind in WEIGHT_TYPES if kind != "Q2_K" and not kind.endswith("_XXS")]


def _grouped(kind: str, M: int, N: int, stages: int, **more) -> dict:
    """Rows of the weight that copies of sixteens bring, `stages` times as many blocks of 256 as that takes."""
    least = {"Q2_K": 1024, "Q3_K": 2048, "Q6_K": 2048}.get(kind, 256)
    return {"M": M, "N": N, "K": least * stages, "quant_type": kind, **more}


def _wild(kind: str) -> dict:
    """Values without a scale, or whose scale float16 does not hold, beside others in their rows."""
    a = np.random.Generator(np.random.PCG64(6)).standard_normal((40, 2048)).astype(np.float32)
    a[1, 70], a[2, 300], a[3, 700:730], a[4, 1024:1280], a[5] = np.nan, 3e7, -1e-9, 0, 0
    return _grouped(kind, 40, 66, 1 if kind == "Q6_K" else 8, a=a)


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
        {"M": 1, "N": 2120, "K": 6144, "quant_type": "Q3_K", "a": "bfloat16"},  # rows of many slots
        {"M": 1, "N": 2120, "K": 4096, "quant_type": "Q4_K", "a": "float16"},  # tiles that end with eight blocks
        *({"M": 1, "N": 17000, "K": 256, "quant_type": kind, "a": "float16"} for kind in ("Q4_0", "Q8_0")),  # a warp's
        *({"M": 1, "N": 9, "K": 25088, "quant_type": kind, "a": "float16"}
          for kind in ("Q4_0", "Q4_K", "Q6_K", "Q2_K", "IQ3_XXS")),  # slots of a ring used again, a in several times
        {"M": 1, "N": 75, "K": 4096, "quant_type": "IQ3_XXS", "a": "float32"},  # half a warp has two rows' blocks
        {"M": 1, "N": 26000, "K": 256, "quant_type": "IQ2_XXS", "a": "float16"},  # one block a row
        {"M": 1, "N": 3, "K": 25088, "quant_type": "IQ3_XXS", "a": "float16"},  # more blocks than warps that code
        {"M": 1, "N": 3042, "K": 4096, "quant_type": "IQ3_XXS", "a": "float32"},
        {"M": 1, "N": 6200, "K": 2048, "quant_type": "IQ2_XXS", "a": "float16"},
        {"M": 1, "N": 35, "K": 20736, "quant_type": "IQ2_XXS", "a": "float32"},
        {"M": 1, "N": 16, "K": 61440, "quant_type": "Q3_K", "a": "float16"},  # slots used again, by the same warp
        {"M": 1, "N": 16, "K": 40960, "quant_type": "IQ3_XXS", "a": "bfloat16"},  # and by two warps in turn
        {"M": 1, "N": 40, "K": 4864, "quant_type": "Q5_0", "a": "float16"},
        *({"M": M, "N": N, "K": 1312, "quant_type": kind, "a": "bfloat16", "out_dtype": "bfloat16"}
          for kind in ("Q4_0", "Q5_1") for M, N in ((11, 21), (20, 140))),  # a part of a stage, an odd number of eights
        *({"M": M, "N": N, "K": 1280, "quant_type": kind, "a": "float32"}
          for kind in ("Q4_K", "Q6_K", "Q2_K", "IQ2_XXS") for M, N in ((11, 21), (20, 70))),
        {"M": 2, "N": 33805, "K": 32, "quant_type": "Q8_0", "a": "float32"},  # shares of rows in two parts
        {"M": 2, "N": 14805, "K": 256, "quant_type": "Q4_K", "a": "float32"},
        *(_grouped(kind, M, N, stages, a="float32")
          for kind in _GROUPS for M, N, stages in ((20, 70, 1), (40, 131, 1), (67, 195, 1), (130, 64, 1))),
        *(_grouped(kind, M, N, 3, a="bfloat16", out_dtype="bfloat16")
          for kind in ("Q5_0", "Q4_K") for M, N in ((25, 135), (65, 260))),
        *(_grouped(kind, 130, 4300, 1, a="float16") for kind in ("Q4_0", "Q8_0")),  # tiles that are not cut in two
        _large_sums(70, 20), *(_wild(kind) for kind in ("Q4_0", "Q8_0", "Q5_1", "Q4_K", "Q6_K")),
        {"M": 0, "N": 5, "K": 96, "quant_type": "Q8_0"}, {"M": 2, "N": 0, "K": 96, "quant_type": "Q8_0"},
        {"M": 1, "N": 40, "K": 4352, "quant_type": "Q3_K", "a": "float32"},  # some rows' blocks at odd halves of words
        {"M": 1, "N": 9, "K": 25088, "quant_type": "Q3_K", "a": "float16"},  # lanes without a block
        *(_grouped("Q2_K", M, N, 1, a="float32") for M, N in ((20, 70), (40, 131), (67, 195), (130, 64))),
        *(_grouped(kind, M, N, 1, a="bfloat16", out_dtype="bfloat16")  # tiles enough; two of 64 rows of a
          for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K") for M, N in ((33, 8450), (65, 4226))),
        *(_grouped(kind, 7, 140, 1, a="float16") for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")),
    ],
    "embedding_quant": [
        *({"V": 5, "T": 7, "elements": 512, "quant_type": kind} for kind in WEIGHT_TYPES),
        {"V": 5, "T": 3, "elements": 256, "quant_type": "Q5_K", "ids": "int64", "out_dtype": "bfloat16"},
        {"V": 5, "T": 3, "elements": 96, "quant_type": "Q5_1", "out_dtype": "float16"},
    ],
}  # fmt: skip
