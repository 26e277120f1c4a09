"""From a path to a model that generates."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from vtlab.gguf.reader import GGUFFile, read_gguf
from vtlab.ops.arrays import Arrays
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.errors import ContractError

from .config import ModelConfig
from .decoder import Decoder
from .engine import Engine
from .families import FAMILIES
from .quant import default_weights
from .safetensors import read_safetensors
from .tokenizer import Tokenizer
from .weights import Weights


def load_decoder(
    path: str | Path | GGUFFile,
    dtype: str | None = None,
    max_positions: int | None = None,
    weights: str = "dequantized",
    kv_dtype: str | None = None,
) -> Decoder:
    """The forward of a checkpoint: a `.gguf` file, open or not, or a folder with config.json and safetensors.

    dtype : "float32", "bfloat16" or "float16"; by default what config.json says, float32 for GGUF.
    weights : "blocks" keeps the matrices of a GGUF file in its blocks, and activations meet them in eight bits;
    "packed" keeps those of a quantised folder in its format, and activations meet them as the format says;
    "dequantized" expands them.
    kv_dtype : as in `Decoder`.
    Errors: FormatError for a file that is broken, incomplete or of another architecture; ContractError for a dtype
    that no model computes in, for blocks of a file that has none.
    """
    is_gguf = _is_gguf(path)
    if weights not in (("blocks", "dequantized") if is_gguf else ("packed", "dequantized")):
        want = "blocks or dequantized for a .gguf file, packed or dequantized for a folder"
        raise ContractError("load", "weights", weights, want)
    if dtype not in (None, *FLOATS):
        raise ContractError("load", "dtype", dtype, " or ".join(FLOATS))
    if is_gguf:
        gguf = _opened(path)
        config = ModelConfig.from_gguf(gguf)
        held = Weights.from_gguf(config, gguf, dtype or config.dtype, weights == "blocks")
        gguf.forget()  # of most of what was read there are copies now
        return Decoder(config, held, max_positions, kv_dtype=kv_dtype)
    config = ModelConfig.from_folder(path)
    held = Weights.from_tensors(config, read_safetensors(path), dtype or config.dtype, weights == "packed")
    return Decoder(config, held, max_positions, kv_dtype=kv_dtype)


def load_tokenizer(path: str | Path | GGUFFile) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None for a folder that has none."""
    if _is_gguf(path):
        gguf = _opened(path)
        return Tokenizer.from_gguf(gguf.metadata, gguf.path)
    path = Path(path)
    return Tokenizer.from_folder(path) if (path / "tokenizer.json").is_file() else None


def load(
    path: str | Path, dtype: str | None = None, weights: str | None = None, kv_dtype: str | None = None, **engine
) -> Engine:
    """An `Engine` over the checkpoint at `path`; keyword arguments are the engine's.

    weights : as in `load_decoder`; by default "blocks" for a .gguf file in float32 or bfloat16 on the CPU, and for a
    quantised folder what `quant.default_weights` says. kv_dtype : as in `Decoder`.
    """
    cache = engine.get("num_blocks", 128) * engine.get("block_size", 16)
    if weights is None:
        weights = _default_weights(path, dtype, engine.get("device") or "cpu")
    source = _opened(path) if _is_gguf(path) else path
    tokenizer = load_tokenizer(source)
    give_back()  # building a vocabulary takes several times the memory that it keeps
    decoder = load_decoder(source, dtype, cache, weights, kv_dtype)
    del source  # and with it the metadata
    give_back()
    return Engine(decoder, tokenizer, **engine)


def _default_weights(path: str | Path, dtype: str | None, device: str | Arrays) -> str:
    place = device if isinstance(device, str) else device.device
    if _is_gguf(path):
        return "blocks" if place == "cpu" and dtype != "float16" else "dequantized"
    config = ModelConfig.from_folder(path)
    return default_weights(config, FAMILIES[config.family].slots(config), dtype or config.dtype, place)


def give_back() -> None:
    """Hand the memory that was freed back to the system, where the C library can."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc; on Windows no program to look into
        ctypes.CDLL(None).malloc_trim(0)


def _is_gguf(path: str | Path | GGUFFile) -> bool:
    return isinstance(path, GGUFFile) or Path(path).suffix == ".gguf"


def _opened(path: str | Path | GGUFFile) -> GGUFFile:
    return path if isinstance(path, GGUFFile) else read_gguf(path)
