"""Storage dtypes by name, and the groups of them that contracts speak of."""

from __future__ import annotations

import ml_dtypes
import numpy as np

_NAMES = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn, "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64, "bool": np.bool_,
}  # fmt: skip

FLOATS = ("float32", "bfloat16", "float16")
IDS = ("int32", "int64")
ANY = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "int64")


def dtype(name: object) -> np.dtype:
    """The NumPy dtype of a name such as "bfloat16" (dtypes pass through); KeyError for a name nobody knows."""
    return np.dtype(_NAMES[name]) if isinstance(name, str) else np.dtype(name)
