"""Edge shapes of the int8 quantisers' kernels and of FP8 under given scales: vectors, lanes, blocks, groups."""

from __future__ import annotations

import numpy as np

_KINDS = ("bfloat16", "float16", "float32")
_EVERY = np.arange(256, dtype=np.uint8).reshape(2, 128)

EDGES: dict[str, list[dict]] = {
    "static_scaled_int8_quant": [
        *({"...": (5,), "K": K, "x": kind, **more}
          for K, kind in ((264, "bfloat16"), (40, "float16"), (7, "float32"))
          for more in ({}, {"azp": "int32"}, {"rounding": "cpu"}, {"rounding": "cpu", "azp": "int32"})),
        *({"...": (2,), "K": 16, "azp": np.int32([azp])} for azp in (2**31 - 1, -(2**31))),
        {"...": (9, 3), "K": 5120, "x": "bfloat16"}, {"...": (0,), "K": 8}, {"...": (2,), "K": 0},
    ],
    "dynamic_scaled_int8_quant": [
        *({"...": (5,), "K": K, "x": kind, "symmetric": symmetric, "rounding": rounding}
          for K, kind in ((264, "bfloat16"), (24, "bfloat16"), (40, "float16"), (7, "bfloat16"), (16, "float32"))
          for symmetric, rounding in ((True, "cuda"), (False, "cuda"), (False, "cpu"), (True, "triton_token"))),
        *({"...": (3,), "K": 2056, "x": "bfloat16", "symmetric": symmetric} for symmetric in (True, False)),
        {"...": (300,), "K": 1032, "x": "bfloat16", "symmetric": False, "rounding": "cpu"},
        {"...": (300,), "K": 1032, "x": "bfloat16", "rounding": "cpu"},
        {"...": (2,), "K": 9000, "x": "bfloat16"}, {"...": (2,), "K": 9000, "x": "bfloat16", "symmetric": False},
        {"...": (0,), "K": 8}, {"...": (2,), "K": 0},
        *({"...": (2,), "K": 16, "x": np.full((2, 16), 3.5, np.float32), "symmetric": symmetric}
          for symmetric in (True, False)),
        *({"...": (2,), "K": 8, "x": np.full((2, 8), np.nan, np.float32), "symmetric": symmetric}
          for symmetric in (True, False)),
    ],
    "per_token_group_quant_int8": [
        *({"...": (5,), "K": G * size, "G": G, "group_size": size, "x": kind}
          for G, size, kind in ((2, 128, "bfloat16"), (3, 8, "float16"), (2, 64, "float32"), (3, 24, "bfloat16"),
                                (2, 40, "float32"), (1, 512, "bfloat16"))),
        {"...": (300,), "K": 2048, "G": 16, "x": "bfloat16"},
        {"...": (520,), "K": 1024, "G": 32, "group_size": 32, "x": "bfloat16"},
        {"...": (2,), "K": 128, "G": 1, "x": np.zeros((2, 128), np.float32)}, {"...": (2,), "K": 0, "G": 0},
    ],
    "scaled_fp8_quant_static_group": [
        *({"M": 9, "K": 264, "R": R, "C": C, "x": kind, "rounding": rounding}
          for R, C, kind, rounding in ((1, 1, "bfloat16", "vt"), (9, 1, "bfloat16", "vllm"), (1, 264, "float16", "vt"),
                                       (3, 33, "bfloat16", "vllm_native"), (9, 3, "float32", "vt"),
                                       (3, 22, "bfloat16", "vt"))),
        {"M": 300, "K": 1024, "R": 300, "C": 8, "x": "bfloat16"},
        *({"M": 1042, "K": 1040, "R": R, "C": C, "x": "bfloat16", "rounding": "vllm"}
          for R, C in ((521, 2), (1, 1040))),
        {"M": 3, "K": 16, "R": 1, "C": 16, "x": "bfloat16",
         "scale": np.float32([[2.0**-120, 0.3, 2.0**-100, *[0.7] * 13]])},
        {"M": 9, "K": 264, "R": 1, "C": 264, "x": "bfloat16"},
        {"M": 0, "K": 8, "R": 1, "C": 1}, {"M": 4, "K": 7, "R": 2, "C": 7},
    ],
    "requantize_with_max_scale": [
        {"N": 8, "K": 32, "S": 3, "logical_widths": [5, 1, 2]}, {"N": 6, "K": 7, "S": 2, "logical_widths": [3, 3]},
        {"N": 300, "K": 64, "S": 2, "logical_widths": [200, 100]}, {"N": 0, "K": 8, "S": 2, "logical_widths": [0, 0]},
        {"N": 44, "K": 32, "S": 11, "logical_widths": [4, 5, 3, 0, 8, 1, 6, 5, 4, 2, 6]},
        {"N": 700, "K": 32, "S": 9, "logical_widths": [100, 0, 300, 40, 60, 0, 90, 10, 100]},
        {"N": 2, "K": 128, "S": 2, "logical_widths": [1, 1], "weight": _EVERY,
         "weight_scale": np.float32([0.5, 0.37])},
        {"N": 2, "K": 128, "S": 2, "logical_widths": [1, 1], "weight": _EVERY,
         "weight_scale": np.float32([300, 0.25])},
        {"N": 2, "K": 128, "S": 2, "logical_widths": [1, 1], "weight": _EVERY,
         "weight_scale": np.float32([0.5, -448])},
    ],
}  # fmt: skip
"""Axes as in `Contract.examples`, by op."""
