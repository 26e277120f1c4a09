"""From a path to a model that generates."""

from __future__ import annotations

from pathlib import Path

from vtlab.gguf.reader import read_gguf
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.errors import ContractError

from .config import ModelConfig
from .decoder import Decoder
from .engine import Engine
from .safetensors import read_safetensors
from .tokenizer import Tokenizer
from .weights import Weights


def load_decoder(path: str | Path, dtype: str | None = None, max_positions: int | None = None) -> Decoder:
    """The forward of a checkpoint: a `.gguf` file, or a folder with config.json and safetensors.

    dtype : "float32", "bfloat16" or "float16"; by default what config.json says, float32 for GGUF.
    Errors: FormatError for a file that is broken, incomplete or of another architecture; ContractError for a dtype
    that no model computes in.
    """
    path = Path(path)
    if dtype not in (None, *FLOATS):
        raise ContractError("load", "dtype", dtype, " or ".join(FLOATS))
    if path.suffix == ".gguf":
        gguf = read_gguf(path)
        config = ModelConfig.from_gguf(gguf)
        return Decoder(config, Weights.from_gguf(config, gguf, dtype or config.dtype), max_positions)
    config = ModelConfig.from_folder(path)
    return Decoder(config, Weights.from_tensors(config, read_safetensors(path), dtype or config.dtype), max_positions)


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None for a folder that has none."""
    path = Path(path)
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(read_gguf(path).metadata, path)
    return Tokenizer.from_folder(path) if (path / "tokenizer.json").is_file() else None


def load(path: str | Path, dtype: str | None = None, **engine) -> Engine:
    """An `Engine` over the checkpoint at `path`; keyword arguments are the engine's."""
    cache = engine.get("num_blocks", 128) * engine.get("block_size", 16)
    return Engine(load_decoder(path, dtype, max_positions=cache), load_tokenizer(path), **engine)
