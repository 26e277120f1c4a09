"""What a checkpoint says about its model, in one shape: from Hugging Face's config.json or from GGUF metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vtlab.ops.errors import FormatError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of one decoder, under Hugging Face's names.

    Attributes
    ----------
    family : "llama", "qwen3" or "gemma3".
    softmax_scale : what attention scores are multiplied with. embedding_scale : sqrt(hidden_size) for Gemma, or 1.
    layer_types : "full_attention" or "sliding_attention" for each layer; `sliding_window` counts keys, itself included.
    rope : layer type -> rope_parameters in transformers 5's form (rope_type, rope_theta, …).
    stop_ids : tokens that end a generation.
    file : where it came from, for error messages.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    softmax_scale: float
    layer_types: tuple[str, ...]
    rope: Mapping[str, Mapping]
    sliding_window: int | None = None
    embedding_scale: float = 1.0
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    dtype: str = "float32"
    file: str = "config"

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            self._want(name, getattr(self, name) >= 1, "at least 1")
        kv = self.num_key_value_heads
        self._want("num_attention_heads", self.num_attention_heads % kv == 0, f"a multiple of {kv} key-value heads")
        self._want("head_dim", self.head_dim % 2 == 0, "an even number")
        self._want("rms_norm_eps", self.rms_norm_eps > 0, "> 0")
        layers = self.num_hidden_layers
        right = len(self.layer_types) == layers and set(self.layer_types) <= {FULL, SLIDING}
        self._want("layer_types", right, f"{layers} of {FULL} and {SLIDING}")
        self._want("sliding_window", SLIDING not in self.layer_types or (self.sliding_window or 0) >= 1, "at least 1")
        missing = set(self.layer_types) - set(self.rope)
        self._want("rope", not missing, f"parameters for {', '.join(sorted(missing))}")

    def _want(self, field: str, condition: bool, want: str) -> None:
        if not condition:
            raise FormatError(self.file, None, field, getattr(self, field), want)

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def gemma(self) -> bool:
        return self.family == "gemma3"

    @property
    def qk_norm(self) -> bool:
        return self.family != "llama"

    def window(self, layer: int) -> tuple[int, int] | None:
        """Keys left and right of a query that it sees, or None for all of them."""
        return (self.sliding_window - 1, 0) if self.layer_types[layer] == SLIDING else None

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """From `config.json` in a model folder; FormatError for what is missing, contradictory or unsupported."""
        from .config_hf import read

        file = Path(folder) / "config.json"
        if not file.is_file():
            raise FormatError(file, None, "config.json", "no such file", "a model's configuration")
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise FormatError(file, None, "config.json", error, "JSON") from None
        return read(data, file)

    @classmethod
    def from_gguf(cls, gguf) -> ModelConfig:
        """From an open GGUF file (`vtlab.gguf.reader.read_gguf`): its metadata and the names of its tensors."""
        from .config_gguf import read

        return read(gguf.metadata, gguf.tensors, gguf.path)


class Fields:
    """Typed look-ups in a mapping; every refusal is a FormatError that names the file and the field."""

    def __init__(self, data: Mapping, file: str | Path, prefix: str = ""):
        if not isinstance(data, Mapping):
            raise FormatError(file, None, prefix or "configuration", type(data).__name__, "an object")
        self.data, self.file, self.prefix = data, file, prefix

    def get(self, name: str) -> object:
        return self.data.get(self.prefix + name)

    def error(self, name: str, got: object, want: object) -> FormatError:
        return FormatError(self.file, None, self.prefix + name, "nothing" if got is None else repr(got), want)

    def integer(self, name: str, default: int | None = None) -> int:
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, bool) or value is None or not isinstance(value, (int, float)) or value != int(value):
            raise self.error(name, value, "an integer")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = default if self.get(name) is None else self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            raise self.error(name, value, "a finite number")
        return float(value)

    def only(self, name: str, allowed: tuple, default: object = None) -> object:
        """The field, refused unless it is one of `allowed` (a missing one reads as `default`)."""
        value = default if self.get(name) is None else self.get(name)
        if value not in allowed:
            raise self.error(name, value, " or ".join(map(repr, allowed)))
        return value
