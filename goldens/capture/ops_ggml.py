"""GGML goldens from llama.cpp's generic C code: quantisers, dot products of every weight type, lookups, an interleave.

Runs wherever NumPy and safetensors are; the shared objects come from a wheel of llama-cpp-python:

    python goldens/capture/ops_ggml.py --library .../site-packages/llama_cpp/lib --out goldens/ops

Use a build without instruction sets (GGML_NATIVE, GGML_AVX, GGML_AVX2 and GGML_FMA off, -ffp-contract=off): others let
the compiler fuse products and sums of the generic loops, and GCC 12 for AVX-512 VNNI takes Q5_0's signed codes for
unsigned ones.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import platform
from pathlib import Path

import numpy as np
from about import isa_flags, script_digest
from ggml_library import BLOCK_BYTES, SUFFIXES, Library
from safetensors.numpy import save_file

BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ2_XXS": (256, 66),
    "IQ3_XXS": (256, 98),
}  # fmt: skip
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
          "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ2_XXS": (0,), "IQ3_XXS": (0,)}  # fmt: skip
PARTNERS = {kind: suffix[suffix.index("_q8") + 1 :].upper() for kind, suffix in SUFFIXES.items()}
ROWS, LENGTH = 6, 512


def generator(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(list(name.encode())))


def weights(kind: str, rows: int, length: int) -> np.ndarray:
    """Random codes under scales of either sign."""
    elements, nbytes = BLOCKS[kind]
    rng = generator(f"w{kind}")
    raw = rng.integers(0, 256, (rows, length // elements, nbytes), dtype=np.uint8)
    for size, at in zip((0.0125, 0.0075), HALVES[kind]):
        scale = (size * (0.5 + rng.random(raw.shape[:2]))).astype("<f2")
        scale[rng.random(scale.shape) < 0.2] *= -1
        raw[..., at : at + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def activations(length: int) -> dict[str, np.ndarray]:
    """Rows by name: normal data, the page's cosine, ties of the extremum, spikes, zeros, huge and small values."""
    rng = generator("a")
    normal = rng.standard_normal((3, length)).astype(np.float32)
    tie = rng.uniform(-1, 1, length).astype(np.float32)
    tie[[3, 9, 255, 256]] = 1.5, -1.5, 1.5, -1.5
    spikes = np.zeros((2, length), np.float32)
    spikes[0, 77], spikes[1, 77] = 3.25, -3.25
    halves = (np.arange(length) % 255 - 127).astype(np.float32) / 2 + 0.25
    halves[::32] = 127
    return {
        "normal": normal, "cosine": (0.1 + 2 * np.cos(np.arange(length) + 3.0)).astype(np.float32)[None],
        "tie": np.stack([tie, -tie]), "spikes": spikes, "zeros": np.zeros((1, length), np.float32),
        "huge": normal[:1] * np.float32(1e30), "small": normal[:1] * np.float32(1e-30), "halves": halves[None],
    }  # fmt: skip


class Record:
    """Cases and their arrays; equal arrays are stored once."""

    def __init__(self):
        self.cases, self.arrays, self.keys = [], {}, {}

    def _store(self, name: str, array: np.ndarray) -> str:
        content = str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).digest()
        key = self.keys.setdefault(content, name)
        self.arrays.setdefault(key, np.ascontiguousarray(array))
        return key

    def case(self, op: str, name: str, function: str, arguments: dict, inputs: dict, out: np.ndarray) -> None:
        stored = {part: self._store(f"{op}.{name}.{part}", array) for part, array in inputs.items()}
        outputs = {"out": self._store(f"{op}.{name}.out", out)}
        self.cases.append({"op": op, "name": name, "function": function, "arguments": arguments, "inputs": stored,
                           "outputs": outputs})  # fmt: skip


def capture(library: Library) -> Record:
    record = Record()
    rows = activations(LENGTH)
    for kind in BLOCK_BYTES:
        for name, x in rows.items():
            out = np.stack([library.quantise(row, kind) for row in x])
            record.case(f"quantize_row_{kind.lower()}", name, f"quantize_row_{kind}_ref", {}, {"x": x}, out)
    rng = generator("vec_dot")
    x = np.concatenate([rng.standard_normal((ROWS - 2, LENGTH)).astype(np.float32), rows["cosine"], rows["tie"][:1]])
    for kind in BLOCKS:
        w = weights(kind, ROWS, LENGTH)
        a = np.stack([library.quantise(row, PARTNERS[kind]) for row in x])
        out = np.array([library.vec_dot(one, two, LENGTH, kind) for one, two in zip(w, a)])
        function = f"ggml_vec_dot_{SUFFIXES[kind]}_generic"
        record.case("vec_dot", kind, function, {"quant_type": kind}, {"w": w, "a": a}, out)
        ids = np.array([5, 0, 5, 2], np.int32)
        picked = np.stack([library.dequantise(w[i], LENGTH, kind) for i in ids])
        record.case("embedding_quant", kind, f"dequantize_row_{kind}", {"quant_type": kind},
                    {"table": w, "ids": ids}, picked)  # fmt: skip
    four = rows["normal"][[0, 1, 2, 0]] * np.float32([[1], [1], [1], [2]])
    blocks = np.stack([library.quantise(row, "Q8_0") for row in four])
    function = "ggml_quantize_mat_q8_0_4x8_generic"
    record.case("repack_q8_0x4", "4x512", function, {}, {"b": blocks}, library.interleave(four)[None])
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    library = Library(arguments.library)
    record = capture(library)
    script = Path(__file__)
    provenance = {
        "ggml": library.version, "library_sha256": script_digest(arguments.library / "libggml-cpu.so"), "build": "cpu",
        "gpu": None, "numpy": np.__version__, "python": platform.python_version(), "isa": isa_flags(),
        "captured": datetime.date.today().isoformat(), "script": f"goldens/capture/{script.name}",
        "script_sha256": script_digest(script),
    }  # fmt: skip
    target = arguments.out / "ggml.cpu.safetensors"
    text = json.dumps({"provenance": provenance, "cases": record.cases, "errors": {}})
    save_file(record.arrays, target, {"vtlab": text})
    target.chmod(0o644)
    print(f"{target}: {len(record.cases)} cases, {target.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
