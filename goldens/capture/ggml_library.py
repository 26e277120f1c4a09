"""ggml's generic C functions through ctypes, from the shared objects that the wheel of llama-cpp-python brings.

`Library(folder)` takes the folder with libggml-base.so and libggml-cpu.so; `installed()` finds it without importing
llama_cpp. Every function takes and gives NumPy arrays of one row.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

import numpy as np

SUFFIXES = {
    "Q4_0": "q4_0_q8_0", "Q4_1": "q4_1_q8_1", "Q5_0": "q5_0_q8_0", "Q5_1": "q5_1_q8_1", "Q8_0": "q8_0_q8_0",
    "Q2_K": "q2_K_q8_K", "Q3_K": "q3_K_q8_K", "Q4_K": "q4_K_q8_K", "Q5_K": "q5_K_q8_K", "Q6_K": "q6_K_q8_K",
    "IQ2_XXS": "iq2_xxs_q8_K", "IQ3_XXS": "iq3_xxs_q8_K",
}  # fmt: skip
QUANTISERS = {"Q8_0": "quantize_row_q8_0_ref", "Q8_1": "quantize_row_q8_1_ref", "Q8_K": "quantize_row_q8_K_ref"}
BLOCK_BYTES = {"Q8_0": (32, 34), "Q8_1": (32, 36), "Q8_K": (256, 292)}


def installed() -> Path | None:
    """The folder of the libraries: that of VTLAB_GGML, else that of an installed llama_cpp, else None."""
    named = os.environ.get("VTLAB_GGML")
    spec = None if named else importlib.util.find_spec("llama_cpp")
    folder = Path(named) if named else Path(spec.origin).parent / "lib" if spec and spec.origin else None
    return folder if folder and (folder / "libggml-cpu.so").exists() else None


class Library:
    """The functions of one build."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
        self.cpu.ggml_cpu_init()  # fills the table of half floats
        self.base.ggml_version.restype = ctypes.c_char_p
        self.version = self.base.ggml_version().decode()

    def quantise(self, x: np.ndarray, quant_type: str) -> np.ndarray:
        """float32 [K] -> uint8 [bytes]."""
        elements, nbytes = BLOCK_BYTES[quant_type]
        out = np.zeros(len(x) // elements * nbytes, np.uint8)
        x = np.ascontiguousarray(x, np.float32)
        getattr(self.base, QUANTISERS[quant_type])(_at(x), _at(out), ctypes.c_int64(len(x)))
        return out

    def vec_dot(self, w: np.ndarray, a: np.ndarray, length: int, quant_type: str) -> np.float32:
        """The dot product of `length` values, by the generic C code."""
        result = np.zeros(1, np.float32)
        w, a = np.ascontiguousarray(w), np.ascontiguousarray(a)
        function = getattr(self.cpu, f"ggml_vec_dot_{SUFFIXES[quant_type]}_generic")
        zero = ctypes.c_size_t(0)
        function(ctypes.c_int(length), _at(result), zero, _at(w), zero, _at(a), zero, ctypes.c_int(1))
        return result[0]

    def dequantise(self, blocks: np.ndarray, length: int, quant_type: str) -> np.ndarray:
        """uint8 [bytes] -> float32 [length]."""
        out, blocks = np.zeros(length, np.float32), np.ascontiguousarray(blocks)
        name = SUFFIXES[quant_type].partition("_q8")[0]
        getattr(self.base, f"dequantize_row_{name}")(_at(blocks), _at(out), ctypes.c_int64(length))
        return out

    def interleave(self, x: np.ndarray) -> np.ndarray:
        """float32 [4, K] -> the blocks of Q8_0 of four rows, in chunks of eight codes."""
        out = np.zeros(x.shape[1] // 32 * 136, np.uint8)
        x = np.ascontiguousarray(x, np.float32)
        self.cpu.ggml_quantize_mat_q8_0_4x8_generic(_at(x), _at(out), ctypes.c_int64(x.shape[1]))
        return out


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
