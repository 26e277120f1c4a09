"""Tiny random checkpoints in Hugging Face format, the same bytes on every machine.

Every value is `offset + scale * u`, u uniform with unit variance from the raw PCG64 stream whose seed is the
SHA-256 of "<checkpoint>/<tensor>": integer draws, one float32 product and one float32 sum, so no library's
normal sampler is part of the definition. bfloat16 checkpoints hold the float32 values rounded to nearest even.

Their configurations, tensor names and sizes are in recipes/, a module for each family.

Needs NumPy only: the capture scripts load this file by path inside vLLM's own environment. The safetensors
container (a length, a JSON header, the bytes) is written here because safetensors changed the arguments of its
`serialize` between 0.7 and 0.8 and its NumPy front end has no bfloat16 of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

_CODES = {"float32": "F32", "bfloat16": "BF16"}  # safetensors' own names


def _recipes():
    """The package beside this file, by path: where goldens are captured there is no vtlab to import it from."""
    name, start = "vtlab_goldens_recipes", Path(__file__).with_name("recipes") / "__init__.py"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, start, submodule_search_locations=[str(start.parent)])
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name].RECIPES


_RECIPES = _recipes()
CHECKPOINTS: dict[str, dict] = {name: dict(recipe.config) for name, recipe in _RECIPES.items()}


def values(checkpoint: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of one tensor: offset + scale * u, u uniform on a 2**24 grid with unit variance."""
    name = hashlib.sha256(f"{checkpoint}/{tensor}".encode()).digest()
    raw = np.random.PCG64(int.from_bytes(name, "little")).random_raw(int(np.prod(shape)))
    unit = ((raw >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0).astype(np.float32)
    offset, scale = _RECIPES[checkpoint].offset_and_scale(tensor, shape)
    return (np.float32(offset) + np.float32(scale * 3**0.5) * unit).reshape(shape)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) of finite float32 values, rounded to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensors(checkpoint: str, dtype: str = "float32") -> dict[str, np.ndarray]:
    """All tensors by Hugging Face name: float32 arrays, or uint16 bit patterns for "bfloat16"."""
    if dtype not in _CODES:
        raise ValueError(f"dtype: got {dtype!r}, want 'float32' or 'bfloat16'")
    store = bfloat16_bits if dtype == "bfloat16" else np.asarray
    recipe = _RECIPES[checkpoint]
    return {name: store(values(checkpoint, name, shape)) for name, shape in recipe.shapes(recipe.config)}


def _little_endian(data: np.ndarray) -> bytes:
    return data.astype(data.dtype.newbyteorder("<")).tobytes()


def digest(checkpoint: str, dtype: str = "float32") -> str:
    """SHA-256 over (name, dtype, shape, little-endian bytes) of every tensor, in order of name."""
    total = hashlib.sha256()
    for name, data in sorted(tensors(checkpoint, dtype).items()):
        total.update(f"{name} {dtype} {list(data.shape)}\n".encode() + _little_endian(data))
    return total.hexdigest()


def write_checkpoint(checkpoint: str, folder: str | Path, dtype: str = "float32") -> str:
    """Write config.json and model.safetensors into `folder`; the `digest` of what was written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CHECKPOINTS[checkpoint], "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    blobs, at = [], 0
    for name, data in tensors(checkpoint, dtype).items():
        blobs.append(_little_endian(data))
        span = [at, at := at + len(blobs[-1])]
        header[name] = {"dtype": _CODES[dtype], "shape": list(data.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    return digest(checkpoint, dtype)
